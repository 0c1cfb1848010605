//! A worker with `quiesce`: snapshots of its image wait until the supervisor has quiesced the volume.

use std::ops::ControlFlow;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use cleat::backends::REGISTRY;
use cleat_core::error::{Error, ErrorKind};
use cleat_worker::protocol::{FromWorker, Start, ToWorker};
use test_kit::ceph::{POOL, shared};

use crate::worker::objects::ObjectVolume;
use crate::worker::rbd::fresh;
use test_kit::nbd::kernel as nbd;
use test_kit::worker::{Worker, failure, start_message};

/// The time limit of `rbd`; librbd delays it for up to 50 s.
const RBD_LIMIT: Duration = Duration::from_secs(120);

fn quiescing(image: &str) -> Worker {
    let uri = fresh(image);
    let worker = Worker::launch();
    worker.send_start(&Start { quiesce: true, ..start_message(&uri) });
    assert!(matches!(worker.receive(), FromWorker::Ready(_)));
    worker
}

/// Runs `rbd snap create` on a thread of its own.
fn snap(image: &'static str, snapshot: &'static str) -> Receiver<Result<Vec<u8>, String>> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let at = format!("{POOL}/{image}@{snapshot}");
        sender.send(shared().rbd(&["snap", "create", "--no-progress", &at]))
    });
    receiver
}

fn snapshots(image: &str) -> usize {
    let listed = shared().rbd(&["snap", "ls", "--format", "json", &format!("{POOL}/{image}")]);
    let listed: serde_json::Value = serde_json::from_slice(&listed.unwrap()).unwrap();
    listed.as_array().unwrap().len()
}

