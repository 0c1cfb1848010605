//! Mounts that are refused, bind mounts of devices, and unmounts of what is in use.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;

use cleat_core::error::ErrorKind;

use super::disk::{Disk, MIB, Place, later, run, text};
use super::lifecycle::spec;
use crate::{
    FormatOptions, Kind, MountSpec, bind, bind_device, detach, find, format, mount, mounts, unmount,
};

async fn formatted(kind: Kind) -> Disk {
    let disk = Disk::new(320 * MIB);
    format(&disk.device, kind, &FormatOptions::default(), later()).await.unwrap();
    disk
}

#[tokio::test]
async fn a_mount_that_is_not_as_requested_is_refused() {
    let disk = formatted(Kind::Ext4).await;
    let place = Place::new();
    let target = place.directory("target");
    let good = spec(&disk, &target, Kind::Ext4);
    let cases = [
        (MountSpec { kind: Some(Kind::Xfs), ..good.clone() }, ErrorKind::Internal),
        (MountSpec { options: vec!["nosuch".into()], ..good.clone() }, ErrorKind::Internal),
        (MountSpec { options: vec!["loop".into()], ..good.clone() }, ErrorKind::InvalidArgument),
        (MountSpec { target: "/nonexistent/target".into(), ..good.clone() }, ErrorKind::NotFound),
        (MountSpec { source: "/dev/nonexistent".into(), ..good.clone() }, ErrorKind::NotFound),
        (MountSpec { source: target.clone(), ..good.clone() }, ErrorKind::InvalidArgument),
        (MountSpec { source: "loop0".into(), ..good.clone() }, ErrorKind::InvalidArgument),
    ];
    for (wrong, expected) in cases {
        let error = mount(&wrong, later()).await.unwrap_err();
        assert_eq!(error.kind(), expected, "{wrong:?}: {error:?}");
    }
    // A write-protected device is not mounted read-only unless that is requested.
    run("blockdev", &["--setro", disk.name()]);
    let error = mount(&good, later()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error:?}");
    assert_eq!(find(&target, later()).await.unwrap(), None);
    let read_only = MountSpec { read_only: true, ..good.clone() };
    assert!(mount(&read_only, later()).await.unwrap().is_read_only());
    // No mount covers another one.
    let error = mount(&read_only, later()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists);
    assert!(error.message().contains(disk.name()), "{error}");
    let other = place.directory("other");
    let writable = bind(&target, &other, false, later()).await.unwrap_err();
    assert_eq!(writable.kind(), ErrorKind::InvalidArgument, "{writable:?}");
    assert_eq!(find(&other, later()).await.unwrap(), None);
    assert!(unmount(&target, later()).await.unwrap());
    run("blockdev", &["--setrw", disk.name()]);
    // Without a kind, mount(8) determines it.
    mount(&MountSpec { kind: None, ..good }, later()).await.unwrap();
}

#[tokio::test]
async fn a_clone_of_an_xfs_volume_is_mounted_on_request() {
    let disk = formatted(Kind::Xfs).await;
    let copy = Disk::new(320 * MIB);
    run(
        "dd",
        &[
            &format!("if={}", disk.name()),
            &format!("of={}", copy.name()),
            "bs=1M",
            "conv=sparse,fsync",
        ],
    );
    let place = Place::new();
    let [first, second] = ["first", "second"].map(|name| place.directory(name));
    mount(&spec(&disk, &first, Kind::Xfs), later()).await.unwrap();
    let clone = spec(&copy, &second, Kind::Xfs);
    assert!(mount(&clone, later()).await.is_err());
    mount(&MountSpec { duplicate_uuid: true, ..clone }, later()).await.unwrap();
}

#[tokio::test]
async fn a_read_only_device_that_was_not_unmounted_cleanly_is_mounted_without_its_journal() {
    for kind in Kind::ALL {
        let (disk, copy) = (formatted(kind).await, Disk::new(320 * MIB));
        let place = Place::new();
        let [source, target] = ["source", "target"].map(|name| place.directory(name));
        mount(&spec(&disk, &source, kind), later()).await.unwrap();
        fs::write(source.join("old"), "old").unwrap();
        run("sync", &["--file-system", text(&source)]);
        // Only the journal has this when the device is copied.
        let mut new = File::create(source.join("new")).unwrap();
        new.write_all(b"new").unwrap();
        new.sync_all().unwrap();
        let (from, to) = (format!("if={}", disk.name()), format!("of={}", copy.name()));
        run("dd", &[&from, &to, "bs=1M", "iflag=direct", "conv=sparse,fsync"]);
        drop(new);
        assert!(unmount(&source, later()).await.unwrap());
        drop(disk);
        let before = copy.bytes();
        run("blockdev", &["--setro", copy.name()]);
        let writable = spec(&copy, &target, kind);
        let error = mount(&writable, later()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{kind}: {error:?}");
        let read_only = MountSpec { read_only: true, ..writable.clone() };
        let entry = mount(&read_only, later()).await.unwrap();
        assert!(entry.is_read_only(), "{kind}: {entry:?}");
        assert!(unmount(&target, later()).await.unwrap());
        run("blockdev", &["--setrw", copy.name()]);
        assert!(copy.bytes() == before, "{kind}: the device was changed");
        // On a writable device, the kernel replays the journal.
        mount(&writable, later()).await.unwrap();
        assert_eq!(fs::read_to_string(target.join("new")).unwrap(), "new", "{kind}");
        assert!(unmount(&target, later()).await.unwrap());
    }
}

#[tokio::test]
async fn a_device_is_bound_to_a_file() {
    let disk = Disk::new(16 * MIB);
    disk.write(0, b"raw block volume");
    let place = Place::new();
    let target = place.file("device");
    let entry = bind_device(&disk.device, &target, later()).await.unwrap();
    assert_eq!(entry.root.file_name(), disk.device.file_name());
    let mut start = [0; 16];
    File::open(&target).unwrap().read_exact_at(&mut start, 0).unwrap();
    assert_eq!(&start, b"raw block volume");
    let again = bind_device(&disk.device, &target, later()).await.unwrap_err();
    assert_eq!(again.kind(), ErrorKind::AlreadyExists);
    assert!(unmount(&target, later()).await.unwrap());
    assert_eq!(fs::metadata(&target).unwrap().len(), 0);
    let error = bind_device(Path::new("/etc/hostname"), &target, later()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    let missing = bind(Path::new("/nonexistent"), &target, true, later()).await.unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound, "{missing:?}");
}

#[tokio::test]
async fn mounts_in_use_are_only_detached_on_request() {
    let disk = formatted(Kind::Ext4).await;
    let place = Place::new();
    let target = place.directory("target");
    mount(&spec(&disk, &target, Kind::Ext4), later()).await.unwrap();
    let open = File::create(target.join("open")).unwrap();
    let busy = unmount(&target, later()).await.unwrap_err();
    assert_eq!(busy.kind(), ErrorKind::InUse, "{busy:?}");
    assert!(find(&target, later()).await.unwrap().is_some());
    assert!(detach(&target, later()).await.unwrap());
    assert_eq!(find(&target, later()).await.unwrap(), None);
    drop(open);
    // Of several mounts at one place, all are removed.
    run("mount", &[disk.name(), text(&target)]);
    run("mount", &["-t", "tmpfs", "cleat-test", text(&target)]);
    assert!(unmount(&target, later()).await.unwrap());
    let left = mounts(later()).await.unwrap();
    assert!(!left.iter().any(|entry| entry.mount.path == target), "{left:?}");
}
