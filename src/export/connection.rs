//! The loop of one connection: reap completions, parse what arrived, start it, reply, one enter.
//!
//! Bounds: `depth` requests are running or waiting to be answered; their payloads fit the budget of
//! the pool. At either bound the loop stops reading until something has ended. It cannot stall for
//! good: whatever holds a place or a buffer is with the backend or being sent, and a request that is
//! alone is always admitted.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{Shutdown, setsockopt, shutdown, sockopt};

use super::End;
use super::block_status::BlockStatus;
use super::buffer_pool::{BufferPool, LARGEST};
use super::control::{Control, Desired};
use super::in_flight::{InFlight, Running};
use super::policy::ActivePolicy;
use super::receive_buffer::{ReceiveBuffer, Write};
use super::retry::Retries;
use super::sending::Sending;
use super::server::Limits;
use cleat_backend::{Completions, Image, ImageQueue, Outcome, RequestId, Started, channel};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::request::{Flags, IoError, Op, Request};
use cleat_nbd::handshake::Agreed;
use cleat_nbd::structured;
use cleat_nbd::transmission::{Event, MAX_PAYLOAD, Transmission};
use cleat_nbd::wire::simple_reply;
use cleat_statistics::Recorder;
use cleat_sys::buffer::Buffer;
use cleat_sys::ring::{Completion, FileSlot, Ring, Token};

pub(super) const RECEIVE: Token = Token(1);
pub(super) const SEND: Token = Token(2);
const WAKE: Token = Token(3);
const TRIM: Token = Token(4);
pub(super) const DEADLINE: Token = Token(5);
pub(super) const CANCEL: Token = Token(6);

/// Ring entries beyond the backend's: one for each of these.
const OWN_ENTRIES: u32 = 8;

/// Bytes of replies that a socket is asked to take before a send has to wait for the peer.
const SEND_BUFFER_LEN: usize = 1 << 20;

/// Payload memory that an idle connection keeps, in bytes, and how long it takes to be idle.
const IDLE_KEEP: usize = 256 << 10;
const IDLE_AFTER: Duration = Duration::from_secs(1);

/// One connection, made and run on its own thread.
pub(super) struct Connection {
    pub(super) queue: Box<dyn ImageQueue>,
    pub(super) ring: Ring,
    pub(super) socket: FileSlot,
    wake: FileSlot,
    pub(super) file: Arc<OwnedFd>,
    pub(super) control: Arc<Control>,
    pub(super) image: Arc<dyn Image>,
    pub(super) policy: Arc<ActivePolicy>,
    pub(super) parser: Transmission,
    pub(super) agreed: Agreed,
    pub(super) block_status: BlockStatus,
    pub(super) receive_buffer: ReceiveBuffer,
    pub(super) sending: Sending,
    pub(super) pool: BufferPool,
    pub(super) in_flight: InFlight,
    pub(super) retries: Retries,
    depth: usize,
    /// A request that waits for a buffer, or for the limits.
    pub(super) held: Option<(u64, Request)>,
    /// Since when the limits hold requests back, and when they may let the next one pass.
    limited_since_ns: Option<u64>,
    limited_until_ns: u64,
    /// Everything that arrived is understood: more has to come.
    hungry: bool,
    /// Set when nothing more will be read.
    pub(super) ending: Option<End>,
    /// The receive under way has been cancelled and has not ended yet.
    pub(super) cancelling: bool,
    pub(super) fail_io: bool,
    /// Running requests that are answered already.
    pub(super) answered: usize,
    wake_armed: bool,
    completions: Completions,
    /// The pool's count of takes when the idle timer was set.
    trim_armed: Option<u64>,
    woken: Vec<(RequestId, Outcome)>,
    pub(super) recorder: Recorder,
    ended: Vec<Ended>,
    in_flight_shown: usize,
    oldest_shown_ns: u64,
    /// The beginning of the connection's clock on the clock that the statistics share.
    clock_began_ns: u64,
    pub(super) now_ns: u64,
}

/// A request that ended and is not counted yet.
struct Ended {
    op: Op,
    length: u64,
    started_ns: u64,
    result: std::result::Result<(), IoError>,
}

