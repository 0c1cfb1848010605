//! Requests that the backend cannot serve now ([`IoError::Retry`], and `NoSpace` where
//! [`Image::retries_no_space`](cleat_backend::Image::retries_no_space) returns `true`) are not answered. They
//! wait here with their buffers and are started again until they end otherwise, or until the outage has
//! lasted longer than the owner's policy allows ([`cleat_core::policy::OnOutage`]).
//!
//! Invariants:
//! - A waiting request keeps its place in the in-flight table and its buffer, so it is bounded as every
//!   running request is. With the bounds reached, the connection stops reading.
//! - All waiting requests are started again together: after 100 ms, then at intervals that double up to
//!   5 s. A request that ends otherwise, a new one included, shows that the backend serves again; the next
//!   attempt then follows at once, but never within 100 ms of the one before, because one part of a
//!   backend may serve while another does not.
//!
//! Why this keeps the promises of NBD: for the client, a waiting request is in flight, and requests in
//! flight have no order among each other ("Ordering of messages and writes" in proto.md). The client has
//! no reply yet, so nothing can depend on the request. A FLUSH covers writes that *completed* before it
//! arrived, and a waiting write has not. A FLUSH that waits covers more writes than it must. And an attempt
//! that ended with `Retry` is over, by the backend's contract: it cannot land after its repetition.
//!
//! Nothing is started again on a connection that its peer has closed: the kernel's driver gives up a socket
//! of several whose request takes 30 s, and sends the request again over another one. A late twin could
//! overwrite what was written since. For the attempt that is at the backend at that time, see
//! `modifications`.
//!
//! This type decides and remembers; `requests` starts and replies. All times are nanoseconds on the
//! connections' clock, and the caller passes them in.

use std::collections::VecDeque;

use super::in_flight::Running;
use cleat_backend::{Outcome, RequestId};
use cleat_core::request::IoError;
use cleat_sys::buffer::Buffer;

const FIRST_PAUSE_NS: u64 = 100_000_000;
const LONGEST_PAUSE_NS: u64 = 5_000_000_000;

/// The outage of one connection, if there is one. See the file's comment.
#[derive(Debug)]
pub(super) struct Retries {
    /// Oldest first, each with its last error. Has room for as many requests as can run.
    waiting: VecDeque<Waiting>,
    /// The outage is a lack of space, and only requests that modify the volume show its end.
    no_space: bool,
    /// Requests that have waited, were started again, and have not ended yet.
    restarted: usize,
    /// When the backend could not serve a request for the first time since it was last seen to serve.
    since_ns: Option<u64>,
    /// When the waiting requests are started again.
    due_ns: Option<u64>,
    /// The pause between two attempts.
    pause_ns: u64,
    attempted_ns: u64,
    change: Option<OutageChange>,
}

/// A request that waits to be started again.
#[derive(Debug)]
pub(super) struct Waiting {
    /// Its number in the in-flight table.
    pub(super) id: RequestId,
    /// Its buffer.
    pub(super) buffer: Option<Buffer>,
    /// The error of its last attempt.
    pub(super) error: IoError,
}

/// A change of the outage, for the statistics and the worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OutageChange {
    /// An outage has begun.
    Began,
    /// It is over.
    Ended {
        /// How long it has lasted.
        lasted_ns: u64,
    },
}

/// The circumstances in which a request has ended at the backend.
#[derive(Debug, Clone, Copy)]
pub(super) struct Circumstances {
    pub(super) now_ns: u64,
    /// How long an outage may last before requests fail; `u64::MAX`: for ever.
    pub(super) limit_ns: u64,
    /// Whether the connection keeps requests at all: it is not ending and fails no I/O.
    pub(super) keeps: bool,
    /// Whether the volume waits for space.
    pub(super) retries_no_space: bool,
}

impl Circumstances {
    fn is_trouble(&self, result: Result<(), IoError>) -> Option<IoError> {
        match result {
            Err(error @ IoError::Retry) => Some(error),
            Err(error @ IoError::NoSpace) if self.retries_no_space => Some(error),
            _ => None,
        }
    }
}

impl Retries {
    pub(super) fn new(depth: usize) -> Self {
        Self {
            waiting: VecDeque::with_capacity(depth),
            no_space: false,
            restarted: 0,
            since_ns: None,
            due_ns: None,
            pause_ns: FIRST_PAUSE_NS,
            attempted_ns: 0,
            change: None,
        }
    }

    /// Whether there is an outage.
    pub(super) fn in_outage(&self) -> bool {
        self.since_ns.is_some()
    }

