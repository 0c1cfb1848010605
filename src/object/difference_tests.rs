//! The difference of two contents of a volume, compared with what was written between them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use proptest::prelude::*;

use crate::name::{Nonce, SnapshotId};
use crate::snapshot_tests::{settle, take};
use crate::store::Store;
use crate::tests::{Memory, block_on, description, open, with_volume};
use crate::volume::{Config, Difference, Failure, Place, Volume};

const SECTOR: u64 = 512;
const PAGE_BYTES: u32 = 4096;

/// The sectors that the test changes: three pages of the map, each below another page of the index.
const SECTORS: u64 = 24;

/// The number of a sector in the volume.
fn place(sector: u64) -> u64 {
    (sector / 8) * (1024 + 3) * 8 + sector % 8
}

/// The size of the volume: up to the last sector that is changed, and a part of a page.
const SIZE: u64 = (2 * (1024 + 3) * 8 + 13) * SECTOR;

#[derive(Debug, Clone)]
enum Step {
    Write(Range<u64>),
    Trim(Range<u64>),
    TrimAll,
    Snapshot,
    RollBack(usize),
    /// Writes a checkpoint, and lets the collector work.
    Settle,
    Reopen,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let range = (0..SECTORS, 1..7_u64).prop_map(|(at, length)| at..SECTORS.min(at + length));
    let step = prop_oneof![
        6 => range.clone().prop_map(Step::Write),
        2 => range.prop_map(Step::Trim),
        1 => Just(Step::TrimAll),
        3 => Just(Step::Snapshot),
        1 => (0..4_usize).prop_map(Step::RollBack),
        2 => Just(Step::Settle),
        1 => Just(Step::Reopen),
    ];
    proptest::collection::vec(step, 1..30)
}

/// For each sector of the volume the number of the write that its content has. Others read as zeroes.
type Versions = BTreeMap<u64, u64>;

/// A volume, and what was written to it.
struct Scene {
    memory: Arc<Memory>,
    store: Arc<dyn Store>,
    volume: Volume,
    opened: u8,
    now: Versions,
    writes: u64,
    snapshots: Vec<(SnapshotId, Versions)>,
}

impl Scene {
    fn new() -> Self {
        let memory = Arc::new(Memory::default());
        let store: Arc<dyn Store> = Arc::clone(&memory) as _;
        block_on(Volume::create(Arc::clone(&store), &description(SIZE, PAGE_BYTES))).unwrap();
        let volume = open(&store, 1, config()).unwrap();
        let (now, snapshots) = (Versions::new(), Vec::new());
        Self { memory, store, volume, opened: 1, now, writes: 0, snapshots }
    }

    fn take_step(&mut self, step: &Step) {
        match step {
            Step::Write(sectors) => {
                self.writes += 1;
                let mut at = sectors.start;
                while at < sectors.end {
                    // The sectors of a page are one extent, which later steps change in part.
                    let end = sectors.end.min((at / 8 + 1) * 8);
                    let data = [1; 8 * 512];
                    let bytes = usize::try_from((end - at) * SECTOR).unwrap();
                    block_on(self.volume.write(place(at) * SECTOR, &data[..bytes])).unwrap();
                    self.now.extend((at..end).map(|sector| (place(sector), self.writes)));
                    at = end;
                }
            }
            Step::Trim(sectors) => {
                for sector in sectors.clone() {
                    block_on(self.volume.trim(place(sector) * SECTOR, SECTOR)).unwrap();
                    self.now.remove(&place(sector));
                }
            }
            Step::TrimAll => {
                block_on(self.volume.trim(0, SIZE)).unwrap();
                self.now.clear();
            }
            Step::Snapshot if self.snapshots.len() < 4 => {
                let id = take(&self.volume, &format!("{}", self.snapshots.len()));
                self.snapshots.push((id, self.now.clone()));
            }
            Step::RollBack(number) if *number < self.snapshots.len() => {
                let (id, versions) = self.snapshots[*number].clone();
                with_volume(&self.volume, self.volume.roll_back(id)).unwrap();
                self.now = versions;
            }
            Step::Settle => {
                settle(&self.volume, &self.memory);
                // It writes the first sector.
                self.writes += 1;
                self.now.insert(0, self.writes);
            }
            Step::Reopen => {
                with_volume(&self.volume, self.volume.flush()).unwrap();
                self.opened += 1;
                self.volume = open(&self.store, self.opened, config()).unwrap();
            }
            Step::Snapshot | Step::RollBack(_) => {}
        }
    }

    /// Compares each snapshot with all later ones and with the volume, as its writer and as another client have it.
    fn check(&self) {
        let views: Vec<Volume> =
            self.snapshots.iter().map(|(id, _)| self.view(*id).unwrap()).collect();
        for (number, (_, since)) in self.snapshots.iter().enumerate() {
            for (later, (_, now)) in self.snapshots.iter().enumerate() {
                assert_differ(&views[later], &views[number], now, since);
            }
            assert_differ(&self.volume, &views[number], &self.now, since);
            with_volume(&self.volume, self.volume.flush()).unwrap();
            assert_differ(&self.volume, &views[number], &self.now, since);
            let view = block_on(async { self.place().await?.view(config()).await }).unwrap();
            assert_differ(&view, &views[number], &self.now, since);
        }
    }

    async fn place(&self) -> Result<Place, Failure> {
        Place::find(Arc::clone(&self.store), Nonce([99; 16])).await
    }

    fn view(&self, id: SnapshotId) -> Result<Volume, Failure> {
        block_on(async { self.place().await?.view_snapshot(id, config()).await })
    }
}