/// Lets a batch of replies leave in one send where it can. The system clamps it (net.core.wmem_max)
/// unless the process has CAP_NET_ADMIN, and short sends are continued in any case.
fn widen_send_buffer(socket: &OwnedFd) {
    let _ = setsockopt(socket, sockopt::SndBufForce, &SEND_BUFFER_LEN)
        .or_else(|_| setsockopt(socket, sockopt::SndBuf, &SEND_BUFFER_LEN));
}

/// io_uring waits for data itself, but not where the file says that nobody may wait: the loop would
/// spin (io_uring/io_uring.c, REQ_F_NOWAIT).
fn allow_waiting(socket: &OwnedFd) -> io::Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(socket, FcntlArg::F_GETFL)?);
    fcntl(socket, FcntlArg::F_SETFL(flags - OFlag::O_NONBLOCK))?;
    Ok(())
}

impl Connection {
    /// Sets up the calling thread for the connection on `file`, a connected stream socket, from which
    /// `unread` has been received already.
    pub(super) fn new(
        file: OwnedFd,
        unread: &[u8],
        image: Arc<dyn Image>,
        control: Arc<Control>,
        policy: Arc<ActivePolicy>,
        recorder: Recorder,
        limits: Limits,
    ) -> Result<Self> {
        let failed = |error| {
            Error::from_io("cannot set up io_uring for a connection", error).with_repair(
                "allow io_uring: sysctl kernel.io_uring_disabled=0, and no seccomp profile that \
                 forbids it",
            )
        };
        let receive_buffer = ReceiveBuffer::with_unread(unread).ok_or_else(|| {
            let message = format!("{} bytes that are not read yet: too many", unread.len());
            Error::new(ErrorKind::InvalidArgument, message)
        })?;
        allow_waiting(&file).map_err(failed)?;
        widen_send_buffer(&file);
        let mut ring = Ring::new(limits.depth * 2 + OWN_ENTRIES).map_err(failed)?;
        let socket = ring.register(file.as_fd()).map_err(failed)?;
        let wake = ring.register(control.waker().descriptor()).map_err(failed)?;
        let file = Arc::new(file);
        let depth = limits.depth as usize;
        let control_waker = control.waker().clone();
        let (completer, completions) = channel(control_waker.clone(), depth);
        let queue = image.queue(&mut ring, &completer)?;
        let clock_began_ns = cleat_statistics::now_ns().saturating_sub(policy.elapsed_ns());
        Ok(Self {
            queue,
            ring,
            socket,
            wake,
            file,
            control,
            parser: Transmission::new(image.features(), image.block_sizes()),
            agreed: Agreed::default(),
            block_status: BlockStatus::new(Arc::clone(&image), control_waker),
            image,
            policy,
            receive_buffer,
            sending: Sending::new(depth),
            pool: BufferPool::new(limits.buffer_bytes),
            in_flight: InFlight::new(limits.depth),
            retries: Retries::new(depth),
            depth,
            held: None,
            limited_since_ns: None,
            limited_until_ns: 0,
            hungry: false,
            ending: None,
            cancelling: false,
            fail_io: false,
            answered: 0,
            wake_armed: false,
            completions,
            trim_armed: None,
            woken: Vec::with_capacity(depth),
            recorder,
            ended: Vec::with_capacity(depth * 2),
            in_flight_shown: 0,
            oldest_shown_ns: 0,
            clock_began_ns,
            now_ns: 0,
        })
    }

    /// Serves until the end.
    pub(super) fn transmit(&mut self) -> End {
        // What the handshake left over may hold requests already.
        self.parse();
        loop {
            self.tend_outage();
            if let Some(end) = self.finished() {
                return end;
            }
            if let Err(error) = self.turn() {
                return End::Ring(error);
            }
            self.parse();
            self.record();
        }
    }

