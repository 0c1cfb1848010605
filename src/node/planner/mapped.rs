//! The plan for a mapping that is to work.

use super::{
    Action, Failure, MAX_FAILURES, Observed, ObservedDevice, ObservedWorker, Plan, Record, State,
};
use cleat_core::error::ErrorKind;

pub(crate) fn plan_mapped(record: &Record, observed: &Observed) -> Plan {
    let name = &record.name;
    if record.fenced {
        return fenced(record, observed);
    }
    match observed.devices.as_slice() {
        [] if record.established => Plan::fail(Failure::new(
            ErrorKind::Unavailable,
            format!("the device of {name} was disconnected by somebody else"),
            format!("cleat unmap {name}, then map it again"),
        )),
        [] => plan_new(record, observed),
        [device] => plan_device(record, observed, *device),
        several => Plan::fail(Failure::new(
            ErrorKind::Internal,
            format!("{} devices carry the identity of {name}: {}", several.len(), list(several)),
            format!("cleat unmap {name} takes all of them down"),
        )),
    }
}

/// No device yet.
fn plan_new(record: &Record, observed: &Observed) -> Plan {
    let rest = [Action::Connect, Action::WaitForDevice, Action::RecordMapped];
    match &observed.worker {
        ObservedWorker::Gone => {
            let mut actions = vec![Action::StartWorker];
            actions.extend(rest);
            Plan { state: State::Mapping, actions }
        }
        ObservedWorker::Alive { .. } => Plan { state: State::Mapping, actions: rest.to_vec() },
        ObservedWorker::Unreachable { pid, reason } => unreachable_worker(record, *pid, reason),
        ObservedWorker::Fenced => fenced(record, observed),
    }
}

/// The one device of the mapping exists.
fn plan_device(record: &Record, observed: &Observed, device: ObservedDevice) -> Plan {
    let wanted = record.options.connections;
    let outlives = record.volume.is_some_and(|volume| volume.outlives_worker);
    let mut after = Vec::new();
    if !observed.paths_known || !record.established {
        after.push(Action::WaitForDevice);
    }
    if !record.established {
        after.push(Action::RecordMapped);
    }
    match &observed.worker {
        ObservedWorker::Alive { size, .. } if *size < device.size => shrunk(record, *size, device),
        ObservedWorker::Alive { connections, .. } if *connections >= wanted => {
            let state = match (after.is_empty(), record.established) {
                (true, _) => State::Mapped,
                (false, true) => State::Recovering,
                (false, false) => State::Mapping,
            };
            if !after.is_empty() && observed.failures >= MAX_FAILURES {
                return given_up(record, observed);
            }
            let grown = grown(record, observed, device);
            after.extend(grown.map(|size| Action::GrowDevice { index: device.index, size }));
            Plan { state, actions: after }
        }
        ObservedWorker::Alive { .. } if observed.failures >= MAX_FAILURES => {
            given_up(record, observed)
        }
        ObservedWorker::Gone if observed.failures >= MAX_FAILURES => {
            refused(given_up(record, observed), record, observed, device)
        }
        ObservedWorker::Alive { connections, .. } => {
            let missing = wanted - connections;
            let mut actions = vec![Action::Reconnect { index: device.index, missing }];
            actions.extend(after);
            Plan { state: State::Recovering, actions }
        }
        ObservedWorker::Gone if !outlives => refused(lost(record), record, observed, device),
        ObservedWorker::Gone => {
            let index = device.index;
            let mut actions =
                vec![Action::StartWorker, Action::Reconnect { index, missing: wanted }];
            actions.extend(after);
            Plan { state: State::Recovering, actions }
        }
        ObservedWorker::Unreachable { pid, reason } => unreachable_worker(record, *pid, reason),
        ObservedWorker::Fenced => fenced(record, observed),
    }
}

/// A mapping that no worker will serve again: what waits does not wait for ever.
fn refused(mut plan: Plan, record: &Record, observed: &Observed, device: ObservedDevice) -> Plan {
    if observed.unserved_too_long && !observed.refusing {
        let connections = record.options.connections;
        plan.actions.push(Action::RefuseIo { index: device.index, connections });
    }
    plan
}

/// The size that the device should have, where the volume has grown by a block or more.
fn grown(record: &Record, observed: &Observed, device: ObservedDevice) -> Option<u64> {
    let ObservedWorker::Alive { size, .. } = observed.worker else { return None };
    let block_size = record.volume.map(|volume| u64::from(volume.block_size))?;
    // What is no whole block cannot be reached through the device.
    let size = size - size % block_size.max(1);
    let grows = record.established && !observed.resize_deferred && size > device.size;
    grows.then_some(size)
}

fn shrunk(record: &Record, size: u64, device: ObservedDevice) -> Plan {
    Plan::fail(Failure::new(
        ErrorKind::Internal,
        format!(
            "the volume of {} has shrunk to {size} bytes under its device of {} bytes",
            record.name, device.size
        ),
        "grow the volume back to its size, or unmap it".to_owned(),
    ))
}

fn lost(record: &Record) -> Plan {
    Plan::fail(Failure::new(
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
    Plan::fail(Failure::new(
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
    let mut plan = Plan::fail(Failure::new(
        ErrorKind::Fenced,
        format!("somebody else owns the volume of {} now, or has removed it", record.name),
        format!("cleat unmap {}; nothing more is written from here", record.name),
    ));
    if !record.fenced {
        plan.actions.push(Action::RecordFenced);
    }
    match observed.devices.as_slice() {
        [device] if observed.worker == ObservedWorker::Gone => {
            refused(plan, record, observed, *device)
        }
        _ => plan,
    }
}

pub(crate) fn unreachable_worker(record: &Record, pid: u32, reason: &str) -> Plan {
    Plan::fail(Failure::new(
        ErrorKind::Unavailable,
        format!("the worker of {} (process {pid}) is alive but {reason}", record.name),
        format!("kill -9 {pid}: it is replaced once it has ended"),
    ))
}

fn list(devices: &[ObservedDevice]) -> String {
    let names: Vec<String> =
        devices.iter().map(|device| format!("/dev/nbd{}", device.index)).collect();
    names.join(", ")
}
