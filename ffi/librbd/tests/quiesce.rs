//! Snapshots of a watched image on a real cluster: they wait for an answer, fail if it is an error, and
//! their end is reported. The last test runs the others again under valgrind with CLEAT_TEST_VALGRIND set.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use librbd::{Cluster, Config, Image, NewImage, Open, Quiesce, QuiesceWatch};
use test_kit::ceph::{ID, POOL, shared};

/// librbd aborts a snapshot after 50 s, and reports an end by itself after 10 s. Valgrind is slower.
const TIMEOUT: Duration = Duration::from_secs(300);

fn config() -> Config {
    Config {
        conf: Some(shared().conf()),
        id: Some(ID.to_owned()),
        keyring: Some(shared().keyring(ID)),
        overrides: vec![("rbd_cache".to_owned(), "false".to_owned())],
        ..Config::default()
    }
}

/// Opens an image with two clients, like a worker and `rbd snap create`.
fn twice(name: &str) -> (Arc<Image>, Arc<Image>) {
    let pool = Cluster::connect(&config()).unwrap().pool(POOL, None).unwrap();
    pool.create(name, 1 << 20, &NewImage::default()).unwrap();
    let other = Cluster::connect(&config()).unwrap().pool(POOL, None).unwrap();
    (pool.open(name, None, Open::Write).unwrap(), other.open(name, None, Open::Write).unwrap())
}

fn watch(image: &Arc<Image>, default_answer: Option<i32>) -> (QuiesceWatch, Receiver<Quiesce>) {
    let (sender, receiver) = channel();
    let notify = move |event| _ = sender.send(event);
    (image.watch_quiesce(default_answer, notify).unwrap(), receiver)
}

/// Takes a snapshot on a thread of its own, which sends the result.
fn snap(image: &Arc<Image>, name: &'static str) -> Receiver<Result<(), librbd::Error>> {
    let (image, (sender, receiver)) = (Arc::clone(image), channel());
    std::thread::spawn(move || sender.send(image.snapshot_create(name)));
    receiver
}

fn errno(result: Result<(), librbd::Error>) -> Option<i32> {
    result.unwrap_err().errno()
}

#[test]
fn a_snapshot_waits_for_the_answer_and_its_end_is_reported() {
    // A watcher that holds the lock takes the snapshot for the other client.
    for (name, owns) in [("quiet-owner", true), ("quiet-other", false)] {
        let (image, other) = twice(name);
        let owner = if owns { &image } else { &other };
        owner.lock_acquire().unwrap();
        let (watch, events) = watch(&image, None);
        let made = snap(&other, "one");
        assert_eq!(events.recv_timeout(TIMEOUT), Ok(Quiesce::Begin));
        assert!(image.snapshots().unwrap().is_empty(), "the snapshot did not wait");
        assert!(made.try_recv().is_err());
        assert!(watch.complete(Ok(())));
        assert!(!watch.complete(Ok(())), "answered twice");
        made.recv_timeout(TIMEOUT).unwrap().unwrap();
        assert_eq!(events.recv_timeout(TIMEOUT), Ok(Quiesce::End));

        let made = snap(&other, "two");
        assert_eq!(events.recv_timeout(TIMEOUT), Ok(Quiesce::Begin));
        assert!(watch.complete(Err(libc::EBUSY)));
        assert_eq!(errno(made.recv_timeout(TIMEOUT).unwrap()), Some(libc::EBUSY));
        assert_eq!(image.snapshots().unwrap().len(), 1);
        drop(watch);
        // Without a watch no answer is needed.
        snap(&other, "three").recv_timeout(TIMEOUT).unwrap().unwrap();
        assert!(
            events.iter().all(|event| event == Quiesce::End),
            "a request after the watch's end"
        );
    }
}

#[test]
fn a_default_answer_is_sent_without_a_notification() {
    let (image, other) = twice("standing");
    let (watch, events) = watch(&image, Some(0));
    snap(&other, "one").recv_timeout(TIMEOUT).unwrap().unwrap();
    watch.set_default_answer(Some(libc::EAGAIN));
    let refused = snap(&other, "two").recv_timeout(TIMEOUT).unwrap();
    assert_eq!(errno(refused), Some(libc::EAGAIN));
    assert!(!events.try_iter().any(|event| event == Quiesce::Begin));
    watch.set_default_answer(None);
    let made = snap(&other, "two");
    wait_for(&events, Quiesce::Begin);
    // It also answers a request that waits.
    watch.set_default_answer(Some(0));
    made.recv_timeout(TIMEOUT).unwrap().unwrap();
    assert!(!watch.complete(Ok(())));
}

#[test]
fn a_dropped_watch_answers_a_waiting_request() {
    let (image, other) = twice("leaving");
    let (watch, events) = watch(&image, None);
    let made = snap(&other, "one");
    wait_for(&events, Quiesce::Begin);
    drop(watch);
    assert_eq!(errno(made.recv_timeout(TIMEOUT).unwrap()), Some(libc::ESHUTDOWN));
    // The closure is freed with the watch.
    while events.recv_timeout(TIMEOUT).is_ok() {}
    Arc::into_inner(image).unwrap().close().unwrap();
}

/// No memory is leaked, and no callback reads freed memory.
#[test]
fn valgrind_finds_nothing() {
    if std::env::var_os("CLEAT_TEST_VALGRIND").is_some() {
        return;
    }
    let output = std::process::Command::new("valgrind")
        .args(["--leak-check=full", "--errors-for-leak-kinds=definite,indirect"])
        .args(["--error-exitcode=9", "--num-callers=25"])
        .arg(std::env::current_exe().unwrap())
        .args(["--test-threads=1", "a_default_answer", "a_dropped_watch"])
        .env("CLEAT_TEST_VALGRIND", "1")
        .output()
        .expect("valgrind runs (apt install valgrind)");
    let report = String::from_utf8_lossy(&output.stderr);
    let passed = String::from_utf8_lossy(&output.stdout).contains("2 passed");
    assert!(output.status.success() && passed, "{report}");
    assert!(report.contains("definitely lost: 0 bytes"), "{report}");
}

fn wait_for(events: &Receiver<Quiesce>, wanted: Quiesce) {
    while events.recv_timeout(TIMEOUT).unwrap() != wanted {}
}
