//! Mounts and bind mounts.
//!
//! The kernel's list of mounts decides whether a mount has succeeded as requested, not the exit code of
//! mount(8). If it has not, it is removed again.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_kernel::MountEntry;
use cleat_sys::descriptor::{DeviceNumber, block_device};
use tokio::time::Instant;

use crate::blocking::bounded;
use crate::call::{Call, Ended};
use crate::kind::Kind;
use crate::mount_options::check_options;
use crate::mount_table::find;
use crate::path::{check_device, check_path};
use crate::tools::MOUNT;
use crate::unmount::{detach, unmount};
use crate::writers::refuse_if_written;

/// How long the removal of an unfinished bind mount may take after the deadline.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(5);

/// A file system and the place where it is mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountSpec {
    /// The block device.
    pub source: PathBuf,
    /// The mount point: an existing directory.
    pub target: PathBuf,
    /// The file system. Without it, mount(8) determines it from the device.
    pub kind: Option<Kind>,
    /// Options such as `noatime`, one each. `ro` and `rw` are not among them.
    pub options: Vec<String>,
    /// Mounts the file system read-only. The kernel may still replay its journal on a writable device.
    pub read_only: bool,
    /// Permits a file system whose UUID equals that of another mounted one, as a clone or a snapshot has
    /// it. XFS refuses that otherwise (`nouuid`). btrfs always refuses it before Linux 6.7.
    pub duplicate_uuid: bool,
    /// Whether a read-only file system whose journal cannot be replayed is mounted without it. Must be false if something else
    /// may write to the device: its journal looks the same, and what is read changes meanwhile.
    pub may_skip_journal: bool,
}

/// Mounts a file system and returns the new mount.
///
/// At the deadline the mount may continue in the kernel; [`find`] shows its result.
///
/// A file system on a read-only device that was not unmounted cleanly is mounted without its journal, if `spec` permits
/// it: what only the journal has is not visible then, and a warning in the log says so.
///
/// # Errors
/// Returns `AlreadyExists` if `target` is a mount point; `InUse` if the device is mounted or held elsewhere
/// with other properties; `InvalidArgument` for options and paths that are not permitted; `NotFound` if
/// source or target do not exist; `Unsupported` if the kernel lacks the file system; `PermissionDenied` if
/// the device is read-only and `read_only` is not set; `TimedOut`; `Internal` if the kernel refuses the
/// file system; `Unsupported` also if mount(8) leaves out the SELinux context. After an error other than `TimedOut`
/// nothing is mounted.
pub async fn mount(spec: &MountSpec, deadline: Instant) -> Result<MountEntry> {
    let (source, target) = (spec.source.as_path(), spec.target.as_path());
    let number = check_device(source)?;
    check_options(&spec.options)?;
    refuse_if_written(number, source)?;
    refuse_mount_point(target, deadline).await?;
    let ended = attempt(spec, None, deadline).await?;
    if !ended.status.success() {
        let option = without_replay(spec, &ended).filter(|_| is_write_protected(number));
        let Some(option) = option else { return Err(mount_failure(&ended, source)) };
        // The first failure is the one to report: that of the second attempt says nothing of the journal.
        if !attempt(spec, Some(option), deadline).await?.status.success() {
            return Err(mount_failure(&ended, source));
        }
        tracing::warn!(
            "{} was not unmounted cleanly and is read-only, so its journal cannot be replayed: mounted at {} with \
             {option}, where the last changes are not visible",
            source.display(),
            target.display()
        );
    }
    let entry = verify(target, spec.read_only, deadline, |entry| {
        let is_kind = spec.kind.is_none_or(|kind| kind.name() == entry.mount.filesystem);
        // btrfs has device numbers of its own, and lists the device as source.
        let is_device = entry.mount.number == number
            || block_device(Path::new(&entry.mount.source)).ok().flatten() == Some(number);
        is_kind && is_device
    })
    .await?;
    if has_context(&spec.options) && !entry_has_context(&entry) && kernel_has_selinux() {
        remove(target, deadline).await?;
        return Err(without_context(target));
    }
    Ok(entry)
}

/// Runs mount(8) once, with an option in addition to those of `spec`.
async fn attempt(spec: &MountSpec, option: Option<&str>, deadline: Instant) -> Result<Ended> {
    // Without --rw, mount(8) mounts a write-protected device read-only, and succeeds.
    let mut call = Call::new(MOUNT, &spec.target)
        .args(["--internal-only", if spec.read_only { "--read-only" } else { "--rw" }]);
    if let Some(kind) = spec.kind {
        call = call.args(["--types", kind.name()]);
    }
    let mut options: Vec<&str> = spec.options.iter().map(String::as_str).chain(option).collect();
    if spec.duplicate_uuid && spec.kind == Some(Kind::Xfs) && !options.contains(&"nouuid") {
        options.push("nouuid");
    }
    if !options.is_empty() {
        call = call.args(["--options", &options.join(",")]);
    }
    call.arg("--source").arg(&spec.source).arg("--target").arg(&spec.target).run(deadline).await
}

