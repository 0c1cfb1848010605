//! Tests of the read path: how often the store is read, what is read ahead, and the cache.

use std::collections::HashMap;
use std::future::ready;
use std::sync::{Arc, Mutex};

use crate::cache::{Cache, Key};
use crate::clone_tests::Stores;
use crate::codec::Description;
use crate::encryption::KeyFile;
use crate::name::Nonce;
use crate::store::{Pending, Store};
use crate::tests::{Memory, block_on, create, description, open, with_volume, yield_once};
use crate::volume::{Config, Place, Volume};

const SIZE: u64 = 8 << 20;

/// The content of a sector: its number, and a stamp.
fn sectors(offset: u64, length: usize, stamp: u8) -> Vec<u8> {
    let number = |at: usize| (offset + at as u64) / 512;
    let mut data: Vec<u8> = (0..length).map(|at| number(at).to_le_bytes()[at % 2]).collect();
    data.chunks_mut(512).for_each(|sector| sector[511] = stamp);
    data
}

/// Writes ranges with one flush, and opens the volume again, so that nothing is in memory.
fn written(store: &Arc<dyn Store>, ranges: &[(u64, usize)]) -> Volume {
    create(store, SIZE);
    let volume = open(store, 1, Config::default()).unwrap();
    with_volume(&volume, async {
        for (offset, length) in ranges {
            volume.write(*offset, &sectors(*offset, *length, 1)).await?;
        }
        volume.flush().await
    })
    .unwrap();
    open(store, 2, Config::default()).unwrap()
}

fn read(volume: &Volume, offset: u64, length: usize) -> Vec<u8> {
    let mut data = vec![0xaa; length];
    block_on(volume.read(offset, &mut data)).unwrap();
    data
}

#[test]
fn extents_that_are_near_each_other_are_read_at_once() {
    let memory = Arc::new(Memory::default());
    let store: Arc<dyn Store> = Arc::<Memory>::clone(&memory);
    // 4 KiB each, in the order of the volume, over more than one page of the map.
    let ranges: Vec<(u64, usize)> = (0..512).map(|number| (number * 4096, 4096)).collect();
    let volume = written(&store, &ranges);
    let before = memory.log_reads();
    assert_eq!(read(&volume, 0, 2 << 20), sectors(0, 2 << 20, 1));
    // At most 1 MiB each.
    assert_eq!(memory.log_reads() - before, 2);
    assert_eq!(read(&volume, 512, 4096), sectors(512, 4096, 1));
    assert_eq!(memory.log_reads() - before, 3);
}

#[test]
fn extents_that_are_far_from_each_other_are_read_by_themselves() {
    let memory = Arc::new(Memory::default());
    let store: Arc<dyn Store> = Arc::<Memory>::clone(&memory);
    // In the object, 60 KiB and 128 KiB of other data are between the three.
    let far = 4 << 20;
    let ranges =
        [(0, 4096), (far, 60 << 10), (4096, 4096), (far + (1 << 20), 128 << 10), (8192, 4096)];
    let volume = written(&store, &ranges);
    let before = memory.log_reads();
    assert_eq!(read(&volume, 0, 12 << 10), sectors(0, 12 << 10, 1));
    assert_eq!(memory.log_reads() - before, 2);
}

#[test]
fn an_extent_is_read_once_for_all_its_parts() {
    let memory = Arc::new(Memory::default());
    let store: Arc<dyn Store> = Arc::<Memory>::clone(&memory);
    create(&store, SIZE);
    let volume = open(&store, 1, Config::default()).unwrap();
    with_volume(&volume, async {
        volume.write(0, &sectors(0, 64 << 10, 1)).await?;
        volume.flush().await?;
        for number in 0..16 {
            volume.write(number * 4096, &sectors(number * 4096, 512, 2)).await?;
        }
        volume.flush().await
    })
    .unwrap();
    let volume = open(&store, 2, Config::default()).unwrap();
    let before = memory.log_reads();
    let found = read(&volume, 0, 64 << 10);
    for (number, sector) in found.chunks(512).enumerate() {
        let stamp = if number % 8 == 0 { 2 } else { 1 };
        assert_eq!(sector, sectors(number as u64 * 512, 512, stamp), "sector {number}");
    }
    assert_eq!(memory.log_reads() - before, 2, "one for each object");
}

