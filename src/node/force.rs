//! `unmap --force`: the mapping goes, whatever hangs and whoever holds it.
//!
//! In this order, each step bounded, all within the deadline of the call:
//! 1. The wish is recorded. From here on it is never taken back: a supervisor that dies goes on with
//!    it, and so does this one when the deadline is over.
//! 2. The worker answers every request with an error, those under way included. So nobody waits any
//!    more, for as long as it lives. One that does not do so (stopped, hung) is killed at once, since
//!    DISCONNECT sends through its sockets and would wait for it.
//! 3. Lazy unmounts, of file systems that are thawed (`quiesce`). What they write back is answered, or, without a worker, waits for step 4.
//! 4. DISCONNECT, on a thread that can be given up. What is open stays open, and fails.
//! 5. The worker's end, proved.
//! 6. The end of what it had under way at the backend: the worker has said so in step 2, or its claim
//!    on the volume is free again, which the kernel, or the storage, gives back no sooner.
//!
//! Whoever still holds the device keeps its number, not the volume: that can be mapped again at once,
//! under the same name, as another device.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

use super::executor::{Executor, Target};
use super::mapping::{Action, Intent, State};
use super::process::Process;
use super::steps::{FORCED_STOP_GRACE, within};
use super::unlocking;
use super::volume::Guard;
use super::workers::{Worker, stop_process, unexpected};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_kernel::{Device, DeviceIndex, Disconnected, Holder, Identity, UnmountScope};
use cleat_worker::protocol::{FromWorker, Start, ToWorker};

/// What a forced unmap did.
#[derive(Debug, Clone, Default)]
pub struct Forced {
    /// What was done, in order.
    pub steps: Vec<Done>,
    /// Mounts that are gone.
    pub unmounted: Vec<Holder>,
    /// The device that stays until its holders let go; everything on it fails.
    pub device_left: Option<DeviceIndex>,
    /// Who holds it.
    pub holders: Vec<Holder>,
    /// Why it is not known whether the backend has got its last request.
    pub unproven: Option<String>,
}

/// One step of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Done {
    /// What.
    pub step: &'static str,
    /// How long it took.
    pub took: Duration,
    /// What was special about it; empty otherwise.
    pub note: String,
}

/// What is remembered while it is going on.
#[derive(Debug, Default)]
pub struct Progress {
    steps: Vec<Done>,
    under_way: Option<(&'static str, Instant)>,
    note: String,
    mounts: Vec<Holder>,
    /// The device that stayed when it was severed.
    left: Option<DeviceIndex>,
    unproven: Option<String>,
}

/// For the journal to take the wish. Later ones of the mapping's records follow in order.
const RECORD_LIMIT: Duration = Duration::from_secs(1);
/// For the worker to fail its requests. Within it, the worker has its own, shorter bound.
const FAIL_LIMIT: Duration = Duration::from_secs(1);
/// For the end of a killed process before the next step is taken nevertheless.
const KILL_LIMIT: Duration = Duration::from_millis(500);
/// For lazy unmounts: with a worker that answers, and with one that is gone, when only the disconnect
/// will end what they write back.
const DETACH_LIMIT: Duration = Duration::from_millis(1500);
const DETACH_LIMIT_UNSERVED: Duration = Duration::from_millis(200);
/// For DISCONNECT before the worker is suspected of keeping it.
const SEVER_LIMIT: Duration = Duration::from_millis(1500);
/// For a look at the holders.
const LOOK_LIMIT: Duration = Duration::from_secs(1);
/// Kept back from the deadline for the report.
const REPORT_TIME: Duration = Duration::from_millis(200);
/// Between looks at a claim that is not free yet.
const CLAIM_PAUSE: Duration = Duration::from_millis(20);

impl Executor {
    /// Takes a mapping, or a device of ours without a record, down by force. `None`: there is none.
    ///
    /// # Errors
    /// `TimedOut` when not all of it could be done by `deadline`: what was, stands in the message,
    /// and the rest is tried again behind the scenes.
    pub async fn force(
        &self,
        target: &str,
        unmount: UnmountScope,
        deadline: Instant,
    ) -> Result<Option<Forced>> {
        let volume = match self.find(target, deadline).await? {
            Target::Volume(volume) => volume,
            Target::Nothing => return Ok(None),
            Target::Orphan(index, identity) => {
                return self.force_orphan(index, identity, unmount, deadline).await.map(Some);
            }
        };
        let mut guard = volume.enter_force(deadline).await?;
        let identity = guard.record.identity();
        if guard.withdrawn {
            // By another forced unmap, which this one has waited for.
            let progress = Progress::default();
            return Ok(Some(self.report(progress, &identity, deadline).await));
        }
        let before = (guard.record.intent, guard.renounced);
        guard.record.intent = Intent::Forced(unmount);
        guard.renounced = false;
        guard.silent = false;
        guard.progress = Some(Progress::default());
        tracing::warn!(mapping = volume.name, ?unmount, "unmapping by force");
        let until = deadline - REPORT_TIME.min((deadline - Instant::now()) / 10);
        let converged = timeout_at(until, self.converge(&mut guard, until)).await;
        let outcome = match converged {
            Ok(Ok(State::Unmapped)) => Ok(()),
            Ok(Ok(other)) => {
                let message = format!("a forced unmap came to rest in {other:?}");
                Err(Error::new(ErrorKind::Internal, message))
            }
            Ok(Err(error)) => Err(error),
            Err(_) => Err(Error::new(ErrorKind::TimedOut, "the time is over")),
        };
        let progress = guard.progress.take().unwrap_or_default();
        let Err(error) = outcome else {
            tracing::warn!(mapping = volume.name, "unmapped by force");
            return Ok(Some(self.report(progress, &identity, deadline).await));
        };
        // Out of time while it was being recorded: the journal may hold it, now or later, so it stands.
        let recording = error.kind() == ErrorKind::TimedOut && progress.under_way.is_some();
        if progress.steps.is_empty() && !recording && before.0 == Intent::Mapped {
            // It could not even be recorded: nothing has been done.
            (guard.record.intent, guard.renounced) = before;
            return Err(error);
        }
        let error = progress.unfinished(error, &volume.name);
        self.failed_attempt(&mut guard, &error);
        Err(error)
    }

