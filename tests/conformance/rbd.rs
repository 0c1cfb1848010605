//! Guarantees of RBD images beyond the common contract, on a real cluster.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use cleat::backends::REGISTRY;
use cleat_backend::claimant::Claimant;
use cleat_backend::{HandoverState, OpenOptions};
use cleat_core::error::{Error, ErrorKind};
use cleat_core::request::{Flags, IoError, Op};
use librbd::{NewImage, Open, RBD_FEATURE_LAYERING};
use test_kit::ceph::{Cluster as TestCluster, ID, POOL, shared};
use test_kit::wait::wait_until;

use crate::checks::pattern;
use crate::client::{Client, Local, LocalClient, Volume, job, write};
use crate::places::{image_uri, pool};

pub const MIB: u64 = 1 << 20;

pub fn fresh(cluster: &TestCluster, image: &str, size: u64) -> String {
    pool(cluster, ID).create(image, size, &NewImage::default()).unwrap();
    image_uri(cluster, image)
}

pub fn local(uri: &str) -> Local {
    Local::open(&REGISTRY.volume(uri).unwrap(), OpenOptions::default())
}

pub fn refused(uri: &str) -> Error {
    refused_to(uri, &OpenOptions::default())
}

pub fn refused_to(uri: &str, options: &OpenOptions) -> Error {
    match REGISTRY.volume(uri).unwrap().open(options) {
        Ok(_) => panic!("{uri} was opened"),
        Err(error) => error,
    }
}

#[test]
fn a_second_writer_is_refused_with_the_address_of_the_first() {
    let uri = fresh(shared(), "claimed", 8 * MIB);
    let first = local(&uri);
    first.client().one(write(0, &pattern(1, 4096)));
    let other = pool(shared(), ID).open("claimed", None, Open::Write).unwrap();
    let [owner] = &other.lock_owners().unwrap()[..] else { panic!("one owner") };
    let error = refused(&uri);
    assert_eq!(error.kind(), ErrorKind::InUse, "{}", error.report());
    assert!(error.message().contains(owner), "{}", error.message());
    // A reader is admitted beside the writer.
    let reader = Local::open(
        &REGISTRY.volume(&uri).unwrap(),
        OpenOptions { read_only: true, ..OpenOptions::default() },
    );
    assert!(reader.client().read(0, 4096) == pattern(1, 4096));
    first.client().one(write(0, &pattern(2, 4096)));
    drop(first);
    assert!(other.lock_owners().unwrap().is_empty(), "closing released the lock");
    drop(local(&uri));
}

#[test]
fn an_exclusive_lock_that_librbd_holds_for_a_write_counts_as_held() {
    let uri = fresh(shared(), "passing", 8 * MIB);
    let other = pool(shared(), ID).open("passing", None, Open::Write).unwrap();
    // librbd acquires the lock with the first write, and would release it on request.
    other.metadata_set("a", "b").unwrap();
    let mut submitter = other.submitter(1, |_| {});
    submitter.start((), librbd::Io::Write { offset: 0 }, Some(vec![1; 512])).unwrap();
    wait_until("the write completes", || other.in_flight() == 0);
    assert!(other.is_lock_owner().unwrap());
    assert_eq!(refused(&uri).kind(), ErrorKind::InUse);
    assert!(other.is_lock_owner().unwrap());
}

#[test]
fn a_blocklisted_client_stays_fenced_and_writes_nothing() {
    let uri = fresh(shared(), "taken", 8 * MIB);
    let volume = local(&uri);
    let mut client = volume.client();
    client.one(write(0, &pattern(1, 4096)));
    let rival = pool(shared(), ID);
    let image = rival.open("taken", None, Open::Write).unwrap();
    let address = image.lock_owners().unwrap().remove(0);
    rival.cluster().blocklist_add(&address, Duration::from_secs(3600)).unwrap();
    image.lock_break(&address).unwrap();
    drop(image);
    let take_over = Claimant { take_over: true, ..Claimant::default() };
    let options = OpenOptions { claimant: take_over, ..OpenOptions::default() };
    let second = Local::open(&REGISTRY.volume(&uri).unwrap(), options);
    second.client().one(write(0, &pattern(2, 4096)));
    let late = (0..32).map(|n| write(n * 4096, &pattern(3, 4096))).collect();
    assert!(client.run(late).iter().all(|done| done.result == Err(IoError::Fenced)));
    for op in [Op::Read, Op::Flush, Op::Trim, Op::WriteZeroes] {
        let range = if op == Op::Flush { 0 } else { 4096 };
        assert_eq!(client.try_one(job(op, 0, range)), Err(IoError::Fenced), "{op:?}");
    }
    // Removing the blocklist entry does not change the state of the image that was open.
    pool(shared(), "admin").cluster().blocklist_remove(&address).unwrap();
    assert_eq!(client.try_one(job(Op::Read, 0, 4096)), Err(IoError::Fenced));
    assert_eq!(volume.client().try_one(write(0, &[9; 512])), Err(IoError::Fenced));
    assert!(volume.resize(16 * MIB).is_err());
    let read = second.client().read(0, 32 * 4096);
    assert!(read[..4096] == pattern(2, 4096) && read[4096..].iter().all(|byte| *byte == 0));
}

