//! The tail files of mappings: memory in which a worker keeps the writes that it has acknowledged and that are not in
//! the store yet, see `backend::OpenOptions`.
//!
//! They are files in the runtime directory, which is in memory (tmpfs). So they outlive the worker and the supervisor,
//! also if both are killed, and a restart of the node removes them. A file has a fixed length, and a page takes memory
//! from its first use on. A worker gets a descriptor; it cannot reach the path.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;

use nix::sys::statvfs::fstatvfs;

/// The ending of the names.
const SUFFIX: &str = ".tail";

/// The first bytes of a file, which every worker writes when it opens the volume.
const HEAD_BYTES: usize = 4096;

/// The directory of the tail files, named after their mappings.
pub(super) struct TailFiles(PathBuf);

impl TailFiles {
    pub(super) fn new(directory: PathBuf) -> Self {
        Self(directory)
    }

    /// Opens the tail file of a mapping, or makes it. Returns `None` for a length of 0, if all tail files together
    /// could take more than half of the file system, and if the file system is full: the worker then acknowledges only
    /// what is durable.
    ///
    /// # Errors
    /// Returns the error of the file system.
    pub(super) fn open(&self, mapping_id: &str, bytes: u64) -> io::Result<Option<OwnedFd>> {
        if bytes == 0 {
            return Ok(None);
        }
        let path = self.path(mapping_id);
        let mut options = OpenOptions::new();
        options.read(true).write(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        match options.open(&path) {
            Ok(file) => return Ok(Some(file.into())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        let file = options.create_new(true).open(&path)?;
        let made = self.is_affordable(&file, bytes).and_then(|is_affordable| {
            if is_affordable {
                reserve(&file, bytes)?;
            }
            Ok(is_affordable)
        });
        let reason = match made {
            Ok(true) => return Ok(Some(file.into())),
            Ok(false) => "the tail files would take more than half of it",
            Err(error) if error.kind() == io::ErrorKind::StorageFull => "it is full",
            Err(error) => {
                self.remove(mapping_id);
                return Err(error);
            }
        };
        self.remove(mapping_id);
        tracing::warn!(
            mapping_id,
            directory = %self.0.display(),
            reason,
            "no tail file in the runtime directory: writes to this volume are acknowledged when they are durable"
        );
        Ok(None)
    }

    /// Removes the tail file of a mapping.
    pub(super) fn remove(&self, mapping_id: &str) {
        let _ = std::fs::remove_file(self.path(mapping_id));
    }

    /// Whether the file system has room for one more file of this length in its half.
    fn is_affordable(&self, file: &File, bytes: u64) -> io::Result<bool> {
        let space = fstatvfs(file)?;
        let entries = std::fs::read_dir(&self.0)?.flatten();
        let tails = entries
            .filter(|entry| entry.file_name().to_str().is_some_and(|name| name.ends_with(SUFFIX)));
        // The new one is there already.
        let most = bytes.saturating_mul(tails.count() as u64);
        Ok(most <= space.blocks().saturating_mul(space.fragment_size()) / 2)
    }

    fn path(&self, mapping_id: &str) -> PathBuf {
        self.0.join(format!("{mapping_id}{SUFFIX}"))
    }
}

/// Gives a new file its length, and memory to its head, without which no worker could use it.
fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    file.write_all_at(&[0; HEAD_BYTES], 0)?;
    file.set_len(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_keeps_its_file_until_it_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let files = TailFiles::new(directory.path().to_owned());
        assert!(files.open("a", 0).unwrap().is_none());
        let open = || File::from(files.open("a", 1 << 20).unwrap().unwrap());
        let first = open();
        assert_eq!(first.metadata().unwrap().len(), 1 << 20);
        first.write_all_at(b"kept", 7).unwrap();
        let mut found = [0; 4];
        open().read_exact_at(&mut found, 7).unwrap();
        assert_eq!(&found, b"kept");
        files.remove("a");
        open().read_exact_at(&mut found, 7).unwrap();
        assert_eq!(found, [0; 4]);
        assert!(files.open("b", 1 << 60).unwrap().is_none(), "more than the file system has");
        assert!(!files.path("b").exists());
    }
}
