//! One mapping in the supervisor's memory, its guard, and the register of all.
//!
//! Who changes a mapping holds its [`Guard`]; a second one is refused at once. Who only looks reads
//! the [`View`], which never waits.

mod force_progress;
mod guard;
mod guarded;
mod register;
mod view;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedMutexGuard, mpsc, watch};
use tokio::time::{Instant, timeout, timeout_at};

use crate::planner::{Record, State};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_statistics::Page;

pub use force_progress::{Done, ForceProgress, Forced};
pub use guard::Guard;
pub use guarded::{Answered, Guarded, Health, QuiesceState, Teardown};
pub use register::Register;
pub use view::{Change, OutageView, View, node_of};

use guard::{BackgroundEntry, CallWaiting, ForceWaiting};

/// A mapping.
pub struct Mapping {
    /// Its name; never changes.
    pub name: String,
    /// Its id; never changes.
    pub mapping_id: String,
    guarded: Arc<tokio::sync::Mutex<Guarded>>,
    view: Mutex<View>,
    statistics: Mutex<Option<Page>>,
    /// Something happened while somebody held the guard.
    wake_on_release: AtomicBool,
    /// How many look after it by themselves, or try to; at most one of them has the guard.
    background_entries: AtomicU32,
    /// A call waits for a keeper to be done.
    call_waiting: AtomicBool,
    /// Forced unmaps that wait for the guard: whoever has it gives way.
    force_waiting: watch::Sender<u32>,
    /// Held while a record is being written, beyond the end of a call that gave way.
    writing: Arc<tokio::sync::Mutex<()>>,
    /// A write of its record was given up, and has ended since.
    record_uncertain: AtomicBool,
    /// Somebody waits for the end of such a write.
    store_again_scheduled: AtomicBool,
    /// Held while the kernel connects a device, however long nobody waits for it any more.
    connecting: Arc<tokio::sync::Mutex<()>>,
    work_queue: mpsc::Sender<String>,
}

/// How long a call waits for what the supervisor does by itself, most of which only looks.
const BACKGROUND_TIMEOUT: Duration = Duration::from_secs(2);