    /// One enter: hands over what is to be sent and received, waits, and takes what has ended.
    pub(super) fn turn(&mut self) -> io::Result<()> {
        let sending = self.sending.flush(&mut self.ring, self.socket, SEND);
        if self.hungry && self.ending.is_none() {
            self.receive_buffer.receive(&mut self.ring, self.socket, RECEIVE);
        } else if self.is_pausing() {
            self.stop_receiving();
        }
        if !self.wake_armed {
            self.wake_armed = self.ring.poll_readable(self.wake, WAKE);
        }
        if self.trim_armed.is_none() && self.pool.kept() > IDLE_KEEP {
            let armed = self.ring.timeout(IDLE_AFTER, TRIM);
            self.trim_armed = armed.then(|| self.pool.taken_count());
        }
        if sending && self.hungry && self.ending.is_none() {
            // A send mostly ends within the enter, and a receive for which bytes are there. The first
            // alone is no reason to go round; and to wait for a second one with a time limit costs
            // more than a second enter, since the limit is a timer that must be set.
            self.ring.submit()?;
            if self.reap() || self.sending.has_rest() || self.ending.is_some() {
                return Ok(());
            }
        }
        match self.due_ns() {
            Some(due_ns) => {
                let left_ns = due_ns.saturating_sub(self.elapsed_ns());
                self.ring.submit_and_wait_for(Duration::from_nanos(left_ns))?;
            }
            None => self.ring.submit_and_wait()?,
        }
        self.reap();
        Ok(())
    }

    /// Takes what has completed. Returns whether there was more than the end of a send.
    fn reap(&mut self) -> bool {
        self.now_ns = self.elapsed_ns();
        let mut more = false;
        while let Some(completion) = self.ring.next() {
            more |= completion.token != SEND;
            self.complete(completion);
        }
        more
    }

    /// When there is something to do though nothing completes: what waits for the backend or for the
    /// limits.
    fn due_ns(&self) -> Option<u64> {
        let retry_ns = self.retries.due_ns(self.policy.patience_ns());
        let limited = self.limited_since_ns.is_some() && self.held.is_some();
        if !limited || self.ending.is_some() {
            return retry_ns;
        }
        Some(retry_ns.map_or(self.limited_until_ns, |at_ns| at_ns.min(self.limited_until_ns)))
    }

    fn finished(&mut self) -> Option<End> {
        match self.control.desired() {
            Desired::Abort => return Some(End::Aborted),
            Desired::Leave if self.is_at_rest() => return Some(End::HandedOver),
            Desired::Pause if self.is_at_rest() => self.moor(),
            Desired::Run => self.recorder.begin(),
            _ => {}
        }
        let quiet = self.in_flight.len() == self.answered
            && self.block_status.unanswered() == 0
            && self.sending.is_idle();
        self.ending.take_if(|_| quiet)
    }

    fn complete(&mut self, completion: Completion) {
        if completion.token.is_backend() {
            if let Some((id, outcome)) = self.queue.on_ring(completion, &mut self.ring) {
                self.finish(id, outcome);
            }
            return;
        }
        match completion.token {
            RECEIVE => self.received(completion),
            SEND => self.sent(completion),
            WAKE => {
                self.wake_armed = false;
                self.woken();
            }
            TRIM => self.trim_if_idle(),
            DEADLINE if completion.result == -libc::ETIME => {
                self.ending.get_or_insert(End::HandshakeTimeout);
            }
            _ => {}
        }
    }

    /// Frees buffers when none was taken since the timer was set; else it will be set again.
    fn trim_if_idle(&mut self) {
        if self.trim_armed.take() == Some(self.pool.taken_count()) {
            self.pool.trim(IDLE_KEEP);
        }
    }

    fn received(&mut self, completion: Completion) {
        self.cancelling = false;
        let buffer = completion.buffer.expect("a receive has a buffer");
        let bytes = usize::try_from(completion.result).unwrap_or(0);
        let (payload, write) = self.receive_buffer.received(buffer, bytes);
        self.parser.payload_taken(payload as u64);
        match completion.result {
            0 => self.end_reading(End::Closed),
            1.. => {}
            // Nothing arrived, nothing is lost: the next turn tries again.
            error if [-libc::EINTR, -libc::EAGAIN, -libc::ECANCELED].contains(&error) => {}
            error => self.end_reading(End::Socket(io::Error::from_raw_os_error(-error))),
        }
        if let Some(write) = write {
            self.start_write(write);
        }
    }

