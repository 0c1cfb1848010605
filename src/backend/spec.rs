//! The registration of a backend, and its view of a volume or a store that a URI names.
//!
//! A backend implements [`Backend`] once, and has a static value of it that the composition lists in its
//! [`Registry`](crate::Registry). Parsing a URI yields a [`VolumeSpec`] or a [`StoreSpec`], which does
//! everything else. No other code distinguishes backends.

mod check;
mod progress;
pub mod store;

use std::any::Any;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use cleat_core::error::Result;
use cleat_grants::storage::Fencing;

use crate::claimant::Claimant;
use crate::confinement::Confinement;
use crate::connector::Connector;
use crate::credentials::{CredentialFile, CredentialSet};
use crate::fence::Fence;
use crate::uri::Options;
use crate::{HandoverFiles, Image, VolumeIdentity};
use store::Store;

/// Parses the location and the options of another volume's URI, for a backend that wraps volumes of
/// other backends.
pub type Nested<'a> = &'a dyn Fn(&str, Options) -> Result<Arc<dyn VolumeSpec>>;

/// A kind of volume, registered under the scheme of its URIs.
pub trait Backend: Send + Sync {
    /// Returns the part of the URI before the colon: lower-case letters and digits.
    fn scheme(&self) -> &'static str;

    /// Returns complete URIs that error messages and help show as examples. Empty for backends that
    /// users should not be pointed to.
    fn examples(&self) -> &'static [&'static str] {
        &[]
    }

    /// Parses the part of the URI behind the scheme's colon. Does no I/O. Must reject options that it does
    /// not know ([`Options::finish`]). `nested` parses the URI of a wrapped volume.
    ///
    /// # Errors
    /// Returns `InvalidArgument` with the valid choices as the repair, and `Unsupported` for volumes that
    /// this build cannot serve.
    fn parse(
        &self,
        location: &str,
        options: Options,
        nested: Nested<'_>,
    ) -> Result<Arc<dyn VolumeSpec>>;

    /// Returns the parser of the places that hold the backend's volumes; `None` where volumes cannot be
    /// created, listed or removed.
    fn stores(&self) -> Option<&dyn StoreParser> {
        None
    }

    /// Returns the longest time that [`VolumeSpec::extra_open_time`] returns for any volume.
    fn max_extra_open_time(&self) -> Duration {
        Duration::ZERO
    }

    /// Checks whether this machine has what the backend needs, for `cleat doctor`. Returns the finding as
    /// a sentence, or an error with a repair; `None` where nothing is needed.
    fn diagnose(&self) -> Option<Result<String>> {
        None
    }
}

/// Parses the URIs of the places that hold a backend's volumes.
pub trait StoreParser {
    /// Returns the forms of the URI, for error messages.
    fn forms(&self) -> &'static [&'static str];

    /// Parses the part of the URI behind the scheme's colon. Does no I/O.
    ///
    /// # Errors
    /// Returns `InvalidArgument` with the valid choices as the repair, and `Unsupported` for stores that this
    /// build cannot reach.
    fn parse_store(&self, location: &str, options: Options) -> Result<Arc<dyn StoreSpec>>;
}

/// A volume, and how it is accessed. It never contains a secret, only the path of a file that holds one; see
/// [`Credentials`](crate::Credentials).
pub trait VolumeSpec: fmt::Debug + Send + Sync {
    /// Returns the scheme of the volume's URI.
    fn scheme(&self) -> &'static str;

    /// Returns the canonical text between the scheme's colon and the options, percent-encoded.
    fn location(&self) -> String;

    /// Returns the options that differ from their defaults, in canonical order, not encoded.
    fn options(&self) -> Vec<(String, String)> {
        Vec::new()
    }

    /// Opens the volume, and claims it unless it is opened read-only. Blocks, within a limit of the
    /// backend plus [`VolumeSpec::extra_open_time`]. Starts no thread where
    /// [`VolumeSpec::confinement`] returns `AfterOpen`.
    ///
    /// # Errors
    /// Returns `Replaced` if the volume is not [`OpenOptions::expected`]; nothing was changed then. Otherwise
    /// returns `NotFound`, `InUse`, `PermissionDenied`, `Unsupported`, or the backend's error.
    fn open(&self, options: &OpenOptions) -> Result<Arc<dyn Image>>;

