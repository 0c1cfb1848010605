//! The management of volumes and snapshots in the place that stores them: create, remove, resize, list,
//! clone. The command line and controllers use it without the daemon.
//!
//! The contract of every [`Store`]:
//! - A call can be repeated. If the result already exists, the call succeeds and returns that it changed
//!   nothing. If something else exists under the name, it fails with `AlreadyExists` and names the
//!   difference.
//! - A call removes nothing that is in use: it fails with `InUse` and names the user.
//! - A call ends within a limit, and so does the connection to the storage. Operations that report
//!   progress have no limit while they make progress, but the caller can stop them; the error then says
//!   what is left, and another call continues. A call that reached its limit may still take effect later.
//! - Operations that only some backends support are capabilities of the store: [`SnapshotStore`],
//!   [`CloneStore`], [`GroupSnapshotStore`], [`TrashStore`], [`LabelStore`], [`ReclaimStore`],
//!   [`NetworkFenceStore`].
//!
//! Fields of results that a backend does not have are `None` (null in JSON), or empty. Every method returns
//! the backend's error if the storage refuses the call or does not answer.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

pub use super::check::{
    CheckStore, Checked, DamagedRange, Defect, Refused, Repair, Repaired, Unreferenced,
};
pub use super::progress::Progress;
use crate::changes::ChangeStore;
use crate::group_snapshot::GroupSnapshotStore;
use crate::network_fence::NetworkFenceStore;
use cleat_core::error::{Error, ErrorKind, Result};

/// Texts with keys that are stored with a volume and removed with it. Clones do not inherit them. See
/// [`LabelStore`].
pub type Labels = BTreeMap<String, String>;

/// A place that holds volumes. Names are those of [`crate::uri::VolumeUri::store_location`]. Results of
/// type `bool` say whether the call changed anything.
pub trait Store: Send + Sync {
    /// Creates a volume of `size` bytes.
    ///
    /// # Errors
    /// Returns `AlreadyExists` if the volume exists with other properties or, where [`Layout::labels`] has any,
    /// with other labels, and the backend's error otherwise.
    fn create(&self, name: &str, size: u64, layout: &Layout) -> Result<bool>;

