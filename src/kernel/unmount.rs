//! Lazy unmounts of a device, in every mount namespace that has it mounted.
//!
//! A container that runs on would see the directory of its own root file system at the path of an unmounted volume: what
//! it writes there by path would succeed, and be lost with the container. So an empty directory that nobody can write to
//! is mounted there instead.

use std::fs::File;
use std::io;
use std::path::Path;
use std::time::Instant;

use nix::fcntl::AtFlags;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::{FileStat, fstatat};

use super::UnmountScope;
use super::bounded_call::BoundedCalls;
use super::mountinfo::uncovered;
use super::namespaces::{in_namespaces, mountinfo};
use super::sysfs::Disk;
use super::usage::Proc;
use cleat_core::error::Result;

/// The maximum number of passes over one namespace. Each pass unmounts at least one mount of a stack of
/// mounts.
const ROUNDS_MAX: u32 = 256;

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
    for error in unmounted.into_iter().filter_map(io::Result::err) {
        // The mounts of a namespace that this process may not enter stay. They are listed as holders.
        tracing::warn!(%error, "cannot unmount in a mount namespace");
    }
    Ok(())
}

/// Unmounts lazily every mount of the device that the calling thread sees, from the top down.
fn unmount_here(proc: &File, disk: &Disk) -> io::Result<()> {
    let is_container = is_container(proc);
    for _ in 0..ROUNDS_MAX {
        let text = mountinfo(proc)?;
        let mut progress = false;
        let mut refused = None;
        for mount in uncovered(&text).filter(|mount| mount.is_on(disk)) {
            match umount2(&mount.path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
                Ok(()) => {
                    progress = true;
                    if is_container {
                        cover(&mount.path);
                    }
                }
                // It was unmounted with another one, or (EINVAL) a less privileged namespace locks it.
                Err(error) => refused = Some(io::Error::from(error)),
            }
        }
        if !progress {
            return refused.map_or(Ok(()), Err);
        }
    }
    Ok(())
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

/// Mounts an empty directory without the right to write. It ends with the namespace.
fn cover(path: &Path) {
    let flags = MsFlags::MS_RDONLY | MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let options = Some("size=4k,nr_inodes=1,mode=0555");
    // A mount of one file has no directory: the file that is there instead is that of the container.
    if let Err(error) = mount(Some("cleat-unmapped"), path, Some("tmpfs"), flags, options) {
        tracing::warn!(path = %path.display(), %error, "cannot cover an unmounted directory");
    }
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