    /// Opens a volume that another process still serves, with the files that the other process's
    /// [`Handover::prepare`](crate::Handover::prepare) returned. Nothing is written before
    /// [`Handover::take_over`](crate::Handover::take_over).
    ///
    /// # Errors
    /// Fails as [`VolumeSpec::open`] does. Returns `InvalidArgument` for descriptors that are not the
    /// volume's.
    fn open_successor(&self, options: &OpenOptions, files: HandoverFiles)
    -> Result<Arc<dyn Image>>;

    /// Loads files that the process cannot read once it is confined, such as shared libraries. Starts no
    /// thread, and does not access the volume.
    ///
    /// # Errors
    /// Returns `Unsupported` when a library is missing; the repair names it.
    fn prepare(&self) -> Result<()> {
        Ok(())
    }

    /// Returns the files with secrets that the URI names, each path once and at most
    /// [`MAX_CREDENTIAL_FILES`](crate::MAX_CREDENTIAL_FILES), without opening them. The order has no meaning.
    /// [`VolumeSpec::confinement`] does not contain their paths.
    fn credential_files(&self) -> Vec<CredentialFile> {
        Vec::new()
    }

    /// Returns when the process that opens the volume can be confined, and which files and sockets must stay
    /// accessible.
    fn confinement(&self) -> Confinement {
        Confinement::AfterOpen
    }

    /// Returns how much longer than other volumes this one may take to open, for example because a key
    /// is derived from a passphrase.
    fn extra_open_time(&self) -> Duration {
        Duration::ZERO
    }

    /// Returns the length of the tail file with which the volume is opened for writing, in bytes: a file in memory that
    /// outlives the process ([`OpenOptions::tail_file`]). 0 for volumes that need none.
    fn tail_bytes(&self) -> u64 {
        0
    }

    /// Returns the local cache in which the volume can keep data that it has read ([`OpenOptions::cache`]).
    fn cache(&self) -> CacheUse {
        CacheUse::None
    }

    /// Returns what a user of this machine should know before the volume is opened.
    fn warning(&self) -> Option<String> {
        None
    }

    /// Returns the same volume without its content key, which is enough to claim it; `None` where the
    /// volume has no such key.
    fn without_content_key(&self) -> Option<Arc<dyn VolumeSpec>> {
        None
    }

    /// Returns the size in bytes with which a missing volume is created; `None` if the URI does not request
    /// that.
    fn creation_size(&self) -> Option<u64> {
        None
    }

    /// Returns what this process can see of the volume's size without opening the volume, so that the process that
    /// serves it does not have to read it. May block while the storage does not answer.
    fn visible_size(&self) -> VisibleSize {
        VisibleSize::Unknown
    }

    /// Returns whether the claim of the volume may outlive the process that has taken it, so that another
    /// process has to release it after a crash. The kernel removes the lock of a file with the process.
    fn claim_outlives_process(&self) -> bool {
        true
    }

    /// Returns the access to the volume's clients and their fencing; `None` for volumes of one machine, where
    /// the kernel excludes a second writer. Does not open the volume.
    ///
    /// # Errors
    /// Returns `InvalidArgument` for a volume without a single writer, and `Unsupported` when a library is
    /// missing.
    fn fence(&self) -> Result<Option<Box<dyn Fence>>> {
        Ok(None)
    }

    /// Returns the record of the grants of the volume; `None` for volumes that cannot be granted. Does not access
    /// the volume.
    ///
    /// # Errors
    /// Fails as [`VolumeSpec::fence`] does.
    fn grant_record(&self) -> Result<Option<Arc<dyn Fencing>>> {
        Ok(None)
    }

    /// Returns the store that the volume is kept in, with its name there; `None` for volumes that are not
    /// kept in a store.
    ///
    /// # Errors
    /// Returns `Unsupported` for a name that is not text.
    fn stored(&self) -> Result<Option<Stored>> {
        Ok(None)
    }
}

/// What a process that has not opened a volume can see of its size, see [`VolumeSpec::visible_size`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VisibleSize {
    /// Nothing, or nothing at present.
    Unknown,
    /// Only the process that serves the volume can change its size.
    Fixed,
    /// The size in bytes, which may not be a multiple of the block size.
    Bytes(u64),
}

/// A volume's location in its store.
#[derive(Debug)]
pub struct Stored {
    /// The store.
    pub store: Arc<dyn StoreSpec>,
    /// The volume's name in the store.
    pub name: String,
    /// The snapshot's name, where the URI names one.
    pub snapshot: Option<String>,
}