    /// One step of a plan that takes a mapping down by force.
    pub(super) async fn forced_step(
        &self,
        guard: &mut Guard,
        action: Action,
        deadline: Instant,
    ) -> Result<()> {
        match action {
            Action::Renounce => {
                self.record_wish(guard, within(deadline, RECORD_LIMIT)).await;
                Ok(())
            }
            Action::FailIo => self.fail_io(guard, deadline).await,
            Action::TryThaw => {
                // A file system that is frozen is not unmounted.
                if let Err(error) = self.thaw(guard, deadline).await {
                    guard.note(error.report());
                }
                Ok(())
            }
            Action::Detach(index, unmount) => {
                let served = guard.worker.as_ref().is_some_and(|worker| !worker.has_ended());
                let patience = match served || guard.refusing.is_some() {
                    true => DETACH_LIMIT,
                    false => DETACH_LIMIT_UNSERVED,
                };
                // Never taken out of the guard: this may be cut off anywhere.
                let mut untold = Progress::default();
                let progress = guard.progress.as_mut().unwrap_or(&mut untold);
                self.detach(progress, index, unmount, within(deadline, patience)).await;
                Ok(())
            }
            Action::Sever(index) => {
                let (identity, process) = (guard.record.identity(), self.process_of(guard)?);
                let mut untold = Progress::default();
                let progress = guard.progress.as_mut().unwrap_or(&mut untold);
                self.sever(progress, index, &identity, process, deadline).await
            }
            Action::ProveSilence => self.prove_silence(guard, deadline).await,
            other => Err(Error::new(ErrorKind::Internal, format!("{other:?} is not forced"))),
        }
    }

    /// Never fails: that the journal cannot be written keeps nobody's device.
    async fn record_wish(&self, guard: &mut Guard, deadline: Instant) {
        let why = match timeout_at(deadline, self.renounce(guard)).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.report(),
            Err(_) => "the disk of the journal does not answer".to_owned(),
        };
        tracing::warn!(mapping = guard.volume().name, "force is not recorded: {why}");
        guard
            .note(format!("{why}; a daemon that is started before the end does not go on with it"));
    }

