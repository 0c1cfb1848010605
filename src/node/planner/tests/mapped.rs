//! Plans for mappings that are to work.

use super::model::{Model, ModelWorker};
use super::{established, observed_with};
use crate::planner::{
    Action, Intent, MAX_FAILURES, Observed, ObservedDevice, ObservedWorker, Plan, Record, State,
    plan,
};
use cleat_core::error::ErrorKind;

#[test]
fn a_dead_worker_is_replaced_by_one_of_the_next_generation() {
    let mut model = Model { in_use: true, ..Model::new(established(2, true)) };
    let plan = plan(model.record.as_ref().unwrap(), &model.observe());
    assert_eq!(plan.state, State::Recovering);
    assert_eq!(plan.actions, [Action::StartWorker, Action::Reconnect { index: 0, missing: 2 }]);
    assert_eq!(model.run(&mut std::iter::empty(), 3), Some(State::Mapped));
    assert_eq!(model.record.unwrap().generation, 1);
}

#[test]
fn content_that_was_in_a_workers_memory_is_reported_as_lost() {
    let mut model = Model { in_use: true, ..Model::new(established(1, false)) };
    let Some(State::Failed(failure)) = model.run(&mut std::iter::empty(), 3) else {
        panic!("not failed")
    };
    assert!(failure.message.contains("content"), "{}", failure.message);
    // An unmap waits for the holders.
    model.record.as_mut().unwrap().intent = Intent::Unmapped;
    assert!(matches!(model.run(&mut std::iter::empty(), 3), Some(State::Held(_))));
    model.in_use = false;
    assert_eq!(model.run(&mut std::iter::empty(), 3), Some(State::Unmapped));
}

#[test]
fn a_device_that_another_program_disconnected_is_not_connected_again() {
    let mut model = Model {
        devices: Vec::new(),
        worker: ModelWorker::Alive(0),
        ..Model::new(established(1, true))
    };
    assert!(matches!(model.run(&mut std::iter::empty(), 3), Some(State::Failed(_))));
    assert!(model.devices.is_empty());
}

#[test]
fn a_working_device_grows_with_its_volume_in_whole_blocks() {
    let record = established(1, true);
    let actions = |record: &Record, size, connections, resize_deferred| {
        let observed = Observed {
            failures: MAX_FAILURES,
            resize_deferred,
            ..observed_with(ObservedWorker::Alive { connections, size })
        };
        let plan = plan(record, &observed);
        assert!(plan.state == State::Mapped || connections == 0 || size < 1 << 20);
        plan.actions
    };
    let grow = Action::GrowDevice { index: 3, size: (1 << 20) + 1024 };
    assert_eq!(actions(&record, (1 << 20) + 1024 + 511, 1, false), [grow]);
    assert_eq!(actions(&record, (1 << 20) + 511, 1, false), []);
    assert_eq!(actions(&record, (1 << 20) + 1024, 1, true), []);
    // A device does not grow before it works, and it never shrinks without a request.
    for (size, connections) in [((1 << 20) + 1024, 0), (1 << 19, 1)] {
        let actions = actions(&record, size, connections, false);
        assert!(!actions.iter().any(|action| matches!(action, Action::GrowDevice { .. })));
    }
}

#[test]
fn a_failed_sync_is_recorded_once_and_before_a_worker_starts() {
    let mut record = established(1, true);
    let mut observed = Observed { sync_failed: true, ..observed_with(ObservedWorker::Gone) };
    let replace = [Action::StartWorker, Action::Reconnect { index: 3, missing: 1 }];
    let actions = plan(&record, &observed).actions;
    assert_eq!(actions.split_first(), Some((&Action::RecordSyncFailed, &replace[..])));
    observed.worker = ObservedWorker::Alive { connections: 1, size: 1 << 20 };
    let serving = plan(&record, &observed);
    let only = vec![Action::RecordSyncFailed];
    assert_eq!(serving, Plan { state: State::Mapped, actions: only });
    record.sync_failed = true;
    assert_eq!(plan(&record, &observed).actions, []);
}

#[test]
fn a_replaced_volume_is_never_opened_again_and_its_io_is_refused_at_once() {
    let mut record = established(1, true);
    record.replaced = Some("file:/v is another volume".to_owned());
    let refuse = Action::RefuseIo { index: 3, connections: 1 };
    for (refusing, expected) in [(false, vec![refuse]), (true, vec![])] {
        // An explicit retry resets the failure count.
        for failures in [0, 3, MAX_FAILURES] {
            let gone = observed_with(ObservedWorker::Gone);
            let observed = Observed { failures, refusing, ..gone };
            let Plan { state: State::Failed(failure), actions } = plan(&record, &observed) else {
                panic!("it goes on with {failures} failures")
            };
            assert_eq!((failure.kind, &actions), (ErrorKind::Replaced, &expected));
            assert!(failure.message.contains("file:/v is another volume"), "{failure:?}");
            assert!(failure.repair.starts_with("cleat unmap --force v"), "{failure:?}");
        }
    }
    let observed = observed_with(ObservedWorker::Alive { connections: 0, size: 1 << 20 });
    assert_eq!(plan(&record, &observed).actions, [], "it gets no connection");
    let reason = "does not answer".to_owned();
    let observed = observed_with(ObservedWorker::Unreachable { pid: 7, reason });
    assert_eq!(plan(&record, &observed).actions, [], "it may have requests");
}

