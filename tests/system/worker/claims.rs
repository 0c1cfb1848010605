//! Claims on RBD images, of workers that died, were started on another node, or take over.

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant, SystemTime};

use cleat::backends::volume;
use cleat_backend::claimant::Claimant;
use cleat_backend::fault::DIE_AT;
use cleat_backend::{HandoverState, OpenOptions};
use cleat_core::error::ErrorKind;
use cleat_worker::protocol::{Failure, FromWorker, Start, ToWorker};
use librbd::{NewImage, Open, RBD_FEATURE_LAYERING};
use test_kit::ceph::shared;

use crate::worker::rbd::{fresh, pool};
use test_kit::nbd::kernel as nbd;
use test_kit::wait::wait_until;
use test_kit::worker::{Worker, start_message};

/// The environment of a worker that dies when it has the lock and has not written its claim.
const DYING: [(&str, &str); 1] = [(DIE_AT, "locked, not claimed")];

/// Returns the claim in the image's metadata.
fn claim_of(image: &str) -> serde_json::Value {
    let image = pool().open(image, None, Open::ReadOnly).unwrap();
    let text = image.metadata_get("cleat.claim").unwrap().expect("a claim");
    serde_json::from_str(&text).unwrap()
}

/// Returns the start message of a worker for `mapping` on `node` with the boot id `boot`.
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
fn a_killed_worker_has_a_successor_at_once_and_a_stopped_one_releases_its_claim() {
    let uri = fresh("planned-handover");
    let start = start_as(&uri, "a", "boot", "m");
    let mut worker = started(&start);
    let first = claim_of("planned-handover");
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
        let claim = claim_of("planned-handover");
        assert_eq!(claim["generation"], round, "{claim}");
        assert_ne!(claim["address"], first["address"]);
        assert_eq!(claim["cut"].as_array().unwrap().len(), usize::from(round) - 1);
    }
    // The end of each predecessor was proved.
    let entry_s = blocklisted_for_s(first["address"].as_str().unwrap());
    assert!((60..=3600).contains(&entry_s), "{entry_s}");
    println!("from the detected death to a ready successor: {times:?}");
    stop(worker);
    assert_eq!(claim_of("planned-handover")["released"], true);
    // The released claim does not block another node.
    stop(started(&start_as(&uri, "b", "other", "x")));
    assert_eq!(claim_of("planned-handover")["generation"], 5);
}

#[test]
fn another_node_is_refused_with_the_holder_and_with_take_over_fences_it_for_years() {
    let uri = fresh("taken-over");
    let (first, sockets) = serving(&start_as(&uri, "a", "boot-a", "m"));
    assert_eq!(nbd::write(&sockets[0], 0, &[1; 4096]), 0);
    let claim = claim_of("taken-over");
    let address = claim["address"].as_str().unwrap();
    let stranger = start_as(&uri, "b", "boot-b", "x");
    let failure = refused(&stranger);
    assert_eq!(failure.kind, ErrorKind::InUse, "{failure:?}");
    for part in ["node a", "mapping m", address, "since 20"] {
        assert!(failure.message.contains(part), "{part}: {failure:?}");
    }
    assert!(failure.repair.unwrap().contains("--take-over"));
    // A worker that resumes a device is fenced, too: its device has not seen the writes of the first.
    let (resuming, theirs) = fenced(&Start { resumes: true, take_over: true, ..stranger.clone() });
    assert_ne!(nbd::write(&theirs[0], 0, &[7; 4096]), 0);
    stop(resuming);
    assert_eq!(nbd::write(&sockets[0], 0, &[2; 4096]), 0, "the first worker still writes");

    let (second, taken) = serving(&Start { take_over: true, ..stranger });
    assert_ne!(nbd::write(&sockets[0], 0, &[3; 4096]), 0);
    assert_eq!(first.receive(), FromWorker::Fenced);
    assert!(nbd::read(&taken[0], 0, 4096) == [2; 4096]);
    let listed = shared().ceph(&["osd", "blocklist", "ls"]);
    let until = listed.lines().find(|line| line.starts_with(address)).unwrap_or_else(|| {
        panic!("{address} is not on the blocklist: {listed}");
    });
    let year: u32 = until.split([' ', '-']).nth(1).unwrap().parse().unwrap();
    assert!(year >= this_year() + 4, "{until}");

    // The exit of the fenced worker does not change the claim.
    let before = claim_of("taken-over");
    stop(first);
    assert_eq!(claim_of("taken-over"), before);
    assert_eq!(nbd::write(&taken[0], 0, &[4; 4096]), 0);
    assert_eq!(before["cut"][0]["node"], "a");
    stop(second);
}

