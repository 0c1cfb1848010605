//! Work on an open image beside its requests, on one thread: it follows the size of the image and the holds
//! that other clients want, and it checks that the claim is still the one that this process wrote.
//!
//! All tasks only read. The thread can be stopped between two steps ([`Pause`](crate::pause::Pause)), so
//! that no check of the claim runs while a handover releases it.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};

use crate::claim;
use crate::hold;
use crate::pause::Pause;
use crate::shared::Shared;

/// The interval at which the claim is checked.
const CLAIM_CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// The name of the thread, which also names the task if it cannot be stopped.
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
        // An error means that the thread has panicked, and so has ended.
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
        run_tasks(changes, &shared.pause, CLAIM_CHECK_INTERVAL, |task| match task {
            Task::FollowChange => {
                self.follow_size();
                self.follow_hold();
            }
            Task::CheckClaim => self.check_claim(),
        });
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

    /// Reads which hold is wanted of the client with the claim of this process.
    fn follow_hold(&self) {
        let own = self.shared.claim().as_ref().map(|claim| claim.client.clone());
        match self.image.metadata_get(hold::KEY) {
            Ok(text) => self.shared.hold.follow(text.as_deref(), own.as_ref()),
            Err(error) => {
                tracing::warn!(image = %self.name, %error, "cannot read which hold is wanted");
            }
        }
    }

    /// Compares the claim in the image with the one that this process wrote. A client that takes the image
    /// over has the cluster blocklist this one first, and the cluster then refuses the read. The comparison
    /// detects only a client that changes lock and claim without that.
    fn check_claim(&mut self) {
        let Some(own) = self.shared.claim().clone() else { return };
        let lost = match claim::of(&self.image, &self.name) {
            Ok(now) => {
                self.failing = false;
                // A handover that was cancelled meanwhile has released this claim and written another.
                let current = self.shared.claim();
                let is_current = current.as_ref().is_some_and(|current| current.is_same(&own));
                is_current && now.is_some_and(|now| !now.is_same(&own))
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Task {
    FollowChange,
    CheckClaim,
}

/// Runs a task for each change and each `interval`, until `changes` is closed. A change that arrives while
/// the work is paused is followed within `interval` after the end of the pause.
fn run_tasks(changes: &Receiver<()>, pause: &Pause, interval: Duration, mut run: impl FnMut(Task)) {
    let mut next_check = SystemClock.now() + interval;
    let mut changed = false;
    loop {
        let left = next_check.saturating_duration_since(SystemClock.now());
        match changes.recv_timeout(left) {
            Ok(()) => changed = true,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        if changed {
            changed = !pause.step(|| run(Task::FollowChange));
        }
        // Also after a change: changes in quick succession must not prevent the check.
        if SystemClock.now() >= next_check {
            pause.step(|| run(Task::CheckClaim));
            next_check = SystemClock.now() + interval;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    const INTERVAL: Duration = Duration::from_millis(5);

    #[test]
    fn a_change_during_a_pause_is_followed_after_it() {
        let (pause, followed) = &(Pause::default(), Mutex::new(false));
        assert!(pause.stop(SystemClock.now()));
        // `send` returns when the thread has received the change.
        let (sender, changes) = mpsc::sync_channel(0);
        thread::scope(|scope| {
            let record = move |task| *followed.lock().unwrap() |= task == Task::FollowChange;
            scope.spawn(move || run_tasks(&changes, pause, INTERVAL, record));
            sender.send(()).unwrap();
            sender.send(()).unwrap();
            assert!(!*followed.lock().unwrap(), "the work is paused");
            pause.resume();
            while !*followed.lock().unwrap() {
                thread::yield_now();
            }
            drop(sender);
        });
    }

    #[test]
    fn the_claim_is_checked_during_a_stream_of_changes() {
        let (sender, changes) = mpsc::sync_channel(1);
        sender.send(()).unwrap();
        let mut sender = Some(sender);
        // Each step leaves the next change in the channel.
        run_tasks(&changes, &Pause::default(), INTERVAL, |task| match task {
            Task::FollowChange => sender.as_ref().map_or((), |sender| sender.send(()).unwrap()),
            Task::CheckClaim => sender = None,
        });
    }
}
