//! The journal: one JSON file per mapping under the state directory. After a restart, the supervisor
//! reads from it which mappings the users want.
//!
//! A record is written to a temporary file, synced, and renamed over the old one; then the directory is
//! synced. After a crash the file contains either the old record or the new one.
//!
//! A record is needed as long as the machine runs: devices and workers do not survive a boot, and a record
//! of an earlier boot is only reported. If the state directory does not take a record (full, read-only, or
//! hung), a copy in the runtime directory, which is in memory on most machines, is as good. The revision of
//! a record decides which of the two is newer. A record that cannot be removed from the state directory gets
//! a removal mark in the runtime directory.
//!
//! - `disk`: the file operations, which tests replace.
//! - `load`: reads the records. A damaged record is moved to `quarantine/` and reported. A record of a newer
//!   version, and one that cannot be read now, is reported and left in place. None of them stops the daemon.

mod disk;
mod load;
#[cfg(test)]
mod simulated_disk;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::fcntl::{Flock, FlockArg};

use super::directory::create_private;
use super::planner::Record;
use cleat_core::error::{Error, ErrorKind, Result};

pub use disk::{Disk, RealDisk};
#[cfg(feature = "fuzz")]
pub use load::reprint_record;
pub use load::{Loaded, RejectedRecord, Rejection};

/// The longest record, in bytes: a URI of 4096 bytes, escaped, fits many times.
pub const MAX_RECORD: u64 = 64 * 1024;

/// The length of the file that checks the state directory, in bytes: one block of most file systems, as most
/// records need.
const CHECK_LENGTH: usize = 4096;

/// The extension of a file in the runtime directory that marks a record as removed.
const REMOVAL_MARK: &str = "removed";

/// An open journal. It holds a lock, so that no other supervisor can open the same state directory.
#[derive(Debug)]
pub struct Journal {
    disk: Arc<dyn Disk>,
    records: PathBuf,
    quarantine: PathBuf,
    /// The copies and the removal marks, in the runtime directory.
    copies: PathBuf,
    _lock: Flock<File>,
}

impl Journal {
    /// Opens the journal under `state_dir` with its copies under `runtime_dir`, and creates the directories
    /// that are missing. A state directory that is read-only can be opened if it has been used before.
    /// Blocks.
    ///
    /// # Errors
    /// Returns `InUse` if another supervisor has the journal open, and an error if the file system
    /// refuses to create a directory.
    pub fn open(state_dir: &Path, runtime_dir: &Path, disk: Arc<dyn Disk>) -> Result<Self> {
        let records = state_dir.join("mappings");
        let quarantine = state_dir.join("quarantine");
        let copies = runtime_dir.join("records");
        for path in [state_dir, &records, &quarantine, &copies] {
            create_private(path)?;
        }
        let lock = lock(&state_dir.join("lock"))?;
        Ok(Self { disk, records, quarantine, copies, _lock: lock })
    }

    /// Returns the directory of the copies.
    pub fn copies(&self) -> &Path {
        &self.copies
    }

    /// Writes `record` durably to the state directory and replaces its previous content. Blocks until the
    /// disk has the record.
    ///
    /// # Errors
    /// Returns `NoSpace` if the disk is full, and an error if the file system refuses the write. The
    /// previous content is then still valid.
    pub fn store(&self, record: &Record) -> Result<()> {
        self.store_unless_cancelled(record, &AtomicBool::new(false))
    }

    /// Writes `record` as [`Journal::store`] does, unless `cancelled` is set when the new file is about to
    /// replace the old one. A write that timed out was reported as failed, so it must not take effect
    /// minutes later.
    ///
    /// # Errors
    /// Returns `TimedOut` if `cancelled` was set; otherwise as [`Journal::store`].
    pub fn store_unless_cancelled(&self, record: &Record, cancelled: &AtomicBool) -> Result<()> {
        self.write(&self.records, record, cancelled)
    }

    /// Checks that the state directory takes a file of the size of a record, and removes it again. Blocks.
    ///
    /// # Errors
    /// As [`Journal::store`].
    pub fn check_writable(&self) -> Result<()> {
        let path = self.records.join("check.tmp");
        let written = self.disk.write_synced(&path, &[0; CHECK_LENGTH]);
        let removed = self.disk.remove(&path);
        written.and(removed).map_err(|error| {
            failed_write(format!("cannot write {}", path.display()), &self.records, error)
        })
    }

    /// Writes a copy of `record` to the runtime directory, because the state directory does not take it.
    /// Blocks.
    ///
    /// # Errors
    /// As [`Journal::store`].
    pub fn store_copy(&self, record: &Record) -> Result<()> {
        self.write(&self.copies, record, &AtomicBool::new(false))
    }

    /// Removes the copy of a record that the state directory has taken. Succeeds if there is none. Blocks.
    ///
    /// # Errors
    /// Returns an error if the file system refuses the removal. A copy that is older than the record has no
    /// effect.
    pub fn remove_copy(&self, mapping_id: &str) -> Result<()> {
        self.remove_file(&file(&self.copies, mapping_id, "json")?, &self.copies)
    }

    /// Removes the record of a mapping durably from the state directory. Succeeds if there is no such record.
    /// Blocks.
    ///
    /// # Errors
    /// Returns an error if the file system refuses the removal.
    pub fn remove(&self, mapping_id: &str) -> Result<()> {
        self.remove_file(&file(&self.records, mapping_id, "json")?, &self.records)
    }

