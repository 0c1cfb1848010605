//! The file operations of the journal. Tests replace them by a disk that fails, or that loses what was not
//! synced.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The file operations that the journal needs. All of them block, and all of them return the error of the
/// file system.
pub trait Disk: std::fmt::Debug + Send + Sync {
    /// Writes a file of mode 0600, or replaces its content, and waits until the disk has the content. The
    /// entry in the directory is durable only after [`Disk::sync_directory`].
    fn write_synced(&self, path: &Path, content: &[u8]) -> io::Result<()>;

    /// Renames a file and replaces the one at `to`.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Waits until the disk has the entries of a directory.
    fn sync_directory(&self, path: &Path) -> io::Result<()>;

    /// Returns the paths of all files in a directory.
    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>>;

    /// Reads the first `limit` bytes of a file.
    fn read(&self, path: &Path, limit: u64) -> io::Result<Vec<u8>>;
}

/// The file system of the machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct RealDisk;

impl Disk for RealDisk {
    fn write_synced(&self, path: &Path, content: &[u8]) -> io::Result<()> {
        let mut options = File::options();
        let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(path)?;
        file.write_all(content)?;
        file.sync_all()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        fs::read_dir(path)?.map(|entry| entry.map(|entry| entry.path())).collect()
    }

    fn read(&self, path: &Path, limit: u64) -> io::Result<Vec<u8>> {
        let mut content = Vec::new();
        File::open(path)?.take(limit).read_to_end(&mut content)?;
        Ok(content)
    }
}
