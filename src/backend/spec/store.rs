//! What is done to volumes as a whole, where they are kept: made, removed, resized, listed, cloned,
//! with their snapshots. For the command line and for controllers; the daemon is not needed for it.
//!
//! The contract of every [`Store`]:
//! - Repeating a call is safe. What is already as it was wanted succeeds, and the result says that
//!   nothing was changed; what exists with other properties is `AlreadyExists`, naming the difference.
//! - Nothing that is in use is taken away: `InUse` names by whom.
//! - A call ends. Reaching the storage has a limit; so has every operation, but those that tell of
//!   their progress, which may take as long as they get on. These can be told to end: what that
//!   leaves stands in the error, and another call goes on from there. What hit its limit may still
//!   take effect later.
//! - What only some backends can do is a capability of the store: [`SnapshotStore`], [`CloneStore`],
//!   [`TrashStore`].

use std::ops::ControlFlow;
use std::time::Duration;

use serde::Serialize;

use cleat_core::error::{Error, ErrorKind, Result};

/// Told several times a second how much of how much is done; both are zero until that is known.
/// `Break` asks the operation to end.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64) -> ControlFlow<()>;

/// Where volumes are kept. Names are those of [`crate::uri::VolumeUri::store_location`]. Results of
/// type `bool` say whether anything had to be changed.
pub trait Store: Send + Sync {
    /// Makes a volume.
    ///
    /// # Errors
    /// `AlreadyExists` where it has other properties; what the backend gives.
    fn create(&self, name: &str, size: u64, layout: &Layout) -> Result<bool>;

    /// Takes a volume away.
    ///
    /// # Errors
    /// `InUse` while somebody has it open, and with snapshots; what the backend gives.
    fn remove(&self, name: &str, how: Removal, progress: Progress<'_>) -> Result<Removed>;

    /// Gives a volume another size, a smaller one only with `shrink` and while nobody has it open.
    ///
    /// # Errors
    /// `InvalidArgument` for a smaller size without `shrink`; `InUse`; what the backend gives.
    fn resize(&self, name: &str, size: u64, shrink: bool, progress: Progress<'_>) -> Result<bool>;

    /// A part of the volumes, in the order of their names.
    ///
    /// # Errors
    /// What the backend gives.
    fn list(&self, page: &Page) -> Result<Listing>;

    /// What there is to be known of a volume, or of it as it was at a snapshot.
    ///
    /// # Errors
    /// `NotFound`; what the backend gives.
    fn info(&self, name: &str, snapshot: Option<&str>) -> Result<Info>;

    /// Returns the capability to take snapshots.
    fn snapshots(&self) -> Option<&dyn SnapshotStore> {
        None
    }

    /// Returns the capability to make writable volumes from snapshots.
    fn clones(&self) -> Option<&dyn CloneStore> {
        None
    }

    /// Returns the capability to keep removed volumes for a while.
    fn trash(&self) -> Option<&dyn TrashStore> {
        None
    }
}

/// Takes, lists and removes snapshots of volumes. Results of type `bool` say whether anything had to be
/// changed.
pub trait SnapshotStore {
    /// Returns the snapshots of the volume `name`, oldest first.
    ///
    /// # Errors
    /// The backend's error.
    fn list(&self, name: &str) -> Result<Vec<Snapshot>>;

    /// Takes a snapshot. Clients that have the volume open continue.
    ///
    /// # Errors
    /// The backend's error.
    fn create(&self, name: &str, snapshot: &str) -> Result<bool>;

    /// Removes a snapshot.
    ///
    /// # Errors
    /// `InUse` for a protected snapshot, and for one that clones need; the backend's error.
    fn remove(&self, name: &str, snapshot: &str) -> Result<bool>;

    /// Protects a snapshot from removal, or ends the protection.
    ///
    /// # Errors
    /// `InUse` when the protection is to end and clones need it; the backend's error.
    fn protect(&self, name: &str, snapshot: &str, protect: bool) -> Result<bool>;

    /// Restores the content that the volume had at the snapshot. What was written since is lost.
    ///
    /// # Errors
    /// `InUse` while a client has the volume open; the backend's error.
    fn rollback(&self, name: &str, snapshot: &str, progress: Progress<'_>) -> Result<()>;
}

/// Makes writable volumes from snapshots. Results of type `bool` say whether anything had to be changed.
pub trait CloneStore {
    /// Makes the volume `name` as a clone of a snapshot, which may be in another store of the backend.
    ///
    /// # Errors
    /// `AlreadyExists` where `name` is not a clone of that snapshot; the backend's error.
    fn create_clone(&self, source: &Source<'_>, name: &str, layout: &Layout) -> Result<bool>;

    /// Makes a clone independent of its parent.
    ///
    /// # Errors
    /// The backend's error.
    fn flatten(&self, name: &str, progress: Progress<'_>) -> Result<bool>;
}

/// Keeps removed volumes for a while. Results of type `bool` say whether anything had to be changed.
pub trait TrashStore {
    /// Returns the volumes in the trash, oldest first.
    ///
    /// # Errors
    /// The backend's error.
    fn entries(&self) -> Result<Vec<Trashed>>;

    /// Moves a volume back out of the trash, under the name `new_name` where that is given. `id`
    /// selects one of several volumes that had the same name.
    ///
    /// # Errors
    /// `NotFound`; `InvalidArgument` where several had the name; `AlreadyExists` where it is taken.
    fn restore(&self, name: &str, id: Option<&str>, new_name: Option<&str>) -> Result<bool>;

    /// Deletes volumes in the trash for good: these `ids`, or all; before their time only with `force`.
    /// A volume that cannot be deleted, for example because it is in use, does not stop the others.
    ///
    /// # Errors
    /// `NotFound` for an id that does not exist; `Aborted` when `progress` asked for the end; the
    /// backend's error.
    fn purge(&self, ids: &[String], force: bool, progress: Progress<'_>) -> Result<Purged>;
}

/// How a new volume lies in its storage; what is left out, the storage decides.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Layout {
    /// By the names that `rbd` gives them; those that these need come along.
    pub features: Option<Vec<String>>,
    /// In bytes, a power of two.
    pub object_size: Option<u64>,
    /// In bytes, with the number of objects that stripes are laid over.
    pub stripes: Option<(u64, u64)>,
    /// The pool that the data goes to.
    pub data_pool: Option<String>,
    /// For a clone: with 1 the snapshot must be protected, and stay; with 2, the default, not.
    pub clone_format: Option<u8>,
}

/// What a clone is made of.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    /// Where the volume is; reached by the clone's client, whatever its own options say.
    pub store: &'a dyn super::StoreSpec,
    pub name: &'a str,
    pub snapshot: &'a str,
}

/// Where a volume goes when it is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    /// Into the trash, which keeps it at least this long.
    Trash { keep: Duration },
    /// Its data is deleted.
    Now,
}

/// What removing a volume has done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Removed {
    /// False when there was no such volume.
    pub changed: bool,
    /// Where it is now, unless it was deleted.
    pub trash: Option<Trashed>,
}

/// Which part of a list is wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// Only names behind this one.
    pub after: Option<String>,
    /// At most so many.
    pub limit: usize,
    /// Asks each volume for its size and the rest.
    pub details: bool,
}

/// A part of a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Listing {
    pub volumes: Vec<Entry>,
    /// The last name, where there are more behind it.
    pub next: Option<String>,
}

