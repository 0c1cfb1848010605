//! A volume is made quiet for the moment in which a snapshot of it is made, so that what it holds then
//! needs no repair: the file systems on its device are frozen, or the administrator's hook does what
//! it takes. And that is always ended again:
//! - when the snapshot has been made, or given up;
//! - when it lasts longer than `map.quiesce_deadline`, when the worker that asked is gone, or its
//!   backend is: then the snapshot may not be what it should be, which is told;
//! - before the device goes;
//! - by the next supervisor, since it is recorded before anything is frozen.
//!
//! Freezing writes through the worker, and the backend may hang: nobody waits for that beyond a limit,
//! and what hangs undoes itself (`kernel::freeze`). Thawing writes, too, so a dead worker is replaced
//! first, and a thaw that hangs is put off and never the failure of a mapping that works.

use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep};

use super::executor::{Executor, blocking};
use super::hook;
use super::mapping::{Action, Intent, Observed, Plan, Record, State};
use super::steps::{no_worker, within};
use super::volume::{Core, Guard, node_of};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_kernel::DeviceIndex;
use cleat_worker::protocol::ToWorker;

/// A device that is quiet, or about to be, as it is recorded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quiet {
    /// Its number.
    pub device: DeviceIndex,
    /// Milliseconds since the epoch.
    pub since_unix_ms: u64,
    /// What has made it quiet, and ends it; `None`: its file systems are frozen.
    pub hook: Option<PathBuf>,
    /// File systems that somebody else had frozen before.
    pub spared: Vec<String>,
}

/// How devices are made quiet.
#[derive(Debug, Clone)]
pub struct Means {
    /// In place of freezing file systems.
    pub hook: Option<PathBuf>,
    /// The longest that it may last, the beginning included.
    pub limit: Duration,
}

/// What a look at a mapping shows of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Seen {
    /// A snapshot that waits for an answer.
    pub snapshot: Option<u64>,
    /// What was made quiet is still to be.
    pub lasts: bool,
    /// A thaw could not be carried out a moment ago.
    pub thaw_waits: bool,
}

/// The last snapshot that a worker was answered about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answered {
    /// The worker.
    pid: u32,
    /// Its number for it.
    snapshot: u64,
    /// How long the device may stay quiet, where it is.
    until: Option<Instant>,
}

/// For a device to become quiet, whatever the configuration says: librbd gives up after 50 s, and its
/// user asks anew.
const BEGIN_LIMIT: Duration = Duration::from_secs(35);

/// For a thaw; what hangs goes on behind the scenes.
const THAW_LIMIT: Duration = Duration::from_secs(5);

/// The same where a forced unmap waits for it.
const FORCED_THAW_LIMIT: Duration = Duration::from_millis(500);

/// How soon a thaw that was put off is tried again.
const AGAIN_AFTER: Duration = Duration::from_secs(5);

/// For the worker to pass the answer on.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// Adds to a plan what is to become of a device that is quiet, or should be.
pub(super) fn complete(mut plan: Plan, record: &Record, observed: &Observed) -> Plan {
    let Seen { snapshot, lasts, thaw_waits } = observed.quiet;
    let actions = &mut plan.actions;
    let at = |wanted: fn(&Action) -> bool| actions.iter().position(wanted);
    match (&record.quiet, record.intent) {
        (None, Intent::Mapped) => {
            // Only where all is well: else it is refused in the end, by librbd's own limit.
            if let (Some(snapshot), [device], State::Mapped, []) =
                (snapshot, observed.devices.as_slice(), &plan.state, actions.as_slice())
            {
                actions.push(Action::Quiesce { index: device.index, snapshot });
            }
        }
        (None, _) => {}
        // Behind a repair, which it may have to wait for.
        (Some(_), Intent::Mapped) if !lasts && !thaw_waits => actions.push(Action::Thaw),
        (Some(_), Intent::Mapped) => {}
        (Some(_), Intent::Unmapped) => {
            // Through a worker that serves, or else when everything fails that is written.
            let last = |a: &Action| matches!(a, Action::WithdrawRecord | Action::AwaitConnect);
            if let Some(at) = at(|a| matches!(a, Action::Flush(_))).or_else(|| at(last)) {
                actions.insert(at, Action::Thaw);
            }
        }
        (Some(_), Intent::Forced(_)) => {
            let first = at(|a| matches!(a, Action::Detach(..)));
            let last = at(|a| matches!(a, Action::ProveSilence));
            last.into_iter().for_each(|at| actions.insert(at, Action::Thaw));
            first.into_iter().for_each(|at| actions.insert(at, Action::TryThaw));
        }
    }
    plan
}

