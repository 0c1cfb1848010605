//! A volume without content for the tests of this crate; a test sets how it behaves.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use cleat_backend::{Completer, Image, ImageQueue, Resize, SnapshotQuiesce, Waker};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::volume::{BlockSizes, Features};
use cleat_sys::ring::Ring;

#[derive(Default)]
pub(super) struct FakeImage {
    size: AtomicU64,
    /// A read of the size waits for this lock.
    pub(super) turn: Mutex<()>,
    /// Whether it has the capability to announce snapshots.
    announces_snapshots: bool,
    /// The snapshot that waits.
    pub(super) waiting: Mutex<Option<u64>>,
    /// The answers to snapshots.
    pub(super) answers: Mutex<Vec<(u64, Result<(), i32>)>>,
}

impl FakeImage {
    /// A volume whose backend announces snapshots.
    pub(super) fn with_snapshots() -> Self {
        Self { announces_snapshots: true, ..Self::default() }
    }
}

impl Image for FakeImage {
    fn size(&self) -> u64 {
        self.size.load(Ordering::SeqCst)
    }

    fn block_sizes(&self) -> BlockSizes {
        BlockSizes { minimum: 1, preferred: 1, maximum: 1 }
    }

    fn features(&self) -> Features {
        Features::default()
    }

    fn queue(&self, _: &mut Ring, _: &Completer) -> Result<Box<dyn ImageQueue>> {
        Err(Error::new(ErrorKind::Unsupported, "no data"))
    }

    fn refresh_size(&self) -> Result<u64> {
        let _turn = self.turn.lock().unwrap();
        Ok(self.size())
    }

    fn resize(&self) -> Option<&dyn Resize> {
        Some(self)
    }

    fn snapshot_quiesce(&self) -> Option<&dyn SnapshotQuiesce> {
        self.announces_snapshots.then_some(self as &dyn SnapshotQuiesce)
    }
}

impl Resize for FakeImage {
    fn grow(&self, size: u64) -> Result<()> {
        self.size.store(size, Ordering::SeqCst);
        Ok(())
    }
}

impl SnapshotQuiesce for FakeImage {
    fn watch(&self, _: Waker, _: bool) -> Result<()> {
        Ok(())
    }

    fn pending(&self) -> Option<u64> {
        *self.waiting.lock().unwrap()
    }

    fn answer(&self, number: u64, result: Result<(), i32>) -> bool {
        let mut waiting = self.waiting.lock().unwrap();
        let waits = *waiting == Some(number);
        if waits && result.is_err() {
            *waiting = None;
        }
        self.answers.lock().unwrap().push((number, result));
        waits
    }
}
