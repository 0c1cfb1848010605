//! What the volume reports without a command: that it was fenced, that a sync has failed, and outages.
//!
//! Invariant: each change is returned once, and [`Monitors::state`] has what was returned so far.

use std::sync::Arc;
use std::time::Duration;

use super::fence_monitor::FenceMonitor;
use super::sync_monitor::SyncMonitor;
use crate::outage_monitor::OutageMonitor;
use crate::protocol::FromWorker;
use cleat_backend::Image;
use cleat_core::clock::Clock;
use cleat_statistics::Page;

/// How often the reason of an outage is read while it lasts.
const OUTAGE_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Monitors {
    fence: FenceMonitor,
    sync: SyncMonitor,
    outage: OutageMonitor,
}

impl Monitors {
    /// Makes the monitors of a volume with this statistics page.
    pub(super) fn new(page: &Page, clock: Arc<dyn Clock>) -> Self {
        Self {
            fence: FenceMonitor::new(page),
            sync: SyncMonitor::default(),
            outage: OutageMonitor::new(clock),
        }
    }

    /// Returns what has changed since the last check.
    pub(super) fn check(&mut self, page: &Page, image: &dyn Image) -> Vec<FromWorker> {
        let fenced = self.fence.check(page, image).then_some(FromWorker::Fenced);
        let sync_failed = self.sync.check(page, image).then_some(FromWorker::SyncFailed);
        let outage = self.outage.check(page, image);
        [fenced, sync_failed, outage].into_iter().flatten().collect()
    }

    /// Returns the messages that describe the present state to a new supervisor.
    pub(super) fn state(&self) -> Vec<FromWorker> {
        let fenced = self.fence.is_fenced().then_some(FromWorker::Fenced);
        let sync_failed = self.sync.has_failed().then_some(FromWorker::SyncFailed);
        let outage = self.outage.lasts().then(|| self.outage.message());
        [fenced, sync_failed, outage].into_iter().flatten().collect()
    }

    /// The time until the next check that no event triggers.
    pub(super) fn timeout(&self) -> Option<Duration> {
        self.outage.lasts().then_some(OUTAGE_INTERVAL)
    }
}