/// What is to be seen of it.
pub(super) fn observe(core: &Core) -> Seen {
    let worker = core.worker.as_ref().filter(|worker| !worker.has_ended());
    let waiting = worker.and_then(|worker| Some((worker.id().pid, worker.snapshot()?)));
    let answered = core.answered.map(|answered| (answered.pid, answered.snapshot));
    let away = worker.is_some_and(|worker| worker.outage().is_some() || worker.is_fenced());
    let until = core.answered.and_then(|answered| answered.until);
    Seen {
        snapshot: waiting.filter(|_| waiting != answered).map(|(_, snapshot)| snapshot),
        lasts: waiting.is_some()
            && waiting == answered
            && !away
            && until.is_some_and(|until| Instant::now() < until),
        thaw_waits: core.thaw_again.is_some_and(|at| Instant::now() < at),
    }
}

impl Executor {
    /// Makes a device quiet for a snapshot, and says so, or why it is not. A failure is the snapshot's,
    /// not the mapping's.
    pub(super) async fn quiesce(
        &self,
        guard: &mut Guard,
        index: DeviceIndex,
        snapshot: u64,
        deadline: Instant,
    ) -> Result<()> {
        let worker = guard.worker.as_ref().ok_or_else(|| no_worker(&guard.record))?;
        let pid = worker.id().pid;
        let until = Instant::now() + self.settings.quiesce.limit;
        let begun = within(deadline.min(until), BEGIN_LIMIT);
        let quiet = self.make_quiet(guard, index, begun).await;
        self.point("quiet, not answered").await;
        let errno = quiet.as_ref().map_or_else(|error| errno(error.kind()), |()| 0);
        let name = guard.record.name.clone();
        if let Err(error) = &quiet {
            let why = format!("a snapshot of it failed: it is not quiet: {}", error.report());
            tracing::warn!(mapping = name, "{why}");
            guard.unquiet = Some(why);
        }
        // From here on it is answered, whatever becomes of that.
        guard.answered =
            Some(Answered { pid, snapshot, until: Some(until).filter(|_| errno == 0) });
        let worker = guard.worker.as_ref().ok_or_else(|| no_worker(&guard.record))?;
        let answer = ToWorker::Quiesced { snapshot, errno };
        match worker.call(answer, Vec::new(), Instant::now() + ANSWER_LIMIT).await {
            Ok(_) if errno == 0 => {
                tracing::info!(mapping = name, "quiet for a snapshot");
                self.call_at(guard, until);
            }
            // It is thawed by the next plan.
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(mapping = name, "a snapshot does not wait: {}", error.report());
                guard.answered = Some(Answered { pid, snapshot, until: None });
            }
        }
        Ok(())
    }

    async fn make_quiet(
        &self,
        guard: &mut Guard,
        index: DeviceIndex,
        deadline: Instant,
    ) -> Result<()> {
        if guard.worker.as_ref().is_some_and(|worker| worker.outage().is_some()) {
            let message = "what is dirty cannot be written: the backend does not answer";
            return Err(Error::new(ErrorKind::Unavailable, message));
        }
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let hook = self.settings.quiesce.hook.clone();
        guard.record.quiet = Some(Quiet {
            device: index,
            since_unix_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
            hook: hook.clone(),
            spared: Vec::new(),
        });
        self.store(guard).await?;
        self.point("quiet recorded").await;
        if let Some(hook) = hook {
            return run(hook, index, "quiesce", deadline).await;
        }
        let spared = self.kernel.freeze(index, guard.record.identity(), deadline).await?;
        self.point("frozen").await;
        if spared.is_empty() {
            return Ok(());
        }
        tracing::info!(mapping = guard.volume().name, ?spared, "frozen by somebody else");
        if let Some(quiet) = &mut guard.record.quiet {
            quiet.spared = spared;
        }
        self.store(guard).await
    }

    /// Ends it.
    ///
    /// # Errors
    /// `TimedOut` where it cannot be done now, and the mapping is to go; else it is put off.
    pub(super) async fn thaw(&self, guard: &mut Guard, deadline: Instant) -> Result<()> {
        let by_hook = guard.record.quiet.as_ref().is_some_and(|quiet| quiet.hook.is_some());
        let limit = match guard.record.intent {
            Intent::Forced(_) => FORCED_THAW_LIMIT,
            Intent::Mapped | Intent::Unmapped if by_hook => self.settings.quiesce.limit,
            Intent::Mapped | Intent::Unmapped => THAW_LIMIT,
        };
        let early = why_early(guard);
        let thawed = self.thaw_once(guard, within(deadline, limit)).await;
        let name = guard.record.name.clone();
        match thawed {
            Ok(()) => {
                guard.thaw_again = None;
                tracing::info!(mapping = name, "quiet no more");
                if let Some(why) = early {
                    let why = format!("its last snapshot may not be consistent: {why}");
                    tracing::warn!(mapping = name, "{why}");
                    guard.unquiet = Some(why);
                } else if guard.answered.is_some_and(|answered| answered.until.is_some()) {
                    guard.unquiet = None;
                }
                Ok(())
            }
            Err(error) if guard.record.intent == Intent::Mapped => {
                tracing::warn!(mapping = name, "not thawed yet: {}", error.report());
                let at = Instant::now() + AGAIN_AFTER;
                guard.thaw_again = Some(at);
                self.call_at(guard, at);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    async fn thaw_once(&self, guard: &mut Guard, deadline: Instant) -> Result<()> {
        let Some(quiet) = guard.record.quiet.clone() else { return Ok(()) };
        let (index, identity) = (quiet.device, guard.record.identity());
        let by_hook = match quiet.hook.clone() {
            Some(hook) => Some(run(hook, index, "unquiesce", deadline).await),
            None => None,
        };
        if let Some(Err(error)) = &by_hook {
            // What is mounted is not to stay frozen.
            tracing::error!(mapping = guard.record.name, "thawed without it: {}", error.report());
        }
        if !matches!(by_hook, Some(Ok(()))) {
            let until = deadline.max(Instant::now() + FORCED_THAW_LIMIT);
            let spared = quiet.spared.clone();
            let thaw =
                move |k: &dyn cleat_kernel::Kernel, until| k.thaw(index, &identity, &spared, until);
            self.urgent.wait("thaw the file systems", until, None, thaw).await?;
        }
        self.point("thawed").await;
        guard.record.quiet = None;
        let stored = self.store(guard).await;
        if stored.is_err() {
            // Thawing once more does no harm.
            guard.record.quiet = Some(quiet);
        }
        stored
    }

    /// Ends it for every mapping: nobody would, once this supervisor is gone.
    pub(super) async fn thaw_everything(&self, deadline: Instant) {
        for volume in self.register().all() {
            if volume.view().record.quiet.is_none() {
                continue;
            }
            let thawed = match volume.enter() {
                Ok(mut guard) => self.thaw(&mut guard, deadline).await,
                Err(error) => Err(error),
            };
            if let Err(error) = thawed {
                tracing::error!(mapping = volume.name, "stays frozen: {}", error.report());
            }
        }
    }

    /// Has the mapping looked at then.
    fn call_at(&self, guard: &Guard, at: Instant) {
        let (name, attention) = (guard.volume().name.clone(), self.attention.clone());
        tokio::spawn(async move {
            sleep(at.saturating_duration_since(Instant::now())).await;
            // An error means that the daemon is gone.
            let _ = attention.send(name).await;
        });
    }
}

/// Refuses what would end a moment that a snapshot needs.
///
/// # Errors
/// `Unavailable` while a mapping is quiet.
pub(super) fn check_none(record: &Record) -> Result<()> {
    if record.quiet.is_none() {
        return Ok(());
    }
    let message = format!("a snapshot of {} is being made: it is quiet for that", record.name);
    Err(Error::new(ErrorKind::Unavailable, message).with_repair("try again in a moment"))
}

/// Why it ends before the snapshot has been made, where it does.
fn why_early(core: &Core) -> Option<&'static str> {
    let Some(Answered { pid, snapshot, until }) = core.answered else {
        return Some("the daemon that had made it quiet has ended");
    };
    // Refused, and told so.
    let until = until?;
    match &core.worker {
        Some(worker) if worker.id().pid == pid && !worker.has_ended() => {
            if worker.snapshot() != Some(snapshot) {
                return None;
            }
            Some(match Instant::now() < until {
                true => "its backend or its mapping went away meanwhile",
                false => "it took longer than map.quiesce_deadline",
            })
        }
        _ => Some("the worker that had asked for it has ended"),
    }
}

async fn run(
    hook: PathBuf,
    index: DeviceIndex,
    verb: &'static str,
    deadline: Instant,
) -> Result<()> {
    let deadline = deadline.into_std();
    let device = node_of(index).display().to_string();
    blocking(move || hook::run(&hook, &device, verb, deadline)).await
}

/// What `rbd snap create` shows. Not EOPNOTSUPP, which librbd takes for consent, and not ETIMEDOUT, upon
/// which it asks again, without end.
fn errno(kind: ErrorKind) -> i32 {
    match kind {
        ErrorKind::Unavailable => libc::EAGAIN,
        ErrorKind::PermissionDenied => libc::EPERM,
        _ => libc::EIO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::plan;
    use crate::mapping::tests::{established, seen};
    use crate::mapping::{SeenWorker, WorkerId};
    use cleat_kernel::{Holder, UnmountScope};

    const SERVES: SeenWorker = SeenWorker::Alive { connections: 1, size: 1 << 20 };

    fn quiet(intent: Intent) -> Record {
        let quiet = Quiet { device: 3, since_unix_ms: 1, hook: None, spared: Vec::new() };
        let worker = Some(WorkerId { pid: 6, started_ticks: 6 });
        Record { intent, worker, quiet: Some(quiet), ..established(1, true) }
    }

    fn observed(worker: SeenWorker, quiet: Seen) -> Observed {
        Observed { quiet, ..seen(worker) }
    }

    #[test]
    fn only_a_mapping_that_works_is_made_quiet_and_not_twice() {
        let asked = Seen { snapshot: Some(5), ..Seen::default() };
        let record = established(1, true);
        let actions = |record: &Record, worker| plan(record, &observed(worker, asked)).actions;
        let quiesce = Action::Quiesce { index: 3, snapshot: 5 };
        assert_eq!(actions(&record, SERVES), [quiesce]);
        let cut = SeenWorker::Alive { connections: 0, size: 1 << 20 };
        let shrunk = SeenWorker::Alive { connections: 1, size: 1 << 19 };
        for worker in [cut, shrunk, SeenWorker::Gone, SeenWorker::Fenced] {
            assert!(!actions(&record, worker).contains(&quiesce));
        }
        assert_eq!(actions(&quiet(Intent::Mapped), SERVES), [Action::Thaw], "thawed first");
    }

    #[test]
    fn what_is_quiet_is_thawed_unless_its_snapshot_is_being_made() {
        let record = quiet(Intent::Mapped);
        let actions = |worker, seen| plan(&record, &observed(worker, seen)).actions;
        let lasts = Seen { lasts: true, ..Seen::default() };
        let waits = Seen { thaw_waits: true, ..Seen::default() };
        assert_eq!(actions(SERVES, Seen::default()), [Action::Thaw]);
        assert_eq!(actions(SERVES, lasts), []);
        assert_eq!(actions(SERVES, waits), []);
        // A dead worker is replaced first: thawing writes.
        let actions_then = actions(SeenWorker::Gone, Seen::default());
        assert_eq!(actions_then.last(), Some(&Action::Thaw));
        assert!(actions_then.contains(&Action::StartWorker));
        assert_eq!(actions(SeenWorker::Fenced, Seen::default()).last(), Some(&Action::Thaw));
    }

    #[test]
    fn nothing_that_is_quiet_is_taken_down_before_it_is_thawed() {
        let at = |actions: &[Action], wanted: Action| {
            actions.iter().position(|action| *action == wanted).unwrap()
        };
        let lasts = Seen { lasts: true, ..Seen::default() };
        let unmapped = quiet(Intent::Unmapped);
        let actions = plan(&unmapped, &observed(SERVES, lasts)).actions;
        assert!(at(&actions, Action::Thaw) < at(&actions, Action::Flush(3)));
        // Whoever has it mounted keeps it, and the moment that his snapshot needs.
        let mount =
            Holder::Mount { path: "/mnt".into(), filesystem: "ext4".into(), namespace_pid: None };
        let held = Observed { holders: vec![mount], ..observed(SERVES, lasts) };
        assert_eq!(plan(&unmapped, &held).actions, []);
        let dead = plan(&unmapped, &observed(SeenWorker::Gone, Seen::default())).actions;
        assert!(at(&dead, Action::Disconnect(3)) < at(&dead, Action::Thaw));
        assert!(at(&dead, Action::Thaw) < at(&dead, Action::WithdrawRecord));

        let forced = quiet(Intent::Forced(UnmountScope::All));
        let actions = plan(&forced, &observed(SERVES, lasts)).actions;
        assert!(at(&actions, Action::FailIo) < at(&actions, Action::TryThaw));
        let detach = Action::Detach(3, UnmountScope::All);
        assert!(at(&actions, Action::TryThaw) < at(&actions, detach));
        assert!(at(&actions, Action::Sever(3)) < at(&actions, Action::Thaw));
        assert!(at(&actions, Action::Thaw) < at(&actions, Action::WithdrawRecord));
    }

    #[test]
    fn no_failure_is_told_as_consent_or_repeated_without_end() {
        for kind in [ErrorKind::Unsupported, ErrorKind::TimedOut, ErrorKind::Internal] {
            assert!(![0, libc::EOPNOTSUPP, libc::ETIMEDOUT].contains(&errno(kind)));
        }
    }
}
