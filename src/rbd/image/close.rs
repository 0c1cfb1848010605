//! Closing an image. It releases the claim and waits for requests in flight, with a timeout.

use std::sync::mpsc;
use std::sync::{Arc, PoisonError};
use std::thread;
use std::time::Duration;

use super::RbdImage;
use crate::background::Background;
use crate::claim;
use crate::claim::record::Claim;
use crate::quiesce::Snapshots;
use crate::sharer::Sharer;
use cleat_core::error::Result;

/// The timeout of closing a volume that was served. After it, closing continues on its thread. It is long,
/// because a claim that is not released keeps other nodes out. The supervisor waits for longer.
pub(super) const CLOSE_TIMEOUT: Duration = Duration::from_secs(25);

/// The same for a volume that was opened and is not served.
pub(super) const DROP_TIMEOUT: Duration = Duration::from_secs(5);

/// The interval at which closing checks whether the last user of the image has ended.
const CLOSE_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// The parts of an open image that closing ends.
pub(super) struct Handles {
    /// `None` for a reader without a claim. To readers, librbd reports no changes.
    pub(super) background: Option<Background>,
    /// The registration for snapshots, if the volume was opened with it.
    pub(super) snapshots: Option<Snapshots>,
    pub(super) image: Arc<librbd::Image>,
}

impl RbdImage {
    /// Closes the image once. Closing releases the claim and the lock, so it waits for the cluster, but at
    /// most for `timeout`. Returns whether both are released.
    pub(super) fn close_once(&self, timeout: Duration) -> bool {
        let handles = self.handles.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(handles) = handles else { return true };
        let (sender, closed) = mpsc::channel();
        // A fenced client must not change the claim of another client.
        let claim = self.shared.claim().take().filter(|_| !self.shared.is_fenced());
        let name = self.name.clone();
        // The lock of the image does not keep other clients from an image that is shared.
        let (shared, claim): (Vec<_>, Vec<_>) = claim.into_iter().partition(Claim::is_shared);
        let sharer = self.sharer.as_ref().and_then(Sharer::take);
        let close = move || {
            let noted = |released: Result<()>| {
                released
                    .inspect_err(|error| {
                        let error = error.report();
                        tracing::warn!(image = %name, %error, "cannot release the claim");
                    })
                    .is_ok()
            };
            let release = |image: &librbd::Image, claims: &[Claim]| {
                noted(claims.iter().try_for_each(|claim| claim::release(image, claim, &name)))
            };
            let released = release(&handles.image, &claim);
            let closed = handles.close(|image| {
                let unshared = release(image, &shared);
                let unrecorded =
                    noted(sharer.map_or(Ok(()), |sharer| sharer.release(image, &name)));
                unshared && unrecorded
            });
            let _ = sender.send(closed.map(|last| released && last));
        };
        if let Err(error) = thread::Builder::new().name("rbd-close".to_owned()).spawn(close) {
            // The failed spawn has dropped the closure, which closes the image on this thread.
            tracing::warn!(image = %self.name, %error, "no thread for closing; closed without a timeout");
            return false;
        }
        match closed.recv_timeout(timeout) {
            Ok(Ok(released)) => return released,
            Ok(Err(error)) => tracing::warn!(image = %self.name, %error, "closing failed"),
            Err(_) => tracing::warn!(
                image = %self.name,
                "closing takes longer than {timeout:?}; the cluster does not answer"
            ),
        }
        false
    }
}

impl Handles {
    /// Ends the background work, waits for the last queue, and closes the image. Calls `at_last` when no
    /// request is in flight, and returns its result. Blocks without a limit.
    #[allow(
        clippy::disallowed_methods,
        reason = "it waits for other threads, on a thread of its own"
    )]
    fn close(self, at_last: impl FnOnce(&librbd::Image) -> bool) -> librbd::Result<bool> {
        drop(self.snapshots);
        self.background.into_iter().for_each(Background::end);
        let mut image = self.image;
        loop {
            match Arc::try_unwrap(image) {
                Ok(image) => {
                    let done = at_last(&image);
                    return image.close().map(|()| done);
                }
                // For example, a connection's thread has not ended yet.
                Err(shared) => image = shared,
            }
            thread::sleep(CLOSE_POLL_INTERVAL);
        }
    }
}
