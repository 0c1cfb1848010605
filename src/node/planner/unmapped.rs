//! The plans for a mapping that is to be removed, with and without force.

use super::{Action, DeviceProperties, Observed, ObservedWorker, Plan, Record, State};
use cleat_kernel::{DeviceIndex, UnmountScope};

pub(crate) fn plan_unmapped(record: &Record, observed: &Observed) -> Plan {
    if observed.devices.is_empty() && observed.worker == ObservedWorker::Gone {
        // The record is removed last. The caller does not plan a mapping without a record.
        let mut actions = Vec::new();
        if record.established {
            actions.extend([Action::RecordUnmapping, Action::ReleaseClaim]);
        }
        actions.push(last_action(observed));
        return Plan { state: State::Unmapping, actions };
    }
    if !observed.holders.is_empty() && !observed.devices.is_empty() {
        return Plan::without_actions(State::Held(observed.holders.clone()));
    }
    let each = |action: fn(DeviceIndex) -> Action| {
        observed.devices.iter().map(move |device| action(device.index))
    };
    let before_flush = before_flush(record, observed);
    let flushes = before_flush.is_some();
    let mut actions = before_flush.unwrap_or_default();
    // The list of holders lacks users inside the kernel. Nothing uses a device whose map did not finish.
    if record.established {
        actions.extend(each(Action::OpenExclusively));
    }
    if flushes {
        actions.extend(each(Action::Flush));
    }
    // A failure before this action leaves the mapping as it was. From here on it is being removed.
    actions.push(Action::RecordUnmapping);
    actions.extend(each(Action::Disconnect));
    if observed.worker != ObservedWorker::Gone || actions.contains(&Action::StartWorker) {
        actions.push(Action::StopWorker);
    }
    // The volume of a map that did not finish may never have been claimed.
    if record.established {
        actions.push(Action::ReleaseClaim);
    }
    actions.push(last_action(observed));
    Plan { state: State::Unmapping, actions }
}

/// Returns the actions after which a flush makes the data of the device's users durable; `None` if there is no
/// such data. Without a worker, or without connections, a flush would only wait for the timeout of the dead
/// connections, so the device gets them first. A failure leaves the mapping as it was: only a forced unmap
/// removes a device whose data cannot be flushed.
fn before_flush(record: &Record, observed: &Observed) -> Option<Vec<Action>> {
    let missing = record.options.connections;
    let reconnect =
        observed.devices.iter().map(|device| Action::Reconnect { index: device.index, missing });
    let mut actions = Vec::new();
    match observed.worker {
        ObservedWorker::Alive { connections: 1.., .. } => {}
        ObservedWorker::Alive { .. } if can_be_flushed(record) => actions.extend(reconnect),
        ObservedWorker::Gone if can_be_flushed(record) => {
            actions.push(Action::StartWorker);
            actions.extend(reconnect);
        }
        // The worker may still serve. Its writes must be durable before it is killed.
        ObservedWorker::Unreachable { .. } if record.established => {}
        _ => return None,
    }
    Some(actions)
}

/// Returns whether users of the device may have written data that a new worker could make durable. Content
/// that ended with its worker cannot be flushed, and neither can that of a volume that the mapping has lost.
fn can_be_flushed(record: &Record) -> bool {
    let writable = |volume: &DeviceProperties| volume.outlives_worker && !volume.is_read_only();
    record.established
        && !record.options.read_only
        && !record.fenced
        && record.replaced.is_none()
        && record.volume.as_ref().is_some_and(writable)
}

/// The record must stay as long as the kernel may still create a device.
fn last_action(observed: &Observed) -> Action {
    if observed.connecting { Action::WaitForConnect } else { Action::RemoveRecord }
}

/// Stops the worker last. While it answers everything with an error, nothing blocks: neither the
/// writeback of an unmount nor DISCONNECT, which sends through the worker's sockets.
pub(crate) fn plan_forced(observed: &Observed, unmount: UnmountScope) -> Plan {
    let mut actions = vec![Action::RecordUnmapping];
    let worker = observed.worker != ObservedWorker::Gone;
    actions.extend(worker.then_some(Action::FailIo));
    let devices = || observed.devices.iter().map(|device| device.index);
    actions.extend(devices().map(|index| Action::Unmount(index, unmount)));
    actions.extend(devices().map(Action::ForceDisconnect));
    actions.extend(worker.then_some(Action::StopWorker));
    actions.extend([Action::ProveNoWrites, last_action(observed)]);
    Plan { state: State::Unmapping, actions }
}