/// The background check of the claim detects the fence, because no request of the volume does.
#[test]
fn an_idle_volume_detects_that_it_was_fenced() {
    let uri = fresh(shared(), "idle", 8 * MIB);
    let volume = REGISTRY.volume(&uri).unwrap().open(&OpenOptions::default()).unwrap();
    let background = volume.background().unwrap();
    assert_eq!(background.stop(Instant::now() + Duration::from_secs(60)), []);
    background.restart();
    let rival = pool(shared(), ID);
    let image = rival.open("idle", None, Open::Write).unwrap();
    let address = image.lock_owners().unwrap().remove(0);
    rival.cluster().blocklist_add(&address, Duration::from_secs(3600)).unwrap();
    image.lock_break(&address).unwrap();
    wait_until("the volume is fenced", || volume.is_fenced());
    drop(image);
}

/// Checks that all `written` ranges in `range` are reported as data, and returns the number of bytes
/// that are reported as holes.
fn check_extents(volume: &Local, written: &[(u64, u64)], range: std::ops::Range<u64>) -> u64 {
    let (mut position, mut holes) = (range.start, 0);
    while position < range.end {
        let extents = volume.extents(position, range.end - position, 3).unwrap();
        assert!((1..=3).contains(&extents.len()));
        for extent in extents {
            let end = position + extent.length;
            assert!(extent.length > 0 && end <= range.end, "{extent:?} at {position}");
            let holds = written.iter().any(|&(at, len)| at < end && position < at + len);
            assert!(!extent.hole || !holds, "{extent:?} at {position} of {written:?}");
            holes += if extent.hole { extent.length } else { 0 };
            position = end;
        }
    }
    holes
}

#[test]
fn extents_report_all_data_of_every_kind_of_image() {
    let size = 64 * MIB;
    let stripes = NewImage { stripes: Some((64 << 10, 4)), ..NewImage::default() };
    let plain =
        NewImage { features: Some(librbd::RBD_FEATURE_EXCLUSIVE_LOCK), ..NewImage::default() };
    let written = [(5, 100), (9 * MIB, 4096), (20 * MIB + 77, 5 * MIB), (63 * MIB, 4096)];
    let pool = pool(shared(), ID);
    for (name, new) in [("map", NewImage::default()), ("stripes", stripes), ("no-map", plain)] {
        pool.create(name, size, &new).unwrap();
        let volume = local(&image_uri(shared(), name));
        let check = |written: &[(u64, u64)]| {
            let ranges = [0..size, 1..size - 1, 9 * MIB + 1..9 * MIB + 2, 13 * MIB + 3..40 * MIB];
            ranges.map(|range| check_extents(&volume, written, range))
        };
        assert_eq!(check(&[])[0], size, "{name}");
        written.iter().for_each(|&(at, len)| {
            volume.client().one(write(at, &pattern(1, len)));
        });
        assert!(check(&written)[0] >= 16 * MIB, "{name}");
        volume.client().one(job(Op::Trim, 0, 16 * MIB));
        check(&written[2..]);
    }
    // The clone has its parent's data and its own.
    let parent = pool.open("map", None, Open::Write).unwrap();
    parent.snapshot_create("s").unwrap();
    parent.snapshot_protect("s", true).unwrap();
    pool.clone_image(
        &pool,
        "map",
        "s",
        "clone",
        &NewImage { order: Some(23), ..NewImage::default() },
    )
    .unwrap();
    let clone = local(&image_uri(shared(), "clone"));
    clone.client().one(write(50 * MIB + 1, &pattern(2, 512)));
    let both = [written[2], written[3], (50 * MIB + 1, 512)];
    for range in [0..size, 20 * MIB + 1..size - 5] {
        assert!(check_extents(&clone, &both, range) >= 16 * MIB);
    }
    let snapshot = Local::open(
        &REGISTRY.volume(&image_uri(shared(), "map@s")).unwrap(),
        OpenOptions { read_only: true, ..OpenOptions::default() },
    );
    assert!(check_extents(&snapshot, &written[2..], 0..size) >= 16 * MIB);
}

