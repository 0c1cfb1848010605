//! A mapping in the supervisor's memory, its guard, and the register of all mappings.
//!
//! A task that changes a mapping holds its [`Guard`]. A second task that wants it gets an error at once.
//! Readers use the [`View`], which never blocks.

mod force_progress;
mod guard;
mod guarded;
mod recorded;
mod register;
mod view;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedMutexGuard, mpsc, watch};
use tokio::time::{Instant, timeout_at};

use crate::planner::{Record, State};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::space::SpaceUse;
use cleat_statistics::Page;

pub use force_progress::{ForceProgress, ForceReport, ForcedStep};
pub use guard::Guard;
pub use guarded::{AnsweredSnapshot, Guarded, Health, QuiesceState, Teardown};
pub use recorded::{Orders, Place, Recorded};
pub use register::Register;
pub use view::{Change, OutageView, View, node_of};

use guard::{BackgroundEntry, CallWaiting, ForceWaiting};

/// A mapping of this supervisor.
pub struct Mapping {
    /// The name, which never changes.
    pub name: String,
    /// The id, which never changes.
    pub mapping_id: String,
    /// The state of the durable record.
    pub(crate) recorded: Recorded,
    guarded: Arc<tokio::sync::Mutex<Guarded>>,
    view: Mutex<View>,
    statistics: Mutex<Option<Page>>,
    /// Whether an event arrived while the guard was held.
    wake_on_release: AtomicBool,
    /// The number of the supervisor's own tasks that have the guard or try to get it. At most one has it.
    background_entries: AtomicU32,
    /// Whether a call waits for such a task.
    call_waiting: AtomicBool,
    /// The number of forced unmaps that wait for the guard. Its holder then cancels its work.
    force_waiting: watch::Sender<u32>,
    /// Held while the kernel connects a device, also after the call for it was cancelled.
    connecting: Arc<tokio::sync::Mutex<()>>,
    work_queue: mpsc::Sender<String>,
}

impl Mapping {
    /// Creates the mapping of a record. `work_queue` gets its name when it is to be reconciled.
    pub fn new(record: Record, work_queue: mpsc::Sender<String>) -> Self {
        let view = View {
            record: record.clone(),
            state: State::Mapping,
            message: String::new(),
            device: None,
            paths: None,
            worker_pid: 0,
            worker_build: String::new(),
            holders: Vec::new(),
            outage: None,
            unsaved_bytes: 0,
            space: SpaceUse::default(),
            last_exit: None,
        };
        Self {
            name: record.name.clone(),
            mapping_id: record.mapping_id.clone(),
            recorded: Recorded::new(record.revision),
            guarded: Arc::new(tokio::sync::Mutex::new(Guarded::new(record))),
            view: Mutex::new(view),
            statistics: Mutex::new(None),
            wake_on_release: AtomicBool::new(false),
            background_entries: AtomicU32::new(0),
            call_waiting: AtomicBool::new(false),
            force_waiting: watch::Sender::new(0),
            connecting: Arc::default(),
            work_queue,
        }
    }

    /// Takes the guard without waiting.
    ///
    /// # Errors
    /// Returns `Aborted` if another task has the guard.
    pub fn try_lock(self: &Arc<Self>) -> Result<Guard> {
        let guarded = Arc::clone(&self.guarded).try_lock_owned().map_err(|_| self.busy())?;
        Ok(self.guard(guarded))
    }

    fn guard(self: &Arc<Self>, guarded: OwnedMutexGuard<Guarded>) -> Guard {
        Guard::new(self, guarded)
    }

    /// Takes the guard for a call. Does not wait for another call, but waits until `deadline` for the
    /// supervisor's own work on the mapping, which callers cannot know of.
    ///
    /// # Errors
    /// Returns `Aborted` if another call has the guard or waits for it, or if the supervisor's own work takes
    /// longer.
    pub async fn lock_for_call(self: &Arc<Self>, deadline: Instant) -> Result<Guard> {
        let error = match self.try_lock() {
            Ok(guard) => return Ok(guard),
            Err(error) => error,
        };
        if self.background_entries.load(Ordering::SeqCst) == 0
            || self.call_waiting.swap(true, Ordering::SeqCst)
        {
            // A task of the supervisor that is not counted any more may still have held the lock. After
            // the yield it has released it.
            tokio::task::yield_now().await;
            return self.try_lock().map_err(|_| error);
        }
        let _waiting = CallWaiting(&self.call_waiting);
        let guarded = timeout_at(deadline, Arc::clone(&self.guarded).lock_owned());
        let guarded = guarded.await.map_err(|_| error)?;
        Ok(self.guard(guarded))
    }

    /// Takes the guard for the supervisor's own work. If another task has it, returns `None`, and the
    /// mapping is reconciled when the guard is released.
    pub fn try_lock_in_background(self: &Arc<Self>) -> Option<Guard> {
        let background = BackgroundEntry::new(self);
        self.wake_on_release.store(true, Ordering::SeqCst);
        let mut guard = self.try_lock().ok()?;
        self.wake_on_release.store(false, Ordering::SeqCst);
        guard.set_background(background);
        Some(guard)
    }

