//! Snapshots and clones of files. Each is a file of its own, so removing one affects no other.
//!
//! | path in the directory of the volumes | content |
//! |---|---|
//! | `.cleat/snapshots/VOLUME/SNAPSHOT` | a complete snapshot; its modification time is that of the snapshot |
//! | `.cleat/snapshots/VOLUME/.SNAPSHOT` | a snapshot that is being made |
//! | `.cleat/new/VOLUME` | a clone that is being made |
//!
//! Lists of volumes contain only the files of the directory itself, and so none of these. `copy` says what a
//! snapshot of a volume in use contains.

use std::any::Any;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;

use super::copy::{Named, copy};
use super::spec::{DirectorySpec, HIDDEN};
use super::store::FileStore;
use super::unfinished::{Unfinished, make_directories};
use super::{claim, labels, open, sync_directory};
use crate::store::{
    CloneStore, Labels, Layout, Progress, Snapshot, SnapshotStore, Source, changed_labels,
    label_differences,
};
use crate::uri::invalid;
use cleat_core::error::{Error, ErrorKind, Result};

/// The label of a clone that names its source, so that a repeated call recognizes the clone.
const PARENT: &str = "cleat.parent";

/// The maximum number of snapshots of a volume that can be listed.
const MAX_SNAPSHOTS: usize = 10_000;

impl DirectorySpec {
    fn hidden(&self, part: &str) -> PathBuf {
        self.path.join(HIDDEN).join(part)
    }

    /// Returns the directory with the snapshots of the volume `name`, which may not exist.
    pub(super) fn snapshots(&self, name: &str) -> PathBuf {
        self.hidden("snapshots").join(name)
    }

    /// Returns the path of a snapshot, which may not exist.
    ///
    /// # Errors
    /// Returns `InvalidArgument` for a name that a snapshot cannot have.
    pub(super) fn snapshot(&self, name: &str, snapshot: &str) -> Result<PathBuf> {
        self.file(name)?;
        self.file(snapshot)?;
        if snapshot.starts_with('.') {
            return Err(invalid(format!("{snapshot:?} cannot be the name of a snapshot"))
                .with_repair("use a name that does not begin with a dot"));
        }
        Ok(self.snapshots(name).join(snapshot))
    }
}

impl FileStore {
    /// Opens the volume `name` for reading.
    fn volume_for_reading(&self, name: &str) -> Result<(File, String)> {
        let spec = self.spec(name, None)?;
        let path = spec.path.display().to_string();
        self.check_plain(&spec)?;
        Ok((open(&spec, true, false)?, path))
    }

    /// Returns the names of the complete snapshots of a volume, which need not exist, in alphabetical order.
    pub(super) fn snapshot_names(&self, name: &str) -> Result<Vec<String>> {
        let directory = self.directory.snapshots(name);
        let failed = |error| Error::from_io(format!("cannot read {}", directory.display()), error);
        let entries = match fs::read_dir(&directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(failed(error)),
        };
        let mut names = Vec::new();
        for entry in entries {
            let name = entry.map_err(failed)?.file_name();
            let Some(name) = name.to_str().filter(|name| !name.starts_with('.')) else { continue };
            names.push(name.to_owned());
            if names.len() > MAX_SNAPSHOTS {
                let message =
                    format!("{} has more than {MAX_SNAPSHOTS} snapshots", directory.display());
                return Err(invalid(message));
            }
        }
        names.sort();
        Ok(names)
    }