/// A node of the same name may be another machine, so a client that watches the image is not replaced.
#[test]
fn a_rebooted_node_takes_over_its_own_claims_when_its_old_client_has_gone() {
    let uri = fresh("rebooted");
    let machine = |start: Start| Start { machine: "one image for all".to_owned(), ..start };
    let (before, sockets) = serving(&machine(start_as(&uri, "a", "boot-1", "m")));
    assert_eq!(refused(&start_as(&uri, "b", "boot-1b", "m")).kind, ErrorKind::InUse);
    let rebooted = machine(start_as(&uri, "a", "boot-2", "n"));
    let old = claim_of("rebooted");
    let failure = refused(&rebooted);
    assert_eq!(failure.kind, ErrorKind::InUse, "{failure:?}");
    assert!(failure.message.contains("claimed by the node a"), "{failure:?}");
    assert_eq!(nbd::write(&sockets[0], 0, &[1; 4096]), 0, "the first machine still writes");
    killed(before);
    drop_watches("rebooted");
    let after = started(&rebooted);
    assert_eq!(claim_of("rebooted")["mapping_id"], "n");
    let entry_s = blocklisted_for_s(old["address"].as_str().unwrap());
    assert!((60..=3600).contains(&entry_s), "{entry_s}");
    stop(after);
}

/// Several mappings may write to a shared image. Only the dead client of the own mapping is fenced.
#[test]
fn a_killed_worker_of_a_shared_image_is_fenced_before_its_successor_serves() {
    let uri = format!("{}&lock=shared", fresh("shared-crash"));
    let client_of = |mapping: &str| -> serde_json::Value {
        let image = pool().open("shared-crash", None, Open::ReadOnly).unwrap();
        let key = format!("cleat.client.{mapping}");
        serde_json::from_str(&image.metadata_get(&key).unwrap().expect("a record")).unwrap()
    };
    let start = start_as(&uri, "a", "boot", "m");
    let (first, sockets) = serving(&start);
    let (other, theirs) = serving(&start_as(&uri, "b", "other", "x"));
    assert_eq!(nbd::write(&sockets[0], 0, &[1; 4096]), 0);
    assert_eq!(nbd::write(&theirs[0], 4096, &[1; 4096]), 0);
    let before = client_of("m");
    killed(first);
    let (second, sockets) = serving(&Start { resumes: true, ..start });
    let entry_s = blocklisted_for_s(before["address"].as_str().unwrap());
    assert!((60..=3600).contains(&entry_s), "{entry_s}");
    assert_ne!(client_of("m")["address"], before["address"]);
    assert_eq!(nbd::write(&sockets[0], 0, &[2; 4096]), 0);
    assert_eq!(nbd::write(&theirs[0], 4096, &[2; 4096]), 0, "another mapping was fenced");
    let listed = shared().ceph(&["osd", "blocklist", "ls"]);
    assert!(!listed.contains(client_of("x")["address"].as_str().unwrap()), "{listed}");
    stop(second);
    assert_eq!(client_of("m")["released"], true);
    stop(other);
}