    fn sent(&mut self, completion: Completion) {
        let send_list = completion.send_list.expect("a send has its pieces");
        let result = completion.result;
        let retry = result == -libc::EINTR || result == -libc::EAGAIN;
        if result < 0 && !retry {
            self.end_reading(End::Socket(io::Error::from_raw_os_error(-result)));
            self.sending.break_off(&mut self.pool);
        }
        let bytes = usize::try_from(result).unwrap_or(0);
        self.sending.sent(send_list, bytes, &mut self.pool);
    }

    pub(super) fn end_reading(&mut self, end: End) {
        self.ending.get_or_insert(end);
        if self.peer_has_left() {
            // Meanwhile it may have asked elsewhere, see `retry`.
            self.abandon();
        }
        if let Some(buffer) = self.receive_buffer.abandon_write() {
            self.pool.give(buffer);
        }
    }

    fn woken(&mut self) {
        self.control.waker().take();
        self.take_ended();
        self.tell_statuses();
        // The limits may have changed.
        self.limited_until_ns = 0;
        if self.control.desired() == Desired::Stop {
            self.ending.get_or_insert(End::Stopped);
        }
    }

    /// Takes what the backend's threads have finished.
    pub(super) fn take_ended(&mut self) {
        let mut ended = std::mem::take(&mut self.woken);
        self.completions.accept();
        while let Some((id, outcome)) = self.completions.next() {
            self.queue.on_completion(id, outcome, &mut self.ring, &mut ended);
        }
        self.finish_all(ended);
    }

    /// Has the backend begin nothing more for the requests that run.
    fn abandon(&mut self) {
        let mut ended = std::mem::take(&mut self.woken);
        self.queue.abandon(&mut ended);
        self.finish_all(ended);
    }

    fn finish_all(&mut self, mut ended: Vec<(RequestId, Outcome)>) {
        for (id, outcome) in ended.drain(..) {
            self.finish(id, outcome);
        }
        self.woken = ended;
    }

    /// From now on every request fails. Those that the backend still has are answered now, and their
    /// ends are awaited in silence.
    fn set_fail_io(&mut self, fail_io: bool) {
        if fail_io == self.fail_io {
            return;
        }
        if fail_io {
            self.fail_waiting();
            for running in self.in_flight.iter_mut().filter(|running| !running.answered) {
                running.answered = true;
                self.answered += 1;
                let Running { cookie, request: Request { op, length, .. }, started_ns, .. } =
                    *running;
                push_end(&mut self.sending, self.agreed, cookie, Some(op), Err(IoError::Broken));
                self.ended.push(Ended { op, length, started_ns, result: Err(IoError::Broken) });
            }
        }
        self.fail_io = fail_io;
        if fail_io {
            self.abandon();
        }
        self.control.tell_failing(fail_io.then(|| self.in_flight.len()));
    }

    /// Understands and starts what has arrived, as far as the bounds allow.
    fn parse(&mut self) {
        self.hungry = false;
        // Not only when woken: what was sent after the level was set is judged by it.
        self.set_fail_io(self.control.fail_io());
        let size = self.image.size();
        let pausing = self.is_pausing();
        while self.ending.is_none() && !self.receive_buffer.is_receiving() {
            if self.receive_buffer.in_write() {
                let (bytes, write) = self.receive_buffer.fill_write();
                self.parser.payload_taken(bytes as u64);
                let Some(write) = write else {
                    self.hungry = true;
                    return;
                };
                self.start_write(write);
                continue;
            }
            if pausing && self.held.is_none() {
                self.skip_arrived();
                self.hungry = !self.at_boundary();
                return;
            }
            if !self.admits() {
                return;
            }
            let event = match self.held.take() {
                Some((cookie, request)) if request.op == Op::Write => {
                    Event::Write { cookie, request }
                }
                Some((cookie, request)) => Event::Request { cookie, request },
                None => {
                    let (bytes, event) = self.parser.next(self.receive_buffer.unread(), size);
                    self.receive_buffer.eat(bytes);
                    event
                }
            };
            match event {
                Event::Request { cookie, request } | Event::Write { cookie, request } => {
                    self.begin(cookie, request);
                }
                Event::Starved => {
                    self.hungry = true;
                    return;
                }
                Event::Status { cookie, offset, length, one } => {
                    self.ask_status(cookie, offset, length, one);
                }
                Event::Refused { cookie, op, error } => {
                    let flags = Flags::default();
                    let request = op.map(|op| Request { op, flags, offset: 0, length: 0 });
                    self.answer(cookie, request, self.now_ns, Err(error), None);
                }
                Event::Disconnect => self.ending = Some(End::Disconnected),
                Event::Violation(violation) => self.ending = Some(End::Violation(violation)),
            }
        }
    }

