//! The files of the local caches, see `backend::CacheFiles`.
//!
//! ```text
//! ID/NN                        files of the mapping ID alone
//! bucket-HASH-LENGTH/NN        files of this length that mappings share
//! bucket-HASH-LENGTH/users/ID  an empty file for each of these mappings
//! cleat-trash-NUMBER           what is being deleted
//! ```
//!
//! Only the supervisor can open files there. A worker gets the descriptors, so it reaches no other cache: it can neither
//! read nor change what a worker has kept that it does not share a cache with. An error of the file system means that a
//! mapping has no cache. All functions block.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use cleat_backend::{CacheUse, MAX_CACHE_FILES};
use crossbeam_channel::{RecvTimeoutError, bounded};

use crate::cache_config::CacheConfig;

/// Begins the names of directories with a cache that mappings share.
const SHARED: &str = "bucket-";

/// The directory with the names of the mappings that share a cache.
const USERS: &str = "users";

/// Begins the names of directories that are being deleted.
const TRASH: &str = "cleat-trash-";

/// How long a call waits for the disk of the caches. A worker starts without a cache then.
const OPEN_TIMEOUT: Duration = Duration::from_secs(2);
/// The same for a removal, for which the event loop waits.
const REMOVE_TIMEOUT: Duration = Duration::from_millis(500);

/// The maximum number of threads that wait for a disk that hangs. Beyond that, there is no cache.
const MAX_STUCK: usize = 8;

/// The directory of the caches.
pub(super) struct CacheFiles {
    caches: Arc<Caches>,
    /// The threads whose callers have left.
    stuck: Arc<AtomicUsize>,
}

/// What the threads use.
struct Caches {
    config: CacheConfig,
    /// Held while a shared cache gets its first user, or loses its last one. The number of the next directory in the trash.
    trash: Mutex<u64>,
    /// The mappings that have ended, and whose files may be left.
    ended: Mutex<Vec<String>>,
}

/// The open files of a cache, and the maximum length of each in bytes.
#[derive(Debug, Default)]
pub(super) struct Opened {
    pub(super) files: Vec<OwnedFd>,
    pub(super) file_bytes: u64,
}

impl CacheFiles {
    pub(super) fn new(config: &CacheConfig) -> Self {
        let (config, trash, ended) = (config.clone(), Mutex::new(0), Mutex::default());
        let caches = Caches { config, trash, ended };
        Self { caches: Arc::new(caches), stuck: Arc::default() }
    }

    /// Opens the files of the cache of a mapping, or makes them. They take space when they are written. The mapping
    /// leaves every other cache. Without an answer of the disk in time, there is none.
    pub(super) fn open(&self, mapping_id: &str, cache: &CacheUse) -> Opened {
        if self.caches.config.directory.is_none() {
            return Opened::default();
        }
        let (id, cache) = (mapping_id.to_owned(), cache.clone());
        let opened = self.within(OPEN_TIMEOUT, move |caches| {
            caches.remove_ended();
            caches.open(&id, &cache)
        });
        opened.unwrap_or_else(|| {
            tracing::warn!(mapping_id, "the mapping has no cache: its disk does not answer");
            Opened::default()
        })
    }

    /// Removes the files of a mapping, and those of a shared cache with the last mapping that uses it. Workers that use
    /// them still can, until they end. Returns false if the disk does not answer in time: they are removed when it does, or
    /// by a later call.
    pub(super) fn remove(&self, mapping_id: &str) -> bool {
        if self.caches.config.directory.is_none() {
            return true;
        }
        self.caches.ended().push(mapping_id.to_owned());
        let is_done = self.within(REMOVE_TIMEOUT, Caches::remove_ended).is_some();
        if !is_done {
            tracing::warn!(mapping_id, "the cache is not removed: its disk does not answer");
        }
        is_done
    }

