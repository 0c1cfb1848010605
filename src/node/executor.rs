//! Carries plans out: look, plan, act, and look again, under the guard of one mapping.
//!
//! The calls that users make are here; `observe` looks, `steps` acts, `recover` begins.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::{broadcast, mpsc};
use tokio::time::{Instant, sleep, timeout};

use super::force::or_by_force;
use super::journal::Journal;
use super::kernel_calls::KernelCalls;
use super::mapping::{Action, Intent, Observed, Options, Record, State, Trouble, plan};
use super::naming::other_volume;
use super::offload::offload;
use super::quiesce::Means;
use super::unlocking;
use super::volume::{Guard, OutageView, Register, View, Volume};
use super::workers::Workers;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::policy;
use cleat_core::random::Random;
use cleat_kernel::{DeviceIndex, Holder, Identity};

/// What stays the same while the daemon runs.
#[derive(Debug, Clone)]
pub struct Settings {
    /// For what a request leaves open.
    pub defaults: Options,
    /// How devices are made quiet for snapshots.
    pub quiesce: Means,
    /// The most mappings.
    pub mappings: usize,
    /// The node's name.
    pub node: String,
    /// What tells it from another one of the name.
    pub machine: String,
    /// Of the kernel now running.
    pub boot_id: String,
}

/// A wish to map, checked.
#[derive(Debug, Clone)]
pub struct MapSpec {
    /// The mapping's name.
    pub name: String,
    /// The volume.
    pub uri: String,
    /// Nothing is ever written.
    pub read_only: bool,
    /// 0: whatever is there, or the default.
    pub connections: u32,
    /// 0: as above.
    pub block_size: u32,
    /// 0: as above.
    pub dead_connection_timeout_s: u32,
    /// What differs from the defaults.
    pub policy: policy::Change,
    /// Take the volume from whoever has it.
    pub take_over: bool,
    /// Made quiet for snapshots.
    pub quiesce: bool,
}

/// A mapping as it is now, or that it is no more.
#[derive(Debug, Clone)]
pub struct Change {
    /// As it is, or was.
    pub view: View,
    /// Whether it is gone.
    pub removed: bool,
}

/// Where a test stops the executor, as a crash would: the named point, and whether to stop there.
pub type Halt = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// The executor; one per daemon.
pub struct Executor {
    pub(super) journal: Arc<Journal>,
    pub(super) kernel: KernelCalls,
    /// The same kernel, with room of its own: for looks at the devices, and for what is done by force
    /// while others are stuck.
    pub(super) urgent: KernelCalls,
    /// Devices that were severed and are held.
    pub(super) left: std::sync::Mutex<BTreeSet<(DeviceIndex, Identity)>>,
    pub(super) workers: Workers,
    /// Workers that may be starting at one time.
    pub(super) starts: tokio::sync::Semaphore,
    /// Those of them that may be unlocking their volumes.
    pub(super) unlocks: tokio::sync::Semaphore,
    pub(super) register: Register,
    pub(super) settings: Settings,
    pub(super) random: Random,
    pub(super) attention: mpsc::Sender<String>,
    pub(super) changes: broadcast::Sender<Change>,
    pub(super) halt: Option<Halt>,
    /// The executable that the daemon is to go on as.
    pub(super) restart: tokio::sync::watch::Sender<Option<PathBuf>>,
    /// What an operator should know of how the daemon began.
    pub(super) findings: std::sync::Mutex<Vec<String>>,
}

/// What stands behind a name, URI or path.
pub enum Target {
    /// A mapping.
    Volume(Arc<Volume>),
    /// A device of ours that has no record.
    Orphan(DeviceIndex, Identity),
    /// Nothing of ours.
    Nothing,
}

/// Plans that may follow each other before something is wrong with the planner or the world.
const MAX_ROUNDS: u32 = 8;

/// For a disk to take a record, its queue included.
const JOURNAL_LIMIT: Duration = Duration::from_secs(10);

