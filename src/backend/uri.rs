//! URIs of volumes and stores: `SCHEME:LOCATION?key=value&…`. The backend that is registered for the
//! scheme parses the location and the options.
//!
//! ```text
//! mem:SIZE                              memory; lost when the worker ends
//! file:/absolute/path                   a raw file or a block device
//!     direct=true|false                 bypass the page cache (O_DIRECT); default false
//!     create=SIZE                       create the file, sparse, if it is missing or empty
//! rbd:pool[/namespace]/image[@snapshot] an RBD image of Ceph, or one of its snapshots
//!     conf=PATH keyring=PATH            Ceph's files; default /etc/ceph/ceph.conf and its keyring
//!     id=NAME                           the client, without `client.`; default admin
//!     encryption=luks1|luks2|luks       the encryption of the content, and the file with its
//!     passphrase_file=PATH              passphrase; for a clone, followed by those of the parent, with commas
//!     trim=true|false                   free trimmed space; default true, unless encrypted
//!     lock=exclusive|shared             shared: several clients write and none is fenced, which destroys
//!                                       file systems that are not made for it; default exclusive
//!     config.OPTION=VALUE               an option of Ceph, for this volume
//! fault:URI                             (feature `fault`) any other volume, with injected faults
//!     fault.KEY=VALUE                   see `fault::plan`; other options are the inner volume's
//! ```
//!
//! `%XX` in the location or in a value stands for the byte with that hexadecimal number; `?` and `%` in a
//! path must be written this way. Sizes take the suffixes K, M, G, T, P, E (also Ki, Mi, …): powers of 1024. Credentials are never
//! part of a URI, only the paths of files that contain them ([`crate::CredentialFile`]).

mod options;
mod size;

use std::fmt;
use std::hash::{Hash, Hasher};
use std::path::PathBuf;
use std::sync::Arc;

use cleat_core::error::{Error, ErrorKind, Result};

use crate::claimant::Claimant;
use crate::credentials::CredentialSet;
use crate::fence::Fence;
use crate::kernel_key::KernelKey;
use crate::spec::store::Store;
use crate::spec::{OpenOptions, StoreSpec, VolumeSpec};
use crate::{HandoverFiles, Image};

pub use options::{Encoded, Options, decode};
pub use size::{MAX_SIZE, Size, parse_size, parse_size_or_zero};

/// The longest URI, in bytes.
pub const MAX_URI: usize = 4096;

/// The longest text of a URI in an error message, in characters.
const MAX_SHOWN: usize = 100;

/// The longest name that [`VolumeUri::default_name`] returns, and that a mapping may have, in bytes.
pub const MAX_NAME: usize = 128;

/// A volume, and how it is opened. `Display` is canonical: equal volumes with equal options have the same
/// text, and the text parses to an equal value.
#[derive(Clone)]
pub struct VolumeUri {
    spec: Arc<dyn VolumeSpec>,
    text: String,
}

impl VolumeUri {
    /// Makes the URI of a volume that a backend has parsed or made.
    pub fn new(spec: Arc<dyn VolumeSpec>) -> Self {
        let text = text(spec.scheme(), &spec.location(), &spec.options());
        Self { spec, text }
    }

    /// Returns the backend's view of the volume.
    pub fn spec(&self) -> &dyn VolumeSpec {
        &*self.spec
    }

