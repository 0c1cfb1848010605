//! Volumes whose extents are not stored as they are, on a store that always works.

use std::sync::Arc;

use crate::clone_tests::Stores;
use crate::codec::{Compression, Damage, Description, Identity, LogObject};
use crate::encryption::KeyFile;
use crate::name::{Name, Position, VolumeId};
use crate::simulation::Random;
use crate::snapshot_tests::{settle, take};
use crate::store::Store;
use crate::tests::{Memory, block_on, byte_at, description, put, with_volume};
use crate::volume::{Check, Config, Depth, Failure, Volume};

const SIZE: u64 = 2 << 20;
const LENGTH: usize = 2 << 20;

/// A volume with small objects, and the content that it must have.
struct Pair {
    memory: Arc<Memory>,
    volume: Volume,
    key: Option<KeyFile>,
    content: Vec<u8>,
    random: Random,
}

fn config() -> Config {
    Config { object_bytes: 256 << 10, max_space_percent: 110, ..Config::default() }
}

impl Pair {
    fn new(description: &Description) -> Self {
        let memory = Arc::new(Memory::default());
        block_on(Volume::create(Arc::clone(&memory) as _, description)).unwrap();
        let key = description.key.map(|_| key_file());
        let volume = open_with(&memory, 10, key.as_ref()).unwrap();
        Self { memory, volume, key, content: vec![0; LENGTH], random: Random(7) }
    }

