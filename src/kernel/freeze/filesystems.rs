//! Finds the file systems on a disk, and opens each by one of its mounts.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

use crate::mountinfo::{parse_mountinfo, uncovered};
use crate::namespaces::mountinfo;
use crate::sysfs::Disk;
use cleat_sys::descriptor::DeviceNumber;

/// A file system's device number, and an open directory on it or why it could not be opened.
pub(super) type Opened = (DeviceNumber, io::Result<File>);

/// Returns the file systems on `disk` that the calling thread sees, each once. `proc` is /proc.
pub(super) fn open_here(proc: &File, disk: &Disk) -> io::Result<Vec<Opened>> {
    let text = mountinfo(proc)?;
    let (mut found, mut done): (Vec<Opened>, BTreeSet<(u32, u32)>) = (Vec::new(), BTreeSet::new());
    for mount in parse_mountinfo(&text).filter(|mount| mount.is_on(disk)) {
        if !found.iter().any(|(number, _)| *number == mount.number) {
            let covered =
                io::Error::other("every mount of the file system is covered by another mount");
            found.push((mount.number, Err(covered)));
        }
    }
    for (_, mount) in uncovered(&text).filter(|(_, mount)| mount.is_on(disk)) {
        let key = (mount.number.major, mount.number.minor);
        if done.contains(&key) {
            continue;
        }
        let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW;
        let opened = OpenOptions::new().read(true).custom_flags(flags).open(&mount.path);
        let opened = opened.and_then(|file| {
            let device = file.metadata()?.dev();
            // A subvolume of btrfs (major 0) has a number of its own.
            match mount.number.major == 0
                || nix::sys::stat::major(device) == u64::from(key.0)
                    && nix::sys::stat::minor(device) == u64::from(key.1)
            {
                true => Ok(file),
                false => Err(io::Error::other("another file system is mounted at its path")),
            }
        });
        if opened.is_ok() {
            done.insert(key);
        }
        if let Some((_, slot)) = found.iter_mut().find(|(number, _)| *number == mount.number) {
            *slot = opened;
        }
    }
    Ok(found)
}
