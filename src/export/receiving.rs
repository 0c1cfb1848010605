//! The receiving half of a connection: bytes from the socket become requests.
//!
//! Invariant: a request leaves here only when it is complete and valid, a write with its whole payload. At
//! most one request waits here (`held`) because a bound or a limit does not admit it yet; nothing after it
//! is parsed meanwhile.

use super::link::{CANCEL, Link, RECEIVE};
use super::receive_buffer::{ReceiveBuffer, Write};
use cleat_core::request::{Op, Request};
use cleat_nbd::handshake::Agreed;
use cleat_nbd::transmission::{Event, Transmission};
use cleat_sys::buffer::Buffer;

/// See the file's comment.
pub(super) struct Receiving {
    buffer: ReceiveBuffer,
    parser: Transmission,
    held: Option<(u64, Request)>,
    /// Everything that has arrived is parsed: the connection needs more bytes.
    starved: bool,
    /// The receive in flight has been cancelled and has not ended yet.
    cancelling: bool,
}

impl Receiving {
    /// Starts with the bytes in `buffer`.
    pub(super) fn new(buffer: ReceiveBuffer, parser: Transmission) -> Self {
        Self { buffer, parser, held: None, starved: false, cancelling: false }
    }

    /// The buffer, for the negotiation.
    pub(super) fn buffer(&mut self) -> &mut ReceiveBuffer {
        &mut self.buffer
    }

    /// Takes note of what the negotiation has agreed.
    pub(super) fn agree(&mut self, agreed: Agreed) {
        self.parser.agree(agreed);
    }

    /// Parses the next event. `size` is the volume's, in bytes. A write is returned with its header only:
    /// [`Receiving::begin_write`] or [`Receiving::skip_payload`] must follow.
    pub(super) fn next(&mut self, size: u64) -> Event {
        match self.held.take() {
            Some((cookie, request)) if request.op == Op::Write => Event::Write { cookie, request },
            Some((cookie, request)) => Event::Request { cookie, request },
            None => {
                let (bytes, event) = self.parser.next(self.buffer.unread(), size);
                self.buffer.consume(bytes);
                event
            }
        }
    }

    /// Keeps a request until it is admitted; [`Receiving::next`] returns it again.
    pub(super) fn hold(&mut self, cookie: u64, request: Request) {
        self.held = Some((cookie, request));
    }

    /// The request that is kept.
    pub(super) fn held(&self) -> Option<&Request> {
        self.held.as_ref().map(|(_, request)| request)
    }

    /// Returns the payload of the write that was just parsed, if all of it has arrived.
    pub(super) fn payload(&self, request: &Request) -> Option<&[u8]> {
        let length = usize::try_from(request.length).ok()?;
        self.buffer.unread().get(..length).filter(|_| request.op == Op::Write)
    }

    /// Passes over the payload of the write that was just parsed, which has arrived and is executed.
    pub(super) fn payload_taken(&mut self, request: &Request) {
        self.parser.payload_taken(request.length);
        self.buffer.consume(usize::try_from(request.length).unwrap_or(usize::MAX));
    }

    /// Collects the payload of a write into `buffer`, whose length is the payload's.
    pub(super) fn begin_write(&mut self, cookie: u64, request: Request, buffer: Buffer) {
        self.buffer.begin_write(cookie, request, buffer);
    }

    /// Passes over the payload of the write that was just parsed.
    pub(super) fn skip_payload(&mut self) {
        self.parser.skip_payload();
    }

    /// Whether a write's payload is being collected.
    pub(super) fn in_write(&self) -> bool {
        self.buffer.in_write()
    }

    /// Moves what has arrived into the write's payload. Returns the write once it is complete.
    pub(super) fn fill_write(&mut self) -> Option<Write> {
        let (bytes, write) = self.buffer.fill_write();
        self.parser.payload_taken(bytes as u64);
        write
    }

    /// Passes over the rest of a refused write's payload, as far as it has arrived.
    pub(super) fn skip_arrived(&mut self) {
        let bytes = self.parser.skip_in(self.buffer.unread());
        self.buffer.consume(bytes);
    }

    /// Sets whether the connection needs more bytes before it can go on.
    pub(super) fn set_starved(&mut self, starved: bool) {
        self.starved = starved;
    }

    /// Whether the connection needs more bytes before it can go on.
    pub(super) fn is_starved(&self) -> bool {
        self.starved
    }

    /// Lets the ring receive more bytes. Does nothing while a receive is in flight.
    pub(super) fn receive(&mut self, link: &mut Link) {
        let (ring, socket) = link.ring_and_socket();
        self.buffer.receive(ring, socket, RECEIVE);
    }

    /// Takes the end of a receive of `bytes`. Returns the write that is complete by it, if there is one.
    pub(super) fn received(&mut self, buffer: Buffer, bytes: usize) -> Option<Write> {
        self.cancelling = false;
        let (payload, write) = self.buffer.received(buffer, bytes);
        self.parser.payload_taken(payload as u64);
        write
    }

    /// Cancels the receive that waits for a next request. Bytes that it has received already stay unread.
    pub(super) fn cancel(&mut self, link: &mut Link) {
        if !self.cancelling && self.is_receiving() && self.at_boundary() {
            self.cancelling = link.ring().cancel(RECEIVE, CANCEL);
        }
    }

    /// Whether a receive is in flight. Nothing can be parsed meanwhile.
    pub(super) fn is_receiving(&self) -> bool {
        self.buffer.is_receiving()
    }

    /// Whether the stream stands between two requests, as far as it is parsed.
    pub(super) fn at_boundary(&self) -> bool {
        !self.buffer.in_write() && self.held.is_none() && self.parser.at_boundary()
    }

    /// The bytes that have arrived and are not parsed.
    pub(super) fn unread(&self) -> &[u8] {
        self.buffer.unread()
    }

    /// Gives up the write whose payload will not arrive, and returns its buffer.
    pub(super) fn abandon_write(&mut self) -> Option<Buffer> {
        self.buffer.abandon_write()
    }
}
