//! Volumes of objects whose data is not stored as it is.

use cleat::backends::REGISTRY;
use cleat_backend::OpenOptions;
use cleat_backend::store::{Layout, Source};
use cleat_core::error::ErrorKind;
use tempfile::TempDir;
use test_kit::temp::on_disk;

use crate::client::{Local, Volume, job, write};
use crate::places::make_objects_with;

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

const GO_ON: std::ops::ControlFlow<()> = std::ops::ControlFlow::Continue(());
