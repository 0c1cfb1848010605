//! Work on an open image beside its requests, on one thread: it follows the size of the image, and it
//! checks that the claim is still the one that this process wrote.
//!
//! Both tasks only read. The thread can be stopped between two steps ([`Pause`]), so that no check of the
//! claim runs while a handover releases it.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};

use crate::claim;
use crate::shared::Shared;

/// How often the claim is checked.
const CLAIM_CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// The name of the thread, and of the task where it could not be stopped.
pub(crate) const THREAD: &str = "rbd-background";

/// The thread, and the watch that reports changes of the image to it.
pub(crate) struct Background {
    watch: librbd::Watch,
    thread: thread::JoinHandle<()>,
}

impl Background {
    /// Starts the thread for the image `name`.
    ///
    /// # Errors
    /// Returns `Unavailable` if the image cannot be watched, and the operating system's error if no thread
    /// can be started.
    pub(crate) fn start(
        image: &Arc<librbd::Image>,
        name: &str,
        shared: &Arc<Shared>,
    ) -> Result<Self> {
        // librbd's callback must not call librbd. One entry in the channel stands for all changes so far.
        let (sender, changes) = mpsc::sync_channel::<()>(1);
        let watch = image.watch(move || _ = sender.try_send(())).map_err(|error| {
            let message = format!("cannot watch the image {name} for changes");
            Error::new(ErrorKind::Unavailable, message).with_source(error)
        })?;
        let (image, shared) = (Arc::clone(image), Arc::clone(shared));
        let tasks = Tasks { image, name: name.to_owned(), shared, failing: false };
        let thread = thread::Builder::new()
            .name(THREAD.to_owned())
            .spawn(move || tasks.run(&changes))
            .map_err(|e| Error::from_io("cannot start the thread that watches the image", e))?;
        Ok(Self { watch, thread })
    }

    /// Ends the thread. Blocks until the cluster has answered the call that the thread is making.
    pub(crate) fn end(self) {
        drop(self.watch);
        // A panic of the thread is its end, too.
        let _ = self.thread.join();
    }
}

/// The work of the thread.
struct Tasks {
    image: Arc<librbd::Image>,
    name: String,
    shared: Arc<Shared>,
    /// Whether the last check of the claim failed.
    failing: bool,
}

impl Tasks {
    /// Runs until the watch is dropped, which closes `changes`.
    fn run(mut self, changes: &Receiver<()>) {
        let shared = Arc::clone(&self.shared);
        let mut next_check = SystemClock.now() + CLAIM_CHECK_INTERVAL;
        loop {
            let left = next_check.saturating_duration_since(SystemClock.now());
            match changes.recv_timeout(left) {
                Ok(()) => shared.pause.step(|| self.follow_size()),
                Err(RecvTimeoutError::Timeout) => {
                    shared.pause.step(|| self.check_claim());
                    next_check = SystemClock.now() + CLAIM_CHECK_INTERVAL;
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn follow_size(&mut self) {
        match self.image.size() {
            Ok(size) => self.shared.set_size(size),
            Err(error) => {
                tracing::warn!(image = %self.name, %error, "cannot read the new size");
                return;
            }
        }
        self.shared.wake();
    }

    /// Compares the claim in the image with the one that this process wrote. A client that takes the image
    /// over has the cluster blocklist this one first, and the cluster then refuses the read. The comparison
    /// detects only a client that changes lock and claim without that.
    fn check_claim(&mut self) {
        let Some(own) = self.shared.claim().clone() else { return };
        let lost = match claim::of(&self.image, &self.name) {
            Ok(now) => {
                self.failing = false;
                now.is_some_and(|now| !now.is_same(&own))
            }
            Err(error) => {
                // Logged once: a cluster that is unreachable for hours must not fill the log.
                if !std::mem::replace(&mut self.failing, true) {
                    let error = error.report();
                    tracing::warn!(image = %self.name, %error, "cannot check the claim");
                }
                error.kind() == ErrorKind::Fenced
            }
        };
        if lost {
            self.shared.set_fenced();
            self.shared.wake();
        }
    }
}

/// Stops the thread between two steps.
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

    /// Runs `work`, unless the thread is stopped. A skipped step is not repeated.
    fn step(&self, work: impl FnOnce()) {
        let mut state = self.lock();
        if state.stopped {
            return;
        }
        state.in_step = true;
        drop(state);
        work();
        self.lock().in_step = false;
        self.step_ended.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, PauseState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
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
        let mut ran = false;
        pause.step(|| ran = true);
        assert!(!ran, "the work is stopped");
        pause.resume();
        pause.step(|| ran = true);
        assert!(ran, "the work continues");
    }
}