/// Attempts at an operation that a user waits for.
const MAX_ATTEMPTS: u32 = 4;

/// For undoing what a failed map has begun.
const UNDO_LIMIT: Duration = Duration::from_secs(20);

/// For one attempt at a repair.
const REPAIR_LIMIT: Duration = Duration::from_secs(60);

/// How long udev may look at a device before it counts as a holder.
pub(super) const TRANSIENT_LIMIT: Duration = Duration::from_secs(3);

/// A mapping that has worked for so long has recovered from what was before. Short, so that only
/// workers which die soon after their start are given up: with the others, I/O gets on.
const SOUND_AFTER: Duration = Duration::from_secs(5);

impl Executor {
    /// Maps a volume, or returns the mapping that is there already.
    ///
    /// # Errors
    /// Anything; then nothing is left behind, or the error says what is.
    pub async fn map(&self, spec: &MapSpec, deadline: Instant) -> Result<View> {
        for _ in 0..MAX_ROUNDS {
            let make = || Volume::new(self.new_record(spec), self.attention.clone());
            let limit = self.settings.mappings;
            let (volume, fresh) = self.register.find_or_insert(&spec.name, limit, make)?;
            if let Some(mut guard) = fresh {
                guard.take_over = spec.take_over;
                return volume.giving_way(self.map_new(guard, deadline)).await;
            }
            let guard = volume.enter_call().await?;
            if !guard.withdrawn {
                return volume.giving_way(self.map_again(guard, spec, deadline)).await;
            }
        }
        Err(Error::new(ErrorKind::Aborted, format!("{} comes and goes too quickly", spec.name)))
    }

    async fn map_new(&self, mut guard: Guard, deadline: Instant) -> Result<View> {
        let _ = self.changes.send(Change { view: guard.volume().view(), removed: false });
        let error = match self.converge_patiently(&mut guard, deadline).await {
            Ok(State::Mapped) => {
                tracing::info!(mapping = guard.volume().name, "mapped");
                guard.take_over = false;
                return Ok(guard.volume().view());
            }
            Ok(State::Failed(trouble)) => trouble.into_error(),
            Ok(other) => Error::new(ErrorKind::Internal, format!("map came to rest in {other:?}")),
            Err(error) => error,
        };
        tracing::warn!(mapping = guard.volume().name, "map failed: {}", error.report());
        guard.record.intent = Intent::Unmapped;
        match self.take_down(&mut guard, Instant::now() + UNDO_LIMIT).await {
            Ok(()) => Err(error),
            Err(undo) => {
                let message = format!("{}; undoing it failed: {}", error.report(), undo.report());
                self.failed(&guard, &Error::new(undo.kind(), message.clone()));
                self.later(&mut guard);
                let error = Error::new(error.kind(), message);
                Err(error.with_repair(format!("cleat unmap {}", guard.volume().name)))
            }
        }
    }

    async fn map_again(&self, mut guard: Guard, spec: &MapSpec, deadline: Instant) -> Result<View> {
        if let Some(difference) = difference(&guard.record, spec) {
            let message = format!("{} is mapped already, with {difference}", spec.name);
            return Err(Error::new(ErrorKind::AlreadyExists, message)
                .with_repair("choose another name, or unmap it first"));
        }
        if guard.record.intent != Intent::Mapped {
            let message = format!("{} is being taken down", spec.name);
            return Err(Error::new(ErrorKind::Aborted, message));
        }
        // Who asks again wants it tried again.
        guard.failures = 0;
        guard.not_before = None;
        guard.take_over = spec.take_over;
        let converged = self.converge_patiently(&mut guard, deadline).await;
        // It was said for this once.
        guard.take_over = false;
        match converged {
            Ok(State::Mapped) => Ok(guard.volume().view()),
            Ok(State::Failed(trouble)) => Err(trouble.into_error()),
            Ok(other) => {
                Err(Error::new(ErrorKind::Internal, format!("map came to rest in {other:?}")))
            }
            Err(error) => {
                self.failed_attempt(&mut guard, &error);
                Err(error)
            }
        }
    }

