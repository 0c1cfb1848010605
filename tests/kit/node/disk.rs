//! The file system of a machine's journal, which a test can make fail.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use cleat_node::journal::{Disk, RealDisk};

use crate::wait::LIMIT;

/// A failure of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskFailure {
    /// Writes fail with ENOSPC. Files can be removed.
    Full,
    /// All changes fail with EROFS.
    ReadOnly,
    /// All changes wait until the failure ends.
    Hang,
}

/// The file system of a machine's journal. Clones are the same file system.
#[derive(Debug, Clone, Default)]
pub struct JournalDisk(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    failures: Mutex<Failures>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Failures {
    state: Option<DiskFailure>,
    runtime: Option<DiskFailure>,
    /// The error number of every read of a record.
    reads: Option<i32>,
    refused_writes: u64,
}

impl Failures {
    fn of(&self, is_copy: bool) -> Option<DiskFailure> {
        if is_copy { self.runtime } else { self.state }
    }
}

impl JournalDisk {
    /// Sets the failures of the state directory and of the runtime directory.
    pub fn fail(&self, state: Option<DiskFailure>, runtime: Option<DiskFailure>) {
        let mut failures = self.failures();
        (failures.state, failures.runtime) = (state, runtime);
        drop(failures);
        self.0.changed.notify_all();
    }

    /// Makes every read of a record fail with this error number, or with `None` succeed again.
    pub fn fail_reads(&self, errno: Option<i32>) {
        self.failures().reads = errno;
    }

    /// Returns how many writes of files have failed.
    pub fn refused_writes(&self) -> u64 {
        self.failures().refused_writes
    }

    fn failures(&self) -> MutexGuard<'_, Failures> {
        self.0.failures.lock().unwrap()
    }

    /// Waits while the disk with `path` hangs, and fails as it does. `writes`: the change needs space.
    fn check(&self, path: &Path, writes: bool) -> io::Result<()> {
        let is_copy = path.iter().any(|part| part == "records");
        let hangs = |failures: &mut Failures| failures.of(is_copy) == Some(DiskFailure::Hang);
        // The limit lets a test that fails meanwhile end.
        let waited = self.0.changed.wait_timeout_while(self.failures(), LIMIT, hangs);
        let mut failures = waited.unwrap().0;
        let errno = match failures.of(is_copy) {
            Some(DiskFailure::Full) if writes => libc::ENOSPC,
            Some(DiskFailure::ReadOnly) => libc::EROFS,
            Some(DiskFailure::Hang) => libc::EIO,
            Some(DiskFailure::Full) | None => return Ok(()),
        };
        failures.refused_writes += u64::from(writes);
        Err(io::Error::from_raw_os_error(errno))
    }
}

impl Disk for JournalDisk {
    fn write_synced(&self, path: &Path, content: &[u8]) -> io::Result<()> {
        self.check(path, true)?;
        RealDisk.write_synced(path, content)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.check(from, false)?;
        RealDisk.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.check(path, false)?;
        RealDisk.remove(path)
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        RealDisk.sync_directory(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        RealDisk.list(path)
    }

    fn read(&self, path: &Path, limit: u64) -> io::Result<Vec<u8>> {
        match self.failures().reads {
            Some(errno) => Err(io::Error::from_raw_os_error(errno)),
            None => RealDisk.read(path, limit),
        }
    }
}
