//! Memory that outlives a simulated process: its writes can fail, and the process can be killed within one of them.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use super::random::Random;
use crate::tail_memory::Memory;

/// The bytes of the memory: records wrap around, and it is full at times.
const BYTES: usize = 40 << 10;

/// Whether a process lives. One that was killed within a step does nothing more in the same step.
#[derive(Clone, Default)]
pub(super) struct Life(Arc<AtomicBool>);

impl Life {
    pub(super) fn is_over(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    fn end(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

struct Content {
    bytes: Vec<u8>,
    random: Random,
    life: Life,
    /// The newest epoch of a process that has opened the volume with this memory.
    epoch: Option<u64>,
    /// Of 10,000 writes: how many fail, and how many the process does not survive.
    rates: [u64; 2],
}

/// The memory of one mapping.
pub(super) struct Ram(Mutex<Content>);

impl Ram {
    pub(super) fn new(mut random: Random) -> Self {
        let rates = [random.choose(&[0, 0, 100]), random.choose(&[0, 5, 50])];
        let bytes = vec![0; BYTES];
        Self(Mutex::new(Content { bytes, random, life: Life::default(), epoch: None, rates }))
    }

    /// Gives the memory to another process.
    pub(super) fn give(&self, life: &Life) {
        self.lock().life = life.clone();
    }

    /// Replaces the epoch of the last process.
    pub(super) fn replace_epoch(&self, epoch: u64) -> Option<u64> {
        self.lock().epoch.replace(epoch)
    }

    fn lock(&self) -> MutexGuard<'_, Content> {
        self.0.lock().unwrap()
    }
}

impl Memory for Ram {
    fn size(&self) -> u64 {
        BYTES as u64
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let at = usize::try_from(offset).unwrap();
        buffer.copy_from_slice(&self.lock().bytes[at..at + buffer.len()]);
        Ok(())
    }

    fn write_at(&self, offset: u64, parts: [&[u8]; 2]) -> io::Result<()> {
        let mut content = self.lock();
        if content.life.is_over() {
            return Ok(());
        }
        let [failures, kills] = content.rates;
        let dice = content.random.below(10_000);
        let all = parts.concat();
        let mut length = all.len();
        if dice < failures && !parts[1].is_empty() {
            return Err(io::Error::from(io::ErrorKind::StorageFull));
        }
        if dice < failures + kills {
            // 64 bytes are written as a whole.
            length = content.random.index(length / 64 + 1) * 64;
            content.life.end();
        }
        let at = usize::try_from(offset).unwrap();
        content.bytes[at..at + length].copy_from_slice(&all[..length]);
        Ok(())
    }
}
