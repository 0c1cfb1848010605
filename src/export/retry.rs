//! What becomes of requests that the backend cannot serve just now ([`IoError::Retry`], and `NoSpace`
//! where [`Image::retries_no_space`](cleat_backend::Image::retries_no_space) says so): they are not
//! answered but kept, with their buffers, and started again until they end otherwise or the owner's
//! patience does ([`cleat_core::policy::OnOutage`]).
//!
//! A kept request keeps its place in the in_flight and its buffer, so it is bounded as every running one
//! is, and with the bounds reached the connection stops reading. There is one clock a connection: all
//! that waits is started again together, after 100 ms, then at intervals that double up to 5 s. A
//! request that ends otherwise, be it a new one, shows that the backend is there again: what waits is
//! then started at once, but never within 100 ms of the attempt before, so that a backend of which
//! one part serves and another does not is not asked in a loop.
//!
//! Why this keeps what was promised: to its sender a kept request is one in flight, and those have no
//! order among each other ("Ordering of messages and writes" in proto.md). Nobody has been told that
//! it is done, so nothing can depend on it yet. A FLUSH covers writes that *completed* before it came,
//! to which a kept write does not belong; a FLUSH that is kept itself covers the more. And an attempt
//! that ended with `Retry` is over by the backend's contract: it cannot land after its repetition.
//!
//! What waits on a connection that its peer has closed is never started again: the kernel's driver
//! gives up a socket of several whose request takes 30 s, and sends the request again over another; a
//! late twin could overwrite what has been written since.

use std::collections::VecDeque;
use std::os::fd::AsFd;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::End;
use super::connection::Connection;
use super::in_flight::Running;
use cleat_backend::{Outcome, RequestId};
use cleat_core::request::{Flags, IoError, Op, Request};
use cleat_sys::buffer::Buffer;

const FIRST_PAUSE_NS: u64 = 100_000_000;
const LONGEST_PAUSE_NS: u64 = 5_000_000_000;

/// The outage of one connection, if there is one. Times are on the connection's clock.
#[derive(Debug)]
pub(super) struct Retries {
    /// Oldest first, each with what it ended with; has room for as many as can run.
    waiting: VecDeque<(RequestId, Option<Buffer>, IoError)>,
    /// What is missing is room, of which only what modifies can tell.
    full: bool,
    /// Requests that have waited, were started again, and have not ended yet.
    restarted: usize,
    /// Since the backend could not serve a request and nothing has shown that it can.
    since_ns: Option<u64>,
    /// When what waits is started again.
    due_ns: Option<u64>,
    /// Between the attempts.
    pause_ns: u64,
    attempted_ns: u64,
    /// Of `since_ns`, on the boot-time clock.
    boot_since_ns: u64,
}

impl Retries {
    pub(super) fn new(depth: usize) -> Self {
        Self {
            waiting: VecDeque::with_capacity(depth),
            full: false,
            restarted: 0,
            since_ns: None,
            due_ns: None,
            pause_ns: FIRST_PAUSE_NS,
            attempted_ns: 0,
            boot_since_ns: 0,
        }
    }

    /// When there is something to do, if no other event comes before.
    pub(super) fn due_ns(&self, patience_ns: u64) -> Option<u64> {
        let since_ns = self.since_ns?;
        let expiry_ns = since_ns.saturating_add(patience_ns);
        match self.waiting.is_empty() {
            true => self.due_ns,
            false => Some(self.due_ns.unwrap_or(u64::MAX).min(expiry_ns)),
        }
    }

    fn arm(&mut self, now_ns: u64) {
        if self.due_ns.is_none() {
            // Up to a quarter shorter, by what the clock happens to show: volumes that lost the same
            // backend at the same time do not come back to it in step.
            let shorter_ns = self.pause_ns / 1024 * (now_ns & 0xff);
            self.due_ns = Some(now_ns + self.pause_ns - shorter_ns);
        }
    }

    /// Lengthens the pause after the attempt that is about to be made.
    fn attempt(&mut self, now_ns: u64) {
        self.due_ns = None;
        self.attempted_ns = now_ns;
        self.pause_ns = (self.pause_ns * 2).min(LONGEST_PAUSE_NS);
    }

