//! The record of grants of RBD images and of volumes of objects, on a real cluster and in a directory: a node that is fenced writes nothing, and no client claims
//! with a generation that is sealed or too old.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cleat::backends::REGISTRY;
use cleat_backend::OpenOptions;
use cleat_backend::claimant::{Claimant, ProcessMark, boot_id};
use cleat_core::error::{Error, ErrorKind};
use cleat_core::request::IoError;
use cleat_grants::object::{Generation, Mode};
use cleat_grants::record::{Record, Target};
use cleat_grants::storage::Fencing;
use test_kit::ceph::{ID, shared};
use test_kit::temp::on_disk;

use crate::checks::pattern;
use crate::client::{Local, Volume, write};
use crate::places::{make_objects, s3_store};
use crate::rbd::{MIB, fresh, refused_to};

pub fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// The options of a worker on `node` that has a grant with this generation.
pub fn granted(node: &str, generation: u64) -> OpenOptions {
    let claimant = Claimant {
        node: node.to_owned(),
        boot_id: format!("boot of {node}"),
        mapping_id: format!("mapping on {node}"),
        process: ProcessMark::own(),
        grant: Some(generation),
        ..Claimant::default()
    };
    OpenOptions { claimant, ..OpenOptions::default() }
}

pub fn target(node: &str, generation: u64) -> Target {
    let (node, generation) = (node.to_owned(), Generation(generation));
    Target { node, generation, mode: Mode::ReadWrite }
}

pub fn record_of(uri: &str) -> Arc<dyn Fencing> {
    REGISTRY.volume(uri).unwrap().spec().grant_record().unwrap().unwrap()
}

/// Fails with the error for a claim that the record does not admit.
pub fn check_refused(uri: &str, options: &OpenOptions, why: &str) {
    let error: Error = refused_to(uri, options);
    assert_eq!(error.kind(), ErrorKind::InUse, "{}", error.report());
    assert!(error.message().contains(why), "{}", error.message());
}

/// A volume that does not exist is taken from a lost node without a fence.
#[test]
fn only_an_image_that_does_not_exist_is_reported_as_missing() {
    let uri = fresh(shared(), "record-of", MIB);
    let keyring = shared().keyring(ID).to_string_lossy().into_owned();
    let kind = |uri: String| record_of(&uri).record(deadline()).unwrap_err().kind();
    assert_eq!(kind(uri.replace("record-of", "no-such-image")), ErrorKind::NotFound);
    let (before, after) = uri.split_once("/record-of").unwrap();
    for (uri, what) in [
        (uri.replace(&keyring, "/no/keyring"), "keyring"),
        (format!("rbd:no-such-pool/record-of{after}"), "pool"),
        (format!("{before}/no-such-namespace/record-of{after}"), "namespace"),
    ] {
        assert_eq!(kind(uri), ErrorKind::Unavailable, "{what}");
    }
}

