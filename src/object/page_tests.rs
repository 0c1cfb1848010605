//! Objects with several pages: how many there are, and when they are deleted.

use std::sync::Arc;

use crate::codec::Description;
use crate::snapshot_tests::{settle, take};
use crate::store::Store;
use crate::tests::{Memory, block_on, byte_at, description, open, with_volume};
use crate::volume::{Config, Volume};

const PAGE: u64 = 4096;
const PAGES: u64 = 2048;

fn config() -> Config {
    Config { sweep_checkpoints: 4, spare_page_objects: 4, ..Config::default() }
}

fn new_volume(shared_pages: bool) -> (Arc<Memory>, Arc<dyn Store>) {
    let memory = Arc::new(Memory::default());
    let store: Arc<dyn Store> = Arc::clone(&memory) as _;
    let description = Description { shared_pages, ..description(PAGES * PAGE, 4096) };
    block_on(Volume::create(Arc::clone(&store), &description)).unwrap();
    (memory, store)
}

fn write(volume: &Volume, pages: impl Iterator<Item = u64> + Send, byte: u8) {
    with_volume(volume, async {
        for number in pages {
            volume.write(number * PAGE, &[byte; 512]).await?;
        }
        volume.flush().await
    })
    .unwrap();
}

fn page_objects(memory: &Memory) -> usize {
    let objects = memory.objects.lock().unwrap();
    objects.keys().filter(|name| name.starts_with("page/")).count()
}

fn puts_of_pages(memory: &Memory) -> u64 {
    let objects = memory.objects.lock().unwrap();
    let last = objects.keys().rfind(|name| name.starts_with("page/")).unwrap();
    u64::from_str_radix(last.rsplit('/').next().unwrap(), 16).unwrap() + 1
}

fn has(volume: &Volume, pages: impl Iterator<Item = u64>, byte: u8) {
    for number in pages {
        assert_eq!(block_on(byte_at(volume, number * PAGE)), Ok(byte), "page {number}");
    }
}

#[test]
fn a_checkpoint_of_many_pages_is_few_puts() {
    for (shared_pages, most) in [(false, u64::MAX), (true, 3)] {
        let (memory, store) = new_volume(shared_pages);
        let volume = open(&store, 10, config()).unwrap();
        write(&volume, 0..PAGES, 1);
        settle(&volume, &memory);
        let puts = puts_of_pages(&memory);
        assert!(puts <= most, "{puts} objects");
        assert!(shared_pages || puts > PAGES, "{puts} objects");
        has(&volume, 1..PAGES, 1);
        drop(volume);
        has(&open(&store, 11, config()).unwrap(), 1..PAGES, 1);
    }
}

/// Each checkpoint writes an object in which a few pages stay needed.
#[test]
fn many_small_checkpoints_leave_few_objects() {
    let (memory, store) = new_volume(true);
    let mut most = 0;
    for epoch in 0..3 {
        let volume = open(&store, 10 + epoch, config()).unwrap();
        for round in 0..40 {
            write(&volume, (1..PAGES).filter(|number| number % 40 == round), 1 + epoch);
            settle(&volume, &memory);
            most = most.max(page_objects(&memory));
        }
        has(&volume, 1..PAGES, 1 + epoch);
        block_on(volume.check_accounting()).unwrap();
    }
    // Four spare ones, twice one that would be filled, and those of the checkpoints until the next sweep and its copies.
    assert!(most <= 16, "{most} objects with pages");
}

#[test]
fn pages_that_are_merged_stay_for_the_snapshots_that_need_their_objects() {
    let (memory, store) = new_volume(true);
    let volume = open(&store, 10, config()).unwrap();
    let mut snapshots = Vec::new();
    for round in 0..12_u64 {
        write(&volume, (1..PAGES).filter(|number| number % 12 == round), 5);
        settle(&volume, &memory);
        snapshots.push(take(&volume, &round.to_string()));
    }
    for _ in 0..12 {
        settle(&volume, &memory);
    }
    for (round, id) in (0..12).zip(&snapshots) {
        let view = block_on(volume.view_snapshot(*id, config())).unwrap();
        for later in 0..12 {
            let byte = if later <= round { 5 } else { 0 };
            has(&view, (1..PAGES).filter(|number| number % 12 == later).take(3), byte);
        }
    }
    for id in snapshots {
        with_volume(&volume, async { volume.delete_snapshot(id).await }).unwrap();
    }
    for _ in 0..12 {
        settle(&volume, &memory);
    }
    let left = page_objects(&memory);
    assert!(left <= 12, "{left} objects with pages");
    has(&volume, 1..PAGES, 5);
}

/// The roll-back needs pages again that were counted as superfluous.
#[test]
fn pages_that_a_roll_back_needs_again_are_not_deleted() {
    let (memory, store) = new_volume(true);
    let volume = open(&store, 10, config()).unwrap();
    write(&volume, 1..100, 1);
    settle(&volume, &memory);
    let id = take(&volume, "s");
    // All pages of the object but five.
    write(&volume, 1..95, 2);
    settle(&volume, &memory);
    with_volume(&volume, async {
        volume.roll_back(id).await?;
        volume.delete_snapshot(id).await
    })
    .unwrap();
    settle(&volume, &memory);
    // These five, one after the other. The map needs the others again.
    for number in 95..100 {
        write(&volume, number..number + 1, 3);
        settle(&volume, &memory);
    }
    drop(volume);
    let next = open(&store, 11, config()).unwrap();
    has(&next, 1..95, 1);
    has(&next, 95..100, 3);
}
