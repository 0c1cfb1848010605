//! Capabilities: what only some backends can do with an open volume. [`Image`](crate::Image) returns each
//! one as `Option<&dyn …>`. A backend without the capability returns `None`, so that no method has to
//! answer "unsupported".

use std::time::Instant;

use cleat_core::error::Result;
use cleat_core::volume::Extent;

use crate::{CredentialSet, Waker};

/// Makes a volume larger while it is served.
pub trait Resize {
    /// Sets the size at the backend to `size` bytes, which must not be smaller than the present size.
    /// Blocks until the backend has answered.
    ///
    /// # Errors
    /// Returns `InvalidArgument` for a smaller size or one that is not a multiple of the block size,
    /// `PermissionDenied` for a read-only volume, and the backend's error otherwise.
    fn grow(&self, size: u64) -> Result<()>;
}

/// Makes a volume smaller while it is served.
pub trait Shrink {
    /// Removes the end of the volume at the backend, so that `size` bytes remain. The caller must have
    /// the user's explicit consent, and must ensure that no request reaches the removed range. Blocks
    /// until the backend has answered.
    ///
    /// # Errors
    /// Returns `InvalidArgument` for a size of 0, `PermissionDenied` for a read-only volume, and the
    /// backend's error otherwise.
    fn shrink_to(&self, size: u64) -> Result<()>;
}

/// Reports which parts of a volume are allocated.
pub trait Extents {
    /// Describes `length` bytes from `offset`, an aligned range inside the volume, as consecutive extents
    /// from `offset` on: at least one and at most `limit`. An extent that is reported as a hole was one at
    /// some moment during the call. Blocks until the backend has answered.
    ///
    /// # Errors
    /// Returns the backend's error.
    fn list(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<Extent>>;
}

/// Reports snapshots that are about to be taken at the backend, so that the volume can be quiesced first.
/// The volume must have been opened with
/// [`OpenOptions::snapshots`](crate::OpenOptions::snapshots).
pub trait SnapshotQuiesce {
    /// Sets the waker that the backend wakes when a snapshot is about to be taken, which then waits for
    /// [`SnapshotQuiesce::answer`], and again when the snapshot has ended. With `active` false (in a
    /// successor that has not taken over yet) all snapshots proceed without waiting.
    ///
    /// # Errors
    /// Returns `InvalidArgument` for a volume that is open read-only.
    fn watch(&self, waker: Waker, active: bool) -> Result<()>;

    /// Returns the number of the snapshot that waits or is being taken; each snapshot has its own number.
    /// Never blocks.
    fn pending(&self) -> Option<u64>;

    /// Lets snapshot `number` proceed, or rejects it with an errno. Returns whether it was still waiting.
    /// Does not wait for the backend.
    fn answer(&self, number: u64, result: Result<(), i32>) -> bool;
}

/// Keeps requests away from the volume while another client takes snapshots of several volumes, so that all of
/// them show the same moment ([`GroupSnapshotStore`](crate::group_snapshot::GroupSnapshotStore)). The other client
/// requests this hold in the storage. The owner of the volume
///
/// 1. finds the request in [`WriteHold::wanted`];
/// 2. waits until no request of the volume runs, and starts no other one;
/// 3. calls [`WriteHold::confirm`];
/// 4. continues when another hold or none is wanted, or after [`WriteHold::refuse`] has succeeded.
pub trait WriteHold {
    /// Sets the waker that the backend wakes when the wanted hold has changed. The owner calls this once.
    fn watch(&self, waker: Waker);

    /// Returns the number of the hold that is wanted; each hold has its own number. Never blocks.
    fn wanted(&self) -> Option<u64>;

    /// Tells the other client that no request runs until hold `number` ends. Blocks until the backend has
    /// answered, for a few seconds at most.
    ///
    /// # Errors
    /// Returns `Aborted` if that hold is not wanted any more, and the backend's error otherwise; the other client
    /// may then nevertheless find the confirmation later.
    fn confirm(&self, number: u64) -> Result<()>;

    /// Tells the other client that hold `number` was not or is no longer possible, and why. After success, requests
    /// may run. Blocks as [`WriteHold::confirm`] does.
    ///
    /// # Errors
    /// Returns the backend's error.
    fn refuse(&self, number: u64, reason: &str) -> Result<()>;
}

/// Stops the work that a backend does on threads of its own without a request: checks of the claim and of
/// the size, uploads, garbage collection.
///
/// The owner stops it before it releases the claim for a handover, and when it fails all I/O for a forced
/// unmap. [`Image::close`](crate::Image::close) and [`Handover::release`](crate::Handover::release)
/// must be correct without a stop before them.
pub trait BackgroundWork {
    /// Prevents the tasks from starting anything new, and waits until they have ended what they are doing, at
    /// most until `deadline` (monotonic time). Returns the tasks that have not ended then; they stop as soon
    /// as the backend lets them. A second call waits again for the same tasks.
    fn stop(&self, deadline: Instant) -> Vec<RunningTask>;

    /// Lets the tasks continue, for example after a handover that was cancelled. Does not block.
    fn restart(&self);
}

/// A background task that has not ended by the deadline of [`BackgroundWork::stop`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunningTask {
    /// The name of the task, for logs.
    pub name: &'static str,
    /// Whether a request of the task may still change the volume or its claim at the backend. A handover
    /// must not continue then, and a forced unmap counts the task like a request in flight.
    pub may_write: bool,
}

/// Replaces the credentials of an open volume, for example a token before it expires.
pub trait RenewCredentials {
    /// Uses `credentials`, the present content of all files of
    /// [`VolumeSpec::credential_files`](crate::VolumeSpec::credential_files), for all later requests to the
    /// storage. Requests in flight continue with the earlier ones. Does nothing if the content has not
    /// changed, and ignores secrets that are used only while a volume is opened, such as passphrases. Must
    /// not wait for the storage.
    ///
    /// # Errors
    /// Returns `InvalidArgument` if the credentials are malformed, and `Unsupported` if they have changed and
    /// only another open of the volume can use them. The earlier credentials stay in use in both cases.
    fn renew(&self, credentials: &CredentialSet) -> Result<()>;
}

/// Replaces the injected faults of a volume. Only in test builds.
#[cfg(feature = "fault")]
pub trait SetFault {
    /// Replaces the fault plan with `plan` (see `fault::plan`) and releases every request that hangs.
    ///
    /// # Errors
    /// Returns `InvalidArgument` when the text is not a fault plan.
    fn set_fault(&self, plan: &str) -> Result<()>;
}
