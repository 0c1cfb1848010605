//! One mapping in the supervisor's memory, its guard, and the register of all.
//!
//! Who changes a mapping holds its [`Guard`]; a second one is refused at once. Who only looks reads
//! the [`View`], which never waits.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedMutexGuard, mpsc, watch};
use tokio::time::{Instant, timeout, timeout_at};

use super::force::Progress;
use super::mapping::{Record, SeenDevice, State};
use super::quiesce::Answered;
use super::setbacks::Setbacks;
use super::workers::Worker;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_kernel::{DeviceIndex, DevicePaths, Holder};
use cleat_statistics::Page;
use cleat_worker::refuse::Refusing;

/// What the guard protects.
pub struct Core {
    /// What the journal holds, or will.
    pub record: Record,
    /// The worker, if we have a channel to it.
    pub worker: Option<Worker>,
    /// The worker that it is to succeed, likewise.
    pub predecessor: Option<Worker>,
    /// Why the worker stays although a newer build is there.
    pub refusal: Option<String>,
    /// Counters; they outlive their worker.
    pub statistics: Option<Page>,
    /// Where the device is, once it has been seen.
    pub paths: Option<DevicePaths>,
    /// Whether the journal says that it is being taken down.
    pub renounced: bool,
    /// Nothing is left of it; who waited for the guard looks for the name again.
    pub withdrawn: bool,
    /// Repairs that failed or did not last, in a row.
    pub failures: u32,
    /// Whoever asked for it has said that its volume is to be taken from whoever has it.
    pub take_over: bool,
    /// What went wrong with its workers.
    pub setbacks: Setbacks,
    /// Since when it has worked without interruption.
    pub sound_since: Option<Instant>,
    /// Since when no worker lived for long, if so.
    pub dead_since: Option<Instant>,
    /// Answers in place of a worker.
    pub refusing: Option<Refusing>,
    /// No repair before.
    pub not_before: Option<Instant>,
    /// Nothing of a worker that was told to fail its I/O is under way at the backend.
    pub silent: bool,
    /// Of a forced unmap that somebody waits for.
    pub progress: Option<Progress>,
    /// A growth of the device that was put off, until when and why.
    pub growth: Option<(Instant, String)>,
    /// The last snapshot that a worker was answered about, by this supervisor.
    pub answered: Option<Answered>,
    /// No thaw before.
    pub thaw_again: Option<Instant>,
    /// What was wrong with the last snapshot.
    pub unquiet: Option<String>,
}

impl Core {
    /// Of a record that nothing else is known of.
    pub fn new(record: Record) -> Self {
        Self {
            record,
            worker: None,
            predecessor: None,
            refusal: None,
            statistics: None,
            paths: None,
            renounced: false,
            withdrawn: false,
            failures: 0,
            take_over: false,
            setbacks: Setbacks::default(),
            sound_since: None,
            dead_since: None,
            refusing: None,
            not_before: None,
            silent: false,
            progress: None,
            growth: None,
            answered: None,
            thaw_again: None,
            unquiet: None,
        }
    }
}

/// What everybody may see at any time.
#[derive(Debug, Clone, PartialEq)]
pub struct View {
    /// What is wanted.
    pub record: Record,
    /// How it is doing.
    pub state: State,
    /// Why, beyond the state: the last failure of a repair under way, say.
    pub message: String,
    /// Its device.
    pub device: Option<SeenDevice>,
    /// Where the device is.
    pub paths: Option<DevicePaths>,
    /// 0: none.
    pub worker_pid: u32,
    /// Its build.
    pub worker_build: String,
    /// Who holds it, where somebody has looked.
    pub holders: Vec<Holder>,
    /// The backend cannot be reached.
    pub outage: Option<OutageView>,
    /// How its last worker ended, where one did that was not asked to.
    pub last_end: Option<String>,
}

/// An outage of a mapping's backend, as everybody may see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutageView {
    /// When it was noticed.
    pub since_unix_ms: u64,
    /// Why, as far as known.
    pub reason: Option<String>,
    /// Requests that wait in the worker.
    pub queued: u64,
}