    /// The backend serves: tries what waits soon. Returns whether the outage is over.
    fn backend_answers(&mut self, now_ns: u64) -> bool {
        self.pause_ns = FIRST_PAUSE_NS;
        if !self.waiting.is_empty() {
            let soon_ns = now_ns.max(self.attempted_ns + FIRST_PAUSE_NS);
            self.due_ns = Some(self.due_ns.map_or(soon_ns, |due_ns| due_ns.min(soon_ns)));
        }
        self.waiting.is_empty() && self.restarted == 0
    }
}

impl Connection {
    /// Takes note of how a request ended at the backend. Gives its end back if it is to be answered;
    /// `None` if it waits to be started again.
    pub(super) fn settle(&mut self, id: RequestId, outcome: Outcome) -> Option<Outcome> {
        let trouble = match outcome.result {
            Err(error @ IoError::Retry) => Some(error),
            Err(error @ IoError::NoSpace) if self.image.retries_no_space() => Some(error),
            _ => None,
        };
        if trouble.is_none() && self.retries.since_ns.is_none() {
            return Some(outcome);
        }
        let now_ns = self.now_ns;
        let running = self.in_flight.get_mut(id);
        if std::mem::take(&mut running.retried) {
            self.retries.restarted -= 1;
        }
        let Some(trouble) = trouble else {
            let tells = !self.retries.full || running.request.op.modifies();
            if tells && self.retries.backend_answers(now_ns) {
                self.end_outage();
            }
            return Some(outcome);
        };
        let may_wait = !running.answered && self.ending.is_none() && !self.fail_io;
        let since_ns = self.retries.since_ns.unwrap_or(now_ns);
        let keep = may_wait && now_ns < since_ns.saturating_add(self.policy.patience_ns());
        self.retries.full = trouble == IoError::NoSpace;
        if self.retries.full && !keep {
            self.end_wait_for_room();
            return Some(outcome);
        }
        self.retries.since_ns = Some(since_ns);
        self.retries.arm(now_ns);
        let began = self.retries.boot_since_ns == 0;
        if began {
            // Zero would mean none.
            self.retries.boot_since_ns = cleat_statistics::boot_now_ns().max(1);
        }
        let answered = if keep {
            self.in_flight.get_mut(id).retried = true;
            self.retries.waiting.push_back((id, outcome.buffer, trouble));
            None
        } else {
            Some(outcome)
        };
        self.show_outage();
        if began {
            self.policy.outage_changed();
        }
        answered
    }

    /// Starts again or gives up what waits, if it is time.
    pub(super) fn tend_outage(&mut self) {
        let Some(since_ns) = self.retries.since_ns else { return };
        let now_ns = self.elapsed_ns();
        let expired = now_ns >= since_ns.saturating_add(self.policy.patience_ns());
        if expired || self.fail_io || self.ending.is_some() {
            self.fail_waiting();
        }
        if self.retries.due_ns.is_none_or(|due_ns| now_ns < due_ns) {
            return;
        }
        self.retries.attempt(now_ns);
        self.now_ns = now_ns;
        if self.ending.is_some() || self.fail_io {
            return;
        }
        if self.retries.waiting.is_empty() {
            if !self.retries.full {
                self.probe();
            }
            return;
        }
        if self.peer_has_left() {
            self.end_reading(End::Closed);
            return self.fail_waiting();
        }
        for _ in 0..self.retries.waiting.len() {
            let Some((id, buffer, _)) = self.retries.waiting.pop_front() else { break };
            self.retries.restarted += 1;
            let request = self.in_flight.get_mut(id).request;
            self.start_at_backend(id, request, buffer);
        }
        self.show_outage();
    }

    /// Answers what waits with an error: it will not be started again.
    pub(super) fn fail_waiting(&mut self) {
        if self.retries.waiting.is_empty() {
            return;
        }
        while let Some((id, buffer, error)) = self.retries.waiting.pop_front() {
            let Running { cookie, request, started_ns, .. } = self.in_flight.remove(id);
            self.answer(cookie, Some(request), started_ns, Err(error), buffer);
        }
        self.show_outage();
        self.end_wait_for_room();
    }

    /// A lack of room is an outage for as long as something waits for it: nothing else would show its
    /// end.
    fn end_wait_for_room(&mut self) {
        let Retries { full, waiting, restarted, since_ns, .. } = &self.retries;
        if *full && since_ns.is_some() && waiting.is_empty() && *restarted == 0 {
            self.end_outage();
        }
    }

