//! Stops a thread between two steps of its work, and waits until the current step has ended.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use cleat_core::clock::{Clock, SystemClock};

/// The state of the thread. Both sides share it.
#[derive(Debug, Default)]
pub(crate) struct Pause {
    state: Mutex<PauseState>,
    step_ended: Condvar,
}

#[derive(Debug, Default)]
struct PauseState {
    stopped: bool,
    in_step: bool,
}

impl Pause {
    /// Prevents further steps and waits until the current one has ended, at most until `deadline`. Returns
    /// whether it has ended.
    pub(crate) fn stop(&self, deadline: Instant) -> bool {
        let mut state = self.lock();
        state.stopped = true;
        while state.in_step {
            let left = deadline.saturating_duration_since(SystemClock.now());
            if left.is_zero() {
                return false;
            }
            let waited = self.step_ended.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Allows steps again.
    pub(crate) fn resume(&self) {
        self.lock().stopped = false;
    }

    /// Runs `work`, unless the thread is stopped. Returns whether it ran.
    pub(crate) fn step(&self, work: impl FnOnce()) -> bool {
        let mut state = self.lock();
        if state.stopped {
            return false;
        }
        state.in_step = true;
        drop(state);
        let _step = Step(self);
        work();
        true
    }

    fn lock(&self) -> MutexGuard<'_, PauseState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A step that runs. It ends when this value is dropped, also by a panic.
struct Step<'a>(&'a Pause);

impl Drop for Step<'_> {
    fn drop(&mut self) {
        self.0.lock().in_step = false;
        self.0.step_ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};
    use std::thread;
    use std::time::Duration;

    use super::*;

    fn near_deadline() -> Instant {
        SystemClock.now() + Duration::from_millis(20)
    }

    #[test]
    fn stop_waits_for_the_current_step_and_prevents_others() {
        let pause = Arc::new(Pause::default());
        let (release, released) = mpsc::channel::<()>();
        let (begin, began) = mpsc::channel();
        let worker = thread::spawn({
            let pause = Arc::clone(&pause);
            move || {
                pause.step(|| {
                    begin.send(()).unwrap();
                    let _ = released.recv();
                });
            }
        });
        began.recv().unwrap();
        assert!(!pause.stop(near_deadline()), "the step has not ended");
        drop(release);
        assert!(pause.stop(SystemClock.now() + Duration::from_secs(60)));
        worker.join().unwrap();
        assert!(!pause.step(|| panic!("the work is stopped")));
        pause.resume();
        let mut ran = false;
        assert!(pause.step(|| ran = true) && ran, "the work continues");
    }

    #[test]
    fn a_step_that_panics_has_ended() {
        let pause = Arc::new(Pause::default());
        let worker = thread::spawn({
            let pause = Arc::clone(&pause);
            move || pause.step(|| panic!("a panic of this test"))
        });
        worker.join().unwrap_err();
        assert!(pause.stop(near_deadline()));
    }
}
