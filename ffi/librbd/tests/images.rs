//! Creates, lists, changes, locks and removes images on a real cluster.
#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "a test fails by panicking, and waits in real time"
)]

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use librbd::{Cluster, Config, Image, Io, LockState, NewImage, Open, Pool, RBD_FEATURE_FAST_DIFF};
use test_kit::ceph::{ID, POOL, is_under_valgrind, run_under_valgrind, shared};
use test_kit::wait::wait_until;

const MIB: u64 = 1 << 20;

fn config(id: &str) -> Config {
    let cluster = shared();
    Config {
        conf: Some(cluster.conf()),
        id: Some(id.to_owned()),
        keyring: Some(cluster.keyring(id)),
        defaults: vec![("no_such_option".to_owned(), "1".to_owned())],
        overrides: vec![("rbd_cache".to_owned(), "false".to_owned())],
        monitor_timeout: Duration::from_secs(20),
        quiet: false,
    }
}

fn pool() -> Arc<Pool> {
    Cluster::connect(&config(ID)).unwrap().pool(POOL, None).unwrap()
}

fn fresh(pool: &Arc<Pool>, name: &str, size: u64) -> Arc<Image> {
    pool.create(name, size, &NewImage::default()).unwrap();
    pool.open(name, None, Open::Write).unwrap()
}

/// Runs one operation and waits for its end.
fn run(image: &Arc<Image>, io: Io, buffer: Option<Vec<u8>>) -> (i64, Option<Vec<u8>>) {
    let (sender, receiver) = std::sync::mpsc::channel();
    let mut submitter = image.submitter(1, move |completion| sender.send(completion).unwrap());
    submitter.start((), io, buffer).unwrap();
    let done = receiver.recv_timeout(Duration::from_secs(60)).unwrap();
    (done.result, done.buffer)
}

fn errno<T>(result: Result<T, librbd::Error>) -> i32 {
    match result {
        Ok(_) => panic!("the call succeeded"),
        Err(error) => error.errno().unwrap_or_else(|| panic!("{error}")),
    }
}

fn ignore(_done: u64, _total: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

#[test]
fn images_are_created_described_and_removed() {
    let pool = pool();
    let new = NewImage { order: Some(20), ..NewImage::default() };
    pool.create("made", 10 * MIB + 5, &new).unwrap();
    assert_eq!(errno(pool.create("made", MIB, &new)), libc::EEXIST);
    assert!(pool.list().unwrap().iter().any(|image| image.name == "made"));
    let image = pool.open("made", None, Open::Write).unwrap();
    let stat = image.stat().unwrap();
    assert_eq!((stat.size, stat.object_size), (10 * MIB + 5, MIB));
    assert_eq!((stat.stripe_unit, stat.stripe_count), (MIB, 1));
    assert_ne!(image.features().unwrap() & RBD_FEATURE_FAST_DIFF, 0);
    assert_eq!(image.flags().unwrap(), 0);
    assert!(!image.id().unwrap().is_empty());
    let config = image.config().unwrap();
    assert!(config.contains(&("rbd_cache".to_owned(), "false".to_owned())));
    assert_eq!(errno(pool.remove("made", &mut ignore)), libc::EBUSY);
    Arc::into_inner(image).unwrap().close().unwrap();
    let mut steps = Vec::new();
    pool.remove("made", &mut |done, total| {
        steps.push((done, total));
        ControlFlow::Continue(())
    })
    .unwrap();
    assert!(!steps.is_empty() && steps.iter().all(|(done, total)| done <= total), "{steps:?}");
    assert_eq!(errno(pool.open("made", None, Open::Write)), libc::ENOENT);
}

#[test]
fn a_panic_in_a_closure_continues_in_the_caller() {
    let pool = pool();
    drop(fresh(&pool, "panicking", 64 * MIB));
    let removed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        pool.remove("panicking", &mut |_, _| panic!("as expected"))
    }));
    assert!(removed.is_err());
    assert!(
        !pool.list().unwrap().iter().any(|image| image.name == "panicking"),
        "the removal did not complete"
    );
}

#[test]
fn sizes_change_and_watchers_are_notified() {
    let pool = pool();
    let image = fresh(&pool, "growing", 4 * MIB);
    let notified = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&notified);
    let watch = image.watch(move || _ = counter.fetch_add(1, Ordering::SeqCst)).unwrap();
    let other = pool.open("growing", None, Open::Write).unwrap();
    other.resize(8 * MIB, false, &mut ignore).unwrap();
    wait_until("the size change is reported", || notified.load(Ordering::SeqCst) > 0);
    assert_eq!(image.size().unwrap(), 8 * MIB);
    drop(watch);
    let before = notified.load(Ordering::SeqCst);
    assert_eq!(errno(other.resize(MIB, false, &mut ignore)), libc::EINVAL);
    other.resize(MIB, true, &mut ignore).unwrap();
    wait_until("the new size is read", || image.size().unwrap() == MIB);
    assert_eq!(notified.load(Ordering::SeqCst), before);
    assert_eq!(Arc::strong_count(&notified), 1, "the closure was freed with the watch");
}

