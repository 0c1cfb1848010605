//! The cache of extents in files, which the supervisor passes to the worker. Workers of several volumes may have the same
//! files.
//!
//! A file consists of [sets](set). The key of an extent says in which set it is, or in which other one: it is written to the
//! one to which less was written. So sets become full at about the same time, and each process finds what the others have
//! written, also before a restart.
//!
//! Each process [remembers](known) the blocks of extents that were verified. It need not read the table of a set, nor the rest
//! of an extent, for a part of it. Blocks that were read before are copied from a [window](cleat_sys::file_window) into the
//! files, which takes less than half of the time of a system call.
//!
//! Nothing is locked or synchronized, and nothing that a file says is trusted: the engine verifies what it gets from here.
//! If two processes write to a set at the same time, one of the extents can be lost or have wrong bytes; it is read from
//! the store then. The files may be truncated, damaged or removed at any moment, and their disk may be full.

mod known;
mod set;

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cleat_backend::{CacheFiles, MAX_CACHE_FILES};
use cleat_core::error::{Error, Result};
use cleat_object::cache::{Cache, Key, Step};
use cleat_object::store::Pending;
use cleat_object::store::pool::{Lane, Pool};
use cleat_sys::file_window::{FileWindow, PART_BYTES};
use rustix::io::ReadWriteFlags;

use crate::nonce;
use known::{BLOCK_BYTES, Known, Place};
use set::{Entry, SET_BYTES, Slot, TABLE_BYTES};

/// The data that waits to be written, in bytes. More is not kept.
const MAX_QUEUED_BYTES: usize = 8 << 20;

/// The threads that read what is not in the memory of the kernel.
const READERS: usize = 4;

// A set is mapped as a part.
const _: () = assert!(SET_BYTES == PART_BYTES as u64);

/// The sets in which an extent can be.
const CHOICES: [usize; 2] = [0, 1];

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
    known: Known,
    /// `None` if the kernel has longer pages, or if the process can have no more windows.
    window: Option<FileWindow>,
    queued_bytes: AtomicUsize,
}

/// Where a set is.
struct Set<'a> {
    file: &'a File,
    /// Its position in the file, in bytes.
    begin: u64,
    /// Its number among all sets of the cache.
    number: u64,
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
    /// What is read at once: an extent, or blocks of it.
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
        let [seed, _] = words(&nonce::random()?);
        let (known, queued_bytes) = (Known::new(seed)?, AtomicUsize::new(0));
        let window = FileWindow::new()
            .inspect_err(|error| tracing::info!("the cache is read with system calls: {error}"))
            .ok();
        let files = Arc::new(Files { files, sets, known, window, queued_bytes });
        let pool = Pool::start("cache", READERS, 1)
            .map_err(|error| Error::from_io("cannot start the threads of the cache", error))?;
        Ok(Self { files, pool })
    }
}

