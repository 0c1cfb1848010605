//! The life of a file system: empty device, format, check, mount, growth, trim, unmount.

use std::fs;
use std::path::Path;
use std::time::Duration;

use cleat_core::error::ErrorKind;

use super::disk::{Disk, MIB, Place, later, run};
use crate::{
    CheckPolicy, Checked, Content, FormatOptions, Kind, MountSpec, bind, check, content, find,
    format, grow, mount, needs_growth, trim, unmount, usage,
};

const SIZE: u64 = 320 * MIB;
const UUID: &str = "01234567-89ab-cdef-0123-456789abcdef";

pub(super) fn spec(disk: &Disk, target: &Path, kind: Kind) -> MountSpec {
    MountSpec {
        source: disk.device.clone(),
        target: target.to_owned(),
        kind: Some(kind),
        options: vec!["noatime".to_owned()],
        read_only: false,
        duplicate_uuid: false,
        may_skip_journal: true,
    }
}

#[tokio::test]
async fn an_ext4_volume_lives() {
    lives(Kind::Ext4, &["-m1", "-E", "stride=4"]).await;
}

#[tokio::test]
async fn an_xfs_volume_lives() {
    lives(Kind::Xfs, &["-m", "reflink=0"]).await;
}

#[tokio::test]
async fn a_btrfs_volume_lives() {
    lives(Kind::Btrfs, &["--csum=xxhash"]).await;
}

async fn lives(kind: Kind, extra: &[&str]) {
    let disk = Disk::new(SIZE);
    let device = disk.device.as_path();
    assert_eq!(content(device, later()).await.unwrap(), Content::Empty);
    let extra = extra.iter().map(ToString::to_string).collect();
    let options = FormatOptions { uuid: Some(UUID.to_owned()), extra };
    let made = format(device, kind, &options, later()).await.unwrap();
    assert_eq!((&*made.kind, made.uuid.as_deref()), (kind.name(), Some(UUID)));
    assert_eq!(content(device, later()).await.unwrap(), Content::Filesystem(made));
    assert_eq!(check(device, kind, CheckPolicy::Full, later()).await.unwrap(), Checked::Clean);

    let place = Place::new();
    let target = place.directory("staging");
    let entry = mount(&spec(&disk, &target, kind), later()).await.unwrap();
    assert_eq!(entry.mount.filesystem, kind.name());
    assert!(entry.options.iter().any(|option| option == "noatime"), "{entry:?}");
    assert_eq!(find(&target, later()).await.unwrap(), Some(entry));
    fs::write(target.join("file"), "content").unwrap();
    published(&place, &target).await;
    grows(&disk, &target, kind).await;
    trim(&target, later()).await.unwrap();
    let checked = check(device, kind, CheckPolicy::Full, later()).await.unwrap_err();
    assert_eq!(checked.kind(), ErrorKind::InUse, "{checked:?}");

    assert!(unmount(&target, later()).await.unwrap());
    assert!(!unmount(&target, later()).await.unwrap());
    let preen = if kind == Kind::Ext4 { Checked::Clean } else { Checked::Skipped };
    assert_eq!(check(device, kind, CheckPolicy::Preen, later()).await.unwrap(), preen);
    assert_eq!(check(device, kind, CheckPolicy::Full, later()).await.unwrap(), Checked::Clean);
    mount(&MountSpec { read_only: true, ..spec(&disk, &target, kind) }, later()).await.unwrap();
    assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "content");
}

/// Bind mounts of the volume, writable and read-only.
async fn published(place: &Place, staging: &Path) {
    let (writable, read_only) = (place.directory("writable"), place.directory("read-only"));
    assert!(!bind(staging, &writable, false, later()).await.unwrap().is_read_only());
    assert!(bind(staging, &read_only, true, later()).await.unwrap().is_read_only());
    fs::write(writable.join("file"), "content").unwrap();
    let refused = fs::write(read_only.join("file"), "other").unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    let space = usage(&writable, later()).await.unwrap();
    assert!(space.bytes.total > SIZE / 4 && space.bytes.total <= SIZE, "{space:?}");
    assert!(space.bytes.used + space.bytes.available <= space.bytes.total, "{space:?}");
    assert!(unmount(&writable, later()).await.unwrap());
    assert!(unmount(&read_only, later()).await.unwrap());
}