    /// Whether the bounds allow for another request.
    fn admits(&self) -> bool {
        let unanswered = self.in_flight.len() - self.answered + self.block_status.unanswered();
        unanswered + self.sending.queued() < self.depth
            && self.block_status.has_room()
            && (self.fail_io
                || self.in_flight.has_room()
                    && self.limited_until_ns <= self.now_ns
                    && !self.held_without_buffer())
    }

    fn held_without_buffer(&self) -> bool {
        self.held.is_some_and(|(_, request)| !self.pool.has_room(payload_len(&request)))
    }

    fn begin(&mut self, cookie: u64, request: Request) {
        if self.fail_io {
            // Without a buffer: what hangs at the backend may have them all.
            self.parser.skip_payload();
            return self.answer(cookie, Some(request), self.now_ns, Err(IoError::Broken), None);
        }
        let has_payload = matches!(request.op, Op::Read | Op::Write);
        let room = !has_payload || self.pool.has_room(payload_len(&request));
        // The limits last: whom they let pass is charged.
        if !room || !self.is_within_limits(&request) {
            self.held = Some((cookie, request));
            return;
        }
        if !has_payload {
            return self.start(cookie, request, None);
        }
        match self.pool.take(payload_len(&request)) {
            Some(buffer) if request.op == Op::Write => {
                self.receive_buffer.begin_write(cookie, request, buffer);
            }
            buffer => self.start(cookie, request, buffer),
        }
    }

    /// Whether the limits let a request pass now; if not, the loop asks again when they may.
    fn is_within_limits(&mut self, request: &Request) -> bool {
        // One that was read already is not what a hand-over should have to wait for.
        if !self.is_pausing()
            && let Err(wait_ns) = self.policy.limiter.admit(request, self.now_ns)
        {
            self.limited_since_ns.get_or_insert(self.now_ns);
            self.limited_until_ns = self.now_ns.saturating_add(wait_ns);
            return false;
        }
        let Some(since_ns) = self.limited_since_ns.take() else { return true };
        self.recorder.limited(self.now_ns.saturating_sub(since_ns));
        let left = self.peer_has_left();
        if left {
            self.end_reading(End::Closed);
        }
        !left
    }

    fn start_write(&mut self, write: Write) {
        self.start(write.cookie, write.request, Some(write.buffer));
    }

    fn start(&mut self, cookie: u64, request: Request, buffer: Option<Buffer>) {
        let started_ns = self.now_ns;
        // Room was there when the request was admitted; a write's payload may have taken long.
        if self.fail_io || !self.in_flight.has_room() {
            let failed = Err(IoError::Broken);
            return self.answer(cookie, Some(request), started_ns, failed, buffer);
        }
        let running = Running { cookie, request, started_ns, answered: false, retried: false };
        let id = self.in_flight.insert(running);
        self.start_at_backend(id, request, buffer);
    }

    /// Hands a request to the backend, for the first time or again.
    pub(super) fn start_at_backend(
        &mut self,
        id: RequestId,
        request: Request,
        buffer: Option<Buffer>,
    ) {
        match self.queue.start(id, request, buffer, &mut self.ring) {
            Started::Done(outcome) => self.finish(id, outcome),
            Started::Pending => {}
        }
    }