    /// Removes a volume.
    ///
    /// # Errors
    /// Returns `InUse` while a client has the volume open or while it has snapshots, and the backend's error
    /// otherwise.
    fn remove(&self, name: &str, how: Removal, progress: Progress<'_>) -> Result<Removed>;

    /// Sets the size of a volume to `size` bytes. A smaller size requires `shrink`, and that no client has
    /// the volume open.
    ///
    /// # Errors
    /// Returns `InvalidArgument` for a smaller size without `shrink`, `InUse` if a client has the volume open,
    /// and the backend's error otherwise.
    fn resize(&self, name: &str, size: u64, shrink: bool, progress: Progress<'_>) -> Result<bool>;

    /// Returns a part of the list of volumes, which is sorted by name.
    ///
    /// # Errors
    /// Returns the backend's error.
    fn list(&self, page: &Page) -> Result<Listing>;

    /// Describes a volume, or one of its snapshots.
    ///
    /// # Errors
    /// Returns `NotFound` if there is no such volume or snapshot, and the backend's error otherwise.
    fn info(&self, name: &str, snapshot: Option<&str>) -> Result<Info>;

    /// Returns the capability to take snapshots.
    fn snapshots(&self) -> Option<&dyn SnapshotStore> {
        None
    }

    /// Returns the capability to take snapshots of several volumes at the same moment.
    fn group_snapshots(&self) -> Option<&dyn GroupSnapshotStore> {
        None
    }

    /// Returns the capability to create writable volumes from snapshots.
    fn clones(&self) -> Option<&dyn CloneStore> {
        None
    }

    /// Returns the capability to keep removed volumes for a while.
    fn trash(&self) -> Option<&dyn TrashStore> {
        None
    }

    /// Returns the capability to give blocks of zeroes back to the storage.
    fn reclaim(&self) -> Option<&dyn ReclaimStore> {
        None
    }

    /// Returns the capability to store labels with volumes.
    fn labels(&self) -> Option<&dyn LabelStore> {
        None
    }

    /// Returns the capability to check whether the content of a volume is intact.
    fn checks(&self) -> Option<&dyn CheckStore> {
        None
    }

    /// Returns the capability to find where contents of a volume differ.
    fn changes(&self) -> Option<&dyn ChangeStore> {
        None
    }

    /// Returns the capability to fence clients by their addresses.
    fn network_fence(&self) -> Option<&dyn NetworkFenceStore> {
        None
    }

    /// Returns how many bytes new data of volumes can use; `None` if the storage does not say. Thin volumes
    /// can be larger than that together.
    ///
    /// # Errors
    /// Returns the backend's error.
    fn available_bytes(&self) -> Result<Option<u64>> {
        Ok(None)
    }
}

/// Takes, lists and removes snapshots of volumes. Results of type `bool` say whether the call changed
/// anything.
pub trait SnapshotStore {
    /// Returns the snapshots of the volume `name`, oldest first.
    ///
    /// # Errors
    /// Returns the backend's error.
    fn list(&self, name: &str) -> Result<Vec<Snapshot>>;

    /// Takes a snapshot. Clients that have the volume open continue. The snapshot has every write that was
    /// acknowledged before the call, and of later ones a state that the volume had at one moment, as after a
    /// crash.
    ///
    /// # Errors
    /// Returns `InUse` if the backend can only copy the volume and a client writes to it, and the backend's
    /// error otherwise.
    fn create(&self, name: &str, snapshot: &str, progress: Progress<'_>) -> Result<bool>;

    /// Removes a snapshot.
    ///
    /// # Errors
    /// Returns `InUse` for a protected snapshot and for one that clones need, and the backend's error
    /// otherwise.
    fn remove(&self, name: &str, snapshot: &str) -> Result<bool>;

    /// Protects a snapshot from removal, or ends the protection.
    ///
    /// # Errors
    /// Returns `InUse` if clones need the protection that should end, and the backend's error otherwise.
    fn protect(&self, name: &str, snapshot: &str, protect: bool) -> Result<bool>;

    /// Restores the content of the volume at the snapshot. All writes since are lost.
    ///
    /// # Errors
    /// Returns `InUse` while a client has the volume open, and the backend's error otherwise.
    fn rollback(&self, name: &str, snapshot: &str, progress: Progress<'_>) -> Result<()>;
}

/// Creates writable volumes from snapshots. Results of type `bool` say whether the call changed anything.
pub trait CloneStore {
    /// Creates the volume `name` as a clone of a snapshot, which may be in another store of the backend.
    ///
    /// # Errors
    /// Returns `AlreadyExists` if a volume `name` exists that is not a clone of that snapshot or, where
    /// [`Layout::labels`] has any, has other labels, and the backend's error otherwise.
    fn create_clone(
        &self,
        source: &Source<'_>,
        name: &str,
        layout: &Layout,
        progress: Progress<'_>,
    ) -> Result<bool>;

    /// Returns whether a volume itself can be a source, without a snapshot ([`Source::snapshot`]).
    fn clones_volumes(&self) -> bool {
        false
    }

    /// Makes a clone independent of its parent.
    ///
    /// # Errors
    /// Returns the backend's error.
    fn flatten(&self, name: &str, progress: Progress<'_>) -> Result<bool>;
}

/// Keeps removed volumes for a while. Results of type `bool` say whether the call changed anything.
pub trait TrashStore {
    /// Returns the volumes in the trash, oldest first.
    ///
    /// # Errors
    /// Returns the backend's error.
    fn entries(&self) -> Result<Vec<Trashed>>;

    /// Moves a volume back out of the trash, with the name `new_name` if that is given. `id` selects one of
    /// several volumes that had the same name.
    ///
    /// # Errors
    /// Returns `NotFound` if the trash has no such volume, `InvalidArgument` if several volumes had the name,
    /// and `AlreadyExists` if a volume outside of the trash has it.
    fn restore(&self, name: &str, id: Option<&str>, new_name: Option<&str>) -> Result<bool>;

    /// Deletes volumes in the trash for good: those with these `ids`, or all if there are none. Volumes that
    /// must be kept longer are deleted only with `force`. A volume that cannot be deleted, for example
    /// because it is in use, does not stop the others.
    ///
    /// # Errors
    /// Returns `NotFound` for an id that does not exist, `Aborted` if `progress` stopped the operation, and
    /// the backend's error otherwise.
    fn purge(&self, ids: &[String], force: bool, progress: Progress<'_>) -> Result<Purged>;
}

/// Gives blocks of zeroes back to the storage.
pub trait ReclaimStore {
    /// Frees the space of blocks of the volume `name` that contain zeroes only. They still read as zeroes. Clients that
    /// have the volume open continue. An interrupted call has freed a part; another one begins again.
    ///
    /// # Errors
    /// Returns the backend's error.
    fn reclaim(&self, name: &str, progress: Progress<'_>) -> Result<()>;
}

/// Stores labels with volumes. A volume gets its first labels when it is created ([`Layout::labels`]), so that
/// a repeated creation can tell a volume of its own from another one of the same name. A volume without labels
/// that is empty and unused counts as one whose creation was interrupted, and gets them later.
///
/// [`Info::labels`] has the labels of a volume. All labels together have at most [`MAX_LABELS`] bytes.
pub trait LabelStore {
    /// Sets the labels in `changes`; an empty value removes a label. The other labels stay. The change takes
    /// effect as a whole or not at all. Concurrent calls for the same volume can lose a change. Returns whether
    /// anything changed.
    ///
    /// # Errors
    /// Returns `NotFound` if the volume does not exist, `InvalidArgument` for too many labels, and the backend's
    /// error otherwise.
    fn set(&self, name: &str, changes: &Labels) -> Result<bool>;
}

/// The maximum length of the labels of a volume in bytes, in JSON. Some filesystems store no more with a file.
pub const MAX_LABELS: usize = 3072;

/// Returns `labels` with `changes`; an empty value removes a label.
///
/// # Errors
/// Returns `InvalidArgument` if the result is too long.
pub fn changed_labels(labels: &Labels, changes: &Labels) -> Result<Labels> {
    let mut labels = labels.clone();
    for (key, value) in changes {
        if value.is_empty() {
            labels.remove(key);
        } else {
            labels.insert(key.clone(), value.clone());
        }
    }
    // The quotes, the colon and the comma of each entry in JSON, and room for a few escapes.
    let length: usize = labels.iter().map(|(key, value)| key.len() + value.len() + 8).sum();
    if length > MAX_LABELS {
        let message = format!("the labels of a volume have {length} bytes, more than {MAX_LABELS}");
        return Err(Error::new(ErrorKind::InvalidArgument, message));
    }
    Ok(labels)
}

/// Returns how the labels `is` differ from `wanted`, as text for people. Labels that are not wanted do not count.
pub fn label_differences(is: &Labels, wanted: &Labels) -> Vec<String> {
    let differs = |(key, value): &(&String, &String)| is.get(*key) != Some(*value);
    let shown = |(key, value): (&String, &String)| match is.get(key) {
        Some(is) => format!("the label {key}={is:?}, not {value:?}"),
        None => format!("no label {key}={value:?}"),
    };
    wanted.iter().filter(differs).map(shown).collect()
}

/// How the storage lays out a new volume. The storage chooses what is `None`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Layout {
    /// The features, by their names in `rbd`. Features that these require are added.
    pub features: Option<Vec<String>>,
    /// The size of an object in bytes, a power of two.
    pub object_size: Option<u64>,
    /// The stripe unit in bytes, and the number of objects that a stripe covers.
    pub stripes: Option<(u64, u64)>,
    /// The pool that stores the data.
    pub data_pool: Option<String>,
    /// The format of a clone: with 1 the snapshot must be protected and must stay; with 2, the default, not.
    pub clone_format: Option<u8>,
    /// The compression of the data, by its name; "none" for none.
    pub compression: Option<String>,
    /// The labels of the volume.
    pub labels: Labels,
}

/// The snapshot, or the volume, from which a clone is created.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    /// The store of the volume. The clone's client accesses it; the access options of this store are ignored.
    pub store: &'a dyn super::StoreSpec,
    /// The volume.
    pub name: &'a str,
    /// The snapshot of the volume; `None` for the present content of the volume, which has then the same
    /// consistency as in a snapshot. Only where [`CloneStore::clones_volumes`] says so.
    pub snapshot: Option<&'a str>,
}

/// How a volume is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    /// The volume is moved to the trash, which keeps it for at least this time.
    Trash { keep: Duration },
    /// The data of the volume is deleted.
    Now,
}

/// The result of the removal of a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Removed {
    /// Whether there was a volume to remove.
    pub changed: bool,
    /// The entry in the trash, unless the volume was deleted.
    pub trash: Option<Trashed>,
}

/// Selects a part of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// Return only names after this one.
    pub after: Option<String>,
    /// The maximum number of entries.
    pub limit: usize,
    /// Read the size and the other details of each volume.
    pub details: bool,
}

/// A part of a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Listing {
    /// The volumes of this part.
    pub volumes: Vec<Entry>,
    /// The last name of this part, if the list continues.
    pub next: Option<String>,
}

/// A volume of a list. Without [`Page::details`], the fields that need a call per volume are null.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Entry {
    /// The name in the store.
    pub name: String,
    /// The URI of the volume.
    pub uri: String,
    /// The id, which does not change when the volume is renamed.
    pub id: Option<String>,
    /// The size of the volume.
    pub size_bytes: Option<u64>,
    /// The snapshot from which the volume was cloned, with a remark if its volume is in the trash.
    pub parent: Option<String>,
    /// The number of snapshots.
    pub snapshots: Option<usize>,
    /// The number of clients that have the volume open for writing.
    pub watchers: Option<usize>,
    /// Why the details could not be read.
    pub error: Option<Failure>,
}

