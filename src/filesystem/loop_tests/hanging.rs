//! Calls for a device that does not answer. Its file is on a frozen file system, so that writes wait in the
//! kernel and cannot be killed, as on a device whose backend does not answer.

use std::fmt::Debug;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cleat_core::error::{ErrorKind, Result};
use tokio::time::Instant;

use super::disk::{Disk, MIB, Place, later, run, text};
use super::lifecycle::spec;
use crate::{Content, FormatOptions, Kind, content, find, format, mount, unmount};

/// A file system that can be frozen, and a disk on it.
struct Hanging {
    // Dropped in this order: what hangs continues before its device is detached and the file system below it
    // is unmounted.
    frozen: Frozen,
    disk: Disk,
    _place: Place,
    _below: Disk,
}

/// The mount point of the file system. It is thawed when dropped.
struct Frozen(PathBuf);

impl Hanging {
    fn new() -> Self {
        let below = Disk::new(512 * MIB);
        run("mkfs.ext4", &["-q", below.name()]);
        let place = Place::new();
        let mounted = place.directory("below");
        run("mount", &[below.name(), text(&mounted)]);
        let disk = Disk::at(&mounted.join("file"), 320 * MIB);
        Self { frozen: Frozen(mounted), disk, _place: place, _below: below }
    }
}

impl Frozen {
    fn freeze(&self) {
        run("fsfreeze", &["--freeze", text(&self.0)]);
    }

    fn thaw(&self) {
        run("fsfreeze", &["--unfreeze", text(&self.0)]);
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        let thaw = ["--unfreeze", text(&self.0)];
        // Fails if the file system is not frozen.
        let _ = std::process::Command::new("fsfreeze").args(thaw).output();
    }
}

/// Calls with longer and longer deadlines until the call hangs in the program `name` as `how` says. On a busy
/// machine, a deadline may expire before that.
async fn hangs<T: Debug>(name: &str, how: &str, call: impl AsyncFn(Instant) -> Result<T>) {
    let mut timeout = Duration::from_secs(1);
    loop {
        let error = call(Instant::now() + timeout).await.unwrap_err();
        // A read that missed the deadline may still hold the device.
        let kinds = [ErrorKind::TimedOut, ErrorKind::InUse];
        assert!(kinds.contains(&error.kind()), "{error:?}");
        if error.message().starts_with(name) && error.message().contains(how) {
            return;
        }
        timeout *= 2;
    }
}

#[tokio::test]
async fn a_format_that_hangs_is_left_running_and_completes() {
    let hanging = Hanging::new();
    let device = hanging.disk.device.as_path();
    hanging.frozen.freeze();
    let options = FormatOptions::default();
    let call = async |deadline| format(device, Kind::Ext4, &options, deadline).await;
    hangs("mkfs.ext4", "continues", call).await;
    let busy = content(device, later()).await.unwrap_err();
    assert_eq!(busy.kind(), ErrorKind::Aborted, "{busy:?}");
    let busy = format(device, Kind::Xfs, &options, later()).await.unwrap_err();
    assert_eq!(busy.kind(), ErrorKind::Aborted, "{busy:?}");
    hanging.frozen.thaw();
    let found = loop {
        match content(device, later()).await {
            Ok(found) => break found,
            Err(error) => assert_eq!(error.kind(), ErrorKind::Aborted, "{error:?}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert!(matches!(&found, Content::Filesystem(found) if found.kind == "ext4"), "{found:?}");
    run("e2fsck", &["-f", "-n", hanging.disk.name()]);
}

#[tokio::test]
async fn an_unmount_that_hangs_ends_at_its_deadline() {
    let hanging = Hanging::new();
    let device = hanging.disk.device.as_path();
    format(device, Kind::Ext4, &FormatOptions::default(), later()).await.unwrap();
    let place = Place::new();
    let target = place.directory("target");
    mount(&spec(&hanging.disk, &target, Kind::Ext4), later()).await.unwrap();
    fs::write(target.join("file"), vec![1; 1 << 20]).unwrap();
    hanging.frozen.freeze();
    hangs("umount", "cannot be killed", async |deadline| unmount(&target, deadline).await).await;
    hanging.frozen.thaw();
    while is_mounted(&target, device).await {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    mount(&spec(&hanging.disk, &target, Kind::Ext4), later()).await.unwrap();
    assert_eq!(fs::metadata(target.join("file")).unwrap().len(), 1 << 20);
    assert!(unmount(&target, later()).await.unwrap());
}

/// Whether the device is mounted, or the kernel still has it open for a mount that has been removed.
async fn is_mounted(target: &Path, device: &Path) -> bool {
    find(target, later()).await.unwrap().is_some() || content::open_exclusively(device).is_err()
}
