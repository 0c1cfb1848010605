//! Structured replies, for clients that have negotiated them, and the one meta context that there is.
//!
//! A read is answered by a single chunk in any case, so "do not fragment" is kept without effort; all
//! other commands but BLOCK_STATUS go on with simple replies, as the specification allows.

use super::errno;
use super::wire::{be16, be32, be64};
use cleat_core::request::IoError;
use cleat_core::volume::Extent;

/// The context of what is allocated.
pub const ALLOCATION: &[u8] = b"base:allocation";
/// Our number for it.
pub const ALLOCATION_ID: u32 = 1;

/// Bytes of a chunk's header.
pub const CHUNK_HEADER_LEN: usize = 20;
/// Bytes before the data of a read.
pub const READ_HEADER_LEN: usize = CHUNK_HEADER_LEN + 8;
/// Bytes of an error without a message.
pub const ERROR_LEN: usize = CHUNK_HEADER_LEN + 6;
/// Bytes of a block status before its extents.
pub const STATUS_HEADER_LEN: usize = CHUNK_HEADER_LEN + 4;
/// Bytes of each extent.
pub const EXTENT_LEN: usize = 8;

const CHUNK_MAGIC: u32 = 0x668e_33ef;
const DONE: u16 = 1 << 0;

/// Types of chunks.
pub mod chunk {
    #![allow(missing_docs)]
    pub const OFFSET_DATA: u16 = 1;
    pub const BLOCK_STATUS: u16 = 5;
    pub const ERROR: u16 = 1 << 15 | 1;
}

/// Flags of an extent in [`ALLOCATION`].
mod state {
    pub(super) const HOLE: u32 = 1 << 0;
    pub(super) const ZERO: u32 = 1 << 1;
}

/// What stands before the `length` bytes of a read at `offset`.
pub fn read_header(cookie: u64, offset: u64, length: u32) -> [u8; READ_HEADER_LEN] {
    let mut bytes = [0; READ_HEADER_LEN];
    put_header(&mut bytes, chunk::OFFSET_DATA, cookie, length.saturating_add(8));
    bytes[CHUNK_HEADER_LEN..].copy_from_slice(&offset.to_be_bytes());
    bytes
}

/// A request that failed.
pub fn error(cookie: u64, error: IoError) -> [u8; ERROR_LEN] {
    let mut bytes = [0; ERROR_LEN];
    put_header(&mut bytes, chunk::ERROR, cookie, 6);
    let errno = errno::to_wire(Err(error));
    bytes[CHUNK_HEADER_LEN..CHUNK_HEADER_LEN + 4].copy_from_slice(&errno.to_be_bytes());
    bytes
}

/// Bytes of a block status of so many extents.
pub fn status_len(extents: usize) -> usize {
    STATUS_HEADER_LEN + extents * EXTENT_LEN
}

/// Fills `bytes`, which are [`status_len`] long, with a block status.
pub fn put_status(bytes: &mut [u8], cookie: u64, extents: &[Extent]) {
    let length = u32::try_from(bytes.len() - CHUNK_HEADER_LEN).expect("extents are few");
    put_header(bytes, chunk::BLOCK_STATUS, cookie, length);
    bytes[CHUNK_HEADER_LEN..STATUS_HEADER_LEN].copy_from_slice(&ALLOCATION_ID.to_be_bytes());
    let places = bytes[STATUS_HEADER_LEN..].chunks_exact_mut(EXTENT_LEN);
    for (place, extent) in places.zip(extents) {
        let length = u32::try_from(extent.length).expect("a request's length has 32 bits");
        let flags = if extent.hole { state::HOLE | state::ZERO } else { 0 };
        place[..4].copy_from_slice(&length.to_be_bytes());
        place[4..].copy_from_slice(&flags.to_be_bytes());
    }
}

