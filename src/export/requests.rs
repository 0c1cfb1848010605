//! The requests of one connection, from their start at the backend to their reply.
//!
//! Invariants:
//! - Every request that is started has a place in the in-flight table until the backend has ended it, and
//!   gets exactly one reply. While all I/O fails, the reply is sent before the end.
//! - The payloads of all requests together fit the pool's budget, or one request is alone.
//! - While an outage lasts, requests may wait here to be started again; see `retry`.

use std::io;
use std::sync::Arc;

use super::block_status::Answer;
use super::buffer_pool::BufferPool;
use super::in_flight::{InFlight, Running};
use super::limits::Limits;
use super::link::Link;
use super::modifications::Modifications;
use super::policy::ActivePolicy;
use super::retry::{Circumstances, OutageChange, Retries, Waiting};
use super::sending::{Flushed, Sending};
use super::statistics::Statistics;
use cleat_backend::{Completions, Image, ImageQueue, Outcome, RequestId, Started};
use cleat_core::request::{Flags, IoError, Op, Request};
use cleat_nbd::transmission::MAX_PAYLOAD;
use cleat_sys::buffer::Buffer;
use cleat_sys::ring::{Completion, Ring};
use cleat_sys::send_list::SendList;

/// See the file's comment.
pub(super) struct Requests {
    backend: Backend,
    policy: Arc<ActivePolicy>,
    in_flight: InFlight,
    modifications: Modifications,
    retries: Retries,
    sending: Sending,
    pool: BufferPool,
    statistics: Statistics,
    /// Every request fails.
    fail_io: bool,
    /// The connection is ending: no request waits any more.
    closing: bool,
    /// When the loop last took completions, in nanoseconds on the connections' clock.
    now_ns: u64,
    /// Empty between two calls; kept so that no call allocates.
    ended: Vec<(RequestId, Outcome)>,
}

/// The volume, and this connection's queue to it.
pub(super) struct Backend {
    pub(super) image: Arc<dyn Image>,
    pub(super) queue: Box<dyn ImageQueue>,
    pub(super) completions: Completions,
}

impl Requests {
    /// Makes the state of a connection with these limits.
    pub(super) fn new(
        backend: Backend,
        policy: Arc<ActivePolicy>,
        statistics: Statistics,
        modifications: Modifications,
        limits: &Limits,
    ) -> Self {
        let Limits { depth, buffer_bytes, .. } = *limits;
        Self {
            backend,
            policy,
            in_flight: InFlight::new(depth),
            modifications,
            retries: Retries::new(depth as usize),
            sending: Sending::new(depth as usize),
            pool: BufferPool::new(buffer_bytes),
            statistics,
            fail_io: false,
            closing: false,
            now_ns: 0,
            ended: Vec::with_capacity(depth as usize),
        }
    }

    /// The sending half.
    pub(super) fn sending(&mut self) -> &mut Sending {
        &mut self.sending
    }

    /// The buffers for payloads.
    pub(super) fn pool(&mut self) -> &mut BufferPool {
        &mut self.pool
    }

    /// What is written to the statistics page.
    pub(super) fn statistics(&mut self) -> &mut Statistics {
        &mut self.statistics
    }

    /// Sets the time of what follows.
    pub(super) fn set_now(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
    }

    /// The time when the loop last took completions.
    pub(super) fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// The number of requests in flight, answered ones included.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Whether no client waits for a reply, and every reply has left.
    pub(super) fn is_idle(&self) -> bool {
        self.in_flight.unanswered() == 0 && self.sending.is_idle()
    }

    /// Whether another request may be admitted, besides `others` that are handled elsewhere: a place is
    /// free, and so is room for its reply.
    pub(super) fn has_room(&self, others: usize) -> bool {
        let unsent = self.in_flight.unanswered() + self.sending.queued() + others;
        unsent < self.in_flight.depth() && (self.fail_io || self.in_flight.has_room())
    }

    /// Whether there is a buffer for the payload of `request`.
    pub(super) fn has_buffer(&self, request: &Request) -> bool {
        !has_payload(request) || self.pool.has_room(payload_len(request))
    }

    /// Takes the buffer for the payload of a request; `None` without a payload or without memory.
    pub(super) fn take_buffer(&mut self, request: &Request) -> Option<Buffer> {
        match request.op {
            Op::Read => self.pool.take_for_read(payload_len(request)),
            Op::Write => self.pool.take(payload_len(request)),
            _ => None,
        }
    }

