//! The planner: what is wanted and what is seen → what to do next. No I/O, no clock, no memory.
//!
//! A plan's actions are carried out in order until one fails; then the world is looked at again
//! and planned anew. So every action is safe to repeat, and a plan may be cut anywhere.
//!
//! Rules, which the property tests below hold it to:
//! - a device is touched only when it carries the mapping's identity;
//! - a worker is started only when no earlier one can still write (proved: its process has ended);
//! - a device that somebody holds is not disconnected;
//! - a volume whose content died with its worker is reported lost, never replaced by zeroes.
//!
//! An unmap by force is the exception to the third rule, as its user wants: it rests nowhere before
//! the mapping is gone. See `force` for the order of what it does.
//!
//! A planned hand-over is begun by `upgrade`, not by a plan. What is planned is its end, however it
//! was cut short: of two workers of a mapping one serves, and the handover word tells which.
//!
//! A place kept for what comes: a fenced claim is one more [`SeenWorker`].

use serde::{Deserialize, Serialize};

use super::quiesce::{self, Quiet};
use cleat_core::error::{Error, ErrorKind};
use cleat_core::policy::Policy;
use cleat_kernel::{DeviceIndex, Holder, Identity, UnmountScope};

/// What is remembered of a mapping, durably. See `journal`. Fields are only added, each with a
/// default, and unknown ones ignored: records of older and newer builds can be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// [`Record::VERSION`].
    pub version: u32,
    /// Lower-case hexadecimal, unique.
    pub mapping_id: String,
    /// Unique on the node.
    pub name: String,
    /// The volume.
    pub uri: String,
    /// As asked for, with defaults filled in.
    pub options: Options,
    /// What the user wants.
    pub intent: Intent,
    /// Raised with every new worker, before it is told anything.
    pub generation: u64,
    /// The newest worker; written before it is told anything, so that it can always be found.
    pub worker: Option<WorkerId>,
    /// While `worker` is about to succeed a worker that still serves: that one.
    #[serde(default)]
    pub predecessor: Option<WorkerId>,
    /// What the device was made from; written before it is connected.
    pub volume: Option<Volume>,
    /// Whether `map` has succeeded: from here on a missing device is a fault, not work to do.
    pub established: bool,
    /// Whether somebody else came to own the volume: no worker of this mapping opens it again.
    #[serde(default)]
    pub fenced: bool,
    /// Written before anything is made quiet for a snapshot, and taken back after that has ended.
    #[serde(default)]
    pub quiet: Option<Quiet>,
    /// Seconds since the epoch.
    pub created_at_s: u64,
    /// The kernel's boot: devices do not survive it.
    pub boot_id: String,
}

impl Record {
    /// Raised when a field changes its meaning.
    pub const VERSION: u32 = 1;

    /// What its device carries in the kernel.
    pub fn identity(&self) -> Identity {
        Identity::new(&self.mapping_id, &self.name)
    }
}

/// How a volume is mapped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Options {
    /// Nothing is ever written.
    pub read_only: bool,
    /// Connections to the kernel; at least 1.
    pub connections: u32,
    /// 0: the backend's minimum.
    pub block_size: u32,
    /// How long new I/O waits for a worker before it fails.
    pub dead_connection_timeout_s: u32,
    /// How soon after a repair the kernel repeats what the dead worker left; 0: the kernel's 30 s.
    pub replay_delay_ms: u32,
    /// What happens in an outage of the backend, and how fast the mapping may go. Changed live.
    #[serde(default, deserialize_with = "Policy::understood")]
    pub policy: Policy,
    /// The device is made quiet when a snapshot of the volume is made.
    #[serde(default)]
    pub quiesce: bool,
}

/// What the user wants of a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Intent {
    /// A working device.
    Mapped,
    /// Nothing left.
    Unmapped,
    /// Nothing left, whatever hangs and whoever holds it.
    Forced(UnmountScope),
}

/// A process that cannot be mistaken for a later one of the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WorkerId {
    /// Its number.
    pub pid: u32,
    /// Field 22 of /proc/pid/stat: clock ticks since boot.
    pub started_ticks: u64,
}

/// What a device is made from, as the worker said it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Volume {
    /// In bytes.
    pub size: u64,
    /// Of the device, in bytes.
    pub block_size: u32,
    /// NBD transmission flags.
    pub transmission_flags: u16,
    /// Whether a new worker finds the content again.
    pub outlives_worker: bool,
}

