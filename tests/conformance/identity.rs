//! The identity of a volume: the same after a reopen and a handover, another one after a replacement.

use std::fs;

use cleat_backend::{OpenOptions, VolumeIdentity};
use cleat_core::error::ErrorKind;

use crate::places::{self, Place};
use test_kit::temp::on_disk;

fn expecting(expected: Option<VolumeIdentity>) -> OpenOptions {
    OpenOptions { expected, ..OpenOptions::default() }
}

pub fn the_identity_is_that_of_the_volume_and_not_of_its_name(place: &Place) {
    let uri = place.uri(places::SIZE);
    let first = uri.open(&expecting(None)).unwrap();
    let identity = first.identity();
    let text = identity.to_string();
    assert!(!text.is_empty() && text.bytes().all(|b| (b' '..=b'~').contains(&b)), "{text:?}");

    let expected = expecting(Some(identity.clone()));
    let files = first.handover().unwrap().prepare().unwrap();
    let successor = uri.open_successor(&expected, files).unwrap();
    assert_eq!(successor.identity(), identity, "after a handover");
    successor.close();
    drop(successor);
    let keeps = first.features().keeps_acknowledged_writes;
    first.close();
    drop(first);

    let refused = |when: &str| {
        let error = uri.open(&expected).err().unwrap_or_else(|| panic!("it was opened {when}"));
        assert_eq!(error.kind(), ErrorKind::Replaced, "{when}: {}", error.report());
        assert!(error.message().contains(&text), "{when}: {error}");
        assert!(error.repair().unwrap().contains("cleat unmap --force"), "{when}");
    };
    if keeps {
        let again = uri.open(&expected).unwrap();
        assert_eq!(again.identity(), identity, "after a reopen");
        again.close();
    } else {
        refused("although its content is lost");
    }
    place.replace(&uri);
    refused("after it was replaced");
    let other = uri.open(&expecting(None)).unwrap();
    assert_ne!(other.identity(), identity, "after it was replaced");
    other.close();
}

#[test]
fn a_volume_that_was_open_before_is_never_created_again() {
    let directory = tempfile::tempdir_in(on_disk()).unwrap();
    let path = directory.path().join("a");
    let uri = format!("file:{}?create=1M", path.display());
    let uri = cleat::backends::REGISTRY.volume(&uri).unwrap();
    let identity = uri.open(&expecting(None)).unwrap().identity();
    fs::remove_file(&path).unwrap();
    let error = uri.open(&expecting(Some(identity.clone()))).err().expect("it is missing");
    assert_eq!(error.kind(), ErrorKind::NotFound, "{}", error.report());
    assert!(!path.exists(), "it was created");
    // An empty file at the path is not given a size, either.
    fs::write(&path, "").unwrap();
    let error = uri.open(&expecting(Some(identity))).err().expect("it is another file");
    assert_eq!(error.kind(), ErrorKind::Replaced, "{}", error.report());
    assert_eq!(fs::metadata(&path).unwrap().len(), 0);
}
