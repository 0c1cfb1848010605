//! The bytes that have arrived and are not parsed yet, and the write whose payload is arriving.
//!
//! Invariant: at most one receive is in flight, either into the buffer or straight into the payload of a
//! large write. While it is, its target belongs to the ring.

use cleat_core::request::Request;
use cleat_sys::buffer::Buffer;
use cleat_sys::ring::{FileSlot, Ring, Token};

/// Bytes that one receive takes at most, payloads of large writes aside.
const RECEIVE_LEN: usize = 128 << 10;

/// From this many missing bytes on, a payload is received straight into its buffer.
const DIRECT_LEN: usize = 16 << 10;

/// Bytes that the first receive after a large write takes: its successor's header, and little of its payload
/// that would have to be copied.
const SHORT_RECEIVE_LEN: usize = 512;

/// See the file's comment.
#[derive(Debug)]
pub(super) struct ReceiveBuffer {
    /// `None` while the ring has it.
    buffer: Option<Buffer>,
    pos: usize,
    end: usize,
    /// A write whose payload is not complete.
    partial: Option<Partial>,
    receiving: Option<Target>,
    /// The last request was a large write, and nothing was received since: the next one may be large, too.
    after_large_write: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Target {
    Bytes,
    Payload,
}

#[derive(Debug)]
struct Partial {
    cookie: u64,
    request: Request,
    /// `None` while the ring has it.
    buffer: Option<Buffer>,
    filled: usize,
}

/// A write with its whole payload.
#[derive(Debug)]
pub(super) struct Write {
    pub(super) cookie: u64,
    pub(super) request: Request,
    pub(super) buffer: Buffer,
}

impl ReceiveBuffer {
    pub(super) fn new() -> Self {
        Self {
            buffer: Some(Buffer::zeroed(RECEIVE_LEN)),
            pos: 0,
            end: 0,
            partial: None,
            receiving: None,
            after_large_write: false,
        }
    }

    /// As [`ReceiveBuffer::new`], with bytes that another process has received. Returns `None` for more bytes
    /// than fit.
    pub(super) fn with_unread(bytes: &[u8]) -> Option<Self> {
        let mut receive_buffer = Self::new();
        receive_buffer
            .buffer
            .as_mut()?
            .payload_mut()
            .get_mut(..bytes.len())?
            .copy_from_slice(bytes);
        receive_buffer.end = bytes.len();
        Some(receive_buffer)
    }

    /// Returns whether a receive is in flight; no byte can be consumed meanwhile.
    pub(super) fn is_receiving(&self) -> bool {
        self.receiving.is_some()
    }

    /// Returns the bytes that have arrived and were not consumed.
    pub(super) fn unread(&self) -> &[u8] {
        self.buffer.as_ref().map_or(&[], |buffer| &buffer.payload()[self.pos..self.end])
    }

    /// Marks `bytes` of the unread bytes as consumed.
    pub(super) fn consume(&mut self, bytes: usize) {
        self.pos += bytes;
        debug_assert!(self.pos <= self.end);
    }

    /// Begins to collect the payload of a write into `buffer`, which has its length.
    pub(super) fn begin_write(&mut self, cookie: u64, request: Request, buffer: Buffer) {
        debug_assert!(self.partial.is_none());
        self.after_large_write = buffer.len() >= DIRECT_LEN;
        self.partial = Some(Partial { cookie, request, buffer: Some(buffer), filled: 0 });
    }

    /// Whether a write's payload is being collected.
    pub(super) fn in_write(&self) -> bool {
        self.partial.is_some()
    }

    /// Moves the bytes that have arrived into the write's payload. Returns their number, and the write
    /// once it is complete.
    pub(super) fn fill_write(&mut self) -> (usize, Option<Write>) {
        let Some(Partial { buffer: Some(target), filled, .. }) = &mut self.partial else {
            return (0, None);
        };
        let missing = &mut target.payload_mut()[*filled..];
        let arrived = self.buffer.as_ref().map_or(&[][..], |b| &b.payload()[self.pos..self.end]);
        let moved = missing.len().min(arrived.len());
        missing[..moved].copy_from_slice(&arrived[..moved]);
        self.pos += moved;
        *filled += moved;
        (moved, self.take_complete())
    }