impl Cache for FileCache {
    fn get(&self, key: Key) -> Pending<'_, Option<Vec<u8>>> {
        let mut found = Vec::new();
        let taken = self.files.read_at_once(&key, &mut |_, bytes| {
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
        // An extent that is compressed or encrypted is needed as a whole, and known nevertheless.
        let known = with_memory(key.length as usize, |bytes| {
            self.files.copy_known(&key, 0, bytes).then(|| take(bytes))
        });
        if let Some(is_right) = known {
            return is_right;
        }
        let Files { known, .. } = &*self.files;
        let taken = self.files.read_at_once(&key, &mut |place, bytes| {
            let is_right = take(bytes);
            if is_right {
                known.add(hash(&key), place, bytes);
            }
            is_right
        });
        matches!(taken, AtOnce::Taken(true))
    }

    fn copy_verified(&self, key: Key, skip: u32, target: &mut [u8]) -> bool {
        self.files.copy_known(&key, skip as usize, target)
    }

    fn prepare(&self, key: Key, skip: u32, step: Step) {
        let Files { known, window, .. } = &*self.files;
        let (hash, number) = (hash(&key), skip as usize / BLOCK_BYTES);
        match step {
            Step::Place => known.prefetch(hash, number),
            Step::Bytes => {
                let (Some(window), Some(place)) = (window, known.place(hash, number)) else {
                    return;
                };
                let block = (number * BLOCK_BYTES) as u64;
                let set = self.files.set(hash, place.set);
                window.prefetch(set.number, set::position(place.block) + block);
            }
        }
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
    /// Gives an extent, with its place, to `take` if the kernel has it and the tables in memory.
    fn read_at_once(&self, key: &Key, take: &mut dyn FnMut(Place, &[u8]) -> bool) -> AtOnce {
        let mut is_absent = true;
        for set in CHOICES {
            let Set { file, begin, .. } = self.set(hash(key), set);
            let mut table = [0; TABLE_BYTES];
            match read_now(file, &mut table, begin) {
                // The file ends before the set.
                Ok(0) => continue,
                Ok(TABLE_BYTES) => {}
                _ => {
                    is_absent = false;
                    continue;
                }
            }
            let Some(entry) = set::find(&table, key) else { continue };
            let at = begin + entry.at();
            return with_memory(key.length as usize, |bytes| match read_now(file, bytes, at) {
                Ok(read) if read == bytes.len() => {
                    AtOnce::Taken(take(Place { set, block: entry.block() }, bytes))
                }
                _ => AtOnce::Unknown,
            });
        }
        if is_absent { AtOnce::Absent } else { AtOnce::Unknown }
    }

    /// Copies a part of an extent to `target`, if its blocks are known, and the kernel has them in memory.
    fn copy_known(&self, key: &Key, skip: usize, target: &mut [u8]) -> bool {
        let (hash, first, end) = (hash(key), skip / BLOCK_BYTES, skip + target.len());
        let Some(place) = self.known.place(hash, first) else { return false };
        let set = self.set(hash, place.set);
        let last = end.next_multiple_of(BLOCK_BYTES).min(key.length as usize);
        let blocks = first * BLOCK_BYTES..last;
        let at = set::position(place.block) + blocks.start as u64;
        let is_right = |bytes: &[u8]| self.known.has(hash, first, place, bytes);
        let read = |bytes: &mut [u8]| self.read_verified(&set, at, bytes, is_right);
        // An extent as a whole is read to its target, which may be the memory of the thread.
        if blocks == (skip..end) {
            return read(target);
        }
        with_memory(blocks.len(), |bytes| {
            let is_read = read(bytes);
            target.copy_from_slice(&bytes[skip - blocks.start..][..target.len()]);
            is_read
        })
    }

    /// Reads bytes of a set from `at` on, if the kernel has them in memory. Returns whether they are the right ones.
    fn read_verified(
        &self,
        set: &Set<'_>,
        at: u64,
        bytes: &mut [u8],
        is_right: impl Fn(&[u8]) -> bool,
    ) -> bool {
        let Set { file, begin, number } = *set;
        let window = self.window.as_ref();
        if window.is_some_and(|window| window.copy(number, at, bytes)) {
            return is_right(bytes);
        }
        if read_now(file, bytes, begin + at) != Ok(bytes.len()) || !is_right(bytes) {
            return false;
        }
        if let Some(window) = window {
            window.prove(number, file, begin, at, bytes.len());
        }
        true
    }

    fn read(&self, key: &Key) -> io::Result<Option<Vec<u8>>> {
        for set in CHOICES {
            let Set { file, begin, .. } = self.set(hash(key), set);
            if let Some(entry) = set::find(&table(file, begin)?, key) {
                return read_extent(file, begin, &entry, key).map(Some);
            }
        }
        Ok(None)
    }

    /// Writes an extent, and then its entry. Runs on one thread.
    fn write(&self, key: Key, bytes: &[u8]) -> io::Result<()> {
        let hash = hash(&key);
        let mut best: Option<(Slot, usize)> = None;
        for set in CHOICES {
            let Set { file, begin, .. } = self.set(hash, set);
            let table = table(file, begin)?;
            let Some(slot) = set::next(&table, key) else { return Ok(()) };
            if let Some(entry) = set::find(&table, &key) {
                // Another worker has written it meanwhile. If its bytes are damaged, they are replaced.
                if read_extent(file, begin, &entry, &key).is_ok_and(|found| found == bytes) {
                    return Ok(());
                }
                best = Some((slot, set));
                break;
            }
            if best.is_none_or(|(best, _)| slot.entry.number() < best.entry.number()) {
                best = Some((slot, set));
            }
        }
        let Some((slot, set)) = best else { return Ok(()) };
        let place = Place { set, block: slot.entry.block() };
        let Set { file, begin, number } = self.set(hash, set);
        file.write_all_at(bytes, begin + slot.entry.at())?;
        file.write_all_at(&slot.entry.encode(), begin + slot.entry_at)?;
        self.known.add(hash, place, bytes);
        // What was written is in the page cache.
        if let Some(window) = &self.window {
            window.prove(number, file, begin, slot.entry.at(), bytes.len());
        }
        Ok(())
    }

    /// Returns one of the two sets of an extent.
    fn set(&self, hash: u64, choice: usize) -> Set<'_> {
        let hash = if choice == 0 { hash } else { spread(hash) };
        let files = self.files.len() as u64;
        let (file, set) = (hash % files, hash / files % self.sets);
        let number = file * self.sets + set;
        let file = &self.files[usize::try_from(file).unwrap_or_default()];
        Set { file, begin: set * SET_BYTES, number }
    }
}

/// Reads an extent from the set that begins at `set`.
fn read_extent(file: &File, set: u64, entry: &Entry, key: &Key) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; key.length as usize];
    file.read_exact_at(&mut bytes, set + entry.at())?;
    Ok(bytes)
}

