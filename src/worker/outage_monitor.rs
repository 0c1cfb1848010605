//! Reports the beginning and the end of an outage of the backend, which the statistics page shows.
//!
//! Invariant: the time of the beginning is computed once for each outage, because the clocks may be set while
//! it lasts.

use std::sync::Arc;
use std::time::Duration;

use super::protocol::{FromWorker, Outage};
use cleat_backend::Image;
use cleat_core::clock::Clock;
use cleat_statistics::Page;

/// The maximum length of a reason, in characters.
const MAX_REASON: usize = 1024;

/// The outage that was last reported. See the file's comment.
#[derive(Debug)]
pub(super) struct OutageMonitor {
    clock: Arc<dyn Clock>,
    reported: Option<Outage>,
    /// The beginning of that outage on the clock of boot time, in nanoseconds.
    since_ns: u64,
}

impl OutageMonitor {
    /// Makes the monitor of a volume without an outage.
    pub(super) fn new(clock: Arc<dyn Clock>) -> Self {
        Self { clock, reported: None, since_ns: 0 }
    }

    /// Whether an outage lasts.
    pub(super) fn lasts(&self) -> bool {
        self.reported.is_some()
    }

    /// Returns what should be reported, if it differs from the last report.
    pub(super) fn check(&mut self, page: &Page, image: &dyn Image) -> Option<FromWorker> {
        let since_ns = page.snapshot().outage_since_ns;
        let now = match since_ns {
            0 => None,
            _ => {
                let reason =
                    image.failure_reason().map(|text| text.chars().take(MAX_REASON).collect());
                let since_unix_ms = match &self.reported {
                    Some(reported) if self.since_ns == since_ns => reported.since_unix_ms,
                    _ => self.unix_ms(since_ns),
                };
                Some(Outage { since_unix_ms, reason })
            }
        };
        self.since_ns = since_ns;
        if self.reported == now {
            return None;
        }
        match (&self.reported, &now) {
            (None, Some(Outage { reason, .. })) => tracing::warn!(
                reason = reason.as_deref().unwrap_or("unknown"),
                "the backend does not answer"
            ),
            (Some(_), None) => tracing::info!("the backend answers again"),
            _ => {}
        }
        self.reported = now;
        Some(self.message())
    }

    /// The last report.
    pub(super) fn message(&self) -> FromWorker {
        FromWorker::Outage { outage: self.reported.clone() }
    }

    /// Converts a time on the clock of boot time to milliseconds since the Unix epoch.
    fn unix_ms(&self, boot_ns: u64) -> u64 {
        let age = Duration::from_nanos(self.clock.boot_ns().saturating_sub(boot_ns));
        let age_ms = u64::try_from(age.as_millis()).unwrap_or(u64::MAX);
        self.clock.unix_ms().saturating_sub(age_ms)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::{Instant, SystemTime};

    use super::*;
    use crate::fake_image::FakeImage;
    use cleat_core::clock::ManualClock;

    #[test]
    fn an_outage_is_reported_at_its_beginning_and_end_with_the_time_of_its_beginning() {
        let clock = Arc::new(ManualClock::new());
        let (page, _) = Page::create().unwrap();
        let recorder = page.any_recorder().unwrap();
        let (image, mut monitor) = (FakeImage::default(), OutageMonitor::new(clock.clone()));
        assert_eq!(monitor.check(&page, &image), None);
        let (since_ns, since_unix_ms) = (clock.boot_ns(), clock.unix_ms());
        recorder.set_outage(1, since_ns);
        clock.advance(Duration::from_secs(30));
        let outage = Some(Outage { since_unix_ms, reason: None });
        assert_eq!(monitor.check(&page, &image), Some(FromWorker::Outage { outage }));
        assert!(monitor.lasts());
        clock.advance(Duration::from_secs(30));
        assert_eq!(monitor.check(&page, &image), None);
        recorder.set_outage(0, 0);
        assert_eq!(monitor.check(&page, &image), Some(FromWorker::Outage { outage: None }));
        assert!(!monitor.lasts());
    }

    /// A clock whose wall time an administrator sets.
    #[derive(Debug, Default)]
    struct SetClock {
        clock: ManualClock,
        ahead_s: AtomicU64,
    }

    impl Clock for SetClock {
        fn now(&self) -> Instant {
            self.clock.now()
        }

        fn monotonic_ns(&self) -> u64 {
            self.clock.monotonic_ns()
        }

        fn boot_ns(&self) -> u64 {
            self.clock.boot_ns()
        }

        fn wall(&self) -> SystemTime {
            self.clock.wall() + Duration::from_secs(self.ahead_s.load(Ordering::Relaxed))
        }
    }

    #[test]
    fn each_outage_keeps_the_time_that_it_had_at_its_beginning() {
        let clock = Arc::new(SetClock::default());
        let (page, _) = Page::create().unwrap();
        let recorder = page.any_recorder().unwrap();
        let (image, mut monitor) = (FakeImage::default(), OutageMonitor::new(clock.clone()));
        let first_unix_ms = clock.unix_ms();
        recorder.set_outage(1, clock.boot_ns());
        assert!(monitor.check(&page, &image).is_some());
        clock.ahead_s.store(3600, Ordering::Relaxed);
        assert_eq!(monitor.check(&page, &image), None);
        let outage = Some(Outage { since_unix_ms: first_unix_ms, reason: None });
        assert_eq!(monitor.message(), FromWorker::Outage { outage });
        // Between two checks it has ended, and another one has begun.
        clock.clock.advance(Duration::from_secs(5));
        recorder.set_outage(1, clock.boot_ns());
        let outage = Some(Outage { since_unix_ms: clock.unix_ms(), reason: None });
        assert_eq!(monitor.check(&page, &image), Some(FromWorker::Outage { outage }));
    }
}
