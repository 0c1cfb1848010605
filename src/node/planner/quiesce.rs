//! Adds the actions to a plan that quiesce a device for a snapshot, and end that.

use super::{Action, Intent, Observed, ObservedQuiesce, Plan, Record, State};

/// Adds the actions for a device that is quiesced or is to be quiesced.
pub(crate) fn add_quiesce_actions(mut plan: Plan, record: &Record, observed: &Observed) -> Plan {
    let ObservedQuiesce { snapshot, in_progress, retry_later } = observed.quiesced;
    let actions = &mut plan.actions;
    let position = |wanted: fn(&Action) -> bool| actions.iter().position(wanted);
    match (&record.quiesced, record.intent) {
        (None, Intent::Mapped) => {
            // Only a mapping that works is quiesced. Otherwise librbd refuses the snapshot after its own
            // timeout.
            if let (Some(snapshot), [device], State::Mapped, []) =
                (snapshot, observed.devices.as_slice(), &plan.state, actions.as_slice())
            {
                actions.push(Action::Quiesce { index: device.index, snapshot });
            }
        }
        (None, _) => {}
        // After a repair, because thawing writes through the worker.
        (Some(_), Intent::Mapped) if !in_progress && !retry_later => {
            actions.push(Action::Unquiesce)
        }
        (Some(_), Intent::Mapped) => {}
        (Some(_), Intent::Unmapped) => {
            // Thawing writes: either a worker serves these writes, or the disconnected device fails them.
            let last = |a: &Action| matches!(a, Action::RemoveRecord | Action::WaitForConnect);
            let flush = position(|a| matches!(a, Action::Flush(_)));
            // A frozen file system without a mount has the device claimed until it is thawed.
            let open = position(|a| matches!(a, Action::OpenExclusively(_)));
            if let Some(at) = flush.and(open).or(flush).or_else(|| position(last)) {
                actions.insert(at, Action::Unquiesce);
            }
        }
        (Some(_), Intent::Forced(_)) => {
            let first = position(|a| matches!(a, Action::Unmount(..)));
            let last = position(|a| matches!(a, Action::ProveNoWrites));
            last.into_iter().for_each(|at| actions.insert(at, Action::Unquiesce));
            first.into_iter().for_each(|at| actions.insert(at, Action::TryUnquiesce));
        }
    }
    plan
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::tests::{established, observed_with};
    use crate::planner::{ObservedWorker, WorkerId, plan};
    use cleat_kernel::{Holder, UnmountScope};

    const SERVES: ObservedWorker = ObservedWorker::Alive { connections: 1, size: 1 << 20 };

    fn quiesced(intent: Intent) -> Record {
        let quiesced = crate::planner::Quiesced {
            device: 3,
            since_unix_ms: 1,
            hook: None,
            already_frozen: Vec::new(),
        };
        let worker = Some(WorkerId { pid: 6, started_ticks: 6 });
        Record { intent, worker, quiesced: Some(quiesced), ..established(1, true) }
    }

    fn observed(worker: ObservedWorker, quiesced: ObservedQuiesce) -> Observed {
        Observed { quiesced, ..observed_with(worker) }
    }

    #[test]
    fn only_a_working_mapping_is_quiesced_and_only_once() {
        let requested = ObservedQuiesce { snapshot: Some(5), ..ObservedQuiesce::default() };
        let record = established(1, true);
        let actions = |record: &Record, worker| plan(record, &observed(worker, requested)).actions;
        let quiesce = Action::Quiesce { index: 3, snapshot: 5 };
        assert_eq!(actions(&record, SERVES), [quiesce]);
        let unconnected = ObservedWorker::Alive { connections: 0, size: 1 << 20 };
        let shrunk = ObservedWorker::Alive { connections: 1, size: 1 << 19 };
        for worker in [unconnected, shrunk, ObservedWorker::Gone, ObservedWorker::Fenced] {
            assert!(!actions(&record, worker).contains(&quiesce));
        }
        assert_eq!(
            actions(&quiesced(Intent::Mapped), SERVES),
            [Action::Unquiesce],
            "not thawed first"
        );
    }

    #[test]
    fn a_quiesced_device_is_thawed_unless_its_snapshot_is_in_progress() {
        let record = quiesced(Intent::Mapped);
        let actions = |worker, quiesce| plan(&record, &observed(worker, quiesce)).actions;
        let in_progress = ObservedQuiesce { in_progress: true, ..ObservedQuiesce::default() };
        let deferred = ObservedQuiesce { retry_later: true, ..ObservedQuiesce::default() };
        assert_eq!(actions(SERVES, ObservedQuiesce::default()), [Action::Unquiesce]);
        assert_eq!(actions(SERVES, in_progress), []);
        assert_eq!(actions(SERVES, deferred), []);
        // A dead worker is replaced first, because thawing writes.
        let after_death = actions(ObservedWorker::Gone, ObservedQuiesce::default());
        assert_eq!(after_death.last(), Some(&Action::Unquiesce));
        assert!(after_death.contains(&Action::StartWorker));
        assert_eq!(
            actions(ObservedWorker::Fenced, ObservedQuiesce::default()).last(),
            Some(&Action::Unquiesce)
        );
    }

    #[test]
    fn a_quiesced_device_is_thawed_before_its_mapping_is_removed() {
        let position = |actions: &[Action], wanted: Action| {
            actions.iter().position(|action| *action == wanted).unwrap()
        };
        let in_progress = ObservedQuiesce { in_progress: true, ..ObservedQuiesce::default() };
        let unmapped = quiesced(Intent::Unmapped);
        let actions = plan(&unmapped, &observed(SERVES, in_progress)).actions;
        assert!(position(&actions, Action::Unquiesce) < position(&actions, Action::Flush(3)));
        // With holders, the mapping stays, and so does the quiescing for its snapshot.
        let mount =
            Holder::Mount { path: "/mnt".into(), filesystem: "ext4".into(), namespace_pid: None };
        let in_use = Observed { holders: vec![mount], ..observed(SERVES, in_progress) };
        assert_eq!(plan(&unmapped, &in_use).actions, []);
        let dead = observed(ObservedWorker::Gone, ObservedQuiesce::default());
        let actions = plan(&unmapped, &dead).actions;
        let reconnect = Action::Reconnect { index: 3, missing: 1 };
        assert!(position(&actions, reconnect) < position(&actions, Action::Unquiesce));
        assert!(position(&actions, Action::Unquiesce) < position(&actions, Action::Flush(3)));
        // No worker will serve the writes of the thaw.
        let lost = Record { fenced: true, ..unmapped };
        let actions = plan(&lost, &dead).actions;
        assert!(position(&actions, Action::Disconnect(3)) < position(&actions, Action::Unquiesce));
        assert!(position(&actions, Action::Unquiesce) < position(&actions, Action::RemoveRecord));

        let forced = quiesced(Intent::Forced(UnmountScope::All));
        let actions = plan(&forced, &observed(SERVES, in_progress)).actions;
        assert!(position(&actions, Action::FailIo) < position(&actions, Action::TryUnquiesce));
        let unmount = Action::Unmount(3, UnmountScope::All);
        assert!(position(&actions, Action::TryUnquiesce) < position(&actions, unmount));
        assert!(
            position(&actions, Action::ForceDisconnect(3)) < position(&actions, Action::Unquiesce)
        );
        assert!(position(&actions, Action::Unquiesce) < position(&actions, Action::RemoveRecord));
    }
}
