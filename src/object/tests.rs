//! Tests of the volume on a store in memory that always works, and on a directory.

use std::collections::BTreeMap;
use std::future::{Future, ready};
use std::ops::{Bound, Range};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use crate::codec::{Description, MAX_OWNER_BYTES};
use crate::name::{Name, Nonce, Position, VolumeId};
use crate::rules::{Rule, without};
use crate::store::directory::Directory;
use crate::store::{Pending, Store, StoreError};
use crate::volume::{Config, Failure, Newest, Place, Volume, race};

/// A store in memory that counts its operations.
#[derive(Default)]
pub(crate) struct Memory {
    pub(crate) objects: Mutex<BTreeMap<String, Vec<u8>>>,
    operations: AtomicU64,
    put_bytes: AtomicU64,
    log_puts: AtomicU64,
    log_reads: AtomicU64,
    failing_deletions: AtomicU64,
}

impl Memory {
    pub(crate) fn count(&self) -> u64 {
        self.operations.load(Ordering::Relaxed)
    }

    /// The bytes of all objects that were ever created.
    pub(crate) fn put_bytes(&self) -> u64 {
        self.put_bytes.load(Ordering::Relaxed)
    }

    /// The log objects in the store.
    pub(crate) fn log_objects(&self) -> usize {
        self.names("log/").len()
    }

    /// The names of the objects in the store that begin with `prefix`.
    pub(crate) fn names(&self, prefix: &str) -> Vec<String> {
        let objects = self.objects.lock().unwrap();
        objects.keys().filter(|name| name.starts_with(prefix)).cloned().collect()
    }

    /// Lets the next `count` deletions of tokens and pins fail.
    pub(crate) fn fail_deletions(&self, count: u64) {
        self.failing_deletions.store(count, Ordering::Relaxed);
    }

    pub(crate) fn log_reads(&self) -> u64 {
        self.log_reads.load(Ordering::Relaxed)
    }

    fn start(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Vec<u8>>> {
        self.operations.fetch_add(1, Ordering::Relaxed);
        self.objects.lock().unwrap()
    }
}

impl Store for Memory {
    fn create<'a>(&'a self, name: &'a str, bytes: &'a [u8]) -> Pending<'a, Result<(), StoreError>> {
        let mut objects = self.start();
        if objects.contains_key(name) {
            return Box::pin(ready(Err(StoreError::Exists)));
        }
        self.put_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        let is_log = name.starts_with("log/");
        self.log_puts.fetch_add(is_log.into(), Ordering::Relaxed);
        objects.insert(name.to_owned(), bytes.to_owned());
        Box::pin(ready(Ok(())))
    }

    fn read<'a>(
        &'a self,
        name: &'a str,
        range: Range<u64>,
    ) -> Pending<'a, Result<Vec<u8>, StoreError>> {
        self.log_reads.fetch_add(name.starts_with("log/").into(), Ordering::Relaxed);
        let found = self.start().get(name).map(|bytes| {
            let [begin, end] =
                [range.start, range.end].map(|at| usize::try_from(at).unwrap().min(bytes.len()));
            bytes[begin..end].to_vec()
        });
        Box::pin(ready(found.ok_or(StoreError::NotFound)))
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: &'a str,
    ) -> Pending<'a, Result<Vec<String>, StoreError>> {
        let objects = self.start();
        let from = (Bound::Excluded(after.to_owned()), Bound::Unbounded);
        let names = objects.range(from).map(|(name, _)| name);
        let names = names.filter(|name| name.starts_with(prefix)).take(1000);
        Box::pin(ready(Ok(names.cloned().collect())))
    }

    fn delete<'a>(&'a self, name: &'a str) -> Pending<'a, Result<(), StoreError>> {
        let is_meant = name.starts_with("dead/") || name.starts_with("pin/");
        let less = |left: u64| left.checked_sub(1).filter(|_| is_meant);
        let failing = &self.failing_deletions;
        if failing.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok() {
            return Box::pin(ready(Err(StoreError::Unclear("a test".into()))));
        }
        self.start().remove(name);
        Box::pin(ready(Ok(())))
    }

    fn back_off(&self, _attempt: u32) -> Pending<'_, ()> {
        Box::pin(ready(()))
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a future on this thread.
pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(result) => return result,
            Poll::Pending => thread::park(),
        }
    }
}

