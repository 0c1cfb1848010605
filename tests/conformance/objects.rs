//! Guarantees of volumes of objects beyond the common contract: in a directory, and in buckets of two real stores.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use cleat::backends::REGISTRY;
use cleat_backend::OpenOptions;
use cleat_backend::claimant::{Claimant, ProcessMark};
use cleat_backend::fence::Standing;
use cleat_backend::store::{Checked, Labels, Layout, Page, Source};
use cleat_core::error::{Error, ErrorKind};
use cleat_core::request::{IoError, Op};
use test_kit::ceph::{BUCKET, shared};
use test_kit::temp::on_disk;
use test_kit::wait::wait_until;

use crate::checks::pattern;
use crate::client::{Local, Volume, job, write};
use crate::places::{ALL, clone_objects, make_objects, minio_store, s3_store};

const MIB: u64 = 1 << 20;

/// A store for one test.
struct Store {
    uri: String,
    _directory: tempfile::TempDir,
}

impl Store {
    fn directory() -> Self {
        let directory = tempfile::tempdir_in(on_disk()).unwrap();
        Self { uri: format!("dir:{}", directory.path().display()), _directory: directory }
    }

    /// A part of a bucket; `uri` returns its URI for a name that no other test has.
    fn bucket(uri: impl Fn(&str) -> String) -> Self {
        let directory = tempfile::Builder::new().prefix("objects-").tempdir().unwrap();
        let name = directory.path().file_name().unwrap().to_str().unwrap();
        Self { uri: uri(name), _directory: directory }
    }
}

fn claimant(node: &str, mapping: &str) -> Claimant {
    Claimant {
        node: node.into(),
        boot_id: format!("boot of {node}"),
        mapping_id: mapping.into(),
        process: ProcessMark::own(),
        ..Claimant::default()
    }
}

fn as_client(claimant: Claimant) -> OpenOptions {
    OpenOptions { claimant, ..OpenOptions::default() }
}

fn open(uri: &str, options: OpenOptions) -> Local {
    Local::open(&REGISTRY.volume(uri).unwrap(), options)
}

fn refused(uri: &str, options: &OpenOptions) -> Error {
    match REGISTRY.volume(uri).unwrap().open(options) {
        Ok(_) => panic!("{uri} was opened"),
        Err(error) => error,
    }
}

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

macro_rules! on_each {
    ($($name:ident)*) => { $(
        mod $name {
            #[test]
            fn in_a_directory() {
                super::$name(&super::Store::directory());
            }

            #[test]
            fn in_a_bucket() {
                super::$name(&super::Store::bucket(super::s3_store));
            }

            #[test]
            fn in_minio() {
                super::$name(&super::Store::bucket(super::minio_store));
            }
        }
    )* };
}

on_each! {
    a_second_writer_is_refused_and_a_reader_is_not
    a_writer_that_lost_the_volume_stays_fenced
    a_client_is_fenced_without_opening_the_volume
    a_claim_alone_ends_the_earlier_worker_of_a_mapping
    extents_report_what_was_written
    volumes_are_managed_in_their_store
    snapshots_and_clones_keep_what_they_had
    a_clone_is_complete_before_it_is_served
    a_flattened_clone_outlives_its_parent
    a_check_finds_what_is_lost_or_damaged
}

/// In a directory, the removal is refused; the unit tests of the backend have that.
#[test]
fn a_removal_leaves_another_volume_below_the_prefix() {
    let store = Store::bucket(minio_store);
    make_objects(&store.uri, MIB);
    let below = make_objects(&store.uri.replacen('?', "/v?", 1), MIB);
    let connected = REGISTRY.store(&store.uri).unwrap().connect().unwrap();
    assert!(connected.remove("v", NOW, &mut go_on()).unwrap().changed);
    drop(open(&below, as_client(claimant("one", "a"))));
}