    /// Lets the ring receive more bytes. Does nothing if a receive is in flight, or if the ring has no room.
    pub(super) fn receive(&mut self, ring: &mut Ring, socket: FileSlot, token: Token) {
        if self.receiving.is_some() {
            return;
        }
        if let Some(partial) = &mut self.partial
            && let Some(buffer) = partial.buffer.take_if(|b| b.len() - partial.filled >= DIRECT_LEN)
        {
            match ring.receive(socket, buffer, partial.filled, true, token) {
                Ok(()) => self.receiving = Some(Target::Payload),
                Err(buffer) => partial.buffer = Some(buffer),
            }
            return;
        }
        let Some(mut buffer) = self.buffer.take() else { return };
        self.make_room(&mut buffer);
        match ring.receive(socket, buffer, self.end, false, token) {
            Ok(()) => self.receiving = Some(Target::Bytes),
            Err(buffer) => self.buffer = Some(buffer),
        }
    }

    /// Takes the end of a receive: `bytes` arrived in `buffer`. Returns how many of them belong to
    /// the payload, and the write if it is complete by them.
    pub(super) fn received(&mut self, buffer: Buffer, bytes: usize) -> (usize, Option<Write>) {
        match self.receiving.take() {
            Some(Target::Payload) => {
                let partial = self.partial.as_mut().expect("a payload is received for a write");
                partial.buffer = Some(buffer);
                partial.filled += bytes;
                (bytes, self.take_complete())
            }
            Some(Target::Bytes) | None => {
                self.buffer = Some(buffer);
                self.end += bytes;
                (0, None)
            }
        }
    }

    /// Gives up the write whose payload will not arrive, and returns its buffer.
    pub(super) fn abandon_write(&mut self) -> Option<Buffer> {
        self.partial.take_if(|partial| partial.buffer.is_some())?.buffer
    }

    fn take_complete(&mut self) -> Option<Write> {
        let complete = |partial: &mut Partial| {
            partial.buffer.as_ref().is_some_and(|buffer| buffer.len() == partial.filled)
        };
        let Partial { cookie, request, buffer, .. } = self.partial.take_if(complete)?;
        Some(Write { cookie, request, buffer: buffer? })
    }

    /// Moves the unread bytes to the front, and sets the end of the next receive.
    fn make_room(&mut self, buffer: &mut Buffer) {
        buffer.set_len(buffer.capacity());
        if self.pos > 0 {
            buffer.payload_mut().copy_within(self.pos..self.end, 0);
            (self.pos, self.end) = (0, self.end - self.pos);
        }
        if self.partial.is_none() && std::mem::take(&mut self.after_large_write) {
            buffer.set_len(self.end + SHORT_RECEIVE_LEN);
        }
        debug_assert!(self.end < buffer.len(), "the unread bytes are shorter than a receive");
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;
    use cleat_core::request::{Flags, Op};

    const TOKEN: Token = Token(1);

    #[test]
    fn only_the_first_receive_after_a_large_write_is_short() {
        let (mut peer, ours) = UnixStream::pair().unwrap();
        let mut ring = Ring::new(4).unwrap();
        let socket = ring.register(ours.as_fd()).unwrap();
        let mut receive_buffer = ReceiveBuffer::new();
        let mut receive = |receive_buffer: &mut ReceiveBuffer| {
            receive_buffer.receive(&mut ring, socket, TOKEN);
            ring.submit_and_wait().unwrap();
            let done = ring.next().unwrap();
            let bytes = usize::try_from(done.result).unwrap();
            let (_, write) = receive_buffer.received(done.buffer.unwrap(), bytes);
            (bytes, write)
        };
        let length = DIRECT_LEN as u64;
        let request = Request { op: Op::Write, flags: Flags::default(), offset: 0, length };
        receive_buffer.begin_write(7, request, Buffer::zeroed(DIRECT_LEN));
        peer.write_all(&[1; DIRECT_LEN]).unwrap();
        // Requests without a payload follow.
        peer.write_all(&[2; 4000]).unwrap();
        let (bytes, write) = receive(&mut receive_buffer);
        assert_eq!((bytes, write.map(|write| write.cookie)), (DIRECT_LEN, Some(7)));
        assert_eq!(receive(&mut receive_buffer).0, SHORT_RECEIVE_LEN);
        receive_buffer.consume(SHORT_RECEIVE_LEN);
        assert_eq!(receive(&mut receive_buffer).0, 4000 - SHORT_RECEIVE_LEN);
        // A large write sets the limit again.
        receive_buffer.consume(4000 - SHORT_RECEIVE_LEN);
        receive_buffer.begin_write(8, request, Buffer::zeroed(DIRECT_LEN));
        peer.write_all(&[1; DIRECT_LEN]).unwrap();
        peer.write_all(&[2; 4000]).unwrap();
        assert!(receive(&mut receive_buffer).1.is_some());
        assert_eq!(receive(&mut receive_buffer).0, SHORT_RECEIVE_LEN);
    }
}
