//! Replies past the connection's thread. While that waits, with a single request at the backend, the
//! thread on which the request ends sends the reply itself: one wake-up less between the backend and
//! the client, which with one request at a time is what the time is made of.
//!
//! Request and sending half belong to the connection's thread, but for an offer, which it makes before
//! it waits and takes back as soon as it does not:
//! ```text
//!           offer              answer                  answered
//! Mine ------------> Offered ----------> Answering -----------> Answered
//!  ^                    |                    |                     |
//!  +---- take_back -----+--------------------+---------------------+
//! ```
//! Taken back in the middle of an answer, the connection does nothing but wait until the request comes
//! back by the way of all; after one, it takes it from the backend at once. Where the peer's socket was
//! full, the connection sends the rest. Only what has succeeded is answered here. The connection's
//! thread looks after [`LOOK_AFTER`], lest an idle client's last request be counted as running.
//!
//! An `answered` that comes late, when its request has been taken by the way of all and the next one is
//! being answered, may mark that one as answered too early: then its own `answered` fails, and wakes.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use nix::sys::socket::{MsgFlags, send};

use super::connection::{Connection, LOOK};
use super::in_flight::Running;
use super::policy::ActivePolicy;
use cleat_backend::RequestId;
use cleat_core::request::{Op, Request};
use cleat_nbd::structured;
use cleat_nbd::wire::simple_reply;
use cleat_sys::buffer::Buffer;

/// How long an answered request may wait until it is counted.
const LOOK_AFTER: Duration = Duration::from_millis(20);

/// The longest payload of a read whose reply is copied into the socket on the backend's thread, in bytes.
const LONGEST: u64 = 64 << 10;

const MINE: u64 = 0;
const ANSWERING: u64 = 1;
const ANSWERED: u64 = 2;
/// With the request's number in the lower half.
const OFFERED: u64 = 1 << 32;

/// What the connection's thread and the backend's share of the one request that is offered.
#[derive(Debug)]
pub(super) struct DirectReply {
    socket: Arc<OwnedFd>,
    policy: Arc<ActivePolicy>,
    state: AtomicU64,
    // Of the request; written before it is offered.
    cookie: AtomicU64,
    offset: AtomicU64,
    is_read: AtomicBool,
    structured: AtomicBool,
    // Of the answer; written before it is told.
    sent: AtomicUsize,
    whole: AtomicBool,
    ended_ns: AtomicU64,
}

/// What became of an offer.
enum Offer {
    Untouched,
    UnderWay,
    Answered,
}

impl DirectReply {
    pub(super) fn new(socket: Arc<OwnedFd>, policy: Arc<ActivePolicy>) -> Self {
        Self {
            socket,
            policy,
            state: AtomicU64::new(MINE),
            cookie: AtomicU64::default(),
            offset: AtomicU64::default(),
            is_read: AtomicBool::default(),
            structured: AtomicBool::default(),
            sent: AtomicUsize::default(),
            whole: AtomicBool::default(),
            ended_ns: AtomicU64::default(),
        }
    }

    fn offer(&self, id: RequestId, cookie: u64, request: &Request, structured: bool) {
        self.cookie.store(cookie, Ordering::Relaxed);
        self.offset.store(request.offset, Ordering::Relaxed);
        self.is_read.store(request.op == Op::Read, Ordering::Relaxed);
        self.structured.store(structured, Ordering::Relaxed);
        self.state.store(OFFERED | u64::from(id), Ordering::Release);
    }

    fn take_back(&self) -> Offer {
        match self.state.swap(MINE, Ordering::AcqRel) {
            ANSWERING => Offer::UnderWay,
            ANSWERED => Offer::Answered,
            _ => Offer::Untouched,
        }
    }

    fn send_reply(&self, buffer: Option<&mut Buffer>) {
        let cookie = self.cookie.load(Ordering::Relaxed);
        match buffer {
            Some(buffer) if self.is_read.load(Ordering::Relaxed) => {
                let structured = self.structured.load(Ordering::Relaxed);
                set_read_header(buffer, structured, cookie, self.offset.load(Ordering::Relaxed));
                self.send(buffer.wire());
            }
            _ => self.send(&simple_reply(cookie, Ok(()))),
        }
    }

