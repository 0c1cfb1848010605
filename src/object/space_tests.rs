//! What a volume says about the bytes that it puts to its store and takes there.

use std::sync::Arc;

use crate::snapshot_tests::settle;
use crate::store::Store;
use crate::tests::{Memory, block_on, create, open, with_volume};
use crate::volume::{Config, Volume};

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