/// The client of a worker that has handed over has no request in flight, and its successor is not fenced when
/// it closes the image.
#[test]
fn a_handover_of_a_shared_image_fences_no_client_and_the_record_follows() {
    let uri = format!("{}&lock=shared", fresh("shared-handover"));
    let uri = volume(&uri).unwrap();
    let claimant = Claimant {
        node: "a".to_owned(),
        boot_id: "boot".to_owned(),
        mapping_id: "m".to_owned(),
        resumes: true,
        ..Claimant::default()
    };
    let options = OpenOptions { claimant, ..OpenOptions::default() };
    let record = || -> serde_json::Value {
        let image = pool().open("shared-handover", None, Open::ReadOnly).unwrap();
        let text = image.metadata_get("cleat.client.m").unwrap().expect("a record");
        serde_json::from_str(&text).unwrap()
    };
    let old = uri.open(&options).unwrap();
    let first = record();
    let files = old.handover().unwrap().prepare().unwrap();
    let new = uri.open_successor(&options, files).unwrap();
    assert_eq!(record(), first, "the successor has not taken over yet");
    let state = old.handover().unwrap().release().unwrap();
    new.handover().unwrap().take_over(&state).unwrap();
    let second = record();
    assert_ne!(second["address"], first["address"]);
    assert!(old.close());
    assert_eq!(record(), second, "the predecessor has changed the record");
    let listed = shared().ceph(&["osd", "blocklist", "ls"]);
    for client in [&first, &second] {
        assert!(!listed.contains(client["address"].as_str().unwrap()), "{listed}");
    }
    assert!(new.close());
    assert_eq!(record()["released"], true);
}

/// Returns how long the cluster refuses the requests of the client at `address`, in seconds.
fn blocklisted_for_s(address: &str) -> i64 {
    let listed = shared().ceph(&["osd", "blocklist", "ls"]);
    let entry = listed.lines().find_map(|line| line.strip_prefix(&format!("{address} ")));
    let until = entry.unwrap_or_else(|| panic!("{address} is not on the blocklist: {listed}"));
    let date = |text: &str| -> i64 {
        let printed = std::process::Command::new("date").args(["+%s", "--date", text]).output();
        String::from_utf8(printed.unwrap().stdout).unwrap().trim().parse().unwrap()
    };
    date(until) - date("now")
}

/// Has the OSDs drop the watches of the clients of an image, which they do half a minute after their death.
fn drop_watches(image: &str) {
    let image = pool().open(image, None, Open::ReadOnly).unwrap();
    let own = image.pool().cluster().addresses().unwrap();
    let others = || -> Vec<String> {
        let all = image.watchers().unwrap().into_iter().map(|watcher| watcher.address);
        all.filter(|address| *address != own).collect()
    };
    for address in others() {
        image.pool().cluster().blocklist_add(&address, Duration::from_secs(3600)).unwrap();
    }
    wait_until("the watches are gone", || others().is_empty());
}

/// Breaks the lock of a dead client as librbd and krbd do: the client is blocklisted before.
fn break_lock(image: &librbd::Image) {
    let address = image.lock_owners().unwrap().remove(0);
    image.pool().cluster().blocklist_add(&address, Duration::from_secs(3600)).unwrap();
    image.lock_break(&address).unwrap();
}

/// Tools without claims leave no trace but the lock. Each of them may have written to the image while the
/// device had no worker.
#[test]
fn a_device_gets_errors_after_a_client_without_a_claim_may_have_written() {
    let cases: [(_, fn(&librbd::Image)); 4] = [
        ("claim-removed", |image| {
            break_lock(image);
            image.lock_acquire().unwrap();
            image.metadata_remove("cleat.claim").unwrap();
            image.lock_release().unwrap();
        }),
        ("lock-broken", break_lock),
        ("lock-passed", |image| {
            break_lock(image);
            image.lock_acquire().unwrap();
            image.metadata_set("a", "b").unwrap();
            image.lock_release().unwrap();
        }),
        ("lock-taken", |image| {
            break_lock(image);
            image.lock_acquire().unwrap();
        }),
    ];
    for (name, foreign_use) in cases {
        let uri = fresh(name);
        let own = start_as(&uri, "a", "boot", "m");
        let (worker, sockets) = serving(&own);
        assert_eq!(nbd::write(&sockets[0], 0, &[1; 4096]), 0);
        killed(worker);
        let image = pool().open(name, None, Open::Write).unwrap();
        foreign_use(&image);
        let before = image.metadata().unwrap();
        let (successor, sockets) = fenced(&Start { resumes: true, ..own.clone() });
        assert_ne!(nbd::write(&sockets[0], 0, &[3; 4096]), 0, "{name}");
        assert_ne!(nbd::simple(&sockets[0], nbd::READ, 0, 4096), 0, "{name}");
        stop(successor);
        assert_eq!(image.metadata().unwrap(), before, "{name}: the fenced worker changes nothing");
        drop(image);
        // A new mapping of the volume works.
        let (anew, sockets) = serving(&own);
        assert!(nbd::read(&sockets[0], 0, 4096) == [1; 4096], "{name}");
        stop(anew);
    }
}