/// The error of one volume of several. The others are not affected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// The kind of the error.
    pub kind: ErrorKind,
    /// The message with its causes.
    pub message: String,
    /// What the user can do.
    pub repair: Option<String>,
}

/// Prints the error and the repair in one line.
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

/// The description of a volume.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Info {
    /// The name in the store.
    pub name: String,
    /// The URI of the volume.
    pub uri: String,
    /// The id, which does not change when the volume is renamed.
    pub id: Option<String>,
    /// The size of the volume.
    pub size_bytes: u64,
    /// The space that the present content uses, without its parent and its snapshots; null if the storage
    /// cannot report it quickly.
    pub used_bytes: Option<u64>,
    /// The time of creation, in seconds since the epoch.
    pub created_at_s: Option<i64>,
    /// The number of objects.
    pub objects: Option<u64>,
    /// The size of an object.
    pub object_size_bytes: Option<u64>,
    /// The common prefix of the names of the objects.
    pub object_prefix: Option<String>,
    /// The length of a stripe in one object.
    pub stripe_unit_bytes: Option<u64>,
    /// The number of objects that a stripe covers.
    pub stripe_count: Option<u64>,
    /// The pool that stores the data, if it is not the volume's own pool.
    pub data_pool: Option<String>,
    /// The compression of the data, by its name; null if there is none.
    pub compression: Option<String>,
    /// The encryption of the data with a key file, by the name of its cipher; null if there is none.
    pub encryption: Option<String>,
    /// The features, by their names in `rbd`.
    pub features: Vec<String>,
    /// The records of features (for example the object map) that are not valid.
    pub flags: Vec<String>,
    /// The snapshot from which the volume was cloned.
    pub parent: Option<Parent>,
    /// The snapshots, oldest first.
    pub snapshots: Vec<Snapshot>,
    /// The clones of the volume's snapshots; null if this client may not search everywhere for them.
    pub clones: Option<Vec<String>>,
    /// The claim of the mapping that may write.
    pub claim: Option<serde_json::Value>,
    /// The clients that have the volume open for writing.
    pub watchers: Vec<Watcher>,
    /// The locks on the volume.
    pub locks: Vec<Lock>,
    /// The labels of the volume.
    #[serde(skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
}