#[test]
fn a_fenced_generation_writes_nothing_and_cannot_claim_again() {
    let uri = fresh(shared(), "granted", 8 * MIB);
    // The client of the tests may not remove entries of the blocklist.
    let admin = uri.replace(&format!("id={ID}"), "id=admin");
    let admin = admin.replace(
        &*shared().keyring(ID).to_string_lossy(),
        &shared().keyring("admin").to_string_lossy(),
    );
    let storage = record_of(&admin);
    assert_eq!(storage.record(deadline()).unwrap(), Record::default());
    let volume = REGISTRY.volume(&uri).unwrap();
    let first = Local::open(&volume, granted("a", 3));
    let mut client = first.client();
    client.one(write(0, &pattern(1, 4096)));
    let record = storage.record(deadline()).unwrap();
    let claim = record.claim_of("a").unwrap();
    assert_eq!((claim.generation, record.generation), (Generation(3), Generation(3)));
    let address = claim.client.clone();
    check_refused(&uri, &granted("b", 4), "is claimed by the node a");

    storage.fence(&target("a", 3), deadline()).unwrap();
    assert_eq!(client.try_one(write(0, &pattern(2, 4096))), Err(IoError::Fenced));
    let record = storage.record(deadline()).unwrap();
    let proof = record.proof_of(&target("a", 3)).unwrap();
    assert!(proof.contains("is sealed") && proof.contains(&address), "{proof}");
    // A new client of the fenced node, which was not cut off.
    check_refused(&uri, &granted("a", 3), "the generation was fenced");
    check_refused(&uri, &granted("a", 2), "the storage is at generation 3 already");
    check_refused(&uri, &granted("b", 0), "without a grant");

    let second = Local::open(&volume, granted("b", 4));
    second.client().one(write(4096, &pattern(3, 4096)));
    // A controller with an old view.
    storage.fence(&target("a", 3), deadline()).unwrap();
    storage.fence(&target("b", 3), deadline()).unwrap();
    second.client().one(write(8192, &pattern(4, 4096)));
    // The node has cleaned up. The lock and the claim of the new holder stay.
    drop((client, first));
    storage.unfence(&address, deadline()).unwrap();
    storage.unfence(&address, deadline()).unwrap();
    let record = storage.record(deadline()).unwrap();
    assert_eq!(record.seal_of(Generation(3)).unwrap().client, None);
    let listed = shared().ceph(&["osd", "blocklist", "ls"]);
    assert!(listed.contains(&address), "what it has sent may still arrive: {listed}");
    let read = second.client().read(0, 12288);
    assert!(read[..4096] == pattern(1, 4096) && read[8192..] == pattern(4, 4096));
    drop(second);
    assert!(storage.record(deadline()).unwrap().claims.is_empty(), "closing released the claim");
}

#[test]
fn a_node_that_has_not_claimed_is_fenced_by_the_seal() {
    let uri = fresh(shared(), "granted-unclaimed", 8 * MIB);
    let storage = record_of(&uri);
    storage.fence(&target("a", 1), deadline()).unwrap();
    check_refused(&uri, &granted("a", 1), "the generation was fenced");
    let shared = Target { mode: Mode::SharedReadWrite, ..target("c", 2) };
    storage.fence(&shared, deadline()).unwrap();
    check_refused(&format!("{uri}&lock=shared"), &granted("c", 2), "the generation was fenced");
    drop(Local::open(&REGISTRY.volume(&uri).unwrap(), granted("b", 3)));
}

#[test]
fn only_the_claim_of_a_client_that_has_ended_is_released() {
    let uri = fresh(shared(), "granted-released", 8 * MIB);
    let (storage, volume) = (record_of(&uri), REGISTRY.volume(&uri).unwrap());
    let claimed = || storage.record(deadline()).unwrap().claim_of("a").unwrap().client.clone();
    let first = Local::open(&volume, granted("a", 1));
    let address = claimed();
    let error = storage.release("a", &address, deadline()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse, "{}", error.report());
    first.client().one(write(0, &pattern(1, 4096)));
    drop(first);
    storage.release("a", &address, deadline()).unwrap();

    // A client whose process has ended, as far as its record says.
    let mut options = granted("a", 1);
    options.claimant.boot_id = boot_id().unwrap();
    options.claimant.process = ProcessMark::own().map(|own| ProcessMark { pid: u32::MAX, ..own });
    let second = Local::open(&volume, options);
    let mut client = second.client();
    let next = claimed();
    storage.release("a", &address, deadline()).unwrap();
    client.one(write(4096, &pattern(2, 4096)));
    storage.release("a", &next, deadline()).unwrap();
    let record = storage.record(deadline()).unwrap();
    assert_eq!((record.claims.len(), record.generation), (0, Generation(1)));
    assert_eq!(client.try_one(write(0, &pattern(3, 4096))), Err(IoError::Fenced));
    // The same generation may be claimed again.
    drop((client, second));
    drop(Local::open(&volume, granted("a", 1)));
}

/// Both kinds of stores of objects. The directory must live as long as its volume.
fn on_objects(check: impl Fn(&str)) {
    let directory = tempfile::Builder::new().prefix("grants-").tempdir_in(on_disk()).unwrap();
    let prefix = directory.path().file_name().unwrap().to_str().unwrap();
    for store in [format!("dir:{}", directory.path().display()), s3_store(prefix)] {
        check(&make_objects(&store, 8 * MIB));
    }
}

