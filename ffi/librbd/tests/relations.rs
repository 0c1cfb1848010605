//! The relations of an image on a real cluster: parents and clones, locks, namespaces, the data pool; and
//! interrupted operations.
#![allow(clippy::unwrap_used)]

use std::ops::ControlFlow;
use std::sync::Arc;

use librbd::{
    Cluster, Config, Image, Io, NewImage, Open, Pool, RBD_FEATURE_DATA_POOL, SnapshotKind,
};
use test_kit::ceph::{POOL, shared};

const MIB: u64 = 1 << 20;

/// Opens the pool as the administrator, because the search for clones of format 1 reads every pool.
fn pool() -> Arc<Pool> {
    let config = Config {
        conf: Some(shared().conf()),
        keyring: Some(shared().keyring("admin")),
        ..Config::default()
    };
    Cluster::connect(&config).unwrap().pool(POOL, None).unwrap()
}

/// Creates an image with data in each object of 4 MiB.
fn filled(pool: &Arc<Pool>, name: &str, size: u64) -> Arc<Image> {
    pool.create(name, size, &NewImage::default()).unwrap();
    let image = pool.open(name, None, Open::Write).unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    let mut submitter = image.submitter(1, move |completion| sender.send(completion).unwrap());
    for object in 0..size.div_ceil(4 * MIB) {
        submitter.start((), Io::Write { offset: object * 4 * MIB }, Some(vec![7; 4096])).unwrap();
        assert_eq!(receiver.recv().unwrap().result, 0);
    }
    drop(submitter);
    image
}

/// Stops an operation at its third step.
fn at_third() -> impl FnMut(u64, u64) -> ControlFlow<()> + Send {
    let mut steps = 0;
    move |_, _| {
        steps += 1;
        if steps < 3 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    }
}

