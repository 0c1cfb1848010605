//! The rate at which the collector may copy data, as an option of a URI.

use std::time::{Duration, Instant};

use cleat_backend::uri::{invalid, parse_size, shown};
use cleat_core::error::Result;

/// The name of the option with the bytes per second.
pub(crate) const COLLECT_RATE: &str = "collect_rate";

/// The smallest rate, at which the copies of one step take some seconds.
const MIN_RATE: u64 = 1 << 20;

/// The time whose bytes are kept while the collector has nothing to copy.
const MAX_KEPT: Duration = Duration::from_secs(2);

/// Parses the value of the option, in bytes per second.
///
/// # Errors
/// Returns `InvalidArgument` unless it is a size of at least 1 MiB.
pub(crate) fn parse(text: &str) -> Result<u64> {
    let wrong = || {
        invalid(format!("{COLLECT_RATE} is at least 1M a second, not {:?}", shown(text)))
            .with_repair("write for example collect_rate=50M, or leave it out for no limit")
    };
    match parse_size(text) {
        Ok(rate) if rate >= MIN_RATE => Ok(rate),
        Ok(_) => Err(wrong()),
        Err(error) => Err(wrong().with_source(error)),
    }
}

/// What the collector is granted as time passes.
pub(crate) struct Grants {
    /// Bytes per second; `None`: there is no limit.
    rate: Option<u64>,
    last: Instant,
}

impl Grants {
    pub(crate) fn new(rate: Option<u64>, now: Instant) -> Self {
        Self { rate, last: now }
    }

    /// The most that is kept, in bytes.
    pub(crate) fn max(rate: Option<u64>) -> Option<u64> {
        rate.map(|rate| bytes(rate, MAX_KEPT))
    }

    /// Returns the bytes for the time since the last call.
    pub(crate) fn due(&mut self, now: Instant) -> u64 {
        let time = now.saturating_duration_since(std::mem::replace(&mut self.last, now));
        self.rate.map_or(0, |rate| bytes(rate, time.min(MAX_KEPT)))
    }
}

fn bytes(rate: u64, time: Duration) -> u64 {
    let bytes = u128::from(rate) * time.as_millis() / 1000;
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use cleat_core::clock::{Clock, ManualClock};

    use super::*;

    #[test]
    fn a_rate_is_a_size_of_at_least_a_mebibyte() {
        assert_eq!(parse("1M").unwrap(), 1 << 20);
        assert_eq!(parse("50Mi").unwrap(), 50 << 20);
        for text in ["", "0", "1023K", "-1", "fast", "1M/s"] {
            let error = parse(text).expect_err(text);
            assert!(error.message().contains("at least 1M a second"), "{text}: {error}");
        }
    }

    #[test]
    fn bytes_are_granted_for_the_time_that_has_passed_up_to_a_limit() {
        let clock = ManualClock::new();
        let mut grants = Grants::new(Some(1 << 20), clock.now());
        assert_eq!(grants.due(clock.now()), 0);
        clock.advance(Duration::from_millis(500));
        assert_eq!(grants.due(clock.now()), 1 << 19);
        assert_eq!(grants.due(clock.now()), 0, "each time counts once");
        clock.advance(Duration::from_secs(3600));
        assert_eq!(grants.due(clock.now()), 2 << 20);
        assert_eq!(Grants::max(Some(1 << 20)), Some(2 << 20));
        let mut unlimited = Grants::new(None, clock.now());
        clock.advance(Duration::from_secs(1));
        assert_eq!((unlimited.due(clock.now()), Grants::max(None)), (0, None));
    }
}