/// The device becomes larger, and the file system follows.
async fn grows(disk: &Disk, target: &Path, kind: Kind) {
    let device = disk.device.as_path();
    let before = usage(target, later()).await.unwrap().bytes.total;
    assert!(!needs_growth(device, kind, later()).await.unwrap());
    grow(device, target, kind, later()).await.unwrap();
    disk.resize(2 * SIZE);
    assert!(needs_growth(device, kind, later()).await.unwrap());
    let grown = grow(device, target, kind, later()).await;
    if kind == Kind::Ext4 && !has_sys_resource() {
        assert_eq!(grown.unwrap_err().kind(), ErrorKind::PermissionDenied);
        return;
    }
    grown.unwrap();
    assert!(usage(target, later()).await.unwrap().bytes.total > before + SIZE / 2);
    run("sync", &["--file-system", super::disk::text(target)]);
    // XFS writes its superblock some time after it has grown.
    let deadline = later();
    while needs_growth(device, kind, deadline).await.unwrap() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Whether this process may use what is reserved (CAP_SYS_RESOURCE), which ext4 requires for growth.
fn has_sys_resource() -> bool {
    const SYS_RESOURCE: u64 = 1 << 24;
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    u64::from_str_radix(line.trim(), 16).unwrap() & SYS_RESOURCE != 0
}

#[tokio::test]
async fn ext4_is_repaired_where_that_is_safe() {
    let disk = Disk::new(SIZE);
    let device = disk.device.as_path();
    format(device, Kind::Ext4, &FormatOptions::default(), later()).await.unwrap();
    // A wrong count of free blocks, as after a crash, in a file system that is marked as damaged.
    run("debugfs", &["-w", "-R", "set_super_value free_blocks_count 1", disk.name()]);
    run("debugfs", &["-w", "-R", "set_super_value state 2", disk.name()]);
    let checked = check(device, Kind::Ext4, CheckPolicy::Preen, later()).await.unwrap();
    assert_eq!(checked, Checked::Repaired);
    let again = check(device, Kind::Ext4, CheckPolicy::Full, later()).await.unwrap();
    assert_eq!(again, Checked::Clean);
    // The journal's inode is gone, which only a person can decide about.
    run("debugfs", &["-w", "-R", "clri <2>", disk.name()]);
    assert_eq!(
        check(device, Kind::Ext4, CheckPolicy::Never, later()).await.unwrap(),
        Checked::Skipped
    );
    let error = check(device, Kind::Ext4, CheckPolicy::Full, later()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Internal);
    assert!(error.repair().unwrap().ends_with(&format!("e2fsck -f {}", disk.name())), "{error:?}");
}

#[tokio::test]
async fn errors_of_xfs_and_btrfs_are_reported() {
    for kind in [Kind::Xfs, Kind::Btrfs] {
        let disk = Disk::new(SIZE);
        let device = disk.device.as_path();
        format(device, kind, &FormatOptions::default(), later()).await.unwrap();
        match kind {
            // The header of the free space of the first allocation group.
            Kind::Xfs => disk.write(512, &[0x55; 256]),
            // Everything but the superblock.
            _ => disk.write(MIB, &vec![0x55; 64 << 20]),
        }
        let error = check(device, kind, CheckPolicy::Full, later()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Internal, "{kind}: {error:?}");
        assert!(error.repair().is_some());
    }
}

#[tokio::test]
async fn a_check_waits_for_a_short_time_for_another_program() {
    for kind in [Kind::Ext4, Kind::Xfs, Kind::Btrfs] {
        let disk = Disk::new(SIZE);
        let device = disk.device.as_path();
        format(device, kind, &FormatOptions::default(), later()).await.unwrap();
        let held = content::open_exclusively(device).unwrap();
        let (checked, ()) = tokio::join!(check(device, kind, CheckPolicy::Full, later()), async {
            tokio::time::sleep(Duration::from_millis(500)).await;
            drop(held);
        });
        assert_eq!(checked.unwrap(), Checked::Clean, "{kind}");
    }
    let disk = Disk::new(SIZE);
    format(&disk.device, Kind::Btrfs, &FormatOptions::default(), later()).await.unwrap();
    let _held = content::open_exclusively(&disk.device).unwrap();
    let error = check(&disk.device, Kind::Btrfs, CheckPolicy::Full, later()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse, "{error:?}");
}

#[tokio::test]
async fn a_format_that_fails_is_reported_with_its_output() {
    // mkfs.xfs requires 300 MiB.
    let disk = Disk::new(MIB);
    let error = format(&disk.device, Kind::Xfs, &FormatOptions::default(), later()).await;
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Internal);
    assert!(error.message().starts_with(&format!("mkfs.xfs {} failed: ", disk.name())), "{error}");
}
