//! Requests and simple replies of the transmission phase, and the shortest handshake, as the NBD
//! specification (doc/proto.md) lays them out.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

/// NBD_CMD_READ.
pub const READ: u16 = 0;
/// NBD_CMD_WRITE.
pub const WRITE: u16 = 1;
/// NBD_CMD_DISC.
pub const DISCONNECT: u16 = 2;
/// NBD_CMD_FLUSH.
pub const FLUSH: u16 = 3;
/// NBD_CMD_TRIM.
pub const TRIM: u16 = 4;
/// NBD_CMD_WRITE_ZEROES.
pub const WRITE_ZEROES: u16 = 6;
/// NBD_CMD_BLOCK_STATUS.
pub const BLOCK_STATUS: u16 = 7;

/// The length of a request without its payload, in bytes.
pub const REQUEST_LEN: usize = 28;
/// The length of a simple reply without its payload, in bytes.
pub const REPLY_LEN: usize = 16;

const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;

/// The header of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// NBD_CMD_FLAG_*.
    pub flags: u16,
    /// One of the commands above, or another number.
    pub command: u16,
    /// What the reply repeats.
    pub cookie: u64,
    /// In bytes.
    pub offset: u64,
    /// In bytes.
    pub length: u32,
}

impl Request {
    /// Returns a request without flags.
    pub fn new(command: u16, cookie: u64, offset: u64, length: u32) -> Self {
        Self { flags: 0, command, cookie, offset, length }
    }

    /// Returns the header's bytes.
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

    /// Parses a header. Panics if the bytes are none.
    pub fn parse(bytes: &[u8; REQUEST_LEN]) -> Self {
        assert_eq!(bytes[..4], REQUEST_MAGIC.to_be_bytes(), "the magic number of a request");
        Self {
            flags: u16::from_be_bytes(bytes[4..6].try_into().unwrap()),
            command: u16::from_be_bytes(bytes[6..8].try_into().unwrap()),
            cookie: u64::from_be_bytes(bytes[8..16].try_into().unwrap()),
            offset: u64::from_be_bytes(bytes[16..24].try_into().unwrap()),
            length: u32::from_be_bytes(bytes[24..].try_into().unwrap()),
        }
    }
}

/// Returns the bytes of a simple reply without payload. `error` is an errno number, or 0.
pub fn encode_reply(cookie: u64, error: u32) -> [u8; REPLY_LEN] {
    let mut bytes = [0; REPLY_LEN];
    bytes[..4].copy_from_slice(&REPLY_MAGIC.to_be_bytes());
    bytes[4..8].copy_from_slice(&error.to_be_bytes());
    bytes[8..].copy_from_slice(&cookie.to_be_bytes());
    bytes
}

/// Parses a simple reply: its cookie and its errno number. Panics if the bytes are none.
pub fn parse_reply(bytes: &[u8; REPLY_LEN]) -> (u64, u32) {
    assert_eq!(bytes[..4], REPLY_MAGIC.to_be_bytes(), "the magic number of a simple reply");
    let error = u32::from_be_bytes(bytes[4..8].try_into().unwrap());
    (u64::from_be_bytes(bytes[8..].try_into().unwrap()), error)
}

/// Reads a simple reply without payload: its cookie and its errno number.
pub fn read_reply(stream: &mut impl Read) -> (u64, u32) {
    let mut bytes = [0; REPLY_LEN];
    stream.read_exact(&mut bytes).unwrap();
    parse_reply(&bytes)
}

/// Carries the shortest handshake out as a client: NBD_OPT_EXPORT_NAME for the export with the empty
/// name, without padding. Returns the size of the export, in bytes.
pub fn handshake(stream: &mut UnixStream) -> u64 {
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT", "the greeting of a server");
    // NBD_FLAG_C_FIXED_NEWSTYLE and NBD_FLAG_C_NO_ZEROES.
    stream.write_all(&[0, 0, 0, 3]).unwrap();
    stream.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
    let mut export = [0; 10];
    stream.read_exact(&mut export).unwrap();
    u64::from_be_bytes(export[..8].try_into().unwrap())
}