#[test]
fn a_lock_that_an_administrator_made_is_broken_only_on_take_over() {
    let uri = fresh("locked-by-hand");
    let name = format!("{}/locked-by-hand", test_kit::ceph::POOL);
    shared().rbd(&["lock", "add", &name, "night-backup"]).unwrap();
    let start = start_as(&uri, "a", "boot", "m");
    let failure = refused(&start);
    assert_eq!(failure.kind, ErrorKind::InUse, "{failure:?}");
    assert!(failure.message.contains("\"night-backup\" (rbd lock add)"), "{failure:?}");
    assert!(failure.repair.as_ref().unwrap().contains("--take-over"), "{failure:?}");
    let listed = || String::from_utf8(shared().rbd(&["lock", "ls", &name]).unwrap()).unwrap();
    assert!(listed().contains("night-backup"), "the lock was broken");
    stop(started(&Start { take_over: true, ..start }));
    assert!(!listed().contains("night-backup"), "{}", listed());
}

#[test]
fn the_claim_of_a_dead_process_of_this_boot_is_void() {
    let uri = fresh("forsaken");
    let mut first = started(&start_as(&uri, "a", "boot", "m"));
    let other = start_as(&uri, "a", "boot", "x");
    assert_eq!(refused(&other).kind, ErrorKind::InUse, "the first worker runs");
    first.child.kill().unwrap();
    first.child.wait().unwrap();
    stop(started(&other));
}

/// After its worker died, a device must not use a volume that another client has written to, even if
/// that client has released its claim again.
#[test]
fn a_device_gets_errors_after_another_client_has_written() {
    let uri = fresh("missed");
    let own = start_as(&uri, "a", "boot-a", "m");
    let (mut worker, sockets) = serving(&own);
    assert_eq!(nbd::write(&sockets[0], 0, &[1; 4096]), 0);
    worker.child.kill().unwrap();
    worker.child.wait().unwrap();
    let take_over = Start { take_over: true, ..start_as(&uri, "b", "boot-b", "x") };
    let (other, theirs) = serving(&take_over);
    assert_eq!(nbd::write(&theirs[0], 0, &[2; 4096]), 0);
    stop(other);
    let claim = claim_of("missed");
    assert_eq!(claim["released"], true);
    let (successor, sockets) = fenced(&Start { resumes: true, ..own.clone() });
    assert_ne!(nbd::write(&sockets[0], 0, &[3; 4096]), 0);
    assert_ne!(nbd::simple(&sockets[0], nbd::READ, 0, 4096), 0);
    stop(successor);
    assert_eq!(claim_of("missed"), claim, "the fenced worker does not change the claim");
    // A new mapping of the volume works.
    let (anew, sockets) = serving(&own);
    assert!(nbd::read(&sockets[0], 0, 4096) == [2; 4096]);
    stop(anew);
}

#[test]
fn the_next_worker_completes_an_interrupted_take_over() {
    let uri = fresh("interrupted");
    let own = start_as(&uri, "a", "boot", "m");
    let rival = || pool().open("interrupted", None, Open::Write).unwrap();
    let long = Duration::from_secs(3600);
    // Only the blocklist entry was made.
    killed(started(&own));
    let image = rival();
    let address = image.lock_owners().unwrap().remove(0);
    image.pool().cluster().blocklist_add(&address, long).unwrap();
    drop(image);
    killed(started(&own));
    // The blocklist entry was made, and the lock was broken.
    let image = rival();
    let address = image.lock_owners().unwrap().remove(0);
    image.pool().cluster().blocklist_add(&address, long).unwrap();
    image.lock_break(&address).unwrap();
    drop(image);
    killed(started(&own));
    // The lock was acquired, but no claim was written: an unknown client has the lock.
    let image = rival();
    let address = image.lock_owners().unwrap().remove(0);
    image.pool().cluster().blocklist_add(&address, long).unwrap();
    image.lock_break(&address).unwrap();
    image.lock_acquire().unwrap();
    let failure = refused(&own);
    assert!(failure.message.contains("made no claim"), "{failure:?}");
    let successor = started(&Start { take_over: true, ..own.clone() });
    let claim = claim_of("interrupted");
    assert_eq!(claim["cut"].as_array().unwrap().len(), 4, "{claim}");
    assert!(image.metadata_set("a", "b").is_err(), "the unknown client is fenced");
    stop(successor);
}

