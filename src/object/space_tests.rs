//! What a volume says about the bytes that it puts to its store and takes there.

use std::sync::Arc;

use crate::snapshot_tests::{settle, take};
use crate::store::{Pending, Store};
use crate::tests::{Memory, block_on, create, open, with_volume, yield_once};
use crate::volume::{Config, Failure, Volume, race};

const BLOCK: usize = 4096;
const BLOCKS: u64 = 256;

/// Writes each block that `is_chosen`, in a put of its own for each 16.
fn write(volume: &Volume, byte: u8, is_chosen: impl Fn(u64) -> bool + Send + Sync) {
    with_volume(volume, async {
        for number in (0..BLOCKS).filter(|number| is_chosen(*number)) {
            volume.write(number * BLOCK as u64, &[byte; BLOCK]).await?;
            if number % 16 == 15 {
                volume.flush().await?;
            }
        }
        volume.flush().await
    })
    .unwrap();
}

#[test]
fn the_status_counts_what_is_put_and_what_is_written() {
    let memory = Arc::new(Memory::default());
    let store: Arc<dyn Store> = Arc::clone(&memory) as _;
    create(&store, 8 << 20);
    let before = memory.put_bytes();
    let volume = open(&store, 10, Config { object_bytes: 64 << 10, ..Config::default() }).unwrap();
    write(&volume, 1, |_| true);
    settle(&volume, &memory);
    let status = volume.status();
    // The block that starts the checkpoint has 512 bytes.
    let written = BLOCKS * BLOCK as u64 + 512;
    assert_eq!(status.written_bytes, written);
    assert_eq!(status.put_bytes, memory.put_bytes() - before);
    assert!(status.put_bytes > status.written_bytes, "headers, pages and the checkpoint count");
    assert_eq!((status.live_bytes, status.object_bytes), (written - 512, written));

    // Fifteen blocks of sixteen are replaced. The collector copies the others, which nobody has written.
    for byte in 2..5 {
        write(&volume, byte, |number| number % 16 != 0);
        settle(&volume, &memory);
    }
    let after = volume.status();
    let more = 3 * (BLOCKS * 15 / 16 * BLOCK as u64 + 512);
    assert_eq!(after.written_bytes, written + more);
    assert_eq!(after.put_bytes, memory.put_bytes() - before);
    assert_eq!(after.live_bytes, BLOCKS * BLOCK as u64);
    assert!(after.object_bytes >= after.live_bytes, "{after:?}");
    assert!(after.object_bytes < after.live_bytes * 2, "nothing was collected: {after:?}");

    // The next opener counts from zero, and finds the same space.
    drop(volume);
    let second = open(&store, 11, Config::default()).unwrap();
    let next = second.status();
    assert_eq!((next.written_bytes, next.object_bytes), (0, after.object_bytes));
    assert!(next.put_bytes > 0 && next.put_bytes < 1024, "the claim and the open record");
    let mut buffer = [0; BLOCK];
    block_on(second.read(16 * BLOCK as u64, &mut buffer)).unwrap();
    assert_eq!(buffer, [1; BLOCK]);
}

/// The blocks of a volume of 4 MiB.
const MANY: u64 = 1024;

/// The space from which the collector relocates data of `live` bytes, and that from which it does so without a budget.
fn limits(live: u64) -> (u64, u64) {
    (live / 100 * 150 + (64 << 10), live / 100 * 200 + (128 << 10))
}

/// What the collector may copy at once.
const BUDGET: u64 = 64 << 10;

/// A full volume, in which the collector has a budget.
fn limited() -> (Arc<Memory>, Volume) {
    let memory = Arc::new(Memory::default());
    let store: Arc<dyn Store> = Arc::clone(&memory) as _;
    create(&store, 8 << 20);
    let max_copies = Some(BUDGET);
    let config = Config { object_bytes: 64 << 10, max_copies, ..Config::default() };
    let volume = open(&store, 10, config).unwrap();
    replace(&volume, &memory, |_| true);
    (memory, volume)
}

/// Writes each block whose number, modulo 16, `is_chosen`, in full objects.
fn replace(volume: &Volume, memory: &Memory, is_chosen: impl Fn(u64) -> bool + Send + Sync) {
    with_volume(volume, async {
        for number in (0..MANY).filter(|number| is_chosen(number % 16)) {
            volume.write(number * BLOCK as u64, &[7; BLOCK]).await?;
        }
        volume.flush().await
    })
    .unwrap();
    settle(volume, memory);
}

