//! Structured replies ("Structured reply chunk message"), and the only metadata context that the server has,
//! `base:allocation`.
//!
//! Every structured reply is a single chunk, so the flag DF ("don't fragment") is always honoured. Once
//! structured replies are negotiated, reads and BLOCK_STATUS use them. All other commands use simple replies,
//! which the protocol allows ("Simple reply message").

use super::errno;
use super::wire::{be16, be32, be64};
use cleat_core::request::IoError;
use cleat_core::volume::Extent;

/// The name of the metadata context that reports which parts of the volume are allocated.
pub const ALLOCATION: &[u8] = b"base:allocation";
/// The context ID that the server assigns to [`ALLOCATION`].
pub const ALLOCATION_ID: u32 = 1;

/// The length of a chunk's header in bytes.
pub const CHUNK_HEADER_LEN: usize = 20;
/// The length of a chunk of type `OFFSET_DATA` without the data that was read, in bytes.
pub const READ_HEADER_LEN: usize = CHUNK_HEADER_LEN + 8;
/// The length of a chunk of type `ERROR` without a message, in bytes.
pub const ERROR_LEN: usize = CHUNK_HEADER_LEN + 6;
/// The length of a chunk of type `BLOCK_STATUS` without its extents, in bytes.
pub const STATUS_HEADER_LEN: usize = CHUNK_HEADER_LEN + 4;
/// The length of one extent descriptor in bytes.
pub const EXTENT_LEN: usize = 8;

const CHUNK_MAGIC: u32 = 0x668e_33ef;
/// Marks the last chunk of a reply ("Structured reply flags").
const DONE: u16 = 1 << 0;

/// The types of chunks ("Structured reply types").
pub mod chunk {
    #![allow(missing_docs)]
    pub const OFFSET_DATA: u16 = 1;
    pub const BLOCK_STATUS: u16 = 5;
    pub const ERROR: u16 = 1 << 15 | 1;
}

/// The flags of an extent in [`ALLOCATION`] ("`base:allocation` metadata context").
mod state {
    pub(super) const HOLE: u32 = 1 << 0;
    pub(super) const ZERO: u32 = 1 << 1;
}

/// Returns the bytes that precede the `length` bytes of data in the reply to a read at `offset`.
pub fn read_header(cookie: u64, offset: u64, length: u32) -> [u8; READ_HEADER_LEN] {
    let mut bytes = [0; READ_HEADER_LEN];
    put_header(&mut bytes, chunk::OFFSET_DATA, cookie, length.saturating_add(8));
    bytes[CHUNK_HEADER_LEN..].copy_from_slice(&offset.to_be_bytes());
    bytes
}

/// Returns the reply to a request that failed.
pub fn error(cookie: u64, error: IoError) -> [u8; ERROR_LEN] {
    let mut bytes = [0; ERROR_LEN];
    put_header(&mut bytes, chunk::ERROR, cookie, 6);
    let errno = errno::to_wire(Err(error));
    bytes[CHUNK_HEADER_LEN..CHUNK_HEADER_LEN + 4].copy_from_slice(&errno.to_be_bytes());
    bytes
}

/// Returns the length in bytes of a block status with this number of extents.
pub fn status_len(extents: usize) -> usize {
    STATUS_HEADER_LEN + extents * EXTENT_LEN
}

/// Writes a block status to `bytes`, whose length must be [`status_len`] of the number of extents.
///
/// # Panics
/// Panics if `bytes` is shorter than [`STATUS_HEADER_LEN`], or if an extent has 4 GiB or more.
pub fn put_status(bytes: &mut [u8], cookie: u64, extents: &[Extent]) {
    let length = u32::try_from(bytes.len() - CHUNK_HEADER_LEN).expect("extents are few");
    put_header(bytes, chunk::BLOCK_STATUS, cookie, length);
    bytes[CHUNK_HEADER_LEN..STATUS_HEADER_LEN].copy_from_slice(&ALLOCATION_ID.to_be_bytes());
    let descriptors = bytes[STATUS_HEADER_LEN..].chunks_exact_mut(EXTENT_LEN);
    for (descriptor, extent) in descriptors.zip(extents) {
        let length = u32::try_from(extent.length).expect("a request's length has 32 bits");
        let flags = if extent.hole { state::HOLE | state::ZERO } else { 0 };
        descriptor[..4].copy_from_slice(&length.to_be_bytes());
        descriptor[4..].copy_from_slice(&flags.to_be_bytes());
    }
}

fn put_header(bytes: &mut [u8], kind: u16, cookie: u64, length: u32) {
    bytes[..4].copy_from_slice(&CHUNK_MAGIC.to_be_bytes());
    bytes[4..6].copy_from_slice(&DONE.to_be_bytes());
    bytes[6..8].copy_from_slice(&kind.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..20].copy_from_slice(&length.to_be_bytes());
}

/// Parses a chunk's header for a client. Returns the chunk's type, cookie and length, or `None` if the bytes
/// are not the header of the last chunk of a reply. This server sends no other chunks.
pub fn parse_header(bytes: &[u8; CHUNK_HEADER_LEN]) -> Option<(u16, u64, u32)> {
    (be32(bytes, 0) == CHUNK_MAGIC && be16(bytes, 4) == DONE)
        .then(|| (be16(bytes, 6), be64(bytes, 8), be32(bytes, 16)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_encoded_as_specified() {
        let read = read_header(0xabcd, 0x1000, 512);
        let mut expected = vec![0x66, 0x8e, 0x33, 0xef, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0xab, 0xcd];
        expected.extend([0, 0, 2, 8, 0, 0, 0, 0, 0, 0, 0x10, 0]);
        assert_eq!(read[..], expected[..]);
        let failed = error(1, IoError::Invalid);
        assert_eq!(failed[4..8], [0, 1, 0x80, 1]);
        assert_eq!(failed[16..], [0, 0, 0, 6, 0, 0, 0, 22, 0, 0]);
        let extents = [(512, true), (1024, false)].map(|(length, hole)| Extent { length, hole });
        let mut status = vec![0xee; status_len(2)];
        put_status(&mut status, 1, &extents);
        assert_eq!(status[4..8], [0, 1, 0, 5]);
        let data = [0, 0, 0, 20, 0, 0, 0, 1, 0, 0, 2, 0, 0, 0, 0, 3, 0, 0, 4, 0, 0, 0, 0, 0];
        assert_eq!(status[16..], data);
        let header = status.first_chunk().unwrap();
        assert_eq!(parse_header(header), Some((chunk::BLOCK_STATUS, 1, 20)));
    }
}