    /// Takes the guard for a forced unmap. The current holder cancels its work, unless it is another
    /// forced unmap; that one is waited for.
    ///
    /// # Errors
    /// Returns `TimedOut` at `deadline`.
    pub async fn lock_by_force(self: &Arc<Self>, deadline: Instant) -> Result<Guard> {
        let _waiting = ForceWaiting::new(&self.force_waiting);
        let guarded = timeout_at(deadline, Arc::clone(&self.guarded).lock_owned()).await;
        let guarded = guarded.map_err(|_| {
            let message = format!("another forced unmap of {} is in progress", self.name);
            Error::new(ErrorKind::TimedOut, message).with_repair("try again when it has ended")
        })?;
        Ok(self.guard(guarded))
    }

    /// Runs `work`, which has or takes the guard, and cancels it when a forced unmap waits for the guard.
    /// This is safe because plans may be interrupted anywhere. Work on other threads continues there.
    ///
    /// # Errors
    /// Returns the error of `work`, and `Aborted` if it was cancelled.
    pub async fn until_forced<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let mut waiting = self.force_waiting.subscribe();
        tokio::select! {
            biased;
            _ = waiting.wait_for(|count| *count > 0) => {
                let message = format!("cancelled by a forced unmap of {}", self.name);
                Err(Error::new(ErrorKind::Aborted, message))
            }
            done = work => done,
        }
    }

    /// Returns the right to connect a device, which the connecting thread keeps; `None` while the kernel
    /// executes an earlier attempt.
    pub fn connect_permit(&self) -> Option<OwnedMutexGuard<()>> {
        Arc::clone(&self.connecting).try_lock_owned().ok()
    }

    /// Returns whether the kernel may still create a device of the mapping.
    pub fn is_connecting(&self) -> bool {
        self.connecting.try_lock().is_err()
    }

    /// Waits until the kernel creates no device of the mapping any more.
    ///
    /// # Errors
    /// Returns `TimedOut` at `deadline`.
    pub async fn wait_for_connect(&self, deadline: Instant) -> Result<()> {
        timeout_at(deadline, self.connecting.lock()).await.map(drop).map_err(|_| {
            let message = format!("the kernel may still connect a device for {}", self.name);
            Error::new(ErrorKind::TimedOut, message)
                .with_repair("see the kernel's log (dmesg) for the cause")
        })
    }

    fn busy(&self) -> Error {
        let message = format!("another operation on {} is in progress", self.name);
        Error::new(ErrorKind::Aborted, message).with_repair("try again when it has ended")
    }

    /// Returns the current view.
    pub fn view(&self) -> View {
        let mut view = lock(&self.view).clone();
        if let (Some(outage), Some(page)) = (&mut view.outage, self.statistics()) {
            outage.queued = page.snapshot().queued;
        }
        if let Some(page) = self.statistics() {
            (view.unsaved_bytes, view.space) = (page.unsaved(), page.space());
        }
        view
    }

    /// Returns the counters of the mapping's requests, if a worker was ever started.
    pub fn statistics(&self) -> Option<Page> {
        lock(&self.statistics).clone()
    }

    /// Changes the view. Returns the new view if it differs from the old one.
    pub fn update(&self, change: impl FnOnce(&mut View)) -> Option<View> {
        let mut view = lock(&self.view);
        let before = view.clone();
        change(&mut view);
        (*view != before).then(|| view.clone())
    }

    /// Sets the counters that readers get.
    pub fn show_statistics(&self, page: Option<Page>) {
        *lock(&self.statistics) = page;
    }
}

/// Locks a mutex, also after a panic of another holder: every change under it is complete.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::planner::tests::record;

    /// The guard is released before the name goes to the work queue, so its receiver can take the guard.
    #[test]
    fn an_event_under_a_guard_schedules_a_reconcile_after_its_release() {
        let (work_queue, mut scheduled) = mpsc::channel(8);
        let mapping = Arc::new(Mapping::new(record(1, true), work_queue));
        let (done, reconciled) = std::sync::mpsc::channel();
        let receiver = {
            let mapping = Arc::clone(&mapping);
            std::thread::spawn(move || {
                while let Some(name) = scheduled.blocking_recv() {
                    assert!(name.is_empty() || mapping.try_lock().is_ok());
                    if name.is_empty() || done.send(()).is_err() {
                        return;
                    }
                }
            })
        };
        for _ in 0..2000 {
            let guard = loop {
                match mapping.try_lock() {
                    Ok(guard) => break guard,
                    Err(_) => std::thread::yield_now(),
                }
            };
            assert!(mapping.try_lock_in_background().is_none());
            drop(guard);
            // The receiver must not find the next guard.
            reconciled.recv_timeout(Duration::from_secs(10)).unwrap();
        }
        let end = mapping.work_queue.blocking_send(String::new());
        end.unwrap();
        receiver.join().unwrap();
    }
}
