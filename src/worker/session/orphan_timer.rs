//! Ends a worker that has neither a supervisor nor a connection for [`ORPHAN_TIMEOUT`].
//!
//! Invariant: the timer runs exactly while the last check found neither.

use std::time::{Duration, Instant};

/// How long a worker without a supervisor and without connections waits for either.
pub(super) const ORPHAN_TIMEOUT: Duration = Duration::from_secs(600);

/// The time since when the worker is an orphan. See the file's comment.
#[derive(Debug, Default)]
pub(super) struct OrphanTimer {
    since: Option<Instant>,
}

impl OrphanTimer {
    /// How long the control thread may wait before the next check; `None` while the timer does not run.
    pub(super) fn timeout(&self, now: Instant) -> Option<Duration> {
        self.since.map(|since| ORPHAN_TIMEOUT.saturating_sub(now.saturating_duration_since(since)))
    }

    /// Checks whether the worker should end.
    pub(super) fn check(&mut self, is_orphan: bool, now: Instant) -> bool {
        if !is_orphan {
            self.since = None;
            return false;
        }
        let since = *self.since.get_or_insert(now);
        now.saturating_duration_since(since) >= ORPHAN_TIMEOUT
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_core::clock::{Clock, ManualClock};

    #[test]
    fn an_orphan_ends_after_its_timeout_and_a_visitor_restarts_the_timer() {
        let (clock, mut timer) = (ManualClock::new(), OrphanTimer::default());
        let second = Duration::from_secs(1);
        assert!(!timer.check(true, clock.now()));
        assert_eq!(timer.timeout(clock.now()), Some(ORPHAN_TIMEOUT));
        clock.advance(ORPHAN_TIMEOUT - second);
        assert!(!timer.check(true, clock.now()));
        assert_eq!(timer.timeout(clock.now()), Some(second));
        assert!(!timer.check(false, clock.now()));
        assert_eq!(timer.timeout(clock.now()), None);
        clock.advance(second);
        assert!(!timer.check(true, clock.now()));
        clock.advance(ORPHAN_TIMEOUT);
        assert!(timer.check(true, clock.now()));
    }
}