    /// Takes a mapping down. Says whether there was one.
    ///
    /// # Errors
    /// `InUse`, naming the holders; then the mapping stays as it is.
    pub async fn unmap(&self, target: &str, deadline: Instant) -> Result<bool> {
        let volume = match self.find(target, deadline).await? {
            Target::Volume(volume) => volume,
            Target::Nothing => return Ok(false),
            Target::Orphan(index, identity) => {
                return self.drop_orphan(index, identity, deadline).await.map(|()| true);
            }
        };
        let guard = volume.enter_call().await?;
        if guard.withdrawn {
            return Ok(false);
        }
        volume.giving_way(self.unmap_entered(guard, deadline)).await.map(|()| true)
    }

    async fn unmap_entered(&self, mut guard: Guard, deadline: Instant) -> Result<()> {
        let volume = Arc::clone(guard.volume());
        let (intent, view) = (guard.record.intent, volume.view());
        // What was begun by force is finished by force.
        if intent == Intent::Mapped {
            guard.record.intent = Intent::Unmapped;
        }
        let Err(error) = self.take_down(&mut guard, deadline).await else {
            tracing::info!(mapping = volume.name, "unmapped");
            return Ok(());
        };
        if intent == Intent::Mapped && (!guard.renounced || error.kind() == ErrorKind::InUse) {
            guard.record.intent = Intent::Mapped;
            if guard.renounced {
                self.store(&guard).await?;
                guard.renounced = false;
            }
            self.publish(&volume, |now| *now = view);
            // What has happened to it meanwhile shows after another look.
            let _ = self.attention.try_send(volume.name.clone());
        } else {
            self.failed_attempt(&mut guard, &error);
        }
        Err(error)
    }

    /// Looks after a mapping by itself: after an event, or because it is time.
    pub async fn tend(&self, volume: &Arc<Volume>) {
        let Some(mut guard) = volume.enter_keeper() else { return };
        if guard.withdrawn {
            return;
        }
        let tended = volume.giving_way(async {
            self.tend_entered(&mut guard).await;
            Ok(())
        });
        if let Err(error) = tended.await {
            tracing::info!(mapping = volume.name, "{}", error.report());
        }
    }

    async fn tend_entered(&self, guard: &mut Guard) {
        if guard.not_before.is_some_and(|at| at > Instant::now()) {
            return self.later(guard);
        }
        guard.not_before = None;
        if let Err(error) = self.settle(guard).await {
            tracing::warn!(mapping = guard.volume().name, "{}", error.report());
            self.later(guard);
        }
        let deadline = Instant::now() + REPAIR_LIMIT + unlocking::patience(&guard.record.uri);
        match self.converge(guard, deadline).await {
            Ok(State::Failed(trouble)) => {
                tracing::debug!(mapping = guard.volume().name, "failed: {}", trouble.message);
            }
            Ok(_) => {}
            Err(error) => self.failed_attempt(guard, &error),
        }
    }

    /// Look, plan, act, until the planner rests.
    ///
    /// # Errors
    /// The first failure; what has been done until then stays.
    pub(super) async fn converge(&self, guard: &mut Guard, deadline: Instant) -> Result<State> {
        for _ in 0..MAX_ROUNDS {
            let observed = self.observe(guard, deadline).await?;
            let plan = plan(&guard.record, &observed);
            self.show(guard, &plan.state, &observed);
            if plan.actions.is_empty() {
                return Ok(plan.state);
            }
            // A worker that was just found dead, not for the first time: nobody waits for its successor
            // so urgently that one may be started after the other.
            if guard.is_kept() && guard.not_before.is_some_and(|at| at > Instant::now()) {
                self.later(guard);
                return Ok(plan.state);
            }
            for action in plan.actions {
                tracing::debug!(mapping = guard.volume().name, ?action, "step");
                self.point(&format!("before {action:?}")).await;
                guard.step_begins(action);
                self.step(guard, action, deadline).await?;
                guard.step_ends();
                if action == Action::WithdrawRecord {
                    return Ok(State::Unmapped);
                }
            }
            self.point("after a plan").await;
        }
        let message = format!("{} does not come to rest", guard.volume().name);
        Err(Error::new(ErrorKind::Internal, message))
    }

