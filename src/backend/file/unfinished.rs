//! Files that are being made. They have a name of their own, so that no other call takes one for a volume or a
//! snapshot, and get their final name when they are complete and durable.
//!
//! A file that a killed call left is emptied and used by the next call for the same name. A lock keeps two calls
//! apart.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::copy::Named;
use super::{claim, sync_directory};
use cleat_core::error::{Error, ErrorKind, Result};

/// A file that is being made. Dropping it removes it, unless it was published.
pub(super) struct Unfinished {
    file: File,
    path: PathBuf,
    shown: String,
    published: bool,
}

impl Unfinished {
    /// Opens the empty file `path` for reading and writing, and creates it if necessary.
    ///
    /// # Errors
    /// Returns `Aborted` if another call is making the same file.
    pub(super) fn open(path: PathBuf) -> Result<Self> {
        let shown = path.display().to_string();
        let failed = |error| Error::from_io(format!("cannot create {shown}"), error);
        let mut options = File::options();
        // An existing file is emptied only under the lock.
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.custom_flags(libc::O_NOFOLLOW).open(&path).map_err(failed)?;
        claim::lock(&file, &shown).map_err(|error| match error.kind() {
            ErrorKind::InUse => busy(&shown).with_source(error),
            _ => error,
        })?;
        let opened = file.metadata().map_err(failed)?;
        match fs::symlink_metadata(&path) {
            Ok(found) if (found.dev(), found.ino()) == (opened.dev(), opened.ino()) => {}
            // Another call has published or removed the file since it was opened.
            Ok(_) => return Err(busy(&shown)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(busy(&shown)),
            Err(error) => return Err(failed(error)),
        }
        file.set_len(0).map_err(failed)?;
        Ok(Self { file, path, shown, published: false })
    }

    /// Returns the file.
    pub(super) fn named(&self) -> Named<'_> {
        Named { file: &self.file, path: &self.shown }
    }

    /// Makes the content durable and gives the file its final name. Returns `false`, and removes the file, if
    /// the name exists already.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub(super) fn publish(mut self, target: &Path) -> Result<bool> {
        let failed = |error| Error::from_io(format!("cannot create {}", target.display()), error);
        self.file.sync_all().map_err(failed)?;
        match rename_to_new(&self.path, target) {
            Ok(()) => self.published = true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(false),
            Err(error) => return Err(failed(error)),
        }
        sync_directory(target).and_then(|()| sync_directory(&self.path)).map_err(failed)?;
        Ok(true)
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.published {
            // The lock is held, so no other call uses the file.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn busy(shown: &str) -> Error {
    Error::new(ErrorKind::Aborted, format!("another call is making {shown}"))
        .with_repair("repeat the call later")
}

/// Renames a file to a name that does not exist.
fn rename_to_new(from: &Path, to: &Path) -> io::Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // The file system does not have this kind of rename. The lock of the unfinished file excludes other calls
        // for the same name.
        Err(rustix::io::Errno::INVAL) if fs::symlink_metadata(to).is_err() => fs::rename(from, to),
        Err(rustix::io::Errno::INVAL) => Err(io::ErrorKind::AlreadyExists.into()),
        other => other.map_err(io::Error::from),
    }
}

/// Makes the directory `path` below `base`, which exists, with its parents, of mode 0700, durably.
///
/// # Errors
/// Returns the kernel's error.
pub(super) fn make_directories(base: &Path, path: &Path) -> Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let failed = |error| Error::from_io(format!("cannot create {}", path.display()), error);
    DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed)?;
    for made in path.ancestors().take_while(|made| *made != base) {
        sync_directory(made).map_err(failed)?;
    }
    Ok(())
}