    /// Answers a read at once if its data is in memory. Returns whether it has.
    pub(super) fn answer_from_memory(&mut self, cookie: u64, request: &Request) -> bool {
        if request.op != Op::Read {
            return false;
        }
        let Some(part) = self.backend.queue.lend(request) else { return false };
        self.sending.reply_from_memory(cookie, request, part);
        self.statistics.ended(request.op, request.length, self.now_ns, Ok(()));
        true
    }

    /// Executes a write whose payload has arrived, if the backend needs no buffer for it. Returns whether it has; if not, the write
    /// must be started.
    pub(super) fn store(&mut self, cookie: u64, request: &Request, payload: &[u8]) -> bool {
        if self.retries.in_outage() || !self.in_flight.has_room() {
            return false;
        }
        let started_ns = self.now_ns;
        let request = *request;
        let running = Running { cookie, request, started_ns, answered: false, retried: false };
        let id = self.in_flight.insert(running);
        self.modifications.started(id, &request, started_ns);
        let stored = self.backend.queue.store(&request, payload);
        self.modifications.ended(id, &request);
        let running = self.in_flight.remove(id);
        if stored {
            self.answer(&running, Ok(()), None);
        }
        stored
    }

    /// Starts a request that has arrived, with its buffer.
    pub(super) fn start(
        &mut self,
        cookie: u64,
        request: Request,
        buffer: Option<Buffer>,
        ring: &mut Ring,
    ) {
        // There was room when the request was admitted, but a write's payload may have taken long.
        if self.fail_io || !self.in_flight.has_room() {
            return self.refuse(cookie, Some(request), IoError::Broken, buffer);
        }
        let started_ns = self.now_ns;
        let running = Running { cookie, request, started_ns, answered: false, retried: false };
        let id = self.in_flight.insert(running);
        self.modifications.started(id, &request, started_ns);
        self.start_at_backend(id, request, buffer, ring);
    }

    /// Answers a request that is not started with an error; `request` is `None` for an unknown command.
    pub(super) fn refuse(
        &mut self,
        cookie: u64,
        request: Option<Request>,
        error: IoError,
        buffer: Option<Buffer>,
    ) {
        self.sending.reply(cookie, request.as_ref(), Err(error), buffer, &mut self.pool);
        if let Some(Request { op, length, .. }) = request {
            self.statistics.ended(op, length, self.now_ns, Err(error));
        }
    }

    /// Replies to a BLOCK_STATUS.
    pub(super) fn reply_to_block_status(&mut self, answer: &Answer) {
        let extents = match &answer.extents {
            _ if self.fail_io => Err(IoError::Broken),
            Ok(extents) => Ok(extents.as_slice()),
            Err(error) => Err(*error),
        };
        self.sending.reply_to_block_status(answer.cookie, extents, &mut self.pool);
    }

    /// Answers a BLOCK_STATUS that is not asked of the volume with an error.
    pub(super) fn refuse_block_status(&mut self, cookie: u64, error: IoError) {
        self.sending.reply_to_block_status(cookie, Err(error), &mut self.pool);
    }

    /// Informs the backend that no further request is started now.
    pub(super) fn end_batch(&mut self, ring: &mut Ring) {
        let mut ended = std::mem::take(&mut self.ended);
        self.backend.queue.end_batch(ring, &mut ended);
        self.finish_all(ended);
    }

    /// Takes a completion of the backend's own operation on the ring.
    pub(super) fn on_ring(&mut self, completion: Completion, ring: &mut Ring) {
        if let Some((id, outcome)) = self.backend.queue.on_ring(completion, ring) {
            self.finish(id, outcome);
        }
    }

    /// Takes what foreign threads have completed.
    pub(super) fn take_completions(&mut self, ring: &mut Ring) {
        self.backend.completions.accept();
        let mut ended = std::mem::take(&mut self.ended);
        while let Some((id, outcome)) = self.backend.completions.next() {
            self.backend.queue.on_completion(id, outcome, ring, &mut ended);
        }
        self.finish_all(ended);
    }