/// NBD_FLAG_READ_ONLY: a volume that is so by itself (a snapshot) has it without being asked to, and
/// its device refuses writes.
pub(super) const READ_ONLY: u16 = 1 << 1;

impl Volume {
    /// Whether its device refuses writes.
    pub fn is_read_only(&self) -> bool {
        self.transmission_flags & READ_ONLY != 0
    }
}

/// What is, as far as this mapping is concerned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Observed {
    /// Connected devices that carry the mapping's identity.
    pub devices: Vec<SeenDevice>,
    /// Its worker.
    pub worker: SeenWorker,
    /// The worker that it is to succeed; `Gone` when there is none.
    pub predecessor: SeenWorker,
    /// With a predecessor: whether the worker has taken over from it; `None` when nobody can tell.
    pub taken: Option<bool>,
    /// Who holds the devices. Looked for whenever the intent is to unmap, as looking takes long.
    pub holders: Vec<Holder>,
    /// Whether the device's paths have been seen since the supervisor started.
    pub announced: bool,
    /// Repairs that did not last, in a row.
    pub failures: u32,
    /// How the last of them ended, for the reader.
    pub history: String,
    /// No worker has served the device for as long as I/O may wait.
    pub overdue: bool,
    /// In place of a worker, somebody answers each request with an error.
    pub refusing: bool,
    /// A growth of the device could not be carried out a moment ago.
    pub growth_waits: bool,
    /// What a snapshot asks for, and what was done for it.
    pub quiet: quiesce::Seen,
    /// The kernel has not ended an attempt to connect a device, which nobody waits for any more.
    pub connecting: bool,
}

/// A device with our identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SeenDevice {
    /// N of `/dev/nbdN`.
    pub index: DeviceIndex,
    /// In bytes.
    pub size: u64,
}

/// A mapping's worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SeenWorker {
    /// No process of this mapping exists: none was started, or its end is proved.
    Gone,
    /// It answers.
    Alive {
        /// Kernel connections that it serves.
        connections: u32,
        /// Of the volume, in bytes.
        size: u64,
    },
    /// Its process exists and does not answer, or not in our language.
    Unreachable {
        /// Of the process.
        pid: u32,
        /// Why, for the reader.
        reason: String,
    },
    /// The volume belongs to somebody else now; the worker fails every request.
    Fenced,
}

/// One thing to do. Each is bounded in time and safe to repeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Start a worker of the next generation and open the volume in it.
    StartWorker,
    /// Connect a new device to the worker.
    Connect,
    /// Wait for the device's node, symlink and size.
    WaitReady,
    /// Remember that the mapping has been made.
    Establish,
    /// Give the device's dead connections new sockets to the worker: so many are missing.
    Reconnect {
        /// The device.
        index: DeviceIndex,
        /// Connections to replace.
        missing: u32,
    },
    /// Make the device as large as its volume has become, in bytes. One that cannot be done now is
    /// put off, and no failure: the mapping works.
    Grow {
        /// The device.
        index: DeviceIndex,
        /// Of the volume, in whole blocks.
        size: u64,
    },
    /// Have the device's requests answered with errors, those included that a worker left.
    Refuse {
        /// The device.
        index: DeviceIndex,
        /// Its connections.
        connections: u32,
    },
    /// Remember that the mapping is being taken down.
    Renounce,
    /// Write back what the device's page cache holds.
    Flush(DeviceIndex),
    /// Look for holders once more, then disconnect.
    Disconnect(DeviceIndex),
    /// End the worker; by SIGKILL when it does not go. Proved before this succeeds.
    StopWorker,
    /// End the worker that was succeeded, as `StopWorker` does, and forget it.
    EndPredecessor,
    /// Make the worker that was not succeeded the worker again.
    Reinstate,
    /// Wait until the kernel has ended an attempt to connect a device; then look again.
    AwaitConnect,
    /// Forget the mapping.
    WithdrawRecord,
    /// Have the worker answer every request with an error; end one that does not do so.
    FailIo,
    /// Unmount the device lazily. That it hangs is no failure.
    Detach(DeviceIndex, UnmountScope),
    /// Disconnect, whoever holds the device. From here on it is not the mapping's any more.
    Sever(DeviceIndex),
    /// Make the device quiet for a snapshot, and answer for it. What goes wrong is the snapshot's
    /// failure.
    Quiesce {
        /// The device.
        index: DeviceIndex,
        /// The worker's number for it.
        snapshot: u64,
    },
    /// End that. Where it cannot be done now and the mapping stays, it is put off.
    Thaw,
    /// The same on the way of a forced unmap, whose failure is told and no more.
    TryThaw,
    /// Record that somebody else owns the volume.
    RememberFence,
    /// Make sure that nothing of the worker, whose end is proved, is under way at the backend.
    ProveSilence,
}

