//! The management of files; their directory is the [`Store`]. Block devices are only described, because
//! other tools create, resize and remove them.
//!
//! To remove a file or to make it smaller, a call takes the lock that a writer has. To make it larger needs no
//! lock: a worker that serves the file notices the new size.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

use nix::fcntl::{FallocateFlags, fallocate};

use super::spec::{DirectorySpec, FileSpec};
use super::{FileImage, claim, create, inspect, labels, open, sync_directory};
use crate::Image;
use crate::extents::has_data;
use crate::spec::{OpenOptions, StoreSpec};
use crate::store::{
    self, CloneStore, Entry, Info, LabelStore, Labels, Layout, Listing, Lock, Page, Progress,
    Removal, Removed, Store, changed_labels, label_differences,
};
use crate::uri::{Encoded, Size, VolumeUri, invalid};
use cleat_core::error::{Error, ErrorKind, Result};

/// The maximum number of files in a directory that can be listed.
const MAX_FILES: usize = 1 << 20;

/// A directory as a store.
pub(super) struct FileStore {
    pub(super) directory: DirectorySpec,
}

impl FileStore {
    pub(super) fn open(directory: &DirectorySpec) -> Result<Self> {
        let shown = directory.path.display();
        let metadata = fs::metadata(&directory.path)
            .map_err(|error| Error::from_io(format!("cannot stat {shown}"), error))?;
        if !metadata.is_dir() {
            return Err(invalid(format!("{shown} is not a directory")));
        }
        Ok(Self { directory: directory.clone() })
    }

    pub(super) fn spec(&self, name: &str, create: Option<u64>) -> Result<FileSpec> {
        Ok(FileSpec { create, ..self.directory.file(name)? })
    }

    fn uri(&self, name: &str) -> Result<String> {
        self.directory.volume(name, None).map(VolumeUri::new).map(|uri| uri.to_string())
    }

    /// Checks that `layout` has nothing but labels.
    pub(super) fn check_layout(layout: &Layout) -> Result<()> {
        let labels = layout.labels.clone();
        if *layout == (Layout { labels, ..Layout::default() }) {
            return Ok(());
        }
        let message = "a file has no features, objects, stripes, pool or compression";
        Err(Error::new(ErrorKind::Unsupported, message)
            .with_repair("remove these options, or create an RBD image"))
    }

    /// Opens the file of `spec` for writing, and creates it if `spec` has a size for that. Returns `None` if it
    /// does not exist.
    fn file(&self, spec: &FileSpec) -> Result<Option<File>> {
        match self.check_plain(spec) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            other => other?,
        }
        open(spec, false, false).map(Some)
    }

    /// Checks that `spec` is a file and neither a link nor a device, or that it is missing and must be created.
    ///
    /// # Errors
    /// Returns `NotFound` if it is missing and has no size for its creation.
    pub(super) fn check_plain(&self, spec: &FileSpec) -> Result<()> {
        let path = spec.path.display();
        let (device, missing) = inspect(spec, spec.create.is_none())?;
        if device {
            let message = format!("{path} is a block device, which cleat cannot change");
            return Err(Error::new(ErrorKind::Unsupported, message).with_repair(
                "change the device with its own tool (lvcreate, lvextend, lvremove, …)",
            ));
        }
        if !missing && fs::symlink_metadata(&spec.path).is_ok_and(|found| found.is_symlink()) {
            let target = fs::canonicalize(&spec.path)
                .map_err(|error| Error::from_io(format!("cannot follow {path}"), error))?;
            return Err(invalid(format!("{path} is a symbolic link"))
                .with_repair(format!("name its target: file:{}", target.display())));
        }
        Ok(())
    }

    /// Labels a file whose creation was interrupted before it had labels. Returns whether it has been labelled.
    ///
    /// # Errors
    /// Returns `AlreadyExists` if the file has other labels, or content without labels.
    fn adopt(&self, file: &File, path: &str, wanted: &Labels) -> Result<bool> {
        let is = labels::read(file, path)?;
        let differences = label_differences(&is, wanted);
        if differences.is_empty() {
            return Ok(false);
        }
        let exists = |with: String| {
            Error::new(ErrorKind::AlreadyExists, format!("{path} exists with {with}"))
                .with_repair("use another name, or remove the file")
        };
        if !is.is_empty() {
            return Err(exists(differences.join("; ")));
        }
        claim::lock(file, path)?;
        let failed = |error| Error::from_io(format!("cannot look for data in {path}"), error);
        if has_data(file).map_err(failed)? {
            return Err(exists("data and without labels: another program made it".to_owned()));
        }
        self.label(file, path, wanted)?;
        Ok(true)
    }

    fn label(&self, file: &File, path: &str, labels: &Labels) -> Result<()> {
        labels::write(file, path, labels)?;
        let failed = |error| Error::from_io(format!("cannot store the labels of {path}"), error);
        file.sync_all().map_err(failed)
    }
}

