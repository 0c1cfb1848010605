//! Bounds the number of log lines that clients can cause. A client may send invalid requests as often as it
//! likes, over as many connections as it likes.

use std::time::{Duration, Instant};

/// The time in which at most a given number of lines is logged.
const INTERVAL: Duration = Duration::from_secs(60);

/// The log lines of one kind.
#[derive(Debug)]
pub(super) struct LogLimit {
    /// The maximum number of lines in an interval.
    lines: u32,
    /// When the current interval began.
    begun: Option<Instant>,
    /// The number of lines that were logged in the current interval.
    logged: u32,
    /// The number of lines that were not logged since the last one that was.
    unlogged: u64,
}

impl LogLimit {
    /// Allows `lines` lines in an interval of 60 s.
    pub(super) const fn new(lines: u32) -> Self {
        Self { lines, begun: None, logged: 0, unlogged: 0 }
    }

    /// Counts a line. If it should be logged, returns how many were not since the last one that was.
    pub(super) fn count(&mut self, now: Instant) -> Option<u64> {
        if self.begun.is_none_or(|begun| now.duration_since(begun) >= INTERVAL) {
            (self.begun, self.logged) = (Some(now), 0);
        }
        if self.logged >= self.lines {
            self.unlogged += 1;
            return None;
        }
        self.logged += 1;
        Some(std::mem::take(&mut self.unlogged))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_core::clock::{Clock, ManualClock};

    #[test]
    fn the_first_lines_of_an_interval_are_logged_with_the_number_of_those_before_them() {
        let mut limit = LogLimit::new(2);
        let clock = ManualClock::new();
        assert_eq!([(); 2].map(|()| limit.count(clock.now())), [Some(0); 2]);
        for _ in 0..1000 {
            assert_eq!(limit.count(clock.now()), None);
            clock.advance(Duration::from_millis(1));
        }
        clock.advance(INTERVAL - Duration::from_secs(1));
        assert_eq!(limit.count(clock.now()), Some(1000));
        assert_eq!(limit.count(clock.now()), Some(0));
        assert_eq!(limit.count(clock.now()), None);
        clock.advance(2 * INTERVAL);
        assert_eq!(limit.count(clock.now()), Some(1));
    }
}
