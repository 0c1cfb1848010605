//! Counts the operations in flight on an image, so that it is not closed under one.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// One an image; outlives it where operations do.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    in_flight: AtomicUsize,
    closing: AtomicBool,
    lock: Mutex<()>,
    empty: Condvar,
}

/// How often a wait looks by itself.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

impl Gate {
    /// An operation begins.
    pub(crate) fn enter(&self) {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
    }

    /// An operation has ended; nothing of it touches the image any more. Locks only while somebody
    /// waits.
    pub(crate) fn leave(&self) {
        let last = self.in_flight.fetch_sub(1, Ordering::SeqCst) == 1;
        if last && self.closing.load(Ordering::SeqCst) {
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.empty.notify_all();
        }
    }

    /// Operations that have begun and not ended.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::SeqCst)
    }

    /// Waits until no operation is in flight; none begins any more.
    pub(crate) fn wait(&self) {
        self.closing.store(true, Ordering::SeqCst);
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        while self.in_flight() > 0 {
            let woken = self.empty.wait_timeout(guard, LOOK_AGAIN);
            guard = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