impl Store for FileStore {
    fn create(&self, name: &str, size: u64, layout: &Layout) -> Result<bool> {
        Self::check_layout(layout)?;
        let wanted = changed_labels(&Labels::new(), &layout.labels)?;
        let spec = self.spec(name, Some(size))?;
        let missing = !spec.path.exists();
        let path = spec.path.display().to_string();
        let Some(file) = self.file(&spec)? else {
            return Err(Error::new(
                ErrorKind::Aborted,
                format!("{path} was removed while it was created"),
            ));
        };
        match length(&file, &path)? {
            // This call created the file, or an earlier one that was killed.
            0 => {}
            is if is == size => return self.adopt(&file, &path, &wanted),
            is => {
                let (is, size) = (Size(is), Size(size));
                let message = format!("{path} exists with a size of {is}, not {size}");
                return Err(Error::new(ErrorKind::AlreadyExists, message)
                    .with_repair("use another name, or the present size"));
            }
        }
        claim::lock(&file, &path)?;
        claim::check_name(&file, &spec.path)?;
        if length(&file, &path)? != 0 {
            // Another call has created it meanwhile.
            drop(file);
            return self.create(name, size, layout);
        }
        create(&spec, &file).inspect_err(|_| {
            if missing {
                // This call created the file, locked it, and left it empty.
                let _ = fs::remove_file(&spec.path);
            }
        })?;
        if !wanted.is_empty() {
            self.label(&file, &path, &wanted)?;
        }
        Ok(true)
    }

    fn remove(&self, name: &str, how: Removal, _progress: Progress<'_>) -> Result<Removed> {
        let spec = self.spec(name, None)?;
        let path = spec.path.display().to_string();
        let Some(file) = self.file(&spec)? else {
            // A call that was killed may have left more than the file.
            self.clear_leftovers(name);
            return Ok(Removed { changed: false, trash: None });
        };
        if how != Removal::Now {
            return Err(Error::new(ErrorKind::Unsupported, "files have no trash")
                .with_repair("repeat with --now, which deletes the file for good"));
        }
        claim::lock(&file, &path)?;
        let snapshots = self.snapshot_names(name)?;
        if !snapshots.is_empty() {
            let message = format!("{path} has the snapshots {}", snapshots.join(", "));
            return Err(Error::new(ErrorKind::InUse, message).with_repair("remove them first"));
        }
        claim::check_name(&file, &spec.path)?;
        let failed = |error| Error::from_io(format!("cannot remove {path}"), error);
        fs::remove_file(&spec.path).and_then(|()| sync_directory(&spec.path)).map_err(failed)?;
        self.clear_leftovers(name);
        Ok(Removed { changed: true, trash: None })
    }

