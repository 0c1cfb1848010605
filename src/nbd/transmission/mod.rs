//! The transmission phase: parses bytes into checked requests ("Transmission").
//!
//! The payload of a write does not pass through the parser. After [`Event::Write`], the next
//! `request.length` bytes of the stream are the payload. The caller takes them itself, for example directly
//! from the socket into an aligned buffer, and reports them with [`Transmission::payload_taken`]. The parser
//! skips the payloads of refused writes.
//!
//! The negotiated extensions ([`Agreed`]) are a mode of the parser. Extended headers, which are not
//! implemented, would be another mode; a request's length already has 64 bits.

#[cfg(test)]
#[allow(clippy::cast_possible_truncation)]
mod tests;

use cleat_core::request::{Flags, IoError, Op, Request};
use cleat_core::volume::{BlockSizes, Features};

use super::handshake::Agreed;
use super::wire::{REQUEST_LEN, RequestHeader, command, command_flag};

/// The maximum payload of a request that is served, in bytes. Clients may use this size without requesting
/// block sizes ("Size constraints").
pub const MAX_PAYLOAD: u32 = 32 << 20;

/// The maximum payload of a refused write that is read and dropped, in bytes. A longer payload ends the
/// connection; "Size constraints" allows this from 32 MiB on.
pub const MAX_SKIPPED: u32 = 64 << 20;

/// What the parser found at the front of the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The input does not contain a complete request header; more bytes are needed.
    Starved,
    /// A request without payload.
    Request {
        /// The cookie that the reply must repeat.
        cookie: u64,
        /// The request. The volume accepts its operation, flags and range.
        request: Request,
    },
    /// A write. The caller must take the payload that follows: see [`Transmission::payload_taken`].
    Write {
        /// The cookie that the reply must repeat.
        cookie: u64,
        /// The request. The volume accepts its flags and range.
        request: Request,
    },
    /// BLOCK_STATUS for a range inside the volume.
    Status {
        /// The cookie that the reply must repeat.
        cookie: u64,
        /// The first byte of the range.
        offset: u64,
        /// The length of the range in bytes, never zero.
        length: u64,
        /// The reply must have exactly one extent (NBD_CMD_FLAG_REQ_ONE).
        one: bool,
    },
    /// A BLOCK_STATUS that the volume does not accept, with structured replies. The caller must reply with an
    /// error chunk.
    StatusRefused {
        /// The cookie that the reply must repeat.
        cookie: u64,
        /// The reason.
        error: IoError,
    },
    /// A request that the volume does not accept. The caller must reply with the error.
    Refused {
        /// The cookie that the reply must repeat.
        cookie: u64,
        /// The operation; `None` if it is not an operation on a backend.
        op: Option<Op>,
        /// The reason.
        error: IoError,
    },
    /// The client's last request, NBD_CMD_DISC. It has no reply.
    Disconnect,
    /// The client violated the protocol. The rest of the stream cannot be parsed.
    Violation(Violation),
}

/// A violation of the protocol that ends the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The magic number of a request is wrong.
    #[error("the client sent {0:#010x} where a request begins")]
    Magic(u32),
    /// The payload of a write is longer than [`MAX_SKIPPED`].
    #[error("the client announced a payload of {0} bytes, beyond any limit")]
    Payload(u32),
}

/// The parser of one connection.
#[derive(Debug)]
pub struct Transmission {
    features: Features,
    alignment_mask: u64,
    max_payload: u32,
    agreed: Agreed,
    /// Payload of a write that the caller has not taken yet, in bytes.
    payload: u64,
    /// Payload of a refused write that has not been skipped yet, in bytes.
    skip: u64,
}

impl Transmission {
    /// Creates a parser for a volume with these properties, without extensions.
    pub fn new(features: Features, blocks: BlockSizes) -> Self {
        Self {
            features,
            alignment_mask: u64::from(blocks.minimum) - 1,
            max_payload: blocks.maximum.min(MAX_PAYLOAD),
            agreed: Agreed::default(),
            payload: 0,
            skip: 0,
        }
    }

    /// Sets the extensions that the handshake has negotiated.
    pub fn agree(&mut self, agreed: Agreed) {
        self.agreed = agreed;
    }

    /// Parses the front of `input`. Returns the number of bytes consumed and the event. `size` is the volume's
    /// size in bytes. The caller repeats the call with the rest of the input until [`Event::Starved`].
    ///
    /// # Panics
    /// Panics if the caller has not taken the whole payload of the previous write.
    pub fn next(&mut self, input: &[u8], size: u64) -> (usize, Event) {
        assert_eq!(self.payload, 0, "the payload of a write is taken before the next request");
        let skipped = self.skip_in(input);
        let Some(header) = input[skipped..].first_chunk::<REQUEST_LEN>() else {
            return (skipped, Event::Starved);
        };
        let event = match RequestHeader::parse(header) {
            Ok(header) => self.parse(header, size),
            Err(magic) => Event::Violation(Violation::Magic(magic)),
        };
        (skipped + REQUEST_LEN, event)
    }

    /// Records that the caller has taken `bytes` of the current write's payload from the stream.
    ///
    /// # Panics
    /// Panics if the payload has fewer bytes left.
    pub fn payload_taken(&mut self, bytes: u64) {
        self.payload = self.payload.checked_sub(bytes).expect("no more than the payload is taken");
    }