    fn open(&mut self, nonce: u8) {
        self.volume = open_with(&self.memory, nonce, self.key.as_ref()).unwrap();
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

fn open_with(memory: &Arc<Memory>, nonce: u8, key: Option<&KeyFile>) -> Result<Volume, Failure> {
    let store: Arc<dyn Store> = Arc::clone(memory) as _;
    let place = Stores(&[store]).find(0, nonce, key)?;
    block_on(async { place.open(place.claim_next("node").await?, config()).await })
}

fn key_file() -> KeyFile {
    KeyFile::new(&[7; 32]).unwrap()
}

fn compressed() -> Description {
    Description { compression: Some(Compression::Lz4), ..description(SIZE, 1 << 20) }
}

fn encrypted(plain: Description) -> Description {
    Description { key: Some(key_file().wrap(&plain, &[8; 32])), ..plain }
}

#[test]
fn a_volume_has_its_content_after_collection_and_take_over() {
    let mut lengths = Vec::new();
    let plain = || description(SIZE, 1 << 20);
    let all = [plain(), compressed(), encrypted(plain()), encrypted(compressed())];
    for description in all {
        let mut pair = Pair::new(&description);
        for _ in 0..3 {
            pair.write(60);
            pair.settle();
            pair.check(&pair.volume);
        }
        assert!(pair.volume.status().objects < 180, "nothing was collected");
        lengths.push(pair.log_bytes());
        // The first take-over replays the log, the second one finds a checkpoint of its own.
        for nonce in [20, 21] {
            pair.write(5);
            pair.open(nonce);
            pair.check(&pair.volume);
            pair.settle();
            pair.check(&pair.volume);
        }
    }
    assert!(lengths[1] < lengths[0] * 7 / 10, "{lengths:?} bytes");
    assert!(lengths[3] < lengths[2] * 7 / 10, "{lengths:?} bytes");
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
fn a_clone_has_a_compression_and_a_key_of_its_own() {
    let memories: [Arc<Memory>; 2] = Default::default();
    let all: Vec<Arc<dyn Store>> = memories.iter().map(|one| Arc::clone(one) as _).collect();
    let stores = Stores(&all);
    for (is_compressed, key) in [(true, None), (false, None), (true, Some(key_file()))] {
        memories.iter().for_each(|memory| memory.objects.lock().unwrap().clear());
        let plain = description(SIZE, 1 << 20);
        let parent = if is_compressed { plain } else { compressed() };
        let parent = if key.is_some() { encrypted(parent) } else { parent };
        block_on(Volume::create(Arc::clone(&all[0]), &parent)).unwrap();
        let first = stores.open_with(0, 10, key.as_ref());
        let fill = |volume: &Volume, offset: u64, byte: u8| {
            with_volume(volume, async {
                volume.write(offset, &vec![byte; 256 << 10]).await?;
                volume.flush().await
            })
            .unwrap();
        };
        fill(&first, 0, 1);
        let snapshot = take(&first, "s");
        let compression = is_compressed.then_some(Compression::Lz4);
        stores.clone_with(1, snapshot, compression, key.as_ref()).unwrap();
        fill(&first, 0, 2);
        settle(&first, &memories[0]);
        for nonce in [20, 21] {
            let clone = stores.open_with(1, nonce, key.as_ref());
            fill(&clone, 128 << 10, 3);
            settle(&clone, &memories[1]);
            let mut found = vec![0; 512 << 10];
            block_on(clone.read(0, &mut found)).unwrap();
            let expected = [vec![99; 512], vec![1; (128 << 10) - 512], vec![3; 256 << 10]].concat();
            assert!(found[..384 << 10] == expected);
            assert!(found[384 << 10..].iter().all(|byte| *byte == 0));
        }
        if let Some(key) = &key {
            let keys = [0, 1].map(|at| stores.find(at, 30, Some(key)).unwrap().description().key);
            assert!(keys[0].is_some() && keys[1].is_some() && keys[0] != keys[1]);
            // Without the key file there is no clone, and no data of this one.
            let refused = stores.clone_with(1, snapshot, compression, None);
            assert_eq!(refused, Err(Failure::Locked));
        }
    }
}

#[test]
fn an_encrypted_volume_needs_its_key_file() {
    let plain = description(SIZE, 1 << 20);
    let mut pair = Pair::new(&encrypted(plain.clone()));
    pair.write(5);
    let secret = b"a secret of the file system     ".repeat(16);
    with_volume(&pair.volume, async {
        pair.volume.write(0, &secret).await?;
        pair.volume.flush().await
    })
    .unwrap();
    let stored: Vec<u8> = pair.memory.objects.lock().unwrap().values().flatten().copied().collect();
    assert!(!stored.windows(16).any(|bytes| bytes == &secret[..16]), "the store can read it");
    let open = |key: Option<&KeyFile>| open_with(&pair.memory, 20, key).map(|_| ());
    assert_eq!(open(None), Err(Failure::Locked));
    assert_eq!(open(KeyFile::new(&[8; 32]).as_ref()), Err(Failure::WrongKey));
    // A reader without the key has everything but the data.
    let store: Arc<dyn Store> = Arc::clone(&pair.memory) as _;
    let place = Stores(&[store]).find(0, 30, None).unwrap();
    assert_eq!(place.check_key(), Err(Failure::Locked));
    let view = block_on(place.view(config())).unwrap();
    assert_eq!(block_on(view.read(0, &mut [0; 512])), Err(Failure::Locked));
    assert_eq!(open(pair.key.as_ref()), Ok(()));

    let memory = Arc::new(Memory::default());
    block_on(Volume::create(Arc::clone(&memory) as _, &plain)).unwrap();
    let refused = open_with(&memory, 20, pair.key.as_ref()).map(|_| ());
    assert_eq!(refused, Err(Failure::NotEncrypted));
}

/// The store swaps two objects of the same form: the headers say where they belong, so it also swaps these.
#[test]
fn extents_that_the_store_has_swapped_are_refused() {
    let pair = Pair::new(&encrypted(description(SIZE, 1 << 20)));
    for (offset, byte) in [(0, 1), (4096, 2)] {
        with_volume(&pair.volume, async {
            pair.volume.write(offset, &[byte; 4096]).await?;
            pair.volume.flush().await
        })
        .unwrap();
    }
    let identity = |slot| Identity { volume: VolumeId([1; 16]), epoch: 1, number: slot };
    {
        let mut objects = pair.memory.objects.lock().unwrap();
        let name = |slot| Name::Slot(Position { epoch: 1, slot }).to_string();
        let log = |slot| LogObject::decode(identity(slot), &objects[&name(slot)]).unwrap();
        let (one, other) = (log(1), log(2));
        let data = |slot| objects[&name(slot)][one.encode().len()..].to_vec();
        let (first, second) = (data(1), data(2));
        assert_eq!((first.len(), second.len()), (4096 + 16, 4096 + 16));
        // Each object gets the data of the other one, with the checksum of it.
        for (mut object, from, data) in
            [(one.clone(), &other, second), (other.clone(), &one, first)]
        {
            let checksum = from.records[0].extent().unwrap().checksum;
            object.records[0].extent_mut().unwrap().checksum = checksum;
            let bytes = [object.encode(), data].concat();
            objects.insert(name(object.identity.number), bytes);
        }
    }
    let volume = open_with(&pair.memory, 20, pair.key.as_ref()).unwrap();
    for offset in [0, 4096] {
        let read = block_on(volume.read(offset, &mut [0; 512]));
        let damage = Damage::Authenticity;
        assert!(matches!(read, Err(Failure::Damaged { damage: found, .. }) if found == damage));
    }
}

/// Copies the objects of a directory.
fn copy(from: &std::path::Path, prefix: &str, memory: &Memory) {
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        let name = format!("{prefix}{}", entry.file_name().to_str().unwrap());
        match entry.path() {
            path if path.is_dir() => copy(&path, &format!("{name}/"), memory),
            path => {
                let bytes = std::fs::read(path).unwrap();
                memory.objects.lock().unwrap().insert(name, bytes);
            }
        }
    }
}

/// A volume that a build without features has written, in three epochs and with a snapshot. Its claims are missing,
/// because they name a machine.
#[test]
fn a_volume_of_the_first_build_is_read_and_written() {
    let memory = Arc::new(Memory::default());
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/compatibility/volume-1");
    copy(golden.as_ref(), "", &memory);
    let sectors = [(0, 0x11), (2048, 0x22), (3072, 0x11), (4096, 0), (65536, 0), (66560, 0x33)];
    let check = |volume: &Volume| {
        for (offset, byte) in sectors.into_iter().chain([(524_288, 0x44)]) {
            assert_eq!(block_on(byte_at(volume, offset)), Ok(byte), "at {offset}");
        }
        let mut check = Check::new(Depth::Data);
        assert_eq!(block_on(check.page(volume, 0)), Ok(Vec::new()));
        check
    };
    let volume = open_with(&memory, 20, None).unwrap();
    assert_eq!((volume.size(), volume.epoch()), (1 << 20, 4));
    assert_eq!(check(&volume).wrong_usage(&volume), []);
    with_volume(&volume, async { put(&volume, 524_288, 0x55).await }).unwrap();
    let id = volume.snapshots()[0].id;
    check(&block_on(volume.view_snapshot(id, config())).unwrap());
    settle(&volume, &memory);
    let volume = open_with(&memory, 21, None).unwrap();
    assert_eq!(block_on(byte_at(&volume, 524_288)), Ok(0x55));
    check(&block_on(volume.view_snapshot(id, config())).unwrap());
}