    /// As `converge`, with a few attempts where that may help.
    async fn converge_patiently(&self, guard: &mut Guard, deadline: Instant) -> Result<State> {
        let mut attempt = 1;
        loop {
            let error = match self.converge(guard, deadline).await {
                Err(error) if may_pass(error.kind()) && attempt < MAX_ATTEMPTS => error,
                other => return other,
            };
            let wait =
                self.random.backoff(attempt, Duration::from_millis(50), Duration::from_secs(1));
            if Instant::now() + wait >= deadline {
                return Err(error);
            }
            tracing::info!(mapping = guard.volume().name, "tried again: {}", error.report());
            sleep(wait).await;
            attempt += 1;
        }
    }

    /// Brings a mapping to nothing, or says who holds it.
    pub(super) async fn take_down(&self, guard: &mut Guard, deadline: Instant) -> Result<()> {
        let patience = deadline.min(Instant::now() + TRANSIENT_LIMIT);
        loop {
            match self.converge_patiently(guard, deadline).await? {
                State::Unmapped => return Ok(()),
                // udev looks at a device after every change of it; that passes.
                State::Held(holders)
                    if holders.iter().all(is_transient) && Instant::now() < patience =>
                {
                    sleep(Duration::from_millis(50)).await;
                }
                State::Held(holders) => {
                    let name = &guard.volume().name;
                    return Err(or_by_force(held(name, &holders), name));
                }
                State::Failed(trouble) => return Err(trouble.into_error()),
                other => {
                    let message = format!("unmap came to rest in {other:?}");
                    return Err(Error::new(ErrorKind::Internal, message));
                }
            }
        }
    }

    /// A failure that nobody may be waiting for: shown, counted, and tried again later.
    pub(super) fn failed_attempt(&self, guard: &mut Guard, error: &Error) {
        let policy = guard.record.options.policy.outage;
        let refusals = guard.setbacks.outwait(policy);
        let name = &guard.volume().name;
        let mut message = error.report();
        match refusals {
            Some(attempt) => {
                message = format!("waits for its backend: {message}");
                // An outage may last for days.
                if attempt <= 3 || attempt.is_multiple_of(60) {
                    tracing::warn!(mapping = name, attempt, "{message}");
                }
            }
            None => tracing::warn!(mapping = name, attempt = guard.failures + 1, "{message}"),
        }
        let outage = outage_of(guard);
        self.publish(guard.volume(), |view| {
            view.message = message;
            view.outage = outage;
        });
        match refusals {
            Some(attempt) => self.pause(guard, attempt),
            None => self.count_failure(guard),
        }
        self.later(guard);
    }

    /// One more repair that failed or did not last; the next one waits the longer.
    pub(super) fn count_failure(&self, guard: &mut Guard) {
        if guard.sound_since.take().is_some_and(|since| since.elapsed() > SOUND_AFTER) {
            guard.failures = 0;
            guard.dead_since = None;
        }
        guard.failures = guard.failures.saturating_add(1);
        self.pause(guard, guard.failures);
    }

    /// The first repair is immediate: its cause is most likely past. The others wait ever longer.
    fn pause(&self, guard: &mut Guard, attempts: u32) {
        if attempts > 1 {
            let (first, most) = (Duration::from_millis(100), Duration::from_secs(10));
            let wait = self.random.backoff(attempts - 1, first, most);
            guard.not_before = Some(Instant::now() + wait);
        }
    }