    /// Returns the part of the URI before the colon.
    pub fn scheme(&self) -> &'static str {
        self.spec.scheme()
    }

    /// Opens the volume; see [`VolumeSpec::open`].
    ///
    /// # Errors
    /// Fails as [`VolumeSpec::open`] does.
    pub fn open(&self, options: &OpenOptions) -> Result<Arc<dyn Image>> {
        self.spec.open(options)
    }

    /// Opens the volume while another process still serves it; see [`VolumeSpec::open_successor`].
    ///
    /// # Errors
    /// Fails as [`VolumeSpec::open_successor`] does.
    pub fn open_successor(
        &self,
        options: &OpenOptions,
        files: HandoverFiles,
    ) -> Result<Arc<dyn Image>> {
        self.spec.open_successor(options, files)
    }

    /// Returns the same volume without its content key, which is enough to claim it.
    #[must_use]
    pub fn without_content_key(&self) -> Self {
        self.spec.without_content_key().map_or_else(|| self.clone(), Self::new)
    }

    /// Returns the access to the volume's clients and their fencing.
    ///
    /// # Errors
    /// Returns `Unsupported` for volumes of one machine. Otherwise fails as [`VolumeSpec::fence`] does.
    pub fn fence(&self) -> Result<Box<dyn Fence>> {
        self.spec.fence()?.ok_or_else(|| {
            let message = format!("{} volumes do not support fencing", self.scheme());
            Error::new(ErrorKind::Unsupported, message)
                .with_repair("see which process holds the mapping: cleat status NAME")
        })
    }

    /// Returns the store that holds the volume, its name in the store, and the name of the snapshot.
    ///
    /// # Errors
    /// Returns `Unsupported` for volumes that are not kept in a store.
    pub fn store_location(&self) -> Result<(StoreUri, String, Option<String>)> {
        let stored = self.spec.stored()?.ok_or_else(|| {
            let message = format!("{} volumes are not kept in a store", self.scheme());
            Error::new(ErrorKind::Unsupported, message)
        })?;
        Ok((StoreUri::new(stored.store), stored.name, stored.snapshot))
    }

    /// As [`VolumeUri::store_location`], for a URI that must name a snapshot.
    ///
    /// # Errors
    /// Fails as [`VolumeUri::store_location`] does. Returns `InvalidArgument` where no snapshot is named,
    /// and `Unsupported` where a URI cannot name a snapshot.
    pub fn snapshot_location(&self) -> Result<(StoreUri, String, String)> {
        let (store, name, snapshot) = self.store_location()?;
        match (snapshot, store.spec.snapshot_form()) {
            (Some(snapshot), _) => Ok((store, name, snapshot)),
            (None, Some(form)) => {
                let volume = store.volume(&name, None)?;
                Err(invalid(format!("{volume} names no snapshot"))
                    .with_repair(format!("write the snapshot behind the volume: {form}")))
            }
            (None, None) => {
                let message =
                    format!("the URI of a {} volume cannot name a snapshot", self.scheme());
                Err(Error::new(ErrorKind::Unsupported, message)
                    .with_repair("take a snapshot of the file system that holds the volume"))
            }
        }
    }

    /// Returns a name for a mapping of the volume, `[A-Za-z0-9][A-Za-z0-9._-]{0,127}`. The name does not depend
    /// on the options. If characters are replaced (other than `/`, which becomes `-`), a hash distinguishes
    /// the names of different volumes.
    pub fn default_name(&self) -> String {
        let location = self.spec.location();
        let mut name = String::from(self.scheme());
        let mut lossy = false;
        name.push('-');
        for c in location.chars() {
            match c {
                'A'..='Z' | 'a'..='z' | '0'..='9' | '.' | '_' | '-' => name.push(c),
                '/' | ':' if name.ends_with('-') => {}
                '/' | ':' => name.push('-'),
                _ => {
                    lossy = true;
                    name.push('_');
                }
            }
        }
        if lossy || name.len() > MAX_NAME {
            let hash = format!("-{:016x}", fnv1a(location.as_bytes()));
            name.truncate(MAX_NAME - hash.len());
            name.push_str(&hash);
        }
        name
    }
}

impl PartialEq for VolumeUri {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for VolumeUri {}

impl Hash for VolumeUri {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.text.hash(state);
    }
}

impl fmt::Debug for VolumeUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VolumeUri({})", self.text)
    }
}

impl fmt::Display for VolumeUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// A place that holds volumes, and how it is accessed: `rbd:pool[/namespace]`, `file:/directory`, with
/// the options of the volumes. `Display` is canonical.
#[derive(Clone)]
pub struct StoreUri {
    spec: Arc<dyn StoreSpec>,
    text: String,
}