    /// Sends what the socket takes at once.
    fn send(&self, bytes: &[u8]) {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        // Full or broken: the connection's thread tries again, and sees for itself.
        let sent = send(self.socket.as_raw_fd(), bytes, flags).unwrap_or(0);
        self.sent.store(sent, Ordering::Relaxed);
        self.whole.store(sent == bytes.len(), Ordering::Relaxed);
    }
}

impl cleat_backend::DirectReply for DirectReply {
    fn reply(&self, id: RequestId, buffer: Option<&mut Buffer>) -> bool {
        let offered = OFFERED | u64::from(id);
        let (acquire, relaxed) = (Ordering::Acquire, Ordering::Relaxed);
        if self.state.compare_exchange(offered, ANSWERING, acquire, relaxed).is_err() {
            return false;
        }
        self.ended_ns.store(self.policy.elapsed_ns(), Ordering::Relaxed);
        self.send_reply(buffer);
        true
    }

    fn replied(&self) -> bool {
        let (release, relaxed) = (Ordering::Release, Ordering::Relaxed);
        // Before the exchange: after it, the next one may be written.
        let whole = self.whole.load(relaxed);
        self.state.compare_exchange(ANSWERING, ANSWERED, release, relaxed).is_ok() && whole
    }
}

/// Puts the header of a read's reply before its payload.
pub(super) fn set_read_header(buffer: &mut Buffer, structured: bool, cookie: u64, offset: u64) {
    if structured {
        let length = u32::try_from(buffer.len()).expect("no payload is above MAX_PAYLOAD");
        buffer.set_header(&structured::read_header(cookie, offset, length));
    } else {
        buffer.set_header(&simple_reply(cookie, Ok(())));
    }
}

impl Connection {
    /// Before waiting: offers the only request to the backend's thread, if nothing but its end is waited
    /// for. Returns whether it did.
    pub(super) fn offer(&mut self) -> bool {
        let Some((id, running)) = self.in_flight.only() else { return false };
        let Running { cookie, request, started_ns, answered, retried } = *running;
        let nothing_else = self.answered_elsewhere.is_none()
            && self.sending.is_idle()
            && self.at_boundary()
            && self.block_status.unanswered() == 0
            && self.retries.is_quiet()
            && self.ending.is_none()
            && !self.is_pausing();
        // One that hangs would be looked after for nothing.
        let young = Duration::from_nanos(self.now_ns.saturating_sub(started_ns)) < LOOK_AFTER;
        let simple =
            young && !answered && !retried && (request.op != Op::Read || request.length <= LONGEST);
        if !nothing_else || !simple || !self.queue.ends_with_next_completion(id) {
            return false;
        }
        if !self.look_armed {
            self.look_armed = self.ring.timeout(LOOK_AFTER, LOOK);
        }
        if self.look_armed {
            self.direct.offer(id, cookie, &request, self.agreed.structured);
        }
        self.look_armed
    }

    /// After waiting, before anything else.
    pub(super) fn take_back(&mut self) {
        let only = self.in_flight.only().map(|(id, _)| id);
        match self.direct.take_back() {
            Offer::Untouched => {}
            // The backend will wake this thread.
            Offer::UnderWay => self.answered_elsewhere = only,
            Offer::Answered => {
                self.answered_elsewhere = only;
                self.take_ended();
            }
        }
    }

    /// The request that was answered elsewhere is back: sends what did not fit there, and counts it.
    pub(super) fn conclude(&mut self, running: Running, buffer: Option<Buffer>) {
        let Running { cookie, request, started_ns, .. } = running;
        self.reply(cookie, Some(request), Ok(()), buffer);
        // Nothing else is in there: nothing was parsed meanwhile.
        self.sending.skip(self.direct.sent.load(Ordering::Relaxed), &mut self.pool);
        let took_ns = self.direct.ended_ns.load(Ordering::Relaxed).saturating_sub(started_ns);
        self.recorder.ended(request.op, request.length, took_ns, Ok(()));
    }
}