    /// Runs a call on a thread of its own. Returns `None` if it takes longer, or if too many threads wait already.
    fn within<T: Send + 'static>(
        &self,
        timeout: Duration,
        call: impl FnOnce(&Caches) -> T + Send + 'static,
    ) -> Option<T> {
        if self.stuck.load(Ordering::Relaxed) >= MAX_STUCK {
            return None;
        }
        let (caches, stuck) = (Arc::clone(&self.caches), Arc::clone(&self.stuck));
        // Without a buffer, a result is either received or known to be late.
        let (sender, receiver) = bounded(0);
        let work = move || {
            let result = call(&caches);
            if sender.send(result).is_err() {
                stuck.fetch_sub(1, Ordering::Relaxed);
            }
        };
        thread::Builder::new().name("cache-files".to_owned()).spawn(work).ok()?;
        match receiver.recv_timeout(timeout) {
            Ok(result) => Some(result),
            Err(RecvTimeoutError::Timeout) => {
                self.stuck.fetch_add(1, Ordering::Relaxed);
                None
            }
            Err(RecvTimeoutError::Disconnected) => None,
        }
    }
}

impl Caches {
    fn open(&self, mapping_id: &str, cache: &CacheUse) -> Opened {
        let Some(directory) = &self.config.directory else { return Opened::default() };
        let (name, bytes) = match cache {
            CacheUse::None => return Opened::default(),
            CacheUse::Own => (mapping_id.to_owned(), self.config.volume_bytes),
            CacheUse::Shared(by) => {
                (shared_name(by, self.config.bucket_bytes), self.config.bucket_bytes)
            }
        };
        let own = directory.join(&name);
        let opened = self.leave(directory, mapping_id, Some(&name), || {
            make(directory)?;
            make(&own)?;
            if name != mapping_id {
                make(&own.join(USERS))?;
                File::create(own.join(USERS).join(mapping_id))?;
            }
            Ok(())
        });
        opened.and_then(|()| open(&own, bytes)).unwrap_or_else(|error| {
            let directory = directory.display();
            tracing::warn!(mapping_id, %directory, %error, "the mapping has no cache");
            Opened::default()
        })
    }

    fn ended(&self) -> MutexGuard<'_, Vec<String>> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remove_ended(&self) {
        let Some(directory) = &self.config.directory else { return };
        let ended = std::mem::take(&mut *self.ended());
        for mapping_id in ended {
            let _ = self.leave(directory, &mapping_id, None, || Ok(()));
        }
    }

    /// Removes a mapping from all caches but `kept`, and then calls `next`. Caches that nobody uses are deleted
    /// afterwards, by another thread: they may have tens of gigabytes.
    fn leave(
        &self,
        directory: &Path,
        mapping_id: &str,
        kept: Option<&str>,
        next: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let mut trash = self.trash.lock().unwrap_or_else(PoisonError::into_inner);
        let mut unused = Vec::new();
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if kept == Some(name.as_str()) {
                continue;
            }
            let users = entry.path().join(USERS);
            let is_unused = name == mapping_id
                || is_shared(&name) && {
                    let _ = fs::remove_file(users.join(mapping_id));
                    is_gone(fs::remove_dir(&users))
                };
            let moved = directory.join(format!("{TRASH}{trash}"));
            // What a supervisor that was killed has left is deleted with it.
            if is_trash(&name) {
                unused.push(entry.path());
            } else if is_unused && fs::rename(entry.path(), &moved).is_ok() {
                *trash += 1;
                unused.push(moved);
            }
        }
        let result = next();
        drop(trash);
        if !unused.is_empty() {
            let delete = move || unused.iter().for_each(|path| drop(fs::remove_dir_all(path)));
            // Without a thread, the next call deletes it.
            let _ = thread::Builder::new().name("cache-trash".to_owned()).spawn(delete);
        }
        result
    }
}

/// Whether a directory is a shared cache. The administrator may have other directories beside the caches.
fn is_shared(name: &str) -> bool {
    let parts = name.strip_prefix(SHARED).and_then(|rest| rest.split_once('-'));
    parts.is_some_and(|(hash, bytes)| {
        hash.len() == 64 && hash.bytes().all(|byte| byte.is_ascii_hexdigit()) && is_number(bytes)
    })
}