fn a_second_writer_is_refused_and_a_reader_is_not(store: &Store) {
    let uri = make_objects(&store.uri, 8 * MIB);
    let first = open(&uri, as_client(claimant("one", "a")));
    first.client().one(write(0, &pattern(1, 4096)));
    let error = refused(&uri, &as_client(claimant("two", "b")));
    assert_eq!(error.kind(), ErrorKind::InUse, "{}", error.report());
    assert!(error.message().contains("mapping a on node one"), "{error}");
    assert!(error.repair().unwrap().contains("--take-over"), "{error}");
    let reader = open(&uri, OpenOptions { read_only: true, ..OpenOptions::default() });
    assert!(reader.client().read(0, 4096) == pattern(1, 4096));
    first.client().one(write(0, &pattern(2, 4096)));
    assert!(reader.client().read(0, 4096) == pattern(1, 4096), "a reader has one moment");
    drop(first);
    drop(open(&uri, as_client(claimant("two", "b"))));
}

fn a_writer_that_lost_the_volume_stays_fenced(store: &Store) {
    let uri = make_objects(&store.uri, 8 * MIB);
    let volume = open(&uri, as_client(claimant("one", "a")));
    let idle = {
        // Another mapping of the same test is opened only for its background work.
        let other = make_idle(&store.uri);
        let image = REGISTRY.volume(&other).unwrap();
        let image = image.open(&as_client(claimant("one", "i"))).unwrap();
        let background = image.background().unwrap();
        assert_eq!(background.stop(deadline()), []);
        background.restart();
        drop(open(&other, as_client(Claimant { take_over: true, ..claimant("two", "b") })));
        image
    };
    let mut client = volume.client();
    client.one(write(0, &pattern(1, 4096)));
    let forced = Claimant { take_over: true, ..claimant("two", "b") };
    let second = open(&uri, as_client(forced));
    second.client().one(write(0, &pattern(2, 4096)));
    let late = (0..32).map(|n| write(n * 4096, &pattern(3, 4096))).collect();
    assert!(client.run(late).iter().all(|done| done.result == Err(IoError::Fenced)));
    for op in [Op::Read, Op::Flush, Op::Trim, Op::WriteZeroes] {
        let range = if op == Op::Flush { 0 } else { 4096 };
        assert_eq!(client.try_one(job(op, 0, range)), Err(IoError::Fenced), "{op:?}");
    }
    assert_eq!(volume.client().try_one(write(0, &[9; 512])), Err(IoError::Fenced));
    assert!(volume.resize(16 * MIB).is_err());
    let read = second.client().read(0, 32 * 4096);
    assert!(read[..4096] == pattern(2, 4096) && read[4096..].iter().all(|byte| *byte == 0));
    // A mapping with a device does not resume, also not by force. A new one of the same node may claim the volume.
    drop((client, volume, second));
    let resuming = Claimant { resumes: true, take_over: true, ..claimant("one", "a") };
    let resumed = open(&uri, as_client(resuming));
    assert_eq!(resumed.client().try_one(job(Op::Read, 0, 512)), Err(IoError::Fenced));
    drop(open(&uri, as_client(claimant("one", "c"))));
    wait_until("the idle volume is fenced", || idle.is_fenced());
}

/// Creates a second volume in a store.
fn make_idle(store: &str) -> String {
    let store = REGISTRY.store(store).unwrap();
    store.connect().unwrap().create("idle", MIB, &Layout::default()).unwrap();
    store.volume("idle", None).unwrap().to_string()
}

