//! The codec: the constants of the protocol, and its messages as bytes. All integers are big-endian
//! ("Conventions").

use cleat_core::request::IoError;
use cleat_core::volume::{BlockSizes, Features};

use super::errno;

// The handshake ("Newstyle negotiation", "Fixed newstyle negotiation").

/// The first eight bytes that the server sends.
pub const INIT_MAGIC: u64 = u64::from_be_bytes(*b"NBDMAGIC");
/// The next eight bytes that the server sends, and the first eight bytes of each option.
pub const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
/// The first eight bytes of each option reply.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// Handshake and client flag: the side supports fixed newstyle, in which an unknown option gets an error
/// reply and does not end the connection.
pub const FLAG_FIXED_NEWSTYLE: u16 = 1 << 0;
/// Handshake and client flag: the reply to EXPORT_NAME has no padding.
pub const FLAG_NO_ZEROES: u16 = 1 << 1;

/// The options that a client may send ("Option types").
pub mod option {
    #![allow(missing_docs)]
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const STARTTLS: u32 = 5;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// The types of option replies ("Option reply types").
pub mod reply {
    #![allow(missing_docs)]
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    pub const ERR_UNSUP: u32 = ERROR | 1;
    pub const ERR_INVALID: u32 = ERROR | 3;
    pub const ERR_UNKNOWN: u32 = ERROR | 6;
    pub const ERR_BLOCK_SIZE_REQD: u32 = ERROR | 8;
    pub const ERR_TOO_BIG: u32 = ERROR | 9;
    /// The bit that is set in the type of every error.
    pub const ERROR: u32 = 1 << 31;
}

/// The kinds of information about an export that a client may request with INFO and GO ("Option reply
/// types").
pub mod info {
    #![allow(missing_docs)]
    pub const EXPORT: u16 = 0;
    pub const NAME: u16 = 1;
    pub const DESCRIPTION: u16 = 2;
    pub const BLOCK_SIZE: u16 = 3;
}

/// The length of an option without its data, in bytes.
pub const OPTION_HEADER_LEN: usize = 16;

/// The header of an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionHeader {
    /// The number of the option: see [`option`].
    pub option: u32,
    /// The length in bytes of the data that follows. The client has chosen it, and it is not checked.
    pub length: u32,
}

impl OptionHeader {
    /// Parses a header. Returns `None` if its magic number is wrong.
    pub fn parse(bytes: &[u8; OPTION_HEADER_LEN]) -> Option<Self> {
        (be64(bytes, 0) == OPTION_MAGIC)
            .then(|| Self { option: be32(bytes, 8), length: be32(bytes, 12) })
    }
}

/// Appends the server's greeting, which ends with the handshake flags.
pub fn put_greeting(out: &mut Vec<u8>) {
    out.extend(INIT_MAGIC.to_be_bytes());
    out.extend(OPTION_MAGIC.to_be_bytes());
    out.extend((FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES).to_be_bytes());
}

