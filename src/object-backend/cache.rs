//! The cache of extents in files, which the supervisor passes to the worker.
//!
//! The files are filled one after the other, and then again from the first one on. Each has a table of what is in it,
//! so the cache survives the process:
//!
//! ```text
//! 0       table: one entry of 64 bytes for each extent
//! 516096  extents, each at a multiple of 512 bytes
//! ```
//!
//! Nothing is synchronized, and nothing that a file says is trusted: the engine verifies what it gets from here. So the
//! files may be truncated, damaged or removed at any moment, and their disk may be full.

mod table;

use std::collections::HashMap;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, IoSliceMut};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cleat_backend::{CACHE_FILE_BYTES, MAX_CACHE_FILES};
use cleat_core::error::{Error, Result};
use cleat_object::cache::{Cache, Key};
use cleat_object::store::Pending;
use cleat_object::store::pool::{Lane, Pool};
use rustix::io::ReadWriteFlags;

use table::{BLOCK_BYTES, DATA_AT, ENTRIES, ENTRY_BYTES, Entry};

/// The data that waits to be written, in bytes. More is not kept.
const MAX_QUEUED_BYTES: usize = 8 << 20;

/// The threads that read what is not in the memory of the kernel.
const READERS: usize = 4;

/// The blocks of a file.
#[allow(clippy::cast_possible_truncation, reason = "a file has 65,536 blocks")]
const FILE_BLOCKS: u32 = (CACHE_FILE_BYTES / BLOCK_BYTES) as u32;

/// A cache.
pub(crate) struct FileCache {
    files: Arc<Files>,
    pool: Pool,
}

/// What the threads share.
struct Files {
    files: Vec<File>,
    state: Mutex<State>,
    queued_bytes: AtomicUsize,
}

struct State {
    /// The block of each extent, over all files, by a hash of its key: 17 bytes for each extent. A collision costs a
    /// read of the store.
    index: HashMap<u64, u32>,
    /// Where the next extent goes. `None` until the tables were read.
    head: Option<Head>,
}

/// The end of what is written.
#[derive(Debug, Clone, Copy)]
struct Head {
    file: usize,
    /// The round of the file: each time a file is begun, it gets a greater number.
    round: u64,
    /// The next entry of the table, and the next block of the file.
    entry: usize,
    block: u32,
}

impl FileCache {
    /// Opens a cache in files, which may have one already.
    ///
    /// # Errors
    /// Returns an error if the process has no descriptor left, or if no thread can be started.
    pub(crate) fn open(files: &[Arc<OwnedFd>]) -> Result<Self> {
        let files = files.iter().take(MAX_CACHE_FILES);
        let files: io::Result<Vec<File>> =
            files.map(|file| file.try_clone().map(File::from)).collect();
        let files = files.map_err(|error| Error::from_io("the files of the cache", error))?;
        let index = HashMap::with_capacity(files.len() * ENTRIES);
        let state = Mutex::new(State { index, head: None });
        let files = Arc::new(Files { files, state, queued_bytes: AtomicUsize::new(0) });
        let pool = Pool::start("cache", READERS, 1)
            .map_err(|error| Error::from_io("cannot start the threads of the cache", error))?;
        let loading = Arc::clone(&files);
        drop(pool.run(Lane::Change, move || loading.load()));
        Ok(Self { files, pool })
    }
}

impl Cache for FileCache {
    fn get(&self, key: Key) -> Pending<'_, Option<Vec<u8>>> {
        let Some(block) = self.files.lock().index.get(&hash(&key)).copied() else {
            return Box::pin(std::future::ready(None));
        };
        let length = key.length as usize;
        if let Some(bytes) = self.files.read_at_once(block, length) {
            return Box::pin(std::future::ready(Some(bytes)));
        }
        let files = Arc::clone(&self.files);
        self.pool.run(Lane::Read, move || files.read(block, length))
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
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads an extent if the kernel has it in memory.
    fn read_at_once(&self, block: u32, length: usize) -> Option<Vec<u8>> {
        let (file, offset) = self.place(block)?;
        let mut bytes = vec![0; length];
        let mut buffers = [IoSliceMut::new(&mut bytes)];
        let read = rustix::io::preadv2(file, &mut buffers, offset, ReadWriteFlags::NOWAIT);
        read.is_ok_and(|read| read == length).then_some(bytes)
    }

    fn read(&self, block: u32, length: usize) -> Option<Vec<u8>> {
        let (file, offset) = self.place(block)?;
        let mut bytes = vec![0; length];
        file.read_exact_at(&mut bytes, offset).ok()?;
        Some(bytes)
    }

    fn place(&self, block: u32) -> Option<(&File, u64)> {
        let file = self.files.get((block / FILE_BLOCKS) as usize)?;
        Some((file, u64::from(block % FILE_BLOCKS) * BLOCK_BYTES))
    }

    /// Reads the tables of all files. Runs on the thread that writes, before it writes anything.
    fn load(&self) {
        let tables = self.files.iter().map(table::read);
        let mut tables: Vec<(usize, Vec<Entry>)> = tables.enumerate().collect();
        tables.sort_by_key(|(_, entries)| entries.first().map_or(0, |entry| entry.round));
        let mut head = Head { file: 0, round: 1, entry: 0, block: first_block() };
        let mut index = Vec::new();
        for (file, entries) in tables {
            for (number, entry) in entries.iter().enumerate() {
                let block = block_of(file, entry.block);
                index.push((hash(&entry.key), block));
                let (round, entry_at) = (entry.round, number + 1);
                head = Head { file, round, entry: entry_at, block: entry.end() };
            }
        }
        let mut state = self.lock();
        state.index.extend(index);
        state.head = Some(head);
    }

