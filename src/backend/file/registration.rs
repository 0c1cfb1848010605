//! The registration of `file:` volumes and stores.

use std::any::Any;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_sys::block;

use super::FileImage;
use super::spec::{DirectorySpec, FileSpec};
use super::store::FileStore;
use crate::claimant::Claimant;
use crate::credentials::CredentialSet;
use crate::spec::store::Store;
use crate::spec::{
    Backend, Nested, OpenOptions, StoreParser, StoreSpec, Stored, VisibleSize, VolumeSpec,
};
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

    /// The size of what is at the path now. A file that has replaced the one that is open may have another size.
    fn visible_size(&self) -> VisibleSize {
        let size = std::fs::metadata(&self.path).and_then(|metadata| {
            if metadata.file_type().is_block_device() {
                block::size_of_number(metadata.rdev())
            } else {
                Ok(metadata.len())
            }
        });
        size.map_or(VisibleSize::Unknown, VisibleSize::Bytes)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn visible_size(path: &Path) -> VisibleSize {
        FileSpec { path: path.to_owned(), direct: false, create: None }.visible_size()
    }

    #[test]
    fn the_size_of_a_file_or_device_is_visible_without_opening_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        assert_eq!(visible_size(&path), VisibleSize::Unknown);
        std::fs::File::create(&path).unwrap().set_len(12345).unwrap();
        assert_eq!(visible_size(&path), VisibleSize::Bytes(12345));
        for name in std::fs::read_dir("/sys/class/block").unwrap().flatten() {
            let may_change = ["loop", "nbd", "zram"];
            if may_change.iter().any(|kind| name.file_name().to_string_lossy().starts_with(kind)) {
                continue;
            }
            let sectors = std::fs::read_to_string(name.path().join("size")).unwrap();
            let bytes = sectors.trim().parse::<u64>().unwrap() * 512;
            let node = Path::new("/dev").join(name.file_name());
            // A container may have no node of the device.
            if node.exists() {
                assert_eq!(visible_size(&node), VisibleSize::Bytes(bytes), "{node:?}");
            }
        }
    }
}