fn waiting(worker: &Worker) -> u64 {
    match worker.receive() {
        FromWorker::SnapshotPending { snapshot: Some(number) } => number,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_snapshot_waits_for_the_supervisor_while_the_volume_is_served() {
    let mut worker = quiescing("quiesced");
    let sockets = worker.serve(1);
    let made = snap("quiesced", "one");
    let number = waiting(&worker);
    // Freezing the file system writes through this worker, and its control thread must answer.
    assert_eq!(nbd::write(&sockets[0], 0, &[7; 4096]), 0);
    assert_eq!(nbd::simple(&sockets[0], nbd::FLUSH, 0, 0), 0);
    assert_eq!(worker.call(&ToWorker::Ping), FromWorker::Done);
    let away = worker.call(&ToWorker::OfferHandover { generation: 8, limit_ms: 1000 });
    assert_eq!(failure(away).0, ErrorKind::Unavailable);
    let wrong = worker.call(&ToWorker::Quiesced { snapshot: number + 2, errno: 0 });
    assert_eq!(failure(wrong).0, ErrorKind::NotFound);
    assert!(made.try_recv().is_err() && snapshots("quiesced") == 0, "the snapshot did not wait");
    assert_eq!(worker.call(&ToWorker::Quiesced { snapshot: number, errno: 0 }), FromWorker::Done);
    assert_eq!(worker.receive(), FromWorker::SnapshotPending { snapshot: None });
    made.recv_timeout(RBD_LIMIT).unwrap().unwrap();
    assert_eq!(snapshots("quiesced"), 1);

    let made = snap("quiesced", "two");
    let again = waiting(&worker);
    assert_ne!(again, number);
    let refused = ToWorker::Quiesced { snapshot: again, errno: libc::EBUSY };
    assert_eq!(worker.call(&refused), FromWorker::Done);
    assert_eq!(worker.receive(), FromWorker::SnapshotPending { snapshot: None });
    let complaint = made.recv_timeout(RBD_LIMIT).unwrap().unwrap_err();
    assert!(complaint.contains("busy"), "{complaint}");
    assert_eq!(snapshots("quiesced"), 1);
}

#[test]
fn without_a_supervisor_a_snapshot_fails_and_a_new_supervisor_receives_pending_snapshots() {
    let mut worker = quiescing("deserted");
    let _sockets = worker.serve(1);
    let made = snap("deserted", "one");
    let number = waiting(&worker);
    // A second supervisor adopts the worker before the first one disconnects.
    let first = worker.channel.take();
    worker.adopt();
    assert_eq!(waiting(&worker), number);
    drop(first);
    assert_eq!(worker.call(&ToWorker::Quiesced { snapshot: number, errno: 0 }), FromWorker::Done);
    made.recv_timeout(RBD_LIMIT).unwrap().unwrap();

    let made = snap("deserted", "two");
    assert_eq!(worker.receive(), FromWorker::SnapshotPending { snapshot: None });
    waiting(&worker);
    drop(worker.channel.take());
    made.recv_timeout(RBD_LIMIT).unwrap().unwrap_err();
    snap("deserted", "three").recv_timeout(RBD_LIMIT).unwrap().unwrap_err();
    assert_eq!(snapshots("deserted"), 1);
    worker.adopt();
    assert_eq!(worker.call(&ToWorker::Ping), FromWorker::Done);
}

/// Takes a snapshot of a volume of objects on a thread of its own, as a command does.
fn take(volume: &ObjectVolume, snapshot: &'static str) -> Receiver<Result<bool, Error>> {
    let (sender, receiver) = channel();
    let store = volume.uri.strip_suffix("/v").unwrap().to_owned();
    std::thread::spawn(move || {
        let store = REGISTRY.store(&store).unwrap().connect().unwrap();
        let go_on = &mut |_, _| ControlFlow::Continue(());
        sender.send(store.snapshots().unwrap().create("v", snapshot, go_on))
    });
    receiver
}

#[test]
fn a_snapshot_of_a_volume_of_objects_waits_for_the_supervisor() {
    let volume = ObjectVolume::in_directory();
    let mut worker = Worker::launch();
    worker.send_start(&Start { quiesce: true, ..volume.start() });
    assert!(matches!(worker.receive(), FromWorker::Ready(_)));
    let sockets = worker.serve(1);
    let taken = take(&volume, "one");
    let number = waiting(&worker);
    // Freezing the file system writes through this worker.
    assert_eq!(nbd::write(&sockets[0], 0, &[7; 4096]), 0);
    assert_eq!(nbd::simple(&sockets[0], nbd::FLUSH, 0, 0), 0);
    assert!(taken.try_recv().is_err(), "the snapshot did not wait");
    assert_eq!(worker.call(&ToWorker::Quiesced { snapshot: number, errno: 0 }), FromWorker::Done);
    assert_eq!(worker.receive(), FromWorker::SnapshotPending { snapshot: None });
    assert!(taken.recv_timeout(RBD_LIMIT).unwrap().unwrap());

    let taken = take(&volume, "two");
    let again = waiting(&worker);
    assert_ne!(again, number);
    let refused = ToWorker::Quiesced { snapshot: again, errno: libc::EBUSY };
    assert_eq!(worker.call(&refused), FromWorker::Done);
    assert_eq!(worker.receive(), FromWorker::SnapshotPending { snapshot: None });
    let error = taken.recv_timeout(RBD_LIMIT).unwrap().unwrap_err();
    assert!(error.message().contains("cannot be frozen now: Device or resource busy"), "{error}");
}

#[test]
fn a_stopped_worker_does_not_delay_snapshots() {
    let mut worker = quiescing("ending");
    let made = snap("ending", "one");
    waiting(&worker);
    worker.send(&ToWorker::Stop, &[]);
    // librbd may retry by itself; then no client delays the snapshot.
    let made = made.recv_timeout(RBD_LIMIT).unwrap();
    assert!(made.is_err() || snapshots("ending") == 1, "the snapshot is missing");
    assert!(worker.exit().success(), "{}", worker.log());
    snap("ending", "two").recv_timeout(RBD_LIMIT).unwrap().unwrap();
}

#[test]
fn quiesce_is_refused_for_volumes_without_snapshot_notifications() {
    let (directory, file) = crate::worker::file("plain.img", 1 << 20);
    let snapped = fresh("worker-snapped");
    shared()
        .rbd(&["snap", "create", "--no-progress", &format!("{POOL}/worker-snapped@s")])
        .unwrap();
    let snapshot = snapped.replace("/worker-snapped?", "/worker-snapped@s?");
    for (uri, kind) in [(&file, ErrorKind::Unsupported), (&snapshot, ErrorKind::InvalidArgument)] {
        let mut worker = Worker::launch();
        worker.send_start(&Start { quiesce: true, ..start_message(uri) });
        let FromWorker::Failed(failed) = worker.receive() else { panic!("{uri}") };
        assert_eq!(failed.kind, kind, "{failed:?}");
        assert!(failed.repair.unwrap().contains("--quiesce"));
        assert!(!worker.exit().success());
    }
    drop(directory);
}