/// Calls `work` with memory of the thread.
fn with_memory<R>(length: usize, work: impl FnOnce(&mut [u8]) -> R) -> R {
    READ.with_borrow_mut(|buffer| {
        if buffer.len() < length {
            buffer.resize(length, 0);
        }
        work(&mut buffer[..length])
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
    let [low, high] = words(&key.volume.0);
    let place = u64::from(key.at) << 32 | u64::from(key.length);
    let words = [low, high, key.object.epoch, key.object.slot, place].into_iter();
    // The multiplication of FNV-1a carries nothing from the upper bits of a word to the lower ones.
    spread(words.fold(FNV_OFFSET, |hash, word| {
        let mixed = (hash ^ word).wrapping_mul(FNV_PRIME);
        mixed ^ (mixed >> 32)
    }))
}

fn words(bytes: &[u8; 16]) -> [u64; 2] {
    let (low, high) = bytes.split_at(8);
    [low, high].map(|half| half.try_into().map_or(0, u64::from_le_bytes))
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

    use super::set::ENTRY_BYTES;
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
        // The first extent is the length of one behind the beginning.
        let extent = u64::from(LENGTH);
        file.set_len(5 * extent).unwrap();
        assert_eq!(cache.kept(0..7), [0, 1, 2, 3]);
        // The entry of the second one is damaged.
        file.write_all_at(&[0xff], ENTRY_BYTES as u64 + 20).unwrap();
        assert_eq!(FileCache::open(&files).unwrap().kept(0..7), [0, 2, 3]);
        cache.fill(1..2);
        assert_eq!(cache.read(1), Some(bytes(1)));
        // Damaged bytes are replaced when the store was read.
        file.write_all_at(&[0xff], 3 * extent).unwrap();
        assert_ne!(cache.read(2), Some(bytes(2)));
        cache.fill(2..3);
        assert_eq!(cache.read(2), Some(bytes(2)));
        file.set_len(0).unwrap();
        assert_eq!(cache.read(2), None);
        cache.fill(2..3);
        assert_eq!(cache.read(2), Some(bytes(2)));
    }

    #[test]
    fn parts_of_extents_are_copied_when_this_process_has_verified_the_extent() {
        let directory = tempfile::tempdir().unwrap();
        let files = files(directory.path(), 1, 1);
        let (one, other) = (FileCache::open(&files).unwrap(), FileCache::open(&files).unwrap());
        let mut random = vec![0; LENGTH as usize];
        random.chunks_mut(8).zip(0_u64..).for_each(|(word, number)| {
            word.copy_from_slice(&spread(number).to_le_bytes());
        });
        let copied = |cache: &FileCache, range: std::ops::Range<usize>| {
            let mut target = vec![0; range.len()];
            let skip = u32::try_from(range.start).unwrap();
            let is_copied = cache.copy_verified(key(0), skip, &mut target);
            assert!(!is_copied || target == random[range], "other bytes");
            is_copied
        };
        let parts =
            [0..4096, 4096..12288, 61440..65536, 100..200, 4000..9000, 65000..65536, 0..65536];
        one.put(key(0), &random);
        one.settle();
        parts.iter().for_each(|part| assert!(copied(&one, part.clone()), "{part:?}"));
        assert!(!copied(&other, 0..4096));
        assert!(!other.get_at_once(key(0), &mut |_| false));
        assert!(!copied(&other, 0..4096), "it was not verified");
        assert!(other.get_at_once(key(0), &mut |bytes| bytes == random));
        parts.iter().for_each(|part| assert!(copied(&other, part.clone()), "{part:?}"));
        // An extent that is known needs no table.
        let file = File::options().write(true).open(directory.path().join("0")).unwrap();
        file.write_all_at(&[0; TABLE_BYTES], 0).unwrap();
        assert!(one.get_at_once(key(0), &mut |bytes| bytes == random));
        assert!(!FileCache::open(&files).unwrap().get_at_once(key(0), &mut |_| true));
        // One byte is damaged, which is in the second block.
        file.write_all_at(&[!random[5000]], u64::from(LENGTH) + 5000).unwrap();
        let is_damaged = |part: &std::ops::Range<usize>| part.start < 8192 && part.end > 4096;
        parts.iter().for_each(|part| assert_eq!(copied(&one, part.clone()), !is_damaged(part)));
        file.set_len(u64::from(LENGTH) + 4096).unwrap();
        assert_eq!([0..4096, 4096..8192].map(|part| copied(&one, part)), [true, false]);
        one.fill(1..8);
        assert!(!copied(&one, 0..4096), "other extents were written over it");
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