/// How a mapping is doing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// On its way to `Mapped`.
    Mapping,
    /// Works.
    Mapped,
    /// The device exists, its worker is being replaced.
    Recovering,
    /// Nothing more will be done without a hand.
    Failed(Trouble),
    /// On its way to `Unmapped`.
    Unmapping,
    /// To be taken down, and held; nothing is done.
    Held(Vec<Holder>),
    /// Nothing is left.
    Unmapped,
}

/// Why a mapping failed, and what its owner can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    /// For the caller's reaction.
    pub kind: ErrorKind,
    /// What is the matter.
    pub message: String,
    /// What to do.
    pub repair: String,
}

impl Trouble {
    fn new(kind: ErrorKind, message: impl Into<String>, repair: impl Into<String>) -> Self {
        Self { kind, message: message.into(), repair: repair.into() }
    }

    /// As an error, for who asked.
    pub fn into_error(self) -> Error {
        Error::new(self.kind, self.message).with_repair(self.repair)
    }
}

/// What to do, and what the mapping is called meanwhile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The state while the actions run; the final one when there are none.
    pub state: State,
    /// In order.
    pub actions: Vec<Action>,
}

impl Plan {
    fn rest(state: State) -> Self {
        Self { state, actions: Vec::new() }
    }

    fn fail(trouble: Trouble) -> Self {
        Self::rest(State::Failed(trouble))
    }
}

/// Repairs in a row that may fail before a mapping is given up.
pub const MAX_FAILURES: u32 = 10;

/// Decides.
pub fn plan(record: &Record, observed: &Observed) -> Plan {
    quiesce::complete(decide(record, observed), record, observed)
}

fn decide(record: &Record, observed: &Observed) -> Plan {
    if record.predecessor.is_some() {
        return plan_succession(record, observed);
    }
    match record.intent {
        Intent::Mapped => plan_mapped(record, observed),
        Intent::Unmapped => plan_unmapped(record, observed),
        Intent::Forced(unmount) => plan_forced(observed, unmount),
    }
}

/// Two workers: the end of a hand-over, forwards or backwards. A new one that did not take over is
/// ended even when the old one is gone: it has the volume open through the old one's description, so
/// that only the next one's claim proves the old one's last writes to be over.
fn plan_succession(record: &Record, observed: &Observed) -> Plan {
    let gone = SeenWorker::Gone;
    let mut actions = match (observed.taken, &observed.worker, &observed.predecessor) {
        (Some(true), _, _) => vec![Action::EndPredecessor],
        (_, worker, predecessor) if *worker == gone && *predecessor == gone => {
            vec![Action::EndPredecessor]
        }
        (_, worker, _) if *worker == gone => vec![Action::Reinstate],
        (Some(false), _, predecessor) if *predecessor == gone => vec![Action::StopWorker],
        (Some(false), _, _) => vec![Action::StopWorker, Action::Reinstate],
        (None, SeenWorker::Unreachable { pid, reason }, _)
            if !matches!(record.intent, Intent::Forced(_)) =>
        {
            return unreachable_worker(record, *pid, reason);
        }
        // Nobody can tell, and all of it goes in any case.
        (None, _, _) => vec![Action::StopWorker, Action::Reinstate],
    };
    let state = match record.intent {
        Intent::Mapped => State::Recovering,
        Intent::Unmapped | Intent::Forced(_) => State::Unmapping,
    };
    if matches!(record.intent, Intent::Forced(_)) {
        // As in every plan of it: the wish is recorded before anything is done.
        actions.insert(0, Action::Renounce);
    }
    Plan { state, actions }
}

fn plan_mapped(record: &Record, observed: &Observed) -> Plan {
    let name = &record.name;
    if record.fenced {
        return fenced(record, observed);
    }
    match observed.devices.as_slice() {
        [] if record.established => Plan::fail(Trouble::new(
            ErrorKind::Unavailable,
            format!("the device of {name} was disconnected by somebody else"),
            format!("cleat unmap {name}, then map it again"),
        )),
        [] => plan_new(record, observed),
        [device] => plan_device(record, observed, *device),
        several => Plan::fail(Trouble::new(
            ErrorKind::Internal,
            format!("{} devices carry the identity of {name}: {}", several.len(), list(several)),
            format!("cleat unmap {name} takes all of them down"),
        )),
    }
}

