//! Volumes whose extents are not stored as they are, on a store that always works.

use std::sync::Arc;

use crate::clone_tests::Stores;
use crate::codec::{Compression, Damage, Description};
use crate::simulation::Random;
use crate::snapshot_tests::{settle, take};
use crate::store::Store;
use crate::tests::{Memory, block_on, description, open, with_volume};
use crate::volume::{Check, Config, Depth, Failure, Volume};

const SIZE: u64 = 2 << 20;

/// A volume with small objects, and the content that it must have.
struct Pair {
    memory: Arc<Memory>,
    volume: Volume,
    content: Vec<u8>,
    random: Random,
}

fn config() -> Config {
    Config { object_bytes: 256 << 10, max_space_percent: 110, ..Config::default() }
}

impl Pair {
    fn new(description: &Description) -> Self {
        let memory = Arc::new(Memory::default());
        let store: Arc<dyn Store> = Arc::clone(&memory) as _;
        block_on(Volume::create(Arc::clone(&store), description)).unwrap();
        let volume = open(&store, 10, config()).unwrap();
        Self { memory, volume, content: vec![0; SIZE as usize], random: Random(7) }
    }

    /// Writes random ranges: of one byte, of bytes that repeat at times, and of noise.
    fn write(&mut self, count: usize) {
        for number in 0..count {
            let length = 512 * (1 + self.random.index(if number % 8 == 0 { 250 } else { 8 }));
            let at = 512 * self.random.index((self.content.len() - length) / 512 + 1);
            let kind = self.random.below(3);
            let byte = u8::try_from(self.random.below(256)).unwrap();
            let data: Vec<u8> = (0..length)
                .map(|at| match kind {
                    0 => byte,
                    1 if at % 64 < 48 => byte,
                    _ => u8::try_from(self.random.below(256)).unwrap(),
                })
                .collect();
            self.content[at..at + length].copy_from_slice(&data);
            with_volume(&self.volume, async {
                self.volume.write(at as u64, &data).await?;
                self.volume.flush().await
            })
            .unwrap();
        }
    }

    /// Lets the collector work. The first sector has another content then.
    fn settle(&mut self) {
        settle(&self.volume, &self.memory);
        self.content[..512].fill(99);
    }

    fn check(&self, volume: &Volume) {
        let mut found = vec![0; self.content.len()];
        block_on(volume.read(0, &mut found)).unwrap();
        assert!(found == self.content);
        let mut check = Check::new(Depth::Data);
        for number in 0..volume.map_pages() {
            assert_eq!(block_on(check.page(volume, number)), Ok(Vec::new()));
        }
        assert_eq!(check.wrong_usage(volume), []);
    }

    fn log_bytes(&self) -> usize {
        let objects = self.memory.objects.lock().unwrap();
        let slots = objects.iter().filter(|(name, _)| name.starts_with("log/"));
        slots.map(|(_, bytes)| bytes.len()).sum()
    }
}

fn compressed() -> Description {
    Description { compression: Some(Compression::Lz4), ..description(SIZE, 1 << 20) }
}

#[test]
fn a_volume_has_its_content_after_collection_and_take_over() {
    let mut lengths = Vec::new();
    for description in [description(SIZE, 1 << 20), compressed()] {
        let mut pair = Pair::new(&description);
        for _ in 0..3 {
            pair.write(60);
            pair.settle();
            pair.check(&pair.volume);
        }
        assert!(pair.volume.status().objects < 180, "nothing was collected");
        lengths.push(pair.log_bytes());
        let store: Arc<dyn Store> = Arc::clone(&pair.memory) as _;
        // The first take-over replays the log, the second one finds a checkpoint of its own.
        for nonce in [20, 21] {
            pair.write(5);
            pair.volume = open(&store, nonce, config()).unwrap();
            pair.check(&pair.volume);
            pair.settle();
            pair.check(&pair.volume);
        }
    }
    assert!(lengths[1] < lengths[0] * 7 / 10, "{lengths:?} bytes");
}

#[test]
fn damage_is_found_in_the_stored_bytes() {
    let mut pair = Pair::new(&compressed());
    pair.write(10);
    pair.settle();
    {
        let mut objects = pair.memory.objects.lock().unwrap();
        let slots = objects.iter_mut().filter(|(name, _)| name.starts_with("log/"));
        let longest = slots.map(|(_, bytes)| bytes).max_by_key(|bytes| bytes.len()).unwrap();
        *longest.last_mut().unwrap() ^= 1;
    }
    let mut found = vec![0; pair.content.len()];
    let read = block_on(pair.volume.read(0, &mut found));
    assert!(matches!(read, Err(Failure::Damaged { damage: Damage::Data, .. })), "{read:?}");
    let mut check = Check::new(Depth::Data);
    let defects = (0..2).flat_map(|number| block_on(check.page(&pair.volume, number)).unwrap());
    assert!(defects.count() > 0);
}

#[test]
fn a_clone_has_a_compression_of_its_own() {
    let memories: [Arc<Memory>; 2] = Default::default();
    let all: Vec<Arc<dyn Store>> = memories.iter().map(|one| Arc::clone(one) as _).collect();
    let stores = Stores(&all);
    for compression in [None, Some(Compression::Lz4)] {
        memories.iter().for_each(|memory| memory.objects.lock().unwrap().clear());
        let other = if compression.is_none() { Some(Compression::Lz4) } else { None };
        let parent = Description { compression: other, ..description(SIZE, 1 << 20) };
        block_on(Volume::create(Arc::clone(&all[0]), &parent)).unwrap();
        let first = open(&all[0], 10, Config::default()).unwrap();
        let fill = |volume: &Volume, offset: u64, byte: u8| {
            with_volume(volume, async {
                volume.write(offset, &vec![byte; 256 << 10]).await?;
                volume.flush().await
            })
            .unwrap();
        };
        fill(&first, 0, 1);
        let snapshot = take(&first, "s");
        stores.clone_with(1, snapshot, compression).unwrap();
        fill(&first, 0, 2);
        settle(&first, &memories[0]);
        for nonce in [20, 21] {
            let clone = stores.open(1, nonce);
            fill(&clone, 128 << 10, 3);
            settle(&clone, &memories[1]);
            let mut found = vec![0; 512 << 10];
            block_on(clone.read(0, &mut found)).unwrap();
            let expected = [vec![99; 512], vec![1; (128 << 10) - 512], vec![3; 256 << 10]].concat();
            assert!(found[..384 << 10] == expected && found[384 << 10..] == [0; 128 << 10]);
        }
    }
}
