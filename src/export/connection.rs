//! One connection: a socket, a thread, a ring, and the loop that joins them with the volume.
//!
//! A turn of the loop: take completions, parse what has arrived, start the requests, queue the replies, and
//! enter the kernel once, for everything that is to be sent, received and read or written.
//!
//! Bounds: at most `depth` requests are in flight or wait for their reply to leave, and their payloads fit
//! the budget of the pool. At either bound the loop stops reading until a request or a reply has ended. The
//! loop always continues: each place and each buffer in use belongs to a request at the backend or to a reply
//! in flight, and a single request is always admitted.

mod ending;
mod first_half;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use self::first_half::FirstHalf;
use super::End;
use super::block_status::BlockStatus;
use super::control::{Control, Desired};
use super::limits::Limits;
use super::link::{Link, RECEIVE, SEND, TRIM, WAKE, repeat_after};
use super::modifications::{Listing, Modifications, Registry};
use super::negotiation::negotiate;
use super::policy::ActivePolicy;
use super::polling::{Awaited, Polling};
use super::receive_buffer::{ReceiveBuffer, Write};
use super::receiving::Receiving;
use super::requests::{Backend, Requests};
use super::sending::Flushed;
use super::statistics::Statistics;
use super::throttle::{Admission, Throttle};
use cleat_backend::{Image, channel};
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::request::{Flags, IoError, Op, Request};
use cleat_nbd::handshake::Export;
use cleat_nbd::transmission::{Event, Transmission};
use cleat_statistics::Recorder;
use cleat_sys::ring::Completion;

/// The time without a request for a buffer after which unused buffers are freed.
const IDLE_AFTER: Duration = Duration::from_secs(1);

/// How often a request that waits for a stalled one of another connection is tried again.
const OVERLAP_CHECK_NS: u64 = 10_000_000;

/// One connection, made and run on its own thread. Each part owns its state and names its invariant.
pub(super) struct Connection {
    // Declared before the ring, so that the backend's queue is dropped first. The ring then frees the buffers
    // that it still has.
    requests: Requests,
    link: Link,
    /// Declared after the ring, so that it is dropped when the ring writes no more.
    _listing: Listing,
    receiving: Receiving,
    block_status: BlockStatus,
    throttle: Throttle,
    image: Arc<dyn Image>,
    control: Arc<Control>,
    policy: Arc<ActivePolicy>,
    /// The socket is not used before this time, because the system had no memory for it.
    socket_due_ns: Option<u64>,
    /// The held request waits for a stalled one of another connection, and is tried again at this time.
    overlap_due_ns: Option<u64>,
    /// The next request was held back.
    was_held: bool,
    polling: Polling,
    first_half: FirstHalf,
    /// Set when the connection ends and nothing more is read.
    ending: Option<End>,
}

/// Which completions were taken at once.
#[derive(Default)]
struct Reaped {
    /// The end of a send, which may have begun in an earlier turn of the loop.
    send: bool,
    others: bool,
}

/// The parts that a connection is made of, besides its socket.
pub(super) struct Parts {
    pub(super) image: Arc<dyn Image>,
    pub(super) control: Arc<Control>,
    pub(super) policy: Arc<ActivePolicy>,
    pub(super) modifications: Arc<Registry>,
    pub(super) recorder: Recorder,
    pub(super) limits: Limits,
}

