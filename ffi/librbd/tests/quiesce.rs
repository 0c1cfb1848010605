//! Snapshots of a watched image on a real cluster: they wait for an answer, fail by it, and are told
//! to be over. The last test runs the others again under valgrind; there, CLEAT_TEST_VALGRIND is set.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use librbd::{Cluster, Config, Image, NewImage, Open, Quiesce, QuiesceWatch};
use test_kit::ceph::{ID, POOL, shared};

/// librbd gives up after 50 s, and tells of an end by itself after 10 s; slower under valgrind.
const PATIENCE: Duration = Duration::from_secs(300);

fn config() -> Config {
    Config {
        conf: Some(shared().conf()),
        id: Some(ID.to_owned()),
        keyring: Some(shared().keyring(ID)),
        overrides: vec![("rbd_cache".to_owned(), "false".to_owned())],
        ..Config::default()
    }
}

/// Opens an image twice, by clients of their own, as worker and `rbd snap create` are.
fn twice(name: &str) -> (Arc<Image>, Arc<Image>) {
    let pool = Cluster::connect(&config()).unwrap().pool(POOL, None).unwrap();
    pool.create(name, 1 << 20, &NewImage::default()).unwrap();
    let other = Cluster::connect(&config()).unwrap().pool(POOL, None).unwrap();
    (pool.open(name, None, Open::Write).unwrap(), other.open(name, None, Open::Write).unwrap())
}

fn watch(image: &Arc<Image>, standing: Option<i32>) -> (QuiesceWatch, Receiver<Quiesce>) {
    let (sender, receiver) = channel();
    let told = move |what| _ = sender.send(what);
    (image.watch_quiesce(standing, told).unwrap(), receiver)
}

/// Makes a snapshot on a thread of its own; what came of it.
fn snap(image: &Arc<Image>, name: &'static str) -> Receiver<Result<(), librbd::Error>> {
    let (image, (sender, receiver)) = (Arc::clone(image), channel());
    std::thread::spawn(move || sender.send(image.snapshot_create(name)));
    receiver
}

fn errno(result: Result<(), librbd::Error>) -> Option<i32> {
    result.unwrap_err().errno()
}

#[test]
fn a_snapshot_waits_for_the_answer_and_is_told_to_be_over() {
    // Whether the watcher owns the lock, and so makes the snapshot for the other one, or not.
    for (name, owns) in [("quiet-owner", true), ("quiet-other", false)] {
        let (image, other) = twice(name);
        let owner = if owns { &image } else { &other };
        owner.lock_acquire().unwrap();
        let (watch, told) = watch(&image, None);
        let made = snap(&other, "one");
        assert_eq!(told.recv_timeout(PATIENCE), Ok(Quiesce::Begin));
        assert!(image.snapshots().unwrap().is_empty(), "it did not wait");
        assert!(made.try_recv().is_err());
        assert!(watch.complete(Ok(())));
        assert!(!watch.complete(Ok(())), "answered twice");
        made.recv_timeout(PATIENCE).unwrap().unwrap();
        assert_eq!(told.recv_timeout(PATIENCE), Ok(Quiesce::End));

        let made = snap(&other, "two");
        assert_eq!(told.recv_timeout(PATIENCE), Ok(Quiesce::Begin));
        assert!(watch.complete(Err(libc::EBUSY)));
        assert_eq!(errno(made.recv_timeout(PATIENCE).unwrap()), Some(libc::EBUSY));
        assert_eq!(image.snapshots().unwrap().len(), 1);
        drop(watch);
        // Nobody is asked any more.
        snap(&other, "three").recv_timeout(PATIENCE).unwrap().unwrap();
        assert!(told.iter().all(|what| what == Quiesce::End), "asked after its end");
    }
}

#[test]
fn a_standing_answer_is_told_to_nobody() {
    let (image, other) = twice("standing");
    let (watch, told) = watch(&image, Some(0));
    snap(&other, "one").recv_timeout(PATIENCE).unwrap().unwrap();
    watch.stand(Some(libc::EAGAIN));
    let refused = snap(&other, "two").recv_timeout(PATIENCE).unwrap();
    assert_eq!(errno(refused), Some(libc::EAGAIN));
    assert!(!told.try_iter().any(|what| what == Quiesce::Begin));
    watch.stand(None);
    let made = snap(&other, "two");
    wait_for(&told, Quiesce::Begin);
    // One that waits is answered by it, too.
    watch.stand(Some(0));
    made.recv_timeout(PATIENCE).unwrap().unwrap();
    assert!(!watch.complete(Ok(())));
}

#[test]
fn who_goes_leaves_nobody_waiting() {
    let (image, other) = twice("leaving");
    let (watch, told) = watch(&image, None);
    let made = snap(&other, "one");
    wait_for(&told, Quiesce::Begin);
    drop(watch);
    assert_eq!(errno(made.recv_timeout(PATIENCE).unwrap()), Some(libc::ESHUTDOWN));
    // The closure is gone with the watch.
    while told.recv_timeout(PATIENCE).is_ok() {}
    Arc::into_inner(image).unwrap().close().unwrap();
}

/// Nothing is lost, and no callback reads what was freed.
#[test]
fn valgrind_finds_nothing() {
    if std::env::var_os("CLEAT_TEST_VALGRIND").is_some() {
        return;
    }
    let output = std::process::Command::new("valgrind")
        .args(["--leak-check=full", "--errors-for-leak-kinds=definite,indirect"])
        .args(["--error-exitcode=9", "--num-callers=25"])
        .arg(std::env::current_exe().unwrap())
        .args(["--test-threads=1", "a_standing_answer", "who_goes"])
        .env("CLEAT_TEST_VALGRIND", "1")
        .output()
        .expect("valgrind runs (apt install valgrind)");
    let said = String::from_utf8_lossy(&output.stderr);
    let passed = String::from_utf8_lossy(&output.stdout).contains("2 passed");
    assert!(output.status.success() && passed, "{said}");
    assert!(said.contains("definitely lost: 0 bytes"), "{said}");
}

fn wait_for(told: &Receiver<Quiesce>, wanted: Quiesce) {
    while told.recv_timeout(PATIENCE).unwrap() != wanted {}
}
