//! A worker with an RBD image. It is confined before it opens the image, because librbd starts threads.

use std::time::{Duration, Instant};

use cleat_core::error::ErrorKind;
use cleat_worker::protocol::{FromWorker, Start, ToWorker};
use librbd::{Cluster, Config, NewImage, Open, Pool};
use test_kit::ceph::{Cluster as TestCluster, ID, POOL, shared};

#[cfg(feature = "fault")]
use super::surroundings::Surroundings;
use test_kit::nbd::kernel as nbd;
use test_kit::process::threads;
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

/// Creates an image of 8 MiB and returns its URI.
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
    // Seccomp mode 2 is a filter. Every thread of librbd has it, and no capability.
    for status in threads(worker.child.id(), "status") {
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
    assert!(
        log.contains("confinement=[\"single-thread\", "),
        "the worker was confined while it had a single thread: {log}"
    );
    // The worker released the image: the next worker can open it at once.
    let (_next, sockets) = Worker::serving(&uri, 1);
    assert!(nbd::read(&sockets[0], 12345 * 512, 1 << 20) == data);
}

/// The network is open to the worker of an image, and nothing else.
#[cfg(feature = "fault")]
#[test]
fn code_inside_the_worker_of_an_image_finds_every_road_closed_but_the_network() {
    let around = Surroundings::new();
    let (worker, sockets) = Worker::serving(&fresh("jail"), 1);
    let answer = worker.call(&ToWorker::SetFault { plan: around.plan(around.port()) });
    let open = around.open_roads(answer);
    assert!(open.contains("connect over TCP") && open.matches("(\"").count() == 1, "{open}");
    assert_eq!(nbd::write(&sockets[0], 0, &[1; 4096]), 0);
}

/// librbd has a limit of 1024 operations in flight, and blocks the thread that starts another one. If
/// this were the connection's thread, it could not answer requests that do not need the cluster.
#[test]
fn a_connection_answers_while_librbd_has_its_maximum_of_operations_in_flight() {
    let cluster = TestCluster::start();
    // Without an object map, librbd sends an operation to each object of a range: 64 per request.
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
    // A read beyond the end is refused without the cluster.
    nbd::send(&sockets[0], nbd::READ, 100, 1 << 40, 512, &[]);
    assert_eq!(nbd::reply(&sockets[0]), (100, libc::EINVAL.cast_unsigned()));
    cluster.tell("resume osd");
    let mut ended: Vec<_> = (0..100).map(|_| nbd::reply(&sockets[0])).collect();
    ended.sort_unstable();
    assert!(ended.into_iter().eq((0..100).map(|number| (number, 0))));
}

#[test]
fn a_fenced_worker_reports_it_and_fails_requests() {
    let uri = fresh("fenced");
    let (worker, sockets) = Worker::serving(&uri, 1);
    assert_eq!(nbd::write(&sockets[0], 0, &[1; 4096]), 0);
    let pool = pool();
    let image = pool.open("fenced", None, Open::Write).unwrap();
    let owner = image.lock_owners().unwrap().remove(0);
    pool.cluster().blocklist_add(&owner, Duration::from_secs(3600)).unwrap();
    // An OSD that does not have the blocklist entry yet still executes writes.
    let limit = Instant::now() + Duration::from_secs(20);
    while nbd::write(&sockets[0], 0, &[2; 4096]) == 0 {
        assert!(Instant::now() < limit, "the worker was not fenced");
    }
    assert_eq!(worker.receive(), FromWorker::Fenced);
    assert_ne!(nbd::simple(&sockets[0], nbd::FLUSH, 0, 0), 0);
}

#[test]
fn a_second_worker_for_the_same_image_is_refused_with_the_address_of_the_first() {
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
