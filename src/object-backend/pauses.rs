//! Whether this process was stopped for a while, for example by SIGSTOP. Another client may have taken the volume over
//! meanwhile, so a write is then not acknowledged before the store has accepted an object again.
//!
//! This protects no data: whatever a fenced client writes is in no history, and a flush of it fails. It only keeps a
//! client that wakes up from acknowledging writes that are lost already.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The time between two signs of life from which on the process counts as stopped. There is one about every second.
const PAUSE: Duration = Duration::from_secs(2);

/// The pauses of a process. Times are those of CLOCK_BOOTTIME, in nanoseconds.
#[derive(Debug, Default)]
pub(crate) struct Pauses(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// The last sign of life; 0: none yet.
    last_ns: u64,
    /// The number of pauses, and of those after which the store has accepted an object.
    count: u64,
    over: u64,
}

impl Pauses {
    /// Records a sign of life at `now_ns`. Returns the number of pauses.
    pub(crate) fn look(&self, now_ns: u64) -> u64 {
        self.lock().look(now_ns)
    }

    /// Whether the store has accepted an object since the last pause.
    pub(crate) fn are_over(&self, now_ns: u64) -> bool {
        let mut state = self.lock();
        state.look(now_ns) == state.over
    }

    /// The store has accepted an object that was sent when there were `count` pauses.
    pub(crate) fn end(&self, count: u64) {
        let mut state = self.lock();
        state.over = state.over.max(count);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn look(&mut self, now_ns: u64) -> u64 {
        // Another thread may have taken its time later.
        let pause = Duration::from_nanos(now_ns.saturating_sub(self.last_ns));
        self.count += u64::from(self.last_ns != 0 && pause >= PAUSE);
        self.last_ns = self.last_ns.max(now_ns);
        self.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn a_pause_is_over_when_the_store_has_accepted_an_object() {
        let pauses = Pauses::default();
        assert!(pauses.are_over(100 * SECOND), "nothing is known of the time before");
        assert!(pauses.are_over(101 * SECOND));
        assert!(!pauses.are_over(103 * SECOND));
        let before = pauses.look(104 * SECOND);
        // Another pause, while the object was sent.
        pauses.look(110 * SECOND);
        pauses.end(before);
        assert!(!pauses.are_over(111 * SECOND));
        let now = pauses.look(112 * SECOND);
        pauses.end(now);
        pauses.end(before);
        assert!(pauses.are_over(113 * SECOND));
    }
}