    fn resize(&self, name: &str, size: u64, shrink: bool, _progress: Progress<'_>) -> Result<bool> {
        let spec = self.spec(name, None)?;
        let path = spec.path.display().to_string();
        let Some(file) = self.file(&spec)? else {
            return Err(Error::new(ErrorKind::NotFound, format!("{path} does not exist")));
        };
        let now = length(&file, &path)?;
        if size == now {
            return Ok(false);
        }
        if size < now && !shrink {
            let (size, now) = (Size(size), Size(now));
            return Err(invalid(format!("{path} has {now}, which is more than {size}")).with_repair(
                "make its file system smaller, then repeat with --shrink, which deletes the rest",
            ));
        }
        if size < now {
            claim::lock(&file, &path)?;
            file.set_len(size)
        } else {
            grow(&file, &path, size)?
        }
        .and_then(|()| file.sync_all())
        .map_err(|error| Error::from_io(format!("cannot resize {path}"), error))?;
        Ok(true)
    }

    /// Leaves out files whose names are not UTF-8, because no call can name them.
    fn list(&self, page: &Page) -> Result<Listing> {
        let shown = self.directory.path.display();
        let failed = |error| Error::from_io(format!("cannot read {shown}"), error);
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.directory.path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let Some(name) = entry.file_name().to_str().map(str::to_owned) else { continue };
            let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
            if is_file && page.after.as_deref().is_none_or(|after| &*name > after) {
                files.push((name, entry));
            }
            if files.len() > MAX_FILES {
                return Err(invalid(format!("{shown} has more than {MAX_FILES} files")));
            }
        }
        files.sort_by(|a, b| a.0.cmp(&b.0));
        let more = files.len() > page.limit;
        files.truncate(page.limit);
        let next = files.last().filter(|_| more).map(|(name, _)| name.clone());
        let mut volumes = Vec::with_capacity(files.len());
        for (name, entry) in files {
            let metadata = match entry.metadata() {
                Ok(metadata) => metadata,
                // The file was removed since the directory was read.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(failed(error)),
            };
            volumes.push(Entry {
                uri: self.uri(&name)?,
                name,
                size_bytes: Some(metadata.len()),
                ..Entry::default()
            });
        }
        Ok(Listing { volumes, next })
    }

    fn info(&self, name: &str, snapshot: Option<&str>) -> Result<Info> {
        if let Some(snapshot) = snapshot {
            return self.snapshot_info(name, snapshot);
        }
        let uri = self.uri(name)?;
        let spec = self.spec(name, None)?;
        let path = spec.path.display().to_string();
        let (device, _) = inspect(&spec, true)?;
        let info = Info { name: name.to_owned(), uri, clones: Some(Vec::new()), ..Info::default() };
        if device {
            let options = OpenOptions { read_only: true, ..OpenOptions::default() };
            let size_bytes = FileImage::open(&spec, &options)?.size();
            return Ok(Info { size_bytes, ..info });
        }
        let file = open(&spec, true, false)?;
        let metadata =
            file.metadata().map_err(|e| Error::from_io(format!("cannot look at {path}"), e))?;
        let lock = |client| Lock { client, cookie: None, address: None };
        Ok(Info {
            size_bytes: metadata.len(),
            // stat(2): the unit is 512 bytes for every block size.
            used_bytes: Some(metadata.blocks() * 512),
            locks: claim::lock_holder(&file).map(lock).into_iter().collect(),
            snapshots: self.snapshots_of(name)?,
            labels: labels::read(&file, &path)?,
            ..info
        })
    }

    fn snapshots(&self) -> Option<&dyn store::SnapshotStore> {
        Some(self)
    }

    fn clones(&self) -> Option<&dyn CloneStore> {
        Some(self)
    }

    fn labels(&self) -> Option<&dyn LabelStore> {
        Some(self)
    }

    fn available_bytes(&self) -> Result<Option<u64>> {
        let path = &self.directory.path;
        let found = rustix::fs::statvfs(path).map_err(|error| {
            let message = format!("cannot read the free space of {}", path.display());
            Error::from_io(message, error.into())
        })?;
        Ok(Some(found.f_bavail.saturating_mul(found.f_frsize)))
    }
}

