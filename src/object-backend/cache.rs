//! The cache of extents in files, which the supervisor passes to the worker. Workers of several volumes may have the same
//! files.
//!
//! A file consists of [sets](set). The key of an extent says in which set it is, so each process finds what the
//! others have written, also before a restart.
//!
//! Each process remembers the places of extents that it has found, so that it need not read the table of a set again.
//!
//! Nothing is locked or synchronized, and nothing that a file says is trusted: the engine verifies what it gets from here.
//! If two processes write to a set at the same time, one of the extents can be lost or have wrong bytes; it is read from
//! the store then. The files may be truncated, damaged or removed at any moment, and their disk may be full.

mod places;
mod set;

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cleat_backend::{CacheFiles, MAX_CACHE_FILES};
use cleat_core::error::{Error, Result};
use cleat_object::cache::{Cache, Key};
use cleat_object::store::Pending;
use cleat_object::store::pool::{Lane, Pool};
use rustix::io::ReadWriteFlags;

use places::Places;
use set::{ENTRY_BYTES, SET_BYTES, TABLE_BYTES};

/// The data that waits to be written, in bytes. More is not kept.
const MAX_QUEUED_BYTES: usize = 8 << 20;

/// The threads that read what is not in the memory of the kernel.
const READERS: usize = 4;

/// A cache.
pub(crate) struct FileCache {
    files: Arc<Files>,
    pool: Pool,
}

/// What the threads share.
struct Files {
    files: Vec<File>,
    /// The sets of each file; not 0.
    sets: u64,
    places: Places,
    queued_bytes: AtomicUsize,
}

/// What can be said without waiting for the disk.
enum AtOnce {
    /// The bytes were taken, or refused.
    Taken(bool),
    /// The cache does not have the extent.
    Absent,
    /// The disk must be read.
    Unknown,
}

thread_local! {
    /// What is read at once: the copy of an entry, and an extent.
    static READ: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

impl FileCache {
    /// Opens a cache in files, which may have one already.
    ///
    /// # Errors
    /// Returns an error if the process has no descriptor left, or if no thread can be started.
    pub(crate) fn open(cache: &CacheFiles) -> Result<Self> {
        let files = cache.files.iter().take(MAX_CACHE_FILES);
        let files: io::Result<Vec<File>> =
            files.map(|file| file.try_clone().map(File::from)).collect();
        let files = files.map_err(|error| Error::from_io("the files of the cache", error))?;
        let sets = (cache.file_bytes / SET_BYTES).max(1);
        let (places, queued_bytes) = (Places::new(), AtomicUsize::new(0));
        let files = Arc::new(Files { files, sets, places, queued_bytes });
        let pool = Pool::start("cache", READERS, 1)
            .map_err(|error| Error::from_io("cannot start the threads of the cache", error))?;
        Ok(Self { files, pool })
    }
}

impl Cache for FileCache {
    fn get(&self, key: Key) -> Pending<'_, Option<Vec<u8>>> {
        let mut found = Vec::new();
        let taken = self.files.read_at_once(&key, &mut |bytes| {
            found = bytes.to_vec();
            true
        });
        match taken {
            AtOnce::Taken(_) => return Box::pin(std::future::ready(Some(found))),
            AtOnce::Absent => return Box::pin(std::future::ready(None)),
            AtOnce::Unknown => {}
        }
        let files = Arc::clone(&self.files);
        self.pool.run(Lane::Read, move || files.read(&key).ok().flatten())
    }

    fn get_at_once(&self, key: Key, take: &mut dyn FnMut(&[u8]) -> bool) -> bool {
        matches!(self.files.read_at_once(&key, take), AtOnce::Taken(true))
    }

    fn copy_at_once(&self, key: Key, target: &mut [u8]) -> bool {
        self.files.copy_known(&key, target)
            || self.get_at_once(key, &mut |bytes| {
                target.copy_from_slice(bytes);
                true
            })
    }

    fn put(&self, key: Key, bytes: &[u8]) {
        let queued = &self.files.queued_bytes;
        if queued.load(Ordering::Relaxed) + bytes.len() > MAX_QUEUED_BYTES {
            return;
        }
        queued.fetch_add(bytes.len(), Ordering::Relaxed);
        let (files, bytes) = (Arc::clone(&self.files), bytes.to_vec());
        drop(self.pool.run(Lane::Change, move || {
            // The disk may be full. The extent is not in the cache then.
            let _ = files.write(key, &bytes);
            files.queued_bytes.fetch_sub(bytes.len(), Ordering::Relaxed);
        }));
    }
}