#[test]
fn extents_do_not_trust_a_map_that_is_marked_invalid() {
    let (size, object) = (32 * MIB, 64 << 10);
    let small = NewImage { order: Some(16), ..NewImage::default() };
    pool(shared(), ID).create("bad-map", size, &small).unwrap();
    let uri = image_uri(shared(), "bad-map");
    // Returns the number of bytes that one call covers.
    let covered = |volume: &Local| -> u64 {
        volume.extents(0, size, 64).unwrap().iter().map(|extent| extent.length).sum()
    };
    let volume = local(&uri);
    volume.client().one(write(8 * MIB, &pattern(1, 4096)));
    assert_eq!(covered(&volume), size, "one call covers the whole image with the object map");
    drop(volume);
    let image = pool(shared(), ID).open("bad-map", None, Open::ReadOnly).unwrap();
    let map = format!("rbd_object_map.{}", image.id().unwrap());
    shared().rados(&["--pool", POOL, "rm", &map]).unwrap();
    // librbd marks the missing map as invalid in the image's flags when the image is opened for writing.
    let volume = local(&uri);
    let flags = pool(shared(), ID).open("bad-map", None, Open::ReadOnly).unwrap().flags().unwrap();
    assert!(flags & librbd::RBD_FLAG_FAST_DIFF_INVALID != 0, "{flags:#x}");
    // Without the map, librbd asks the OSDs about one object after the other, so one call covers only 64.
    assert_eq!(covered(&volume), 64 * object);
    assert!(check_extents(&volume, &[(8 * MIB, 4096)], 0..size) >= size - object);
}

#[test]
fn a_resize_by_another_client_is_noticed() {
    let uri = fresh(shared(), "moving", 8 * MIB);
    let volume = local(&uri);
    let mut client = volume.client();
    client.one(write(8 * MIB - 4096, &pattern(1, 4096)));
    let admin = pool(shared(), ID).open("moving", None, Open::Write).unwrap();
    admin.resize(12 * MIB, false, &mut |_, _| ControlFlow::Continue(())).unwrap();
    wait_until("the volume has its new size", || volume.size() == 12 * MIB);
    assert!(client.read(8 * MIB - 4096, 4096) == pattern(1, 4096));
    assert!(client.read(8 * MIB, 4 * MIB).iter().all(|byte| *byte == 0));
    admin.resize(4 * MIB, true, &mut |_, _| ControlFlow::Continue(())).unwrap();
    wait_until("the volume has its reduced size", || volume.size() == 4 * MIB);
    // Requests beyond the new end fail, and the client works on.
    assert!(client.try_one(job(Op::Read, 6 * MIB, 4096)).is_err());
    assert!(client.try_one(job(Op::Read, 4 * MIB - 512, 4096)).is_err());
    assert_eq!(client.try_one(write(6 * MIB, &[1; 4096])), Err(IoError::Invalid));
    client.one(write(0, &pattern(2, 4096)));
}

#[test]
fn a_snapshot_is_read_only_and_keeps_its_content() {
    let uri = fresh(shared(), "history", 8 * MIB);
    let volume = local(&uri);
    volume.client().one(write(0, &pattern(1, 4096)));
    let admin = pool(shared(), ID).open("history", None, Open::Write).unwrap();
    admin.snapshot_create("then").unwrap();
    volume.client().one(write(0, &pattern(2, 4096)));
    let snapshot = local(&uri.replace("/history", "/history@then"));
    assert!(snapshot.features().read_only);
    assert!(snapshot.client().read(0, 4096) == pattern(1, 4096));
    assert_eq!(snapshot.resize(16 * MIB).unwrap_err().kind(), ErrorKind::PermissionDenied);
    assert!(volume.client().read(0, 4096) == pattern(2, 4096));
    let missing = refused(&uri.replace("/history", "/history@never"));
    assert_eq!(missing.kind(), ErrorKind::NotFound, "{}", missing.report());
}

#[test]
fn a_failed_open_reports_its_cause_and_a_repair() {
    let good = fresh(shared(), "opened", MIB);
    for (uri, kind, repair) in [
        (image_uri(shared(), "missing"), ErrorKind::NotFound, "rbd info"),
        (good.replace(&format!("rbd:{POOL}/"), "rbd:nowhere/"), ErrorKind::NotFound, "osd pool ls"),
        (good.replace(".keyring", ".none"), ErrorKind::NotFound, "keyring=PATH"),
        (good.replace("id=volumes", "id=other"), ErrorKind::PermissionDenied, "keyring=PATH"),
        (good.replace("ceph.conf", "none.conf"), ErrorKind::NotFound, "conf=PATH"),
        (format!("{good}&config.no_such=1"), ErrorKind::InvalidArgument, "ceph config ls"),
    ] {
        let error = refused(&uri);
        assert_eq!(error.kind(), kind, "{uri}: {}", error.report());
        assert!(error.repair().unwrap().contains(repair), "{uri}: {:?}", error.repair());
    }
    let plain = NewImage { features: Some(RBD_FEATURE_LAYERING), ..NewImage::default() };
    pool(shared(), ID).create("lockless", MIB, &plain).unwrap();
    let error = refused(&image_uri(shared(), "lockless"));
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.repair().unwrap().contains("rbd feature enable"), "{:?}", error.repair());
    pool(shared(), ID).create("nothing", 0, &NewImage::default()).unwrap();
    assert!(refused(&image_uri(shared(), "nothing")).message().contains("size of 0 bytes"));
}