impl Connection {
    /// Sets up the calling thread for the connection on `socket`, a connected stream socket, from which
    /// `unread` has been received already.
    ///
    /// # Errors
    /// Returns `Unsupported` and other kinds if io_uring cannot be used, `InvalidArgument` for more unread
    /// bytes than a connection can hold, and the backend's error if it cannot serve another thread.
    pub(super) fn new(socket: OwnedFd, unread: &[u8], parts: Parts) -> Result<Self> {
        let Parts { image, control, policy, modifications, recorder, limits } = parts;
        let buffer = ReceiveBuffer::with_unread(unread).ok_or_else(|| {
            let message = format!("cannot take over {} unread bytes: too many", unread.len());
            Error::new(ErrorKind::InvalidArgument, message)
        })?;
        let mut link = Link::new(socket, control.waker(), limits.depth).map_err(no_ring)?;
        let depth = limits.depth as usize;
        let (completer, completions) = channel(control.waker().clone(), depth);
        let queue = image.queue(link.ring(), &completer)?;
        let statistics = Statistics::new(recorder, Arc::clone(policy.clock()), depth);
        let backend = Backend { image: Arc::clone(&image), queue, completions };
        let (modifications, listing) = Modifications::new(modifications, depth);
        let policy_of_requests = Arc::clone(&policy);
        let mut requests =
            Requests::new(backend, policy_of_requests, statistics, modifications, &limits);
        if link.send_buffer() > 0 {
            requests.allow_pipes();
        }
        let parser = Transmission::new(image.features(), image.block_sizes());
        Ok(Self {
            requests,
            link,
            _listing: listing,
            receiving: Receiving::new(buffer, parser),
            block_status: BlockStatus::new(
                Arc::clone(&image),
                control.waker().clone(),
                Arc::clone(policy.clock()),
            ),
            throttle: Throttle::default(),
            image,
            control,
            policy,
            socket_due_ns: None,
            overlap_due_ns: None,
            was_held: false,
            polling: Polling::default(),
            first_half: FirstHalf::default(),
            ending: None,
        })
    }

    /// Negotiates with an NBD client; afterwards the connection is in transmission.
    ///
    /// # Errors
    /// Returns how the connection has ended.
    pub(super) fn negotiate(&mut self, export: Export) -> std::result::Result<(), End> {
        let buffer = self.receiving.buffer();
        let agreed = negotiate(&mut self.link, buffer, &self.control, export)?;
        self.receiving.agree(agreed);
        self.requests.sending().set_structured(agreed.structured);
        Ok(())
    }

    /// Serves requests until the connection ends.
    pub(super) fn transmit(&mut self) -> End {
        self.requests.set_now(self.policy.now_ns());
        // Bytes that came with the negotiation or from another process may hold requests already.
        self.parse();
        loop {
            self.retry();
            self.requests.end_batch(self.link.ring());
            self.requests.show();
            if let Some(end) = self.finished() {
                return end;
            }
            if let Err(error) = self.enter() {
                return End::Ring(error);
            }
            self.reap();
            self.parse();
        }
    }

    /// Enters the kernel with everything that is to be sent and received, and waits for completions.
    fn enter(&mut self) -> io::Result<()> {
        let usable = !self.socket_is_paused();
        let Flushed { in_ring: sending, pages } = match usable {
            true => self.flush(),
            false => Flushed::default(),
        };
        if usable && self.receiving.is_starved() && self.ending.is_none() {
            self.receiving.receive(&mut self.link);
        } else if self.is_pausing() {
            self.receiving.cancel(&mut self.link);
        }
        self.link.poll_wakeups();
        if self.requests.pool().wants_idle_timer() && self.link.ring().timeout(IDLE_AFTER, TRIM) {
            self.requests.pool().watch_idle();
        }
        // Replies that have left may have been what the loop waits for.
        if self.first_half.needs_turn() || pages {
            return self.link.ring().submit();
        }
        let awaited = match self.requests.in_flight() {
            0 => Awaited::Client,
            _ => Awaited::Backend,
        };
        let polls = self.policy.polls() && self.polling.is_due(awaited);
        if sending || polls {
            // Most sends end within the enter, and so do reads of cached data, and a receive if bytes have arrived.
            // The end of the send alone needs no turn of the loop. Waiting for a second completion with a timeout
            // costs more than a second enter, because the timeout is a timer that must be set.
            self.link.ring().submit()?;
            let reaped = self.reap();
            if reaped.others || reaped.send && self.has_work_after_send() {
                return Ok(());
            }
        }
        self.first_half.sleep();
        if polls {
            self.poll(awaited);
        }
        let limit = self
            .due_ns()
            .map(|due_ns| Duration::from_nanos(due_ns.saturating_sub(self.policy.now_ns())));
        self.link.submit_and_wait(limit)
    }