/// The snapshot from which a volume was cloned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Parent {
    /// `pool[/namespace]/image@snapshot`; for an image in the trash, with its former name.
    pub name: String,
    /// The id of the image.
    pub image_id: String,
    /// Whether the image is in the trash.
    pub in_trash: bool,
    /// The number of bytes, from the start of the volume, that may still be read from the parent.
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
    /// The number of the snapshot.
    pub id: u64,
    /// The name.
    pub name: String,
    /// The size of the volume at the snapshot.
    pub size_bytes: u64,
    /// The time of the snapshot, in seconds since the epoch.
    pub created_at_s: i64,
    /// Whether the snapshot is protected from removal.
    pub protected: bool,
    /// `user`; `trash` for a removed snapshot that stays until its last clone is removed; `mirror` for
    /// a snapshot of mirroring; `other` for snapshots of groups.
    pub kind: &'static str,
}

/// A client that has a volume open for writing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Watcher {
    /// The name of the client.
    pub client: String,
    /// The address of the client.
    pub address: String,
}

/// A lock on a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Lock {
    /// The client or process that holds the lock.
    pub client: String,
    /// The cookie of the lock.
    pub cookie: Option<String>,
    /// The address of the client.
    pub address: Option<String>,
}

/// A volume in the trash.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Trashed {
    /// The id of the volume.
    pub id: String,
    /// The former name.
    pub name: String,
    /// The time of the removal, in seconds since the epoch.
    pub removed_at_s: i64,
    /// The time, in seconds since the epoch, before which only `force` deletes the volume for good.
    pub kept_until_s: i64,
}

/// The result of a purge of the trash.
#[derive(Debug)]
pub struct Purged {
    /// The volumes that were deleted.
    pub removed: Vec<Trashed>,
    /// The volumes that could not be deleted, with the reason.
    pub failed: Vec<(Trashed, Error)>,
    /// The volumes that must be kept longer.
    pub waiting: Vec<Trashed>,
}