/// No device yet.
fn plan_new(record: &Record, observed: &Observed) -> Plan {
    let rest = [Action::Connect, Action::WaitReady, Action::Establish];
    match &observed.worker {
        SeenWorker::Gone => {
            let mut actions = vec![Action::StartWorker];
            actions.extend(rest);
            Plan { state: State::Mapping, actions }
        }
        SeenWorker::Alive { .. } => Plan { state: State::Mapping, actions: rest.to_vec() },
        SeenWorker::Unreachable { pid, reason } => unreachable_worker(record, *pid, reason),
        SeenWorker::Fenced => fenced(record, observed),
    }
}

/// The one device of the mapping exists.
fn plan_device(record: &Record, observed: &Observed, device: SeenDevice) -> Plan {
    let wanted = record.options.connections;
    let outlives = record.volume.is_some_and(|volume| volume.outlives_worker);
    let mut after = Vec::new();
    if !observed.announced || !record.established {
        after.push(Action::WaitReady);
    }
    if !record.established {
        after.push(Action::Establish);
    }
    match &observed.worker {
        SeenWorker::Alive { size, .. } if *size < device.size => shrunk(record, *size, device),
        SeenWorker::Alive { connections, .. } if *connections >= wanted => {
            let state = match (after.is_empty(), record.established) {
                (true, _) => State::Mapped,
                (false, true) => State::Recovering,
                (false, false) => State::Mapping,
            };
            if !after.is_empty() && observed.failures >= MAX_FAILURES {
                return given_up(record, observed);
            }
            let grown = grown(record, observed, device);
            after.extend(grown.map(|size| Action::Grow { index: device.index, size }));
            Plan { state, actions: after }
        }
        SeenWorker::Alive { .. } if observed.failures >= MAX_FAILURES => given_up(record, observed),
        SeenWorker::Gone if observed.failures >= MAX_FAILURES => {
            refused(given_up(record, observed), record, observed, device)
        }
        SeenWorker::Alive { connections, .. } => {
            let missing = wanted - connections;
            let mut actions = vec![Action::Reconnect { index: device.index, missing }];
            actions.extend(after);
            Plan { state: State::Recovering, actions }
        }
        SeenWorker::Gone if !outlives => refused(lost(record), record, observed, device),
        SeenWorker::Gone => {
            let index = device.index;
            let mut actions =
                vec![Action::StartWorker, Action::Reconnect { index, missing: wanted }];
            actions.extend(after);
            Plan { state: State::Recovering, actions }
        }
        SeenWorker::Unreachable { pid, reason } => unreachable_worker(record, *pid, reason),
        SeenWorker::Fenced => fenced(record, observed),
    }
}

/// A mapping that no worker will serve again: what waits does not wait for ever.
fn refused(mut plan: Plan, record: &Record, observed: &Observed, device: SeenDevice) -> Plan {
    if observed.overdue && !observed.refusing {
        let connections = record.options.connections;
        plan.actions.push(Action::Refuse { index: device.index, connections });
    }
    plan
}

/// The size that the device should have, where the volume has grown by a block or more.
fn grown(record: &Record, observed: &Observed, device: SeenDevice) -> Option<u64> {
    let SeenWorker::Alive { size, .. } = observed.worker else { return None };
    let block_size = record.volume.map(|volume| u64::from(volume.block_size))?;
    // What is no whole block cannot be reached through the device.
    let size = size - size % block_size.max(1);
    let grows = record.established && !observed.growth_waits && size > device.size;
    grows.then_some(size)
}