#[test]
fn metadata_is_stored_and_listed_in_pages() {
    let pool = pool();
    let image = fresh(&pool, "described", MIB);
    assert_eq!(image.metadata_get("cleat.none").unwrap(), None);
    assert_eq!(image.metadata().unwrap(), []);
    let long = "v".repeat(5000);
    for n in 0..70 {
        image.metadata_set(&format!("cleat.{n:02}"), &format!("{n}{long}")).unwrap();
    }
    assert_eq!(image.metadata_get("cleat.07").unwrap(), Some(format!("7{long}")));
    let all = image.metadata().unwrap();
    assert_eq!(all.len(), 70);
    assert!(all.iter().enumerate().all(|(n, (key, value))| {
        *key == format!("cleat.{n:02}") && *value == format!("{n}{long}")
    }));
    image.metadata_remove("cleat.07").unwrap();
    assert_eq!(image.metadata_get("cleat.07").unwrap(), None);
    assert_eq!(errno(image.metadata_remove("cleat.07")), libc::ENOENT);
    let error = image.metadata_set("a\0b", "c").unwrap_err();
    assert!(error.to_string().contains("zero byte"), "{error}");
    assert!(image.metadata_put("a", "b\0c").unwrap_err().to_string().contains("zero byte"));
}

#[test]
fn metadata_can_be_put_while_another_client_holds_the_lock() {
    let (pool, other) = (pool(), pool());
    let image = fresh(&pool, "put", 8 * MIB);
    image.lock_acquire().unwrap();
    let beside = other.open("put", None, Open::Write).unwrap();
    for value in ["", "short", &"long".repeat(1000)] {
        beside.metadata_put("cleat.put", value).unwrap();
        assert_eq!(image.metadata_get("cleat.put").unwrap().as_deref(), Some(value));
    }
    assert!(image.is_lock_owner().unwrap() && !beside.is_lock_owner().unwrap());
    assert_eq!(image.metadata().unwrap().len(), 1);
}

#[test]
fn a_swap_of_metadata_requires_the_value_and_the_state_of_the_lock() {
    let (pool, other) = (pool(), pool());
    let image = fresh(&pool, "swapped", 8 * MIB);
    let reader = other.open("swapped", None, Open::ReadOnly).unwrap();
    let read = || image.metadata_get("cleat.swap").unwrap();
    let long = "long".repeat(10_000);
    assert!(!reader.metadata_swap("cleat.swap", Some("x"), "1", LockState::Free).unwrap());
    assert!(reader.metadata_swap("cleat.swap", None, "1", LockState::Free).unwrap());
    assert!(!reader.metadata_swap("cleat.swap", None, "2", LockState::Any).unwrap());
    assert!(!reader.metadata_swap("cleat.swap", Some("12"), "2", LockState::Any).unwrap());
    assert_eq!(read().as_deref(), Some("1"));
    assert_eq!(
        errno(image.metadata_swap("cleat.swap", Some("1"), "2", LockState::Own)),
        libc::EBUSY
    );
    for value in [&*long, "3"] {
        image.lock_acquire().unwrap();
        let known = read();
        let swap = |by: &Image, lock| by.metadata_swap("cleat.swap", known.as_deref(), value, lock);
        assert!(!swap(&reader, LockState::Free).unwrap());
        assert_eq!(errno(swap(&reader, LockState::Own)), libc::EBUSY);
        assert_eq!(read(), known);
        assert!(swap(&image, LockState::Own).unwrap());
        assert_eq!(read().as_deref(), Some(value));
        assert!(!swap(&image, LockState::Own).unwrap());
        image.lock_release().unwrap();
        // The attribute with the lock stays when no client holds it.
        assert!(reader.metadata_swap("cleat.swap", Some(value), "2", LockState::Free).unwrap());
        assert!(reader.metadata_swap("cleat.swap", Some("2"), "", LockState::Any).unwrap());
        assert!(reader.metadata_swap("cleat.swap", None, "1", LockState::Any).unwrap());
    }
}

