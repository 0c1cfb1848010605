//! Lazy unmounts of a device, in every mount namespace that has it mounted.
//!
//! A container that runs on would see the directory of its own root file system at the path of an unmounted volume: what
//! it writes there by path would succeed, and be lost with the container. So an empty directory that nobody can write to
//! is mounted there instead, before the unmount where the kernel can do that (Linux 6.5). The same is done at the paths of
//! the host that kubelet gives to containers: it may start a container again, also of a pod that was deleted, as long as it
//! does not reach the API server.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Instant;

use nix::fcntl::AtFlags;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::{FileStat, fstatat};
use rustix::fs::CWD;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, fsconfig_create, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen, move_mount,
};

use super::UnmountScope;
use super::bounded_call::BoundedCalls;
use super::mountinfo::{is_at_its_path, uncovered};
use super::namespaces::{in_namespaces, mountinfo};
use super::sysfs::Disk;
use super::usage::Proc;
use cleat_core::error::Result;
use cleat_sys::process::keep_only;

/// The maximum number of passes over one namespace. Each pass unmounts at least one mount of a stack of
/// mounts.
const ROUNDS_MAX: u32 = 256;

/// The source of the empty directories, which /proc/PID/mounts shows.
const SOURCE: &str = "cleat-unmapped";

/// The options of their filesystem: it has room for nothing.
const OPTIONS: [(&str, &str); 3] = [("size", "4k"), ("nr_inodes", "1"), ("mode", "0555")];

/// Unmounts `disk` and its partitions lazily in the namespaces of `which`.
///
/// # Errors
/// Returns `TimedOut` if an unmount still runs at the deadline; otherwise the errors of reading /proc.
pub(super) fn unmount(
    proc: &Proc,
    threads: &BoundedCalls,
    disk: &Disk,
    which: UnmountScope,
    deadline: Instant,
) -> Result<()> {
    if which == UnmountScope::None {
        return Ok(());
    }
    let unmounted =
        in_namespaces(proc, threads, disk, which, "unmount a device", deadline, unmount_here)?;
    for outcome in unmounted {
        match outcome {
            Ok(uncovered) => uncovered.iter().for_each(|(path, error)| {
                tracing::warn!(path = %path.display(), %error, "cannot cover an unmounted directory");
            }),
            // The mounts of a namespace that this process may not enter stay. They are listed as holders.
            Err(error) => tracing::warn!(%error, "cannot unmount in a mount namespace"),
        }
    }
    Ok(())
}

/// Unmounts lazily every mount of the device that the calling thread sees, from the top down. Returns the directories that
/// could not be covered. Logs nothing: the thread has no connection to the journal.
fn unmount_here(proc: &File, disk: &Disk) -> io::Result<Vec<(PathBuf, io::Error)>> {
    let mut not_covered = Vec::new();
    keep_only(&[proc.as_fd()])?;
    let is_container = is_container(proc);
    for _ in 0..ROUNDS_MAX {
        let text = mountinfo(proc)?;
        let mut progress = false;
        let mut refused = None;
        for mount in uncovered(&text).filter(|(_, mount)| mount.is_on(disk)) {
            if !is_at_its_path(&mount) {
                // An unmount by path would be one of another device. The mount is listed as a holder.
                continue;
            }
            let (_, mount) = mount;
            let is_shown = is_container || is_pod_volume(&mount.path);
            let is_covered = is_shown && cover_beneath(&mount.path);
            match umount2(&mount.path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
                Ok(()) => {
                    progress = true;
                    if is_shown && !is_covered {
                        let covered = cover(&mount.path);
                        not_covered.extend(covered.err().map(|error| (mount.path, error)));
                    }
                }
                // It was unmounted with another one, or (EINVAL) a less privileged namespace locks it.
                Err(error) => refused = Some(io::Error::from(error)),
            }
        }
        if !progress {
            return refused.map_or(Ok(not_covered), Err);
        }
    }
    Ok(not_covered)
}

