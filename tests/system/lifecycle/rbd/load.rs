//! Writers whose blocks contain the number of the write. The content of an image shows the last write of
//! each writer that it has, and whether a write is lost, torn, or out of order.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use cleat_kernel::DeviceIndex;
use cleat_kernel::sim::SimKernel;

use super::MIB;
use test_kit::node::wait_until;

pub(super) const WRITERS: usize = 4;

/// The size of the images that are written.
pub(super) const SIZE: u64 = 32 * MIB;

const LENGTH: u32 = 4096;
const BLOCK: usize = LENGTH as usize;

/// The number of blocks of a writer, which it writes in turn. They are spread over all objects.
const SLOTS: u64 = 64;

/// The number of writes per writer that [`Load::wait_for_more`] waits for.
const MORE: u64 = 20;

/// A running load. Each writer writes one block at a time, and reads every eighth back.
pub(super) struct Load {
    stop: Arc<AtomicBool>,
    progress: Arc<Vec<Progress>>,
    writers: Vec<JoinHandle<std::io::Result<()>>>,
}

/// The numbers of the last write that was started, and of the last that completed.
#[derive(Default)]
struct Progress {
    begun: AtomicU64,
    done: AtomicU64,
}

impl Load {
    pub(super) fn start(kernel: &SimKernel, device: DeviceIndex) -> Self {
        Self::after(kernel, device, [0; WRITERS])
    }

    /// Starts a load that continues the numbers in the image's content.
    pub(super) fn after(kernel: &SimKernel, device: DeviceIndex, held: [u64; WRITERS]) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let of = |held| Progress { begun: AtomicU64::new(held), done: AtomicU64::new(held) };
        let progress: Arc<Vec<Progress>> = Arc::new(held.map(of).into_iter().collect());
        let start = |writer| {
            let (kernel, stop, progress) = (kernel.clone(), stop.clone(), progress.clone());
            std::thread::spawn(move || write(&kernel, device, writer, &stop, &progress[writer]))
        };
        let writers = (0..WRITERS).map(start).collect();
        Self { stop, progress, writers }
    }

    /// Returns the number of each writer's last completed write.
    pub(super) fn done(&self) -> [u64; WRITERS] {
        std::array::from_fn(|writer| self.progress[writer].done.load(Ordering::SeqCst))
    }

    pub(super) fn begun(&self) -> [u64; WRITERS] {
        std::array::from_fn(|writer| self.progress[writer].begun.load(Ordering::SeqCst))
    }

    /// Waits until every writer has completed some more writes.
    pub(super) fn wait_for_more(&self) {
        let before = self.done();
        wait_until("the load continues", || {
            assert!(!self.writers.iter().any(JoinHandle::is_finished), "a writer has ended");
            self.done().iter().zip(before).all(|(now, before)| *now >= before + MORE)
        });
    }

    /// Waits until every block has been written once.
    pub(super) fn wait_until_all_is_written(&self) {
        wait_until("every block has been written", || {
            self.done().iter().all(|done| *done >= SLOTS)
        });
    }

    /// Stops the load, checks that no writer failed, and returns the number of each writer's last write.
    pub(super) fn finish(self) -> [u64; WRITERS] {
        let done = Arc::clone(&self.progress);
        for ended in self.stop() {
            ended.unwrap();
        }
        std::array::from_fn(|writer| done[writer].done.load(Ordering::SeqCst))
    }

    /// Stops the load and returns each writer's result.
    pub(super) fn stop(self) -> Vec<std::io::Result<()>> {
        self.stop.store(true, Ordering::SeqCst);
        self.writers.into_iter().map(|writer| writer.join().unwrap()).collect()
    }
}

fn write(
    kernel: &SimKernel,
    device: DeviceIndex,
    writer: usize,
    stop: &AtomicBool,
    progress: &Progress,
) -> std::io::Result<()> {
    for number in progress.done.load(Ordering::SeqCst) + 1.. {
        if stop.load(Ordering::SeqCst) {
            break;
        }
        let (block, place) = (block(writer, number), place(writer, number % SLOTS));
        progress.begun.store(number, Ordering::SeqCst);
        kernel.write(device, place, &block)?;
        progress.done.store(number, Ordering::SeqCst);
        if number % 8 == 0 {
            let read = kernel.read(device, place, LENGTH)?;
            if read != block {
                let found = format!("writer {writer}'s write {number} reads {:?}", &read[..16]);
                return Err(std::io::Error::other(found));
            }
        }
    }
    Ok(())
}

/// Returns the number of each writer's last write in `content`. Panics if an earlier write is missing
/// or a block has other content.
pub(super) fn held(content: &[u8]) -> [u64; WRITERS] {
    assert_eq!(content.len() as u64, SIZE);
    std::array::from_fn(|writer| {
        let at = |slot: u64| {
            let place = usize::try_from(place(writer, slot)).unwrap();
            &content[place..place + BLOCK]
        };
        let number = |slot| u64::from_le_bytes(at(slot)[..8].try_into().unwrap());
        let last = (0..SLOTS).map(number).max().unwrap();
        for slot in 0..SLOTS {
            // The newest write to this slot that is not newer than the last one.
            let back = (last + SLOTS - slot) % SLOTS;
            let expected = last.saturating_sub(back);
            let expected = if expected == 0 { vec![0; BLOCK] } else { block(writer, expected) };
            assert!(
                at(slot) == expected,
                "writer {writer} at {last}: slot {slot} holds {:?}, not {:?}",
                &at(slot)[..16],
                &expected[..16],
            );
        }
        last
    })
}

/// Checks that each number of `held` lies between `done` and `begun`.
#[track_caller]
pub(super) fn assert_within(held: [u64; WRITERS], done: [u64; WRITERS], begun: [u64; WRITERS]) {
    let fits = |writer: usize| (done[writer]..=begun[writer]).contains(&held[writer]);
    assert!((0..WRITERS).all(fits), "{held:?} is not within {done:?} and {begun:?}");
}

fn place(writer: usize, slot: u64) -> u64 {
    (slot * WRITERS as u64 + writer as u64) * (SIZE / SLOTS / WRITERS as u64)
}

pub(super) fn block(writer: usize, number: u64) -> Vec<u8> {
    let mut block = vec![0; BLOCK];
    for (word, chunk) in block.chunks_exact_mut(8).enumerate() {
        let stamp = if word == 0 { number } else { number ^ (writer as u64) << 56 };
        chunk.copy_from_slice(&stamp.to_le_bytes());
    }
    block
}