    /// Returns the snapshots of a volume, which need not exist, oldest first.
    pub(super) fn snapshots_of(&self, name: &str) -> Result<Vec<Snapshot>> {
        let mut snapshots = Vec::new();
        for snapshot in self.snapshot_names(name)? {
            let path = self.directory.snapshot(name, &snapshot)?;
            match fs::metadata(&path) {
                Ok(found) => snapshots.push((
                    found.mtime(),
                    found.mtime_nsec(),
                    Snapshot {
                        id: found.ino(),
                        name: snapshot,
                        size_bytes: found.len(),
                        created_at_s: found.mtime(),
                        protected: false,
                        kind: "user",
                    },
                )),
                // It was removed since the directory was read.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    let message = format!("cannot stat {}", path.display());
                    return Err(Error::from_io(message, error));
                }
            }
        }
        snapshots.sort_by(|a, b| (a.0, a.1, &a.2.name).cmp(&(b.0, b.1, &b.2.name)));
        Ok(snapshots.into_iter().map(|(_, _, snapshot)| snapshot).collect())
    }

    /// Opens a snapshot for reading.
    ///
    /// # Errors
    /// Returns `NotFound` if it does not exist.
    pub(super) fn open_snapshot(
        directory: &DirectorySpec,
        name: &str,
        snapshot: &str,
    ) -> Result<(File, String)> {
        let path = directory.snapshot(name, snapshot)?;
        let shown = path.display().to_string();
        match File::open(&path) {
            Ok(file) => Ok((file, shown)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let volume = directory.path.join(name);
                let message = format!("there is no snapshot {snapshot} of {}", volume.display());
                Err(Error::new(ErrorKind::NotFound, message))
            }
            Err(error) => Err(Error::from_io(format!("cannot open {shown}"), error)),
        }
    }

    /// Removes what is left of a volume that does not exist: a clone and snapshots that are not complete.
    pub(super) fn clear_leftovers(&self, name: &str) {
        let unfinished = self.directory.hidden("new").join(name);
        if unfinished.exists() {
            // Dropping it removes the file. Fails while another call makes the clone.
            drop(Unfinished::open(unfinished));
        }
        let directory = self.directory.snapshots(name);
        let Ok(entries) = fs::read_dir(&directory) else { return };
        for entry in entries.flatten() {
            if entry.file_name().to_string_lossy().starts_with('.') {
                let _ = fs::remove_file(entry.path());
            }
        }
        let _ = fs::remove_dir(&directory);
    }

    /// Checks that an existing volume is the wanted clone.
    fn check_clone(&self, name: &str, wanted: &Labels) -> Result<bool> {
        let (file, path) = self.volume_for_reading(name)?;
        let differences = label_differences(&labels::read(&file, &path)?, wanted);
        if differences.is_empty() {
            return Ok(false);
        }
        let message = format!("{path} exists with {}", differences.join("; "));
        Err(Error::new(ErrorKind::AlreadyExists, message).with_repair("choose another name"))
    }
}

impl SnapshotStore for FileStore {
    fn list(&self, name: &str) -> Result<Vec<Snapshot>> {
        self.volume_for_reading(name)?;
        self.snapshots_of(name)
    }

    fn create(&self, name: &str, snapshot: &str, progress: Progress<'_>) -> Result<bool> {
        let (volume, volume_path) = self.volume_for_reading(name)?;
        let path = self.directory.snapshot(name, snapshot)?;
        if fs::symlink_metadata(&path).is_ok() {
            return Ok(false);
        }
        make_directories(&self.directory.path, &self.directory.snapshots(name))?;
        let unfinished = Unfinished::open(path.with_file_name(format!(".{snapshot}")))?;
        copy(Named { file: &volume, path: &volume_path }, unfinished.named(), progress)?;
        // Nothing writes to a snapshot.
        let read_only = fs::Permissions::from_mode(0o400);
        unfinished.named().file.set_permissions(read_only).map_err(|error| {
            Error::from_io(format!("cannot make {} read-only", path.display()), error)
        })?;
        unfinished.publish(&path)
    }

    fn remove(&self, name: &str, snapshot: &str) -> Result<bool> {
        let path = self.directory.snapshot(name, snapshot)?;
        match fs::remove_file(&path).and_then(|()| sync_directory(&path)) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(Error::from_io(format!("cannot remove {}", path.display()), error)),
        }
    }

    fn protect(&self, _name: &str, _snapshot: &str, _protect: bool) -> Result<bool> {
        Err(Error::new(ErrorKind::Unsupported, "snapshots of files cannot be protected")
            .with_repair("no clone needs the snapshot, so it needs no protection"))
    }

    /// An interrupted call leaves a volume with a part of the content; another call completes it.
    fn rollback(&self, name: &str, snapshot: &str, progress: Progress<'_>) -> Result<()> {
        let (from, from_path) = Self::open_snapshot(&self.directory, name, snapshot)?;
        let spec = self.spec(name, None)?;
        let path = spec.path.display().to_string();
        self.check_plain(&spec)?;
        let volume = open(&spec, false, false)?;
        claim::lock(&volume, &path)?;
        let failed = |error| Error::from_io(format!("cannot restore {path}"), error);
        volume.set_len(0).map_err(failed)?;
        copy(
            Named { file: &from, path: &from_path },
            Named { file: &volume, path: &path },
            progress,
        )?;
        volume.sync_all().map_err(failed)
    }
}