    /// Whether the peer has closed the connection in both directions, whatever of it is still to be
    /// read: as the kernel's driver closes its socketpairs.
    pub(super) fn peer_has_left(&self) -> bool {
        let left = PollFlags::POLLHUP | PollFlags::POLLERR;
        let mut set = [PollFd::new(self.file.as_fd(), PollFlags::empty())];
        poll(&mut set, PollTimeout::ZERO).is_ok()
            && set[0].revents().is_some_and(|seen| seen.intersects(left))
    }

    /// Reads a block for nobody, where no request is left that would show the end of the outage.
    fn probe(&mut self) {
        let length = u64::from(self.image.block_sizes().minimum);
        let buffer = usize::try_from(length).ok().and_then(|length| self.pool.take(length));
        // Of a connection that rests the volume may be somebody else's.
        if self.in_flight.len() > 0 || buffer.is_none() || self.is_pausing() {
            buffer.into_iter().for_each(|buffer| self.pool.give(buffer));
            return self.retries.arm(self.now_ns);
        }
        let request = Request { op: Op::Read, flags: Flags::default(), offset: 0, length };
        let started_ns = self.now_ns;
        let nobody = Running { cookie: 0, request, started_ns, answered: true, retried: false };
        let id = self.in_flight.insert(nobody);
        self.answered += 1;
        self.start_at_backend(id, request, buffer);
    }

    fn end_outage(&mut self) {
        if let Some(since_ns) = self.retries.since_ns.take() {
            self.recorder.stalled(self.now_ns.saturating_sub(since_ns));
        }
        self.retries.due_ns = None;
        self.retries.boot_since_ns = 0;
        self.show_outage();
        self.policy.outage_changed();
    }

    fn show_outage(&self) {
        let Retries { waiting, boot_since_ns, .. } = &self.retries;
        self.recorder.set_outage(waiting.len() as u64, *boot_since_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn outage(now_ns: u64) -> Retries {
        let mut retries = Retries::new(4);
        retries.since_ns = Some(now_ns);
        retries.waiting.push_back((0, None, IoError::Retry));
        retries
    }

    #[test]
    fn pauses_double_and_have_an_end() {
        let mut retries = outage(0);
        let (mut now_ns, mut pauses) = (0, Vec::new());
        for _ in 0..12 {
            retries.arm(now_ns);
            let due_ns = retries.due_ns(u64::MAX).unwrap();
            pauses.push(due_ns - now_ns);
            now_ns = due_ns;
            retries.attempt(now_ns);
        }
        for (index, pause_ns) in pauses.iter().enumerate() {
            let nominal_ns = (FIRST_PAUSE_NS << index.min(10)).min(LONGEST_PAUSE_NS);
            assert!((nominal_ns * 3 / 4..=nominal_ns).contains(pause_ns), "{pauses:?}");
        }
    }

    #[test]
    fn an_answer_brings_the_next_attempt_forward_but_never_into_a_loop() {
        let mut retries = outage(0);
        for now_ns in [0, 100 * MS, 300 * MS, 700 * MS] {
            retries.arm(now_ns);
            retries.attempt(now_ns);
        }
        retries.arm(701 * MS);
        assert!(retries.due_ns(u64::MAX).unwrap() > 1300 * MS);
        assert!(!retries.backend_answers(702 * MS));
        assert_eq!(retries.due_ns(u64::MAX), Some(800 * MS));
        assert!(!retries.backend_answers(1000 * MS));
        assert_eq!(retries.due_ns(u64::MAX), Some(800 * MS));
        retries.waiting.clear();
        retries.restarted = 1;
        assert!(!retries.backend_answers(1000 * MS), "one is under way");
        retries.restarted = 0;
        assert!(retries.backend_answers(1000 * MS));
    }

    #[test]
    fn the_end_of_patience_is_a_reason_to_wake_up() {
        let mut retries = outage(1000 * MS);
        retries.arm(1000 * MS);
        assert_eq!(retries.due_ns(10 * MS), Some(1010 * MS));
        retries.attempt(1000 * MS);
        assert_eq!(retries.due_ns(50 * MS), Some(1050 * MS));
        // With nothing that waits there is nothing to give up.
        retries.waiting.clear();
        assert_eq!(retries.due_ns(50 * MS), None);
        assert_eq!(Retries::new(1).due_ns(0), None);
    }
}