/// Returns whether the root of the calling thread's namespace is neither that of this process nor that of the host. Other
/// namespaces, as those of services, share the directories of the host.
fn is_container(proc: &File) -> bool {
    let root = |path: &str| fstatat(proc, path, AtFlags::empty()).ok();
    let identity = |root: FileStat| (root.st_dev, root.st_ino);
    // The other two are those of processes, and not that of this thread.
    let [own, of_process, of_host] =
        ["/", "self/root", "1/root"].map(|path| root(path).map(identity));
    own.is_some()
        && of_process.is_some()
        && of_host.is_some()
        && own != of_process
        && own != of_host
}

/// Returns whether a path is that of a pod's volume, which kubelet shows to the containers of the pod:
/// `…/pods/UID/volumes/kubernetes.io~csi/NAME/mount`. kubelet removes what is mounted there with the pod.
fn is_pod_volume(path: &Path) -> bool {
    path.iter().rev().nth(2) == Some("kubernetes.io~csi".as_ref())
}

/// Mounts an empty directory without the right to write beneath the mount at `path`, so that an unmount shows it and never
/// the directory below. In a container, it ends with the namespace. Returns whether this has succeeded: Linux before 6.5 does
/// not support it (`MOVE_MOUNT_BENEATH`).
fn cover_beneath(path: &Path) -> bool {
    let cover = || {
        let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_set_string(&context, "source", SOURCE)?;
        fsconfig_set_flag(&context, "ro")?;
        for (option, value) in OPTIONS {
            fsconfig_set_string(&context, option, value)?;
        }
        fsconfig_create(&context)?;
        let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY
            | MountAttrFlags::MOUNT_ATTR_NOSUID
            | MountAttrFlags::MOUNT_ATTR_NODEV
            | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        let made = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_BENEATH;
        move_mount(&made, "", CWD, path, flags)
    };
    let result: rustix::io::Result<()> = cover();
    if let Err(error) = &result {
        tracing::debug!(path = %path.display(), %error, "cannot mount beneath a mount");
    }
    result.is_ok()
}

/// Mounts an empty directory without the right to write. Between the unmount and this mount, a process can write to the
/// directory below.
fn cover(path: &Path) -> io::Result<()> {
    let flags = MsFlags::MS_RDONLY | MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let options = OPTIONS.map(|(option, value)| format!("{option}={value}")).join(",");
    // A mount of one file has no directory: the file that is there instead is that of the container.
    Ok(mount(Some(SOURCE), path, Some("tmpfs"), flags, Some(&*options))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::namespaces::namespaces;
    use cleat_sys::descriptor::DeviceNumber;

    fn disk(minor: u32) -> Disk {
        Disk { names: vec!["nbd1".into()], numbers: vec![DeviceNumber { major: 43, minor }] }
    }

    #[test]
    fn the_paths_of_the_volumes_of_pods_are_known() {
        let pod = "/var/lib/kubelet/pods/0f3b/volumes/kubernetes.io~csi";
        let subpath = "/var/lib/kubelet/pods/0f3b/volume-subpaths/data/main/0";
        for (path, expected) in [
            (format!("{pod}/data/mount"), true),
            (format!("{pod}/data"), false),
            (subpath.to_owned(), false),
            ("/var/lib/kubelet/plugins/kubernetes.io/csi/cleat/ab/globalmount".to_owned(), false),
            ("/".to_owned(), false),
        ] {
            assert_eq!(is_pod_volume(Path::new(&path)), expected, "{path}");
        }
    }

    #[test]
    fn an_unmounted_device_needs_no_other_namespace() {
        let proc = Proc("/proc".into());
        let threads = BoundedCalls::new(8);
        let deadline = Instant::now() + std::time::Duration::from_secs(10);
        let elsewhere = disk(0xf_ffff);
        let found = namespaces(&proc, &elsewhere, UnmountScope::All).unwrap();
        assert!(found.len() == 1 && found[0].own);
        unmount(&proc, &threads, &elsewhere, UnmountScope::All, deadline).unwrap();
        unmount(&proc, &threads, &elsewhere, UnmountScope::None, Instant::now()).unwrap();
    }
}