    /// Sends what is queued, as far as possible.
    fn flush(&mut self) -> Flushed {
        self.requests.flush(&mut self.link).unwrap_or_else(|error| {
            if self.socket_failed(error.raw_os_error().unwrap_or(libc::EIO)) {
                self.requests.break_off();
            }
            Flushed { in_ring: false, pages: true }
        })
    }

    /// Whether the end of a send lets the loop do more than wait. A loop that collects no requests may have waited
    /// for the buffers of the replies.
    fn has_work_after_send(&mut self) -> bool {
        let sending = self.requests.sending();
        sending.has_rest()
            || sending.queued() > 0
            || self.ending.is_some()
            || !self.receiving.is_receiving()
    }

    /// Looks for completions for a short time, so that the thread need not sleep; see `polling`.
    fn poll(&mut self, awaited: Awaited) {
        let ring = self.link.ring();
        // Not the policy's clock: that of a test may stand still.
        let now_ns = || SystemClock.monotonic_ns();
        self.polling.poll(awaited, || ring.has_completions(), now_ns, std::thread::yield_now);
    }

    /// Takes the completions.
    fn reap(&mut self) -> Reaped {
        self.requests.set_now(self.policy.now_ns());
        let mut reaped = Reaped::default();
        while let Some(completion) = self.link.next() {
            match completion.token {
                SEND => reaped.send = true,
                _ => reaped.others = true,
            }
            self.complete(completion);
        }
        reaped
    }

    fn complete(&mut self, completion: Completion) {
        if completion.token.is_backend() {
            return self.requests.on_ring(completion, self.link.ring());
        }
        match completion.token {
            RECEIVE => self.received(completion),
            SEND => self.sent(completion),
            WAKE => self.woken(),
            TRIM => self.requests.pool().trim_if_idle(),
            _ => {}
        }
    }

    fn received(&mut self, completion: Completion) {
        let buffer = completion.buffer.expect("a receive has a buffer");
        let bytes = usize::try_from(completion.result).unwrap_or(0);
        let write = self.receiving.received(buffer, bytes);
        match completion.result {
            0 => self.end_reading(End::Closed),
            1.. => {}
            // No byte arrived and none is lost: a later turn receives again.
            error => {
                self.socket_failed(-error);
            }
        }
        if let Some(write) = write {
            self.start_write(write);
        }
    }

    fn sent(&mut self, completion: Completion) {
        let list = completion.send_list.expect("a send has its list");
        let result = completion.result;
        if result < 0 && self.socket_failed(-result) {
            self.requests.break_off();
        }
        self.requests.sent(list, usize::try_from(result).unwrap_or(0));
    }

    /// Takes the error of an operation on the socket. Returns whether the socket is lost.
    fn socket_failed(&mut self, error: i32) -> bool {
        let Some(pause) = repeat_after(error) else {
            self.end_reading(End::Socket(io::Error::from_raw_os_error(error)));
            return true;
        };
        if !pause.is_zero() {
            let pause_ns = u64::try_from(pause.as_nanos()).unwrap_or(u64::MAX);
            self.socket_due_ns = Some(self.requests.now_ns().saturating_add(pause_ns));
        }
        false
    }

    /// Whether the socket is not to be used yet.
    fn socket_is_paused(&mut self) -> bool {
        let now_ns = || self.policy.now_ns();
        self.socket_due_ns.take_if(|due_ns| now_ns() >= *due_ns);
        self.socket_due_ns.is_some()
    }

    fn woken(&mut self) {
        self.control.waker().take();
        self.requests.take_completions(self.link.ring());
        for answer in self.block_status.take() {
            self.requests.reply_to_block_status(&answer);
        }
        // The limits may have changed.
        self.throttle.ask_again();
        if self.control.desired() == Desired::Stop {
            self.end(End::Stopped);
        }
    }