#[test]
fn what_follows_a_sequential_read_is_read_ahead_within_its_memory() {
    let memory = Arc::new(Memory::default());
    let store: Arc<dyn Store> = Arc::<Memory>::clone(&memory);
    let ranges: Vec<(u64, usize)> = (0..1024).map(|number| (number * 4096, 4096)).collect();
    drop(written(&store, &ranges));
    let read_ahead_bytes = 64 << 10;
    let volume = open(&store, 3, Config { read_ahead_bytes, ..Config::default() }).unwrap();
    with_volume(&volume, async {
        let mut most = 0;
        for number in 0..1024_u64 {
            let offset = number * 4096;
            if number == 512 {
                // What was read ahead of this range is superseded.
                volume.write(offset, &sectors(offset, 64 << 10, 2)).await?;
                volume.flush().await?;
            }
            let mut data = vec![0; 4096];
            volume.read(offset, &mut data).await?;
            let stamp = if (512..528).contains(&number) { 2 } else { 1 };
            assert_eq!(data, sectors(offset, 4096, stamp), "at {offset}");
            most = most.max(volume.status().ahead_bytes);
            yield_once().await;
        }
        assert!((8 << 10..=64 << 10).contains(&most), "{most} bytes");
        Ok(())
    })
    .unwrap();
    // Steps of 8 KiB instead of single extents.
    let reads = memory.log_reads();
    let random = open(&store, 4, Config { read_ahead_bytes: 0, ..Config::default() }).unwrap();
    with_volume(&random, async {
        for number in 0..1024_u64 {
            random.read(number * 4096, &mut [0; 4096]).await?;
        }
        assert_eq!(random.status().ahead_bytes, 0);
        Ok(())
    })
    .unwrap();
    let without = memory.log_reads() - reads;
    assert!(without >= 1024, "{without} reads");
}

/// A cache in memory.
#[derive(Default)]
struct Kept {
    extents: Mutex<HashMap<Key, Vec<u8>>>,
    verified: Mutex<HashMap<Key, Vec<u8>>>,
}

impl Cache for Kept {
    fn get(&self, key: Key) -> Pending<'_, Option<Vec<u8>>> {
        Box::pin(ready(self.extents.lock().unwrap().get(&key).cloned()))
    }

    fn get_at_once(&self, key: Key, take: &mut dyn FnMut(&[u8]) -> bool) -> bool {
        let is_right = |bytes: &Vec<u8>| {
            let is_right = take(bytes);
            if is_right {
                self.verified.lock().unwrap().insert(key, bytes.clone());
            }
            is_right
        };
        self.extents.lock().unwrap().get(&key).is_some_and(is_right)
    }

    fn copy_verified(&self, key: Key, skip: u32, target: &mut [u8]) -> bool {
        let (extents, verified) = (self.extents.lock().unwrap(), self.verified.lock().unwrap());
        let Some(bytes) = extents.get(&key).filter(|bytes| verified.get(&key) == Some(bytes))
        else {
            return false;
        };
        target.copy_from_slice(&bytes[skip as usize..][..target.len()]);
        true
    }

    fn put(&self, key: Key, bytes: &[u8]) {
        self.extents.lock().unwrap().insert(key, bytes.to_vec());
        self.verified.lock().unwrap().insert(key, bytes.to_vec());
    }
}

#[test]
fn parts_of_extents_are_read_from_a_cache() {
    let memory = Arc::new(Memory::default());
    let store: Arc<dyn Store> = Arc::<Memory>::clone(&memory);
    drop(written(&store, &[(0, 64 << 10), (20 << 10, 4096), (81 << 9, 1024)]));
    let kept = Arc::new(Kept::default());
    let cache: Arc<dyn Cache> = Arc::<Kept>::clone(&kept);
    let place = block_on(Place::find(Arc::clone(&store), Nonce([3; 16]))).unwrap();
    let place = place.with_cache(&cache);
    assert_eq!(block_on(place.claim(3, "node")), Ok(true));
    let volume = block_on(place.open(3, Config::default())).unwrap();
    let expected = read(&volume, 0, 64 << 10);
    let at_once = |offset: usize, length: usize| {
        let mut bytes = vec![0; length];
        read_at_once(&volume, offset as u64, &mut bytes).then_some(bytes)
    };
    for is_verified in [true, false] {
        for (offset, length) in
            [(0, 512), (16 << 10, 8192), (40_960, 4096), (512, 64_512), (65_024, 512)]
        {
            let found = at_once(offset, length);
            let is_right = found.is_some_and(|found| found == expected[offset..][..length]);
            assert!(is_right, "{offset} {length}");
            if !is_verified {
                kept.verified.lock().unwrap().clear();
            }
        }
        kept.verified.lock().unwrap().clear();
    }
    kept.extents.lock().unwrap().clear();
    assert_eq!(at_once(0, 512), None);
}

