//! Notices that a sync of the volume has failed ([`Image::sync_failed`]).
//!
//! The control thread checks whenever its loop turns. The backend wakes it when a sync has failed
//! ([`Image::watch_changes`]).
//!
//! The failure is recorded in the statistics page, which survives the worker, before the supervisor gets a
//! message.
//!
//! Invariant: a sync that has failed stays failed, also in the later workers of the mapping.

use cleat_backend::Image;
use cleat_statistics::Page;

/// Whether a failed sync was reported. See the file's comment.
#[derive(Debug, Default)]
pub(super) struct SyncMonitor {
    failed: bool,
}

impl SyncMonitor {
    /// Whether a sync had failed when this was last checked.
    pub(super) fn has_failed(&self) -> bool {
        self.failed
    }

    /// Checks the volume. Returns whether a sync has failed since the last check. The backend has logged the
    /// failure.
    pub(super) fn check(&mut self, page: &Page, image: &dyn Image) -> bool {
        if self.failed || !image.sync_failed() {
            return false;
        }
        self.failed = true;
        page.set_sync_failed();
        true
    }
}