/// A place that holds volumes, and how it is accessed.
pub trait StoreSpec: fmt::Debug + Send + Sync + Any {
    /// Returns the scheme of the store's URI.
    fn scheme(&self) -> &'static str;

    /// Returns the canonical text between the scheme's colon and the options, percent-encoded.
    fn location(&self) -> String;

    /// Returns the options that differ from their defaults, in canonical order, not encoded.
    fn options(&self) -> Vec<(String, String)> {
        Vec::new()
    }

    /// Returns the volume `name` in this store, or a snapshot of it. Does no I/O.
    ///
    /// # Errors
    /// Returns `InvalidArgument` for text that cannot be a name, and `Unsupported` for a snapshot where
    /// volumes have none.
    fn volume(&self, name: &str, snapshot: Option<&str>) -> Result<Arc<dyn VolumeSpec>>;

    /// Returns the form of a snapshot's URI; `None` where a URI cannot name a snapshot.
    fn snapshot_form(&self) -> Option<&'static str> {
        None
    }

    /// Opens the store. Blocks, within a limit. Operations that remove data treat other clients as
    /// `claimant` would on [`VolumeSpec::open`]. Files with secrets that the store needs and that `credentials`
    /// does not have are read.
    ///
    /// # Errors
    /// Returns `NotFound`, `PermissionDenied`, `TimedOut`, `Unsupported`, or the backend's error.
    fn connect(&self, claimant: &Claimant, credentials: CredentialSet) -> Result<Box<dyn Store>>;

    /// Returns this store, accessed with the options of `other` where this one has no options itself.
    ///
    /// # Errors
    /// Returns `InvalidArgument` if both have options that differ, or if `other` belongs to another backend.
    fn with_access_of(&self, other: &dyn StoreSpec) -> Result<Arc<dyn StoreSpec>>;
}

/// How a volume is opened, in addition to the options of its URI.
#[derive(Debug, Clone, Default)]
pub struct OpenOptions {
    /// Open the volume without a claim, and never write to it.
    pub read_only: bool,
    /// The identity of the claim. Backends whose claims end with the process ignore it.
    pub claimant: Claimant,
    /// Announce snapshots ([`SnapshotQuiesce`](crate::SnapshotQuiesce)). A backend without snapshots ignores
    /// it.
    pub snapshots: bool,
    /// A sync of the volume failed in an earlier process of the same mapping, see
    /// [`Image::sync_failed`](crate::Image::sync_failed). The volume is opened in that state.
    pub sync_failed: bool,
    /// The content of the files of [`VolumeSpec::credential_files`]. The backend opens and reads those that
    /// are missing here, which a confined process cannot do.
    pub credentials: CredentialSet,
    /// The identity of the volume, if an earlier process of the mapping has opened it. Another volume is then
    /// neither opened nor changed, and a missing one is not created.
    pub expected: Option<VolumeIdentity>,
    /// A file of [`VolumeSpec::tail_bytes`] that only the processes of this mapping use, one after the other. Without
    /// it, the volume acknowledges no write before it is durable. It was empty for the first process.
    pub tail_file: Option<Arc<OwnedFd>>,
    /// The cache of [`VolumeSpec::cache`].
    pub cache: CacheFiles,
    /// Makes the connections of a backend that needs [`Network::Connector`](crate::Network::Connector); `None` if this process is not confined.
    pub connector: Option<Arc<Connector>>,
    /// Only claim the volume, which ends what earlier processes have in progress; the image is never served. A backend
    /// whose volumes take no longer to open than to claim ignores it.
    pub claim_only: bool,
}

/// The local cache that a volume can use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CacheUse {
    /// None.
    None,
    /// One of its own.
    Own,
    /// One that all volumes of this text share. Their processes can read and change each other's data in the storage,
    /// so they may do that in a cache.
    Shared(String),
}

/// The files of a cache. They may have what this process or another one has written, or anything else, and they may
/// change at any moment. Without files there is no cache.
#[derive(Debug, Clone, Default)]
pub struct CacheFiles {
    /// At most [`MAX_CACHE_FILES`].
    pub files: Vec<Arc<OwnedFd>>,
    /// The maximum length of each in bytes. All processes that share a cache have the same one.
    pub file_bytes: u64,
}

/// The maximum number of files of a cache: a message to a worker has descriptors for them.
pub const MAX_CACHE_FILES: usize = 64;

/// The maximum length of a file of a cache, in bytes.
pub const MAX_CACHE_FILE_BYTES: u64 = 1 << 30;