    /// Whether the outage is a lack of space.
    pub(super) fn is_for_space(&self) -> bool {
        self.no_space
    }

    /// The number of waiting requests.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Takes the last change of the outage.
    pub(super) fn take_change(&mut self) -> Option<OutageChange> {
        self.change.take()
    }

    /// Returns when there is something to do, if no other event comes before.
    pub(super) fn due_ns(&self, limit_ns: u64) -> Option<u64> {
        let expiry_ns = self.since_ns?.saturating_add(limit_ns);
        match self.waiting.is_empty() {
            true => self.due_ns,
            false => Some(self.due_ns.unwrap_or(u64::MAX).min(expiry_ns)),
        }
    }

    /// Whether the outage has lasted for longer than `limit_ns`.
    pub(super) fn has_expired(&self, now_ns: u64, limit_ns: u64) -> bool {
        self.since_ns.is_some_and(|since_ns| now_ns >= since_ns.saturating_add(limit_ns))
    }

    /// Handles the end of a request at the backend. Returns its outcome if it is to be answered,
    /// `None` if it waits from here on.
    pub(super) fn on_end(
        &mut self,
        id: RequestId,
        outcome: Outcome,
        running: &mut Running,
        now: &Circumstances,
    ) -> Option<Outcome> {
        let trouble = now.is_trouble(outcome.result);
        if trouble.is_none() && self.since_ns.is_none() {
            return Some(outcome);
        }
        if std::mem::take(&mut running.retried) {
            self.restarted -= 1;
        }
        let Some(error) = trouble else {
            if !self.no_space || running.request.op.modifies() {
                self.backend_serves(now.now_ns);
            }
            return Some(outcome);
        };
        let since_ns = self.since_ns.unwrap_or(now.now_ns);
        let expires_ns = since_ns.saturating_add(now.limit_ns);
        let keep = now.keeps && !running.answered && now.now_ns < expires_ns;
        self.no_space = error == IoError::NoSpace;
        if self.no_space && !keep {
            self.end_wait_for_space(now.now_ns);
            return Some(outcome);
        }
        if self.since_ns.is_none() {
            self.change = Some(OutageChange::Began);
        }
        self.since_ns = Some(since_ns);
        self.arm(now.now_ns);
        if !keep {
            return Some(outcome);
        }
        running.retried = true;
        self.waiting.push_back(Waiting { id, buffer: outcome.buffer, error });
        None
    }

    /// Begins an attempt if it is time. Returns whether it is; [`Retries::next`] then gives the requests to
    /// start, and without any, the caller should [probe](Retries::postpone).
    pub(super) fn begin_attempt(&mut self, now_ns: u64) -> bool {
        if self.since_ns.is_none() || self.due_ns.is_none_or(|due_ns| now_ns < due_ns) {
            return false;
        }
        self.due_ns = None;
        self.attempted_ns = now_ns;
        // Of the pause after this attempt.
        self.pause_ns = (self.pause_ns * 2).min(LONGEST_PAUSE_NS);
        true
    }

    /// Takes the oldest waiting request, to start it again. It has waited for the last time unless
    /// [`Retries::on_end`] keeps it once more.
    pub(super) fn next(&mut self) -> Option<Waiting> {
        let waiting = self.waiting.pop_front()?;
        self.restarted += 1;
        Some(waiting)
    }

    /// Takes the oldest waiting request, to answer it with its error.
    pub(super) fn give_up(&mut self) -> Option<Waiting> {
        self.waiting.pop_front()
    }

    /// Sets the time of the next attempt, where the last one has started nothing.
    pub(super) fn postpone(&mut self, now_ns: u64) {
        self.arm(now_ns);
    }

    /// Ends a lack of space once no request waits for it: nothing else would show its end.
    pub(super) fn end_wait_for_space(&mut self, now_ns: u64) {
        if self.no_space && self.waiting.is_empty() && self.restarted == 0 {
            self.end(now_ns);
        }
    }

    fn arm(&mut self, now_ns: u64) {
        if self.due_ns.is_none() {
            // Up to a quarter shorter, by the lowest bits of the time: volumes that lost the same backend
            // at the same time should not come back to it at the same time.
            let shorter_ns = self.pause_ns / 1024 * (now_ns & 0xff);
            self.due_ns = Some(now_ns + self.pause_ns - shorter_ns);
        }
    }