/// A volume of a list; what costs a question of its own is null where it was not asked for.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Entry {
    pub name: String,
    pub uri: String,
    /// Stays when the volume is renamed.
    pub id: Option<String>,
    pub size_bytes: Option<u64>,
    /// The snapshot that it was cloned from, and whether that is of a volume in the trash.
    pub parent: Option<String>,
    pub snapshots: Option<usize>,
    /// How many clients have it open for writing.
    pub watchers: Option<usize>,
    /// Why it could not be asked.
    pub error: Option<Failure>,
}

/// What is wrong with one of several, which does not keep the others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Failure {
    pub kind: ErrorKind,
    pub message: String,
    pub repair: Option<String>,
}

/// In one line, with what can be done about it.
impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)?;
        self.repair.iter().try_for_each(|repair| write!(f, "; {repair}"))
    }
}

impl From<&Error> for Failure {
    fn from(error: &Error) -> Self {
        let repair = error.repair().map(str::to_owned);
        Self { kind: error.kind(), message: error.report(), repair }
    }
}

/// What there is to be known of a volume. What the backend does not have is null, or empty.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Info {
    pub name: String,
    pub uri: String,
    pub id: Option<String>,
    pub size_bytes: u64,
    /// Of its own, as it is now; null where it could not be told quickly.
    pub used_bytes: Option<u64>,
    pub created_at_s: Option<i64>,
    pub objects: Option<u64>,
    pub object_size_bytes: Option<u64>,
    pub object_prefix: Option<String>,
    pub stripe_unit_bytes: Option<u64>,
    pub stripe_count: Option<u64>,
    /// Where that is not the volume's own pool.
    pub data_pool: Option<String>,
    pub features: Vec<String>,
    /// What is wrong with the features' own records.
    pub flags: Vec<String>,
    pub parent: Option<Parent>,
    pub snapshots: Vec<Snapshot>,
    /// Null where this client may not look for them everywhere.
    pub clones: Option<Vec<String>>,
    /// What the mapping that may write has said of itself.
    pub claim: Option<serde_json::Value>,
    /// Who has it open for writing. Readers do not show.
    pub watchers: Vec<Watcher>,
    pub locks: Vec<Lock>,
}

/// What a clone was made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Parent {
    /// `pool[/namespace]/image@snapshot`; of an image in the trash, as it was called.
    pub name: String,
    pub image_id: String,
    /// Whether the image lies in the trash.
    pub in_trash: bool,
    /// Bytes from the beginning that may still be read from it.
    pub overlap_bytes: u64,
}

impl std::fmt::Display for Parent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)?;
        if self.in_trash { write!(f, " (in the trash, {})", self.image_id) } else { Ok(()) }
    }
}

/// A snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    pub id: u64,
    pub name: String,
    /// Of the volume when it was taken.
    pub size_bytes: u64,
    pub created_at_s: i64,
    pub protected: bool,
    /// `user`; `trash` for one that was removed and stays until its last clone is gone; `mirror` for
    /// one of mirroring; `other` for those of groups.
    pub kind: &'static str,
}

/// A client that has a volume open for writing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Watcher {
    pub client: String,
    pub address: String,
}

/// A lock on a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Lock {
    pub client: String,
    pub cookie: Option<String>,
    pub address: Option<String>,
}

/// A volume in the trash.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Trashed {
    pub id: String,
    /// What it was called.
    pub name: String,
    pub removed_at_s: i64,
    /// Until then only `force` removes it for good.
    pub kept_until_s: i64,
}

/// What was removed from the trash for good.
#[derive(Debug)]
pub struct Purged {
    pub removed: Vec<Trashed>,
    /// What could not be, and why.
    pub failed: Vec<(Trashed, Error)>,
    /// What is to be kept longer.
    pub waiting: Vec<Trashed>,
}
