//! Writers to a device, whose blocks say who has written them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use cleat_kernel::DeviceIndex;
use cleat_kernel::sim::SimKernel;

use crate::fixture::eventually;

const BLOCK: u64 = 4096;

/// The number of blocks of each writer.
const BLOCKS: u64 = 64;

/// The number of writers, each with blocks of its own.
const WRITERS: u64 = 2;

/// The number of bytes that are written.
#[allow(clippy::cast_possible_truncation, reason = "half a megabyte")]
pub(super) const LENGTH: u32 = (WRITERS * BLOCKS * BLOCK) as u32;

/// The number of refused writes of each writer that a test waits for.
const TRIED: u64 = 100;

/// The content of a block: the node, the generation of its grant, and the number of the write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp {
    pub(super) node: u64,
    pub(super) generation: u64,
    pub(super) sequence: u64,
}

impl Stamp {
    fn block(self) -> Vec<u8> {
        let Self { node, generation, sequence } = self;
        let words = [node, generation, sequence, !sequence].map(u64::to_le_bytes).concat();
        words.repeat(usize::try_from(BLOCK).unwrap() / words.len())
    }

    /// Reads a block. One that was never written has the generation 0.
    fn of(block: &[u8]) -> Self {
        let word = |n: usize| u64::from_le_bytes(block[n * 8..][..8].try_into().unwrap());
        let stamp = Self { node: word(0), generation: word(1), sequence: word(2) };
        let is_empty = stamp.generation == 0 && block.iter().all(|byte| *byte == 0);
        assert!(is_empty || stamp.block() == block, "a block is torn: {stamp:?}");
        stamp
    }
}

/// Returns the stamps of blocks.
pub(super) fn stamps(bytes: &[u8]) -> Vec<Stamp> {
    bytes.chunks_exact(usize::try_from(BLOCK).unwrap()).map(Stamp::of).collect()
}

/// The last write to one block.
#[derive(Debug, Clone, Copy, Default)]
struct Done {
    sent: u64,
    answered: u64,
}

/// The writers of one generation. Each writes its blocks in turn, and ignores errors.
pub(super) struct Writers {
    writers: Vec<Arc<Writer>>,
    threads: Vec<JoinHandle<()>>,
}

struct Writer {
    device: (SimKernel, DeviceIndex),
    stamp: Stamp,
    /// The first of its blocks.
    first: u64,
    /// It writes every `step`th of them.
    step: u64,
    blocks: Mutex<Vec<Done>>,
    written: AtomicU64,
    refused: AtomicU64,
    /// Whether the next generation has claimed the volume.
    is_superseded: AtomicBool,
    /// The number of writes that began after that and succeeded.
    late: AtomicU64,
    ends: AtomicBool,
}

impl Writers {
    /// Starts writers whose blocks have the node and the generation of `stamp`.
    pub(super) fn start(device: &(SimKernel, DeviceIndex), stamp: Stamp, step: u64) -> Self {
        let writer = |n: u64| {
            Arc::new(Writer {
                device: device.clone(),
                stamp,
                first: n * BLOCKS,
                step,
                blocks: Mutex::new(vec![Done::default(); usize::try_from(BLOCKS).unwrap()]),
                written: AtomicU64::new(0),
                refused: AtomicU64::new(0),
                is_superseded: AtomicBool::new(false),
                late: AtomicU64::new(0),
                ends: AtomicBool::new(false),
            })
        };
        let writers: Vec<Arc<Writer>> = (0..WRITERS).map(writer).collect();
        let threads = writers.iter().cloned();
        let threads = threads.map(|writer| std::thread::spawn(move || writer.run())).collect();
        Self { writers, threads }
    }

    pub(super) async fn have_written_all(&self) {
        self.all("all blocks are written", |writer| &writer.written, BLOCKS).await;
    }

    pub(super) async fn are_refused(&self) {
        self.all("late writes are refused", |writer| &writer.refused, TRIED).await;
    }

    async fn all(&self, what: &str, count: fn(&Writer) -> &AtomicU64, least: u64) {
        let is_enough = |writer: &Arc<Writer>| count(writer).load(Ordering::SeqCst) > least;
        eventually(what, async || self.writers.iter().all(is_enough).then_some(())).await;
    }

    /// Says that the next generation has claimed the volume.
    pub(super) fn superseded(&self) {
        self.writers.iter().for_each(|writer| writer.is_superseded.store(true, Ordering::SeqCst));
    }

    /// Ends the writers, and waits for the answers to their last writes.
    pub(super) async fn stop(&mut self) {
        self.writers.iter().for_each(|writer| writer.ends.store(true, Ordering::SeqCst));
        for thread in self.threads.drain(..) {
            tokio::task::spawn_blocking(move || thread.join().unwrap()).await.unwrap();
        }
    }

    pub(super) fn refused(&self) -> u64 {
        self.sum(|writer| &writer.refused)
    }

    pub(super) fn late(&self) -> u64 {
        self.sum(|writer| &writer.late)
    }

    fn sum(&self, count: fn(&Writer) -> &AtomicU64) -> u64 {
        self.writers.iter().map(|writer| count(writer).load(Ordering::SeqCst)).sum()
    }

    /// Checks that each block has the last answered write or a later one that was sent, or what it had before if no
    /// write was answered.
    pub(super) fn check(&self, now: &[Stamp], before: &[Stamp]) {
        let done = self.writers.iter().flat_map(|writer| {
            let blocks = writer.blocks.lock().unwrap().clone();
            blocks.into_iter().map(|done| (writer.stamp, done))
        });
        for ((now, before), (stamp, done)) in now.iter().zip(before).zip(done) {
            let is_own = Stamp { sequence: now.sequence, ..stamp } == *now;
            let is_own = is_own && (done.answered..=done.sent).contains(&now.sequence);
            assert!(is_own || (done.answered == 0 && now == before), "{now:?} {before:?} {done:?}");
        }
    }
}

impl Writer {
    fn run(&self) {
        let blocks = (0..BLOCKS).step_by(usize::try_from(self.step).unwrap()).cycle();
        for (block, sequence) in blocks.zip(1..) {
            if self.ends.load(Ordering::SeqCst) {
                return;
            }
            let index = usize::try_from(block).unwrap();
            let is_late = self.is_superseded.load(Ordering::SeqCst);
            self.blocks.lock().unwrap()[index].sent = sequence;
            let data = Stamp { sequence, ..self.stamp }.block();
            let (kernel, device) = &self.device;
            if kernel.write(*device, (self.first + block) * BLOCK, &data).is_ok() {
                self.blocks.lock().unwrap()[index].answered = sequence;
                self.written.fetch_add(1, Ordering::SeqCst);
                self.late.fetch_add(u64::from(is_late), Ordering::SeqCst);
            } else {
                self.refused.fetch_add(1, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}