#[test]
fn a_fenced_generation_of_a_volume_of_objects_writes_nothing_and_cannot_claim_again() {
    on_objects(|uri| {
        let (storage, volume) = (record_of(uri), REGISTRY.volume(uri).unwrap());
        assert_eq!(storage.record(deadline()).unwrap(), Record::default());
        let first = Local::open(&volume, granted("a", 3));
        let mut client = first.client();
        client.one(write(0, &pattern(1, 4096)));
        let record = storage.record(deadline()).unwrap();
        let claim = record.claim_of("a").unwrap();
        assert_eq!((claim.generation, record.generation), (Generation(3), Generation(3)));
        check_refused(uri, &granted("b", 4), "is claimed by mapping mapping on a on node a");

        storage.fence(&target("a", 3), deadline()).unwrap();
        assert_eq!(client.try_one(write(0, &pattern(2, 4096))), Err(IoError::Fenced));
        let record = storage.record(deadline()).unwrap();
        assert!(record.proof_of(&target("a", 3)).unwrap().contains("is sealed"), "{record:?}");
        check_refused(uri, &granted("a", 3), "the generation was fenced");
        check_refused(uri, &granted("a", 2), "the storage is at generation 3 already");
        check_refused(uri, &granted("b", 0), "without a grant");

        let second = Local::open(&volume, granted("b", 4));
        second.client().one(write(4096, &pattern(3, 4096)));
        // A controller with an old view.
        storage.fence(&target("a", 3), deadline()).unwrap();
        storage.fence(&target("b", 3), deadline()).unwrap();
        second.client().one(write(8192, &pattern(4, 4096)));
        drop((client, first));
        let read = second.client().read(0, 12288);
        assert!(read[..4096] == pattern(1, 4096) && read[8192..] == pattern(4, 4096));
        drop(second);
        assert!(
            storage.record(deadline()).unwrap().claims.is_empty(),
            "closing released the claim"
        );
        // A node that has not claimed.
        storage.fence(&target("c", 5), deadline()).unwrap();
        check_refused(uri, &granted("c", 5), "the generation was fenced");
        let other = Target { mode: Mode::ReadOnly, ..target("a", 6) };
        assert_eq!(storage.fence(&other, deadline()).unwrap_err().kind(), ErrorKind::Unsupported);
        drop(Local::open(&volume, granted("b", 6)));
        assert_eq!(record_of_missing(uri), ErrorKind::NotFound);
    });
}

fn record_of_missing(uri: &str) -> ErrorKind {
    let (path, options) = uri.split_once('?').unwrap_or((uri, ""));
    let missing = format!("{path}-missing{}{options}", if options.is_empty() { "" } else { "?" });
    record_of(&missing).record(deadline()).unwrap_err().kind()
}

#[test]
fn only_the_claim_of_a_client_of_objects_that_has_ended_is_released() {
    on_objects(|uri| {
        let (storage, volume) = (record_of(uri), REGISTRY.volume(uri).unwrap());
        let claimed = || storage.record(deadline()).unwrap().claim_of("a").unwrap().client.clone();
        // Of this boot, so that its process counts.
        let mut options = granted("a", 1);
        options.claimant.boot_id = boot_id().unwrap();
        let first = Local::open(&volume, options.clone());
        let address = claimed();
        let error = storage.release("a", &address, deadline()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InUse, "{}", error.report());
        first.client().one(write(0, &pattern(1, 4096)));
        drop(first);
        storage.release("a", &address, deadline()).unwrap();

        // A client whose process has ended, as far as its record says.
        options.claimant.process =
            ProcessMark::own().map(|own| ProcessMark { pid: u32::MAX, ..own });
        let second = Local::open(&volume, options);
        let mut client = second.client();
        let next = claimed();
        storage.release("a", &address, deadline()).unwrap();
        assert_eq!(claimed(), next, "the claim of a later client stays");
        storage.release("a", &next, deadline()).unwrap();
        assert_eq!(client.try_one(write(0, &pattern(2, 4096))), Err(IoError::Fenced));
        assert!(storage.record(deadline()).unwrap().claims.is_empty());
        // The generation is not sealed.
        drop((client, second));
        drop(Local::open(&volume, granted("a", 1)));
    });
}
