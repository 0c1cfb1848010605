//! The registration of `rbd:` volumes and stores.

use std::any::Any;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cleat_backend::claimant::Claimant;
use cleat_backend::fence::Fence;
use cleat_backend::store::Store;
use cleat_backend::uri::{Options, invalid};
use cleat_backend::{
    Backend, Confinement, CredentialFile, CredentialSet, HandoverFiles, Image, NAME_FILES, Nested,
    Network, OpenOptions, StoreParser, StoreSpec, Stored, VolumeSpec,
};
use cleat_core::error::Result;
use cleat_grants::storage::Fencing;

use crate::connection::load_library;
use crate::encryption;
use crate::fence::RbdFence;
use crate::granted::GrantRecord;
use crate::image::RbdImage;
use crate::spec::{RbdSpec, RbdStoreSpec};
use crate::store::RbdStore;

/// The registration of the RBD backend.
pub const BACKEND: &dyn Backend = &Rbd;

#[derive(Debug)]
struct Rbd;

impl Backend for Rbd {
    fn scheme(&self) -> &'static str {
        "rbd"
    }

    fn examples(&self) -> &'static [&'static str] {
        &["rbd:pool/image"]
    }

    fn parse(
        &self,
        location: &str,
        options: Options,
        _nested: Nested<'_>,
    ) -> Result<Arc<dyn VolumeSpec>> {
        Ok(Arc::new(RbdSpec::parse(location, options)?))
    }

    fn stores(&self) -> Option<&dyn StoreParser> {
        Some(self)
    }

    fn max_extra_open_time(&self) -> Duration {
        encryption::TIMEOUT
    }

    /// Missing libraries are not an error, because only some nodes use volumes in Ceph.
    fn diagnose(&self) -> Option<Result<String>> {
        if librbd::load().is_err_and(|error| error.is_absent()) {
            let finding = "librbd is not installed; rbd: volumes need it: apt install librbd1";
            return Some(Ok(finding.to_owned()));
        }
        Some(match load_library() {
            Ok((major, minor, extra)) => {
                Ok(format!("librbd {major}.{minor}.{extra} can be loaded"))
            }
            Err(error) if error.repair().is_none() => {
                Err(error.with_repair("reinstall librados2 and librbd1"))
            }
            Err(error) => Err(error),
        })
    }
}

impl StoreParser for Rbd {
    fn forms(&self) -> &'static [&'static str] {
        &["rbd:POOL", "rbd:POOL/NAMESPACE"]
    }

    fn parse_store(&self, location: &str, options: Options) -> Result<Arc<dyn StoreSpec>> {
        Ok(Arc::new(RbdStoreSpec::parse(location, options)?))
    }
}

impl VolumeSpec for RbdSpec {
    fn scheme(&self) -> &'static str {
        "rbd"
    }

    fn location(&self) -> String {
        self.location_text()
    }

    fn options(&self) -> Vec<(String, String)> {
        self.option_list()
    }

    fn open(&self, options: &OpenOptions) -> Result<Arc<dyn Image>> {
        Ok(Arc::new(RbdImage::open(self, options)?))
    }

    /// Needs no files: the predecessor releases the claim, and the successor acquires it.
    fn open_successor(
        &self,
        options: &OpenOptions,
        _files: HandoverFiles,
    ) -> Result<Arc<dyn Image>> {
        Ok(Arc::new(RbdImage::open_successor(self, options)?))
    }

    fn prepare(&self) -> Result<()> {
        load_library().map(drop)
    }

    fn credential_files(&self) -> Vec<CredentialFile> {
        self.files_with_secrets()
    }

    fn confinement(&self) -> Confinement {
        Confinement::BeforeOpen {
            paths: paths(self),
            copies: copies(self),
            writable: Vec::new(),
            network: Network::Any,
        }
    }

    fn extra_open_time(&self) -> Duration {
        self.encryption.as_ref().map_or(Duration::ZERO, |_| encryption::TIMEOUT)
    }

    fn without_content_key(&self) -> Option<Arc<dyn VolumeSpec>> {
        self.encryption.as_ref()?;
        Some(Arc::new(Self { encryption: None, trim: true, ..self.clone() }))
    }

    fn fence(&self) -> Result<Option<Box<dyn Fence>>> {
        Ok(Some(Box::new(RbdFence::new(self)?)))
    }

    fn grant_record(&self) -> Result<Option<Arc<dyn Fencing>>> {
        Ok(Some(Arc::new(GrantRecord::new(self)?)))
    }

    fn stored(&self) -> Result<Option<Stored>> {
        let (name, snapshot) = (self.image.clone(), self.snapshot.clone());
        Ok(Some(Stored { store: Arc::new(self.store()), name, snapshot }))
    }
}

impl StoreSpec for RbdStoreSpec {
    fn scheme(&self) -> &'static str {
        "rbd"
    }

    fn location(&self) -> String {
        self.location_text()
    }

    fn options(&self) -> Vec<(String, String)> {
        self.option_list()
    }

    fn volume(&self, name: &str, snapshot: Option<&str>) -> Result<Arc<dyn VolumeSpec>> {
        Ok(Arc::new(self.image(name, snapshot)?))
    }

    fn snapshot_form(&self) -> Option<&'static str> {
        Some("rbd:POOL/IMAGE@SNAPSHOT")
    }

    fn connect(&self, claimant: &Claimant, credentials: CredentialSet) -> Result<Box<dyn Store>> {
        Ok(Box::new(RbdStore::connect(self, claimant, credentials)?))
    }

    fn with_access_of(&self, other: &dyn StoreSpec) -> Result<Arc<dyn StoreSpec>> {
        let other: &dyn Any = other;
        match other.downcast_ref::<Self>() {
            Some(other) => Ok(Arc::new(self.clone().with_options_of(other)?)),
            None => Err(invalid("the two volumes have different kinds of stores")),
        }
    }
}

/// Returns the existing files that the libraries read while they connect. Without `keyring=`, librados reads the
/// keyring by itself, from where its configuration says. Only root may read it, so the worker gets a copy.
fn copies(spec: &RbdSpec) -> Vec<PathBuf> {
    let ceph = if spec.keyring.is_some() { "/etc/ceph/ceph.conf" } else { "/etc/ceph" };
    let system = [
        ceph,
        // For the library that encrypts connections.
        "/etc/ssl/openssl.cnf",
        "/usr/lib/ssl/openssl.cnf",
        "/etc/localtime",
    ];
    // Monitors have names.
    let system = system.iter().chain(&NAME_FILES);
    let all = system.map(PathBuf::from).chain(spec.conf.clone());
    all.filter(|path| path.exists()).collect()
}

/// Returns the existing directories and devices that the libraries read.
fn paths(spec: &RbdSpec) -> Vec<PathBuf> {
    let system = [
        // The servers that resolve names, which may change.
        "/run/systemd/resolve",
        // For the number of processors.
        "/sys/devices/system",
        "/proc/self",
    ];
    // libcryptsetup needs both.
    let random = ["/dev/urandom", "/dev/random"].map(PathBuf::from);
    let unlocking = spec.encryption.iter().flat_map(|_| random.clone());
    let all = system.iter().map(PathBuf::from).chain(unlocking);
    all.filter(|path| path.exists()).collect()
}