#[test]
fn snapshots_keep_old_data_and_clones_share_it() {
    let pool = pool();
    let image = fresh(&pool, "parent", 8 * MIB);
    assert_eq!(image.snapshots().unwrap(), []);
    let old = vec![1_u8; 4096];
    assert_eq!(run(&image, Io::Write { offset: 0 }, Some(old.clone())).0, 0);
    image.snapshot_create("first").unwrap();
    assert_eq!(errno(image.snapshot_create("first")), libc::EEXIST);
    assert_eq!(run(&image, Io::Write { offset: 0 }, Some(vec![2_u8; 4096])).0, 0);
    for n in 0..20 {
        image.snapshot_create(&format!("more{n}")).unwrap();
    }
    let listed = image.snapshots().unwrap();
    assert_eq!((listed.len(), listed[0].size, &*listed[0].name), (21, 8 * MIB, "first"));

    let snapshot = pool.open("parent", Some("first"), Open::ReadOnly).unwrap();
    let read = run(&snapshot, Io::Read { offset: 0 }, Some(vec![0; 4096]));
    assert_eq!(read, (4096, Some(old.clone())));
    assert_eq!(
        run(&snapshot, Io::Write { offset: 0 }, Some(old.clone())).0,
        -i64::from(libc::EROFS)
    );
    drop(snapshot);

    image.snapshot_protect("first", true).unwrap();
    assert!(image.snapshot_is_protected("first").unwrap());
    assert_eq!(errno(image.snapshot_remove("first")), libc::EBUSY);
    pool.clone_image(&pool, "parent", "first", "child", &NewImage::default()).unwrap();
    let child = pool.open("child", None, Open::Write).unwrap();
    assert_eq!(run(&child, Io::Read { offset: 0 }, Some(vec![0; 4096])).1.unwrap(), old);
    let mut steps = 0;
    child
        .flatten(&mut |_, _| {
            steps += 1;
            ControlFlow::Continue(())
        })
        .unwrap();
    assert!(steps > 0);
    assert_eq!(run(&child, Io::Read { offset: 0 }, Some(vec![0; 4096])).1.unwrap(), old);
    image.snapshot_protect("first", false).unwrap();
    assert_eq!(errno(image.snapshot_protect("first", false)), libc::EINVAL);
    image.snapshot_rollback("first", &mut ignore).unwrap();
    assert_eq!(run(&image, Io::Read { offset: 0 }, Some(vec![0; 4096])).1.unwrap(), old);
    image.snapshot_remove("first").unwrap();
    assert_eq!(errno(image.snapshot_remove("first")), libc::ENOENT);
}

#[test]
fn extents_are_walked() {
    let pool = pool();
    let image = fresh(&pool, "sparse", 64 * MIB);
    for offset in [0, 20 * MIB + 8192, 63 * MIB] {
        assert_eq!(run(&image, Io::Write { offset }, Some(vec![7; 4096])).0, 0);
    }
    let mut found = Vec::new();
    image
        .diff(None, 0, 64 * MIB, true, &mut |offset, length, exists| {
            found.push((offset / MIB, length / MIB, exists));
            true
        })
        .unwrap();
    assert_eq!(found, [(0, 4, true), (20, 4, true), (60, 4, true)]);
    let mut first = None;
    let ended = image.diff(None, 0, 64 * MIB, true, &mut |offset, _, _| {
        first.get_or_insert(offset);
        false
    });
    assert_eq!((errno(ended), first), (libc::ECANCELED, Some(0)));
}

#[test]
fn an_image_is_restored_from_the_trash() {
    let pool = pool();
    drop(fresh(&pool, "regretted", MIB));
    pool.trash("regretted", 3600).unwrap();
    let trashed = pool.trashed().unwrap();
    let entry = trashed.iter().find(|entry| entry.name == "regretted").unwrap();
    assert!(entry.kept_until > 1_700_000_000);
    assert_eq!(errno(pool.trash_remove(&entry.id, false, &mut ignore)), libc::EPERM);
    pool.trash_restore(&entry.id, "back").unwrap();
    drop(pool.open("back", None, Open::Write).unwrap());
    pool.trash("back", 0).unwrap();
    pool.trash_remove(&entry.id, true, &mut ignore).unwrap();
    assert!(!pool.trashed().unwrap().iter().any(|other| other.id == entry.id));
}

#[test]
fn namespaces_are_separate() {
    let admin = Cluster::connect(&config("admin")).unwrap();
    admin.pool(POOL, None).unwrap().create_namespace("tenant").unwrap();
    let tenant = admin.pool(POOL, Some("tenant")).unwrap();
    drop(fresh(&tenant, "apart", MIB));
    assert_eq!(tenant.list().unwrap().len(), 1);
    assert!(!pool().list().unwrap().iter().any(|image| image.name == "apart"));
}

