//! Notices that the volume was fenced: that another client owns it now.
//!
//! The control thread checks whenever its loop turns. The backend wakes it when the volume is fenced
//! ([`Image::watch_changes`](cleat_backend::Image::watch_changes)). No request depends on the check, because
//! the backend refuses every request of a fenced client by itself.
//!
//! Invariant: a volume that was fenced stays fenced.

use cleat_backend::Image;
use cleat_core::request::IoError;
use cleat_statistics::Page;

/// Whether the volume was fenced. See the file's comment.
#[derive(Debug)]
pub(super) struct FenceMonitor {
    fenced: bool,
    /// Requests that failed as fenced before this worker: the page keeps what earlier workers counted.
    failed_before: u64,
}

impl FenceMonitor {
    /// Makes the monitor of a volume with this statistics page.
    pub(super) fn new(page: &Page) -> Self {
        Self { fenced: false, failed_before: fenced_requests(page) }
    }

    /// Whether the volume was fenced when this was last checked.
    pub(super) fn is_fenced(&self) -> bool {
        self.fenced
    }

    /// Checks the volume. Returns whether it was fenced since the last check.
    pub(super) fn check(&mut self, page: &Page, image: &dyn Image) -> bool {
        if self.fenced || !(image.is_fenced() || fenced_requests(page) != self.failed_before) {
            return false;
        }
        tracing::error!(
            "the volume belongs to another client now; this worker writes nothing more"
        );
        self.fenced = true;
        true
    }
}

fn fenced_requests(page: &Page) -> u64 {
    page.snapshot().errors_of(IoError::Fenced)
}