/// The dead worker still has a watch and no claim. The successor recognizes it by its announcement.
#[test]
fn a_worker_that_died_between_lock_and_claim_has_a_successor_at_once() {
    let uri = fresh("announced");
    let own = start_as(&uri, "a", "boot", "m");
    let owner = || {
        let image = pool().open("announced", None, Open::ReadOnly).unwrap();
        let address = image.lockers().unwrap().remove(0).address;
        assert!(image.watchers().unwrap().iter().any(|watcher| watcher.address == address));
        address
    };
    let mut times = Vec::new();
    for round in 0..3 {
        let mut dying = Worker::launch_with(&DYING);
        dying.send_start(&own);
        assert!(!dying.exit().success());
        let address = owner();
        let stranger = refused(&start_as(&uri, "b", "boot-b", "x"));
        assert_eq!(stranger.kind, ErrorKind::InUse, "{stranger:?}");
        for part in ["claimed by the node a", "mapping m", &address] {
            assert!(stranger.message.contains(part), "{part}: {stranger:?}");
        }
        let begun = Instant::now();
        let successor = started(&own);
        times.push(begun.elapsed());
        let claim = claim_of("announced");
        assert_eq!(
            (&claim["generation"], &claim["mapping_id"]),
            (&(round + 1).into(), &"m".into())
        );
        assert_eq!(claim["cut"].as_array().unwrap().last().unwrap()["address"], *address);
        let listed = shared().ceph(&["osd", "blocklist", "ls"]);
        assert!(listed.contains(&address), "{address} is not on the blocklist: {listed}");
        stop(successor);
    }
    println!("figures: from a death between lock and claim to a ready successor: {times:?}");
    // Two such deaths in a row, while a claim exists.
    killed(started(&own));
    let mut dying = Worker::launch_with(&DYING);
    dying.send_start(&Start { resumes: true, ..own.clone() });
    assert!(!dying.exit().success());
    stop(started(&Start { resumes: true, ..own.clone() }));
    // An announcement that cannot be parsed is ignored.
    pool()
        .open("announced", None, Open::Write)
        .unwrap()
        .metadata_put("cleat.claim.next", "{")
        .unwrap();
    stop(started(&own));
}

#[test]
fn an_unreadable_claim_is_an_error_and_a_clone_does_not_inherit_claims() {
    let uri = fresh("garbled");
    let worker = started(&start_as(&uri, "a", "boot", "m"));
    let parent = pool().open("garbled", None, Open::Write).unwrap();
    parent.snapshot_create("s").unwrap();
    parent.snapshot_protect("s", true).unwrap();
    pool().clone_image(&pool(), "garbled", "s", "garbled-clone", &NewImage::default()).unwrap();
    let clone = start_as(&uri.replace("/garbled", "/garbled-clone"), "b", "boot-b", "x");
    stop(started(&clone));
    assert_eq!(claim_of("garbled-clone")["generation"], 1);
    stop(worker);
    parent.metadata_set("cleat.claim", "{\"version\": 1, \"generation\": \"many\"}").unwrap();
    drop(parent);
    let failure = refused(&start_as(&uri, "a", "boot", "m"));
    assert!(failure.message.contains("not valid JSON for a claim"), "{failure:?}");
    assert!(failure.repair.unwrap().contains("image-meta remove"));
}