/// Appends a reply of type `kind` to `option`.
///
/// # Panics
/// Panics if `data` has 4 GiB or more. The server creates the data itself, and it is short.
pub fn put_option_reply(out: &mut Vec<u8>, option: u32, kind: u32, data: &[u8]) {
    out.extend(OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend(option.to_be_bytes());
    out.extend(kind.to_be_bytes());
    let length = u32::try_from(data.len()).expect("replies to options are short");
    out.extend(length.to_be_bytes());
    out.extend(data);
}

/// Returns the data of an INFO reply of kind [`info::EXPORT`]. `size` is in bytes.
pub fn info_export(size: u64, transmission_flags: u16) -> [u8; 12] {
    let mut data = [0; 12];
    data[..2].copy_from_slice(&info::EXPORT.to_be_bytes());
    data[2..10].copy_from_slice(&size.to_be_bytes());
    data[10..].copy_from_slice(&transmission_flags.to_be_bytes());
    data
}

/// Returns the data of an INFO reply of kind [`info::BLOCK_SIZE`].
pub fn info_block_size(sizes: BlockSizes) -> [u8; 14] {
    let mut data = [0; 14];
    data[..2].copy_from_slice(&info::BLOCK_SIZE.to_be_bytes());
    data[2..6].copy_from_slice(&sizes.minimum.to_be_bytes());
    data[6..10].copy_from_slice(&sizes.preferred.to_be_bytes());
    data[10..].copy_from_slice(&sizes.maximum.to_be_bytes());
    data
}

// Transmission.

/// The transmission flags ("Transmission flags").
pub mod flag {
    #![allow(missing_docs)]
    pub const HAS_FLAGS: u16 = 1 << 0;
    pub const READ_ONLY: u16 = 1 << 1;
    pub const SEND_FLUSH: u16 = 1 << 2;
    pub const SEND_FUA: u16 = 1 << 3;
    pub const SEND_TRIM: u16 = 1 << 5;
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub const SEND_DF: u16 = 1 << 7;
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    pub const SEND_CACHE: u16 = 1 << 10;
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// The types of requests ("Request types").
pub mod command {
    #![allow(missing_docs)]
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISC: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const CACHE: u16 = 5;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;
}

/// The flags of requests ("Command flags").
pub mod command_flag {
    #![allow(missing_docs)]
    pub const FUA: u16 = 1 << 0;
    pub const NO_HOLE: u16 = 1 << 1;
    pub const DF: u16 = 1 << 2;
    pub const REQ_ONE: u16 = 1 << 3;
    pub const FAST_ZERO: u16 = 1 << 4;
}

/// Returns the transmission flags for a volume with these features. The handshake and netlink use the same
/// flags.
pub fn transmission_flags(features: Features) -> u16 {
    let writable = !features.read_only;
    let wanted = [
        (flag::READ_ONLY, features.read_only),
        (flag::SEND_FLUSH, features.flush),
        (flag::SEND_FUA, features.fua),
        (flag::SEND_TRIM, features.trim && writable),
        (flag::SEND_WRITE_ZEROES, features.write_zeroes && writable),
        (flag::SEND_FAST_ZERO, features.write_zeroes && features.fast_zero && writable),
        (flag::SEND_CACHE, features.cache),
        (flag::CAN_MULTI_CONN, features.multi_connection),
    ];
    let set = wanted.iter().filter(|(_, set)| *set);
    set.fold(flag::HAS_FLAGS, |flags, (flag, _)| flags | flag)
}

/// The length of a request without its payload, in bytes ("Request message").
pub const REQUEST_LEN: usize = 28;
const REQUEST_MAGIC: u32 = 0x2560_9513;

/// The header of a request, as it is sent. No field is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestHeader {
    /// The flags of the request: see [`command_flag`].
    pub flags: u16,
    /// The type of the request: see [`command`].
    pub command: u16,
    /// The number with which the client identifies the request. The reply repeats it.
    pub cookie: u64,
    /// The first byte of the range.
    pub offset: u64,
    /// The length of the range in bytes.
    pub length: u32,
}

impl RequestHeader {
    /// Parses a header.
    ///
    /// # Errors
    /// Returns the first 32 bits if they are not the magic number of a request.
    pub fn parse(bytes: &[u8; REQUEST_LEN]) -> Result<Self, u32> {
        match be32(bytes, 0) {
            REQUEST_MAGIC => Ok(Self {
                flags: be16(bytes, 4),
                command: be16(bytes, 6),
                cookie: be64(bytes, 8),
                offset: be64(bytes, 16),
                length: be32(bytes, 24),
            }),
            other => Err(other),
        }
    }

    /// Returns the header as bytes.
    pub fn encode(&self) -> [u8; REQUEST_LEN] {
        let mut bytes = [0; REQUEST_LEN];
        bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        bytes[4..6].copy_from_slice(&self.flags.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.command.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_be_bytes());
        bytes[24..].copy_from_slice(&self.length.to_be_bytes());
        bytes
    }
}

/// The length of a simple reply without its payload, in bytes ("Simple reply message").
pub const SIMPLE_REPLY_LEN: usize = 16;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;

/// Returns the header of a simple reply. The data of a successful read must follow it.
pub fn simple_reply(cookie: u64, result: Result<(), IoError>) -> [u8; SIMPLE_REPLY_LEN] {
    let mut bytes = [0; SIMPLE_REPLY_LEN];
    bytes[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    bytes[4..8].copy_from_slice(&errno::to_wire(result).to_be_bytes());
    bytes[8..].copy_from_slice(&cookie.to_be_bytes());
    bytes
}

/// Parses the header of a simple reply for a client. Returns the cookie and the result of the request, or
/// `None` if the magic number is wrong.
pub fn parse_simple_reply(bytes: &[u8; SIMPLE_REPLY_LEN]) -> Option<(u64, Result<(), IoError>)> {
    (be32(bytes, 0) == SIMPLE_REPLY_MAGIC)
        .then(|| (be64(bytes, 8), errno::from_wire(be32(bytes, 4))))
}

/// Returns the 16-bit number at `at`. Panics if `bytes` ends before it.
pub(super) fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// Returns the 32-bit number at `at`. Panics if `bytes` ends before it.
pub(super) fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from(be16(bytes, at)) << 16 | u32::from(be16(bytes, at + 2))
}

/// Returns the 64-bit number at `at`. Panics if `bytes` ends before it.
pub(super) fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from(be32(bytes, at)) << 32 | u64::from(be32(bytes, at + 4))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_encoded_as_specified() {
        let request =
            RequestHeader { flags: 1, command: 6, cookie: 0x0102, offset: 0x1000, length: 512 };
        let bytes = request.encode();
        let expected = [
            0x25, 0x60, 0x95, 0x13, 0, 1, 0, 6, 0, 0, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0x10, 0,
            0, 0, 2, 0,
        ];
        assert_eq!(bytes, expected);
        assert_eq!(RequestHeader::parse(&bytes), Ok(request));
        assert_eq!(RequestHeader::parse(&[0xff; 28]), Err(u32::MAX));
    }

    #[test]
    fn a_reply_is_encoded_as_specified() {
        let bytes = simple_reply(0xabcd, Err(IoError::NoSpace));
        assert_eq!(bytes, [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 28, 0, 0, 0, 0, 0, 0, 0xab, 0xcd]);
        assert_eq!(parse_simple_reply(&bytes), Some((0xabcd, Err(IoError::NoSpace))));
    }

    #[test]
    fn the_greeting_offers_fixed_newstyle() {
        let mut out = Vec::new();
        put_greeting(&mut out);
        assert_eq!(out, *b"NBDMAGICIHAVEOPT\0\x03");
    }

    #[test]
    fn transmission_flags_match_the_features_and_read_only_excludes_writes() {
        let all = Features::ALL;
        assert_eq!(transmission_flags(all), 0b1101_0110_1101);
        assert_eq!(transmission_flags(Features { read_only: true, ..all }), 0b101_0000_1111);
        assert_eq!(transmission_flags(Features::default()), 1);
    }
}
