//! A store in a local directory: one file for each object.
//!
//! An object appears at once and complete: its bytes are written to a temporary file, the file is synchronized,
//! linked under its name, which fails if the name exists, and the directory is synchronized. A process that
//! crashes leaves at most temporary files, which a later one removes.
//!
//! A read from the first byte on synchronizes the directory. So what an opener has seen in the header of another
//! process' object is still there after a power failure, also if that process had not synchronized it yet.
//!
//! Operations run on threads of the store, since files block.

use std::collections::BTreeSet;
use std::fs::{self, File, Permissions};
use std::io::{self, ErrorKind, Write as _};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use nix::dir::{Dir, Type};
use nix::fcntl::{AtFlags, OFlag, OpenHow, RenameFlags, ResolveFlag, openat2, renameat2};
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::{UnlinkatFlags, linkat, unlinkat};

use super::pool::{Lane, Pool};
use super::{Pending, Store, StoreError};

/// The threads of a store for reads.
const READERS: usize = 4;

/// The threads of a store for everything else. Most of their time they wait for the disk.
const WRITERS: usize = 8;

/// The directory of temporary files. No object has a name below it.
const TEMPORARY: &str = "tmp";

/// The mode of directories. Each process may have a user of its own, so the directory above the store must keep
/// other users away.
const DIRECTORY_MODE: u32 = 0o777;

/// The mode of objects. They are never changed.
const FILE_MODE: u32 = 0o444;

/// A store in a local directory. Several processes may use the same directory at the same time.
pub struct Directory {
    place: Arc<Place>,
    pool: Pool,
}

/// What the threads of a store share.
struct Place {
    root: File,
    /// Begins the names of temporary files.
    token: u64,
    /// The number of the next temporary file.
    next: AtomicU64,
    /// The directories that this process has made or found, and whose names are durable.
    durable: Mutex<BTreeSet<String>>,
}

impl Directory {
    /// Opens the store in an existing directory. `token` is random and was never used before: it keeps the temporary
    /// files of processes apart.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be used, or if no thread can be started.
    pub fn open(root: &Path, token: u64) -> io::Result<Self> {
        let (root, durable) = (File::open(root)?, Mutex::default());
        let place = Place { root, token, next: AtomicU64::new(0), durable };
        place.make_durable(TEMPORARY)?;
        Ok(Self { place: Arc::new(place), pool: Pool::start("store", READERS, WRITERS)? })
    }

    /// Runs `job` on a thread of the store.
    fn run<'a, T: Send + 'static>(
        &self,
        lane: Lane,
        job: impl FnOnce(&Place) -> T + Send + 'static,
    ) -> Pending<'a, T> {
        let place = Arc::clone(&self.place);
        self.pool.run(lane, move || job(&place))
    }
}

/// Removes the temporary files of processes that have crashed from the store in a directory. Another process that is
/// just creating an object tries again then.
///
/// # Errors
/// Returns the error of the file system.
pub fn remove_temporary(root: &Path) -> io::Result<()> {
    for entry in fs::read_dir(root.join(TEMPORARY))? {
        let path = entry?.path();
        let removed = match fs::remove_file(&path) {
            Err(error) if error.kind() == ErrorKind::IsADirectory => fs::remove_dir(&path),
            other => other,
        };
        match removed {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

impl Store for Directory {
    fn create<'a>(&'a self, name: &'a str, bytes: &'a [u8]) -> Pending<'a, Result<(), StoreError>> {
        let (name, bytes) = (name.to_owned(), bytes.to_owned());
        self.run(Lane::Change, move |place| place.create(&name, &bytes).map_err(classify))
    }

    fn read<'a>(
        &'a self,
        name: &'a str,
        range: Range<u64>,
    ) -> Pending<'a, Result<Vec<u8>, StoreError>> {
        let name = name.to_owned();
        self.run(Lane::Read, move |place| place.read(&name, range).map_err(classify))
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: &'a str,
    ) -> Pending<'a, Result<Vec<String>, StoreError>> {
        let (prefix, after) = (prefix.trim_end_matches('/').to_owned(), after.to_owned());
        self.run(Lane::Change, move |place| place.list(&prefix, &after).map_err(classify))
    }

    fn delete<'a>(&'a self, name: &'a str) -> Pending<'a, Result<(), StoreError>> {
        let name = name.to_owned();
        self.run(Lane::Change, move |place| place.delete(&name).map_err(classify))
    }

    fn back_off(&self, attempt: u32) -> Pending<'_, ()> {
        self.pool.back_off(attempt)
    }
}

impl Place {
    fn create(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let (directory, last) = name.rsplit_once('/').unwrap_or(("", name));
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let temporary = format!("{:016x}-{number}", self.token);
        let beside = self.directory(TEMPORARY)?;
        let linked = write(&beside, &temporary, bytes).and_then(|()| {
            self.make_durable(directory)?;
            let directory = self.directory(directory)?;
            linkat(&beside, &*temporary, &directory, last, AtFlags::empty())?;
            Ok(directory)
        });
        let _ = unlinkat(&beside, &*temporary, UnlinkatFlags::NoRemoveDir);
        linked?.sync_all()
    }