    /// Has the mapping looked at when its time has come.
    fn later(&self, guard: &mut Guard) {
        let (name, attention) = (guard.volume().name.clone(), self.attention.clone());
        let at = guard.not_before.unwrap_or_else(|| Instant::now() + Duration::from_secs(1));
        tokio::spawn(async move {
            tokio::time::sleep_until(at).await;
            let _ = attention.try_send(name);
        });
    }

    fn show(&self, guard: &mut Guard, state: &State, observed: &Observed) {
        let sound = *state == State::Mapped;
        match (sound, guard.sound_since) {
            (true, None) => guard.sound_since = Some(Instant::now()),
            (false, Some(_)) if matches!(state, State::Failed(_)) => guard.sound_since = None,
            _ => {}
        }
        // An unmap that is refused changes nothing; that a failed map cannot be undone is told.
        if matches!(state, State::Held(_)) && !guard.renounced && guard.record.established {
            return;
        }
        let core: &super::volume::Core = guard;
        let message = match state {
            State::Failed(trouble) => explain(trouble),
            State::Held(holders) => held(&core.record.name, holders).message().to_owned(),
            State::Mapped => {
                let growth = core.growth.as_ref().map(|(_, why)| why.clone());
                let told = growth.or_else(|| core.refusal.clone());
                told.or_else(|| core.unquiet.clone()).unwrap_or_default()
            }
            _ => String::new(),
        };
        let keep = matches!(state, State::Recovering | State::Unmapping);
        let (record, paths) = (core.record.clone(), core.paths.clone());
        let serving = core.worker.as_ref();
        let worker_pid = serving.map_or(0, |worker| worker.id().pid);
        let worker_build = serving.map_or(String::new(), |worker| worker.ready.build.clone());
        let device = observed.devices.first().copied();
        let outage = outage_of(core);
        let last_end = core.setbacks.last_end();
        let state = state.clone();
        let failed = matches!(state, State::Failed(_));
        if let Some(view) = self.publish(guard.volume(), |view| {
            if !(keep && view.state == state) {
                view.message = message;
            }
            tell_outage(&record.name, view.outage.as_ref(), outage.as_ref());
            let holders = std::mem::take(&mut view.holders);
            let message = std::mem::take(&mut view.message);
            *view = View {
                record,
                state,
                message,
                device,
                paths,
                worker_pid,
                worker_build,
                holders,
                outage,
                last_end,
            };
        }) && failed
        {
            tracing::error!(mapping = view.record.name, "failed: {}", view.message);
        }
    }

    fn failed(&self, guard: &Guard, error: &Error) {
        let trouble = Trouble {
            kind: error.kind(),
            message: error.report(),
            repair: format!("cleat unmap {}", guard.volume().name),
        };
        self.publish(guard.volume(), |view| {
            view.message = explain(&trouble);
            view.state = State::Failed(trouble);
        });
    }

    /// Changes what everybody sees, and tells those who watch.
    pub(super) fn publish(
        &self,
        volume: &Arc<Volume>,
        change: impl FnOnce(&mut View),
    ) -> Option<View> {
        let view = volume.update(change)?;
        // No receiver: nobody watches.
        let _ = self.changes.send(Change { view: view.clone(), removed: false });
        Some(view)
    }

    /// Stores the record, off the event loop.
    pub(super) async fn store(&self, guard: &Guard) -> Result<()> {
        let record = guard.record.clone();
        self.write_journal(guard, move |journal, given_up| journal.store_unless(&record, given_up))
            .await
    }