    /// Writes an extent behind the last one. Runs on one thread.
    fn write(&self, key: Key, bytes: &[u8]) -> io::Result<()> {
        let Some(mut head) = self.lock().head else { return Ok(()) };
        let blocks = table::blocks(key.length);
        if blocks > FILE_BLOCKS - first_block() {
            return Ok(());
        }
        if head.entry == ENTRIES || head.block + blocks > FILE_BLOCKS {
            head.file = (head.file + 1) % self.files.len();
            (head.round, head.entry, head.block) = (head.round + 1, 0, first_block());
            self.forget(head.file);
            self.lock().head = Some(head);
        }
        let file = &self.files[head.file];
        let entry = Entry { round: head.round, key, block: head.block };
        file.write_all_at(bytes, u64::from(head.block) * BLOCK_BYTES)?;
        file.write_all_at(&entry.encode(), (head.entry * ENTRY_BYTES) as u64)?;
        (head.entry, head.block) = (head.entry + 1, entry.end());
        let mut state = self.lock();
        state.index.insert(hash(&key), block_of(head.file, entry.block));
        state.head = Some(head);
        Ok(())
    }

    /// Removes what a file has from the index, because the file is written again. What its table does not name any more
    /// leads to other bytes, which the engine refuses.
    fn forget(&self, file: usize) {
        let entries = table::read(&self.files[file]);
        let mut state = self.lock();
        for entry in entries {
            let hash = hash(&entry.key);
            if state.index.get(&hash).is_some_and(|block| (block / FILE_BLOCKS) as usize == file) {
                state.index.remove(&hash);
            }
        }
    }
}

/// The first block behind the table.
#[allow(clippy::cast_possible_truncation, reason = "a file has 65,536 blocks")]
const fn first_block() -> u32 {
    (DATA_AT / BLOCK_BYTES) as u32
}

/// A block of a file as a block over all files.
fn block_of(file: usize, block: u32) -> u32 {
    u32::try_from(file).unwrap_or(u32::MAX) * FILE_BLOCKS + block
}

fn hash(key: &Key) -> u64 {
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
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

    fn files(directory: &std::path::Path, count: usize) -> Vec<Arc<OwnedFd>> {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        let open = |number: usize| options.open(directory.join(number.to_string())).unwrap();
        (0..count).map(|number| Arc::new(open(number).into())).collect()
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
    }

    #[test]
    fn extents_survive_the_process_and_the_oldest_ones_are_overwritten() {
        let directory = tempfile::tempdir().unwrap();
        let files = files(directory.path(), 2);
        let cache = FileCache::open(&files).unwrap();
        assert_eq!(cache.read(0), None);
        cache.fill(0..700);
        assert_eq!(cache.read(0), Some(bytes(0)));
        assert_eq!(cache.read(699), Some(bytes(699)));
        drop(cache);
        // One file has 504 extents of 64 KiB.
        let cache = FileCache::open(&files).unwrap();
        cache.settle();
        assert_eq!(cache.read(0), Some(bytes(0)));
        assert_eq!(cache.read(699), Some(bytes(699)));
        cache.fill(700..1100);
        assert_eq!(
            (cache.read(0), cache.read(503)),
            (None, None),
            "the first file is written again"
        );
        for number in [504, 699, 700, 1099] {
            assert_eq!(cache.read(number), Some(bytes(number)), "{number}");
        }
        drop(cache);
        let cache = FileCache::open(&files).unwrap();
        cache.settle();
        for number in [504, 1007, 1008, 1099] {
            assert_eq!(cache.read(number), Some(bytes(number)), "{number}");
        }
        assert_eq!(cache.read(503), None);
        let lengths = std::fs::read_dir(directory.path()).unwrap();
        for file in lengths {
            assert!(file.unwrap().metadata().unwrap().len() <= CACHE_FILE_BYTES);
        }
    }

    #[test]
    fn files_may_lose_anything_at_any_moment() {
        let directory = tempfile::tempdir().unwrap();
        let files = files(directory.path(), 1);
        let cache = FileCache::open(&files).unwrap();
        cache.fill(0..20);
        let file = File::options().write(true).open(directory.path().join("0")).unwrap();
        file.set_len(DATA_AT + 10 * u64::from(LENGTH)).unwrap();
        assert_eq!((cache.read(5), cache.read(15)), (Some(bytes(5)), None));
        // An entry of the table is damaged: the ones behind it are lost with it.
        file.write_all_at(&[0xff], 3 * ENTRY_BYTES as u64 + 20).unwrap();
        let again = FileCache::open(&files).unwrap();
        again.settle();
        assert_eq!((again.read(2), again.read(3), again.read(5)), (Some(bytes(2)), None, None));
        again.fill(3..4);
        assert_eq!(again.read(3), Some(bytes(3)));
        file.set_len(0).unwrap();
        assert_eq!(again.read(2), None);
        let empty = FileCache::open(&files).unwrap();
        empty.settle();
        assert_eq!(empty.read(2), None);
        empty.fill(2..3);
        assert_eq!(empty.read(2), Some(bytes(2)));
    }

    #[test]
    fn a_disk_that_is_full_keeps_nothing() {
        let full = File::options().read(true).write(true).open("/dev/full").unwrap();
        let cache = FileCache::open(&[Arc::new(full.into())]).unwrap();
        cache.fill(0..3);
        assert_eq!(cache.read(0), None);
        assert_eq!(cache.files.queued_bytes.load(Ordering::Relaxed), 0);
    }
}