impl StoreUri {
    /// Makes the URI of a store that a backend has parsed or made.
    pub fn new(spec: Arc<dyn StoreSpec>) -> Self {
        let text = text(spec.scheme(), &spec.location(), &spec.options());
        Self { spec, text }
    }

    /// Returns the backend's view of the store.
    pub fn spec(&self) -> &dyn StoreSpec {
        &*self.spec
    }

    /// Returns the volume `name` in this store, or a snapshot of it.
    ///
    /// # Errors
    /// Fails as [`StoreSpec::volume`] does.
    pub fn volume(&self, name: &str, snapshot: Option<&str>) -> Result<VolumeUri> {
        self.spec.volume(name, snapshot).map(VolumeUri::new)
    }

    /// Opens the store without a claim identity: operations that remove data refuse while any other
    /// client may write.
    ///
    /// # Errors
    /// Fails as [`StoreSpec::connect`] does.
    pub fn connect(&self) -> Result<Box<dyn Store>> {
        self.spec.connect(&Claimant::default(), CredentialSet::default())
    }

    /// Opens the store with a claim identity; see [`StoreSpec::connect`].
    ///
    /// # Errors
    /// Fails as [`StoreSpec::connect`] does.
    pub fn connect_as(&self, claimant: &Claimant) -> Result<Box<dyn Store>> {
        self.spec.connect(claimant, CredentialSet::default())
    }

    /// Opens the store as [`StoreUri::connect_as`] does, with secrets instead of the content of their files.
    ///
    /// # Errors
    /// Fails as [`StoreSpec::connect`] does.
    pub fn connect_with(
        &self,
        claimant: &Claimant,
        credentials: CredentialSet,
    ) -> Result<Box<dyn Store>> {
        self.spec.connect(claimant, credentials)
    }

    /// Returns this store, accessed with the options of `other` where this one has no options itself.
    ///
    /// # Errors
    /// Fails as [`StoreSpec::with_access_of`] does.
    pub fn with_access_of(&self, other: &Self) -> Result<Self> {
        self.spec.with_access_of(&*other.spec).map(Self::new)
    }
}

impl PartialEq for StoreUri {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for StoreUri {}

impl fmt::Debug for StoreUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StoreUri({})", self.text)
    }
}

impl fmt::Display for StoreUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Returns an `InvalidArgument` error with `message`, the kind of nearly every error of a URI.
pub fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, message)
}

/// Returns the text of a URI that an error message may contain: without its options, whose values may be
/// secrets that do not belong there, and at most 100 characters. `…` stands for the rest.
pub fn shown(uri: &str) -> String {
    let location = uri.split_once('?').map_or(uri, |(location, _)| location);
    let mut shown: String = location.chars().take(MAX_SHOWN).collect();
    if shown.len() < uri.len() {
        shown.push('…');
    }
    shown
}

/// Parses the value of the option `key`, an absolute path. The error does not contain the value, which may be
/// a secret that was given instead of the path of its file.
///
/// # Errors
/// Returns `InvalidArgument` for a relative path or a zero byte.
pub fn absolute_path(path: &str, key: &str) -> Result<PathBuf> {
    if !path.starts_with('/') || path.contains('\0') {
        return Err(invalid(format!("{key} needs an absolute path"))
            .with_repair(format!("write the whole path, as in {key}=/etc/ceph/…")));
    }
    Ok(path.into())
}

/// Parses the value of the option `key`: the absolute path of a file with a secret, or the value that names a
/// [`KernelKey`]. The error does not contain the value.
///
/// # Errors
/// Returns `InvalidArgument` for a malformed name of a key, a relative path, or a zero byte.
pub fn secret_path(value: &str, key: &str) -> Result<PathBuf> {
    let found = KernelKey::parse(value)?;
    found.map_or_else(|| absolute_path(value, key), |found| Ok(found.path()))
}

fn text(scheme: &str, location: &str, options: &[(String, String)]) -> String {
    format!("{scheme}:{location}{}", options::Query(options))
}

/// Computes 64-bit FNV-1a. Unlike the hasher of `std`, it is the same in all versions and on all machines.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests;
