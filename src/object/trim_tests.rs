//! The memory of changes of much more than the map in memory.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use crate::codec::Description;
use crate::name::Nonce;
use crate::snapshot_tests::{settle, take};
use crate::store::{Pending, Store, StoreError};
use crate::tests::{Memory, block_on, byte_at, description, open, put, with_volume};
use crate::volume::{Config, Failure, Place, Volume};

const PAGE_BYTES: u32 = 4096;
const PAGES: u64 = 16 << 10;
const SIZE: u64 = PAGES * PAGE_BYTES as u64;

/// Eight pages of the index.
const MAP_BYTES: usize = 256 << 10;

/// The names of superfluous objects for this memory, and what one checkpoint adds: pages of the index, and slots.
const MAX_NAMES: usize = 256 + 200;

/// A store in memory that looks at a volume in each operation.
#[derive(Default)]
struct Watching {
    memory: Arc<Memory>,
    volume: OnceLock<Volume>,
    most_map_bytes: AtomicUsize,
    most_names: AtomicUsize,
}

impl Watching {
    fn look(&self) {
        if let Some(volume) = self.volume.get() {
            self.most_map_bytes.fetch_max(volume.status().map_bytes, Ordering::Relaxed);
            self.most_names.fetch_max(volume.superfluous_names(), Ordering::Relaxed);
        }
    }

    /// The pages in the store.
    fn pages(&self) -> usize {
        let objects = self.memory.objects.lock().unwrap();
        objects.keys().filter(|name| name.starts_with("page/")).count()
    }
}

impl Store for Watching {
    fn create<'a>(&'a self, name: &'a str, bytes: &'a [u8]) -> Pending<'a, Result<(), StoreError>> {
        self.look();
        self.memory.create(name, bytes)
    }

    fn read<'a>(
        &'a self,
        name: &'a str,
        range: Range<u64>,
    ) -> Pending<'a, Result<Vec<u8>, StoreError>> {
        self.look();
        self.memory.read(name, range)
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: &'a str,
    ) -> Pending<'a, Result<Vec<String>, StoreError>> {
        self.memory.list(prefix, after)
    }

    fn delete<'a>(&'a self, name: &'a str) -> Pending<'a, Result<(), StoreError>> {
        self.look();
        self.memory.delete(name)
    }

    fn back_off(&self, attempt: u32) -> Pending<'_, ()> {
        self.memory.back_off(attempt)
    }
}

fn config() -> Config {
    Config { map_bytes: MAP_BYTES, object_bytes: 128 << 10, ..Config::default() }
}

/// Makes a volume with data in each page of its map, all of which are in the store.
fn full_volume(shared_pages: bool) -> (Arc<Watching>, Volume) {
    let watching = Arc::new(Watching::default());
    let store: Arc<dyn Store> = Arc::clone(&watching) as _;
    let description = Description { shared_pages, ..description(SIZE, PAGE_BYTES) };
    block_on(Volume::create(Arc::clone(&store), &description)).unwrap();
    let volume = open(&store, 10, config()).unwrap();
    with_volume(&volume, async {
        for number in 0..PAGES {
            volume.write(number * u64::from(PAGE_BYTES), &[1; 512]).await?;
        }
        volume.flush().await
    })
    .unwrap();
    settle(&volume, &watching.memory);
    let objects = if shared_pages { 10..100 } else { PAGES + 1..u64::MAX };
    assert!(
        objects.contains(&(watching.pages() as u64)),
        "{} objects with pages",
        watching.pages()
    );
    watching.volume.set(volume.clone()).ok().unwrap();
    (watching, volume)
}

fn trim_all(volume: &Volume) {
    with_volume(volume, async {
        volume.trim(0, SIZE).await?;
        volume.flush().await
    })
    .unwrap();
}

fn bytes_at(volume: &Volume, pages: &[u64]) -> Vec<u8> {
    let byte = |number: &u64| block_on(byte_at(volume, number * u64::from(PAGE_BYTES)));
    pages.iter().map(|number| byte(number).unwrap()).collect()
}

const SOME: [u64; 4] = [1, 1023, 5000, PAGES - 1];

#[test]
fn a_trim_of_all_pages_stays_within_the_memory_and_their_objects_are_deleted() {
    for shared_pages in [false, true] {
        trim_of_all_pages(shared_pages);
    }
}

fn trim_of_all_pages(shared_pages: bool) {
    let (watching, volume) = full_volume(shared_pages);
    trim_all(&volume);
    settle(&volume, &watching.memory);
    let (map_bytes, names) = (&watching.most_map_bytes, &watching.most_names);
    assert!(map_bytes.load(Ordering::Relaxed) <= MAP_BYTES, "{map_bytes:?} bytes of the map");
    assert!(names.load(Ordering::Relaxed) <= MAX_NAMES, "{names:?} names");
    assert_eq!(bytes_at(&volume, &SOME), [0; 4]);
    // The block that starts a checkpoint is the only data: a page, one of the index, and those of the usage.
    assert!(watching.pages() < 10, "{} pages are left", watching.pages());
    block_on(volume.check_accounting()).unwrap();
    assert_eq!(volume.status().live_bytes, 512);
}

