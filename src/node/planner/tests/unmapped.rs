//! Plans for mappings that are to be removed.

use super::{observed_with, record};
use crate::planner::{
    Action, Intent, Observed, ObservedWorker, READ_ONLY, Record, State, WorkerId, plan,
};
use cleat_kernel::{Holder, UnmountScope};

#[test]
fn writes_of_an_unreachable_worker_are_flushed_before_it_is_killed() {
    let mut record = record(1, true);
    record.intent = Intent::Unmapped;
    record.established = true;
    let reason = "speaks another version".into();
    let observed = observed_with(ObservedWorker::Unreachable { pid: 7, reason });
    let actions = plan(&record, &observed).actions;
    let flush = [Action::OpenExclusively(3), Action::Flush(3), Action::RecordUnmapping];
    assert_eq!(actions[..3], flush);
    assert_eq!(actions[3], Action::Disconnect(3));
    let end = [Action::StopWorker, Action::ReleaseClaim, Action::RemoveRecord];
    assert_eq!(actions[4..], end);
}

/// Only a flush through a new worker makes the data in the page cache durable.
#[test]
fn a_device_without_a_worker_is_flushed_by_a_new_one() {
    let unmapped = |established, outlives_worker| Record {
        intent: Intent::Unmapped,
        established,
        ..record(2, outlives_worker)
    };
    let actions = |record: &Record, worker| plan(record, &observed_with(worker)).actions;
    let reconnect = Action::Reconnect { index: 3, missing: 2 };
    let kept = unmapped(true, true);
    let open = Action::OpenExclusively(3);
    let flush = [Action::StartWorker, reconnect, open, Action::Flush(3), Action::RecordUnmapping];
    let all = actions(&kept, ObservedWorker::Gone);
    assert_eq!(all[..5], flush);
    assert_eq!(all[5], Action::Disconnect(3));
    assert_eq!(all[6..], [Action::StopWorker, Action::ReleaseClaim, Action::RemoveRecord]);
    let unconnected = ObservedWorker::Alive { connections: 0, size: 1 << 20 };
    assert_eq!(actions(&kept, unconnected.clone())[..4], flush[1..]);
    // There is nothing to flush, or no worker that could do it.
    let read_only = {
        let mut record = kept.clone();
        record.options.read_only = true;
        record
    };
    let snapshot = {
        let mut record = kept.clone();
        record.volume.as_mut().unwrap().transmission_flags |= READ_ONLY;
        record
    };
    let lost = [
        unmapped(false, true),
        unmapped(true, false),
        read_only,
        snapshot,
        Record { fenced: true, ..kept.clone() },
        Record { replaced: Some("another".into()), ..kept.clone() },
    ];
    for record in lost {
        for worker in [ObservedWorker::Gone, unconnected.clone()] {
            // A device that users know of may be in use inside the kernel, whatever its volume is.
            let before: &[Action] = if record.established { &[open] } else { &[] };
            let actions = actions(&record, worker);
            assert_eq!(actions[..before.len()], *before, "{record:?}");
            assert_eq!(actions[before.len()], Action::RecordUnmapping, "{record:?}");
        }
    }
}

/// A worker that serves the device needs nothing before it can take the flush, whatever the volume is.
#[test]
fn a_device_with_a_worker_is_flushed_as_it_is() {
    let observed = observed_with(ObservedWorker::Alive { connections: 1, size: 1 << 20 });
    let unmapped = |established, outlives| Record {
        intent: Intent::Unmapped,
        established,
        ..record(2, outlives)
    };
    let flush = [Action::OpenExclusively(3), Action::Flush(3), Action::RecordUnmapping];
    for outlives in [true, false] {
        assert_eq!(plan(&unmapped(true, outlives), &observed).actions[..3], flush);
    }
    assert_eq!(plan(&unmapped(false, true), &observed).actions[..2], flush[1..]);
}

/// The map did not finish, so that no user has written anything.
#[test]
fn the_device_of_an_unfinished_map_is_not_flushed_by_a_worker_that_does_not_answer() {
    let record = Record { intent: Intent::Unmapped, ..record(1, true) };
    let reason = "does not answer".into();
    let plan = plan(&record, &observed_with(ObservedWorker::Unreachable { pid: 7, reason }));
    let end = [Action::Disconnect(3), Action::StopWorker, Action::RemoveRecord];
    assert_eq!(plan.state, State::Unmapping);
    assert_eq!(plan.actions.split_first(), Some((&Action::RecordUnmapping, &end[..])));
}

/// The worker may have been killed before it could release the claim.
#[test]
fn the_claim_is_released_before_the_record_is_removed() {
    let mut record = Record { intent: Intent::Unmapped, ..record(1, true) };
    let gone = Observed { devices: Vec::new(), ..observed_with(ObservedWorker::Gone) };
    assert_eq!(plan(&record, &gone).actions, [Action::RemoveRecord]);
    record.established = true;
    let end = [Action::RecordUnmapping, Action::ReleaseClaim, Action::RemoveRecord];
    assert_eq!(plan(&record, &gone).actions, end);
}

#[test]
fn a_forced_unmap_ignores_holders_and_stops_the_worker_last() {
    let mut record = record(1, true);
    record.intent = Intent::Forced(UnmountScope::Own);
    let mut observed = Observed {
        holders: vec![Holder::Process { pid: 1, command: "fio".into() }],
        ..observed_with(ObservedWorker::Alive { connections: 1, size: 1 << 20 })
    };
    let unmount = Action::Unmount(3, UnmountScope::Own);
    let disconnect = Action::ForceDisconnect(3);
    let end = [Action::StopWorker, Action::ProveNoWrites, Action::RemoveRecord];
    let actions = |observed: &Observed| plan(&record, observed).actions;
    assert_eq!(actions(&observed)[..2], [Action::RecordUnmapping, Action::FailIo]);
    assert_eq!(actions(&observed)[2..4], [unmount, disconnect]);
    assert_eq!(actions(&observed)[4..], end);
    observed.worker = ObservedWorker::Gone;
    assert_eq!(actions(&observed)[..3], [Action::RecordUnmapping, unmount, disconnect]);
    assert_eq!(actions(&observed)[3..], end[1..]);
    // If the kernel may still create a device, the supervisor waits for that and observes again.
    observed.connecting = true;
    assert_eq!(actions(&observed)[3..], [Action::ProveNoWrites, Action::WaitForConnect]);
    // In a handover too, the intent is recorded before a worker is stopped.
    let mut handing_over = record.clone();
    handing_over.predecessor = Some(WorkerId { pid: 7, started_ticks: 7 });
    for handed_over in [Some(true), Some(false), None] {
        let observed = Observed { handed_over, ..observed.clone() };
        assert_eq!(plan(&handing_over, &observed).actions[0], Action::RecordUnmapping);
    }
}

#[test]
fn the_journal_stores_a_forced_intent_with_its_scope() {
    let intent = Intent::Forced(UnmountScope::Own);
    let text = serde_json::to_string(&intent).unwrap();
    assert_eq!(text, r#"{"forced":"own"}"#);
    assert_eq!(serde_json::from_str::<Intent>(&text).unwrap(), intent);
}