/// Runs a future beside the work of the volume.
pub(crate) fn with_volume<T: Send>(
    volume: &Volume,
    future: impl Future<Output = Result<T, Failure>> + Send,
) -> Result<T, Failure> {
    let parts: Vec<Pending<'_, Result<T, Failure>>> =
        vec![Box::pin(async { Err(volume.run().await) }), Box::pin(future)];
    block_on(race(parts))
}

pub(crate) fn description(size: u64, page_bytes: u32) -> Description {
    Description::new(VolumeId([1; 16]), Nonce([2; 16]), size, page_bytes)
}

pub(crate) fn create(store: &Arc<dyn Store>, size: u64) {
    block_on(Volume::create(Arc::clone(store), &description(size, 1 << 20))).unwrap();
}

pub(crate) fn open(store: &Arc<dyn Store>, nonce: u8, config: Config) -> Result<Volume, Failure> {
    block_on(Volume::open(Arc::clone(store), Nonce([nonce; 16]), "node", config))
}

/// Writes one sector, and flushes it, in one object.
pub(crate) async fn put(volume: &Volume, offset: u64, byte: u8) -> Result<(), Failure> {
    volume.write(offset, &[byte; 512]).await?;
    volume.flush().await
}

pub(crate) async fn byte_at(volume: &Volume, offset: u64) -> Result<u8, Failure> {
    let mut data = [0xff; 512];
    volume.read(offset, &mut data).await?;
    assert_eq!(data, [data[0]; 512]);
    Ok(data[0])
}

#[test]
fn a_volume_in_a_directory_is_taken_over_with_what_was_flushed() {
    let directory = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Directory::open(directory.path(), 1).unwrap());
    create(&store, 8 << 20);
    let first = open(&store, 10, Config::default()).unwrap();
    with_volume(&first, async {
        put(&first, 0, 1).await?;
        put(&first, 4096, 2).await?;
        first.trim(0, 512).await?;
        first.flush().await?;
        first.write(8192, &[3; 512]).await
    })
    .unwrap();
    // Another process opens the same directory.
    let store: Arc<dyn Store> = Arc::new(Directory::open(directory.path(), 2).unwrap());
    let second = open(&store, 11, Config::default()).unwrap();
    with_volume(&second, async {
        for (offset, byte) in [(0, 0), (4096, 2), (8192, 0), (5 << 20, 0)] {
            assert_eq!(byte_at(&second, offset).await?, byte, "at {offset}");
        }
        put(&second, 0, 4).await
    })
    .unwrap();
    let fenced = with_volume(&first, async { first.flush().await });
    assert_eq!(fenced, Err(Failure::Fenced));
    assert_eq!(block_on(first.write(0, &[5; 512])), Err(Failure::Fenced));
}

#[test]
fn a_directory_creates_each_object_once_and_lists_in_order() {
    let directory = tempfile::tempdir().unwrap();
    let store = Directory::open(directory.path(), 1).unwrap();
    let names = ["log/1/1", "log/1/2", "log/2/1", "page/1/1"];
    for name in names {
        assert_eq!(block_on(store.create(name, b"0123456789")), Ok(()));
        assert_eq!(block_on(store.create(name, b"other")), Err(StoreError::Exists));
    }
    assert_eq!(block_on(store.read("log/1/1", 8..20)), Ok(b"89".to_vec()));
    assert_eq!(block_on(store.read("log/1/1", 20..30)), Ok(Vec::new()));
    assert_eq!(block_on(store.read("log/1/3", 0..1)), Err(StoreError::NotFound));
    let mut found: Vec<String> = Vec::new();
    loop {
        let after = found.last().cloned().unwrap_or_default();
        let more = block_on(store.list("log/", &after)).unwrap();
        if more.is_empty() {
            break;
        }
        found.extend(more);
    }
    assert_eq!(found, names[..3]);
    assert_eq!(block_on(store.list("log/1/", "log/1/1")), Ok(vec!["log/1/2".to_owned()]));
    assert_eq!(block_on(store.list("ckpt/", "")), Ok(Vec::new()));
    assert_eq!(block_on(store.delete("log/1/1")), Ok(()));
    assert_eq!(block_on(store.delete("log/1/1")), Ok(()));
    assert_eq!(std::fs::read_dir(directory.path().join("tmp")).unwrap().count(), 0);
}

