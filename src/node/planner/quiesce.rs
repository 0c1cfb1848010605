//! What a plan adds for a snapshot that needs the device quiesced.

use super::{Action, Intent, Observed, ObservedQuiesce, Plan, Record, State};

/// Adds to a plan what is to become of a device that is quiet, or should be.
pub(crate) fn complete(mut plan: Plan, record: &Record, observed: &Observed) -> Plan {
    let ObservedQuiesce { snapshot, in_progress, retry_later } = observed.quiesced;
    let actions = &mut plan.actions;
    let at = |wanted: fn(&Action) -> bool| actions.iter().position(wanted);
    match (&record.quiesced, record.intent) {
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
        (Some(_), Intent::Mapped) if !in_progress && !retry_later => {
            actions.push(Action::Unquiesce)
        }
        (Some(_), Intent::Mapped) => {}
        (Some(_), Intent::Unmapped) => {
            // Through a worker that serves, or else when everything fails that is written.
            let last = |a: &Action| matches!(a, Action::RemoveRecord | Action::WaitForConnect);
            if let Some(at) = at(|a| matches!(a, Action::Flush(_))).or_else(|| at(last)) {
                actions.insert(at, Action::Unquiesce);
            }
        }
        (Some(_), Intent::Forced(_)) => {
            let first = at(|a| matches!(a, Action::Unmount(..)));
            let last = at(|a| matches!(a, Action::ProveNoWrites));
            last.into_iter().for_each(|at| actions.insert(at, Action::Unquiesce));
            first.into_iter().for_each(|at| actions.insert(at, Action::TryUnquiesce));
        }
    }
    plan
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::tests::{established, seen};
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
        Observed { quiesced, ..seen(worker) }
    }

    #[test]
    fn only_a_mapping_that_works_is_made_quiet_and_not_twice() {
        let asked = ObservedQuiesce { snapshot: Some(5), ..ObservedQuiesce::default() };
        let record = established(1, true);
        let actions = |record: &Record, worker| plan(record, &observed(worker, asked)).actions;
        let quiesce = Action::Quiesce { index: 3, snapshot: 5 };
        assert_eq!(actions(&record, SERVES), [quiesce]);
        let cut = ObservedWorker::Alive { connections: 0, size: 1 << 20 };
        let shrunk = ObservedWorker::Alive { connections: 1, size: 1 << 19 };
        for worker in [cut, shrunk, ObservedWorker::Gone, ObservedWorker::Fenced] {
            assert!(!actions(&record, worker).contains(&quiesce));
        }
        assert_eq!(actions(&quiesced(Intent::Mapped), SERVES), [Action::Unquiesce], "thawed first");
    }

    #[test]
    fn what_is_quiet_is_thawed_unless_its_snapshot_is_being_made() {
        let record = quiesced(Intent::Mapped);
        let actions = |worker, seen| plan(&record, &observed(worker, seen)).actions;
        let in_progress = ObservedQuiesce { in_progress: true, ..ObservedQuiesce::default() };
        let waits = ObservedQuiesce { retry_later: true, ..ObservedQuiesce::default() };
        assert_eq!(actions(SERVES, ObservedQuiesce::default()), [Action::Unquiesce]);
        assert_eq!(actions(SERVES, in_progress), []);
        assert_eq!(actions(SERVES, waits), []);
        // A dead worker is replaced first: thawing writes.
        let actions_then = actions(ObservedWorker::Gone, ObservedQuiesce::default());
        assert_eq!(actions_then.last(), Some(&Action::Unquiesce));
        assert!(actions_then.contains(&Action::StartWorker));
        assert_eq!(
            actions(ObservedWorker::Fenced, ObservedQuiesce::default()).last(),
            Some(&Action::Unquiesce)
        );
    }

    #[test]
    fn nothing_that_is_quiet_is_taken_down_before_it_is_thawed() {
        let at = |actions: &[Action], wanted: Action| {
            actions.iter().position(|action| *action == wanted).unwrap()
        };
        let in_progress = ObservedQuiesce { in_progress: true, ..ObservedQuiesce::default() };
        let unmapped = quiesced(Intent::Unmapped);
        let actions = plan(&unmapped, &observed(SERVES, in_progress)).actions;
        assert!(at(&actions, Action::Unquiesce) < at(&actions, Action::Flush(3)));
        // Whoever has it mounted keeps it, and the moment that his snapshot needs.
        let mount =
            Holder::Mount { path: "/mnt".into(), filesystem: "ext4".into(), namespace_pid: None };
        let in_use_error = Observed { holders: vec![mount], ..observed(SERVES, in_progress) };
        assert_eq!(plan(&unmapped, &in_use_error).actions, []);
        let dead =
            plan(&unmapped, &observed(ObservedWorker::Gone, ObservedQuiesce::default())).actions;
        assert!(at(&dead, Action::Disconnect(3)) < at(&dead, Action::Unquiesce));
        assert!(at(&dead, Action::Unquiesce) < at(&dead, Action::RemoveRecord));

        let forced = quiesced(Intent::Forced(UnmountScope::All));
        let actions = plan(&forced, &observed(SERVES, in_progress)).actions;
        assert!(at(&actions, Action::FailIo) < at(&actions, Action::TryUnquiesce));
        let detach = Action::Unmount(3, UnmountScope::All);
        assert!(at(&actions, Action::TryUnquiesce) < at(&actions, detach));
        assert!(at(&actions, Action::ForceDisconnect(3)) < at(&actions, Action::Unquiesce));
        assert!(at(&actions, Action::Unquiesce) < at(&actions, Action::RemoveRecord));
    }
}