    async fn fail_io(&self, guard: &mut Guard, deadline: Instant) -> Result<()> {
        let failed = match &guard.worker {
            Some(worker) => fail_all(worker, within(deadline, FAIL_LIMIT)).await,
            None => Err(Error::new(ErrorKind::Unavailable, "the worker does not answer")),
        };
        let note = match failed {
            Ok(0) => {
                guard.silent = true;
                String::new()
            }
            Ok(at_backend) => format!("{at_backend} requests hang at the backend"),
            Err(error) => {
                let process = self.process_of(guard)?;
                format!("{}; {}", error.report(), kill(process, deadline).await)
            }
        };
        guard.note(note);
        Ok(())
    }

    /// Never fails: whatever keeps the device shows in the end.
    async fn detach(
        &self,
        progress: &mut Progress,
        index: DeviceIndex,
        unmount: UnmountScope,
        deadline: Instant,
    ) {
        let look = within(deadline, LOOK_LIMIT);
        match self.urgent.wait("look for mounts", look, None, move |k, _| k.holders(index)).await {
            Ok(holders) => {
                let mounts = holders.into_iter().filter(|h| matches!(h, Holder::Mount { .. }));
                progress.mounts.extend(mounts);
                if progress.mounts.is_empty() {
                    return;
                }
            }
            Err(error) => progress.note = error.report(),
        }
        if unmount == UnmountScope::None {
            return;
        }
        let detach = move |k: &dyn cleat_kernel::Kernel, until| k.unmount(index, unmount, until);
        let detached = self.urgent.wait("unmount the device", deadline, None, detach).await;
        if let Err(error) = detached {
            progress.note = match error.kind() {
                ErrorKind::TimedOut => "writing back goes on until the disconnect".to_owned(),
                _ => error.report(),
            };
        }
    }

    async fn sever(
        &self,
        progress: &mut Progress,
        index: DeviceIndex,
        identity: &Identity,
        process: Option<Arc<Process>>,
        deadline: Instant,
    ) -> Result<()> {
        let attempt = |deadline: Instant| {
            let identity = identity.clone();
            self.urgent.wait("disconnect the device", deadline, None, move |kernel, until| {
                kernel.force_disconnect(index, &identity, until)
            })
        };
        let first = within(deadline, SEVER_LIMIT.min((deadline - Instant::now()) / 2));
        let severed = match attempt(first).await {
            // It may be sending through the sockets of a worker that hangs: that ends with it.
            Err(error) if error.kind() == ErrorKind::TimedOut => {
                progress.note = kill(process, deadline).await;
                attempt(deadline).await?
            }
            other => other?,
        };
        tracing::warn!(device = index, ?severed, "severed");
        if severed == Disconnected::Held {
            progress.note = format!("/dev/nbd{index} stays until whoever holds it lets go");
            progress.left = Some(index);
            self.remember_left(index, identity);
        }
        Ok(())
    }

    /// Requests that a process has begun may outlive it, in the kernel's block layer or on their way
    /// to the storage. What it had claimed is free only after them: so whoever can open the volume
    /// for writing knows that they have ended.
    async fn prove_silence(&self, guard: &mut Guard, deadline: Instant) -> Result<()> {
        let record = &guard.record;
        // What was kept in memory died with it; and the storage itself keeps out who is fenced.
        let outlives = record.volume.is_some_and(|volume| volume.outlives_worker);
        let harmless = record.options.read_only || record.fenced || !outlives;
        if guard.silent || record.worker.is_none() || harmless {
            return Ok(());
        }
        loop {
            match self.claim_once(guard, deadline).await {
                Ok(()) => break,
                Err(error) if error.kind() == ErrorKind::NotFound => break,
                Err(error) if error.kind() == ErrorKind::InUse && Instant::now() < deadline => {
                    guard.note(error.report());
                    sleep(CLAIM_PAUSE).await;
                }
                Err(error) if matches!(error.kind(), ErrorKind::InUse | ErrorKind::TimedOut) => {
                    let message = "requests of the worker, which is gone, may be under way";
                    return Err(Error::new(ErrorKind::TimedOut, message)
                        .with_source(error.report())
                        .with_repair(
                            "look after what the volume is stored in: it does not answer",
                        ));
                }
                // Nobody can open it, so nobody will be harmed; but it is not known.
                Err(error) => {
                    guard.unproven(error.report());
                    break;
                }
            }
        }
        guard.silent = true;
        Ok(())
    }

