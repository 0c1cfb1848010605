//! An open image: its control half, and the state that it shares with its queues.

mod capabilities;
mod close;
mod identity;
mod open;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cleat_backend::WriteHold;
use cleat_backend::claimant::Claimant;
use cleat_backend::{BackgroundWork, Completer, Extents, Handover, Image, ImageQueue, Resize};
use cleat_backend::{RenewCredentials, Shrink, SizeChecks, SnapshotQuiesce, VolumeIdentity, Waker};
use cleat_core::clock::SystemClock;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::volume::{BlockSizes, Features};
use cleat_grants::object::Mode;
use cleat_sys::ring::Ring;

use crate::claim::ClaimAttempt;
use crate::claim::decision::Purpose;
use crate::claim::header::ImageHeader;
use crate::errors;
use crate::keyring::ClientKey;
use crate::queue::RbdQueue;
use crate::quiesce::Snapshots;
use crate::shared::Shared;
use crate::sharer::Sharer;
use close::{CLOSE_TIMEOUT, DROP_TIMEOUT, Handles};

/// The interval at which the owner should read the size again. librbd reports changes only to writers, and
/// a report can be lost with the connection.
const SIZE_CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// An open image.
pub(crate) struct RbdImage {
    /// `None` after closing. Only calls of the control half lock it.
    handles: Mutex<Option<Handles>>,
    name: String,
    identity: VolumeIdentity,
    /// The claimant, and how it uses the image. `None` if the image is not claimed: it is read-only or several clients
    /// may write to it, and the mapping has no grant.
    claimant: Option<(Claimant, Mode)>,
    /// The mapping, if several clients may write to an image without claims.
    sharer: Option<Sharer>,
    /// The key that librados connected with; `None` if librados has read it by itself.
    key: Option<ClientKey>,
    blocks: BlockSizes,
    features: Features,
    shared: Arc<Shared>,
}

impl RbdImage {
    fn image(&self) -> Result<Arc<librbd::Image>> {
        let handles = self.handles.lock().unwrap_or_else(PoisonError::into_inner);
        handles.as_ref().map(|handles| Arc::clone(&handles.image)).ok_or_else(|| {
            Error::new(ErrorKind::Unavailable, format!("{} is already closed", self.name))
        })
    }

    /// Claims the image, if this volume has a claim, or records its client if it is shared.
    ///
    /// # Errors
    /// Returns `Fenced` if another client has taken the image over, or may have written to it since the last
    /// process of this mapping, and otherwise the error of the attempt.
    fn claim(&self, purpose: Purpose) -> Result<()> {
        let lost = |why: &dyn std::fmt::Display| {
            let message = format!("another client may have written to {}: {why}", self.name);
            Error::new(ErrorKind::Fenced, message)
        };
        if self.is_fenced() {
            return Err(lost(&"this client is fenced"));
        }
        let (image, name) = (self.image()?, &self.name);
        if let Some(sharer) = &self.sharer {
            let recorded = sharer.record(&image, name, purpose, &SystemClock);
            return recorded.inspect_err(|error| self.note_fenced(error));
        }
        let Some((claimant, mode)) = &self.claimant else { return Ok(()) };
        let header = &ImageHeader { image: &image, name };
        let attempt =
            ClaimAttempt { header, name, claimant, purpose, only: None, clock: &SystemClock };
        let acquired = match mode {
            Mode::ReadWrite => attempt.acquire(),
            mode => attempt.acquire_beside(*mode),
        };
        match acquired.inspect_err(|error| self.note_fenced(error))? {
            Ok(claim) => {
                *self.shared.claim() = Some(claim);
                Ok(())
            }
            Err(why) => {
                self.shared.set_fenced();
                let error = lost(&why);
                tracing::error!(image = name, "the device must not resume: {}", error.message());
                Err(error)
            }
        }
    }

    fn read_size(&self) -> Result<u64> {
        let size = self.image()?.size().map_err(|error| self.failed(error))?;
        self.shared.set_size(size);
        Ok(self.size())
    }

    /// Sets the volume to fenced if `error` says so.
    fn note_fenced(&self, error: &Error) {
        if error.kind() == ErrorKind::Fenced {
            self.shared.set_fenced();
        }
    }

    /// Calls `call` with the registration for snapshots. Returns `None` without a registration.
    fn with_snapshots<T>(&self, call: impl FnOnce(&Snapshots) -> T) -> Option<T> {
        let handles = self.handles.lock().unwrap_or_else(PoisonError::into_inner);
        handles.as_ref().and_then(|handles| handles.snapshots.as_ref()).map(call)
    }

    fn failed(&self, error: librbd::Error) -> Error {
        let error = errors::image_error(error, &self.name);
        self.note_fenced(&error);
        error
    }
}

impl Image for RbdImage {
    fn size(&self) -> u64 {
        self.shared.size.load(Ordering::Acquire)
    }

    fn block_sizes(&self) -> BlockSizes {
        self.blocks
    }

    fn features(&self) -> Features {
        self.features
    }

    fn identity(&self) -> VolumeIdentity {
        self.identity.clone()
    }

    fn queue(&self, _ring: &mut Ring, completer: &Completer) -> Result<Box<dyn ImageQueue>> {
        let (image, shared) = (self.image()?, Arc::clone(&self.shared));
        Ok(Box::new(RbdQueue::new(&image, shared, completer.clone())))
    }

    fn refresh_size(&self) -> Result<u64> {
        self.read_size()
    }

    fn watch_changes(&self, waker: Waker) {
        // The worker that serves the volume calls this once.
        let _ = self.shared.watcher.set(waker);
    }

    fn size_checks(&self) -> SizeChecks {
        SizeChecks::Every(SIZE_CHECK_INTERVAL)
    }

    /// A request that fails for lack of space has no effect later: the OSDs have answered it.
    fn retries_no_space(&self) -> bool {
        true
    }

    fn failure_reason(&self) -> Option<String> {
        self.shared.pool_space.failure_reason(&self.name)
    }

    fn is_fenced(&self) -> bool {
        self.shared.is_fenced()
    }

    fn resize(&self) -> Option<&dyn Resize> {
        Some(self)
    }

    fn shrink(&self) -> Option<&dyn Shrink> {
        Some(self)
    }

    /// Returns `None` for an encrypted image, because librbd would report the extents of the ciphertext.
    fn extents(&self) -> Option<&dyn Extents> {
        self.shared.luks_header.is_none().then_some(self as &dyn Extents)
    }

    fn handover(&self) -> Option<&dyn Handover> {
        Some(self)
    }

    fn snapshot_quiesce(&self) -> Option<&dyn SnapshotQuiesce> {
        Some(self)
    }

    /// Returns `None` for an image whose claim names no single writer.
    fn write_hold(&self) -> Option<&dyn WriteHold> {
        let mode = self.claimant.as_ref().map(|(_, mode)| *mode);
        (mode == Some(Mode::ReadWrite)).then_some(self as &dyn WriteHold)
    }

    fn background(&self) -> Option<&dyn BackgroundWork> {
        Some(self)
    }

    fn renew_credentials(&self) -> Option<&dyn RenewCredentials> {
        Some(self)
    }

    fn close(&self) -> bool {
        self.close_once(CLOSE_TIMEOUT)
    }
}

impl Drop for RbdImage {
    fn drop(&mut self) {
        self.close_once(DROP_TIMEOUT);
    }
}