/// Returns the option with which a file system is mounted without its journal, if a read-only mount has failed as it
/// does where the journal must be replayed and the device is read-only.
fn without_replay(spec: &MountSpec, ended: &Ended) -> Option<&'static str> {
    // mount(8) writes the first text for EROFS, the error of ext4 and XFS, and the second one for EIO, that of btrfs.
    let refusal = format!("cannot mount {} read-only", spec.source.display());
    let is_refused = ended.reports(&refusal) || ended.reports("Read-only file system");
    let is_unreadable = ended.reports("can't read superblock");
    let option = match spec.kind? {
        Kind::Ext4 if is_refused => "noload",
        Kind::Xfs if is_refused => "norecovery",
        Kind::Btrfs if is_refused || is_unreadable => "rescue=nologreplay",
        Kind::Ext4 | Kind::Xfs | Kind::Btrfs => return None,
    };
    (spec.read_only && spec.may_skip_journal).then_some(option)
}

/// Returns whether a device refuses writes. An unknown state counts as writable.
fn is_write_protected(DeviceNumber { major, minor }: DeviceNumber) -> bool {
    let path = format!("/sys/dev/block/{major}:{minor}/ro");
    std::fs::read(path).is_ok_and(|state| state.first() == Some(&b'1'))
}

/// Returns whether a mount is to have an SELinux context.
fn has_context(options: &[String]) -> bool {
    options.iter().any(|option| option.starts_with("context="))
}

fn entry_has_context(entry: &MountEntry) -> bool {
    entry.super_options.iter().any(|option| option.as_bytes().starts_with(b"context="))
}

/// Returns whether SELinux is enabled in the kernel. It registers its filesystem only then.
fn kernel_has_selinux() -> bool {
    let known = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    known.split_whitespace().any(|name| name == "selinuxfs")
}

/// The error for a context that mount(8) has left out without a word. It does so where libselinux does not find
/// SELinux, as in a container without the directories of the host. The pods could not use the files then.
fn without_context(target: &Path) -> Error {
    let message = format!(
        "mount(8) has left out the SELinux context of {}: it does not find SELinux, which the kernel has",
        target.display()
    );
    Error::new(ErrorKind::Unsupported, message).with_repair(
        "make /sys/fs/selinux and /etc/selinux of the host visible in the container of the daemon",
    )
}

/// Makes the directory or file `source` visible at `target`, without the mounts below it, and returns the new
/// mount. With `read_only`, writes through the new mount fail, whatever the mount of `source` permits.
///
/// # Errors
/// Returns `AlreadyExists` if `target` is a mount point; `InvalidArgument` if the mount is read-only
/// although `read_only` is not set, because that of `source` is; otherwise the errors of [`mount()`]. A
/// mount that should be read-only never remains writable after an error; to ensure this, the call may take
/// up to 5 s more than its deadline permits.
pub async fn bind(
    source: &Path,
    target: &Path,
    read_only: bool,
    deadline: Instant,
) -> Result<MountEntry> {
    check_path("the source", source)?;
    refuse_mount_point(target, deadline).await?;
    let options = if read_only { "bind,ro" } else { "bind" };
    let call = Call::new(MOUNT, target).args(["--internal-only", "--options", options]);
    let call = call.arg("--source").arg(source).arg("--target").arg(target);
    let failed = match call.run(deadline).await {
        Ok(ended) if ended.status.success() => None,
        Ok(ended) => Some(mount_failure(&ended, source)),
        Err(error) => Some(error),
    };
    if let Some(error) = failed {
        // mount(8) before version 2.39 makes a writable mount first, and leaves it if the second step fails
        // or the program is killed between the two.
        remove(target, deadline.max(Instant::now() + CLEANUP_TIMEOUT)).await?;
        return Err(error);
    }
    verify(target, read_only, deadline, |_| true).await
}

/// Makes the block device `device` visible at the existing file `target`, for a volume without a file system,
/// and returns the new mount.
///
/// The mount does not determine whether the device can be written: the kernel does not apply `ro` to device
/// nodes. For a read-only volume, the device itself must be read-only.
///
/// # Errors
/// Returns the errors of [`bind`], and `InvalidArgument` if `device` is not a block device.
pub async fn bind_device(device: &Path, target: &Path, deadline: Instant) -> Result<MountEntry> {
    let number = check_device(device)?;
    let entry = bind(device, target, false, deadline).await?;
    let path = target.to_owned();
    let look = move || Ok(block_device(&path).ok().flatten());
    let found = bounded("examine", target, deadline, look).await?;
    if found == Some(number) {
        return Ok(entry);
    }
    remove(target, deadline).await?;
    let (device, target) = (device.display(), target.display());
    let message = format!("{target} is not the device {device} after it was bound there");
    Err(Error::new(ErrorKind::Internal, message)
        .with_repair(format!("stat {device}: another device has its name now; retry")))
}