    /// Informs the backend that no client waits for the running requests: it begins no further step of them.
    pub(super) fn abandon(&mut self) {
        let mut ended = std::mem::take(&mut self.ended);
        self.backend.queue.abandon(&mut ended);
        self.finish_all(ended);
    }

    /// Called when the connection ends: from now on, no request waits for the backend.
    pub(super) fn close(&mut self) {
        self.closing = true;
    }

    /// With `true`, every request fails from now on. The requests that the backend still has are answered
    /// now, and their ends are not.
    pub(super) fn set_fail_io(&mut self, fail_io: bool) {
        if fail_io == self.fail_io {
            return;
        }
        self.fail_io = fail_io;
        if fail_io {
            self.fail_waiting();
            let Self { in_flight, sending, statistics, pool, modifications, .. } = self;
            in_flight.answer_all(|id, running| {
                let Running { cookie, request, started_ns, .. } = running;
                modifications.answered(id, request);
                let failed = Err(IoError::Broken);
                sending.reply(*cookie, Some(request), failed, None, pool);
                statistics.ended(request.op, request.length, *started_ns, failed);
            });
            self.abandon();
        }
    }

    /// Whether every request fails.
    pub(super) fn fails_io(&self) -> bool {
        self.fail_io
    }

    /// Lets long reads go through pipes, if the backend fills them.
    pub(super) fn allow_pipes(&mut self) {
        if self.backend.queue.fills_pipes() {
            self.pool.allow_pipes();
        }
    }

    /// Sends what is queued, as far as possible.
    pub(super) fn flush(&mut self, link: &mut Link) -> io::Result<Flushed> {
        self.sending.flush(link, &mut self.pool)
    }

    /// Takes the end of a send: `bytes` have left.
    pub(super) fn sent(&mut self, list: Box<SendList>, bytes: usize) {
        self.sending.sent(list, bytes, &mut self.pool);
    }

    /// Drops every reply: the peer is gone.
    pub(super) fn break_off(&mut self) {
        self.sending.break_off(&mut self.pool);
    }

    /// Shows on the statistics page what has changed.
    pub(super) fn show(&mut self) {
        self.statistics.show(self.in_flight.len(), self.in_flight.oldest());
        self.modifications.publish(self.in_flight.oldest(), self.closing);
    }

    /// Whether `request` must wait for a stalled request of another connection, or for one that was answered before its
    /// end; see `modifications`.
    pub(super) fn must_wait(&mut self, request: &Request) -> bool {
        self.modifications.must_wait(request, self.now_ns)
    }

    /// Whether the peer may send requests again over another connection; see `modifications`.
    pub(super) fn has_others(&mut self) -> bool {
        self.modifications.has_others()
    }

    /// Whether the backend could not serve a request, and has not been seen to serve since.
    pub(super) fn in_outage(&self) -> bool {
        self.retries.in_outage()
    }

    /// Returns when waiting requests need attention, if no other event comes before.
    pub(super) fn retry_due_ns(&self) -> Option<u64> {
        self.retries.due_ns(self.policy.outage_limit_ns())
    }

    /// Fails waiting requests for which the outage has lasted too long, and returns whether it is time for
    /// another attempt: then [`Requests::retry`] must follow.
    pub(super) fn begin_retry(&mut self, now_ns: u64) -> bool {
        let expired = self.retries.has_expired(now_ns, self.policy.outage_limit_ns());
        if expired || !self.keeps_requests() {
            self.fail_waiting();
        }
        if !self.retries.begin_attempt(now_ns) {
            return false;
        }
        self.now_ns = now_ns;
        self.keeps_requests()
    }

    /// Whether requests wait to be started again.
    pub(super) fn has_waiting(&self) -> bool {
        self.retries.waiting() > 0
    }

    /// Starts all waiting requests again. Without any, a read shows whether the backend serves, if
    /// `may_probe`: the volume may belong to another process while the connection is paused.
    pub(super) fn retry(&mut self, may_probe: bool, ring: &mut Ring) {
        if !self.has_waiting() {
            if !self.retries.is_for_space() {
                self.probe(may_probe, ring);
            }
            return;
        }
        for _ in 0..self.retries.waiting() {
            let Some(Waiting { id, buffer, .. }) = self.retries.next() else { break };
            let request = self.in_flight.get_mut(id).request;
            self.start_at_backend(id, request, buffer, ring);
        }
        self.statistics.show_waiting(self.retries.waiting());
    }