impl Files {
    /// Gives an extent to `take` if the kernel has it in memory.
    fn read_at_once(&self, key: &Key, take: &mut dyn FnMut(&[u8]) -> bool) -> AtOnce {
        let hash = hash(key);
        let (file, begin) = self.set_of(hash);
        if let Some(block) = self.places.get(hash)
            && let AtOnce::Taken(taken) = read_copied(file, begin, (block, key), take)
        {
            return AtOnce::Taken(taken);
        }
        let mut table = [0; TABLE_BYTES];
        match read_now(file, &mut table, begin) {
            // The file ends before the set.
            Ok(0) => return AtOnce::Absent,
            Ok(TABLE_BYTES) => {}
            _ => return AtOnce::Unknown,
        }
        let Some(entry) = set::find(&table, key) else { return AtOnce::Absent };
        let found = read_copied(file, begin, (entry.block(), key), take);
        if matches!(found, AtOnce::Taken(true)) {
            self.places.set(hash, entry.block());
        }
        found
    }

    /// Copies an extent whose place is known to `target`, if the kernel has it in memory.
    fn copy_known(&self, key: &Key, target: &mut [u8]) -> bool {
        let hash = hash(key);
        let Some(block) = self.places.get(hash) else { return false };
        let (file, begin) = self.set_of(hash);
        let (mut copy, length) = ([0; ENTRY_BYTES], ENTRY_BYTES + target.len());
        let mut buffers = [IoSliceMut::new(&mut copy), IoSliceMut::new(target)];
        let at = begin + set::position(block);
        let read = rustix::io::preadv2(file, &mut buffers, at, ReadWriteFlags::NOWAIT);
        read == Ok(length) && set::is_copy(&copy, block, key)
    }

    fn read(&self, key: &Key) -> io::Result<Option<Vec<u8>>> {
        let (file, begin) = self.set_of(hash(key));
        let table = table(file, begin)?;
        let Some(entry) = set::find(&table, key) else { return Ok(None) };
        let mut bytes = vec![0; key.length as usize];
        file.read_exact_at(&mut bytes, begin + entry.at() + ENTRY_BYTES as u64)?;
        Ok(Some(bytes))
    }

    /// Writes an extent, and then its entry. Runs on one thread.
    fn write(&self, key: Key, bytes: &[u8]) -> io::Result<()> {
        // Another worker has written it meanwhile. If its bytes are damaged, they are replaced.
        if self.read(&key).is_ok_and(|found| found.as_deref() == Some(bytes)) {
            return Ok(());
        }
        let hash = hash(&key);
        let (file, begin) = self.set_of(hash);
        let Some(slot) = set::next(&table(file, begin)?, key) else { return Ok(()) };
        let entry = slot.entry.encode();
        file.write_all_at(&[&entry, bytes].concat(), begin + slot.entry.at())?;
        file.write_all_at(&entry, begin + slot.entry_at)?;
        self.places.set(hash, slot.entry.block());
        Ok(())
    }

    /// Returns the file with the set of an extent, and the position of the set in it.
    fn set_of(&self, hash: u64) -> (&File, u64) {
        let files = self.files.len() as u64;
        let file = usize::try_from(hash % files).unwrap_or_default();
        (&self.files[file], hash / files % self.sets * SET_BYTES)
    }
}