impl View {
    /// The device's node, as far as known.
    pub fn node(&self) -> Option<PathBuf> {
        let known = self.paths.as_ref().map(|paths| paths.node.clone());
        known.or_else(|| self.device.map(|device| node_of(device.index)))
    }

    /// Whether nothing can be written: asked for, or the nature of the volume (a snapshot).
    pub fn is_read_only(&self) -> bool {
        let by_itself = self.record.volume.is_some_and(|volume| volume.is_read_only());
        self.record.options.read_only || by_itself
    }

    /// Whether somebody else owns the volume now.
    pub fn is_fenced(&self) -> bool {
        matches!(&self.state, State::Failed(trouble) if trouble.kind == ErrorKind::Fenced)
    }
}

/// `/dev/nbdN`.
pub fn node_of(index: DeviceIndex) -> PathBuf {
    PathBuf::from(format!("/dev/nbd{index}"))
}

/// A mapping.
pub struct Volume {
    /// Its name; never changes.
    pub name: String,
    /// Its id; never changes.
    pub mapping_id: String,
    core: Arc<tokio::sync::Mutex<Core>>,
    view: Mutex<View>,
    statistics: Mutex<Option<Page>>,
    /// Something happened while somebody held the guard.
    again: AtomicBool,
    /// How many look after it by themselves, or try to; at most one of them has the guard.
    keepers: AtomicU32,
    /// A call waits for a keeper to be done.
    awaited: AtomicBool,
    /// Forced unmaps that wait for the guard: whoever has it gives way.
    wanted: watch::Sender<u32>,
    /// Held while a record is being written, beyond the end of a call that gave way.
    writing: Arc<tokio::sync::Mutex<()>>,
    /// A write of its record was given up, and has ended since.
    unsettled: AtomicBool,
    /// Somebody waits for the end of such a write.
    settling: AtomicBool,
    /// Held while the kernel connects a device, however long nobody waits for it any more.
    connecting: Arc<tokio::sync::Mutex<()>>,
    attention: mpsc::Sender<String>,
}

/// The right to change a mapping. Its fields end in the order in which they stand here.
pub struct Guard {
    /// Before the lock is free: whoever finds it taken from here on waits for another call.
    keeper: Option<Keeper>,
    core: OwnedMutexGuard<Core>,
    /// After the lock is free: what happened until then is not missed.
    volume: Leaving,
}

/// Has a mapping looked at where something happened while somebody had its guard.
struct Leaving(Arc<Volume>);

/// Counts one that looks after a mapping by itself.
struct Keeper(Arc<Volume>);

impl Keeper {
    fn new(volume: &Arc<Volume>) -> Self {
        volume.keepers.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(volume))
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.0.keepers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Takes back that a call waits, however it ends.
struct Awaiting<'a>(&'a AtomicBool);

impl Drop for Awaiting<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

/// Counts a forced unmap that wants the guard.
struct Wanting<'a>(&'a watch::Sender<u32>);

impl<'a> Wanting<'a> {
    fn new(wanted: &'a watch::Sender<u32>) -> Self {
        wanted.send_modify(|count| *count += 1);
        Self(wanted)
    }
}

impl Drop for Wanting<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

/// How long a call waits for what the supervisor does by itself, most of which only looks.
const KEEPER_LIMIT: Duration = Duration::from_secs(2);