impl CloneStore for FileStore {
    fn clones_volumes(&self) -> bool {
        true
    }

    fn create_clone(
        &self,
        source: &Source<'_>,
        name: &str,
        layout: &Layout,
        progress: Progress<'_>,
    ) -> Result<bool> {
        let from: &dyn Any = source.store;
        let Some(from) = from.downcast_ref::<DirectorySpec>() else {
            return Err(invalid("a file can only be cloned from a file or a snapshot of one"));
        };
        // Formats 1 and 2 differ in what a clone needs of its parent. A file needs nothing.
        Self::check_layout(&Layout { clone_format: None, ..layout.clone() })?;
        let target = self.spec(name, None)?;
        let volume = from.path.join(source.name);
        let parent = match source.snapshot {
            Some(snapshot) => format!("{}@{snapshot}", volume.display()),
            None => volume.display().to_string(),
        };
        let mut wanted = layout.labels.clone();
        wanted.insert(PARENT.to_owned(), parent);
        let wanted = changed_labels(&Labels::new(), &wanted)?;
        if fs::symlink_metadata(&target.path).is_ok() {
            return self.check_clone(name, &wanted);
        }
        let (file, path) = match source.snapshot {
            Some(snapshot) => Self::open_snapshot(from, source.name, snapshot)?,
            None => Self::open(from)?.volume_for_reading(source.name)?,
        };
        make_directories(&self.directory.path, &self.directory.hidden("new"))?;
        let unfinished = Unfinished::open(self.directory.hidden("new").join(name))?;
        copy(Named { file: &file, path: &path }, unfinished.named(), progress)?;
        labels::write(unfinished.named().file, unfinished.named().path, &wanted)?;
        if unfinished.publish(&target.path)? { Ok(true) } else { self.check_clone(name, &wanted) }
    }

    /// A clone does not depend on its source.
    fn flatten(&self, name: &str, _progress: Progress<'_>) -> Result<bool> {
        self.volume_for_reading(name).map(|_| false)
    }
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;
    use std::os::unix::fs::FileExt;
    use std::path::Path;

    use super::*;
    use crate::Image;
    use crate::file::FileImage;
    use crate::spec::{OpenOptions, StoreSpec};
    use crate::store::{Page, Removal, Store};

