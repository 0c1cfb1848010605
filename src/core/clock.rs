//! The clock that the code of cleat reads: one trait, so that tests can set the time.
//!
//! Code that decides by time gets a [`Clock`] from its caller and does not read a clock of the system
//! itself. [`SystemClock`] is the real one. [`ManualClock`] moves only when a test moves it.

use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use nix::time::{ClockId, clock_gettime};

/// A source of time. Reading it never blocks.
pub trait Clock: Debug + Send + Sync {
    /// Returns the monotonic time, for deadlines and durations. It does not count time in which the machine
    /// is suspended.
    fn now(&self) -> Instant;

    /// Nanoseconds of CLOCK_MONOTONIC: the same time as [`Clock::now`], as a number that other
    /// processes of this boot understand.
    fn monotonic_ns(&self) -> u64;

    /// Nanoseconds of CLOCK_BOOTTIME: monotonic, and it counts time in which the machine is
    /// suspended.
    fn boot_ns(&self) -> u64;

    /// Returns the wall clock. An administrator or NTP may set it forwards and backwards, so it is only
    /// for output and logs, never for deadlines.
    fn wall(&self) -> SystemTime;

    /// Milliseconds of the wall clock since the Unix epoch; 0 if the clock is set before it.
    fn unix_ms(&self) -> u64 {
        let since = self.wall().duration_since(UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    }

    /// Seconds of the wall clock since the Unix epoch; 0 if the clock is set before it.
    fn unix_s(&self) -> u64 {
        self.unix_ms() / 1000
    }

    /// Returns the time that has passed since `earlier`; zero if `earlier` lies in the future.
    fn elapsed_since(&self, earlier: Instant) -> Duration {
        self.now().saturating_duration_since(earlier)
    }
}

/// The clocks of the operating system.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

#[allow(clippy::disallowed_methods, reason = "this is where the clocks of the system are read")]
impl Clock for SystemClock {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn monotonic_ns(&self) -> u64 {
        system_ns(ClockId::CLOCK_MONOTONIC)
    }

    fn boot_ns(&self) -> u64 {
        system_ns(ClockId::CLOCK_BOOTTIME)
    }

    fn wall(&self) -> SystemTime {
        SystemTime::now()
    }
}

fn system_ns(clock: ClockId) -> u64 {
    // Linux always has both clocks, so reading them cannot fail.
    let now = clock_gettime(clock).map(Duration::from).unwrap_or_default();
    nanoseconds(now)
}

/// Returns `duration` in nanoseconds. 64 bits suffice for 584 years.
fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// A clock for tests. It starts at 1 s of monotonic time and at the first second of 2030 of wall
/// time, and moves only by [`ManualClock::advance`].
#[derive(Debug)]
pub struct ManualClock {
    began: Instant,
    elapsed_ns: AtomicU64,
}

/// The wall time at which a manual clock starts: 2030-01-01T00:00:00Z.
const MANUAL_EPOCH: Duration = Duration::from_secs(1_893_456_000);

/// The monotonic time at which a manual clock starts. It is not 0, which several counters use for "never".
const MANUAL_START: Duration = Duration::from_secs(1);

impl ManualClock {
    /// Creates a clock that stands still.
    #[allow(clippy::disallowed_methods, reason = "an `Instant` has no other origin")]
    pub fn new() -> Self {
        Self { began: Instant::now(), elapsed_ns: AtomicU64::new(0) }
    }

    /// Moves all times of the clock forward by `duration`.
    pub fn advance(&self, duration: Duration) {
        self.elapsed_ns.fetch_add(nanoseconds(duration), Ordering::SeqCst);
    }

    fn elapsed(&self) -> Duration {
        Duration::from_nanos(self.elapsed_ns.load(Ordering::SeqCst))
    }
}

impl Default for ManualClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Instant {
        self.began + self.elapsed()
    }

    fn monotonic_ns(&self) -> u64 {
        nanoseconds(MANUAL_START + self.elapsed())
    }

    fn boot_ns(&self) -> u64 {
        self.monotonic_ns()
    }

    fn wall(&self) -> SystemTime {
        UNIX_EPOCH + MANUAL_EPOCH + self.elapsed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manual_clock_moves_only_by_advance() {
        let clock = ManualClock::new();
        let (began, ns, unix_s) = (clock.now(), clock.monotonic_ns(), clock.unix_s());
        assert_eq!(clock.now(), began);
        clock.advance(Duration::from_secs(90));
        assert_eq!(clock.elapsed_since(began), Duration::from_secs(90));
        assert_eq!(clock.monotonic_ns() - ns, 90_000_000_000);
        assert_eq!(clock.unix_s() - unix_s, 90);
        assert_eq!(clock.elapsed_since(began + Duration::from_secs(100)), Duration::ZERO);
    }

    #[test]
    fn the_system_clock_goes_forward() {
        let (first, second) = (SystemClock.monotonic_ns(), SystemClock.monotonic_ns());
        assert!(first > 0 && second >= first);
        assert!(SystemClock.boot_ns() >= first);
        // Any machine that builds this has a date after 2020.
        assert!(SystemClock.unix_s() > 1_577_836_800);
    }
}
