//! The plans for a mapping that is to be removed, with and without force.

use super::{Action, Observed, ObservedWorker, Plan, Record, State};
use cleat_kernel::UnmountScope;

pub(crate) fn plan_unmapped(record: &Record, observed: &Observed) -> Plan {
    if observed.devices.is_empty() && observed.worker == ObservedWorker::Gone {
        // The record is removed last. The caller does not plan a mapping without a record.
        return Plan { state: State::Unmapping, actions: vec![last_action(observed)] };
    }
    if !observed.holders.is_empty() && !observed.devices.is_empty() {
        return Plan::without_actions(State::Held(observed.holders.clone()));
    }
    let mut actions = Vec::new();
    // Without a worker, a flush would only wait for the timeout of the dead connections. A worker that
    // does not answer the supervisor may still serve; its writes must be durable before it is killed.
    let serves = match observed.worker {
        ObservedWorker::Alive { connections, .. } => connections > 0,
        ObservedWorker::Unreachable { .. } => record.established,
        ObservedWorker::Gone | ObservedWorker::Fenced => false,
    };
    if serves {
        actions.extend(observed.devices.iter().map(|device| Action::Flush(device.index)));
    }
    // A failure before this action leaves the mapping as it was. From here on it is being removed.
    actions.push(Action::RecordUnmapping);
    actions.extend(observed.devices.iter().map(|device| Action::Disconnect(device.index)));
    if observed.worker != ObservedWorker::Gone {
        actions.push(Action::StopWorker);
    }
    actions.push(last_action(observed));
    Plan { state: State::Unmapping, actions }
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
