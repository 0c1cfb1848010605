//! Snapshots on a store that always works.

use std::sync::Arc;

use crate::name::SnapshotId;
use crate::rules::{Rule, without};
use crate::store::Store;
use crate::tests::{Memory, block_on, byte_at, create, open, put, with_volume, yield_once};
use crate::volume::{Config, Failure, Volume};

/// Takes a snapshot, with the work of the volume beside it.
pub(crate) fn take(volume: &Volume, name: &str) -> SnapshotId {
    with_volume(volume, async { volume.take_snapshot(name, 7).await }).unwrap()
}

/// Lets the work in the background write a checkpoint and delete what it makes superfluous.
pub(crate) fn settle(volume: &Volume, memory: &Memory) {
    with_volume(volume, async {
        let (before, mut still) = (volume.status().checkpoints, 0);
        volume.request_checkpoint();
        put(volume, 0, 99).await?;
        let mut last = memory.count();
        while volume.status().checkpoints == before || still < 100 {
            yield_once().await;
            let now = memory.count();
            still = if now == last { still + 1 } else { 0 };
            last = now;
        }
        Ok(())
    })
    .unwrap();
}

/// The number of objects of each kind: slots, pages, checkpoints.
fn objects(memory: &Memory) -> [usize; 3] {
    let objects = memory.objects.lock().unwrap();
    ["log/", "page/", "ckpt/"].map(|kind| objects.keys().filter(|n| n.starts_with(kind)).count())
}

#[test]
fn a_snapshot_is_one_request_for_any_number_of_extents() {
    for extents in [1, 5_000] {
        let memory = Arc::new(Memory::default());
        let store: Arc<dyn Store> = Arc::clone(&memory) as _;
        create(&store, 64 << 20);
        let volume = open(&store, 10, Config::default()).unwrap();
        with_volume(&volume, async {
            for number in 0..extents {
                volume.write(number * 8192, &[1; 512]).await?;
            }
            volume.flush().await?;
            while volume.status().tail_bytes > 0 {
                yield_once().await;
            }
            Ok(())
        })
        .unwrap();
        let before = memory.count();
        take(&volume, "a");
        assert_eq!(memory.count() - before, 1, "with {extents} extents");
    }
}

#[test]
fn the_space_of_a_snapshot_is_kept_until_it_is_deleted() {
    let memory = Arc::new(Memory::default());
    let store: Arc<dyn Store> = Arc::clone(&memory) as _;
    create(&store, 8 << 20);
    let volume = open(&store, 10, Config { object_bytes: 64 << 10, ..Config::default() }).unwrap();
    let fill = |byte: u8| {
        with_volume(&volume, async {
            for number in 0..8_u64 {
                volume.write(number << 20, &vec![byte; 64 << 10]).await?;
            }
            volume.flush().await
        })
        .unwrap();
        settle(&volume, &memory);
    };
    fill(1);
    let alone = objects(&memory);
    let first = take(&volume, "first");
    fill(2);
    let second = take(&volume, "second");
    fill(3);
    fill(4);
    let both = objects(&memory);
    for at in 0..3 {
        assert!(both[at] > alone[at], "{both:?} objects with two snapshots, {alone:?} without");
    }
    for (id, byte) in [(first, 1), (second, 2)] {
        let view = block_on(volume.view_snapshot(id, Config::default())).unwrap();
        assert_eq!(block_on(byte_at(&view, 1 << 20)), Ok(byte));
    }
    for id in [first, second] {
        with_volume(&volume, async { volume.delete_snapshot(id).await }).unwrap();
    }
    // The checkpoint that covers the deletions has its base record; the next one has a sweep.
    settle(&volume, &memory);
    settle(&volume, &memory);
    let left = objects(&memory);
    for at in 0..3 {
        assert!(left[at] <= alone[at] + 1, "{left:?} objects are left, {alone:?} were at first");
    }
    assert_eq!(with_volume(&volume, async { byte_at(&volume, 1 << 20).await }), Ok(4));
    let gone = with_volume(&volume, async { volume.delete_snapshot(first).await });
    assert_eq!(gone, Err(Failure::NoSnapshot));
}

#[test]
fn a_roll_back_restores_content_and_size_also_after_a_crash() {
    let store: Arc<dyn Store> = Arc::new(Memory::default());
    create(&store, 1 << 20);
    let volume = open(&store, 10, Config::default()).unwrap();
    with_volume(&volume, async { put(&volume, 0, 1).await }).unwrap();
    let id = take(&volume, "before");
    with_volume(&volume, async {
        volume.grow(2 << 20).await?;
        put(&volume, 0, 2).await?;
        put(&volume, 1 << 20, 3).await
    })
    .unwrap();
    let refused = with_volume(&volume, async { volume.take_snapshot("before", 0).await });
    assert!(matches!(refused, Err(Failure::Invalid(_))), "{refused:?}");
    let later = take(&volume, "after");
    with_volume(&volume, async { volume.roll_back(id).await }).unwrap();
    let is_back = |volume: &Volume| {
        assert_eq!(volume.size(), 1 << 20);
        assert_eq!(with_volume(volume, async { byte_at(volume, 0).await }), Ok(1));
    };
    is_back(&volume);
    let volume = open(&store, 11, Config::default()).unwrap();
    is_back(&volume);
    with_volume(&volume, async { volume.roll_back(later).await }).unwrap();
    assert_eq!(volume.size(), 2 << 20);
    assert_eq!(with_volume(&volume, async { byte_at(&volume, 1 << 20).await }), Ok(3));
    let names: Vec<_> = volume.snapshots().into_iter().map(|s| (s.name, s.size >> 20)).collect();
    assert_eq!(names, [("before".to_owned(), 1), ("after".to_owned(), 2)]);
}

#[test]
fn a_snapshot_after_a_roll_back_does_not_need_the_other_snapshot() {
    let read_after_deletion = |rule| {
        without(rule, || {
            let memory = Arc::new(Memory::default());
            let store: Arc<dyn Store> = Arc::clone(&memory) as _;
            create(&store, 1 << 20);
            let volume = open(&store, 10, Config::default()).unwrap();
            let write = |byte| {
                with_volume(&volume, async { put(&volume, 512, byte).await }).unwrap();
                settle(&volume, &memory);
            };
            write(1);
            let first = take(&volume, "first");
            write(2);
            with_volume(&volume, async { volume.roll_back(first).await }).unwrap();
            let second = take(&volume, "second");
            with_volume(&volume, async { volume.delete_snapshot(first).await }).unwrap();
            settle(&volume, &memory);
            settle(&volume, &memory);
            let view = block_on(volume.view_snapshot(second, Config::default()))?;
            block_on(byte_at(&view, 512))
        })
    };
    assert_eq!(read_after_deletion(None), Ok(1));
    assert!(read_after_deletion(Some(Rule::AfterRollBack)).is_err());
}