    /// Opens the volume in a worker of its own, which takes the claim, and closes it again.
    async fn claim_once(&self, guard: &mut Guard, deadline: Instant) -> Result<()> {
        let launched = self.workers.launch().await?;
        // As for every worker: it can be found and ended after a crash.
        guard.record.generation += 1;
        guard.record.worker = Some(launched.id());
        self.store(guard).await?;
        let start = self.start_message(&guard.record, false);
        let start = Start { uri: unlocking::locked(&start.uri), ..start };
        let starting = self.workers.start(launched, start, None, Vec::new(), deadline);
        let started = timeout_at(deadline, starting);
        let late = |_| Error::new(ErrorKind::TimedOut, "the volume did not open in time");
        let worker = started.await.map_err(late)?.map_err(|not_started| not_started.error)?;
        worker.stop(FORCED_STOP_GRACE, deadline).await
    }

    /// A device of ours without a record: what can be done without one.
    async fn force_orphan(
        &self,
        index: DeviceIndex,
        identity: Identity,
        unmount: UnmountScope,
        deadline: Instant,
    ) -> Result<Forced> {
        let mut progress = Progress::default();
        let until = deadline - REPORT_TIME.min((deadline - Instant::now()) / 10);
        let done = self.force_orphan_down(&mut progress, index, &identity, unmount, until);
        let outcome = timeout_at(until, done).await;
        let outcome =
            outcome.unwrap_or_else(|_| Err(Error::new(ErrorKind::TimedOut, "the time is over")));
        match outcome {
            Ok(()) => Ok(self.report(progress, &identity, deadline).await),
            Err(error) => Err(progress.unfinished(error, &format!("/dev/nbd{index}"))),
        }
    }

    async fn force_orphan_down(
        &self,
        progress: &mut Progress,
        index: DeviceIndex,
        identity: &Identity,
        unmount: UnmountScope,
        deadline: Instant,
    ) -> Result<()> {
        let id = identity.mapping_id();
        progress.begin("fail I/O");
        let process = self.workers.listener(id).await?.map(Arc::new);
        let mut silent = self.is_left(index, identity);
        if let Some(process) = &process {
            let adopted = self.workers.adopt(id, Arc::clone(process), within(deadline, FAIL_LIMIT));
            let failed = match adopted.await {
                Ok(worker) => fail_all(&worker, within(deadline, FAIL_LIMIT)).await,
                Err(error) => Err(error),
            };
            match failed {
                Ok(at_backend) => silent = at_backend == 0,
                Err(error) => {
                    let killed = kill(Some(Arc::clone(process)), deadline).await;
                    progress.note = format!("{}; {killed}", error.report());
                }
            }
        }
        progress.end();
        progress.begin("unmount");
        self.detach(progress, index, unmount, within(deadline, DETACH_LIMIT)).await;
        progress.end();
        progress.begin("disconnect");
        self.sever(progress, index, identity, process.clone(), deadline).await?;
        progress.end();
        if let Some(process) = process {
            progress.begin("end the worker");
            stop_process(&process, deadline).await?;
            self.workers.forget(id);
            progress.end();
        }
        if !silent {
            progress.unproven = Some("the device had no record, which names its volume".to_owned());
        }
        Ok(())
    }

    /// What is left of a device that was severed.
    async fn report(&self, progress: Progress, identity: &Identity, deadline: Instant) -> Forced {
        let Progress { steps, mounts, left, unproven, .. } = progress;
        let mut forced = Forced { steps, unproven, device_left: left, ..Forced::default() };
        let ours = |d: &&Device| d.connected && d.identity().as_ref() == Some(identity);
        match self.devices(deadline).await {
            Ok(devices) => forced.device_left = devices.iter().find(ours).map(|d| d.index),
            // Then it is as it was when it was severed.
            Err(error) => tracing::warn!("{}", error.report()),
        }
        if let Some(index) = forced.device_left {
            let look =
                self.urgent.wait("look for holders", deadline, None, move |k, _| k.holders(index));
            match look.await {
                Ok(holders) => forced.holders = holders,
                Err(error) => tracing::warn!(device = index, "{}", error.report()),
            }
        }
        forced.unmounted = mounts;
        forced.unmounted.retain(|mount| !forced.holders.contains(mount));
        forced
    }

    /// The worker's process, if it has not ended.
    fn process_of(&self, guard: &Guard) -> Result<Option<Arc<Process>>> {
        match (&guard.worker, guard.record.worker) {
            (Some(worker), _) => Ok(Some(worker.process())),
            (None, Some(id)) => Ok(self.workers.find(id)?.map(Arc::new)),
            (None, None) => Ok(None),
        }
    }