/// Gives the extent behind a block to `take` if it is that of the key, and the kernel has it in memory.
fn read_copied(
    file: &File,
    set: u64,
    (block, key): (u32, &Key),
    take: &mut dyn FnMut(&[u8]) -> bool,
) -> AtOnce {
    READ.with_borrow_mut(|buffer| {
        let length = ENTRY_BYTES + key.length as usize;
        if buffer.len() < length {
            buffer.resize(length, 0);
        }
        let bytes = &mut buffer[..length];
        match read_now(file, bytes, set + set::position(block)) {
            Ok(read) if read == length && set::is_copy(&bytes[..ENTRY_BYTES], block, key) => {
                AtOnce::Taken(take(&bytes[ENTRY_BYTES..]))
            }
            _ => AtOnce::Unknown,
        }
    })
}

/// Reads what the kernel has in memory.
fn read_now(file: &File, buffer: &mut [u8], at: u64) -> rustix::io::Result<usize> {
    rustix::io::preadv2(file, &mut [IoSliceMut::new(buffer)], at, ReadWriteFlags::NOWAIT)
}

/// Reads a table. What is behind the end of the file is zero.
fn table(file: &File, begin: u64) -> io::Result<[u8; TABLE_BYTES]> {
    let mut table = [0; TABLE_BYTES];
    let mut length = 0;
    while length < TABLE_BYTES {
        match file.read_at(&mut table[length..], begin + length as u64)? {
            0 => break,
            read => length += read,
        }
    }
    Ok(table)
}

fn hash(key: &Key) -> u64 {
    let volume = u128::from_le_bytes(key.volume.0);
    let halves = [volume & u128::from(u64::MAX), volume >> 64];
    let [low, high] = halves.map(|half| u64::try_from(half).unwrap_or(0));
    let place = u64::from(key.at) << 32 | u64::from(key.length);
    let words = [low, high, key.object.epoch, key.object.slot, place].into_iter();
    // The multiplication of FNV-1a carries nothing from the upper bits of a word to the lower ones.
    spread(words.fold(FNV_OFFSET, |hash, word| {
        let mixed = (hash ^ word).wrapping_mul(FNV_PRIME);
        mixed ^ (mixed >> 32)
    }))
}

/// Returns a number that is the same in every build, because a cache outlives them (FNV-1a).
pub(crate) fn hash_of(bytes: impl Iterator<Item = u8>) -> u64 {
    spread(bytes.fold(FNV_OFFSET, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(FNV_PRIME)))
}

const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x0100_0000_01b3;