#[test]
fn one_client_holds_the_lock() {
    let (pool_a, pool_b) = (pool(), pool());
    let a = fresh(&pool_a, "contended", MIB);
    let b = pool_b.open("contended", None, Open::Write).unwrap();
    assert_eq!(a.lock_owners().unwrap(), Vec::<String>::new());
    a.lock_acquire().unwrap();
    assert!(a.is_lock_owner().unwrap() && !b.is_lock_owner().unwrap());
    let address = pool_a.cluster().addresses().unwrap();
    assert_eq!(b.lock_owners().unwrap(), std::slice::from_ref(&address));
    assert!(b.watchers().unwrap().iter().any(|watcher| watcher.address == address));
    assert_eq!(errno(b.lock_acquire()), libc::EROFS);
    a.lock_release().unwrap();
    b.lock_acquire().unwrap();
    assert_eq!(errno(a.lock_break(&address)), libc::EBUSY, "not the owner any more");
    drop(b);
    assert_eq!(a.lock_owners().unwrap(), Vec::<String>::new(), "closing released it");
}

#[test]
fn requests_of_a_blocklisted_client_fail() {
    let (pool_a, pool_b) = (pool(), pool());
    let a = fresh(&pool_a, "fought", MIB);
    a.lock_acquire().unwrap();
    assert_eq!(run(&a, Io::Write { offset: 0 }, Some(vec![1; 512])).0, 0);
    let address = pool_a.cluster().addresses().unwrap();
    pool_b.cluster().blocklist_add(&address, Duration::from_secs(3600)).unwrap();
    let b = pool_b.open("fought", None, Open::Write).unwrap();
    b.lock_break(&address).unwrap();
    b.lock_acquire().unwrap();
    assert_eq!(run(&b, Io::Write { offset: 0 }, Some(vec![2; 512])).0, 0);
    let refused = run(&a, Io::Write { offset: 0 }, Some(vec![3; 512])).0;
    assert_eq!(refused, -i64::from(libc::ESHUTDOWN));
    let read = run(&b, Io::Read { offset: 0 }, Some(vec![0; 512]));
    assert_eq!(read, (512, Some(vec![2; 512])));
    assert_eq!(run(&a, Io::Read { offset: 0 }, Some(vec![0; 512])).0, -i64::from(libc::ESHUTDOWN));
    let listed = shared().ceph(&["osd", "blocklist", "ls"]);
    let bare = address.trim_start_matches("v2:");
    assert!(listed.contains(bare), "{listed} {address}");
    drop(a);
    let admin = Cluster::connect(&config("admin")).unwrap();
    admin.blocklist_remove(&address).unwrap();
    assert!(!shared().ceph(&["osd", "blocklist", "ls"]).contains(bare));
    let error = admin.blocklist_add("1.2.3.4\", \"x\": \"", Duration::from_secs(1)).unwrap_err();
    assert!(error.to_string().contains("IP:PORT/NONCE"), "{error}");
}

#[test]
fn errors_have_the_expected_errno() {
    let cluster = Cluster::connect(&config(ID)).unwrap();
    assert_eq!(cluster.fsid().unwrap().len(), 36);
    assert_eq!(cluster.option("rbd_cache").unwrap(), "false");
    assert_eq!(errno(cluster.option("no_such_option")), libc::ENOENT);
    assert_eq!(errno(cluster.pool("no-such-pool", None)), libc::ENOENT);
    assert_eq!(errno(cluster.monitor_command("{\"prefix\": \"no such command\"}")), libc::EINVAL);

    let connect = |change: &dyn Fn(&mut Config)| {
        let mut config = config(ID);
        change(&mut config);
        Cluster::connect(&config)
    };
    assert_eq!(errno(connect(&|c| c.conf = Some("/no/such.conf".into()))), libc::ENOENT);
    assert_eq!(errno(connect(&|c| c.keyring = Some("/no/such.keyring".into()))), libc::ENOENT);
    let unknown = connect(&|c| c.overrides.push(("no_such".into(), "1".into()))).unwrap_err();
    assert!(unknown.to_string().contains("no_such"), "{unknown}");
    let unknown = connect(&|c| c.id = Some("stranger".to_owned()));
    assert!([libc::ENOENT, libc::EACCES].contains(&errno(unknown)));
}

#[test]
fn connecting_to_unreachable_monitors_times_out() {
    let mut nowhere = config(ID);
    nowhere.overrides.push(("mon_host".to_owned(), "v2:127.0.0.1:9/0".to_owned()));
    nowhere.monitor_timeout = Duration::from_secs(2);
    let started = Instant::now();
    assert_eq!(errno(Cluster::connect(&nowhere)), libc::ETIMEDOUT);
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
}

/// Checks the lists of the library that the crate cleans up, and the closures that the library calls.
#[test]
fn valgrind_finds_nothing() {
    if !is_under_valgrind() {
        let tests = [
            "sizes_change",
            "metadata_is",
            "a_swap_of",
            "snapshots_keep",
            "one_client",
            "extents_are",
        ];
        run_under_valgrind(&tests);
    }
}
