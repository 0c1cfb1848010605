//! A scan of the machine that concurrent callers share. A scan for one device costs as much as a scan for
//! all devices, so a hundred unmaps at the same time must not make a hundred scans each.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::Result;

/// The result of the last scan. A caller that finds a scan in progress waits for at most that scan and
/// the next one, however many other callers arrive.
#[derive(Debug)]
pub(super) struct SharedScan<T> {
    state: Mutex<State<T>>,
    ended: Condvar,
}

#[derive(Debug)]
struct State<T> {
    /// A scan is in progress.
    busy: bool,
    /// The result of the last scan, and when that scan began.
    last: Option<(Instant, Arc<T>)>,
}

impl<T> Default for SharedScan<T> {
    fn default() -> Self {
        Self { state: Mutex::new(State { busy: false, last: None }), ended: Condvar::new() }
    }
}

impl<T> SharedScan<T> {
    /// Returns the result of `scan`, or of another caller's scan that began after this call: never a
    /// result that is older than the call.
    ///
    /// # Errors
    /// Returns the errors of `scan`. They are not shared.
    pub(super) fn get(&self, scan: impl FnOnce() -> Result<T>) -> Result<Arc<T>> {
        let called = SystemClock.now();
        let mut state = self.state();
        loop {
            if let Some((began, result)) = &state.last
                && *began >= called
            {
                return Ok(Arc::clone(result));
            }
            if !state.busy {
                break;
            }
            state = self.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.busy = true;
        drop(state);
        let running = Running(self);
        let began = SystemClock.now();
        let result = Arc::new(scan()?);
        running.0.state().last = Some((began, Arc::clone(&result)));
        Ok(result)
    }

    fn state(&self) -> MutexGuard<'_, State<T>> {
        // Every change under the lock is complete, so the state is valid after a panic, too.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A scan in progress. It ends when this value is dropped, also after an error or a panic.
struct Running<'a, T>(&'a SharedScan<T>);

impl<T> Drop for Running<'_, T> {
    fn drop(&mut self) {
        self.0.state().busy = false;
        self.0.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_result_is_never_older_than_the_call() {
        let shared = SharedScan::default();
        for expected in 0..3 {
            assert_eq!(*shared.get(|| Ok(expected)).unwrap(), expected);
        }
        assert!(shared.get(|| Err(crate::module_missing())).is_err());
    }

    #[test]
    fn a_scan_that_panics_blocks_no_caller() {
        let shared = SharedScan::default();
        let scan = || shared.get(|| -> Result<u32> { panic!("on purpose") });
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(scan)).is_err());
        assert_eq!(*shared.get(|| Ok(7)).unwrap(), 7);
    }

    #[test]
    fn callers_that_wait_share_one_scan() {
        const CALLERS: u32 = 32;
        let shared = SharedScan::default();
        let scans = AtomicU32::new(0);
        let scan = || {
            scans.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(200));
            Ok(())
        };
        std::thread::scope(|scope| {
            for _ in 0..CALLERS {
                scope.spawn(|| shared.get(scan).unwrap());
            }
        });
        // One for the first caller, one for those that came during it, and a few for late threads.
        assert!(scans.into_inner() < CALLERS / 4);
    }
}
