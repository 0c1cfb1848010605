//! Lazy unmounts of a device, in every mount namespace that has it mounted.

use std::fs::File;
use std::io;
use std::time::Instant;

use nix::mount::{MntFlags, umount2};

use super::UnmountScope;
use super::bounded_call::BoundedCalls;
use super::mountinfo::uncovered;
use super::namespaces::{in_namespaces, mountinfo};
use super::sysfs::Disk;
use super::usage::Proc;
use cleat_core::error::Result;

/// Looks at one namespace: each unmounts at least one of those that lie upon each other.
const ROUNDS_MAX: u32 = 256;

/// Unmounts `disk` lazily in the namespaces of `which`.
///
/// # Errors
/// `TimedOut` when some of it is under way at the deadline; what /proc gives.
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
        // A namespace that we may not enter keeps its mounts: they show as holders.
        tracing::warn!(%error, "a namespace keeps its mounts");
    }
    Ok(())
}

/// Unmounts lazily what the calling thread sees of the device, from the top down.
fn unmount_here(proc: &File, disk: &Disk) -> io::Result<()> {
    for _ in 0..ROUNDS_MAX {
        let text = mountinfo(proc)?;
        let mut progress = false;
        let mut refused = None;
        for mount in uncovered(&text).filter(|mount| mount.is_on(disk)) {
            match umount2(&mount.path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
                Ok(()) => progress = true,
                // It went with another one, or (EINVAL) is locked by a less privileged namespace.
                Err(error) => refused = Some(io::Error::from(error)),
            }
        }
        if !progress {
            return refused.map_or(Ok(()), Err);
        }
    }
    Ok(())
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
    fn a_device_that_is_mounted_nowhere_takes_no_thread_into_a_namespace() {
        let proc = Proc("/proc".into());
        let threads = BoundedCalls::new(8);
        let soon = Instant::now() + std::time::Duration::from_secs(10);
        let elsewhere = disk(0xf_ffff);
        let found = namespaces(&proc, &elsewhere, UnmountScope::All).unwrap();
        assert!(found.len() == 1 && found[0].own);
        unmount(&proc, &threads, &elsewhere, UnmountScope::All, soon).unwrap();
        unmount(&proc, &threads, &elsewhere, UnmountScope::None, Instant::now()).unwrap();
    }
}