/// Little memory, so that pages are evicted, and a collector that is always at work.
fn config() -> Config {
    Config {
        map_bytes: 1 << 10,
        object_bytes: 4 << 10,
        max_space_percent: 100,
        ..Config::default()
    }
}

/// The sectors that differ.
type Changes = BTreeMap<u64, Difference>;

fn expected(now: &Versions, since: &Versions) -> Changes {
    let written = now.iter().filter(|(sector, version)| since.get(sector) != Some(version));
    let trimmed = since.keys().filter(|sector| !now.contains_key(sector));
    written
        .map(|(sector, _)| (*sector, Difference::Data))
        .chain(trimmed.map(|sector| (*sector, Difference::Zeroes)))
        .collect()
}

/// Asserts that what was written and trimmed differs. Data that is the same differs only if the collector has copied it.
fn assert_differ(volume: &Volume, since: &Volume, now: &Versions, before: &Versions) {
    let mut found = differences(volume, since);
    for (sector, difference) in expected(now, before) {
        assert_eq!(found.remove(&sector), Some(difference), "sector {sector}");
    }
    for (sector, difference) in found {
        assert_eq!(difference, Difference::Data, "sector {sector} is the same");
        assert!(now.contains_key(&sector), "sector {sector} has no data");
    }
}

/// Collects the differences with calls that have a small limit.
fn differences(now: &Volume, since: &Volume) -> Changes {
    let (mut changes, mut at) = (Changes::new(), 0);
    while at < SIZE {
        let parts = block_on(now.differences(since, at..SIZE, 3)).unwrap();
        assert!((1..=3).contains(&parts.len()));
        let differ = parts.windows(2).all(|pair| pair[0].1 != pair[1].1);
        assert!(differ, "{parts:?} are not merged");
        for (range, difference) in parts {
            assert_eq!(range.start, at);
            at = range.end;
            if difference != Difference::Same {
                let sectors = range.start / SECTOR..range.end / SECTOR;
                changes.extend(sectors.map(|sector| (sector, difference)));
            }
        }
    }
    changes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn the_difference_is_what_was_written_and_trimmed(steps in steps()) {
        let mut scene = Scene::new();
        for step in &steps {
            scene.take_step(step);
        }
        scene.check();
    }
}

#[test]
fn a_difference_reads_few_pages_and_no_data() {
    const PAGES: u64 = 8 << 10;
    let memory = Arc::new(Memory::default());
    let store: Arc<dyn Store> = Arc::clone(&memory) as _;
    let size = PAGES * u64::from(PAGE_BYTES);
    block_on(Volume::create(Arc::clone(&store), &description(size, PAGE_BYTES))).unwrap();
    let volume = open(&store, 1, Config::default()).unwrap();
    with_volume(&volume, async {
        for number in 0..PAGES {
            volume.write(number * u64::from(PAGE_BYTES), &[1; 512]).await?;
        }
        volume.flush().await
    })
    .unwrap();
    settle(&volume, &memory);
    let first = take(&volume, "first");
    let changed = size / 2;
    with_volume(&volume, async { volume.write(changed, &[2; 1024]).await }).unwrap();
    settle(&volume, &memory);
    let second = take(&volume, "second");
    let [now, since] =
        [second, first].map(|id| block_on(volume.view_snapshot(id, Config::default())).unwrap());
    let (reads, log_reads) = (memory.count(), memory.log_reads());
    let found = block_on(now.differences(&since, 0..size, 100)).unwrap();
    let parts = [
        // The write that starts the checkpoint.
        (0..512, Difference::Data),
        (512..changed, Difference::Same),
        (changed..changed + 1024, Difference::Data),
        (changed + 1024..size, Difference::Same),
    ];
    assert_eq!(found, parts);
    // Two pages and the two of the index above them, of each content.
    assert!(memory.count() - reads <= 8, "{} reads", memory.count() - reads);
    assert_eq!(memory.log_reads(), log_reads);
}

#[test]
fn another_size_is_compared_with_zeroes_and_another_volume_is_refused() {
    let memory = Arc::new(Memory::default());
    let store: Arc<dyn Store> = Arc::clone(&memory) as _;
    block_on(Volume::create(Arc::clone(&store), &description(SECTOR, PAGE_BYTES))).unwrap();
    let volume = open(&store, 1, config()).unwrap();
    let id = take(&volume, "small");
    let size = 3 * u64::from(PAGE_BYTES);
    with_volume(&volume, async {
        volume.grow(size).await?;
        volume.write(size - SECTOR, &[1; 512]).await
    })
    .unwrap();
    let since = block_on(volume.view_snapshot(id, config())).unwrap();
    let found = block_on(volume.differences(&since, 0..size, 9)).unwrap();
    let parts = [(0..size - SECTOR, Difference::Same), (size - SECTOR..size, Difference::Data)];
    assert_eq!(found, parts);
    let behind = block_on(since.differences(&volume, 0..size, 9));
    assert!(matches!(behind, Err(Failure::Invalid(_))), "{behind:?}");

    let other: Arc<dyn Store> = Arc::new(Memory::default());
    let mut description = description(size, PAGE_BYTES);
    description.volume.0[0] ^= 1;
    block_on(Volume::create(Arc::clone(&other), &description)).unwrap();
    let other = open(&other, 1, config()).unwrap();
    let refused = block_on(volume.differences(&other, 0..size, 9));
    assert!(matches!(refused, Err(Failure::Invalid(_))), "{refused:?}");
}