fn put_header(bytes: &mut [u8], kind: u16, cookie: u64, length: u32) {
    bytes[..4].copy_from_slice(&CHUNK_MAGIC.to_be_bytes());
    bytes[4..6].copy_from_slice(&DONE.to_be_bytes());
    bytes[6..8].copy_from_slice(&kind.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..20].copy_from_slice(&length.to_be_bytes());
}

/// A chunk's type, cookie and length, as a client reads them; `None` for anything but a chunk that is
/// the last of its reply, as all of ours are.
pub fn parse_header(bytes: &[u8; CHUNK_HEADER_LEN]) -> Option<(u16, u64, u32)> {
    (be32(bytes, 0) == CHUNK_MAGIC && be16(bytes, 4) == DONE)
        .then(|| (be16(bytes, 6), be64(bytes, 8), be32(bytes, 16)))
}

/// The data of LIST_META_CONTEXT and SET_META_CONTEXT.
pub(super) struct ContextQuery<'a> {
    /// Of the export.
    pub(super) name: &'a [u8],
    queries: &'a [u8],
    count: u32,
}

impl<'a> ContextQuery<'a> {
    /// `None` unless every length inside is right.
    pub(super) fn parse(data: &'a [u8]) -> Option<Self> {
        let (name, rest) = string(data)?;
        let (count, queries) = rest.split_at_checked(4)?;
        let query = Self { name, queries, count: be32(count, 0) };
        let mut rest = queries;
        for _ in 0..query.count {
            // Each takes four bytes at least, so a false count ends soon.
            (_, rest) = string(rest)?;
        }
        rest.is_empty().then_some(query)
    }

    /// Whether [`ALLOCATION`] is asked for by name.
    pub(super) fn sets_allocation(&self) -> bool {
        self.any(|query| query == ALLOCATION)
    }

    /// Whether [`ALLOCATION`] belongs to a list of what is asked for: all, a name space, or by name.
    pub(super) fn lists_allocation(&self) -> bool {
        self.count == 0 || self.any(|query| query == b"base:" || query == ALLOCATION)
    }

    fn any(&self, is_meant: impl Fn(&[u8]) -> bool) -> bool {
        let mut rest = self.queries;
        while let Some((query, after)) = string(rest) {
            if is_meant(query) {
                return true;
            }
            rest = after;
        }
        false
    }
}

/// A string behind its length, and what follows.
fn string(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = data.split_at_checked(4)?;
    rest.split_at_checked(usize::try_from(be32(length, 0)).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_have_the_bytes_of_the_specification() {
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

    fn query(name: &[u8], queries: &[&[u8]]) -> Vec<u8> {
        let length = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap().to_be_bytes();
        let mut data = [&length(name), name].concat();
        data.extend(u32::try_from(queries.len()).unwrap().to_be_bytes());
        queries.iter().for_each(|query| data.extend([&length(query), *query].concat()));
        data
    }

    #[test]
    fn queries_are_understood_or_refused() {
        for (queries, lists, sets) in [
            (&[][..], true, false),
            (&[&b"base:"[..]], true, false),
            (&[ALLOCATION], true, true),
            (&[b"qemu:dirty-bitmap:x", ALLOCATION], true, true),
            (&[b"base:allocation:"], false, false),
            (&[b"qemu:"], false, false),
        ] {
            let data = query(b"disk", queries);
            let parsed = ContextQuery::parse(&data).unwrap();
            assert_eq!(parsed.name, b"disk");
            assert_eq!((parsed.lists_allocation(), parsed.sets_allocation()), (lists, sets));
            for end in 0..data.len() {
                assert!(ContextQuery::parse(&data[..end]).is_none(), "cut at {end}");
            }
            assert!(ContextQuery::parse(&[&data[..], b"x"].concat()).is_none());
        }
        let absurd = [&[0; 4][..], &[0xff; 4], &[0; 64]].concat();
        assert!(ContextQuery::parse(&absurd).is_none());
    }
}
