//! The options of a URI for the collector: how fast it may copy data, and how much space it leaves to garbage.

use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use cleat_backend::uri::{Options, Size, invalid, parse_size, shown};
use cleat_core::error::Result;

/// The name of the option with the bytes per second.
pub(crate) const COLLECT_RATE: &str = "collect_rate";

/// The name of the option with the space in percent of the data.
pub(crate) const MAX_SPACE: &str = "max_space";

/// The smallest rate, at which the copies of one step take some seconds.
const MIN_RATE: u64 = 1 << 20;

/// The time whose bytes are kept while the collector has nothing to copy.
const MAX_KEPT: Duration = Duration::from_secs(2);

/// The space in percent of the data that a user can choose. The collector frees space only where the copies take at most
/// three quarters of it, so less than 134 percent is never reached.
const SPACES: RangeInclusive<u64> = 140..=1000;

/// What a URI says about the collector of a volume.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Collector {
    /// The bytes per second that it copies at most; `None`: there is no limit.
    pub(crate) rate: Option<u64>,
    /// The space of the log objects in percent of the data in them, from which it copies; `None`: the default.
    pub(crate) max_space: Option<u64>,
}

impl Collector {
    /// Takes its options.
    ///
    /// # Errors
    /// Returns `InvalidArgument` with the valid choices.
    pub(crate) fn take(options: &mut Options) -> Result<Self> {
        let (rate, space) = (options.take(COLLECT_RATE), options.take(MAX_SPACE));
        let rate = rate.map(|text| parse_rate(&text)).transpose()?;
        Ok(Self { rate, max_space: space.map(|text| parse_space(&text)).transpose()? })
    }

    /// Returns the options that are given.
    pub(crate) fn options(&self) -> [(&'static str, Option<String>); 2] {
        [
            (COLLECT_RATE, self.rate.map(|rate| Size(rate).to_string())),
            (MAX_SPACE, self.max_space.map(|percent| percent.to_string())),
        ]
    }

    /// Returns what is given here or, where nothing is given, in `other`.
    pub(crate) fn or(self, other: Self) -> Self {
        Self { rate: self.rate.or(other.rate), max_space: self.max_space.or(other.max_space) }
    }
}

fn parse_space(text: &str) -> Result<u64> {
    let percent = text.parse().ok().filter(|percent| SPACES.contains(percent));
    percent.ok_or_else(|| {
        invalid(format!("{MAX_SPACE} is 140 to 1000 percent of the data, not {:?}", shown(text)))
            .with_repair("write for example max_space=200, or leave it out for 150")
    })
}

/// Parses bytes per second: a size of at least 1 MiB.
fn parse_rate(text: &str) -> Result<u64> {
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
        assert_eq!(parse_rate("1M").unwrap(), 1 << 20);
        assert_eq!(parse_rate("50Mi").unwrap(), 50 << 20);
        for text in ["", "0", "1023K", "-1", "fast", "1M/s"] {
            let error = parse_rate(text).expect_err(text);
            assert!(error.message().contains("at least 1M a second"), "{text}: {error}");
        }
    }

    #[test]
    fn a_space_is_a_percentage_above_that_of_the_data() {
        assert_eq!((parse_space("140").unwrap(), parse_space("1000").unwrap()), (140, 1000));
        for text in ["", "100", "1001", "1.5", "150%", "-200"] {
            let error = parse_space(text).expect_err(text);
            assert!(error.message().contains("140 to 1000 percent"), "{text}: {error}");
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
