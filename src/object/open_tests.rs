//! Tests of how an opener reads the log: several slots and pages at the same time, and each once.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::codec::Damage;
use crate::name::Name;
use crate::store::{Pending, Store, StoreError};
use crate::tests::{Memory, block_on, create, description, open, with_volume, yield_once};
use crate::volume::{Config, Failure};

/// A store whose reads take a moment.
#[derive(Default)]
struct Slow {
    memory: Memory,
    reads: [Reads; 2],
}

#[derive(Default)]
struct Reads {
    all: AtomicU64,
    in_flight: AtomicU64,
    most: AtomicU64,
}

impl Slow {
    /// The reads of slots or of pages: their number, and how many were in flight at the same time.
    fn take(&self, kind: usize) -> (u64, u64) {
        let Reads { all, most, .. } = &self.reads[kind];
        (all.swap(0, Ordering::Relaxed), most.swap(0, Ordering::Relaxed))
    }
}

impl Store for Slow {
    fn create<'a>(&'a self, name: &'a str, bytes: &'a [u8]) -> Pending<'a, Result<(), StoreError>> {
        self.memory.create(name, bytes)
    }

    fn read<'a>(
        &'a self,
        name: &'a str,
        range: Range<u64>,
    ) -> Pending<'a, Result<Vec<u8>, StoreError>> {
        let kind = if name.starts_with("log/") { 0 } else { 1 };
        Box::pin(async move {
            let Reads { all, in_flight, most } = &self.reads[kind];
            all.fetch_add(1, Ordering::Relaxed);
            let now = in_flight.fetch_add(1, Ordering::Relaxed) + 1;
            most.fetch_max(now, Ordering::Relaxed);
            for _ in 0..3 {
                yield_once().await;
            }
            in_flight.fetch_sub(1, Ordering::Relaxed);
            self.memory.read(name, range).await
        })
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: &'a str,
    ) -> Pending<'a, Result<Vec<String>, StoreError>> {
        self.memory.list(prefix, after)
    }

    fn delete<'a>(&'a self, name: &'a str) -> Pending<'a, Result<(), StoreError>> {
        self.memory.delete(name)
    }

    fn back_off(&self, _attempt: u32) -> Pending<'_, ()> {
        Box::pin(yield_once())
    }
}

const SLOT: usize = 0;
const PAGE: usize = 1;

#[test]
fn an_open_after_a_crash_reads_slots_and_pages_in_parallel_and_each_once() {
    const PAGES: u64 = 48;
    /// A full object has this number of records.
    const RECORDS: u64 = 4096;
    let slow = Arc::new(Slow::default());
    let store: Arc<dyn Store> = Arc::<Slow>::clone(&slow);
    create(&store, PAGES << 20);
    let config = Config { object_records: 4096, ..Config::default() };
    let first = open(&store, 1, config.clone()).unwrap();
    let place = |number: u64| ((number * 7 % PAGES) << 20) + number / PAGES * 1024;
    with_volume(&first, async {
        for number in 0..RECORDS {
            first.write(place(number), &[1; 512]).await?;
        }
        first.flush().await
    })
    .unwrap();
    // It writes a checkpoint, and then slots above it.
    let second = open(&store, 2, config.clone()).unwrap();
    with_volume(&second, async {
        while second.status().checkpoints == 0 {
            yield_once().await;
        }
        for slot in 0..40 {
            for number in slot * 64..(slot + 1) * 64 {
                second.write(place(number), &[2; 512]).await?;
            }
            second.flush().await?;
        }
        Ok(())
    })
    .unwrap();
    slow.take(SLOT);
    slow.take(PAGE);
    let third = open(&store, 3, config).unwrap();
    let ((slots, most_slots), (pages, most_pages)) = (slow.take(SLOT), slow.take(PAGE));
    assert!((8..=16).contains(&most_slots), "{most_slots} slots at the same time");
    // About 42 slots, the ones that were read ahead in vain, and the seals.
    assert!((42..=42 + 16 + 24).contains(&slots), "{slots} reads of slots");
    assert!((8..=16).contains(&most_pages), "{most_pages} pages at the same time");
    // Each page, the index, and what is not a page.
    assert!((PAGES..PAGES + 16).contains(&pages), "{pages} reads of pages");
    for number in (0..RECORDS).step_by(11) {
        let mut data = [0; 512];
        block_on(third.read(place(number), &mut data)).unwrap();
        assert_eq!(data[0], if number < 40 * 64 { 2 } else { 1 }, "{number}");
    }
}

#[test]
fn the_header_of_a_full_object_is_read_at_once() {
    let slow = Arc::new(Slow::default());
    let store: Arc<dyn Store> = Arc::<Slow>::clone(&slow);
    create(&store, 64 << 20);
    let volume = open(&store, 1, Config::default()).unwrap();
    with_volume(&volume, async {
        for number in 0..4096 {
            volume.write(number * 1024, &[1; 512]).await?;
        }
        volume.flush().await
    })
    .unwrap();
    slow.take(SLOT);
    open(&store, 2, Config::default()).unwrap();
    // The open record, the object, and the empty slot: while it is read ahead, in its turn, and for the seal.
    let (reads, _) = slow.take(SLOT);
    assert!(reads <= 7, "{reads} reads");
}

#[test]
fn a_size_for_which_the_map_has_no_room_is_damage() {
    let store: Arc<dyn Store> = Arc::new(Memory::default());
    let bytes = description(1 << 60, 4096).encode();
    block_on(store.create("desc", &bytes)).unwrap();
    let refused = open(&store, 10, Config::default()).err();
    let damage = Damage::Field("size");
    assert_eq!(refused, Some(Failure::Damaged { name: Name::Description, range: None, damage }));
}