#[test]
fn flushes_at_the_same_time_share_a_put() {
    let memory = Arc::new(Memory::default());
    let store: Arc<dyn Store> = Arc::clone(&memory) as _;
    create(&store, 8 << 20);
    let volume = open(&store, 10, Config::default()).unwrap();
    let before = memory.log_puts.load(Ordering::Relaxed);
    for number in 0..32 {
        block_on(volume.write(number * 4096, &[7; 4096])).unwrap();
    }
    let flushes: Vec<Pending<'_, Result<(), Failure>>> =
        (0..32).map(|_| Box::pin(volume.flush()) as _).collect();
    with_volume(&volume, async { crate::volume::all(flushes, 32).await }).unwrap();
    assert_eq!(memory.log_puts.load(Ordering::Relaxed) - before, 1);
}

#[test]
fn writes_without_a_flush_share_a_put_that_is_sent_later() {
    let memory = Arc::new(Memory::default());
    let store: Arc<dyn Store> = Arc::clone(&memory) as _;
    create(&store, 8 << 20);
    let volume = open(&store, 10, Config::default()).unwrap();
    let puts = || memory.log_puts.load(Ordering::Relaxed);
    let before = puts();
    with_volume(&volume, async {
        for number in 0..32 {
            volume.write(number * 4096, &[7; 4096]).await?;
        }
        let seen = volume.send_older(0);
        assert_eq!(puts(), before, "they are new");
        volume.send_older(seen);
        while volume.has_puts() {
            std::future::poll_fn(|context| {
                context.waker().wake_by_ref();
                if volume.has_puts() { Poll::Pending } else { Poll::Ready(()) }
            })
            .await;
        }
        assert_eq!((puts(), volume.send_older(0)), (before + 1, 0));
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_slot_that_was_confirmed_and_lost_is_reported() {
    let lose = |rule| {
        without(rule, || {
            let memory = Arc::new(Memory::default());
            let store: Arc<dyn Store> = Arc::clone(&memory) as _;
            create(&store, 8 << 20);
            let volume = open(&store, 10, Config::default()).unwrap();
            with_volume(&volume, async {
                for number in 0..3 {
                    put(&volume, number * 512, 1).await?;
                }
                Ok(())
            })
            .unwrap();
            let lost = Name::Slot(Position { epoch: 1, slot: 2 });
            memory.objects.lock().unwrap().remove(&lost.to_string()).unwrap();
            (open(&store, 11, Config::default()).map(|_| ()), lost)
        })
    };
    let (found, lost) = lose(None);
    assert_eq!(found, Err(Failure::Lost(lost)));
    assert_eq!(lose(Some(Rule::Witness)).0, Ok(()), "the test does not depend on the rule");
}

#[test]
fn damaged_data_is_reported_and_not_served() {
    let memory = Arc::new(Memory::default());
    let store: Arc<dyn Store> = Arc::clone(&memory) as _;
    create(&store, 8 << 20);
    let volume = open(&store, 10, Config::default()).unwrap();
    with_volume(&volume, async { put(&volume, 0, 1).await }).unwrap();
    let name = Name::Slot(Position { epoch: 1, slot: 1 });
    *memory.objects.lock().unwrap().get_mut(&name.to_string()).unwrap().last_mut().unwrap() ^= 1;
    let volume = open(&store, 11, Config::default()).unwrap();
    let found = with_volume(&volume, async { byte_at(&volume, 0).await }).unwrap_err();
    let Failure::Damaged { name: damaged, range: Some(range), .. } = &found else {
        panic!("{found}");
    };
    assert_eq!((damaged, range.end - range.start), (&name, 512));
    let text = format!("{name}, bytes {} to {}: the checksum", range.start, range.end - 1);
    assert!(found.to_string().starts_with(&text), "{found}");
}

#[test]
fn the_map_of_scattered_writes_stays_within_its_memory() {
    const TIB: u64 = 1 << 40;
    let store: Arc<dyn Store> = Arc::new(Memory::default());
    create(&store, TIB);
    let map_bytes = 512 << 10;
    let config = Config { map_bytes, object_bytes: 128 << 10, ..Config::default() };
    let volume = open(&store, 10, config.clone()).unwrap();
    let offset = |number: u64| number.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (TIB / 4096) * 4096;
    let most = with_volume(&volume, async {
        let mut most = 0;
        for number in 1..2_000_u64 {
            volume.write(offset(number), &number.to_le_bytes().repeat(512)).await?;
            if number.is_multiple_of(32) {
                volume.flush().await?;
            }
            most = most.max(volume.status().map_bytes);
        }
        volume.flush().await?;
        Ok(most)
    })
    .unwrap();
    assert!(most <= map_bytes, "{most} bytes");
    let volume = open(&store, 11, config).unwrap();
    with_volume(&volume, async {
        for number in (1..2_000_u64).step_by(7) {
            let mut data = [0; 4096];
            volume.read(offset(number), &mut data).await?;
            assert_eq!(data[..8], number.to_le_bytes());
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_take_over_needs_a_fixed_number_of_requests_and_one_for_each_slot() {
    let memory = Arc::new(Memory::default());
    let store: Arc<dyn Store> = Arc::clone(&memory) as _;
    create(&store, 8 << 20);
    let requests_after = |slots: u64, nonce: u8| {
        let volume = open(&store, nonce, Config::default()).unwrap();
        with_volume(&volume, async {
            for number in 0..slots {
                put(&volume, number * 512, 1).await?;
            }
            Ok(())
        })
        .unwrap();
        let before = memory.count();
        open(&store, nonce + 1, Config::default()).unwrap();
        memory.count() - before
    };
    let (few, many) = (requests_after(1, 10), requests_after(41, 20));
    // Some slots are read ahead in vain: 3 here, and at most 15.
    assert!(few <= 17, "{few} requests");
    // In tests an opener already seals slots ahead after 3 slots: up to two more requests each time.
    assert!(many <= few + 2 * 41 + 12, "{many} requests after 41 slots, {few} after one");
}

#[test]
fn a_volume_grows_and_keeps_its_size_after_a_crash_and_a_checkpoint() {
    let store: Arc<dyn Store> = Arc::new(Memory::default());
    create(&store, 1 << 20);
    let first = open(&store, 1, Config::default()).unwrap();
    with_volume(&first, async {
        first.grow(3 << 20).await?;
        put(&first, (3 << 20) - 512, 7).await
    })
    .unwrap();
    for size in [1 << 20, (3 << 20) + 1] {
        let refused = with_volume(&first, async { first.grow(size).await });
        assert!(matches!(refused, Err(Failure::Invalid(_))), "{refused:?}");
    }
    let second = open(&store, 2, Config::default()).unwrap();
    assert_eq!(second.size(), 3 << 20);
    with_volume(&second, async {
        second.request_checkpoint();
        put(&second, 0, 1).await?;
        while second.status().checkpoints == 0 {
            second.flush().await?;
            yield_once().await;
        }
        second.grow(4 << 20).await?;
        put(&second, (4 << 20) - 512, 9).await
    })
    .unwrap();
    let third = open(&store, 3, Config::default()).unwrap();
    assert_eq!(third.size(), 4 << 20);
    for (offset, byte) in [(0, 1), ((3 << 20) - 512, 7), (3 << 20, 0), ((4 << 20) - 512, 9)] {
        let found = with_volume(&third, async { byte_at(&third, offset).await });
        assert_eq!(found, Ok(byte), "at {offset}");
    }
}

/// Lets the work in the background take a step.
pub(crate) async fn yield_once() {
    let mut is_second = false;
    std::future::poll_fn(|context| {
        context.waker().wake_by_ref();
        if std::mem::replace(&mut is_second, true) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

#[test]
fn nothing_is_put_while_the_work_in_the_background_is_paused() {
    let memory = Arc::new(Memory::default());
    let store: Arc<dyn Store> = Arc::<Memory>::clone(&memory);
    create(&store, 1 << 20);
    let volume = open(&store, 1, Config::default()).unwrap();
    with_volume(&volume, async {
        put(&volume, 0, 1).await?;
        volume.pause().await?;
        let before = memory.count();
        volume.request_checkpoint();
        for _ in 0..100 {
            yield_once().await;
        }
        assert_eq!((memory.count(), volume.status().checkpoints), (before, 0));
        volume.resume();
        while volume.status().checkpoints == 0 {
            yield_once().await;
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn extents_are_the_same_in_the_tail_and_in_the_map() {
    let store: Arc<dyn Store> = Arc::new(Memory::default());
    create(&store, 4 << 20);
    let volume = open(&store, 1, Config::default()).unwrap();
    let expected = vec![
        (0..4096, false),
        (4096..8192, true),
        (8192..8704, false),
        (8704..(1 << 20) + 512, true),
        ((1 << 20) + 512..4 << 20, false),
    ];
    let data = vec![1; (1 << 20) - 4096 + 512];
    block_on(volume.write(4096, &data)).unwrap();
    block_on(volume.trim(8192, 512)).unwrap();
    assert_eq!(block_on(volume.extents(0..4 << 20, 10)), Ok(expected.clone()));
    with_volume(&volume, async {
        volume.flush().await?;
        while volume.status().tail_bytes > 0 {
            yield_once().await;
        }
        assert_eq!(volume.extents(0..4 << 20, 10).await?, expected);
        assert_eq!(volume.extents(0..4 << 20, 3).await?, expected[..3]);
        assert_eq!(volume.extents(512..1024, 3).await?, vec![(512..1024, false)]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn claims_are_made_once_and_released_by_their_owner_only() {
    let store: Arc<dyn Store> = Arc::new(Memory::default());
    create(&store, 1 << 20);
    let place = |nonce: u8| block_on(Place::find(Arc::clone(&store), Nonce([nonce; 16]))).unwrap();
    let (one, other) = (place(1), place(2));
    let newest = |epoch, owner: Option<&str>, is_released| {
        Ok(Newest { epoch, owner: owner.map(str::to_owned), is_released })
    };
    assert_eq!(block_on(one.newest()), newest(0, None, false));
    assert_eq!(block_on(one.claim(1, "one")), Ok(true));
    assert_eq!(block_on(other.claim(1, "other")), Ok(false));
    assert_eq!(block_on(one.claim(1, "one")), Ok(true), "the answer of the first put was lost");
    assert_eq!(block_on(other.newest()), newest(1, Some("one"), false));
    let volume = block_on(one.open(1, Config::default())).unwrap();
    with_volume(&volume, async { put(&volume, 0, 1).await }).unwrap();
    assert_eq!(block_on(volume.check_claim()), Ok(()));
    block_on(one.release(1)).unwrap();
    assert_eq!(block_on(other.newest()), newest(1, Some("one"), true));
    // An opener that only fences.
    assert_eq!(block_on(other.claim(2, &"x".repeat(MAX_OWNER_BYTES))), Ok(true));
    assert!(matches!(
        block_on(other.claim(3, &"x".repeat(MAX_OWNER_BYTES + 1))),
        Err(Failure::Invalid(_))
    ));
    block_on(other.end_earlier(2)).unwrap();
    let fenced = with_volume(&volume, async { put(&volume, 0, 2).await });
    assert_eq!(fenced, Err(Failure::Fenced));
    assert_eq!(block_on(volume.check_claim()), Err(Failure::Fenced));
    let third = open(&store, 3, Config::default()).unwrap();
    assert_eq!((third.epoch(), block_on(byte_at(&third, 0))), (3, Ok(1)));
}

#[test]
fn a_view_shows_what_is_durable_and_does_not_disturb_the_writer() {
    let store: Arc<dyn Store> = Arc::new(Memory::default());
    create(&store, 1 << 20);
    let place = block_on(Place::find(Arc::clone(&store), Nonce([9; 16]))).unwrap();
    let view = || block_on(place.view(Config::default())).unwrap();
    assert_eq!(block_on(byte_at(&view(), 0)), Ok(0));
    let volume = open(&store, 1, Config::default()).unwrap();
    let write = |byte: u8| with_volume(&volume, async { put(&volume, 0, byte).await }).unwrap();
    write(1);
    let before = view();
    write(2);
    assert_eq!(block_on(byte_at(&before, 0)), Ok(1));
    assert_eq!(block_on(byte_at(&view(), 0)), Ok(2));
    write(3);
    assert_eq!(block_on(volume.check_claim()), Ok(()));
}