#[test]
fn the_collector_copies_no_more_than_it_was_granted() {
    let (memory, volume) = limited();
    replace(&volume, &memory, |place| place >= 6);
    let status = volume.status();
    let (limit, urgent) = limits(status.live_bytes);
    assert!((limit + 1..urgent).contains(&status.space_bytes), "{status:?}");
    // The last copy may exceed the budget.
    let (least, most) = (BUDGET, BUDGET + BLOCK as u64);
    assert!((least..most).contains(&status.copied_bytes), "{status:?}");
    let mut grants = 0;
    while volume.status().space_bytes > limits(volume.status().live_bytes).0 {
        assert!(grants < 50, "{:?}", volume.status());
        grants += 1;
        volume.grant_copies(BUDGET);
        settle(&volume, &memory);
        let (copied, granted) = (volume.status().copied_bytes, grants * BUDGET);
        assert!(copied < most + granted, "{copied} bytes after {grants} grants");
    }
    assert!(grants > 3, "{grants}");
    block_on(volume.check_accounting()).unwrap();
}

#[test]
fn copies_do_not_wait_for_a_grant_while_there_is_too_much_garbage() {
    let (memory, volume) = limited();
    let before = memory.log_objects();
    // Each time, what was written last keeps one block of sixteen.
    for first in 1..4 {
        replace(&volume, &memory, |place| place >= first);
    }
    let status = volume.status();
    let (limit, urgent) = limits(status.live_bytes);
    assert!((limit + 1..=urgent).contains(&status.space_bytes), "{status:?}");
    assert!(status.copied_bytes > 2 * BUDGET, "{status:?}");
    let objects = memory.log_objects();
    assert!(objects < 2 * before + 20, "{objects} objects, {before} before: none were deleted");
}

/// Without it, the few blocks that each object keeps would keep its space as long as there is any later snapshot.
#[test]
fn the_space_is_limited_also_if_there_always_is_a_later_snapshot() {
    let memory = Arc::new(Memory::default());
    let store: Arc<dyn Store> = Arc::clone(&memory) as _;
    create(&store, 8 << 20);
    let config = Config { object_bytes: 64 << 10, ..Config::default() };
    let volume = open(&store, 10, config).unwrap();
    replace(&volume, &memory, |_| true);
    let remove = |id| with_volume(&volume, async { volume.delete_snapshot(id).await }).unwrap();
    let mut kept = take(&volume, "0");
    // What a round writes keeps one block of sixteen in the next one.
    for round in 1..16 {
        replace(&volume, &memory, |place| place >= round);
        let next = take(&volume, &round.to_string());
        remove(kept);
        kept = next;
    }
    settle(&volume, &memory);
    let status = volume.status();
    let written: u64 = (1..=16).map(|blocks| blocks * MANY / 16 * BLOCK as u64).sum();
    assert!(written > status.live_bytes * 8);
    // Three times the data and an object; and what the last snapshot needs besides.
    let limit = status.live_bytes * 3 + (64 << 10) + status.live_bytes;
    assert!(status.object_bytes < limit, "{status:?}");
    assert!(status.copied_bytes < written / 2, "{status:?}");
    block_on(volume.check_accounting()).unwrap();

    remove(kept);
    settle(&volume, &memory);
    settle(&volume, &memory);
    let status = volume.status();
    assert!(status.space_bytes <= limits(status.live_bytes).0, "{status:?}");
    let mut buffer = [0; BLOCK];
    for number in 1..MANY {
        block_on(volume.read(number * BLOCK as u64, &mut buffer)).unwrap();
        assert_eq!(buffer, [7; BLOCK], "block {number}");
    }
}

#[test]
fn a_pause_does_not_wait_for_a_grant() {
    let (_, volume) = limited();
    let copied = || volume.status().copied_bytes;
    with_volume(&volume, async {
        for number in (0..MANY).filter(|number| number % 16 >= 6) {
            volume.write(number * BLOCK as u64, &[7; BLOCK]).await?;
        }
        volume.flush().await?;
        soon(async {
            while copied() < BUDGET {
                yield_once().await;
            }
            Ok(())
        })
        .await?;
        // The next copy waits.
        soon(volume.pause()).await?;
        let before = copied();
        volume.resume();
        volume.grant_copies(BUDGET);
        soon(async {
            while copied() == before {
                yield_once().await;
            }
            Ok(())
        })
        .await
    })
    .unwrap();
}

/// Fails if the future waits for something that does not happen.
async fn soon(future: impl Future<Output = Result<(), Failure>> + Send) -> Result<(), Failure> {
    let given_up = async {
        for _ in 0..10_000 {
            yield_once().await;
        }
        Err(Failure::Invalid("it waits"))
    };
    race(vec![Box::pin(future) as Pending<'_, _>, Box::pin(given_up)]).await
}