#[test]
fn with_a_shared_lock_two_workers_write_without_a_claim() {
    let uri = fresh("shared");
    let shared = format!("{uri}&lock=shared");
    let (one, a) = serving(&start_as(&shared, "a", "boot-a", "m"));
    let (two, b) = serving(&start_as(&shared, "b", "boot-b", "x"));
    for round in 0..3 {
        assert_eq!(nbd::write(&a[0], 0, &[round; 4096]), 0);
        assert_eq!(nbd::write(&b[0], 4096, &[round + 100; 4096]), 0);
        assert!(nbd::read(&b[0], 0, 4096) == [round; 4096]);
        assert!(nbd::read(&a[0], 4096, 4096) == [round + 100; 4096]);
    }
    let image = pool().open("shared", None, Open::ReadOnly).unwrap();
    assert_eq!(image.metadata_get("cleat.claim").unwrap(), None);
    stop(one);
    stop(two);
    // An image without the exclusive-lock feature is served with a shared lock only.
    let plain = NewImage { features: Some(RBD_FEATURE_LAYERING), ..NewImage::default() };
    pool().create("shared-plain", 8 << 20, &plain).unwrap();
    let uri = uri.replace("/shared", "/shared-plain");
    let failure = refused(&start_as(&uri, "a", "boot", "m"));
    assert_eq!(failure.kind, ErrorKind::Unsupported, "{failure:?}");
    assert!(failure.repair.unwrap().contains("lock=shared"));
    stop(started(&start_as(&format!("{uri}&lock=shared"), "a", "boot", "m")));
}

#[test]
fn an_idle_worker_notices_that_it_was_fenced() {
    let uri = fresh("idle");
    let (worker, sockets) = serving(&start_as(&uri, "a", "boot", "m"));
    let address = claim_of("idle")["address"].as_str().unwrap().to_owned();
    pool().cluster().blocklist_add(&address, Duration::from_secs(3600)).unwrap();
    let begun = Instant::now();
    assert_eq!(worker.receive(), FromWorker::Fenced);
    println!("an idle worker noticed after {:?}", begun.elapsed());
    assert_ne!(nbd::simple(&sockets[0], nbd::FLUSH, 0, 0), 0);
}

#[test]
fn a_planned_handover_transfers_the_claim() {
    let uri = volume(&fresh("handed-over")).unwrap();
    let claimant = |resumes| Claimant {
        node: "a".to_owned(),
        boot_id: "boot".to_owned(),
        mapping_id: "m".to_owned(),
        resumes,
        ..Claimant::default()
    };
    let options = |resumes| OpenOptions { claimant: claimant(resumes), ..OpenOptions::default() };
    let old = uri.open(&options(false)).unwrap();
    let new =
        uri.open_successor(&options(true), old.handover().unwrap().prepare().unwrap()).unwrap();
    let early = new.handover().unwrap().take_over(&HandoverState::default()).unwrap_err();
    assert_eq!(early.kind(), ErrorKind::InUse, "{}", early.report());
    let state = old.handover().unwrap().release().unwrap();
    assert_eq!(claim_of("handed-over")["released"], true);
    new.handover().unwrap().take_over(&state).unwrap();
    let claim = claim_of("handed-over");
    assert_eq!((&claim["generation"], &claim["released"]), (&2.into(), &false.into()), "{claim}");
    assert!(claim["cut"].as_array().unwrap().is_empty(), "no client was fenced: {claim}");
    drop(old);
    assert_eq!(claim_of("handed-over"), claim, "dropping the old image does not change the claim");
    // If another client claims and releases the volume in between, both images are fenced.
    let third =
        uri.open_successor(&options(true), new.handover().unwrap().prepare().unwrap()).unwrap();
    let state = new.handover().unwrap().release().unwrap();
    stop(started(&start_as(&uri.to_string(), "b", "boot-b", "x")));
    assert_eq!(third.handover().unwrap().take_over(&state).unwrap_err().kind(), ErrorKind::Fenced);
    assert_eq!(new.handover().unwrap().resume().unwrap_err().kind(), ErrorKind::Fenced);
    assert!(new.is_fenced() && third.is_fenced());
}

fn serving(start: &Start) -> (Worker, Vec<UnixStream>) {
    let mut worker = started(start);
    let sockets = worker.serve(1);
    (worker, sockets)
}

/// Starts a worker that reports `Fenced` without any request, and lets it serve.
fn fenced(start: &Start) -> (Worker, Vec<UnixStream>) {
    let mut worker = started(start);
    assert_eq!(worker.receive(), FromWorker::Fenced);
    let sockets = worker.serve(1);
    (worker, sockets)
}

fn killed(mut worker: Worker) {
    worker.child.kill().unwrap();
    worker.child.wait().unwrap();
}

fn this_year() -> u32 {
    let now = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    now[..4].parse().unwrap()
}