    pub(super) fn finish(&mut self, id: RequestId, outcome: Outcome) {
        let Some(Outcome { result, buffer }) = self.settle(id, outcome) else { return };
        let running = self.in_flight.remove(id);
        let Running { cookie, request, started_ns, answered, .. } = running;
        if answered {
            self.answered -= 1;
            if self.fail_io {
                self.control.tell_failing(Some(self.in_flight.len()));
            }
            buffer.into_iter().for_each(|buffer| self.pool.give(buffer));
        } else {
            self.answer(cookie, Some(request), started_ns, result, buffer);
        }
    }

    pub(super) fn answer(
        &mut self,
        cookie: u64,
        request: Option<Request>,
        started_ns: u64,
        result: std::result::Result<(), IoError>,
        buffer: Option<Buffer>,
    ) {
        self.reply(cookie, request, result, buffer);
        let Some(Request { op, length, .. }) = request else { return };
        if self.ended.len() == self.ended.capacity() {
            self.record();
        }
        self.ended.push(Ended { op, length, started_ns, result });
    }

    pub(super) fn reply(
        &mut self,
        cookie: u64,
        request: Option<Request>,
        result: std::result::Result<(), IoError>,
        buffer: Option<Buffer>,
    ) {
        match (buffer, request) {
            (Some(mut buffer), Some(Request { op: Op::Read, offset, length, .. }))
                if result.is_ok() =>
            {
                assert_eq!(buffer.len() as u64, length, "a read is answered in full");
                if self.agreed.structured {
                    let length =
                        u32::try_from(buffer.len()).expect("no payload is above MAX_PAYLOAD");
                    buffer.set_header(&structured::read_header(cookie, offset, length));
                } else {
                    buffer.set_header(&simple_reply(cookie, Ok(())));
                }
                self.sending.push_buffer(buffer, &mut self.pool);
            }
            (buffer, request) => {
                let op = request.map(|request| request.op);
                push_end(&mut self.sending, self.agreed, cookie, op, result);
                buffer.into_iter().for_each(|buffer| self.pool.give(buffer));
            }
        }
    }

    /// Counts what ended since the last time; one look at the clock for all of it.
    fn record(&mut self) {
        if self.in_flight.len() != self.in_flight_shown {
            self.in_flight_shown = self.in_flight.len();
            self.recorder.set_in_flight(self.in_flight_shown as u64);
        }
        let oldest_ns =
            self.in_flight.oldest().map_or(0, |ns| self.clock_began_ns.saturating_add(ns));
        if oldest_ns != self.oldest_shown_ns {
            self.oldest_shown_ns = oldest_ns;
            self.recorder.set_oldest(oldest_ns);
        }
        if self.ended.is_empty() {
            return;
        }
        let now_ns = self.elapsed_ns();
        for Ended { op, length, started_ns, result } in self.ended.drain(..) {
            self.recorder.ended(op, length, now_ns.saturating_sub(started_ns), result);
        }
    }

    pub(super) fn elapsed_ns(&self) -> u64 {
        self.policy.elapsed_ns()
    }
}

/// A reply without payload.
fn push_end(
    sending: &mut Sending,
    agreed: Agreed,
    cookie: u64,
    op: Option<Op>,
    result: std::result::Result<(), IoError>,
) {
    match result {
        Err(error) if agreed.structured && op == Some(Op::Read) => {
            sending.push(&structured::error(cookie, error));
        }
        _ => sending.push(&simple_reply(cookie, result)),
    }
}

/// Closes the connection for both sides at once, after a panic, too: the ring waits for what the
/// backend still has, and the peer must not wait with it. One that was given away goes on elsewhere.
impl Drop for Connection {
    fn drop(&mut self) {
        if self.control.is_given() {
            self.recorder.leave();
        } else {
            // ENOTCONN when the peer was faster.
            let _ = shutdown(self.file.as_raw_fd(), Shutdown::Both);
        }
        self.control.berth.end();
    }
}

const _: () = assert!(MAX_PAYLOAD as usize <= LARGEST);

fn payload_len(request: &Request) -> usize {
    usize::try_from(request.length).expect("the parser passes no payload above MAX_PAYLOAD")
}