fn is_trash(name: &str) -> bool {
    name.strip_prefix(TRASH).is_some_and(is_number)
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn is_gone(removed: io::Result<()>) -> bool {
    match removed {
        Ok(()) => true,
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

/// Opens the files of a cache of at most `bytes` bytes. A cache that had more space loses the ends of its files.
fn open(directory: &Path, bytes: u64) -> io::Result<Opened> {
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

/// Returns the name of the directory of a shared cache. No two texts have the same one. With another length, the extents
/// are elsewhere in the files.
fn shared_name(by: &str, bytes: u64) -> String {
    let hash = hmac_sha256::Hash::hash(by.as_bytes());
    let hex: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{SHARED}{hex}-{bytes}")
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
    fn other_directories_beside_the_caches_stay() {
        let directory = tempfile::tempdir().unwrap();
        let some = caches(directory.path());
        drop(some.open("a", &CacheUse::Shared("s3://one".to_owned())));
        let others = ["bucket-data", "bucket-1-2", "trash-1", "cleat-trash-a"];
        let path = |name: &&str| directory.path().join("cache").join(name);
        others.iter().for_each(|name| fs::create_dir(path(name)).unwrap());
        some.remove("a");
        some.remove("b");
        assert!(others.iter().all(|name| path(name).exists()));
        assert!(is_shared(&shared_name("s3://one", 1 << 30)) && is_trash(&format!("{TRASH}7")));
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
        assert_eq!(note(&later.open("d", &by("s3://one")), "of d"), "", "nobody used it");
        assert_eq!(note(&later.open("d", &by("s3://two")), ""), "of c");
        // It has left the other one, which nobody used.
        assert_eq!(note(&later.open("e", &by("s3://one")), ""), "");
    }

    #[test]
    fn what_a_killed_supervisor_has_left_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let some = caches(directory.path());
        let by = CacheUse::Shared("s3://one".to_owned());
        some.open("a", &by);
        let shared = directory.path().join("cache").join(shared_name("s3://one", 1 << 30));
        let trash = directory.path().join("cache/cleat-trash-7");
        fs::create_dir(&trash).unwrap();
        // Files of an earlier build, which gave each mapping its own ones.
        fs::create_dir(directory.path().join("cache/a")).unwrap();
        // It was killed after the first step of a removal.
        fs::remove_file(shared.join("users/a")).unwrap();
        some.remove("a");
        let is_empty = || fs::read_dir(directory.path().join("cache")).unwrap().next().is_none();
        for _ in 0..1000 {
            if is_empty() {
                return;
            }
            thread::yield_now();
            some.remove("x");
        }
        panic!("the caches are not removed");
    }

    #[test]
    fn a_disk_that_hangs_costs_a_bounded_number_of_threads_and_the_cache() {
        let directory = tempfile::tempdir().unwrap();
        let some = caches(directory.path());
        let names = || (0..MAX_STUCK + 4).map(|number| format!("a{number}"));
        names().for_each(|name| drop(some.open(&name, &CacheUse::Own)));
        let held = some.caches.trash.lock().unwrap();
        for (number, name) in names().enumerate() {
            some.caches.ended().push(name);
            assert!(some.within(Duration::from_millis(1), Caches::remove_ended).is_none());
            // A thread that begins late would also take the names of the next ones, which would then not hang.
            while number < MAX_STUCK && !some.caches.ended().is_empty() {
                thread::yield_now();
            }
        }
        assert_eq!(some.stuck.load(Ordering::Relaxed), MAX_STUCK);
        assert_eq!(some.open("a", &CacheUse::Own).files.len(), 0);
        drop(held);
        while some.stuck.load(Ordering::Relaxed) > 0 {
            thread::yield_now();
        }
        assert_eq!(some.open("a", &CacheUse::Own).files.len(), 64);
        let left = |name: &String| directory.path().join("cache").join(name).exists();
        assert!(!names().any(|name| left(&name)), "the later calls have removed them");
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