#[test]
fn a_cache_saves_reads_and_is_never_trusted() {
    let memory = Arc::new(Memory::default());
    let store: Arc<dyn Store> = Arc::<Memory>::clone(&memory);
    let ranges: Vec<(u64, usize)> = (0..64).map(|number| (number * 4096, 4096)).collect();
    drop(written(&store, &ranges));
    let kept = Arc::new(Kept::default());
    let cache: Arc<dyn Cache> = Arc::<Kept>::clone(&kept);
    let opened = |nonce: u8| {
        let place = block_on(Place::find(Arc::clone(&store), Nonce([nonce; 16]))).unwrap();
        let place = place.with_cache(&cache);
        assert_eq!(block_on(place.claim(u64::from(nonce), "node")), Ok(true));
        block_on(place.open(nonce.into(), Config::default())).unwrap()
    };
    let reads_of = |volume: &Volume| {
        let before = memory.log_reads();
        assert_eq!(read(volume, 0, 256 << 10), sectors(0, 256 << 10, 1));
        memory.log_reads() - before
    };
    let volume = opened(3);
    assert_eq!(reads_of(&volume), 1);
    assert_eq!(kept.extents.lock().unwrap().len(), 64);
    assert_eq!(reads_of(&volume), 0);
    // The next process uses the same cache.
    let volume = opened(4);
    assert_eq!(reads_of(&volume), 0);
    {
        // Damaged, too short, and missing.
        let mut extents = kept.extents.lock().unwrap();
        let mut keys: Vec<Key> = extents.keys().copied().collect();
        keys.sort_by_key(|key| key.at);
        extents.get_mut(&keys[10]).unwrap()[7] ^= 1;
        extents.get_mut(&keys[20]).unwrap().truncate(100);
        extents.remove(&keys[63]);
    }
    assert_eq!(reads_of(&volume), 2, "the second one is far from the others");
    assert_eq!(reads_of(&volume), 0, "they are in the cache again");
    kept.extents.lock().unwrap().clear();
    assert_eq!(reads_of(&volume), 1);
}

fn read_at_once(volume: &Volume, offset: u64, buffer: &mut [u8]) -> bool {
    volume.look_up_at_once(offset, buffer).is_some_and(|found| {
        volume.prepare(&found);
        volume.copy_at_once(&found, buffer)
    })
}

#[test]
fn a_read_at_once_needs_no_store() {
    for key in [None, Some(KeyFile::new(&[7; 32]).unwrap())] {
        let memory = Arc::new(Memory::default());
        let store: Arc<dyn Store> = Arc::<Memory>::clone(&memory);
        let plain = description(4 << 20, 1 << 20);
        let wrapped = key.as_ref().map(|file| file.wrap(&plain, &[8; 32]));
        block_on(Volume::create(Arc::clone(&store), &Description { key: wrapped, ..plain }))
            .unwrap();
        let cache: Arc<dyn Cache> = Arc::<Kept>::default();
        let place = block_on(Place::find_clone(
            Arc::clone(&store),
            Nonce([3; 16]),
            &Stores(&[]),
            key.as_ref(),
        ));
        let place = place.unwrap().with_cache(&cache);
        assert_eq!(block_on(place.claim(3, "node")), Ok(true));
        let volume = block_on(place.open(3, Config::default())).unwrap();
        with_volume(&volume, async { volume.write(8192, &[5; 4096]).await }).unwrap();
        let (mut block, mut none) = ([1; 4096], [1; 512]);
        let at_once = |offset: u64, buffer: &mut [u8]| read_at_once(&volume, offset, buffer);
        assert!(at_once(8192, &mut block) && at_once(0, &mut none), "the tail, and no data");
        assert_eq!((block, none), ([5; 4096], [0; 512]));
        with_volume(&volume, async {
            volume.flush().await?;
            while volume.status().tail_bytes > 0 {
                yield_once().await;
            }
            Ok(())
        })
        .unwrap();
        let before = memory.log_reads();
        assert!(!at_once(8192, &mut block), "it is in the store only");
        assert!(!at_once((1 << 20) - 512, &mut [0; 1024]), "two pages");
        assert!(!at_once(4 << 20, &mut none) && !at_once(7, &mut none), "no such ranges");
        assert_eq!(memory.log_reads(), before);
        block_on(volume.read(8192, &mut block)).unwrap();
        let read = memory.log_reads();
        // A part of the extent, with zeroes before it.
        let mut both = [1; 4096];
        assert!(at_once(6144, &mut both));
        assert_eq!((&both[..2048], &both[2048..]), (&[0; 2048][..], &[5; 2048][..]));
        assert_eq!(memory.log_reads(), read);
    }
}
