//! Notices from the statistics page when an outage of the backend begins and ends, and puts it into
//! words for the supervisor.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::protocol::{FromWorker, Outage};
use cleat_backend::Image;
use cleat_statistics::{Page, boot_now_ns};

/// The longest reason that is passed on, in characters.
const MAX_REASON: usize = 1024;

/// What the supervisor has been told.
#[derive(Debug, Default)]
pub(super) struct OutageMonitor {
    told: Option<Outage>,
    since_ns: u64,
}

impl OutageMonitor {
    /// Whether there is an outage.
    pub(super) fn lasts(&self) -> bool {
        self.told.is_some()
    }

    /// What there is to tell, if it is not what was told last.
    pub(super) fn look(&mut self, page: &Page, image: &dyn Image) -> Option<FromWorker> {
        let since_ns = page.snapshot().outage_since_ns;
        let now = match since_ns {
            0 => None,
            _ => {
                let reason =
                    image.failure_reason().map(|text| text.chars().take(MAX_REASON).collect());
                // Computed once an outage: the clocks may be set meanwhile.
                let since_unix_ms = match &self.told {
                    Some(told) if self.since_ns == since_ns => told.since_unix_ms,
                    _ => unix_ms(since_ns),
                };
                Some(Outage { since_unix_ms, reason })
            }
        };
        self.since_ns = since_ns;
        if self.told == now {
            return None;
        }
        match (&self.told, &now) {
            (None, Some(Outage { reason, .. })) => tracing::warn!(
                reason = reason.as_deref().unwrap_or("unknown"),
                "the backend does not answer"
            ),
            (Some(_), None) => tracing::info!("the backend answers again"),
            _ => {}
        }
        self.told = now;
        Some(self.message())
    }

    /// What was told last.
    pub(super) fn message(&self) -> FromWorker {
        FromWorker::Outage { outage: self.told.clone() }
    }
}

/// A moment on the boot-time clock in milliseconds since the epoch.
fn unix_ms(boot_ns: u64) -> u64 {
    let age = Duration::from_nanos(boot_now_ns().saturating_sub(boot_ns));
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.saturating_sub(age).as_millis()).unwrap_or(u64::MAX)
}