#[test]
fn io_without_a_worker_is_refused_after_the_timeout() {
    let mut record = established(2, true);
    let mut observed = Observed {
        failures: MAX_FAILURES,
        history: "worker 7 was killed by SIGKILL".into(),
        ..observed_with(ObservedWorker::Gone)
    };
    let refuse = Action::RefuseIo { index: 3, connections: 2 };
    let failed = |record: &Record, observed: &Observed| match plan(record, observed) {
        Plan { state: State::Failed(failure), actions } => (failure.message, actions),
        other => panic!("{other:?}"),
    };
    let (message, actions) = failed(&record, &observed);
    assert!(message.contains("SIGKILL") && message.contains("waited for 60 s"), "{message}");
    assert_eq!(actions, []);
    observed.unserved_too_long = true;
    assert_eq!(failed(&record, &observed).1, [refuse]);
    observed.refusing = true;
    let (message, actions) = failed(&record, &observed);
    assert!(message.ends_with("its I/O fails"), "{message}");
    assert_eq!(actions, []);
    // An explicit retry resets the failure count, and the planner tries again.
    observed.failures = 0;
    let actions = plan(&record, &observed).actions;
    assert_eq!(actions, [Action::StartWorker, Action::Reconnect { index: 3, missing: 2 }]);
    // A retry cannot restore lost content, so its I/O is refused also with a failure count of 0.
    record.volume.as_mut().unwrap().outlives_worker = false;
    observed.refusing = false;
    assert_eq!(failed(&record, &observed).1, [refuse]);
}

#[test]
fn only_dead_connections_are_replaced() {
    let observed = observed_with(ObservedWorker::Alive { connections: 3, size: 1 << 20 });
    let plan = plan(&established(4, true), &observed);
    let actions = vec![Action::Reconnect { index: 3, missing: 1 }];
    assert_eq!(plan, Plan { state: State::Recovering, actions });
}

#[test]
fn a_mapping_works_only_when_its_paths_are_known() {
    let serves = observed_with(ObservedWorker::Alive { connections: 1, size: 1 << 20 });
    let unknown = Observed { paths_known: false, ..serves.clone() };
    let mut record = established(1, true);
    let wait = vec![Action::WaitForDevice];
    let after_restart = plan(&record, &unknown);
    assert_eq!(after_restart, Plan { state: State::Recovering, actions: wait });
    // The map request has not returned yet, so it waits for the paths itself.
    record.established = false;
    let actions = vec![Action::WaitForDevice, Action::RecordMapped];
    for observed in [&serves, &unknown] {
        let mapping = Plan { state: State::Mapping, actions: actions.clone() };
        assert_eq!(plan(&record, observed), mapping);
    }
}

#[test]
fn repairs_that_fail_again_and_again_are_given_up() {
    let half = observed_with(ObservedWorker::Alive { connections: 1, size: 1 << 20 });
    let served = observed_with(ObservedWorker::Alive { connections: 2, size: 1 << 20 });
    let without_paths = Observed { paths_known: false, ..served };
    for observed in [half, without_paths, observed_with(ObservedWorker::Gone)] {
        let record = established(2, true);
        let failed = |failures| plan(&record, &Observed { failures, ..observed.clone() });
        assert_eq!(failed(MAX_FAILURES - 1).state, State::Recovering);
        let Plan { state: State::Failed(failure), actions } = failed(MAX_FAILURES) else {
            panic!("{observed:?} is repaired for ever")
        };
        assert_eq!((failure.kind, &actions), (ErrorKind::Unavailable, &vec![]));
        // Without a known cause there is no colon.
        let message = "v could not be repaired in 10 attempts; its I/O fails after";
        assert!(failure.message.starts_with(message), "{failure:?}");
    }
}

/// No later worker serves the device, and the fence was recorded.
#[test]
fn io_of_a_fenced_device_without_a_worker_is_refused_after_the_timeout() {
    let record = Record { fenced: true, ..established(2, true) };
    let refuse = Action::RefuseIo { index: 3, connections: 2 };
    let actions = |worker: ObservedWorker, unserved_too_long| {
        let observed = Observed { unserved_too_long, ..observed_with(worker) };
        let plan = plan(&record, &observed);
        let State::Failed(failure) = plan.state else { panic!("{:?}", plan.state) };
        assert_eq!(failure.kind, ErrorKind::Fenced);
        plan.actions
    };
    assert_eq!(actions(ObservedWorker::Gone, true), [refuse]);
    assert_eq!(actions(ObservedWorker::Gone, false), []);
    // A fenced worker answers the requests itself.
    assert_eq!(actions(ObservedWorker::Fenced, true), []);
}

#[test]
fn two_devices_of_one_mapping_are_named_and_left_alone() {
    let devices = [3, 4].map(|index| ObservedDevice { index, size: 1 << 20 }).to_vec();
    let serves = ObservedWorker::Alive { connections: 1, size: 1 << 20 };
    let plan = plan(&established(1, true), &Observed { devices, ..observed_with(serves) });
    let Plan { state: State::Failed(failure), actions } = plan else { panic!("{plan:?}") };
    assert_eq!((failure.kind, &actions), (ErrorKind::Internal, &vec![]));
    assert!(failure.message.ends_with("/dev/nbd3, /dev/nbd4"), "{failure:?}");
}
