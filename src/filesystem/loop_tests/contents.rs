//! What a device contains is never taken for nothing, and never overwritten.

use std::fs::File;
use std::io::Read;

use cleat_core::error::ErrorKind;

use super::disk::{Disk, MIB, later, run};
use super::signatures::{self, Parts};
use crate::{Content, FormatOptions, Kind, content, device_size, format};

/// The size of the devices: more than is read completely.
const SIZE: u64 = 72 * MIB;

/// The size of the devices for ext4 with more than one block group, and for btrfs.
const LARGER: u64 = 160 * MIB;

/// The size of the devices for XFS, which mkfs.xfs requires.
const XFS_SIZE: u64 = 320 * MIB;

/// What [`content()`] must find.
#[derive(Debug)]
enum Expected {
    Filesystem(&'static str),
    Other(&'static str),
    /// Data at this byte.
    Data(u64),
    /// Unknown content, however it is described.
    Unknown,
    /// Other or unknown content: newer versions of blkid check more of the format.
    NoFilesystem,
}

use Expected::{Data, Filesystem, NoFilesystem, Other, Unknown};

impl Expected {
    fn is(&self, found: &Content) -> bool {
        match (self, found) {
            (Filesystem(kind), Content::Filesystem(found)) => found.kind == *kind,
            (Other(name), Content::Other(found)) => found == name,
            (Data(at), Content::Unknown(what)) => *what == format!("data at byte {at}"),
            (Unknown | NoFilesystem, Content::Unknown(_)) => true,
            (NoFilesystem, Content::Other(_)) => true,
            _ => false,
        }
    }
}

/// Checks that the content of `disk` is found and that no format changes it.
async fn check(name: &str, disk: &Disk, expected: Expected) -> Result<(), String> {
    let before = disk.bytes();
    let found = content(&disk.device, later()).await.unwrap();
    assert_ne!(found, Content::Empty, "{name}");
    for kind in Kind::ALL {
        let refused =
            format(&disk.device, kind, &FormatOptions::default(), later()).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InUse, "{name} as {kind}: {refused}");
        assert!(refused.repair().unwrap().contains("wipefs --no-act"), "{refused:?}");
    }
    assert!(disk.bytes() == before, "{name}: the content has changed");
    let wrong = || format!("{name}: {found:?} is not {expected:?}");
    if expected.is(&found) { Ok(()) } else { Err(wrong()) }
}

/// Checks a device of [`SIZE`] bytes for each case.
async fn check_all(cases: Vec<(&str, Expected, Parts)>) {
    let mut wrong = Vec::new();
    for (name, expected, parts) in cases {
        let disk = Disk::new(SIZE);
        parts.iter().for_each(|(at, bytes)| disk.write(*at, bytes));
        wrong.extend(check(name, &disk, expected).await.err());
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test]
async fn no_signature_is_taken_for_an_empty_device() {
    let cases: Vec<(&str, Expected, Parts)> = vec![
        ("LUKS1", Other("crypto_LUKS"), signatures::luks(1)),
        ("LUKS2", Other("crypto_LUKS"), signatures::luks(2)),
        ("LVM", Other("LVM2_member"), signatures::lvm(true)),
        ("damaged LVM", Data(512), signatures::lvm(false)),
        ("md 1.2", Other("linux_raid_member"), signatures::md()),
        ("md 0.90", Other("linux_raid_member"), signatures::old_md(SIZE)),
        ("gpt", Other("partition table gpt"), signatures::gpt(SIZE)),
        ("dos table", Other("partition table dos"), signatures::dos()),
        ("swap", Other("swap"), signatures::swap()),
        ("ZFS", Other("zfs_member"), signatures::zfs()),
        ("bcache", NoFilesystem, signatures::bcache()),
        ("F2FS", Filesystem("f2fs"), signatures::f2fs()),
        ("FAT", Filesystem("vfat"), signatures::vfat()),
        ("NTFS", NoFilesystem, signatures::ntfs()),
        ("ISO 9660", Filesystem("iso9660"), signatures::iso9660()),
        ("squashfs", Filesystem("squashfs"), signatures::squashfs()),
        ("BlueStore", Other("ceph_bluestore"), signatures::bluestore()),
        ("squashfs and F2FS", Unknown, [signatures::squashfs(), signatures::f2fs()].concat()),
    ];
    check_all(cases).await;
}

#[tokio::test]
async fn no_data_is_taken_for_an_empty_device() {
    let text = b"some data".to_vec();
    let mut random = vec![0; 1 << 20];
    File::open("/dev/urandom").unwrap().read_exact(&mut random).unwrap();
    random[0] = 1;
    let cases: Vec<(&str, Expected, Parts)> = vec![
        ("random bytes", Data(1), vec![(1, random)]),
        ("text at the start", Data(0), vec![(0, text.clone())]),
        ("data at 64 KiB", Data(65536), vec![(65536, text.clone())]),
        ("data at 1 MiB", Data(MIB), vec![(MIB, text.clone())]),
        ("data at 2 MiB", Data(2 * MIB), vec![(2 * MIB, text.clone())]),
        ("data in the middle", Data(SIZE / 2), vec![(SIZE / 2, text.clone())]),
        ("data at an eighth", Data(SIZE / 8), vec![(SIZE / 8, text.clone())]),
        ("data in the last MiB", Data(SIZE - MIB), vec![(SIZE - MIB, text.clone())]),
        ("data at the end", Data(SIZE - 4096), vec![(SIZE - 4096, text)]),
        ("one byte at the end", Data(SIZE - 1), vec![(SIZE - 1, vec![1])]),
    ];
    check_all(cases).await;
}

#[tokio::test]
async fn file_systems_are_found_and_their_remains_too() {
    let disk = Disk::new(LARGER);
    run("mkfs.ext4", &["-q", "-b", "4096", disk.name()]);
    check("ext4", &disk, Filesystem("ext4")).await.unwrap();
    disk.write(1024, &[0; 1024]);
    check("ext4 without a superblock", &disk, Unknown).await.unwrap();
    disk.write(1024, b"\xff".repeat(1024).as_slice());
    check("ext4 with a damaged superblock", &disk, Data(1024)).await.unwrap();
    disk.write(0, &vec![0; 16 << 20]);
    check("ext4 without its first 16 MiB", &disk, Unknown).await.unwrap();

    let disk = Disk::new(LARGER);
    run("mkfs.btrfs", &["-q", disk.name()]);
    check("btrfs", &disk, Filesystem("btrfs")).await.unwrap();
    disk.write(0, &vec![0; 4 << 20]);
    check("btrfs with only the second superblock", &disk, Unknown).await.unwrap();

    let disk = Disk::new(XFS_SIZE);
    run("mkfs.xfs", &["-q", disk.name()]);
    check("XFS", &disk, Filesystem("xfs")).await.unwrap();
    disk.write(0, &vec![0; 8 << 20]);
    // The second allocation group begins at a quarter.
    check("XFS with only the copies of its superblock", &disk, Data(XFS_SIZE / 4)).await.unwrap();
}

#[tokio::test]
async fn a_device_that_cannot_be_read_is_an_error() {
    let disk = Disk::new(SIZE);
    assert_eq!(content(&disk.device, later()).await.unwrap(), Content::Empty);
    // The loop device fails reads beyond the end of its file.
    disk.set_file_size(SIZE / 2);
    let error = content(&disk.device, later()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Internal, "{error:?}");
    let refused = format(&disk.device, Kind::Ext4, &FormatOptions::default(), later()).await;
    assert_eq!(refused.unwrap_err().message(), error.message());
    assert_eq!(device_size(&disk.device, later()).await.unwrap(), SIZE);
}

#[tokio::test]
async fn a_device_that_another_program_holds_is_not_called_empty() {
    let disk = Disk::new(SIZE);
    let holder = content::open_exclusively(&disk.device).unwrap();
    let error = content(&disk.device, later()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse, "{error:?}");
    drop(holder);
    assert_eq!(content(&disk.device, later()).await.unwrap(), Content::Empty);
}
