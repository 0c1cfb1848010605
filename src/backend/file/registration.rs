//! The registration of `file:` volumes and stores.

use std::any::Any;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use cleat_core::error::{Error, ErrorKind, Result};

use super::FileImage;
use super::spec::{DirectorySpec, FileSpec};
use super::store::FileStore;
use crate::claimant::Claimant;
use crate::credentials::CredentialSet;
use crate::spec::store::Store;
use crate::spec::{Backend, Nested, OpenOptions, StoreParser, StoreSpec, Stored, VolumeSpec};
use crate::uri::{Encoded, Options, Size, invalid};
use crate::{HandoverFiles, Image};

/// The registration of files and block devices.
pub const BACKEND: &dyn Backend = &Files;

#[derive(Debug)]
struct Files;

impl Backend for Files {
    fn scheme(&self) -> &'static str {
        "file"
    }

    fn examples(&self) -> &'static [&'static str] {
        &["file:/var/lib/images/a.img", "file:/dev/sdb?direct=true"]
    }

    fn parse(
        &self,
        location: &str,
        options: Options,
        _nested: Nested<'_>,
    ) -> Result<Arc<dyn VolumeSpec>> {
        Ok(Arc::new(FileSpec::parse(location, options)?))
    }

    fn stores(&self) -> Option<&dyn StoreParser> {
        Some(self)
    }
}

impl StoreParser for Files {
    fn forms(&self) -> &'static [&'static str] {
        &["file:/DIRECTORY"]
    }

    fn parse_store(&self, location: &str, options: Options) -> Result<Arc<dyn StoreSpec>> {
        Ok(Arc::new(DirectorySpec::parse(location, options)?))
    }
}

impl VolumeSpec for FileSpec {
    fn scheme(&self) -> &'static str {
        "file"
    }

    fn location(&self) -> String {
        Encoded(self.path.as_os_str().as_bytes()).to_string()
    }

    fn options(&self) -> Vec<(String, String)> {
        let direct = self.direct.then(|| ("direct".to_owned(), "true".to_owned()));
        let create = self.create.map(|size| ("create".to_owned(), Size(size).to_string()));
        direct.into_iter().chain(create).collect()
    }

    fn open(&self, options: &OpenOptions) -> Result<Arc<dyn Image>> {
        Ok(Arc::new(FileImage::open(self, options)?))
    }

    fn open_successor(
        &self,
        options: &OpenOptions,
        files: HandoverFiles,
    ) -> Result<Arc<dyn Image>> {
        Ok(Arc::new(FileImage::open_successor(self, files, options)?))
    }

    fn claim_outlives_process(&self) -> bool {
        false
    }

    fn creation_size(&self) -> Option<u64> {
        self.create
    }

    fn stored(&self) -> Result<Option<Stored>> {
        let name = self.path.file_name().and_then(OsStr::to_str).ok_or_else(|| {
            let message = format!("the name of {} is not UTF-8", self.path.display());
            Error::new(ErrorKind::Unsupported, message)
        })?;
        let directory = self.path.parent().unwrap_or(Path::new("/"));
        let store = Arc::new(DirectorySpec { path: directory.to_owned() });
        Ok(Some(Stored { store, name: name.to_owned(), snapshot: None }))
    }
}

impl StoreSpec for DirectorySpec {
    fn scheme(&self) -> &'static str {
        "file"
    }

    fn location(&self) -> String {
        Encoded(self.path.as_os_str().as_bytes()).to_string()
    }

    fn volume(&self, name: &str, snapshot: Option<&str>) -> Result<Arc<dyn VolumeSpec>> {
        let spec = self.file(name)?;
        if snapshot.is_some() {
            let message = "a snapshot of a file cannot be mapped";
            return Err(Error::new(ErrorKind::Unsupported, message)
                .with_repair("make a volume from the snapshot, and map that"));
        }
        Ok(Arc::new(spec))
    }

    /// Files need no secrets.
    fn connect(&self, _claimant: &Claimant, _: CredentialSet) -> Result<Box<dyn Store>> {
        Ok(Box::new(FileStore::open(self)?))
    }

    fn with_access_of(&self, other: &dyn StoreSpec) -> Result<Arc<dyn StoreSpec>> {
        let other: &dyn Any = other;
        if !other.is::<Self>() {
            return Err(invalid("the two stores belong to different backends"));
        }
        Ok(Arc::new(self.clone()))
    }
}