async fn refuse_mount_point(target: &Path, deadline: Instant) -> Result<()> {
    let Some(entry) = find(target, deadline).await? else { return Ok(()) };
    let (path, source) = (target.display(), entry.mount.source.display());
    let kind = &entry.mount.filesystem;
    let message = format!("cannot mount at {path}: {source} ({kind}) is mounted there");
    Err(Error::new(ErrorKind::AlreadyExists, message)
        .with_repair(format!("findmnt {path}; if it is not needed there: umount {path}")))
}

/// Checks the new mount at `target` in the kernel's list, and removes it if it is not as requested.
async fn verify(
    target: &Path,
    read_only: bool,
    deadline: Instant,
    is_expected: impl Fn(&MountEntry) -> bool,
) -> Result<MountEntry> {
    let path = target.display();
    let Some(entry) = find(target, deadline).await? else {
        let message = format!("nothing is mounted at {path} after mount succeeded");
        return Err(Error::new(ErrorKind::Internal, message));
    };
    let source = entry.mount.source.display();
    let wrong = if !is_expected(&entry) {
        let message =
            format!("another file system than requested, of {source}, is mounted at {path}");
        Error::new(ErrorKind::Internal, message)
    } else if entry.is_read_only() && !read_only {
        let message = format!("{source} is mounted read-only at {path}, but not requested so");
        Error::new(ErrorKind::InvalidArgument, message).with_repair(format!(
            "request a read-only mount, or remount the source: findmnt {source}"
        ))
    } else if !entry.is_read_only() && read_only {
        let message = format!("{source} is mounted writable at {path}, but requested read-only");
        Error::new(ErrorKind::Internal, message)
    } else {
        return Ok(entry);
    };
    remove(target, deadline).await?;
    Err(wrong)
}

/// Removes a mount that was made in this call, and that no process is known to use.
async fn remove(target: &Path, deadline: Instant) -> Result<()> {
    match unmount(target, deadline).await {
        Err(error) if error.kind() == ErrorKind::InUse => detach(target, deadline).await,
        result => result,
    }?;
    Ok(())
}

fn mount_failure(ended: &Ended, source: &Path) -> Error {
    let causes = [
        ("already mounted", ErrorKind::InUse),
        ("mount point busy", ErrorKind::InUse),
        ("write-protected", ErrorKind::PermissionDenied),
        ("must be superuser", ErrorKind::PermissionDenied),
        ("permission denied", ErrorKind::PermissionDenied),
        ("unknown filesystem type", ErrorKind::Unsupported),
        ("does not exist", ErrorKind::NotFound),
    ];
    let known = causes.iter().find(|(text, _)| ended.reports(text));
    let kind = known.map_or(ErrorKind::Internal, |(_, kind)| *kind);
    let device = source.display();
    let name = source.file_name().unwrap_or_default().display();
    ended.failure(kind).with_repair(match kind {
        ErrorKind::InUse => format!("findmnt {device}; lsblk {device}"),
        ErrorKind::PermissionDenied => "mount it read-only, or make the volume writable".to_owned(),
        ErrorKind::Unsupported => {
            "load the kernel module of the file system with modprobe".to_owned()
        }
        ErrorKind::NotFound => format!("ls -l {device}; create the missing path"),
        _ => format!("dmesg | grep {name} shows the reason"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_read_only_mount_that_needs_its_journal_is_repeated_without_it() {
        let refused = "mount: /mnt: cannot mount /dev/nbd0 read-only.";
        let newer = "mount: /mnt: fsconfig system call failed: Read-only file system.";
        let unreadable = "mount: /mnt: can't read superblock on /dev/nbd0.";
        let option = |kind, read_only, errors: &str| {
            let spec = MountSpec {
                source: "/dev/nbd0".into(),
                target: "/mnt".into(),
                kind,
                options: Vec::new(),
                read_only,
                duplicate_uuid: false,
                may_skip_journal: true,
            };
            without_replay(&spec, &Ended::of(32, "", errors))
        };
        for errors in [refused, newer] {
            assert_eq!(option(Some(Kind::Ext4), true, errors), Some("noload"));
            assert_eq!(option(Some(Kind::Xfs), true, errors), Some("norecovery"));
            assert_eq!(option(Some(Kind::Btrfs), true, errors), Some("rescue=nologreplay"));
            assert_eq!(option(Some(Kind::Ext4), false, errors), None);
            assert_eq!(option(None, true, errors), None);
        }
        // For the others, this is an I/O error or a damaged file system.
        assert_eq!(option(Some(Kind::Btrfs), true, unreadable), Some("rescue=nologreplay"));
        assert_eq!(option(Some(Kind::Ext4), true, unreadable), None);
        assert_eq!(option(Some(Kind::Xfs), true, unreadable), None);
        let other = "mount: /read-only: wrong fs type, bad option, bad superblock on /dev/nbd0";
        assert_eq!(option(Some(Kind::Ext4), true, other), None);
    }

    #[test]
    fn a_context_for_the_whole_filesystem_is_found() {
        let has = |option: &str| has_context(&["noatime".to_owned(), option.to_owned()]);
        assert!(has("context=\"system_u:object_r:container_file_t:s0:c1,c2\""));
        assert!(!has("rootcontext=system_u:object_r:container_file_t:s0"));
        assert!(!has_context(&[]));
    }
}
