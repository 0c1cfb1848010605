//! A worker with an RBD image: confined before it opens, since librbd starts threads.

use std::time::{Duration, Instant};

use cleat_core::error::ErrorKind;
use cleat_worker::protocol::{FromWorker, Start, ToWorker};
use librbd::{Cluster, Config, NewImage, Open, Pool};
use test_kit::ceph::{Cluster as TestCluster, ID, POOL, shared};

use test_kit::nbd::kernel as nbd;
use test_kit::worker::{Worker, failure, start_message};

pub(super) fn pool() -> std::sync::Arc<Pool> {
    let config = Config {
        conf: Some(shared().conf()),
        id: Some(ID.to_owned()),
        keyring: Some(shared().keyring(ID)),
        ..Config::default()
    };
    Cluster::connect(&config).unwrap().pool(POOL, None).unwrap()
}

/// The URI of a new image.
pub(super) fn fresh(image: &str) -> String {
    pool().create(image, 8 << 20, &NewImage::default()).unwrap();
    let (conf, keyring) = (shared().conf(), shared().keyring(ID));
    format!("rbd:{POOL}/{image}?conf={}&keyring={}&id={ID}", conf.display(), keyring.display())
}

#[test]
fn an_image_is_served_by_a_confined_process() {
    let uri = fresh("served");
    let (mut worker, ready) = Worker::ready(&uri);
    assert_eq!((ready.size, ready.preferred_block), (8 << 20, 4 << 20));
    assert!(ready.outlives_worker);
    // Seccomp mode 2: a filter. Every thread of librbd's has it, and no capability.
    for task in std::fs::read_dir(worker.proc("task")).unwrap().flatten() {
        let status = std::fs::read_to_string(task.path().join("status")).unwrap();
        let line = |key: &str| status.lines().find_map(|l| l.strip_prefix(key)).unwrap().trim();
        assert_eq!((line("Seccomp:"), line("NoNewPrivs:")), ("2", "1"), "{status}");
        assert_eq!(line("CapEff:"), "0000000000000000", "{status}");
    }
    let sockets = worker.serve(2);
    let data: Vec<u8> = (0..1_u32 << 20).map(|n| (n % 251) as u8).collect();
    assert_eq!(nbd::write(&sockets[0], 12345 * 512, &data), 0);
    assert_eq!(nbd::simple(&sockets[1], nbd::FLUSH, 0, 0), 0);
    assert!(nbd::read(&sockets[1], 12345 * 512, 1 << 20) == data);
    assert_eq!(nbd::simple(&sockets[1], nbd::TRIM, 0, 4 << 20), 0);
    let grown = worker.call(&ToWorker::Resize { size: 16 << 20, shrink: false });
    assert_eq!(grown, FromWorker::Size { size: 16 << 20 });
    assert!(nbd::read(&sockets[0], 15 << 20, 4096).iter().all(|byte| *byte == 0));
    worker.send(&ToWorker::Stop, &[]);
    assert!(worker.exit().success(), "{}", worker.log());
    let log = worker.log();
    assert!(log.contains("confinement=[\"single thread\", "), "no thread was there before: {log}");
    // It let go of the image: the next one has it at once.
    let (_next, sockets) = Worker::serving(&uri, 1);
    assert!(nbd::read(&sockets[0], 12345 * 512, 1 << 20) == data);
}

/// The library has bounds of its own on what is under way, 1024 operations, and holds up whoever begins
/// another: that would be the connection's thread, which then could not answer what needs no cluster.
#[test]
fn a_connection_answers_with_more_under_way_than_the_library_would_begin() {
    let cluster = TestCluster::start();
    // Nothing says which objects there are, so each of a range is asked for: 64 at a time.
    let features = ["--image-feature", "layering", "--image-feature", "exclusive-lock"];
    let create = [&["create", "volumes/wide", "--size", "32G"], &features[..]].concat();
    cluster.rbd(&create).unwrap();
    let (conf, keyring) = (cluster.conf(), cluster.keyring(ID));
    let (conf, keyring) = (conf.display(), keyring.display());
    let uri = format!("rbd:{POOL}/wide?conf={conf}&keyring={keyring}&id={ID}");
    let (_worker, sockets) = Worker::serving(&uri, 1);
    assert_eq!(nbd::write(&sockets[0], 0, &[1; 4096]), 0);
    cluster.tell("pause osd");
    let length: u32 = 256 << 20;
    for number in 0..100 {
        nbd::send(&sockets[0], nbd::TRIM, number, number * u64::from(length), length, &[]);
    }
    // Beyond the end.
    nbd::send(&sockets[0], nbd::READ, 100, 1 << 40, 512, &[]);
    assert_eq!(nbd::reply(&sockets[0]), (100, libc::EINVAL.cast_unsigned()));
    cluster.tell("resume osd");
    let mut ended: Vec<_> = (0..100).map(|_| nbd::reply(&sockets[0])).collect();
    ended.sort_unstable();
    assert!(ended.into_iter().eq((0..100).map(|number| (number, 0))));
}

#[test]
fn a_fenced_worker_says_so_and_answers_with_errors() {
    let uri = fresh("fenced");
    let (worker, sockets) = Worker::serving(&uri, 1);
    assert_eq!(nbd::write(&sockets[0], 0, &[1; 4096]), 0);
    let pool = pool();
    let image = pool.open("fenced", None, Open::Write).unwrap();
    let owner = image.lock_owners().unwrap().remove(0);
    pool.cluster().blocklist_add(&owner, Duration::from_secs(3600)).unwrap();
    // An OSD that has not heard of it yet still takes writes.
    let limit = Instant::now() + Duration::from_secs(20);
    while nbd::write(&sockets[0], 0, &[2; 4096]) == 0 {
        assert!(Instant::now() < limit, "never fenced");
    }
    assert_eq!(worker.receive(), FromWorker::Fenced);
    assert_ne!(nbd::simple(&sockets[0], nbd::FLUSH, 0, 0), 0);
}

#[test]
fn a_second_worker_is_told_who_has_the_image() {
    let uri = fresh("rivals");
    let (_first, _) = Worker::ready(&uri);
    let mut second = Worker::launch();
    let other = Start { mapping_id: "other".to_owned(), ..start_message(&uri) };
    second.send_start(&other);
    let (kind, message) = failure(second.receive());
    assert_eq!(kind, ErrorKind::InUse, "{message}");
    assert!(message.contains("127.0.0.1:0/"), "{message}");
    assert_eq!(second.exit().code(), Some(1));
}
