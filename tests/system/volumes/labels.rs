//! Labels of RBD images, through the library: the command line does not change them.

use std::ops::ControlFlow;

use cleat::backends::store;
use cleat_backend::store::{Labels, Layout, Removal, Source, Store};
use cleat_backend::uri::StoreUri;
use cleat_core::error::ErrorKind;
use test_kit::ceph::{POOL, shared};

use crate::volumes::fixture::{MIB, User, options, run_rbd};

fn on(_: u64, _: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn labels(name: &str) -> Labels {
    Labels::from([("csi.name".to_owned(), name.to_owned())])
}

fn layout(name: &str) -> Layout {
    Layout { labels: labels(name), ..Layout::default() }
}

/// A namespace that only one test uses.
fn place(name: &str) -> (StoreUri, Box<dyn Store>) {
    run_rbd(shared(), &["namespace", "create", &format!("{POOL}/{name}")]);
    let uri = store(&format!("rbd:{POOL}/{name}?{}", options())).expect("the URI is valid");
    let connected = uri.connect().expect("the cluster answers");
    (uri, connected)
}

#[test]
fn labels_tell_an_interrupted_creation_of_an_image_from_another_image() {
    let (_, store) = place("labels");
    assert!(store.create("a", 8 * MIB, &layout("a")).expect("it is new"));
    assert!(!store.create("a", 8 * MIB, &layout("a")).expect("it exists"));
    let other = store.create("a", 8 * MIB, &layout("b")).expect_err("another name");
    assert_eq!(other.kind(), ErrorKind::AlreadyExists);
    assert!(other.message().contains("csi.name"), "{other}");

    // A call that was killed leaves an image without labels.
    assert!(store.create("half", 8 * MIB, &Layout::default()).expect("it is new"));
    assert!(store.create("half", 8 * MIB, &layout("half")).expect("it is labelled"));
    assert_eq!(store.info("half", None).expect("it exists").labels, labels("half"));
    // Another program's image has snapshots or data.
    run_rbd(shared(), &["create", "--size", "8M", &format!("{POOL}/labels/foreign")]);
    run_rbd(shared(), &["snap", "create", &format!("{POOL}/labels/foreign@s")]);
    let foreign = store.create("foreign", 8 * MIB, &layout("foreign")).expect_err("a snapshot");
    assert_eq!(foreign.kind(), ErrorKind::AlreadyExists, "{foreign}");
    assert!(store.info("foreign", None).expect("it exists").labels.is_empty());
}

#[test]
fn labels_of_an_image_change_while_it_is_in_use_and_are_not_inherited() {
    let (uri, store) = place("inherit");
    store.create("parent", 8 * MIB, &layout("parent")).expect("it is new");
    let user = User::of(&uri.volume("parent", None).expect("a name").to_string());
    let changes = [("csi.iops".to_owned(), "7".to_owned())].into();
    let labelled = store.labels().expect("images have labels");
    assert!(labelled.set("parent", &changes).expect("it is changed"));
    assert!(!labelled.set("parent", &changes).expect("it is the same"));
    drop(user);
    let parent = store.info("parent", None).expect("it exists").labels;
    assert_eq!((parent.len(), &*parent["csi.iops"]), (2, "7"));

    let snapshots = store.snapshots().expect("images have snapshots");
    snapshots.create("parent", "s", &mut on).expect("it is new");
    let clones = store.clones().expect("images have clones");
    let source = Source { store: uri.spec(), name: "parent", snapshot: Some("s") };
    // A call that was killed before it stored the labels: librbd has copied those of the parent.
    assert!(clones.create_clone(&source, "clone", &Layout::default(), &mut on).expect("it is new"));
    assert!(store.info("clone", None).expect("it exists").labels.is_empty());
    assert!(clones.create_clone(&source, "clone", &layout("clone"), &mut on).expect("labelled"));
    assert!(!clones.create_clone(&source, "clone", &layout("clone"), &mut on).expect("the same"));
    assert_eq!(store.info("clone", None).expect("it exists").labels, labels("clone"));
    // The snapshot can be removed although it has a clone, and then stays in the image's trash.
    assert!(snapshots.remove("parent", "s").expect("the clone has format 2"));
    let used = store.remove("parent", Removal::Now, &mut on).expect_err("the clone needs it");
    assert_eq!(used.kind(), ErrorKind::InUse);
    store.remove("clone", Removal::Now, &mut on).expect("it is not used");
    store.remove("parent", Removal::Now, &mut on).expect("it is not used any more");
    // Without a manager, the monitors know no free space.
    store.available_bytes().expect("the monitors answer");
}