    /// Parses and starts the requests that have arrived, as far as the bounds allow.
    fn parse(&mut self) {
        self.receiving.set_starved(false);
        // What has ended is not counted as in flight below.
        self.requests.end_batch(self.link.ring());
        // Not only after a wake-up: the change applies to every request that was sent after it.
        self.follow_fail_io();
        let size = self.image.size();
        let pausing = self.is_pausing();
        self.first_half.begin(self.receiving.unread().len());
        while self.ending.is_none() && !self.receiving.is_receiving() {
            if self.receiving.in_write() {
                let Some(write) = self.receiving.fill_write() else {
                    return self.receiving.set_starved(true);
                };
                self.start_write(write);
                self.send_first_half();
                continue;
            }
            if pausing && self.receiving.held().is_none() {
                self.receiving.skip_arrived();
                let starved = !self.receiving.at_boundary();
                return self.receiving.set_starved(starved);
            }
            if !self.admits() {
                return;
            }
            match self.receiving.next(size) {
                Event::Starved => return self.receiving.set_starved(true),
                event => {
                    self.handle(event);
                    self.send_first_half();
                }
            }
        }
    }

    /// Submits the first half of the batch and sends its replies, once it has been parsed; see `first_half`.
    fn send_first_half(&mut self) {
        let unread = self.receiving.unread().len();
        let at_backend = self.requests.in_flight();
        let requests = self.requests.sending().queued() + at_backend;
        if !self.first_half.is_over(unread, requests) || self.socket_is_paused() {
            return;
        }
        self.requests.end_batch(self.link.ring());
        let at_backend = self.requests.in_flight();
        // Reads of cached data end within the submit. If the ring refuses, the next turn of the loop submits, and
        // reports the error.
        let mut took = at_backend > 0 && self.link.ring().submit().is_ok() && self.reap().others;
        let flushed = self.flush();
        took |= flushed.pages;
        if flushed.in_ring && self.link.ring().submit().is_ok() {
            took |= self.reap().others;
        }
        if took {
            self.first_half.completions_taken();
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Starved => {}
            Event::Request { cookie, request } | Event::Write { cookie, request } => {
                self.begin(cookie, request);
            }
            Event::Status { cookie, .. } if self.requests.fails_io() => {
                self.requests.refuse_block_status(cookie, IoError::Broken);
            }
            Event::StatusRefused { cookie, error } => {
                self.requests.refuse_block_status(cookie, error);
            }
            Event::Status { cookie, offset, length, one } => {
                self.block_status.ask(cookie, offset, length, one);
            }
            Event::Refused { cookie, op, error } => {
                let flags = Flags::default();
                let request = op.map(|op| Request { op, flags, offset: 0, length: 0 });
                self.requests.refuse(cookie, request, error, None);
            }
            Event::Disconnect => self.end(End::Disconnected),
            Event::Violation(violation) => self.end(End::Violation(violation)),
        }
    }

    /// Whether the bounds allow another request.
    fn admits(&self) -> bool {
        self.requests.has_room(self.block_status.unanswered())
            && self.block_status.has_room()
            && (self.requests.fails_io()
                || !self.throttle.holds(self.requests.now_ns())
                    && self.overlap_due_ns.is_none_or(|due_ns| self.requests.now_ns() >= due_ns)
                    && self.receiving.held().is_none_or(|held| self.requests.has_buffer(held)))
    }

    /// Starts a request whose header has been parsed, or collects its payload first, or holds it back.
    fn begin(&mut self, cookie: u64, request: Request) {
        if self.requests.fails_io() {
            // Without a buffer: requests that hang at the backend may occupy all buffers.
            self.receiving.skip_payload();
            return self.requests.refuse(cookie, Some(request), IoError::Broken, None);
        }
        // The limits are checked last, because a request that passes is charged to them.
        if self.waits_for_stalled(&request)
            || !self.requests.has_buffer(&request)
            || !self.is_within_limits(&request)
        {
            self.was_held = true;
            return self.receiving.hold(cookie, request);
        }
        // Meanwhile the peer may have sent it again over another connection.
        if std::mem::take(&mut self.was_held) && self.link.peer_has_left(self.requests.has_others())
        {
            return self.end_reading(End::Closed);
        }
        if self.requests.answer_from_memory(cookie, &request) || self.store(cookie, &request) {
            return;
        }
        match self.requests.take_buffer(&request) {
            Some(buffer) if request.op == Op::Write => {
                self.receiving.begin_write(cookie, request, buffer);
            }
            buffer => self.requests.start(cookie, request, buffer, self.link.ring()),
        }
    }