impl Mapping {
    /// Of a record. `attention` gets its name when it should be looked at.
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
            last_exit: None,
        };
        Self {
            name: record.name.clone(),
            mapping_id: record.mapping_id.clone(),
            guarded: Arc::new(tokio::sync::Mutex::new(Guarded::new(record))),
            view: Mutex::new(view),
            statistics: Mutex::new(None),
            wake_on_release: AtomicBool::new(false),
            background_entries: AtomicU32::new(0),
            call_waiting: AtomicBool::new(false),
            force_waiting: watch::Sender::new(0),
            writing: Arc::default(),
            record_uncertain: AtomicBool::new(false),
            store_again_scheduled: AtomicBool::new(false),
            connecting: Arc::default(),
            work_queue,
        }
    }

    /// The right to change it, at once.
    ///
    /// # Errors
    /// `Aborted` when somebody else has it.
    pub fn try_lock(self: &Arc<Self>) -> Result<Guard> {
        let guarded = Arc::clone(&self.guarded).try_lock_owned().map_err(|_| self.busy())?;
        Ok(self.guard(guarded))
    }

    fn guard(self: &Arc<Self>, guarded: OwnedMutexGuard<Guarded>) -> Guard {
        Guard::new(self, guarded)
    }

    /// The right to change it, for a call: not queued behind another call, but the supervisor's own
    /// looking after the mapping, which no caller knows of, is waited for.
    ///
    /// # Errors
    /// `Aborted` when another call has it, or a repair takes long.
    pub async fn lock_for_call(self: &Arc<Self>) -> Result<Guard> {
        let error = match self.try_lock() {
            Ok(guard) => return Ok(guard),
            Err(error) => error,
        };
        if self.background_entries.load(Ordering::SeqCst) == 0
            || self.call_waiting.swap(true, Ordering::SeqCst)
        {
            // A keeper that was about to leave, and is not counted any more, has left by now.
            tokio::task::yield_now().await;
            return self.try_lock().map_err(|_| error);
        }
        let _awaiting = CallWaiting(&self.call_waiting);
        let guarded = timeout(BACKGROUND_TIMEOUT, Arc::clone(&self.guarded).lock_owned());
        let guarded = guarded.await.map_err(|_| error)?;
        Ok(self.guard(guarded))
    }

    /// The right to change it, for the supervisor itself. When somebody else has it, the mapping is
    /// looked at afterwards.
    pub fn try_lock_in_background(self: &Arc<Self>) -> Option<Guard> {
        let background = BackgroundEntry::new(self);
        self.wake_on_release.store(true, Ordering::SeqCst);
        let mut guard = self.try_lock().ok()?;
        self.wake_on_release.store(false, Ordering::SeqCst);
        guard.set_background(background);
        Some(guard)
    }

    /// The right to change it, for a forced unmap: whoever has it gives way, unless it is another
    /// forced unmap, which is waited for.
    ///
    /// # Errors
    /// `TimedOut` at `deadline`.
    pub async fn lock_by_force(self: &Arc<Self>, deadline: Instant) -> Result<Guard> {
        let _wanting = ForceWaiting::new(&self.force_waiting);
        let guarded = timeout_at(deadline, Arc::clone(&self.guarded).lock_owned()).await;
        let guarded = guarded.map_err(|_| {
            let message = format!("another forced unmap of {} is under way", self.name);
            Error::new(ErrorKind::TimedOut, message).with_repair("try again when it has ended")
        })?;
        Ok(self.guard(guarded))
    }

    /// Does `work`, which has the guard or is given it, until a forced unmap wants it. Plans may be
    /// cut anywhere, and so may this; what is under way on other threads ends there.
    ///
    /// # Errors
    /// What `work` gives; `Aborted` when it gave way.
    pub async fn until_forced<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let mut wanted = self.force_waiting.subscribe();
        tokio::select! {
            biased;
            _ = wanted.wait_for(|count| *count > 0) => {
                let message = format!("it gave way to a forced unmap of {}", self.name);
                Err(Error::new(ErrorKind::Aborted, message))
            }
            done = work => done,
        }
    }

    /// The right to write its record; kept by the thread that writes.
    pub async fn write_permit(&self) -> OwnedMutexGuard<()> {
        Arc::clone(&self.writing).lock_owned().await
    }

    /// A write of its record was given up: has the mapping looked at once that has ended.
    pub fn store_again_later(self: &Arc<Self>) {
        if self.store_again_scheduled.swap(true, Ordering::SeqCst) {
            return;
        }
        let mapping = Arc::clone(self);
        tokio::spawn(async move {
            drop(mapping.write_permit().await);
            mapping.store_again_scheduled.store(false, Ordering::SeqCst);
            mapping.record_uncertain.store(true, Ordering::SeqCst);
            // A full queue: the next sweep finds it.
            let _ = mapping.work_queue.try_send(mapping.name.clone());
        });
    }

    /// Whether the journal may say something else than what holds.
    pub fn is_record_uncertain(&self) -> bool {
        self.record_uncertain.load(Ordering::SeqCst)
    }

    /// The journal says what holds.
    pub fn set_record_certain(&self) {
        self.record_uncertain.store(false, Ordering::SeqCst);
    }

    /// The right to have its device connected, kept by the thread that does so; `None` while the
    /// kernel has not ended an earlier attempt.
    pub fn connect_permit(&self) -> Option<OwnedMutexGuard<()>> {
        Arc::clone(&self.connecting).try_lock_owned().ok()
    }

    /// Whether the kernel may still make a device of it.
    pub fn is_connecting(&self) -> bool {
        self.connecting.try_lock().is_err()
    }

    /// Waits until the kernel makes no device of it any more.
    ///
    /// # Errors
    /// `TimedOut`.
    pub async fn wait_for_connect(&self, deadline: Instant) -> Result<()> {
        timeout_at(deadline, self.connecting.lock()).await.map(drop).map_err(|_| {
            let message = format!("the kernel may still connect a device of {}", self.name);
            Error::new(ErrorKind::TimedOut, message)
                .with_repair("see the kernel's log for what the command waits for")
        })
    }

    fn busy(&self) -> Error {
        let message = format!("another operation on {} is under way", self.name);
        Error::new(ErrorKind::Aborted, message).with_repair("try again when it has ended")
    }

    /// How it is doing.
    pub fn view(&self) -> View {
        let mut view = lock(&self.view).clone();
        if let (Some(outage), Some(page)) = (&mut view.outage, self.statistics()) {
            outage.queued = page.snapshot().queued;
        }
        view
    }

    /// Its counters, if it ever had any.
    pub fn statistics(&self) -> Option<Page> {
        lock(&self.statistics).clone()
    }

    /// Changes what everybody sees; says whether anything did change.
    pub fn update(&self, change: impl FnOnce(&mut View)) -> Option<View> {
        let mut view = lock(&self.view);
        let before = view.clone();
        change(&mut view);
        (*view != before).then(|| view.clone())
    }

    /// Shows the counters of a worker.
    pub fn show_statistics(&self, page: Option<Page>) {
        *lock(&self.statistics) = page;
    }
}

/// The lock, whoever panicked with it: every change under it is complete.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::tests::record;

    /// Whoever is called to a mapping can enter it: the lock is free before the call goes out.
    #[test]
    fn what_happens_under_a_guard_is_looked_at_once_the_guard_is_free() {
        let (work_queue, mut called) = mpsc::channel(8);
        let mapping = Arc::new(Mapping::new(record(1, true), work_queue));
        let (looked, seen) = std::sync::mpsc::channel();
        let looker = {
            let mapping = Arc::clone(&mapping);
            std::thread::spawn(move || {
                while let Some(name) = called.blocking_recv() {
                    assert!(name.is_empty() || mapping.try_lock().is_ok());
                    if name.is_empty() || looked.send(()).is_err() {
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
            // The next guard must not be what the looker finds.
            seen.recv_timeout(Duration::from_secs(10)).unwrap();
        }
        let end = mapping.work_queue.blocking_send(String::new());
        end.unwrap();
        looker.join().unwrap();
    }
}