fn ignore(_done: u64, _total: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn errno<T: std::fmt::Debug>(result: librbd::Result<T>) -> Option<i32> {
    result.unwrap_err().errno()
}

#[test]
fn parents_and_clones_are_listed() {
    let pool = pool();
    let parent = filled(&pool, "family", 16 * MIB);
    assert_eq!((parent.parent().unwrap(), parent.children().unwrap()), (None, vec![]));
    let used = parent.used().unwrap();
    assert_eq!(used, 16 * MIB);
    parent.snapshot_create("s").unwrap();
    let format = |format| NewImage { clone_format: Some(format), ..NewImage::default() };
    assert_eq!(
        errno(pool.clone_image(&pool, "family", "s", "first", &format(1))),
        Some(libc::EINVAL)
    );
    pool.clone_image(&pool, "family", "s", "second", &format(2)).unwrap();
    let clone = pool.open("second", None, Open::ReadOnly).unwrap();
    let found = clone.parent().unwrap().unwrap();
    assert_eq!((&*found.image.pool, &*found.image.namespace), (POOL, ""));
    assert_eq!((&*found.image.name, &*found.snapshot, found.overlap), ("family", "s", 16 * MIB));
    assert_eq!(clone.used().unwrap(), 0);
    let children = parent.children().unwrap();
    assert_eq!((children.len(), &*children[0].name), (1, "second"));
    assert_eq!(children[0].id, clone.id().unwrap());

    // A removed snapshot remains as long as it has a clone.
    parent.snapshot_remove("s").unwrap();
    let kept = parent.snapshots().unwrap();
    assert_eq!((kept.len(), &*kept[0].name, kept[0].kind), (1, "s", SnapshotKind::Trash));
    let age = parent.created_at().unwrap();
    assert!(age > 1_700_000_000 && kept[0].taken_at >= age, "{age} {}", kept[0].taken_at);
    assert_eq!(errno(pool.remove("family", &mut ignore)), Some(libc::EBUSY), "it is open");
    drop(parent);
    assert_eq!(
        errno(pool.remove("family", &mut ignore)),
        Some(libc::ENOTEMPTY),
        "it has a snapshot"
    );
}

#[test]
fn an_interrupted_operation_continues_when_it_is_repeated() {
    let pool = pool();
    let parent = filled(&pool, "half", 64 * MIB);
    parent.snapshot_create("s").unwrap();
    let new = NewImage { clone_format: Some(2), ..NewImage::default() };
    pool.clone_image(&pool, "half", "s", "half-clone", &new).unwrap();
    let clone = pool.open("half-clone", None, Open::Write).unwrap();
    assert_eq!(errno(clone.flatten(&mut at_third())), Some(libc::ECANCELED));
    assert!(clone.parent().unwrap().is_some());
    clone.flatten(&mut ignore).unwrap();
    assert_eq!(clone.parent().unwrap(), None);
    assert_eq!(clone.used().unwrap(), 64 * MIB);
    drop(clone);

    assert_eq!(errno(pool.remove("half-clone", &mut at_third())), Some(libc::ECANCELED));
    assert!(pool.list().unwrap().iter().any(|image| image.name == "half-clone"));
    pool.remove("half-clone", &mut ignore).unwrap();
    assert_eq!(errno(pool.open("half-clone", None, Open::ReadOnly)), Some(libc::ENOENT));

    assert_eq!(errno(parent.snapshot_rollback("s", &mut at_third())), Some(libc::ECANCELED));
    parent.snapshot_rollback("s", &mut ignore).unwrap();
    parent.snapshot_remove("s").unwrap();
    assert_eq!(errno(parent.resize(4 * MIB, true, &mut at_third())), Some(libc::ECANCELED));
    let other = pool.open("half", None, Open::ReadOnly).unwrap();
    assert_eq!(other.size().unwrap(), 64 * MIB, "the old size, with objects missing at the end");
    drop(other);
    parent.resize(4 * MIB, true, &mut ignore).unwrap();
    assert_eq!(parent.size().unwrap(), 4 * MIB);
    parent.resize(64 * MIB, false, &mut ignore).unwrap();
    drop(parent);

    pool.trash("half", 0).unwrap();
    let id = pool.trashed().unwrap().into_iter().find(|entry| entry.name == "half").unwrap().id;
    assert_eq!(errno(pool.trash_remove(&id, false, &mut at_third())), Some(libc::ECANCELED));
    assert!(pool.trashed().unwrap().iter().any(|entry| entry.id == id));
    pool.trash_remove(&id, false, &mut ignore).unwrap();
    assert!(!pool.trashed().unwrap().iter().any(|entry| entry.id == id));
}

#[test]
fn objects_and_data_pools_are_reported() {
    let cluster = shared();
    cluster.make_pool("data");
    let pool = pool();
    let new = NewImage { data_pool: Some("data".to_owned()), ..NewImage::default() };
    pool.create("apart", 9 * MIB, &new).unwrap();
    let image = pool.open("apart", None, Open::Write).unwrap();
    assert_ne!(image.features().unwrap() & RBD_FEATURE_DATA_POOL, 0);
    assert_eq!(image.data_pool().unwrap(), "data");
    let objects = image.objects().unwrap();
    assert_eq!(objects.count, 3);
    assert!(objects.prefix.ends_with(&image.id().unwrap()), "{objects:?}");
    assert_eq!(errno(pool.cluster().pool_name(4711)), Some(libc::ENOENT));
}

#[test]
fn lockers_and_namespaces_are_found() {
    let pool = pool();
    let image = filled(&pool, "locked", MIB);
    image.lock_acquire().unwrap();
    let other = pool.open("locked", None, Open::ReadOnly).unwrap();
    let lockers = other.lockers().unwrap();
    assert_eq!(lockers.len(), 1, "{lockers:?}");
    assert!(lockers[0].cookie.starts_with("auto "), "{lockers:?}");
    let watcher = format!("client.{}", image.watchers().unwrap()[0].client);
    assert_eq!(lockers[0].client, watcher);
    image.lock_release().unwrap();
    assert_eq!(other.lockers().unwrap(), []);

    assert!(!pool.has_namespace("unit").unwrap());
    pool.create_namespace("unit").unwrap();
    assert!(pool.has_namespace("unit").unwrap());
}
