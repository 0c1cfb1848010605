//! Who may write to an RBD image: claims of workers that died, were restarted elsewhere, or are told to
//! take over.

use std::time::Instant;

use cleat::error::ErrorKind;
use cleat::worker::protocol::{Failure, FromWorker, Start, ToWorker};
use librbd::Open;

use crate::nbd;
use crate::rbd::{fresh, pool};
use crate::supervisor::{Worker, start_message};

/// What the image's metadata say.
fn claim_of(image: &str) -> serde_json::Value {
    let image = pool().open(image, None, Open::ReadOnly).unwrap();
    let text = image.metadata_get("cleat.claim").unwrap().expect("it is claimed");
    serde_json::from_str(&text).unwrap()
}

/// Of a mapping on a node in one of its boots.
fn start_as(uri: &str, node: &str, boot: &str, mapping: &str) -> Start {
    Start {
        node: node.to_owned(),
        boot_id: boot.to_owned(),
        mapping_id: mapping.to_owned(),
        ..start_message(uri)
    }
}

fn started(start: &Start) -> Worker {
    let worker = Worker::launch();
    worker.send_start(start);
    match worker.receive() {
        FromWorker::Ready(_) => worker,
        other => panic!("{start:?}: {other:?}"),
    }
}

fn refused(start: &Start) -> Failure {
    let worker = Worker::launch();
    worker.send_start(start);
    match worker.receive() {
        FromWorker::Failed(failure) => failure,
        other => panic!("{start:?}: {other:?}"),
    }
}

fn stop(mut worker: Worker) {
    worker.send(&ToWorker::Stop, &[]);
    assert!(worker.exit().success(), "{}", worker.log());
}

#[test]
fn a_killed_worker_is_succeeded_at_once_and_a_stopped_one_leaves_no_claim() {
    let uri = fresh("succession");
    let start = start_as(&uri, "a", "boot", "m");
    let mut worker = started(&start);
    let first = claim_of("succession");
    assert_eq!((&first["node"], &first["boot_id"]), (&"a".into(), &"boot".into()), "{first}");
    assert_eq!((&first["mapping_id"], &first["generation"]), (&"m".into(), &1.into()), "{first}");
    let mut times = Vec::new();
    for round in 2..=4_u8 {
        let sockets = worker.serve(1);
        assert_eq!(nbd::write(&sockets[0], 0, &[round; 4096]), 0);
        worker.child.kill().unwrap();
        worker.child.wait().unwrap();
        let begun = Instant::now();
        worker = started(&Start { resumes: true, ..start.clone() });
        times.push(begun.elapsed());
        let sockets = worker.serve(1);
        assert!(nbd::read(&sockets[0], 0, 4096) == [round; 4096]);
        let claim = claim_of("succession");
        assert_eq!(claim["generation"], round, "{claim}");
        assert_ne!(claim["address"], first["address"]);
        assert_eq!(claim["cut"].as_array().unwrap().len(), usize::from(round) - 1);
    }
    println!("from the proof of the death to the successor's being ready: {times:?}");
    stop(worker);
    assert_eq!(claim_of("succession")["released"], true);
    // Nobody is in anybody's way now.
    stop(started(&start_as(&uri, "b", "other", "x")));
    assert_eq!(claim_of("succession")["generation"], 5);
}