impl LabelStore for FileStore {
    fn set(&self, name: &str, changes: &Labels) -> Result<bool> {
        let spec = self.spec(name, None)?;
        let path = spec.path.display().to_string();
        let Some(file) = self.file(&spec)? else {
            return Err(Error::new(ErrorKind::NotFound, format!("{path} does not exist")));
        };
        let is = labels::read(&file, &path)?;
        let labels = changed_labels(&is, changes)?;
        if labels == is {
            return Ok(false);
        }
        self.label(&file, &path, &labels)?;
        Ok(true)
    }
}

impl FileStore {
    fn snapshot_info(&self, name: &str, snapshot: &str) -> Result<Info> {
        let (file, path) = Self::open_snapshot(&self.directory, name, snapshot)?;
        let metadata =
            file.metadata().map_err(|e| Error::from_io(format!("cannot look at {path}"), e))?;
        Ok(Info {
            name: name.to_owned(),
            uri: format!("file:{}", Encoded(path.as_bytes())),
            size_bytes: metadata.len(),
            used_bytes: Some(metadata.blocks() * 512),
            created_at_s: Some(metadata.mtime()),
            clones: Some(Vec::new()),
            ..Info::default()
        })
    }
}

/// Makes the file at least `size` bytes long. It never makes the file shorter, because another process may
/// make it longer at the same time.
fn grow(file: &File, path: &str, size: u64) -> Result<io::Result<()>> {
    let last = i64::try_from(size - 1)
        .map_err(|_| invalid(format!("{} is too large for a file", Size(size))))?;
    match fallocate(file.as_fd(), FallocateFlags::empty(), last, 1) {
        Err(nix::Error::EOPNOTSUPP) => {
            claim::lock(file, path)?;
            Ok(file.set_len(size))
        }
        other => Ok(other.map_err(io::Error::from)),
    }
}