impl Volume {
    /// Of a record. `attention` gets its name when it should be looked at.
    pub fn new(record: Record, attention: mpsc::Sender<String>) -> Self {
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
            last_end: None,
        };
        Self {
            name: record.name.clone(),
            mapping_id: record.mapping_id.clone(),
            core: Arc::new(tokio::sync::Mutex::new(Core::new(record))),
            view: Mutex::new(view),
            statistics: Mutex::new(None),
            again: AtomicBool::new(false),
            keepers: AtomicU32::new(0),
            awaited: AtomicBool::new(false),
            wanted: watch::Sender::new(0),
            writing: Arc::default(),
            unsettled: AtomicBool::new(false),
            settling: AtomicBool::new(false),
            connecting: Arc::default(),
            attention,
        }
    }

    /// The right to change it, at once.
    ///
    /// # Errors
    /// `Aborted` when somebody else has it.
    pub fn enter(self: &Arc<Self>) -> Result<Guard> {
        let core = Arc::clone(&self.core).try_lock_owned().map_err(|_| self.busy())?;
        Ok(self.guard(core))
    }

    fn guard(self: &Arc<Self>, core: OwnedMutexGuard<Core>) -> Guard {
        Guard { keeper: None, core, volume: Leaving(Arc::clone(self)) }
    }

    /// The right to change it, for a call: not queued behind another call, but the supervisor's own
    /// looking after the mapping, which no caller knows of, is waited for.
    ///
    /// # Errors
    /// `Aborted` when another call has it, or a repair takes long.
    pub async fn enter_call(self: &Arc<Self>) -> Result<Guard> {
        let error = match self.enter() {
            Ok(guard) => return Ok(guard),
            Err(error) => error,
        };
        if self.keepers.load(Ordering::SeqCst) == 0 || self.awaited.swap(true, Ordering::SeqCst) {
            // A keeper that was about to leave, and is not counted any more, has left by now.
            tokio::task::yield_now().await;
            return self.enter().map_err(|_| error);
        }
        let _awaiting = Awaiting(&self.awaited);
        let core = timeout(KEEPER_LIMIT, Arc::clone(&self.core).lock_owned());
        let core = core.await.map_err(|_| error)?;
        Ok(self.guard(core))
    }

    /// The right to change it, for the supervisor itself. When somebody else has it, the mapping is
    /// looked at afterwards.
    pub fn enter_keeper(self: &Arc<Self>) -> Option<Guard> {
        let keeper = Keeper::new(self);
        self.again.store(true, Ordering::SeqCst);
        let mut guard = self.enter().ok()?;
        self.again.store(false, Ordering::SeqCst);
        guard.keeper = Some(keeper);
        Some(guard)
    }

    /// The right to change it, for a forced unmap: whoever has it gives way, unless it is another
    /// forced unmap, which is waited for.
    ///
    /// # Errors
    /// `TimedOut` at `deadline`.
    pub async fn enter_force(self: &Arc<Self>, deadline: Instant) -> Result<Guard> {
        let _wanting = Wanting::new(&self.wanted);
        let core = timeout_at(deadline, Arc::clone(&self.core).lock_owned()).await;
        let core = core.map_err(|_| {
            let message = format!("another forced unmap of {} is under way", self.name);
            Error::new(ErrorKind::TimedOut, message).with_repair("try again when it has ended")
        })?;
        Ok(self.guard(core))
    }

    /// Does `work`, which has the guard or is given it, until a forced unmap wants it. Plans may be
    /// cut anywhere, and so may this; what is under way on other threads ends there.
    ///
    /// # Errors
    /// What `work` gives; `Aborted` when it gave way.
    pub async fn giving_way<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let mut wanted = self.wanted.subscribe();
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
    pub async fn turn_to_write(&self) -> OwnedMutexGuard<()> {
        Arc::clone(&self.writing).lock_owned().await
    }

    /// A write of its record was given up: has the mapping looked at once that has ended.
    pub fn settle_later(self: &Arc<Self>) {
        if self.settling.swap(true, Ordering::SeqCst) {
            return;
        }
        let volume = Arc::clone(self);
        tokio::spawn(async move {
            drop(volume.turn_to_write().await);
            volume.settling.store(false, Ordering::SeqCst);
            volume.unsettled.store(true, Ordering::SeqCst);
            // A full queue: the next sweep finds it.
            let _ = volume.attention.try_send(volume.name.clone());
        });
    }

    /// Whether the journal may say something else than what holds.
    pub fn is_unsettled(&self) -> bool {
        self.unsettled.load(Ordering::SeqCst)
    }

    /// The journal says what holds.
    pub fn settled(&self) {
        self.unsettled.store(false, Ordering::SeqCst);
    }

    /// The right to have its device connected, kept by the thread that does so; `None` while the
    /// kernel has not ended an earlier attempt.
    pub fn turn_to_connect(&self) -> Option<OwnedMutexGuard<()>> {
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
    pub async fn await_connect(&self, deadline: Instant) -> Result<()> {
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

impl Guard {
    /// Whether the supervisor looks after the mapping by itself, and nobody waits for it.
    pub fn is_kept(&self) -> bool {
        self.keeper.is_some()
    }

    /// Whose.
    pub fn volume(&self) -> &Arc<Volume> {
        &self.volume.0
    }
}

impl std::ops::Deref for Guard {
    type Target = Core;
    fn deref(&self) -> &Core {
        &self.core
    }
}

impl std::ops::DerefMut for Guard {
    fn deref_mut(&mut self) -> &mut Core {
        &mut self.core
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        if self.0.again.swap(false, Ordering::SeqCst) {
            // A full queue: the next sweep finds it.
            let _ = self.0.attention.try_send(self.0.name.clone());
        }
    }
}

/// Every mapping, by name.
#[derive(Default)]
pub struct Register(Mutex<BTreeMap<String, Arc<Volume>>>);

impl Register {
    /// The mapping called `name`, or else the new one that `make` gives, and whether it is new.
    ///
    /// # Errors
    /// `NoSpace` beyond `limit` mappings.
    pub fn find_or_insert(
        &self,
        name: &str,
        limit: usize,
        make: impl FnOnce() -> Volume,
    ) -> Result<(Arc<Volume>, Option<Guard>)> {
        let mut volumes = lock(&self.0);
        if let Some(volume) = volumes.get(name) {
            return Ok((Arc::clone(volume), None));
        }
        if volumes.len() >= limit {
            let message = format!("{limit} mappings exist, which is the daemon's limit");
            return Err(Error::new(ErrorKind::NoSpace, message)
                .with_repair("unmap some, or raise limits.mappings in the configuration"));
        }
        let volume = Arc::new(make());
        // Entered before anybody else can see it.
        let guard = volume.enter()?;
        volumes.insert(name.to_owned(), Arc::clone(&volume));
        Ok((volume, Some(guard)))
    }

    /// The mapping called `name`.
    pub fn get(&self, name: &str) -> Option<Arc<Volume>> {
        lock(&self.0).get(name).cloned()
    }

    /// All, in the order of their names.
    pub fn all(&self) -> Vec<Arc<Volume>> {
        lock(&self.0).values().cloned().collect()
    }

    /// The ids of all.
    pub fn ids(&self) -> BTreeSet<String> {
        lock(&self.0).values().map(|volume| volume.mapping_id.clone()).collect()
    }

    /// Forgets `volume`, if it is still the one of its name.
    pub fn remove(&self, volume: &Arc<Volume>) {
        let mut volumes = lock(&self.0);
        if volumes.get(&volume.name).is_some_and(|found| Arc::ptr_eq(found, volume)) {
            volumes.remove(&volume.name);
        }
    }
}

/// The lock, whoever panicked with it: every change under it is complete.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::tests::record;

    /// Whoever is called to a mapping can enter it: the lock is free before the call goes out.
    #[test]
    fn what_happens_under_a_guard_is_looked_at_once_the_guard_is_free() {
        let (attention, mut called) = mpsc::channel(8);
        let volume = Arc::new(Volume::new(record(1, true), attention));
        let (looked, seen) = std::sync::mpsc::channel();
        let looker = {
            let volume = Arc::clone(&volume);
            std::thread::spawn(move || {
                while let Some(name) = called.blocking_recv() {
                    assert!(name.is_empty() || volume.enter().is_ok());
                    if name.is_empty() || looked.send(()).is_err() {
                        return;
                    }
                }
            })
        };
        for _ in 0..2000 {
            let guard = loop {
                match volume.enter() {
                    Ok(guard) => break guard,
                    Err(_) => std::thread::yield_now(),
                }
            };
            assert!(volume.enter_keeper().is_none());
            drop(guard);
            // The next guard must not be what the looker finds.
            seen.recv_timeout(Duration::from_secs(10)).unwrap();
        }
        let end = volume.attention.blocking_send(String::new());
        end.unwrap();
        looker.join().unwrap();
    }
}
