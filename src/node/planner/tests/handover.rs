//! Plans that end a handover.

use super::{established, observed_with};
use crate::planner::{
    Action, Intent, Observed, ObservedWorker, Plan, Record, State, WorkerId, plan,
};
use cleat_core::error::ErrorKind;
use cleat_kernel::UnmountScope;

const SERVES: ObservedWorker = ObservedWorker::Alive { connections: 1, size: 1 << 20 };

fn hung() -> ObservedWorker {
    ObservedWorker::Unreachable { pid: 7, reason: "does not answer".into() }
}

/// Returns the plan for a mapping with two workers; `handed_over` is what the handover word says.
fn end(
    intent: Intent,
    handed_over: Option<bool>,
    worker: ObservedWorker,
    predecessor: ObservedWorker,
) -> Plan {
    let ids = [6, 7].map(|pid| Some(WorkerId { pid, started_ticks: 1 }));
    let record = Record { intent, predecessor: ids[0], worker: ids[1], ..established(1, true) };
    plan(&record, &Observed { predecessor, handed_over, ..observed_with(worker) })
}

#[test]
fn of_two_workers_the_one_that_serves_stays() {
    use ObservedWorker::Gone;
    let no = Some(false);
    let restore = Action::RestorePredecessor;
    let cases = [
        (Some(true), SERVES, SERVES, vec![Action::StopPredecessor]),
        (Some(true), SERVES, Gone, vec![Action::StopPredecessor]),
        // The new worker has ended, so that the next plan starts another one.
        (Some(true), Gone, SERVES, vec![Action::StopPredecessor]),
        (no, SERVES, SERVES, vec![Action::StopWorker, restore]),
        (no, hung(), SERVES, vec![Action::StopWorker, restore]),
        (no, Gone, SERVES, vec![restore]),
        (None, Gone, hung(), vec![restore]),
        // A predecessor that has ended does not become the worker again.
        (no, SERVES, Gone, vec![Action::StopWorker]),
        (no, Gone, Gone, vec![Action::StopPredecessor]),
        (None, Gone, Gone, vec![Action::StopPredecessor]),
    ];
    for (handed_over, worker, predecessor, actions) in cases {
        for (intent, state) in
            [(Intent::Mapped, State::Recovering), (Intent::Unmapped, State::Unmapping)]
        {
            let plan = end(intent, handed_over, worker.clone(), predecessor.clone());
            let case = (handed_over, &worker, &predecessor);
            assert_eq!(plan, Plan { state, actions: actions.clone() }, "{case:?}");
        }
    }
}

/// Stopping the wrong one would fail the I/O of the device.
#[test]
fn without_knowledge_of_the_serving_worker_only_a_forced_unmap_stops_both() {
    for intent in [Intent::Mapped, Intent::Unmapped] {
        let plan = end(intent, None, hung(), hung());
        let State::Failed(failure) = &plan.state else { panic!("{plan:?}") };
        assert_eq!((failure.kind, &plan.actions), (ErrorKind::Unavailable, &vec![]));
        assert!(failure.message.contains("process 7"), "{failure:?}");
        assert!(failure.repair.starts_with("kill -9 7"), "{failure:?}");
    }
    let forced = end(Intent::Forced(UnmountScope::All), None, hung(), hung());
    let actions = [Action::RecordUnmapping, Action::StopWorker, Action::RestorePredecessor];
    assert_eq!((forced.state, &forced.actions[..]), (State::Unmapping, &actions[..]));
}