    /// Writes to the journal. A call that gives way in the middle, or waits in vain, leaves its write
    /// under way: the next one of the mapping waits for it, so that they reach the disk in their order.
    /// Where one was waited for in vain, the record is written again once the disk answers: whoever
    /// waited was told that it had failed, and it may have come true all the same.
    pub(super) async fn write_journal(
        &self,
        guard: &Guard,
        write: impl FnOnce(&Journal, &AtomicBool) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let journal = Arc::clone(&self.journal);
        let given_up = Arc::new(AtomicBool::new(false));
        let is_given_up = Arc::clone(&given_up);
        let write = async {
            let turn = guard.volume().turn_to_write().await;
            let write = move || {
                let _turn = turn;
                write(&journal, &is_given_up)
            };
            blocking(write).await
        };
        timeout(JOURNAL_LIMIT, write).await.unwrap_or_else(|_| {
            given_up.store(true, Ordering::SeqCst);
            guard.volume().settle_later();
            let message = "the disk of the journal does not take a record: its write still waits";
            Err(Error::new(ErrorKind::TimedOut, message).with_repair(
                "see what the file system of the state directory waits for: dmesg, \
                 /proc/pressure/io",
            ))
        })
    }

    /// Writes the record again where an earlier write was given up.
    async fn settle(&self, guard: &Guard) -> Result<()> {
        if !guard.volume().is_unsettled() || guard.record.worker.is_none() {
            return Ok(());
        }
        self.store(guard).await?;
        guard.volume().settled();
        Ok(())
    }

    /// A point at which tests make the executor crash.
    pub(super) async fn point(&self, name: &str) {
        if self.halt.as_ref().is_some_and(|halt| halt(name)) {
            std::future::pending::<()>().await;
        }
    }

    /// Every mapping.
    pub fn register(&self) -> &Register {
        &self.register
    }

    /// What an operator should know of how the daemon began.
    pub fn findings(&self) -> Vec<String> {
        self.findings.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }

    /// How much the kernel has to do for us.
    pub fn kernel_load(&self) -> super::kernel_calls::Load {
        self.kernel.load()
    }

    /// Every change from now on.
    pub fn watch(&self) -> broadcast::Receiver<Change> {
        self.changes.subscribe()
    }

    fn new_record(&self, spec: &MapSpec) -> Record {
        let defaults = &self.settings.defaults;
        let or = |value: u32, default: u32| if value == 0 { default } else { value };
        let connections = or(spec.connections, defaults.connections);
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Record {
            version: Record::VERSION,
            mapping_id: format!("{:016x}", self.random.next()),
            name: spec.name.clone(),
            uri: spec.uri.clone(),
            options: Options {
                read_only: spec.read_only,
                connections,
                block_size: or(spec.block_size, defaults.block_size),
                dead_connection_timeout_s: or(
                    spec.dead_connection_timeout_s,
                    defaults.dead_connection_timeout_s,
                ),
                // With several connections a short tick kills live sockets under load.
                replay_delay_ms: if connections == 1 { defaults.replay_delay_ms } else { 0 },
                policy: spec.policy.apply(defaults.policy),
                quiesce: spec.quiesce,
            },
            intent: Intent::Mapped,
            generation: 0,
            worker: None,
            predecessor: None,
            volume: None,
            established: false,
            fenced: false,
            quiet: None,
            created_at_s: since_epoch.as_secs(),
            boot_id: self.settings.boot_id.clone(),
        }
    }
}

/// Runs a call that may block for a moment, such as an fsync, off the event loop.
pub(super) async fn blocking<T: Send + 'static>(
    call: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    offload("a call that blocks", call)
        .await
        .map_err(|error| Error::new(ErrorKind::Internal, "a thread failed").with_source(error))?
}

/// What a mapping has that a request for the same name does not ask for.
fn difference(record: &Record, spec: &MapSpec) -> Option<String> {
    let options = &record.options;
    let differs = |asked: u32, is: u32| asked != 0 && asked != is;
    if let Some(other) = other_volume(record, &spec.uri) {
        Some(other)
    } else if options.read_only != spec.read_only {
        Some(if options.read_only { "read_only=true" } else { "read_only=false" }.to_owned())
    } else if differs(spec.connections, options.connections) {
        Some(format!("connections={}", options.connections))
    } else if differs(
        spec.block_size,
        record.volume.map_or(options.block_size, |volume| volume.block_size),
    ) {
        Some("another block size".to_owned())
    } else if differs(spec.dead_connection_timeout_s, options.dead_connection_timeout_s) {
        Some(format!("dead_connection_timeout={}s", options.dead_connection_timeout_s))
    } else if options.quiesce != spec.quiesce {
        Some(format!("quiesce={}", options.quiesce))
    } else if spec.policy.apply(options.policy) != options.policy {
        Some("another outage policy or other limits (cleat set changes them)".to_owned())
    } else {
        None
    }
}

