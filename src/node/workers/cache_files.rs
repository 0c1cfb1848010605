//! The files of the local caches, see `backend::CacheFiles`.
//!
//! ```text
//! ID/NN            files of the mapping ID alone
//! bucket-HASH/NN   files that mappings share
//! bucket-HASH/users/ID   an empty file for each of these mappings
//! ```
//!
//! Only the supervisor can open files there. A worker gets the descriptors, so it reaches no other cache: it can neither
//! read nor change what a worker has kept that it does not share a cache with. An error of the file system means that a
//! mapping has no cache.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use cleat_backend::{CacheUse, MAX_CACHE_FILES};

use crate::cache_config::CacheConfig;

/// Begins the names of directories with a cache that mappings share.
const SHARED: &str = "bucket-";

/// The directory with the names of the mappings that share a cache.
const USERS: &str = "users";

/// The directory of the caches.
pub(super) struct CacheFiles {
    config: CacheConfig,
    /// Held while a shared cache gets its first user, or loses its last one.
    users: Mutex<()>,
}

/// The open files of a cache, and the maximum length of each in bytes.
#[derive(Debug, Default)]
pub(super) struct Opened {
    pub(super) files: Vec<OwnedFd>,
    pub(super) file_bytes: u64,
}

impl CacheFiles {
    pub(super) fn new(config: &CacheConfig) -> Self {
        Self { config: config.clone(), users: Mutex::new(()) }
    }

    /// Opens the files of the cache of a mapping, or makes them. They take space when they are written.
    pub(super) fn open(&self, mapping_id: &str, cache: &CacheUse) -> Opened {
        let Some(directory) = &self.config.directory else { return Opened::default() };
        let _held = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        let opened = make(directory).and_then(|()| match cache {
            CacheUse::None => Ok(Opened::default()),
            CacheUse::Own => open(&directory.join(mapping_id), self.config.volume_bytes),
            CacheUse::Shared(by) => {
                let shared = directory.join(shared_name(by));
                let opened = open(&shared, self.config.bucket_bytes)?;
                make(&shared.join(USERS))?;
                File::create(shared.join(USERS).join(mapping_id))?;
                Ok(opened)
            }
        });
        opened.unwrap_or_else(|error| {
            let directory = directory.display();
            tracing::warn!(mapping_id, %directory, %error, "the mapping has no cache");
            Opened::default()
        })
    }

    /// Removes the files of a mapping, and those of a shared cache with the last mapping that uses it. Workers that use
    /// them still can, until they end.
    pub(super) fn remove(&self, mapping_id: &str) {
        let Some(directory) = &self.config.directory else { return };
        let _held = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = fs::remove_dir_all(directory.join(mapping_id));
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let users = entry.path().join(USERS);
            let is_shared = entry.file_name().to_string_lossy().starts_with(SHARED);
            if is_shared
                && fs::remove_file(users.join(mapping_id)).is_ok()
                && fs::remove_dir(&users).is_ok()
            {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
    }
}

/// Opens the files of a cache of at most `bytes` bytes. A cache that had more space loses the ends of its files.
fn open(directory: &Path, bytes: u64) -> io::Result<Opened> {
    make(directory)?;
    let file_bytes = bytes / MAX_CACHE_FILES as u64;
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    let open = |number| {
        let file = options.open(file(directory, number))?;
        if file.metadata()?.len() > file_bytes {
            file.set_len(file_bytes)?;
        }
        Ok(OwnedFd::from(file))
    };
    let files = (0..MAX_CACHE_FILES).map(open).collect::<io::Result<_>>()?;
    Ok(Opened { files, file_bytes })
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

/// Returns the name of the directory of a shared cache. No two texts have the same one.
fn shared_name(by: &str) -> String {
    let hash = hmac_sha256::Hash::hash(by.as_bytes());
    let hex: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{SHARED}{hex}")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, PermissionsExt};

    use super::*;

    fn caches(directory: &Path) -> CacheFiles {
        let directory = Some(directory.join("cache"));
        CacheFiles::new(&CacheConfig { directory, volume_bytes: 64 << 20, bucket_bytes: 1 << 30 })
    }

    /// Writes to the second file of a cache, and returns what is in it.
    fn note(opened: &Opened, text: &str) -> String {
        let file = File::from(opened.files[1].try_clone().unwrap());
        let mut before = vec![0; 100];
        let length = file.read_at(&mut before, 0).unwrap();
        file.write_all_at(text.as_bytes(), 0).unwrap();
        String::from_utf8(before[..length].to_vec()).unwrap()
    }

    #[test]
    fn a_mapping_has_files_of_its_own_that_keep_their_content() {
        let directory = tempfile::tempdir().unwrap();
        let some = caches(directory.path());
        let opened = some.open("a", &CacheUse::Own);
        assert_eq!((opened.files.len(), opened.file_bytes), (64, 1 << 20));
        assert_eq!(note(&opened, "kept"), "");
        assert_eq!(note(&some.open("b", &CacheUse::Own), "b"), "");
        assert_eq!(some.open("c", &CacheUse::None).files.len(), 0);
        let own = directory.path().join("cache/a");
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&own), mode(&own.join("00"))), (0o700, 0o600));
        assert_eq!(note(&caches(directory.path()).open("a", &CacheUse::Own), "a"), "kept");
        // What was longer becomes shorter.
        fs::write(own.join("02"), vec![0; 2 << 20]).unwrap();
        some.open("a", &CacheUse::Own);
        assert_eq!(fs::metadata(own.join("02")).unwrap().len(), 1 << 20);
        some.remove("a");
        assert!(!own.exists() && directory.path().join("cache/b").exists());
    }

    #[test]
    fn mappings_share_a_cache_until_the_last_of_them_ends() {
        let directory = tempfile::tempdir().unwrap();
        let some = caches(directory.path());
        let by = |text: &str| CacheUse::Shared(text.to_owned());
        let opened = some.open("a", &by("s3://one"));
        assert_eq!((opened.files.len(), opened.file_bytes), (64, 16 << 20));
        note(&opened, "of a");
        assert_eq!(note(&some.open("b", &by("s3://one")), "of b"), "of a");
        assert_eq!(note(&some.open("c", &by("s3://two")), "of c"), "");
        some.remove("a");
        // The names of the users outlive the supervisor.
        let later = caches(directory.path());
        assert_eq!(note(&later.open("b", &by("s3://one")), "again"), "of b");
        later.remove("x");
        later.remove("b");
        assert_eq!(note(&later.open("d", &by("s3://one")), ""), "", "nobody used it");
        assert_eq!(note(&later.open("d", &by("s3://two")), ""), "of c");
    }

    #[test]
    fn without_a_directory_or_with_one_that_cannot_be_used_there_is_no_cache() {
        let none = CacheFiles::new(&CacheConfig::default());
        assert_eq!(none.open("a", &CacheUse::Own).files.len(), 0);
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("cache"), b"a file").unwrap();
        let caches = caches(directory.path());
        assert_eq!(caches.open("a", &CacheUse::Own).files.len(), 0);
        assert_eq!(caches.open("a", &CacheUse::Shared("s3://b".to_owned())).files.len(), 0);
        caches.remove("a");
    }
}