    fn read(&self, name: &str, range: Range<u64>) -> io::Result<Vec<u8>> {
        let (directory, last) = name.rsplit_once('/').unwrap_or(("", name));
        let directory = self.directory(directory)?;
        let file = open(&directory, last, OFlag::O_RDONLY)?;
        let length = file.metadata()?.len().min(range.end).saturating_sub(range.start);
        let mut bytes = vec![0; usize::try_from(length).map_err(|_| ErrorKind::InvalidInput)?];
        file.read_exact_at(&mut bytes, range.start)?;
        if range.start == 0 {
            directory.sync_all()?;
        }
        Ok(bytes)
    }

    fn delete(&self, name: &str) -> io::Result<()> {
        let (directory, last) = name.rsplit_once('/').unwrap_or(("", name));
        let deleted = self
            .directory(directory)
            .and_then(|directory| Ok(unlinkat(&directory, last, UnlinkatFlags::NoRemoveDir)?));
        match deleted {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    /// Lists the names below `prefix` that are in the first directory with names behind `after`.
    fn list(&self, prefix: &str, after: &str) -> io::Result<Vec<String>> {
        let found = match self.directory(prefix) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            found => found?,
        };
        let (mut names, mut directories) = (BTreeSet::new(), BTreeSet::new());
        for entry in Dir::from_fd(OwnedFd::from(found))?.iter() {
            let entry = entry?;
            let Ok(name) = entry.file_name().to_str() else { continue };
            let kind = entry.file_type();
            let name = format!("{prefix}/{name}");
            // Some file systems do not tell the type.
            match kind.map_or_else(|| self.directory(&name).is_ok(), |kind| kind == Type::Directory)
            {
                true if name.ends_with("/.") || name.ends_with("/..") => {}
                true => drop(directories.insert(name)),
                false => drop(names.insert(name)),
            }
        }
        for directory in directories {
            // The names in it are greater than `directory/` and less than `directory0`.
            if format!("{directory}0").as_str() > after {
                let found = self.list(&directory, after)?;
                if !found.is_empty() {
                    return Ok(found);
                }
            }
        }
        Ok(names.into_iter().filter(|name| name.as_str() > after).collect())
    }

    /// Creates a directory of the store, once in this process.
    fn make_durable(&self, directory: &str) -> io::Result<()> {
        let known = || self.durable.lock().unwrap_or_else(PoisonError::into_inner);
        if !known().contains(directory) {
            self.make_directory(directory)?;
            known().insert(directory.to_owned());
        }
        Ok(())
    }

    /// Creates a directory and the ones above it, so that they survive a power failure.
    fn make_directory(&self, name: &str) -> io::Result<()> {
        if name.is_empty() {
            return Ok(());
        }
        let (above, last) = name.rsplit_once('/').unwrap_or(("", name));
        self.make_directory(above)?;
        let above = self.directory(above)?;
        match self.make_in(&above, last) {
            // Another process may have made it and crashed before it has synchronized the directory above.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            other => other?,
        }
        above.sync_all()
    }

    /// Creates a directory that appears with its mode, which the mask of the process would limit. Otherwise a crash
    /// could leave one in which no other user can create objects.
    fn make_in(&self, above: &File, last: &str) -> io::Result<()> {
        if open(above, last, OFlag::O_RDONLY | OFlag::O_DIRECTORY).is_ok() {
            return Err(ErrorKind::AlreadyExists.into());
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let temporary = format!("{:016x}-{number}", self.token);
        // The directory of temporary files is the first one to be made.
        let beside = match last {
            TEMPORARY => above.try_clone()?,
            _ => self.directory(TEMPORARY)?,
        };
        mkdirat(&beside, &*temporary, Mode::S_IRWXU)?;
        let made = open(&beside, &temporary, OFlag::O_RDONLY | OFlag::O_DIRECTORY)
            .and_then(|made| made.set_permissions(Permissions::from_mode(DIRECTORY_MODE)))
            .and_then(|()| {
                let flags = RenameFlags::RENAME_NOREPLACE;
                Ok(renameat2(&beside, &*temporary, above, last, flags)?)
            });
        if made.is_err() {
            let _ = unlinkat(&beside, &*temporary, UnlinkatFlags::RemoveDir);
        }
        made
    }

    /// Opens a directory of the store.
    fn directory(&self, name: &str) -> io::Result<File> {
        let name = if name.is_empty() { "." } else { name };
        open(&self.root, name, OFlag::O_RDONLY | OFlag::O_DIRECTORY)
    }
}

/// Opens what `name` leads to below a directory without a symbolic link. A worker that was taken over could make links,
/// and a privileged process must not follow them.
fn open(directory: &File, name: &str, flags: OFlag) -> io::Result<File> {
    let how = OpenHow::new()
        .flags(flags | OFlag::O_CLOEXEC)
        .mode(match flags.contains(OFlag::O_CREAT) {
            true => Mode::from_bits_truncate(FILE_MODE),
            false => Mode::empty(),
        })
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS);
    Ok(openat2(directory, name, how)?.into())
}

fn write(directory: &File, name: &str, bytes: &[u8]) -> io::Result<()> {
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL;
    let mut file = open(directory, name, flags)?;
    file.write_all(bytes)?;
    file.sync_data()
}

fn classify(error: io::Error) -> StoreError {
    match error.kind() {
        ErrorKind::NotFound => StoreError::NotFound,
        ErrorKind::AlreadyExists => StoreError::Exists,
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
            StoreError::Refused(error.to_string())
        }
        _ => StoreError::Unclear(error.to_string()),
    }
}