fn plan_unmapped(record: &Record, observed: &Observed) -> Plan {
    if observed.devices.is_empty() && observed.worker == SeenWorker::Gone {
        // The record goes last; who calls this with a record that is withdrawn is done.
        return Plan { state: State::Unmapping, actions: vec![last(observed)] };
    }
    if !observed.holders.is_empty() && !observed.devices.is_empty() {
        return Plan::rest(State::Held(observed.holders.clone()));
    }
    let mut actions = Vec::new();
    // Without a worker a flush would only wait for the dead connection's timeout. One that does not
    // answer us may well serve, and what it has answered must be durable before it is killed.
    let serves = match observed.worker {
        SeenWorker::Alive { connections, .. } => connections > 0,
        SeenWorker::Unreachable { .. } => record.established,
        SeenWorker::Gone | SeenWorker::Fenced => false,
    };
    if serves {
        actions.extend(observed.devices.iter().map(|device| Action::Flush(device.index)));
    }
    // Up to here a failure leaves the mapping as it was; from here on it is taken down.
    actions.push(Action::Renounce);
    actions.extend(observed.devices.iter().map(|device| Action::Disconnect(device.index)));
    if observed.worker != SeenWorker::Gone {
        actions.push(Action::StopWorker);
    }
    actions.push(last(observed));
    Plan { state: State::Unmapping, actions }
}

/// The record stays as long as a device may still come.
fn last(observed: &Observed) -> Action {
    if observed.connecting { Action::AwaitConnect } else { Action::WithdrawRecord }
}

/// The worker goes last: as long as it answers everything with an error, nothing waits, neither what
/// an unmount writes back nor DISCONNECT, which sends through its sockets.
fn plan_forced(observed: &Observed, unmount: UnmountScope) -> Plan {
    let mut actions = vec![Action::Renounce];
    let worker = observed.worker != SeenWorker::Gone;
    actions.extend(worker.then_some(Action::FailIo));
    let devices = || observed.devices.iter().map(|device| device.index);
    actions.extend(devices().map(|index| Action::Detach(index, unmount)));
    actions.extend(devices().map(Action::Sever));
    actions.extend(worker.then_some(Action::StopWorker));
    actions.extend([Action::ProveSilence, last(observed)]);
    Plan { state: State::Unmapping, actions }
}

fn shrunk(record: &Record, size: u64, device: SeenDevice) -> Plan {
    Plan::fail(Trouble::new(
        ErrorKind::Internal,
        format!(
            "the volume of {} has shrunk to {size} bytes under its device of {} bytes",
            record.name, device.size
        ),
        "grow the volume back to its size, or unmap it".to_owned(),
    ))
}

fn lost(record: &Record) -> Plan {
    Plan::fail(Trouble::new(
        ErrorKind::Internal,
        format!("the worker of {} died and its content with it: it lived in memory", record.name),
        format!("cleat unmap {}, then map it again, empty", record.name),
    ))
}

fn given_up(record: &Record, observed: &Observed) -> Plan {
    let Record { name, uri, options, .. } = record;
    let why = match observed.history.as_str() {
        "" => String::new(),
        history => format!(": {history}"),
    };
    Plan::fail(Trouble::new(
        ErrorKind::Unavailable,
        format!(
            "{name} could not be repaired in {MAX_FAILURES} attempts{why}; {}",
            match observed.refusing {
                true => "its I/O fails".to_owned(),
                false => {
                    format!(
                        "its I/O fails once it has waited for {} s",
                        options.dead_connection_timeout_s
                    )
                }
            }
        ),
        format!(
            "see the daemon's log for the cause; when it is removed, cleat map '{uri}' --name {name} \
             tries again, and cleat unmap {name} gives it up"
        ),
    ))
}

/// Remembered, since a worker knows it only for as long as it lives: another one would open the
/// volume as if nothing had happened, under a file system that has missed what others wrote.
fn fenced(record: &Record, observed: &Observed) -> Plan {
    let mut plan = Plan::fail(Trouble::new(
        ErrorKind::Fenced,
        format!("somebody else owns the volume of {} now, or has removed it", record.name),
        format!("cleat unmap {}; nothing more is written from here", record.name),
    ));
    if !record.fenced {
        plan.actions.push(Action::RememberFence);
    }
    match observed.devices.as_slice() {
        [device] if observed.worker == SeenWorker::Gone => refused(plan, record, observed, *device),
        _ => plan,
    }
}

fn unreachable_worker(record: &Record, pid: u32, reason: &str) -> Plan {
    Plan::fail(Trouble::new(
        ErrorKind::Unavailable,
        format!("the worker of {} (process {pid}) is alive but {reason}", record.name),
        format!("kill -9 {pid}: it is replaced once it has ended"),
    ))
}

fn list(devices: &[SeenDevice]) -> String {
    let names: Vec<String> =
        devices.iter().map(|device| format!("/dev/nbd{}", device.index)).collect();
    names.join(", ")
}

#[cfg(test)]
pub(super) mod tests;