    fn on(_: u64, _: u64) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }

    fn store(directory: &Path) -> (DirectorySpec, FileStore) {
        let spec = DirectorySpec { path: directory.to_owned() };
        let store = FileStore::open(&spec).unwrap();
        Store::create(&store, "a", 1 << 20, &Layout::default()).unwrap();
        File::options()
            .write(true)
            .open(directory.join("a"))
            .unwrap()
            .write_all_at(b"first", 4096)
            .unwrap();
        (spec, store)
    }

    fn content(path: impl AsRef<Path>) -> Vec<u8> {
        fs::read(path).unwrap()[4096..4101].to_vec()
    }

    #[test]
    fn a_snapshot_keeps_the_content_and_is_no_volume() {
        let directory = tempfile::tempdir().unwrap();
        let (_, store) = store(directory.path());
        let volume = directory.path().join("a");
        assert!(SnapshotStore::create(&store, "a", "s1", &mut on).unwrap());
        assert!(!SnapshotStore::create(&store, "a", "s1", &mut on).unwrap());
        File::options().write(true).open(&volume).unwrap().write_all_at(b"later", 4096).unwrap();
        assert!(SnapshotStore::create(&store, "a", "s2", &mut on).unwrap());
        let snapshots = SnapshotStore::list(&store, "a").unwrap();
        let names: Vec<&str> = snapshots.iter().map(|snapshot| &*snapshot.name).collect();
        assert_eq!(names, ["s1", "s2"]);
        assert_eq!(snapshots[0].size_bytes, 1 << 20);
        let page = Page { after: None, limit: 10, details: true };
        let volumes = Store::list(&store, &page).unwrap().volumes;
        assert_eq!(volumes.len(), 1, "{volumes:?}");

        let error = Store::remove(&store, "a", Removal::Now, &mut on).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InUse);
        assert!(error.message().contains("s1, s2"), "{error}");
        store.rollback("a", "s1", &mut on).unwrap();
        assert_eq!(content(&volume), b"first");
        for name in ["s1", "s2"] {
            assert!(SnapshotStore::remove(&store, "a", name).unwrap());
            assert!(!SnapshotStore::remove(&store, "a", name).unwrap());
        }
        assert!(Store::remove(&store, "a", Removal::Now, &mut on).unwrap().changed);
        assert!(!directory.path().join(".cleat/snapshots/a").exists());
        let missing = SnapshotStore::create(&store, "a", "s1", &mut on).unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
    }

    #[test]
    fn a_snapshot_that_a_killed_call_left_is_made_again() {
        let directory = tempfile::tempdir().unwrap();
        let (_, store) = store(directory.path());
        let hidden = directory.path().join(".cleat/snapshots/a");
        fs::create_dir_all(&hidden).unwrap();
        fs::write(hidden.join(".s1"), vec![9_u8; 2 << 20]).unwrap();
        assert_eq!(SnapshotStore::list(&store, "a").unwrap(), Vec::new());
        assert!(SnapshotStore::create(&store, "a", "s1", &mut on).unwrap());
        assert_eq!(content(hidden.join("s1")), b"first");
        assert_eq!(fs::metadata(hidden.join("s1")).unwrap().len(), 1 << 20);
        assert!(!hidden.join(".s1").exists());

        // Another call is making it.
        let other = Unfinished::open(hidden.join(".s2")).unwrap();
        let error = SnapshotStore::create(&store, "a", "s2", &mut on).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Aborted, "{error}");
        drop(other);
        assert!(!hidden.join(".s2").exists());
    }

    #[test]
    fn clones_are_independent_volumes_with_labels() {
        let directory = tempfile::tempdir().unwrap();
        let (spec, store) = store(directory.path());
        SnapshotStore::create(&store, "a", "s", &mut on).unwrap();
        let labels = Labels::from([("csi.name".to_owned(), "b".to_owned())]);
        let layout = Layout { labels: labels.clone(), ..Layout::default() };
        let from = |snapshot| Source { store: &spec as &dyn StoreSpec, name: "a", snapshot };
        assert!(store.create_clone(&from(Some("s")), "b", &layout, &mut on).unwrap());
        assert!(!store.create_clone(&from(Some("s")), "b", &layout, &mut on).unwrap());
        let error = store.create_clone(&from(None), "b", &layout, &mut on).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AlreadyExists);
        assert!(error.message().contains("cleat.parent"), "{error}");
        assert!(store.create_clone(&from(None), "c", &layout, &mut on).unwrap());
        let missing = store.create_clone(&from(Some("t")), "d", &layout, &mut on).unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
        assert_eq!(Store::info(&store, "b", None).unwrap().labels["csi.name"], "b");

        SnapshotStore::remove(&store, "a", "s").unwrap();
        Store::remove(&store, "a", Removal::Now, &mut on).unwrap();
        for clone in ["b", "c"] {
            assert_eq!(content(directory.path().join(clone)), b"first");
            let options = OpenOptions::default();
            let image = FileImage::open(&store.spec(clone, None).unwrap(), &options).unwrap();
            assert_eq!(image.size(), 1 << 20);
        }
    }

    #[test]
    fn names_that_could_be_mistaken_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let (_, store) = store(directory.path());
        for name in [".s", "", "a/b", ".."] {
            let error = SnapshotStore::create(&store, "a", name, &mut on).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{name:?}");
        }
        let error = Store::create(&store, HIDDEN, 4096, &Layout::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    }
}