fn length(file: &File, path: &str) -> Result<u64> {
    let metadata = file.metadata();
    metadata.map(|found| found.len()).map_err(|e| Error::from_io(format!("stat {path}"), e))
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;
    use std::path::Path;

    use super::*;

    fn store(directory: &Path) -> FileStore {
        let directory = DirectorySpec { path: directory.to_owned() };
        FileStore::open(&directory).expect("it exists")
    }

    fn on(_: u64, _: u64) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }

    #[test]
    fn a_file_is_created_grows_in_use_and_is_removed() {
        let directory = tempfile::tempdir().expect("a directory");
        let store = store(directory.path());
        let layout = Layout::default();
        assert!(store.create("a", 1 << 20, &layout).expect("it is new"));
        assert!(!store.create("a", 1 << 20, &layout).expect("it exists"));
        let error = store.create("a", 2 << 20, &layout).expect_err("another size");
        assert_eq!(error.kind(), ErrorKind::AlreadyExists);
        assert!(error.message().contains("1M, not 2M"), "{}", error.message());

        // A call that was killed leaves an empty file.
        File::create(directory.path().join("half")).expect("a file");
        assert!(store.create("half", 4096, &layout).expect("it continues"));

        let spec = store.spec("a", None).expect("a name");
        let user = FileImage::open(&spec, &OpenOptions::default()).expect("a user");
        assert!(store.resize("a", 3 << 20, false, &mut on).expect("it grows"));
        assert_eq!(user.refresh_size().expect("it follows"), 3 << 20);
        for refused in [
            store.resize("a", 4096, true, &mut on).map(drop),
            store.remove("a", Removal::Now, &mut on).map(drop),
        ] {
            let error = refused.expect_err("it is in use");
            assert_eq!(error.kind(), ErrorKind::InUse);
            assert!(error.message().contains(&std::process::id().to_string()), "{error}");
        }
        drop(user);
        let error =
            store.resize("a", 4096, false, &mut on).expect_err("a shrink must be requested");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(store.resize("a", 4096, true, &mut on).expect("it shrinks"));
        assert_eq!(store.info("a", None).expect("it exists").size_bytes, 4096);
        let keep = Removal::Trash { keep: std::time::Duration::from_secs(1) };
        let error = store.remove("a", keep, &mut on).expect_err("there is no trash");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(store.remove("a", Removal::Now, &mut on).expect("it is removed").changed);
        assert!(!store.remove("a", keep, &mut on).expect("it was removed").changed);
        assert!(!directory.path().join("a").exists());
    }

    #[test]
    fn labels_tell_an_interrupted_creation_from_another_volume() {
        let directory = tempfile::tempdir().expect("a directory");
        let store = store(directory.path());
        let labels = |name: &str| Labels::from([("csi.name".to_owned(), name.to_owned())]);
        let layout = |name: &str| Layout { labels: labels(name), ..Layout::default() };
        assert!(Store::create(&store, "a", 1 << 20, &layout("a")).expect("it is new"));
        assert!(!Store::create(&store, "a", 1 << 20, &layout("a")).expect("it exists"));
        let error = Store::create(&store, "a", 1 << 20, &layout("b")).expect_err("another name");
        assert_eq!(error.kind(), ErrorKind::AlreadyExists);
        assert!(error.message().contains("csi.name=\"a\", not \"b\""), "{error}");

        // A call that was killed leaves a file without labels.
        File::create(directory.path().join("half")).expect("a file").set_len(4096).expect("a size");
        assert!(Store::create(&store, "half", 4096, &layout("half")).expect("it continues"));
        assert_eq!(store.info("half", None).expect("it exists").labels, labels("half"));
        // Another program's file has data.
        fs::write(directory.path().join("other"), [1_u8; 4096]).expect("a file");
        let error = Store::create(&store, "other", 4096, &layout("other")).expect_err("data");
        assert!(error.message().contains("without labels"), "{error}");

        let changes = [("csi.iops", "7"), ("csi.name", "")];
        let changes = changes.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        assert!(store.set("a", &changes).expect("it changes"));
        assert!(!store.set("a", &changes).expect("it does not change"));
        let info = store.info("a", None).expect("it exists");
        assert_eq!(info.labels.into_iter().collect::<Vec<_>>(), [("csi.iops".into(), "7".into())]);
        let long = Labels::from([("k".to_owned(), "v".repeat(4000))]);
        assert_eq!(store.set("a", &long).expect_err("too long").kind(), ErrorKind::InvalidArgument);
        assert_eq!(store.set("none", &long).expect_err("none").kind(), ErrorKind::NotFound);
        assert!(store.available_bytes().expect("a file system").is_some());
    }

    #[test]
    fn lists_come_in_pages() {
        let directory = tempfile::tempdir().expect("a directory");
        let store = store(directory.path());
        for name in ["b", "a", "c"] {
            store.create(name, 4096, &Layout::default()).expect("it is new");
        }
        fs::create_dir(directory.path().join("d")).expect("a directory");
        let page = |after: Option<&str>| {
            let after = after.map(str::to_owned);
            let listing = store.list(&Page { after, limit: 2, details: false }).expect("a list");
            let names: Vec<_> = listing.volumes.iter().map(|entry| entry.name.clone()).collect();
            (names.concat(), listing.next)
        };
        assert_eq!(page(None), ("ab".to_owned(), Some("b".to_owned())));
        assert_eq!(page(Some("b")), ("c".to_owned(), None));
    }

    #[test]
    fn links_and_unsupported_options_are_refused() {
        let directory = tempfile::tempdir().expect("a directory");
        let store = store(directory.path());
        store.create("a", 4096, &Layout::default()).expect("it is new");
        std::os::unix::fs::symlink("a", directory.path().join("link")).expect("a link");
        let error = store.remove("link", Removal::Now, &mut on).expect_err("a link");
        assert!(error.message().contains("symbolic link"), "{error}");
        let striped = Layout { stripes: Some((4096, 2)), ..Layout::default() };
        let error = store.create("b", 4096, &striped).expect_err("files have none");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(store.trash().is_none());
        assert!(store.create("../b", 4096, &Layout::default()).is_err());
    }
}
