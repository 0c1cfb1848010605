//! The plan for a mapping that is to be taken down, with or without force.

use super::{Action, Observed, ObservedWorker, Plan, Record, State};
use cleat_kernel::UnmountScope;

pub(crate) fn plan_unmapped(record: &Record, observed: &Observed) -> Plan {
    if observed.devices.is_empty() && observed.worker == ObservedWorker::Gone {
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
        ObservedWorker::Alive { connections, .. } => connections > 0,
        ObservedWorker::Unreachable { .. } => record.established,
        ObservedWorker::Gone | ObservedWorker::Fenced => false,
    };
    if serves {
        actions.extend(observed.devices.iter().map(|device| Action::Flush(device.index)));
    }
    // Up to here a failure leaves the mapping as it was; from here on it is taken down.
    actions.push(Action::RecordUnmapping);
    actions.extend(observed.devices.iter().map(|device| Action::Disconnect(device.index)));
    if observed.worker != ObservedWorker::Gone {
        actions.push(Action::StopWorker);
    }
    actions.push(last(observed));
    Plan { state: State::Unmapping, actions }
}

/// The record stays as long as a device may still come.
fn last(observed: &Observed) -> Action {
    if observed.connecting { Action::WaitForConnect } else { Action::RemoveRecord }
}

/// The worker goes last: as long as it answers everything with an error, nothing waits, neither what
/// an unmount writes back nor DISCONNECT, which sends through its sockets.
pub(crate) fn plan_forced(observed: &Observed, unmount: UnmountScope) -> Plan {
    let mut actions = vec![Action::RecordUnmapping];
    let worker = observed.worker != ObservedWorker::Gone;
    actions.extend(worker.then_some(Action::FailIo));
    let devices = || observed.devices.iter().map(|device| device.index);
    actions.extend(devices().map(|index| Action::Unmount(index, unmount)));
    actions.extend(devices().map(Action::ForceDisconnect));
    actions.extend(worker.then_some(Action::StopWorker));
    actions.extend([Action::ProveNoWrites, last(observed)]);
    Plan { state: State::Unmapping, actions }
}