    /// A request has shown that the backend serves: the outage is over unless requests wait, and those
    /// are started again at the next attempt.
    fn backend_serves(&mut self, now_ns: u64) {
        self.pause_ns = FIRST_PAUSE_NS;
        if !self.waiting.is_empty() {
            let soon_ns = now_ns.max(self.attempted_ns + FIRST_PAUSE_NS);
            self.due_ns = Some(self.due_ns.map_or(soon_ns, |due_ns| due_ns.min(soon_ns)));
        } else if self.restarted == 0 {
            self.end(now_ns);
        }
    }

    fn end(&mut self, now_ns: u64) {
        if let Some(since_ns) = self.since_ns.take() {
            let lasted_ns = now_ns.saturating_sub(since_ns);
            self.change = Some(OutageChange::Ended { lasted_ns });
        }
        self.due_ns = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_core::request::{Flags, Op, Request};

    const MS: u64 = 1_000_000;

    const NOW: Circumstances =
        Circumstances { now_ns: 0, limit_ns: u64::MAX, keeps: true, retries_no_space: true };

    fn running(op: Op) -> Running {
        let request = Request { op, flags: Flags::default(), offset: 0, length: 512 };
        Running { cookie: 0, request, started_ns: 0, answered: false, retried: false }
    }

    /// Ends a request; whether it waits from here on.
    fn waits_after(
        retries: &mut Retries,
        now: Circumstances,
        op: Op,
        error: Option<IoError>,
    ) -> bool {
        let outcome = Outcome { result: error.map_or(Ok(()), Err), buffer: None };
        retries.on_end(0, outcome, &mut running(op), &now).is_none()
    }

    /// An outage with one waiting request.
    fn outage(now_ns: u64) -> Retries {
        let mut retries = Retries::new(4);
        let now = Circumstances { now_ns, ..NOW };
        assert!(waits_after(&mut retries, now, Op::Read, Some(IoError::Retry)));
        assert_eq!(retries.take_change(), Some(OutageChange::Began));
        retries
    }

    /// Starts the waiting request again, which fails again.
    fn attempt(retries: &mut Retries, now_ns: u64) {
        let Waiting { id, buffer, error } = retries.next().expect("one waits");
        let mut running = Running { retried: true, ..running(Op::Read) };
        let outcome = Outcome { result: Err(error), buffer };
        let now = Circumstances { now_ns, ..NOW };
        assert!(retries.on_end(id, outcome, &mut running, &now).is_none());
    }

    #[test]
    fn pauses_double_and_have_an_end() {
        let mut retries = outage(0);
        let (mut now_ns, mut pauses) = (0, Vec::new());
        for _ in 0..12 {
            let due_ns = retries.due_ns(u64::MAX).unwrap();
            pauses.push(due_ns - now_ns);
            assert!(!retries.begin_attempt(due_ns - 1));
            now_ns = due_ns;
            assert!(retries.begin_attempt(now_ns));
            attempt(&mut retries, now_ns);
        }
        for (index, pause_ns) in pauses.iter().enumerate() {
            let nominal_ns = (FIRST_PAUSE_NS << index.min(10)).min(LONGEST_PAUSE_NS);
            assert!((nominal_ns * 3 / 4..=nominal_ns).contains(pause_ns), "{pauses:?}");
        }
    }

    #[test]
    fn a_success_brings_the_next_attempt_forward_but_never_into_a_loop() {
        let mut retries = outage(0);
        for now_ns in [100 * MS, 300 * MS, 700 * MS] {
            assert!(retries.begin_attempt(now_ns));
            attempt(&mut retries, now_ns);
        }
        assert!(retries.due_ns(u64::MAX).unwrap() > 1200 * MS);
        let at = |now_ns| Circumstances { now_ns, ..NOW };
        assert!(!waits_after(&mut retries, at(702 * MS), Op::Read, None));
        assert_eq!(retries.due_ns(u64::MAX), Some(800 * MS));
        assert!(!waits_after(&mut retries, at(1000 * MS), Op::Read, None));
        assert_eq!(retries.due_ns(u64::MAX), Some(800 * MS));
        let waiting = retries.next().unwrap();
        assert!(!waits_after(&mut retries, at(1000 * MS), Op::Read, None));
        assert!(retries.in_outage(), "an attempt is under way");
        let mut restarted = Running { retried: true, ..running(Op::Read) };
        let outcome = Outcome { result: Ok(()), buffer: waiting.buffer };
        assert!(retries.on_end(0, outcome, &mut restarted, &at(1000 * MS)).is_some());
        assert!(!retries.in_outage());
        let ended = OutageChange::Ended { lasted_ns: 1000 * MS };
        assert_eq!(retries.take_change(), Some(ended));
    }

    #[test]
    fn the_end_of_the_limit_is_a_reason_to_wake_up() {
        let mut retries = outage(1000 * MS);
        assert_eq!(retries.due_ns(10 * MS), Some(1010 * MS));
        assert!(
            !retries.has_expired(1009 * MS, 10 * MS) && retries.has_expired(1010 * MS, 10 * MS)
        );
        assert!(retries.begin_attempt(1100 * MS));
        assert_eq!(retries.due_ns(500 * MS), Some(1500 * MS));
        // Without waiting requests, no request fails.
        assert!(retries.give_up().is_some());
        assert_eq!(retries.due_ns(500 * MS), None);
        assert_eq!(Retries::new(1).due_ns(0), None);
    }

    #[test]
    fn a_request_waits_only_within_the_limit_and_while_the_connection_keeps_any() {
        let retry = Some(IoError::Retry);
        let mut retries = Retries::new(4);
        assert!(!waits_after(&mut retries, Circumstances { limit_ns: 0, ..NOW }, Op::Read, retry));
        assert!(retries.in_outage(), "it is shown all the same");
        let ending = Circumstances { keeps: false, ..NOW };
        assert!(!waits_after(&mut Retries::new(4), ending, Op::Read, retry));
        let mut retries = outage(0);
        let late = Circumstances { now_ns: 30 * MS, limit_ns: 30 * MS, ..NOW };
        assert!(!waits_after(&mut retries, late, Op::Read, retry));
        assert_eq!(retries.waiting(), 1);
    }

    /// Volumes that have lost the same backend at the same time do not all return to it at the same time.
    #[test]
    fn pauses_differ_by_up_to_a_quarter() {
        let pause_ns = |now_ns: u64| outage(now_ns).due_ns(u64::MAX).unwrap() - now_ns;
        let pauses: Vec<u64> = (1_000..1_256).map(pause_ns).collect();
        let (shortest, longest) = (pauses.iter().min().unwrap(), pauses.iter().max().unwrap());
        assert_eq!(*longest, FIRST_PAUSE_NS);
        assert!((FIRST_PAUSE_NS * 3 / 4..FIRST_PAUSE_NS * 4 / 5).contains(shortest), "{shortest}");
    }

    /// The caller asks the backend by a request of its own then.
    #[test]
    fn an_attempt_without_a_waiting_request_is_repeated_after_a_pause() {
        let mut retries = Retries::new(4);
        let failing = Circumstances { limit_ns: 0, ..NOW };
        assert!(!waits_after(&mut retries, failing, Op::Read, Some(IoError::Retry)));
        assert!(!retries.is_for_space());
        assert_eq!((retries.waiting(), retries.due_ns(0)), (0, Some(100 * MS)));
        assert!(retries.begin_attempt(100 * MS));
        assert_eq!(retries.due_ns(0), None);
        retries.postpone(100 * MS);
        assert_eq!(retries.due_ns(0), Some(300 * MS));
        retries.end_wait_for_space(100 * MS);
        assert!(retries.in_outage(), "the outage is none of space");
    }

    #[test]
    fn a_lack_of_space_is_over_when_a_write_succeeds_or_none_waits() {
        let no_space = Some(IoError::NoSpace);
        let mut retries = Retries::new(4);
        let plain = Circumstances { retries_no_space: false, ..NOW };
        assert!(!waits_after(&mut retries, plain, Op::Write, no_space));
        assert!(!retries.in_outage());
        assert!(waits_after(&mut retries, NOW, Op::Write, no_space) && retries.is_for_space());
        let later = Circumstances { now_ns: 200 * MS, ..NOW };
        let due_ns = retries.due_ns(u64::MAX);
        assert!(!waits_after(&mut retries, later, Op::Read, None));
        assert_eq!(retries.due_ns(u64::MAX), due_ns, "a read shows nothing");
        retries.end_wait_for_space(later.now_ns);
        assert!(retries.in_outage(), "a request waits");
        assert!(retries.give_up().is_some());
        retries.end_wait_for_space(later.now_ns);
        assert!(!retries.in_outage());
        // A write with space shows the end, unless others still wait.
        assert!(waits_after(&mut retries, NOW, Op::Write, no_space));
        let waiting = retries.next().unwrap();
        retries.end_wait_for_space(later.now_ns);
        assert!(retries.in_outage(), "an attempt is under way");
        let mut restarted = Running { retried: true, ..running(Op::Write) };
        let outcome = Outcome { result: Ok(()), buffer: waiting.buffer };
        assert!(retries.on_end(0, outcome, &mut restarted, &later).is_some());
        assert!(!retries.in_outage());
    }
}