/// The last step of SplitMix64, which spreads the bits.
fn spread(mixed: u64) -> u64 {
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::fs::MetadataExt;
    use std::path::Path;
    use std::time::Duration;

    use cleat_object::name::{Position, VolumeId};

    use super::*;
    use crate::executor::block_until;
    use crate::timeouts::after;

    const LENGTH: u32 = 64 << 10;

    fn key(number: u64) -> Key {
        let object = Position { epoch: 1, slot: number };
        Key { volume: VolumeId([3; 16]), object, at: 100, length: LENGTH }
    }

    fn bytes(number: u64) -> Vec<u8> {
        number.to_le_bytes().repeat(LENGTH as usize / 8)
    }

    fn files(directory: &Path, count: usize, sets: u64) -> CacheFiles {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        let open = |number: usize| options.open(directory.join(number.to_string())).unwrap();
        let files = (0..count).map(|number| Arc::new(OwnedFd::from(open(number)))).collect();
        CacheFiles { files, file_bytes: sets * SET_BYTES }
    }

    impl FileCache {
        /// Waits until everything that was offered is written.
        fn settle(&self) {
            block_until(after(Duration::from_secs(10)), self.pool.run(Lane::Change, || ()))
                .unwrap();
        }

        fn read(&self, number: u64) -> Option<Vec<u8>> {
            block_until(after(Duration::from_secs(10)), self.get(key(number))).unwrap()
        }

        fn fill(&self, numbers: std::ops::Range<u64>) {
            for number in numbers {
                self.put(key(number), &bytes(number));
                self.settle();
            }
        }

        /// Which of `numbers` it has. They must have their bytes.
        fn kept(&self, numbers: std::ops::Range<u64>) -> Vec<u64> {
            let has = |number: &u64| {
                let found = self.read(*number);
                assert!(found.is_none() || found == Some(bytes(*number)), "{number}");
                found.is_some()
            };
            numbers.filter(has).collect()
        }
    }

    #[test]
    fn extents_survive_the_process_and_other_processes_find_them() {
        let directory = tempfile::tempdir().unwrap();
        let files = files(directory.path(), 4, 16);
        let (one, other) = (FileCache::open(&files).unwrap(), FileCache::open(&files).unwrap());
        assert_eq!(other.read(0), None);
        one.fill(0..50);
        assert_eq!(other.kept(0..50).len(), 50);
        let space = || std::fs::metadata(directory.path().join("0")).unwrap().blocks();
        let before = space();
        other.fill(0..50);
        assert_eq!(space(), before, "what is there is not written again");
        other.fill(50..100);
        assert_eq!(one.kept(0..100).len(), 100);
        drop((one, other));
        assert_eq!(FileCache::open(&files).unwrap().kept(0..100).len(), 100);
    }

    #[test]
    fn the_oldest_extents_are_overwritten_and_the_files_keep_their_length() {
        let directory = tempfile::tempdir().unwrap();
        let cache = FileCache::open(&files(directory.path(), 2, 2)).unwrap();
        cache.fill(0..1000);
        // Seven fit in each of the four sets.
        assert_eq!(cache.kept(0..1000).len(), 28);
        assert!(cache.kept(0..900).is_empty());
        for file in std::fs::read_dir(directory.path()).unwrap() {
            assert!(file.unwrap().metadata().unwrap().len() <= 2 * SET_BYTES);
        }
    }

    #[test]
    fn several_processes_write_to_one_set_at_the_same_time() {
        let directory = tempfile::tempdir().unwrap();
        let files = files(directory.path(), 1, 1);
        std::thread::scope(|scope| {
            for first in [0, 1000, 2000] {
                let cache = FileCache::open(&files).unwrap();
                scope.spawn(move || {
                    for number in first..first + 300 {
                        cache.put(key(number), &bytes(number));
                        cache.read(number);
                    }
                    cache.settle();
                });
            }
        });
        let cache = FileCache::open(&files).unwrap();
        cache.fill(5000..5007);
        assert_eq!(cache.kept(5000..5007).len(), 7);
    }

    #[test]
    fn files_may_lose_anything_at_any_moment() {
        let directory = tempfile::tempdir().unwrap();
        let files = files(directory.path(), 1, 1);
        let cache = FileCache::open(&files).unwrap();
        cache.fill(0..7);
        let file = File::options().write(true).open(directory.path().join("0")).unwrap();
        let (table, entry) = (TABLE_BYTES as u64, ENTRY_BYTES as u64);
        let extent = entry + u64::from(LENGTH);
        file.set_len(table + 4 * extent).unwrap();
        assert_eq!(cache.kept(0..7), [0, 1, 2, 3]);
        // The entry of the second one is damaged.
        file.write_all_at(&[0xff], entry + 20).unwrap();
        assert_eq!(FileCache::open(&files).unwrap().kept(0..7), [0, 2, 3]);
        cache.fill(1..2);
        assert_eq!(cache.read(1), Some(bytes(1)));
        // Damaged bytes are replaced when the store was read.
        file.write_all_at(&[0xff], table + 2 * extent + entry).unwrap();
        assert_ne!(cache.read(2), Some(bytes(2)));
        cache.fill(2..3);
        assert_eq!(cache.read(2), Some(bytes(2)));
        file.set_len(0).unwrap();
        assert_eq!(cache.read(2), None);
        cache.fill(2..3);
        assert_eq!(cache.read(2), Some(bytes(2)));
    }

    #[test]
    fn a_disk_that_is_full_keeps_nothing() {
        let full = File::options().read(true).write(true).open("/dev/full").unwrap();
        let files = CacheFiles { files: vec![Arc::new(full.into())], file_bytes: SET_BYTES };
        let cache = FileCache::open(&files).unwrap();
        cache.fill(0..3);
        assert_eq!(cache.read(0), None);
        assert_eq!(cache.files.queued_bytes.load(Ordering::Relaxed), 0);
    }
}
