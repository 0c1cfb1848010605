//! Random numbers, for mapping ids and for the jitter of retries.
//!
//! The generator (splitmix64) is seeded by the kernel or, in tests, by a number. It is not for
//! secrets.

use std::io::Read;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::error::{Error, Result};

/// A generator of random numbers that several threads may share.
#[derive(Debug)]
pub struct Random(AtomicU64);

impl Random {
    /// Creates a generator with a seed from the kernel. Blocks only in the first seconds of a boot.
    ///
    /// # Errors
    /// Returns an error if /dev/urandom cannot be read.
    pub fn from_kernel() -> Result<Self> {
        let mut seed = [0; 8];
        std::fs::File::open("/dev/urandom")
            .and_then(|mut file| file.read_exact(&mut seed))
            .map_err(|error| Error::from_io("cannot read /dev/urandom", error))?;
        Ok(Self::seeded(u64::from_ne_bytes(seed)))
    }

    /// Creates a generator that returns the same sequence for the same seed.
    pub fn seeded(seed: u64) -> Self {
        Self(AtomicU64::new(seed))
    }

    /// Returns the next number.
    pub fn next(&self) -> u64 {
        let step = 0x9e37_79b9_7f4a_7c15;
        let mut z = self.0.fetch_add(step, Ordering::Relaxed).wrapping_add(step);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns the time to wait before attempt `attempt` (counted from 1): it doubles from `first`
    /// up to `most`, plus up to a quarter, so that callers that failed at the same time do not retry
    /// at the same time.
    pub fn backoff(&self, attempt: u32, first: Duration, most: Duration) -> Duration {
        let doubled = first.saturating_mul(1 << attempt.saturating_sub(1).min(16)).min(most);
        let spread = u64::try_from(doubled.as_micros() / 4).unwrap_or(u64::MAX).max(1);
        doubled + Duration::from_micros(self.next() % spread)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_doubles_up_to_its_bound() {
        let random = Random::seeded(1);
        let (first, most) = (Duration::from_millis(100), Duration::from_secs(10));
        for attempt in 1..100 {
            let wait = random.backoff(attempt, first, most);
            assert!(wait >= first && wait <= most + most / 4, "{attempt}: {wait:?}");
        }
        assert!(random.backoff(3, first, most) >= 4 * first);
    }
}