#[test]
fn an_opener_and_a_view_repeat_a_trim_of_all_pages_within_the_memory() {
    let (watching, volume) = full_volume(false);
    // The trim and the write are in the log, and in no checkpoint.
    block_on(volume.trim(0, SIZE)).unwrap();
    with_volume(&volume, async { put(&volume, 5000 * u64::from(PAGE_BYTES), 7).await }).unwrap();
    drop(volume);
    let store: Arc<dyn Store> = Arc::clone(&watching) as _;
    let view = block_on(async {
        let place = Place::find(Arc::clone(&store), Nonce([20; 16])).await?;
        place.view(config()).await
    });
    for volume in [view.unwrap(), open(&store, 11, config()).unwrap()] {
        let map_bytes = volume.status().map_bytes;
        assert!(map_bytes <= MAP_BYTES, "{map_bytes} bytes");
        assert_eq!(bytes_at(&volume, &SOME), [0, 0, 7, 0]);
    }
}

#[test]
fn a_snapshot_keeps_the_pages_that_a_trim_makes_superfluous() {
    for shared_pages in [false, true] {
        snapshot_and_trim(shared_pages);
    }
}

fn snapshot_and_trim(shared_pages: bool) {
    let (watching, volume) = full_volume(shared_pages);
    let (snapshot, before) = (take(&volume, "full"), watching.pages());
    trim_all(&volume);
    settle(&volume, &watching.memory);
    assert!(watching.pages() >= before, "{} objects, {before} before", watching.pages());
    let view = block_on(volume.view_snapshot(snapshot, config())).unwrap();
    assert_eq!(bytes_at(&view, &SOME), [1; 4]);
    assert_eq!(bytes_at(&volume, &SOME), [0; 4]);
    with_volume(&volume, async { volume.delete_snapshot(snapshot).await }).unwrap();
    settle(&volume, &watching.memory);
    settle(&volume, &watching.memory);
    assert!(watching.pages() < 10, "{} pages are left", watching.pages());
}

/// The pages are four times as large as the memory, and one slot changes each of them.
#[test]
fn scattered_changes_of_large_pages_stay_within_the_memory() {
    const PAGE: u64 = 32 << 10;
    const COUNT: u64 = 256;
    const BLOCK: u64 = 512;
    let watching = Arc::new(Watching::default());
    let store: Arc<dyn Store> = Arc::clone(&watching) as _;
    let description = description(COUNT * PAGE, 32 << 10);
    block_on(Volume::create(Arc::clone(&store), &description)).unwrap();
    let volume = open(&store, 10, config()).unwrap();
    with_volume(&volume, async {
        for number in 0..COUNT * PAGE / BLOCK {
            volume.write(number * BLOCK, &[1; 512]).await?;
        }
        volume.flush().await
    })
    .unwrap();
    settle(&volume, &watching.memory);
    watching.volume.set(volume.clone()).ok().unwrap();
    with_volume(&volume, async {
        for page in 0..COUNT {
            volume.trim(page * PAGE + 5 * BLOCK, BLOCK).await?;
            volume.write(page * PAGE + 7 * BLOCK, &[3; 512]).await?;
        }
        volume.flush().await
    })
    .unwrap();
    let are_right = |volume: &Volume| {
        for page in 0..COUNT {
            let byte = |at: u64| block_on(byte_at(volume, page * PAGE + at)).unwrap();
            let bytes = [4, 5, 6, 7, 8].map(|block| byte(block * BLOCK));
            assert_eq!(bytes, [1, 0, 1, 3, 1], "page {page}");
        }
        let map_bytes = volume.status().map_bytes;
        assert!(map_bytes <= MAP_BYTES, "{map_bytes} bytes");
    };
    are_right(&volume);
    let place = block_on(Place::find(Arc::clone(&store), Nonce([20; 16]))).unwrap();
    are_right(&block_on(place.view(config())).unwrap());
    settle(&volume, &watching.memory);
    are_right(&volume);
    let most = watching.most_map_bytes.load(Ordering::Relaxed);
    assert!(most <= MAP_BYTES, "{most} bytes");
    block_on(volume.check_accounting()).unwrap();
    drop(volume);
    are_right(&open(&store, 11, config()).unwrap());
}

#[test]
fn a_trim_where_no_data_is_changes_no_page() {
    let (watching, volume) = full_volume(false);
    let pages_put = |trims: u64| -> Result<usize, Failure> {
        with_volume(&volume, async {
            for number in 0..trims {
                volume.trim(number * u64::from(PAGE_BYTES) + 512, 1024).await?;
            }
            volume.flush().await
        })?;
        let before = last_page(&watching);
        settle(&volume, &watching.memory);
        Ok(last_page(&watching) - before)
    };
    let (none, many) = (pages_put(0).unwrap(), pages_put(200).unwrap());
    assert_eq!(many, none, "only the pages of a checkpoint with one write");
}

/// The number of the last page that was put. Numbers follow each other.
fn last_page(watching: &Watching) -> usize {
    let objects = watching.memory.objects.lock().unwrap();
    let last = objects.keys().rfind(|name| name.starts_with("page/")).unwrap();
    usize::from_str_radix(last.rsplit('/').next().unwrap(), 16).unwrap()
}
