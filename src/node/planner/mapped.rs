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
    if let Some(found) = &record.replaced {
        return replaced(record, found, observed);
    }
    match observed.devices.as_slice() {
        [] if record.established => Plan::fail(Failure::new(
            ErrorKind::Unavailable,
            format!("the device of {name} was disconnected by another program"),
            format!("cleat unmap {name}, then map it again"),
        )),
        [] => plan_new(record, observed),
        [device] => plan_device(record, observed, *device),
        several => Plan::fail(Failure::new(
            ErrorKind::Internal,
            format!("{} devices carry the identity of {name}: {}", several.len(), list(several)),
            format!("cleat unmap {name} removes all of them"),
        )),
    }
}

/// Plans a mapping that has no device yet.
fn plan_new(record: &Record, observed: &Observed) -> Plan {
    let after_start = [Action::Connect, Action::WaitForDevice, Action::RecordMapped];
    match &observed.worker {
        ObservedWorker::Gone => {
            let mut actions = vec![Action::StartWorker];
            actions.extend(after_start);
            Plan { state: State::Mapping, actions }
        }
        ObservedWorker::Alive { .. } => {
            Plan { state: State::Mapping, actions: after_start.to_vec() }
        }
        ObservedWorker::Unreachable { pid, reason } => unreachable_worker(record, *pid, reason),
        ObservedWorker::Fenced => fenced(record, observed),
    }
}

/// Plans a mapping that has its one device.
fn plan_device(record: &Record, observed: &Observed, device: ObservedDevice) -> Plan {
    let wanted = record.options.connections;
    let outlives = record.volume.as_ref().is_some_and(|volume| volume.outlives_worker);
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
            let new_size = grown_size(record, observed, device);
            after.extend(new_size.map(|size| Action::GrowDevice { index: device.index, size }));
            Plan { state, actions: after }
        }
        ObservedWorker::Alive { .. } if observed.failures >= MAX_FAILURES => {
            given_up(record, observed)
        }
        ObservedWorker::Gone if observed.failures >= MAX_FAILURES => {
            refuse_if_overdue(given_up(record, observed), record, observed, device)
        }
        ObservedWorker::Alive { connections, .. } => {
            let missing = wanted - connections;
            let mut actions = vec![Action::Reconnect { index: device.index, missing }];
            actions.extend(after);
            Plan { state: State::Recovering, actions }
        }
        ObservedWorker::Gone if !outlives => {
            refuse_if_overdue(content_lost(record), record, observed, device)
        }
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

/// Ends the waiting of requests on a device that no worker will serve again.
fn refuse_if_overdue(
    mut plan: Plan,
    record: &Record,
    observed: &Observed,
    device: ObservedDevice,
) -> Plan {
    if observed.unserved_too_long && !observed.refusing {
        plan.actions.push(refuse(record, device));
    }
    plan
}

fn refuse(record: &Record, device: ObservedDevice) -> Action {
    Action::RefuseIo { index: device.index, connections: record.options.connections }
}

/// Returns the size that the device should get, if the volume has grown by a block or more.
fn grown_size(record: &Record, observed: &Observed, device: ObservedDevice) -> Option<u64> {
    let ObservedWorker::Alive { size, .. } = observed.worker else { return None };
    let block_size = record.volume.as_ref().map(|volume| u64::from(volume.block_size))?;
    // The device cannot address a part of a block.
    let size = size - size % block_size.max(1);
    let grows = record.established && !observed.resize_deferred && size > device.size;
    grows.then_some(size)
}

fn shrunk(record: &Record, size: u64, device: ObservedDevice) -> Plan {
    Plan::fail(Failure::new(
        ErrorKind::Internal,
        format!(
            "the volume of {} has shrunk to {size} bytes, and its device has {} bytes",
            record.name, device.size
        ),
        format!("grow the volume to {} bytes again, or: cleat unmap {}", device.size, record.name),
    ))
}

fn content_lost(record: &Record) -> Plan {
    Plan::fail(Failure::new(
        ErrorKind::Internal,
        format!(
            "the content of {} is lost: it was in the memory of its worker, which ended",
            record.name
        ),
        format!("cleat unmap {}, then map it again; it will be empty", record.name),
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
                        "its I/O fails after it has waited for {} s",
                        options.dead_connection_timeout_s
                    )
                }
            }
        ),
        format!(
            "see the daemon's log for the cause, remove it and run: cleat map '{uri}' --name {name}; \
             or run: cleat unmap {name}"
        ),
    ))
}

/// Records that the volume is fenced, because a worker does not pass this on: its replacement would open
/// the volume as before, although the mounted file system has missed the writes of the new owner.
fn fenced(record: &Record, observed: &Observed) -> Plan {
    let mut plan = Plan::fail(Failure::new(
        ErrorKind::Fenced,
        format!(
            "another client owns the volume of {} now, or may have written to it, or has removed it",
            record.name
        ),
        format!("cleat unmap {}; this node writes nothing more to the volume", record.name),
    ));
    if !record.fenced {
        plan.actions.push(Action::RecordFenced);
    }
    refuse_if_unserved(plan, record, observed)
}

/// Plans a mapping whose worker has found another volume in place of the mapping's volume. The device is
/// never connected to that volume, and no later worker serves it, so its I/O does not wait for one.
fn replaced(record: &Record, found: &str, observed: &Observed) -> Plan {
    let name = &record.name;
    let mut plan = Plan::fail(Failure::new(
        ErrorKind::Replaced,
        format!("the volume of {name} was replaced: {found}"),
        format!("cleat unmap --force {name}, then map the volume that is needed"),
    ));
    // Only after the last worker has ended, so that a request which it still has fails no earlier.
    if let [device] = observed.devices.as_slice()
        && observed.worker == ObservedWorker::Gone
        && !observed.refusing
    {
        plan.actions.push(refuse(record, *device));
    }
    plan
}

/// Ends the waiting of requests on the device of a mapping without a worker.
fn refuse_if_unserved(plan: Plan, record: &Record, observed: &Observed) -> Plan {
    match observed.devices.as_slice() {
        [device] if observed.worker == ObservedWorker::Gone => {
            refuse_if_overdue(plan, record, observed, *device)
        }
        _ => plan,
    }
}

pub(crate) fn unreachable_worker(record: &Record, pid: u32, reason: &str) -> Plan {
    Plan::fail(Failure::new(
        ErrorKind::Unavailable,
        format!("the worker of {} (process {pid}) is alive but {reason}", record.name),
        format!("kill -9 {pid}; the worker is replaced when the process has ended"),
    ))
}

fn list(devices: &[ObservedDevice]) -> String {
    let names: Vec<String> =
        devices.iter().map(|device| format!("/dev/nbd{}", device.index)).collect();
    names.join(", ")
}