#[test]
fn a_planned_successor_gets_the_claim_and_no_other_client_between() {
    let uri = fresh(shared(), "inherited", 8 * MIB);
    let parsed = REGISTRY.volume(&uri).unwrap();
    let options = OpenOptions::default();
    let old = parsed.open(&options).unwrap();
    let new = parsed.open_successor(&options, old.handover().unwrap().prepare().unwrap()).unwrap();
    assert_eq!(
        new.handover().unwrap().take_over(&HandoverState::default()).unwrap_err().kind(),
        ErrorKind::InUse
    );
    // The handover is cancelled, and the old image serves again.
    old.handover().unwrap().release().unwrap();
    old.handover().unwrap().resume().unwrap();
    {
        let client: &mut dyn Client = &mut LocalClient::new(&*old, 64);
        client.one(write(0, &pattern(1, 4096)));
    }
    let state = old.handover().unwrap().release().unwrap();
    assert!(!state.fenced);
    new.handover().unwrap().take_over(&state).unwrap();
    assert_eq!(old.handover().unwrap().resume().unwrap_err().kind(), ErrorKind::InUse);
    drop(old);
    let client: &mut dyn Client = &mut LocalClient::new(&*new, 64);
    assert!(client.read(0, 4096) == pattern(1, 4096));
    client.one(write(0, &pattern(2, 4096)));
    // The successor of a fenced image is fenced, too.
    let third =
        parsed.open_successor(&options, new.handover().unwrap().prepare().unwrap()).unwrap();
    third
        .handover()
        .unwrap()
        .take_over(&HandoverState { fenced: true, ..HandoverState::default() })
        .unwrap();
    let client: &mut dyn Client = &mut LocalClient::new(&*third, 64);
    assert_eq!(client.try_one(write(0, &[9; 512])), Err(IoError::Fenced));
}

/// The OSD stops answering, then the monitor: opening fails in time and reports what does not answer.
#[test]
fn opening_fails_in_time_while_the_cluster_does_not_answer() {
    let cluster = TestCluster::start();
    let uri = fresh(&cluster, "silent", MIB);
    let in_time = |cause: &str| {
        let begun = Instant::now();
        let error = refused(&uri);
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{cause}: {}", error.report());
        assert!(error.repair().unwrap().contains("ceph status"), "{cause}");
        assert!(begun.elapsed() < Duration::from_secs(20), "{cause}: {:?}", begun.elapsed());
    };
    cluster.tell("pause osd");
    in_time("the OSD does not answer");
    cluster.tell("resume osd");
    cluster.tell("stop mon");
    in_time("there is no monitor");
    cluster.tell("start mon");
    // The attempt that timed out releases the image by itself.
    let begun = Instant::now();
    loop {
        match REGISTRY.volume(&uri).unwrap().open(&OpenOptions::default()) {
            Ok(_) => return,
            Err(error) => assert!(begun.elapsed() < Duration::from_secs(60), "{}", error.report()),
        }
    }
}

/// Requests wait while the OSD is stopped and succeed after it has started again; the claim remains.
#[test]
fn requests_survive_an_outage_of_the_osd_and_no_write_is_lost() {
    let cluster = TestCluster::start();
    let uri = fresh(&cluster, "outage", 8 * MIB);
    let volume = local(&uri);
    let mut client = volume.client();
    client.one(write(0, &pattern(1, 4096)));
    for round in 0..3 {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                cluster.tell("stop osd");
                std::thread::sleep(Duration::from_secs(2));
                cluster.tell("start osd");
            });
            let begun = Instant::now();
            let mut turn = 0;
            // Continue until the outage has ended.
            while turn < 20 || begun.elapsed() < Duration::from_secs(4) {
                let data = pattern(100 * round + turn, 4096);
                let flags = Flags { fua: turn % 2 == 0, ..Flags::default() };
                let writes = (0..16).map(|n| write(n * 64 * 1024, &data).with(flags));
                let ends = client.run(writes.collect());
                assert!(ends.iter().all(|done| done.result == Ok(())), "round {round}: {ends:?}");
                assert!(client.read(15 * 64 * 1024, 4096) == data);
                turn += 1;
            }
        });
    }
    assert_eq!(refused(&uri).kind(), ErrorKind::InUse);
}
