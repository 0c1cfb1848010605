//! A look at the machine that callers share. Looking costs as much for one device as for all, and a
//! hundred unmaps at once would look two hundred times.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use cleat_core::error::Result;

/// The last look. Waiting for the one that is under way takes no turn: who has asked is done when the
/// next one has ended, however many others come meanwhile.
#[derive(Debug)]
pub(super) struct SharedScan<T> {
    state: Mutex<State<T>>,
    ended: Condvar,
}

#[derive(Debug)]
struct State<T> {
    /// Somebody looks.
    busy: bool,
    /// What the last one saw, and when he began.
    seen: Option<(Instant, Arc<T>)>,
}

impl<T> Default for SharedScan<T> {
    fn default() -> Self {
        Self { state: Mutex::new(State { busy: false, seen: None }), ended: Condvar::new() }
    }
}

impl<T> SharedScan<T> {
    /// What `look` sees, or what another caller saw who began to look after this one asked: never
    /// anything older than the question.
    pub(super) fn get(&self, look: impl FnOnce() -> Result<T>) -> Result<Arc<T>> {
        let asked = Instant::now();
        let mut state = self.state();
        loop {
            if let Some((began, seen)) = &state.seen
                && *began >= asked
            {
                return Ok(Arc::clone(seen));
            }
            if !state.busy {
                break;
            }
            state = self.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.busy = true;
        drop(state);
        let turn = Turn(self);
        let began = Instant::now();
        let seen = Arc::new(look()?);
        turn.0.state().seen = Some((began, Arc::clone(&seen)));
        Ok(seen)
    }

    fn state(&self) -> MutexGuard<'_, State<T>> {
        // Whoever panicked with it: what is there is whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Somebody's turn to look, which ends however the look does.
struct Turn<'a, T>(&'a SharedScan<T>);

impl<T> Drop for Turn<'_, T> {
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
    fn nobody_gets_what_was_seen_before_he_asked() {
        let shared = SharedScan::default();
        for expected in 0..3 {
            assert_eq!(*shared.get(|| Ok(expected)).unwrap(), expected);
        }
        assert!(shared.get(|| Err(crate::module_missing())).is_err());
    }

    #[test]
    fn a_look_that_panics_keeps_nobody_waiting() {
        let shared = SharedScan::default();
        let look = || shared.get(|| -> Result<u32> { panic!("on purpose") });
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(look)).is_err());
        assert_eq!(*shared.get(|| Ok(7)).unwrap(), 7);
    }

    #[test]
    fn those_who_wait_together_look_once() {
        const CALLERS: u32 = 32;
        let shared = SharedScan::default();
        let looks = AtomicU32::new(0);
        let look = || {
            looks.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(200));
            Ok(())
        };
        std::thread::scope(|scope| {
            for _ in 0..CALLERS {
                scope.spawn(|| shared.get(look).unwrap());
            }
        });
        // The first, one for those who came during it, and a few for stragglers.
        assert!(looks.into_inner() < CALLERS / 4);
    }
}