fn a_client_is_fenced_without_opening_the_volume(store: &Store) {
    let uri = make_objects(&store.uri, 8 * MIB);
    let fence = REGISTRY.volume(&uri).unwrap().fence().unwrap();
    assert!(fence.clients(deadline()).unwrap().is_empty());
    assert_eq!(fence.targets(None, deadline()).unwrap_err().kind(), ErrorKind::NotFound);
    let volume = open(&uri, as_client(claimant("one", "a")));
    volume.client().one(write(0, &pattern(1, 4096)));
    let targets = fence.targets(None, deadline()).unwrap();
    let [target] = &targets[..] else { panic!("{targets:?}") };
    assert_eq!(target.client.node.as_deref(), Some("one"));
    assert!(target.consequence.contains("of the node one"), "{}", target.consequence);
    let by = Claimant { take_over: true, ..claimant("admin", "x") };
    let mut other = targets.clone();
    other[0].client.address = "epoch-99".to_owned();
    let error = fence.fence(&other, &by, deadline()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse, "{}", error.report());
    volume.client().one(write(0, &pattern(2, 4096)));
    fence.fence(&targets, &by, deadline()).unwrap();
    assert_eq!(volume.client().try_one(write(0, &pattern(3, 4096))), Err(IoError::Fenced));
    let clients = fence.clients(deadline()).unwrap();
    let [client] = &clients[..] else { panic!("{clients:?}") };
    assert_eq!((&client.address, client.claim), (&target.client.address, Some(Standing::Taken)));
    let error = fence.unfence(&client.address, &by, deadline()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    // The volume is free for any node, and has what was acknowledged.
    let next = open(&uri, as_client(claimant("two", "b")));
    assert!(next.client().read(0, 4096) == pattern(2, 4096));
}

fn a_claim_alone_ends_the_earlier_worker_of_a_mapping(store: &Store) {
    let uri = make_objects(&store.uri, 8 * MIB);
    let earlier = open(&uri, as_client(claimant("one", "a")));
    earlier.client().one(write(0, &pattern(1, 4096)));
    let volume = REGISTRY.volume(&uri).unwrap();
    let claim = |claimant| OpenOptions { claim_only: true, ..as_client(claimant) };
    let other = claim(claimant("two", "b"));
    assert_eq!(refused(&uri, &other).kind(), ErrorKind::InUse);
    earlier.client().one(write(0, &pattern(2, 4096)));
    let resumes = Claimant { resumes: true, ..claimant("one", "a") };
    assert!(volume.open(&claim(resumes)).unwrap().close(), "the claim is released");
    assert_eq!(earlier.client().try_one(write(0, &pattern(3, 4096))), Err(IoError::Fenced));
    if let Some(directory) = uri.strip_prefix("dir:") {
        let log = std::fs::read_dir(std::path::Path::new(directory).join("objects/log")).unwrap();
        assert_eq!(log.count(), 1, "the second epoch has no log: it was not opened");
    }
    let next = open(&uri, as_client(claimant("two", "b")));
    assert!(next.client().read(0, 4096) == pattern(2, 4096));
    // A mapping that has lost the volume has nothing to end.
    let resumes = Claimant { resumes: true, ..claimant("one", "a") };
    drop(volume.open(&claim(resumes)).unwrap());
    next.client().one(write(0, &pattern(4, 4096)));
}

fn extents_report_what_was_written(store: &Store) {
    let volume = open(&make_objects(&store.uri, 64 * MIB), OpenOptions::default());
    let mut client = volume.client();
    client.one(write(3 * MIB - 4096, &pattern(1, 8192)));
    client.one(write(40 * MIB, &pattern(2, 4096)));
    client.one(job(Op::Trim, 3 * MIB, 512));
    let shown = |range: std::ops::Range<u64>, limit: usize| -> Vec<(u64, bool)> {
        let found = volume.extents(range.start, range.end - range.start, limit).unwrap();
        found.iter().map(|extent| (extent.length, extent.hole)).collect()
    };
    let first = [(3 * MIB - 4096, true), (4096, false), (512, true), (3584, false)];
    assert_eq!(shown(0..64 * MIB, 4), first);
    assert_eq!(shown(0..MIB, 10), [(MIB, true)]);
    let rest = [(MIB, true), (4096, false), (MIB - 4096, true)];
    assert_eq!(shown(39 * MIB..41 * MIB, 10), rest);
}

fn volumes_are_managed_in_their_store(store: &Store) {
    let place = REGISTRY.store(&store.uri).unwrap();
    let connected = place.connect().unwrap();
    let plain = Layout::default();
    let labels = |key: &str, value: &str| Labels::from([(key.to_owned(), value.to_owned())]);
    for name in ["b", "a-b", "a"] {
        assert!(connected.create(name, MIB, &plain).unwrap(), "{name}");
        assert!(!connected.create(name, MIB, &plain).unwrap(), "{name}");
    }
    let labelled = |key, value| Layout { labels: labels(key, value), ..Layout::default() };
    let error = connected.create("a", 2 * MIB, &plain).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{}", error.report());
    assert!(connected.create("labels", MIB, &labelled("one", "1")).unwrap());
    assert!(!connected.create("labels", MIB, &labelled("one", "1")).unwrap());
    let error = connected.create("labels", MIB, &labelled("one", "2")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{}", error.report());
    let changed = connected.labels().unwrap();
    assert!(changed.set("labels", &labels("two", "2")).unwrap());
    assert!(!changed.set("labels", &labels("two", "2")).unwrap());
    assert!(changed.set("labels", &labels("one", "")).unwrap());
    assert_eq!(connected.info("labels", None).unwrap().labels, labels("two", "2"));
    assert!(connected.remove("labels", NOW, &mut go_on()).unwrap().changed);
    assert!(connected.create("labels", MIB, &plain).unwrap());
    assert_eq!(connected.info("labels", None).unwrap().labels, Labels::new());
    assert!(connected.remove("labels", NOW, &mut go_on()).unwrap().changed);
    let page =
        |after: Option<&str>| Page { after: after.map(str::to_owned), limit: 2, details: true };
    let first = connected.list(&page(None)).unwrap();
    let names: Vec<_> = first.volumes.iter().map(|entry| &*entry.name).collect();
    assert_eq!((names, first.next.as_deref()), (vec!["a", "a-b"], Some("a-b")));
    assert_eq!((first.volumes[0].size_bytes, first.volumes[0].watchers), (Some(MIB), Some(0)));
    let second = connected.list(&page(Some("a-b"))).unwrap();
    assert_eq!((&*second.volumes[0].name, second.next), ("b", None));

    assert!(connected.resize("a", 3 * MIB, false, &mut go_on()).unwrap());
    assert!(!connected.resize("a", 3 * MIB, false, &mut go_on()).unwrap());
    let error = connected.resize("a", MIB, false, &mut go_on()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{}", error.report());
    let uri = place.volume("a", None).unwrap().to_string();
    let volume = open(&uri, as_client(claimant("one", "a")));
    volume.client().one(write(3 * MIB - 4096, &pattern(1, 4096)));
    let info = connected.info("a", None).unwrap();
    assert_eq!((info.size_bytes, info.used_bytes), (3 * MIB, Some(4096)));
    assert_eq!((info.watchers.len(), info.claim.is_some()), (1, true));
    let error = connected.remove("a", NOW, &mut go_on()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse, "{}", error.report());
    assert!(error.message().contains("on node one"), "{error}");
    assert!(connected.resize("a", 4 * MIB, false, &mut go_on()).unwrap(), "its writer was asked");
    assert_eq!(connected.info("a", None).unwrap().size_bytes, 4 * MIB);
    wait_until("the image knows its new size", || volume.size() == 4 * MIB);
    drop(volume);
    assert!(connected.remove("a", NOW, &mut go_on()).unwrap().changed);
    assert!(!connected.remove("a", NOW, &mut go_on()).unwrap().changed);
    assert_eq!(refused(&uri, &OpenOptions::default()).kind(), ErrorKind::NotFound);
    assert_eq!(connected.info("a", None).unwrap_err().kind(), ErrorKind::NotFound);
}

fn snapshots_and_clones_keep_what_they_had(store: &Store) {
    let uri = make_objects(&store.uri, 8 * MIB);
    let spec = REGISTRY.store(&store.uri).unwrap();
    let connected = spec.connect().unwrap();
    let snapshots = connected.snapshots().unwrap();
    let take = |volume: &str, name: &str| snapshots.create(volume, name, &mut go_on()).unwrap();
    let served = open(&uri, as_client(claimant("one", "a")));
    served.client().one(write(0, &pattern(1, 65536)));
    assert!(take("v", "one"), "its writer was asked");
    served.client().one(write(4096, &pattern(2, 4096)));
    assert!(take("v", "two"));
    served.client().one(write(0, &pattern(3, 65536)));

    let uri_of_clone = clone_objects(&store.uri, "v@two", "clone");
    let clone = open(&uri_of_clone, as_client(claimant("two", "c")));
    let content = |volume: &Local| volume.client().read(0, 65536);
    let mut expected = pattern(1, 65536);
    expected[4096..8192].copy_from_slice(&pattern(2, 4096));
    assert!(content(&clone) == expected);
    clone.client().one(write(8192, &pattern(4, 4096)));
    clone.client().one(job(Op::Trim, 0, 4096));
    assert!(take("clone", "three"));
    clone.client().one(write(0, &pattern(5, 65536)));
    let second = clone_objects(&store.uri, "clone@three", "clone of the clone");
    let second = open(&second, as_client(claimant("one", "d")));
    let mut of_clone = expected.clone();
    of_clone[8192..12288].copy_from_slice(&pattern(4, 4096));
    of_clone[..4096].fill(0);
    assert!(content(&second) == of_clone);
    assert!(content(&served) == pattern(3, 65536), "the parent has its own content");
    let at_two = spec.volume("v", Some("two")).unwrap().to_string();
    let at_two = open(&at_two, OpenOptions { read_only: true, ..OpenOptions::default() });
    assert!(content(&at_two) == expected);

    let info = connected.info("clone", None).unwrap();
    assert_eq!(info.parent.unwrap().name, "v@two");
    assert_eq!(info.clones.unwrap().len(), 1);
    assert_eq!(connected.info("v", Some("one")).unwrap().clones.unwrap().len(), 0);
    drop((served, clone, second, at_two));
    let kind = |error: Error| error.kind();
    for (volume, snapshot) in [("v", "two"), ("clone", "three")] {
        assert_eq!(kind(snapshots.remove(volume, snapshot).unwrap_err()), ErrorKind::InUse);
        let removed = connected.remove(volume, NOW, &mut go_on());
        assert_eq!(kind(removed.unwrap_err()), ErrorKind::InUse);
    }
    snapshots.rollback("v", "one", &mut go_on()).unwrap();
    assert!(content(&open(&uri, as_client(claimant("one", "a")))) == pattern(1, 65536));
    let again = open(&uri_of_clone, as_client(claimant("two", "c")));
    assert!(content(&again) == pattern(5, 65536));
    drop(again);
    assert!(connected.remove("clone of the clone", NOW, &mut go_on()).unwrap().changed);
    assert!(snapshots.remove("clone", "three").unwrap());
    assert!(connected.remove("clone", NOW, &mut go_on()).unwrap().changed);
    assert!(snapshots.remove("v", "two").unwrap());
}

fn a_flattened_clone_outlives_its_parent(store: &Store) {
    let uri = make_objects(&store.uri, 8 * MIB);
    let connected = REGISTRY.store(&store.uri).unwrap().connect().unwrap();
    let (snapshots, clones) = (connected.snapshots().unwrap(), connected.clones().unwrap());
    let parent = open(&uri, as_client(claimant("one", "a")));
    parent.client().one(write(0, &pattern(1, 65536)));
    parent.client().one(write(5 * MIB, &pattern(2, 65536)));
    assert!(snapshots.create("v", "s", &mut go_on()).unwrap());
    drop(parent);
    let uris = ["served", "idle"].map(|name| clone_objects(&store.uri, "v@s", name));
    let served = open(&uris[0], as_client(claimant("two", "c")));
    served.client().one(write(4096, &pattern(3, 4096)));

    // Each is refused and interrupted first, and then completed.
    let mut stop = |_, _| ControlFlow::Break(());
    for name in ["served", "idle"] {
        assert!(snapshots.create(name, "early", &mut go_on()).unwrap());
        let refused = clones.flatten(name, &mut go_on()).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InUse, "{}", refused.report());
        assert!(refused.report().contains("early"), "{}", refused.report());
        assert!(snapshots.remove(name, "early").unwrap());
        let stopped = clones.flatten(name, &mut stop).unwrap_err();
        assert_eq!(stopped.kind(), ErrorKind::Aborted, "{}", stopped.report());
        assert!(stopped.message().ends_with("it is still a clone"), "{stopped}");
        assert!(connected.info(name, None).unwrap().parent.is_some());
    }
    assert_eq!(snapshots.remove("v", "s").unwrap_err().kind(), ErrorKind::InUse);
    for name in ["served", "idle"] {
        let mut last = (0, 0);
        let mut note = |done, total| {
            last = (done, total);
            ControlFlow::Continue(())
        };
        assert!(clones.flatten(name, &mut note).unwrap());
        // The worker of the other one may have copied everything before it was stopped.
        assert!(last.1 == 8 * MIB || name == "served", "{last:?}");
        assert!(!clones.flatten(name, &mut go_on()).unwrap());
        assert!(connected.info(name, None).unwrap().parent.is_none());
    }
    assert!(snapshots.remove("v", "s").unwrap());
    assert!(connected.remove("v", NOW, &mut go_on()).unwrap().changed);

    let mut expected = pattern(1, 65536);
    let idle = open(&uris[1], as_client(claimant("two", "d")));
    assert!(idle.client().read(0, 65536) == expected);
    expected[4096..8192].copy_from_slice(&pattern(3, 4096));
    assert!(served.client().read(0, 65536) == expected);
    drop(served);
    let again = open(&uris[0], as_client(claimant("one", "c")));
    assert!(again.client().read(0, 65536) == expected);
    for volume in [&idle, &again] {
        assert!(volume.client().read(5 * MIB, 65536) == pattern(2, 65536));
        assert!(volume.client().read(MIB, 4096) == vec![0; 4096]);
    }
    drop((idle, again));
    assert!(connected.remove("idle", NOW, &mut go_on()).unwrap().changed);
}

fn a_clone_is_complete_before_it_is_served(store: &Store) {
    make_objects(&store.uri, MIB);
    let spec = REGISTRY.store(&store.uri).unwrap();
    let connected = spec.connect().unwrap();
    let (snapshots, clones) = (connected.snapshots().unwrap(), connected.clones().unwrap());
    snapshots.create("v", "s", &mut go_on()).unwrap();
    let make = |snapshot: Option<&str>, layout: &Layout| {
        let source = Source { store: spec.spec(), name: "v", snapshot };
        clones.create_clone(&source, "clone", layout, &mut go_on()).map_err(|error| error.kind())
    };
    let plain = Layout::default();
    assert_eq!(make(None, &plain), Err(ErrorKind::InvalidArgument));
    assert_eq!(make(Some("other"), &plain), Err(ErrorKind::NotFound));
    let striped = Layout { object_size: Some(4 * MIB), ..Layout::default() };
    assert_eq!(make(Some("s"), &striped), Err(ErrorKind::Unsupported));
    assert_eq!(make(Some("s"), &plain), Ok(true));
    assert_eq!(make(Some("s"), &plain), Ok(false));
    let elsewhere = REGISTRY.store(&format!("{}-2", store.uri.split('?').next().unwrap()));
    if let Ok(elsewhere) = elsewhere {
        let source = Source { store: elsewhere.spec(), name: "v", snapshot: Some("s") };
        let error = clones.create_clone(&source, "clone", &plain, &mut go_on()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{}", error.report());
    }
    snapshots.create("v", "later", &mut go_on()).unwrap();
    assert_eq!(make(Some("later"), &plain), Err(ErrorKind::AlreadyExists));
    // As if its creation had been interrupted.
    if let Some(directory) = store.uri.strip_prefix("dir:") {
        std::fs::remove_dir_all(format!("{directory}/v/objects/pin")).unwrap();
        let uri = spec.volume("clone", None).unwrap().to_string();
        let error = refused(&uri, &OpenOptions::default());
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{}", error.report());
        assert_eq!(make(Some("s"), &plain), Ok(true));
        drop(open(&uri, OpenOptions::default()));
        assert!(connected.remove("clone", NOW, &mut go_on()).unwrap().changed);
        assert!(snapshots.remove("v", "s").unwrap());
    }
}

fn a_check_finds_what_is_lost_or_damaged(store: &Store) {
    let uri = make_objects(&store.uri, 8 * MIB);
    let connected = REGISTRY.store(&store.uri).unwrap().connect().unwrap();
    let checks = connected.checks().unwrap();
    let check = |snapshot, data| checks.check("v", snapshot, data, &mut go_on()).unwrap();
    let volume = open(&uri, as_client(claimant("one", "a")));
    volume.client().one(write(0, &pattern(1, 65536)));
    volume.client().one(job(Op::Flush, 0, 0));
    connected.snapshots().unwrap().create("v", "s", &mut go_on()).unwrap();
    volume.client().one(write(4096, &pattern(2, 4096)));
    volume.client().one(job(Op::Flush, 0, 0));
    for data in [false, true] {
        let found = check(None, data);
        assert_eq!((found.defects.len(), found.snapshots), (0, 1), "{found:?}");
        assert!(found.objects >= 3, "{found:?}");
    }
    let stopped = &mut |_, _| ControlFlow::Break(());
    let error = checks.check("v", None, false, stopped).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Aborted, "{}", error.report());
    let error = checks.check("v", Some("other"), false, &mut go_on()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{}", error.report());
    drop(volume);
    let Some(directory) = store.uri.strip_prefix("dir:") else { return };
    // The object with the first write is the largest one.
    let log = std::path::Path::new(directory).join("v/objects/log");
    let epochs = std::fs::read_dir(log).unwrap().flat_map(|epoch| {
        std::fs::read_dir(epoch.unwrap().path()).unwrap().map(|entry| entry.unwrap().path())
    });
    let object = epochs.max_by_key(|path| path.metadata().unwrap().len()).unwrap();
    let whole = std::fs::read(&object).unwrap();
    let ranges = |found: &Checked| -> Vec<(bool, u64, u64)> {
        let ranges = found.defects.iter().map(|defect| {
            let range = defect.range.unwrap();
            assert!(defect.problem.contains("log/"), "{defect:?}");
            (defect.snapshot.is_some(), range.offset, range.length)
        });
        ranges.collect()
    };
    let lost = [(true, 0, 65536), (false, 0, 4096), (false, 8192, 65536 - 8192)];

    let mut flipped = whole.clone();
    *flipped.last_mut().unwrap() ^= 1;
    std::fs::write(&object, &flipped).unwrap();
    assert!(check(None, false).defects.is_empty());
    assert_eq!(ranges(&check(None, true)), lost);
    std::fs::write(&object, &whole[..whole.len() - 1]).unwrap();
    assert_eq!(ranges(&check(None, false)), lost);
    assert_eq!(ranges(&check(Some("s"), false)), lost[..1]);
    std::fs::remove_file(&object).unwrap();
    // No checkpoint covers it, so the history of the volume has a gap.
    let error = checks.check("v", None, false, &mut go_on()).unwrap_err();
    assert!(error.report().contains("log/"), "{}", error.report());
    std::fs::write(&object, &whole).unwrap();
    assert!(check(None, true).defects.is_empty());
}

const NOW: cleat_backend::store::Removal = cleat_backend::store::Removal::Now;

fn go_on() -> impl FnMut(u64, u64) -> ControlFlow<()> {
    |_, _| ControlFlow::Continue(())
}

#[test]
fn a_refused_access_names_its_cause() {
    let (endpoint, credentials) = shared().s3();
    let directory = tempfile::tempdir().unwrap();
    let right = std::fs::read_to_string(&credentials).unwrap();
    let wrong = |name: &str, content: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, content).unwrap();
        path.display().to_string()
    };
    let id = right.lines().find(|line| line.contains("access_key_id")).unwrap();
    let secret = wrong("secret", &format!("[default]\n{id}\naws_secret_access_key = wrong\n"));
    let unknown = wrong("id", &right.replace("AKIA", "AKIB"));
    let (right, port) = (credentials.display().to_string(), free_port());
    for (bucket, endpoint, file, kind, part) in [
        (BUCKET, &*endpoint, &secret, ErrorKind::PermissionDenied, "secret key"),
        (BUCKET, &endpoint, &unknown, ErrorKind::PermissionDenied, "does not know the access key"),
        (
            "missing",
            &endpoint,
            &right,
            ErrorKind::PermissionDenied,
            "bucket missing does not exist",
        ),
        (BUCKET, &endpoint, &right, ErrorKind::NotFound, "does not exist"),
        (BUCKET, &*format!("127.0.0.1:{port}"), &right, ErrorKind::Unavailable, "refused"),
    ] {
        let options = format!("endpoint=http://{endpoint}&credentials_file={file}");
        let error = refused(&format!("s3://{bucket}/no/v?{options}"), &OpenOptions::default());
        assert_eq!(error.kind(), kind, "{}", error.report());
        assert!(error.report().contains(part), "{part}: {}", error.report());
        assert!(error.repair().is_some(), "{}", error.report());
    }
}

/// A port that nothing listens on.
fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

#[test]
fn a_bucket_with_tls_needs_a_certificate_that_is_trusted() {
    let directory = tempfile::Builder::new().prefix("tls-").tempdir().unwrap();
    let prefix = directory.path().file_name().unwrap().to_str().unwrap();
    let (endpoint, credentials, certificate) = shared().s3_with_tls();
    let other = directory.path().join("other.crt");
    std::fs::write(&other, "no certificate").unwrap();
    let store = |port: &str, certificate: &std::path::Path| {
        let options =
            format!("credentials_file={}&ca_file={}", credentials.display(), certificate.display());
        format!("s3://{BUCKET}/{prefix}?endpoint=https://{port}&{options}")
    };
    let uri = make_objects(&store(&endpoint, &certificate), 8 * MIB);
    let volume = open(&uri, OpenOptions::default());
    volume.client().one(write(0, &pattern(1, 4096)));
    assert!(volume.client().read(0, 4096) == pattern(1, 4096));
    drop(volume);

    let refused = |store: &str| {
        let store = REGISTRY.store(store).unwrap();
        let listed = store.connect().and_then(|store| store.list(&ALL).map(|_| ()));
        listed.unwrap_err().report()
    };
    let why = refused(&store(&endpoint, &other));
    assert!(why.contains("no certificate") || why.contains("has none that can be used"), "{why}");
    let system = store(&endpoint, &certificate);
    let (system, _) = system.split_once("&ca_file").unwrap();
    let why = refused(system);
    assert!(why.contains("is not trusted") && why.contains("ca_file="), "{why}");
    let plain = shared().s3().0;
    let why = refused(&store(&plain, &certificate));
    assert!(why.contains(&plain), "{why}");
}