    /// Skips the current write's payload like that of a refused write. The caller must not have taken any of
    /// it.
    pub fn skip_payload(&mut self) {
        self.skip += std::mem::take(&mut self.payload);
    }

    /// Skips the bytes at the front of `input` that belong to the payload of a refused write. Returns their
    /// number.
    pub fn skip_in(&mut self, input: &[u8]) -> usize {
        let skipped = usize::try_from(self.skip).map_or(input.len(), |skip| skip.min(input.len()));
        self.skip -= skipped as u64;
        skipped
    }

    /// Returns whether the parser is between two requests: no payload is left to be taken or skipped.
    pub fn at_boundary(&self) -> bool {
        self.payload == 0 && self.skip == 0
    }

    fn parse(&mut self, header: RequestHeader, size: u64) -> Event {
        let RequestHeader { cookie, length, .. } = header;
        if header.command == command::DISC {
            return Event::Disconnect;
        }
        if header.command == command::BLOCK_STATUS && self.agreed.structured {
            return self.parse_status(&header, size);
        }
        let is_write = header.command == command::WRITE;
        match self.check(&header, size) {
            Ok(request) if is_write => {
                self.payload = request.length;
                Event::Write { cookie, request }
            }
            Ok(request) => Event::Request { cookie, request },
            Err(_) if is_write && length > MAX_SKIPPED => {
                Event::Violation(Violation::Payload(length))
            }
            Err(error) => {
                self.skip = if is_write { u64::from(length) } else { 0 };
                Event::Refused { cookie, op: op(header.command), error }
            }
        }
    }

    fn parse_status(&self, header: &RequestHeader, size: u64) -> Event {
        let RequestHeader { cookie, offset, flags, .. } = *header;
        let length = u64::from(header.length);
        // FUA is valid for every command and has no effect on this one ("Command flags").
        let fua = if self.features.fua { command_flag::FUA } else { 0 };
        if !self.agreed.allocation
            || flags & !(command_flag::REQ_ONE | fua) != 0
            || self.check_range(offset, length, size, IoError::Invalid).is_err()
        {
            return Event::StatusRefused { cookie, error: IoError::Invalid };
        }
        let one = flags & command_flag::REQ_ONE != 0;
        Event::Status { cookie, offset, length, one }
    }

    fn check_range(
        &self,
        offset: u64,
        length: u64,
        size: u64,
        beyond: IoError,
    ) -> Result<(), IoError> {
        if length == 0 {
            return Err(IoError::Invalid);
        }
        if offset.checked_add(length).is_none_or(|end| end > size) {
            return Err(beyond);
        }
        if (offset | length) & self.alignment_mask != 0 {
            return Err(IoError::Invalid);
        }
        Ok(())
    }

    fn check(&self, header: &RequestHeader, size: u64) -> Result<Request, IoError> {
        let op = op(header.command).ok_or(IoError::Invalid)?;
        let flags = self.check_flags(op, header.flags)?;
        if op.modifies() && self.features.read_only {
            return Err(IoError::ReadOnly);
        }
        let offered = match op {
            Op::Read | Op::Write => true,
            Op::Flush => self.features.flush,
            Op::Trim => self.features.trim,
            Op::WriteZeroes => self.features.write_zeroes,
            Op::Cache => self.features.cache,
        };
        if !offered {
            return Err(IoError::Invalid);
        }
        if op == Op::Flush {
            // Offset and length are reserved (NBD_CMD_FLUSH in "Request types") and are ignored.
            return Ok(Request { op, flags, offset: 0, length: 0 });
        }
        let (offset, length) = (header.offset, u64::from(header.length));
        let has_payload = matches!(op, Op::Read | Op::Write);
        if has_payload && header.length > self.max_payload {
            return Err(IoError::Invalid);
        }
        // NBD_ENOSPC for writes, NBD_EINVAL for other requests ("Error values", and NBD_CMD_WRITE_ZEROES in
        // "Request types").
        let grows = matches!(op, Op::Write | Op::WriteZeroes);
        let beyond = if grows { IoError::NoSpace } else { IoError::Invalid };
        self.check_range(offset, length, size, beyond)?;
        Ok(Request { op, flags, offset, length })
    }

    fn check_flags(&self, op: Op, flags: u16) -> Result<Flags, IoError> {
        let zeroes = op == Op::WriteZeroes;
        let allowed = if self.features.fua { command_flag::FUA } else { 0 }
            | if zeroes { command_flag::NO_HOLE } else { 0 }
            | if op == Op::Read && self.agreed.structured { command_flag::DF } else { 0 }
            | if zeroes && self.features.fast_zero { command_flag::FAST_ZERO } else { 0 };
        if flags & !allowed != 0 {
            return Err(IoError::Invalid);
        }
        let set = |flag| flags & flag != 0;
        Ok(Flags {
            // FUA is valid for every command and has an effect on those that modify ("Command flags").
            fua: set(command_flag::FUA) && op.modifies(),
            no_hole: set(command_flag::NO_HOLE),
            fast_zero: set(command_flag::FAST_ZERO),
        })
    }
}

fn op(command: u16) -> Option<Op> {
    match command {
        command::READ => Some(Op::Read),
        command::WRITE => Some(Op::Write),
        command::FLUSH => Some(Op::Flush),
        command::TRIM => Some(Op::Trim),
        command::WRITE_ZEROES => Some(Op::WriteZeroes),
        command::CACHE => Some(Op::Cache),
        _ => None,
    }
}