    /// Answers waiting requests with their errors: they are not started again.
    pub(super) fn fail_waiting(&mut self) {
        if !self.has_waiting() {
            return;
        }
        while let Some(Waiting { id, buffer, error }) = self.retries.give_up() {
            let running = self.in_flight.remove(id);
            self.modifications.ended(id, &running.request);
            self.answer(&running, Err(error), buffer);
        }
        self.retries.end_wait_for_space(self.now_ns);
        self.show_outage();
    }

    /// Whether a request may wait for the backend.
    fn keeps_requests(&self) -> bool {
        !self.fail_io && !self.closing
    }

    /// Reads a block without a client, because no request is left that would show the end of the outage.
    fn probe(&mut self, may_probe: bool, ring: &mut Ring) {
        let length = u64::from(self.backend.image.block_sizes().minimum);
        let request = Request { op: Op::Read, flags: Flags::default(), offset: 0, length };
        let buffer = self.take_buffer(&request);
        if !may_probe || self.in_flight.len() > 0 || buffer.is_none() {
            self.pool.give_all(buffer);
            return self.retries.postpone(self.now_ns);
        }
        let started_ns = self.now_ns;
        let probe = Running { cookie: 0, request, started_ns, answered: true, retried: false };
        let id = self.in_flight.insert(probe);
        self.start_at_backend(id, request, buffer, ring);
    }

    fn start_at_backend(
        &mut self,
        id: RequestId,
        request: Request,
        buffer: Option<Buffer>,
        ring: &mut Ring,
    ) {
        match self.backend.queue.start(id, request, buffer, ring) {
            Started::Done(outcome) => self.finish(id, outcome),
            Started::Pending => {}
        }
    }

    fn finish_all(&mut self, mut ended: Vec<(RequestId, Outcome)>) {
        ended.drain(..).for_each(|(id, outcome)| self.finish(id, outcome));
        self.ended = ended;
    }

    fn finish(&mut self, id: RequestId, outcome: Outcome) {
        let Some(Outcome { result, buffer }) = self.retry_or_end(id, outcome) else { return };
        let running = self.in_flight.remove(id);
        self.modifications.ended(id, &running.request);
        if running.answered {
            self.pool.give_all(buffer);
        } else {
            self.answer(&running, result, buffer);
        }
    }

    /// Returns the outcome if the request has ended by it, `None` if it waits for the backend.
    fn retry_or_end(&mut self, id: RequestId, outcome: Outcome) -> Option<Outcome> {
        if outcome.result.is_ok() && !self.retries.in_outage() {
            return Some(outcome);
        }
        let circumstances = Circumstances {
            now_ns: self.now_ns,
            limit_ns: self.policy.outage_limit_ns(),
            keeps: self.keeps_requests(),
            retries_no_space: self.backend.image.retries_no_space(),
        };
        let running = self.in_flight.get_mut(id);
        let ended = self.retries.on_end(id, outcome, running, &circumstances);
        self.show_outage();
        ended
    }

    fn answer(&mut self, running: &Running, result: Result<(), IoError>, buffer: Option<Buffer>) {
        let Running { cookie, request, started_ns, .. } = running;
        self.sending.reply(*cookie, Some(request), result, buffer, &mut self.pool);
        self.statistics.ended(request.op, request.length, *started_ns, result);
    }

    /// Publishes the outage: first on the page, then to the watcher, which reads the page.
    fn show_outage(&mut self) {
        let waiting = self.retries.waiting();
        match self.retries.take_change() {
            None if self.retries.in_outage() => self.statistics.show_waiting(waiting),
            None => {}
            Some(OutageChange::Began) => {
                self.statistics.outage_began(waiting);
                self.policy.outage_changed();
            }
            Some(OutageChange::Ended { lasted_ns }) => {
                self.statistics.outage_ended(lasted_ns);
                self.policy.outage_changed();
            }
        }
    }
}

fn has_payload(request: &Request) -> bool {
    matches!(request.op, Op::Read | Op::Write)
}

fn payload_len(request: &Request) -> usize {
    usize::try_from(request.length).expect("the parser passes no payload above MAX_PAYLOAD")
}

const _: () = assert!(MAX_PAYLOAD as usize <= super::buffer_pool::LARGEST);