/// The outage that a mapping's worker, or the attempts to start one, have met.
fn outage_of(core: &super::volume::Core) -> Option<OutageView> {
    if let Some(worker) = &core.worker {
        let outage = worker.outage()?;
        let (since_unix_ms, reason) = (outage.since_unix_ms, outage.reason);
        return Some(OutageView { since_unix_ms, reason, queued: 0 });
    }
    let refusal = core.setbacks.refusal()?;
    let since = refusal.since.duration_since(UNIX_EPOCH).unwrap_or_default();
    let since_unix_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
    Some(OutageView { since_unix_ms, reason: Some(refusal.reason.clone()), queued: 0 })
}

fn tell_outage(name: &str, before: Option<&OutageView>, now: Option<&OutageView>) {
    match (before, now) {
        (None, Some(outage)) => tracing::warn!(
            mapping = name,
            reason = outage.reason.as_deref().unwrap_or("unknown"),
            "the backend does not answer"
        ),
        (Some(_), None) => tracing::info!(mapping = name, "the backend answers again"),
        _ => {}
    }
}

/// Whether another attempt may succeed soon.
fn may_pass(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::Unavailable | ErrorKind::Aborted)
}

/// udev and what it runs.
pub(super) fn is_transient(holder: &Holder) -> bool {
    let Holder::Process { command, .. } = holder else { return false };
    ["(udev-worker)", "systemd-udevd", "udevd", "blkid"].iter().any(|name| command.contains(name))
}

/// An error that names who holds a device.
pub(super) fn held(name: &str, holders: &[Holder]) -> Error {
    const SHOWN: usize = 8;
    let mut who: Vec<String> = holders.iter().take(SHOWN).map(describe).collect();
    if holders.len() > SHOWN {
        who.push(format!("{} more", holders.len() - SHOWN));
    }
    let repair = match holders.first() {
        Some(Holder::Mount { path, namespace_pid: None, .. }) => {
            format!("umount {}", path.display())
        }
        Some(Holder::Mount { path, namespace_pid: Some(pid), .. }) => {
            format!("nsenter --mount --target {pid} umount {}", path.display())
        }
        Some(Holder::Process { pid, .. }) => format!("end process {pid}, or have it close {name}"),
        Some(Holder::Device { name: upper }) if upper == "swap" => {
            "end its use as swap: swapoff, see /proc/swaps".to_owned()
        }
        Some(Holder::Device { name: upper }) => format!("take {upper} down first"),
        None => String::new(),
    };
    Error::new(ErrorKind::InUse, format!("{name} is in use: {}", who.join(", ")))
        .with_repair(repair)
}

fn describe(holder: &Holder) -> String {
    match holder {
        Holder::Mount { path, filesystem, namespace_pid: None } => {
            format!("mounted on {} ({filesystem})", path.display())
        }
        Holder::Mount { path, filesystem, namespace_pid: Some(pid) } => {
            format!(
                "mounted on {} ({filesystem}) in the namespace of process {pid}",
                path.display()
            )
        }
        Holder::Process { pid, command } => format!("open in process {pid} ({command})"),
        Holder::Device { name } if name == "swap" => "used as swap".to_owned(),
        Holder::Device { name } => format!("under the block device {name}"),
    }
}

fn explain(trouble: &Trouble) -> String {
    format!("{}; {}", trouble.message, trouble.repair)
}
