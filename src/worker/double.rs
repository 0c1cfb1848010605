//! A volume for this room's tests: it holds nothing, and does what a test tells it.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use cleat_backend::{Image, ImageQueue, Waker};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::volume::{BlockSizes, Features};
use cleat_sys::ring::Ring;

#[derive(Default)]
pub(super) struct Double {
    size: AtomicU64,
    /// The size is asked for under this lock.
    pub(super) turn: Mutex<()>,
    /// The snapshot that waits.
    pub(super) waiting: Mutex<Option<u64>>,
    /// What snapshots were answered.
    pub(super) answers: Mutex<Vec<(u64, Result<(), i32>)>>,
}

impl Image for Double {
    fn size(&self) -> u64 {
        self.size.load(Ordering::SeqCst)
    }

    fn block_sizes(&self) -> BlockSizes {
        BlockSizes { minimum: 1, preferred: 1, maximum: 1 }
    }

    fn features(&self) -> Features {
        Features::default()
    }

    fn queue(&self, _: &mut Ring, _: &Waker) -> Result<Box<dyn ImageQueue>> {
        Err(Error::new(ErrorKind::Unsupported, "no data"))
    }

    fn refresh_size(&self) -> Result<u64> {
        let _turn = self.turn.lock().unwrap();
        Ok(self.size())
    }

    fn resize(&self, size: u64) -> Result<()> {
        self.size.store(size, Ordering::SeqCst);
        Ok(())
    }

    fn waiting_snapshot(&self) -> Option<u64> {
        *self.waiting.lock().unwrap()
    }

    fn answer_snapshot(&self, number: u64, result: Result<(), i32>) -> bool {
        let mut waiting = self.waiting.lock().unwrap();
        let waits = *waiting == Some(number);
        if waits && result.is_err() {
            *waiting = None;
        }
        self.answers.lock().unwrap().push((number, result));
        waits
    }
}