    /// Devices that are severed are told from those that serve, as long as this supervisor lives.
    fn remember_left(&self, index: DeviceIndex, identity: &Identity) {
        const KEPT: usize = 1024;
        let mut left = self.left.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if left.len() < KEPT {
            left.insert((index, identity.clone()));
        }
    }

    /// Whether a device was severed by this supervisor, and only waits for its holders.
    pub fn is_left(&self, index: DeviceIndex, identity: &Identity) -> bool {
        let left = self.left.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        left.contains(&(index, identity.clone()))
    }
}

impl Guard {
    fn note(&mut self, note: String) {
        if let Some(progress) = &mut self.progress {
            progress.note = note;
        }
    }

    fn unproven(&mut self, why: String) {
        tracing::warn!(mapping = self.volume().name, "silence of the volume is not proved: {why}");
        if let Some(progress) = &mut self.progress {
            progress.unproven = Some(why);
        }
    }

    /// A step begins; told in the report of a forced unmap.
    pub(super) fn step_begins(&mut self, action: Action) {
        if let Some(progress) = &mut self.progress {
            progress.begin(name(action));
        }
    }

    /// It has been done.
    pub(super) fn step_ends(&mut self) {
        if let Some(progress) = &mut self.progress {
            progress.end();
        }
    }
}

impl Progress {
    fn begin(&mut self, step: &'static str) {
        self.under_way = Some((step, Instant::now()));
    }

    fn end(&mut self) {
        let Some((step, began)) = self.under_way.take() else { return };
        let note = std::mem::take(&mut self.note);
        tracing::info!(step, took = ?began.elapsed(), note, "done by force");
        self.steps.push(Done { step, took: began.elapsed(), note });
    }

    /// The error of a forced unmap that did not get to its end.
    fn unfinished(self, error: Error, name: &str) -> Error {
        let mut done: Vec<&str> = self.steps.iter().map(|done| done.step).collect();
        done.dedup();
        let done = if done.is_empty() { "nothing".to_owned() } else { done.join(", ") };
        let step = self.under_way.map_or("the report", |(step, _)| step);
        let note = if self.note.is_empty() { String::new() } else { format!(" ({})", self.note) };
        let message = format!(
            "{name} is not unmapped yet; done: {done}; not done: {step}{note}: {}",
            error.report()
        );
        let repair = error.repair().map(|repair| format!("{repair}; ")).unwrap_or_default();
        Error::new(error.kind(), message).with_repair(format!(
            "{repair}it is tried again by itself, and by the same command; see cleat status {name}"
        ))
    }
}

/// Adds the way out to an error that keeps a mapping from being unmapped.
pub(super) fn or_by_force(error: Error, name: &str) -> Error {
    let way = format!("cleat unmap {name} --force, which gives up what is not written yet");
    let repair = match error.repair() {
        Some(repair) => format!("{repair}; or {way}"),
        None => way,
    };
    error.with_repair(repair)
}

/// What a step is called in a report.
fn name(action: Action) -> &'static str {
    match action {
        Action::Renounce => "record",
        Action::FailIo => "fail I/O",
        Action::TryThaw | Action::Thaw => "thaw",
        Action::Detach(..) => "unmount",
        Action::Sever(_) => "disconnect",
        Action::StopWorker => "end the worker",
        Action::ProveSilence => "prove silence",
        Action::AwaitConnect => "await the kernel",
        Action::WithdrawRecord => "forget",
        _ => "other",
    }
}

/// Has a worker fail all I/O; returns how many requests its backend still has.
async fn fail_all(worker: &Worker, deadline: Instant) -> Result<u32> {
    match worker.call(ToWorker::FailIo { fail: true }, Vec::new(), deadline).await? {
        FromWorker::IoFails { at_backend } => Ok(at_backend),
        other => Err(unexpected(&other)),
    }
}

/// Kills a worker and says what came of it. That its end takes long keeps nothing else from being
/// done; it is waited for again in the end.
async fn kill(process: Option<Arc<Process>>, deadline: Instant) -> String {
    let Some(process) = process else { return "it has ended".to_owned() };
    match stop_process(&process, within(deadline, KILL_LIMIT)).await {
        Ok(()) => format!("worker {} was killed", process.id.pid),
        Err(error) => error.report(),
    }
}
