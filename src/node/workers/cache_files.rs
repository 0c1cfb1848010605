//! The files of the local caches of mappings, see `backend::OpenOptions`.
//!
//! Each mapping has a directory of its own, in which only the supervisor can open files. A worker gets the descriptors,
//! so it reaches no other cache: it can neither read nor change what the worker of another volume has kept. An error of
//! the file system means that a mapping has a smaller cache, or none.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::cache_config::CacheConfig;

/// The directory of the caches.
pub(super) struct CacheFiles {
    /// `None`: there are no caches.
    directory: Option<PathBuf>,
    /// The number of files of one cache.
    files: usize,
}

impl CacheFiles {
    pub(super) fn new(config: &CacheConfig) -> Self {
        Self { directory: config.directory.clone(), files: config.files() }
    }

    /// Opens the files of a mapping, at most `most` of them, or makes them. They take space when they are written.
    pub(super) fn open(&self, mapping_id: &str, most: usize) -> Vec<OwnedFd> {
        let Some(directory) = self.directory.as_ref().filter(|_| most > 0) else {
            return Vec::new();
        };
        let own = directory.join(mapping_id);
        let opened = make(directory).and_then(|()| make(&own)).and_then(|()| {
            for number in self.files.. {
                // What is left of a larger cache.
                if fs::remove_file(file(&own, number)).is_err() {
                    break;
                }
            }
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
            let open = |number| options.open(file(&own, number)).map(OwnedFd::from);
            (0..self.files.min(most)).map(open).collect::<io::Result<Vec<OwnedFd>>>()
        });
        opened.unwrap_or_else(|error| {
            let directory = own.display();
            tracing::warn!(mapping_id, %directory, %error, "the mapping has no cache");
            Vec::new()
        })
    }

    /// Removes the files of a mapping. Workers that use them still can, until they end.
    pub(super) fn remove(&self, mapping_id: &str) {
        if let Some(directory) = &self.directory {
            let _ = fs::remove_dir_all(directory.join(mapping_id));
        }
    }
}

fn make(directory: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

fn file(directory: &Path, number: usize) -> PathBuf {
    directory.join(format!("{number:02}"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use cleat_backend::CACHE_FILE_BYTES;

    use super::*;

    fn caches(directory: &Path, files: u64) -> CacheFiles {
        let directory = Some(directory.join("cache"));
        CacheFiles::new(&CacheConfig { directory, volume_bytes: files * CACHE_FILE_BYTES })
    }

    #[test]
    fn each_mapping_has_files_of_its_own_that_keep_their_content() {
        let directory = tempfile::tempdir().unwrap();
        let some = caches(directory.path(), 3);
        assert_eq!(some.open("a", 64).len(), 3);
        assert_eq!(some.open("b", 2).len(), 2);
        assert_eq!(some.open("c", 0).len(), 0);
        let own = directory.path().join("cache/a");
        assert_eq!(fs::metadata(&own).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(fs::metadata(own.join("00")).unwrap().permissions().mode() & 0o777, 0o600);
        fs::write(own.join("01"), b"kept").unwrap();
        // A smaller cache leaves no files behind.
        assert_eq!(caches(directory.path(), 2).open("a", 64).len(), 2);
        assert_eq!(fs::read_dir(&own).unwrap().count(), 2);
        assert_eq!(fs::read(own.join("01")).unwrap(), b"kept");
        some.remove("a");
        assert!(!own.exists() && directory.path().join("cache/b").exists());
    }

    #[test]
    fn without_a_directory_or_with_one_that_cannot_be_used_there_is_no_cache() {
        assert_eq!(CacheFiles::new(&CacheConfig::default()).open("a", 64).len(), 0);
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("cache"), b"a file").unwrap();
        let caches = caches(directory.path(), 3);
        assert_eq!(caches.open("a", 64).len(), 0);
        caches.remove("a");
    }
}
