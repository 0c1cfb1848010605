//! Snapshots of several volumes at the same moment. The volumes may be in several stores.
//!
//! The caller has the clients of all volumes hold their requests, takes a snapshot of each volume, and checks that
//! every hold has lasted until then:
//!
//! 1. [`GroupSnapshotStore::hold`] for each volume;
//! 2. [`Hold::wait`] for each volume: from then on, the volume does not change;
//! 3. [`SnapshotStore::create`](crate::store::SnapshotStore::create) for each volume;
//! 4. [`Hold::check`] for each volume. If one fails, the snapshots are not of the same moment;
//! 5. [`Hold::end`] for each volume, in any case.
//!
//! No clock is compared, and a crash of the caller delays the clients for some seconds only: a client ends a hold
//! by itself, and [`Hold::check`] then fails.

use std::time::Instant;

use cleat_core::error::Result;

/// Holds the requests of volumes, and renames their snapshots.
pub trait GroupSnapshotStore {
    /// Requests that the client that writes to the volume `name` holds its requests. Does not wait for it.
    ///
    /// # Errors
    /// Returns `InUse` if a client may write to the volume that cannot be asked, and the backend's error otherwise.
    fn hold(&self, name: &str) -> Result<Box<dyn Hold>>;

    /// Renames the snapshot `from` of the volume `name` to `to`. Returns `false` if `from` does not exist and `to`
    /// does.
    ///
    /// # Errors
    /// Returns `NotFound` if neither snapshot exists, `AlreadyExists` if both do, and the backend's error otherwise.
    fn rename_snapshot(&self, name: &str, from: &str, to: &str) -> Result<bool>;
}

/// A hold of one volume. A hold that is dropped without [`Hold::end`] ends when the client's patience does.
pub trait Hold: Send {
    /// Waits until no request of the volume runs, at most until `deadline`.
    ///
    /// # Errors
    /// Returns `InUse`, with the reason, if the client does not hold its requests, `TimedOut` if it does not answer,
    /// and the backend's error otherwise.
    fn wait(&self, deadline: Instant) -> Result<()>;

    /// Checks that the volume has not changed since [`Hold::wait`].
    ///
    /// # Errors
    /// Returns `Aborted` if it may have changed, and the backend's error otherwise.
    fn check(&self) -> Result<()>;

    /// Lets the client continue.
    ///
    /// # Errors
    /// Returns the backend's error. The client then continues by itself some seconds later.
    fn end(self: Box<Self>) -> Result<()>;
}