    /// Removes the copy of a record and its removal mark, after the record was removed from the state
    /// directory. Succeeds if there is none of them. Blocks.
    ///
    /// # Errors
    /// As [`Journal::remove`].
    pub fn remove_traces(&self, mapping_id: &str) -> Result<()> {
        self.remove_copy(mapping_id)?;
        // The mark is removed last: it applies to the copy, too.
        self.remove_file(&file(&self.copies, mapping_id, REMOVAL_MARK)?, &self.copies)
    }

    /// Marks the record of a mapping as removed, because it cannot be removed from the state directory now.
    /// Blocks.
    ///
    /// # Errors
    /// As [`Journal::store`].
    pub fn mark_removed(&self, mapping_id: &str) -> Result<()> {
        let mark = file(&self.copies, mapping_id, REMOVAL_MARK)?;
        let written = self
            .disk
            .write_synced(&mark, b"")
            .and_then(|()| self.disk.sync_directory(&self.copies));
        written.map_err(|error| {
            let message = format!("cannot mark the record {mapping_id} as removed");
            failed_write(message, &self.copies, error)
        })?;
        // With the mark, the copy has no effect.
        let _ = self.remove_copy(mapping_id);
        Ok(())
    }

    fn remove_file(&self, path: &Path, directory: &Path) -> Result<()> {
        let removed = match self.disk.remove(path) {
            // An earlier attempt may have failed between the removal and the sync.
            Err(error) if error.kind() == io::ErrorKind::NotFound && directory == self.copies => {
                return Ok(());
            }
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => self.disk.sync_directory(directory),
        };
        removed.map_err(|error| {
            let message = format!("cannot remove the journal record {}", path.display());
            failed_write(message, directory, error)
        })
    }

    fn write(&self, directory: &Path, record: &Record, cancelled: &AtomicBool) -> Result<()> {
        let path = file(directory, &record.mapping_id, "json")?;
        let temporary = path.with_extension("tmp");
        let written = self.replace(directory, record, &temporary, &path, cancelled);
        if written.is_err() {
            // Best effort: the next `load` removes the file if this fails.
            let _ = self.disk.remove(&temporary);
        }
        written.map_err(|error| {
            let message = format!("cannot write the journal record of {}", record.name);
            failed_write(message, directory, error)
        })
    }

    fn replace(
        &self,
        directory: &Path,
        record: &Record,
        temporary: &Path,
        path: &Path,
        cancelled: &AtomicBool,
    ) -> io::Result<()> {
        let mut text = serde_json::to_vec_pretty(record)?;
        text.push(b'\n');
        if text.len() as u64 > MAX_RECORD {
            return Err(io::Error::other(format!(
                "it is {} bytes long, and the limit is {MAX_RECORD}",
                text.len()
            )));
        }
        self.disk.write_synced(temporary, &text)?;
        if cancelled.load(Ordering::SeqCst) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.disk.rename(temporary, path)?;
        self.disk.sync_directory(directory)
    }
}

/// Returns the path of a mapping's file. An id that is not hexadecimal never becomes a path.
fn file(directory: &Path, mapping_id: &str, extension: &str) -> Result<PathBuf> {
    if !is_mapping_id(mapping_id) {
        let message = format!("not a mapping id: {mapping_id:?}");
        return Err(Error::new(ErrorKind::Internal, message));
    }
    Ok(directory.join(format!("{mapping_id}.{extension}")))
}

/// Returns the error of a write to `directory`, with the repair that fits its cause.
fn failed_write(message: String, directory: &Path, error: io::Error) -> Error {
    let directory = directory.display();
    let repair = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            format!("free disk space and inodes under {directory}")
        }
        io::ErrorKind::ReadOnlyFilesystem => format!(
            "see dmesg for the reason, then make the file system of {directory} writable (mount -o remount,rw)"
        ),
        _ => format!("check the disk of {directory}: see dmesg"),
    };
    Error::from_io(message, error).with_repair(repair)
}

/// Returns whether `text` has the form of a mapping's id: 8 to 32 lower-case hexadecimal digits.
pub fn is_mapping_id(text: &str) -> bool {
    (8..=32).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// Locks the file at `path` without waiting, and creates it if it is missing. On a read-only file system the
/// file must exist.
///
/// # Errors
/// Returns `InUse` if another process holds the lock, and an error if the file cannot be opened.
pub fn lock(path: &Path) -> Result<Flock<File>> {
    let open = |write: bool| {
        let mut options = File::options();
        options.read(true).write(write).create(write).truncate(false).mode(0o600).open(path)
    };
    let file = match open(true) {
        // flock(2) needs no write access.
        Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => open(false),
        other => other,
    };
    let file =
        file.map_err(|error| Error::from_io(format!("cannot open {}", path.display()), error))?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| match errno {
        nix::errno::Errno::EWOULDBLOCK => {
            let message =
                format!("another cleat daemon is running: it has locked {}", path.display());
            Error::new(ErrorKind::InUse, message).with_repair(
                "stop it first, or use another --state-dir and --runtime-dir for this one",
            )
        }
        errno => Error::from_io(format!("cannot lock {}", path.display()), errno.into()),
    })
}