    /// Executes a write right from the receive buffer, if its payload has arrived and the backend can do so. Returns whether it
    /// has.
    fn store(&mut self, cookie: u64, request: &Request) -> bool {
        let Some(payload) = self.receiving.payload(request) else { return false };
        let stored = self.requests.store(cookie, request, payload);
        if stored {
            self.receiving.payload_taken(request);
        }
        stored
    }

    fn start_write(&mut self, write: Write) {
        let Write { cookie, request, buffer } = write;
        self.requests.start(cookie, request, Some(buffer), self.link.ring());
    }

    /// Whether a request must wait for an earlier one to the same range; see `modifications`.
    fn waits_for_stalled(&mut self, request: &Request) -> bool {
        let waits = self.requests.must_wait(request);
        self.overlap_due_ns = waits.then(|| self.requests.now_ns() + OVERLAP_CHECK_NS);
        waits
    }

    /// Whether the limits let a request pass now. If not, the loop tries again when they may.
    fn is_within_limits(&mut self, request: &Request) -> bool {
        let now_ns = self.requests.now_ns();
        // A handover must not wait for the limits to let a request pass that has been read already.
        let admission = match self.is_pausing() {
            true => self.throttle.pass(now_ns),
            false => self.throttle.admit(self.policy.limiter(), request, now_ns),
        };
        match admission {
            Admission::Pass => true,
            Admission::Hold => false,
            Admission::PassAfter { held_ns } => {
                self.requests.statistics().limited(held_ns);
                true
            }
        }
    }

    /// Starts waiting requests again, or fails them, if it is time.
    fn retry(&mut self) {
        if !self.requests.in_outage() || !self.requests.begin_retry(self.policy.now_ns()) {
            return;
        }
        if self.requests.has_waiting() && self.link.peer_has_left(self.requests.has_others()) {
            self.end_reading(End::Closed);
            return self.requests.fail_waiting();
        }
        let may_probe = !self.is_pausing();
        self.requests.retry(may_probe, self.link.ring());
    }

    /// Returns the time of the next work without a completion: for requests that wait for the backend or for
    /// the limits.
    fn due_ns(&self) -> Option<u64> {
        let retry_ns = self.requests.retry_due_ns();
        let held = self.receiving.held().is_some() && self.ending.is_none();
        let limits_ns = self.throttle.due_ns().filter(|_| held);
        let overlap_ns = self.overlap_due_ns.filter(|_| held);
        [retry_ns, limits_ns, overlap_ns, self.socket_due_ns].into_iter().flatten().min()
    }

    /// Follows the level of `fail_io` that the server has set, and reports how many requests are left at the
    /// backend.
    fn follow_fail_io(&mut self) {
        let fail_io = self.control.fail_io();
        if fail_io || self.requests.fails_io() {
            self.requests.set_fail_io(fail_io);
            self.control.report_failing(fail_io.then(|| self.requests.in_flight()));
        }
    }
}

/// Closes the connection in both directions at once, also after a panic: the ring waits for the requests at
/// the backend, and the peer must not wait, too. A socket that was handed over stays open.
impl Drop for Connection {
    fn drop(&mut self) {
        if self.control.is_handed_over() {
            self.requests.statistics().leave();
        } else {
            self.link.shut_down();
        }
        self.control.pause_slot().end();
    }
}

fn no_ring(error: io::Error) -> Error {
    Error::from_io("cannot set up io_uring for a connection", error).with_repair(
        "allow io_uring: sysctl kernel.io_uring_disabled=0, and no seccomp profile that forbids it",
    )
}
