//! The negotiation with an NBD client, over the connection's ring, before its first request.

use std::io;
use std::time::Duration;

use super::End;
use super::control::{Control, Desired};
use super::link::{CANCEL, DEADLINE, Link, RECEIVE, SEND, WAKE, repeat_after};
use super::receive_buffer::ReceiveBuffer;
use cleat_nbd::handshake::{Agreed, Export, Handshake, Step};
use cleat_sys::buffer::Buffer;
use cleat_sys::ring::Completion;
use cleat_sys::send_list::SendList;

/// How long a client may take for the negotiation. Without a limit, a silent client would keep its place
/// without end.
const NEGOTIATION_LIMIT: Duration = Duration::from_secs(30);

/// Negotiates with the client. Returns the agreement; the connection is then in transmission, and bytes
/// after the negotiation are in `received`.
///
/// # Errors
/// Returns how the connection has ended.
pub(super) fn negotiate(
    link: &mut Link,
    received: &mut ReceiveBuffer,
    control: &Control,
    export: Export,
) -> Result<Agreed, End> {
    let mut out = Vec::new();
    let mut handshake = Handshake::new(export, &mut out);
    assert!(link.ring().timeout(NEGOTIATION_LIMIT, DEADLINE), "a new connection's ring has room");
    let mut negotiation = Negotiation { link, received, control, sending: None, pause: None };
    loop {
        let (eaten, step) = handshake.advance(negotiation.received.unread(), &mut out);
        negotiation.received.consume(eaten);
        let sent = negotiation.send(&mut out);
        match step {
            // A client that aborts need not wait for the last reply.
            Step::End(refusal) => return Err(End::Refused(refusal)),
            Step::Continue => {
                sent?;
                if eaten == 0 {
                    negotiation.receive()?;
                }
            }
            Step::Transmission => {
                sent?;
                let _ = negotiation.link.ring().cancel(DEADLINE, CANCEL);
                return Ok(handshake.agreed());
            }
        }
    }
}

struct Negotiation<'a> {
    link: &'a mut Link,
    received: &'a mut ReceiveBuffer,
    control: &'a Control,
    /// The bytes that a send which has ended has not sent; `None` while it is in flight, or without one.
    sending: Option<Box<SendList>>,
    /// How long the socket is not used, because the system had no memory for it.
    pause: Option<Duration>,
}

impl Negotiation<'_> {
    /// Sends all of `out`, and empties it.
    fn send(&mut self, out: &mut Vec<u8>) -> Result<(), End> {
        if out.is_empty() {
            return Ok(());
        }
        let mut buffer = Buffer::zeroed(out.len());
        buffer.payload_mut().copy_from_slice(out);
        out.clear();
        let mut list = Box::new(SendList::new(1));
        list.push_buffer(buffer);
        while list.unsent() > 0 {
            self.wait_for_memory()?;
            let (ring, socket) = self.link.ring_and_socket();
            if ring.send(socket, list, SEND).is_err() {
                return Err(End::Ring(io::Error::from_raw_os_error(libc::EBUSY)));
            }
            list = loop {
                self.turn()?;
                if let Some(list) = self.sending.take() {
                    break list;
                }
            };
        }
        Ok(())
    }

    /// Receives more bytes.
    fn receive(&mut self) -> Result<(), End> {
        self.wait_for_memory()?;
        let (ring, socket) = self.link.ring_and_socket();
        self.received.receive(ring, socket, RECEIVE);
        while self.received.is_receiving() {
            self.turn()?;
        }
        Ok(())
    }

    fn wait_for_memory(&mut self) -> Result<(), End> {
        match self.pause.take() {
            Some(pause) if !pause.is_zero() => self.turn_within(Some(pause)),
            _ => Ok(()),
        }
    }

    /// Waits for completions and takes them.
    fn turn(&mut self) -> Result<(), End> {
        self.turn_within(None)
    }

    fn turn_within(&mut self, limit: Option<Duration>) -> Result<(), End> {
        self.link.poll_wakeups();
        self.link.submit_and_wait(limit).map_err(End::Ring)?;
        while let Some(completion) = self.link.next() {
            self.complete(completion)?;
        }
        match self.control.desired() {
            Desired::Abort => Err(End::Aborted),
            Desired::Stop => Err(End::Stopped),
            _ => Ok(()),
        }
    }

    fn complete(&mut self, completion: Completion) -> Result<(), End> {
        let Completion { token, result, buffer, send_list } = completion;
        let bytes = usize::try_from(result).unwrap_or(0);
        match (token, buffer, send_list) {
            (RECEIVE, Some(buffer), _) => {
                let _ = self.received.received(buffer, bytes);
                if result == 0 {
                    return Err(End::Closed);
                }
            }
            (SEND, _, Some(mut list)) => {
                list.advance(bytes);
                self.sending = Some(list);
            }
            (WAKE, ..) => self.control.waker().take(),
            (DEADLINE, ..) if result == -libc::ETIME => return Err(End::HandshakeTimeout),
            _ => {}
        }
        let is_socket = token == RECEIVE || token == SEND;
        if is_socket && result < 0 {
            let failed = || End::Socket(io::Error::from_raw_os_error(-result));
            self.pause = Some(repeat_after(-result).ok_or_else(failed)?);
        }
        Ok(())
    }
}
