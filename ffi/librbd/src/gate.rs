//! Counts the operations in flight on an image, so that it is closed only after the last of them.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// The counter of one image. Running operations keep it.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    in_flight: AtomicUsize,
    closing: AtomicBool,
    lock: Mutex<()>,
    empty: Condvar,
}

/// The interval at which a waiting thread checks the counter without a wake-up.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

impl Gate {
    /// Counts a new operation.
    pub(crate) fn enter(&self) {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the end of an operation, which must not use the image any more. Takes the lock only while
    /// a thread waits.
    pub(crate) fn leave(&self) {
        let last = self.in_flight.fetch_sub(1, Ordering::SeqCst) == 1;
        if last && self.closing.load(Ordering::SeqCst) {
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.empty.notify_all();
        }
    }

    /// Returns the number of operations that were started and have not ended.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::SeqCst)
    }

    /// Blocks until no operation is in flight. The caller must ensure that no operation is started any
    /// more.
    pub(crate) fn wait(&self) {
        self.closing.store(true, Ordering::SeqCst);
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        while self.in_flight() > 0 {
            let woken = self.empty.wait_timeout(guard, CHECK_INTERVAL);
            guard = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
