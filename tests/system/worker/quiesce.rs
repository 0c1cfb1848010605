//! A worker that is asked to keep snapshots of its image waiting until the volume is quiet.

use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use cleat_core::error::ErrorKind;
use cleat_worker::protocol::{FromWorker, Start, ToWorker};
use test_kit::ceph::{POOL, shared};

use crate::worker::rbd::fresh;
use test_kit::nbd::kernel as nbd;
use test_kit::worker::{Worker, failure, start_message};

/// For `rbd`, which librbd lets wait for 50 s.
const PATIENCE: Duration = Duration::from_secs(120);

fn quiescing(image: &str) -> Worker {
    let uri = fresh(image);
    let worker = Worker::launch();
    worker.send_start(&Start { quiesce: true, ..start_message(&uri) });
    assert!(matches!(worker.receive(), FromWorker::Ready(_)));
    worker
}

/// `rbd snap create`, on a thread of its own.
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
    // What freezing is: writes through this very worker, and its control thread answers.
    assert_eq!(nbd::write(&sockets[0], 0, &[7; 4096]), 0);
    assert_eq!(nbd::simple(&sockets[0], nbd::FLUSH, 0, 0), 0);
    assert_eq!(worker.call(&ToWorker::Ping), FromWorker::Done);
    let away = worker.call(&ToWorker::OfferHandover { generation: 8, limit_ms: 1000 });
    assert_eq!(failure(away).0, ErrorKind::Unavailable);
    let wrong = worker.call(&ToWorker::Quiesced { snapshot: number + 2, errno: 0 });
    assert_eq!(failure(wrong).0, ErrorKind::NotFound);
    assert!(made.try_recv().is_err() && snapshots("quiesced") == 0, "it did not wait");
    assert_eq!(worker.call(&ToWorker::Quiesced { snapshot: number, errno: 0 }), FromWorker::Done);
    assert_eq!(worker.receive(), FromWorker::SnapshotPending { snapshot: None });
    made.recv_timeout(PATIENCE).unwrap().unwrap();
    assert_eq!(snapshots("quiesced"), 1);

    let made = snap("quiesced", "two");
    let again = waiting(&worker);
    assert_ne!(again, number);
    let refused = ToWorker::Quiesced { snapshot: again, errno: libc::EBUSY };
    assert_eq!(worker.call(&refused), FromWorker::Done);
    assert_eq!(worker.receive(), FromWorker::SnapshotPending { snapshot: None });
    let complaint = made.recv_timeout(PATIENCE).unwrap().unwrap_err();
    assert!(complaint.contains("busy"), "{complaint}");
    assert_eq!(snapshots("quiesced"), 1);
}

#[test]
fn without_a_supervisor_a_snapshot_fails_and_the_next_one_hears_of_what_waits() {
    let mut worker = quiescing("deserted");
    let _sockets = worker.serve(1);
    let made = snap("deserted", "one");
    let number = waiting(&worker);
    // Another supervisor comes before the first one goes.
    let first = worker.channel.take();
    worker.adopt();
    assert_eq!(waiting(&worker), number);
    drop(first);
    assert_eq!(worker.call(&ToWorker::Quiesced { snapshot: number, errno: 0 }), FromWorker::Done);
    made.recv_timeout(PATIENCE).unwrap().unwrap();

    let made = snap("deserted", "two");
    assert_eq!(worker.receive(), FromWorker::SnapshotPending { snapshot: None });
    waiting(&worker);
    drop(worker.channel.take());
    made.recv_timeout(PATIENCE).unwrap().unwrap_err();
    snap("deserted", "three").recv_timeout(PATIENCE).unwrap().unwrap_err();
    assert_eq!(snapshots("deserted"), 1);
    worker.adopt();
    assert_eq!(worker.call(&ToWorker::Ping), FromWorker::Done);
}

#[test]
fn a_worker_that_ends_keeps_no_snapshot_waiting() {
    let mut worker = quiescing("ending");
    let made = snap("ending", "one");
    waiting(&worker);
    worker.send(&ToWorker::Stop, &[]);
    // librbd may try again by itself, when nobody is asked any more.
    let _ = made.recv_timeout(PATIENCE).unwrap();
    assert!(worker.exit().success(), "{}", worker.log());
    snap("ending", "two").recv_timeout(PATIENCE).unwrap().unwrap();
}

#[test]
fn where_nothing_tells_of_snapshots_it_is_refused() {
    let (directory, file) = crate::worker::file("plain.img", 1 << 20);
    let snapped = fresh("snapped");
    shared().rbd(&["snap", "create", "--no-progress", &format!("{POOL}/snapped@s")]).unwrap();
    let snapshot = snapped.replace("/snapped?", "/snapped@s?");
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
