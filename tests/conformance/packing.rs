//! Volumes of objects whose data is not stored as it is.

use cleat::backends::REGISTRY;
use cleat_backend::OpenOptions;
use cleat_backend::store::{Layout, Removal, Source};
use cleat_core::error::ErrorKind;
use tempfile::TempDir;
use test_kit::temp::on_disk;

use crate::client::{Local, Volume, job, write};
use crate::places::{clone_objects, keyed_store, make_objects_with};

const MIB: u64 = 1 << 20;

fn directory() -> (TempDir, String) {
    let directory = tempfile::tempdir_in(on_disk()).unwrap();
    let store = format!("dir:{}", directory.path().display());
    (directory, store)
}

fn compressed(name: &str) -> Layout {
    Layout { compression: Some(name.to_owned()), ..Layout::default() }
}

fn open(uri: &str) -> Local {
    Local::open(&REGISTRY.volume(uri).unwrap(), OpenOptions::default())
}

/// The bytes of all files below a directory.
fn bytes_below(path: &std::path::Path) -> Vec<u8> {
    let entries = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
    let content = |path: std::path::PathBuf| match path.is_dir() {
        true => bytes_below(&path),
        false => std::fs::read(path).unwrap(),
    };
    entries.flat_map(content).collect()
}

#[test]
fn a_volume_has_the_compression_with_which_it_was_created() {
    let (directory, uri) = directory();
    let spec = REGISTRY.store(&uri).unwrap();
    let store = spec.connect().unwrap();
    let error = store.create("v", 8 * MIB, &compressed("zip")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{}", error.report());
    assert!(error.repair().unwrap().contains("lz4"), "{error}");
    let volume = make_objects_with(&uri, 8 * MIB, &compressed("lz4"));
    assert!(!store.create("v", 8 * MIB, &compressed("lz4")).unwrap());
    assert!(!store.create("v", 8 * MIB, &Layout::default()).unwrap());
    let error = store.create("v", 8 * MIB, &compressed("none")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{}", error.report());
    let shown = |name: &str| store.info(name, None).unwrap().compression;
    assert_eq!(shown("v").as_deref(), Some("lz4"));
    let data = b"a text that repeats ".repeat(1 << 15);
    let opened = open(&volume);
    opened.client().one(write(0, &data[..512 << 10]));
    opened.client().one(job(cleat_core::request::Op::Flush, 0, 0));
    assert!(opened.client().read(0, 512 << 10) == data[..512 << 10]);
    drop(opened);
    let stored = bytes_below(&directory.path().join("v/objects/log")).len();
    assert!(stored < 64 << 10, "{stored} bytes");

    store.snapshots().unwrap().create("v", "s", &mut |_, _| GO_ON).unwrap();
    let source = Source { store: spec.spec(), name: "v", snapshot: Some("s") };
    for (name, layout, compression) in
        [("same", Layout::default(), Some("lz4")), ("other", compressed("none"), None)]
    {
        let clones = store.clones().unwrap();
        assert!(clones.create_clone(&source, name, &layout, &mut |_, _| GO_ON).unwrap());
        assert!(!clones.create_clone(&source, name, &layout, &mut |_, _| GO_ON).unwrap());
        assert_eq!(shown(name).as_deref(), compression);
        let clone = open(&spec.volume(name, None).unwrap().to_string());
        clone.client().one(write(4096, &[7; 4096]));
        let found = clone.client().read(0, 512 << 10);
        assert!(found[..4096] == data[..4096] && found[8192..] == data[8192..512 << 10]);
        assert!(found[4096..8192] == [7; 4096]);
    }
}

#[test]
fn an_encrypted_volume_is_used_with_its_key_file_only() {
    let (directory, plain) = directory();
    let [keyed, other] = ["key", "other"].map(|file| keyed_store(directory.path(), file));
    let uri = make_objects_with(&keyed, 8 * MIB, &compressed("none"));
    let volume = |store: &str, name: &str| {
        REGISTRY.store(store).unwrap().volume(name, None).unwrap().to_string()
    };
    assert_eq!(uri, volume(&keyed, "v"));
    let secret = b"a secret that the store must not read.. ".repeat(1 << 10);
    let opened = open(&uri);
    opened.client().one(write(0, &secret[..32 << 10]));
    drop(opened);
    let refused = |uri: &str| match REGISTRY.volume(uri).unwrap().open(&OpenOptions::default()) {
        Ok(_) => panic!("{uri} was opened"),
        Err(error) => (error.kind(), error.report()),
    };
    let (kind, text) = refused(&volume(&other, "v"));
    assert_eq!(kind, ErrorKind::PermissionDenied, "{text}");
    assert!(text.contains("the key file does not belong to the volume"), "{text}");
    let (kind, text) = refused(&volume(&plain, "v"));
    assert_eq!(kind, ErrorKind::InvalidArgument, "{text}");
    assert!(text.contains("needs its key file"), "{text}");
    std::fs::write(directory.path().join("other"), "short").unwrap();
    let (kind, text) = refused(&volume(&other, "v"));
    assert_eq!(kind, ErrorKind::InvalidArgument, "{text}");
    assert!(text.contains("less than 32 bytes"), "{text}");
    let stored = bytes_below(&directory.path().join("v/objects"));
    assert!(stored.len() > 32 << 10);
    assert!(!stored.windows(16).any(|bytes| bytes == &secret[..16]), "the data is readable");

    // What concerns no data needs no key.
    let without = REGISTRY.store(&plain).unwrap().connect().unwrap();
    let info = without.info("v", None).unwrap();
    assert_eq!(info.encryption.as_deref(), Some("aes-256-gcm"));
    let check = |store: &dyn cleat_backend::store::Store, data| {
        store.checks().unwrap().check("v", None, data, &mut |_, _| GO_ON)
    };
    assert!(check(&*without, false).unwrap().defects.is_empty());
    let error = check(&*without, true).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{}", error.report());
    let error = without.snapshots().unwrap().create("v", "s", &mut |_, _| GO_ON).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{}", error.report());
    without.create("plain", MIB, &Layout::default()).unwrap();
    let (kind, text) = refused(&volume(&keyed, "plain"));
    assert_eq!(kind, ErrorKind::InvalidArgument, "{text}");
    assert!(text.contains("not encrypted"), "{text}");

    // A clone has a key of its own, and the same file.
    let with = REGISTRY.store(&keyed).unwrap();
    let store = with.connect().unwrap();
    assert!(check(&*store, true).unwrap().defects.is_empty());
    assert!(store.snapshots().unwrap().create("v", "s", &mut |_, _| GO_ON).unwrap());
    clone_objects(&keyed, "v@s", "clone");
    let clone = open(&volume(&keyed, "clone"));
    clone.client().one(write(4096, &[7; 4096]));
    let found = clone.client().read(0, 32 << 10);
    assert!(found[..4096] == secret[..4096] && found[4096..8192] == [7; 4096]);
    assert!(found[8192..] == secret[8192..32 << 10]);
    drop(clone);
    let snapshot = with.volume("v", Some("s")).unwrap().to_string();
    assert!(open(&snapshot).client().read(0, 32 << 10) == secret[..32 << 10]);
    assert!(without.remove("clone", Removal::Now, &mut |_, _| GO_ON).unwrap().changed);
}

const GO_ON: std::ops::ControlFlow<()> = std::ops::ControlFlow::Continue(());
