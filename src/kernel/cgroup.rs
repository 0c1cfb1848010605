//! The control group that workers are put into, so that they outlive the supervisor's own: whoever
//! ends a pod ends everything in the pod's group (`cgroup.kill`).
//!
//! A path that an administrator names; of it is checked, on the descriptor that is used, that it is a
//! group of cgroup v2, and nothing else.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sched::{CloneFlags, setns};
use nix::sys::stat::Mode;
use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, fstatfs};

use cleat_core::error::{Error, ErrorKind, Result};

/// Lists the processes of a group; a number that is written to it moves that process there.
const MEMBERS: &str = "cgroup.procs";

/// Whether processes could be put into `group`, which need not exist, and would outlive this one's.
/// Changes nothing.
///
/// # Errors
/// Why not.
pub fn examine(group: &Path) -> Result<()> {
    let there = if group.exists() { group } else { group.parent().unwrap_or(group) };
    let seen = open(there).and_then(|directory| members(&directory).map(drop));
    seen.map_err(|error| unusable(group, error))?;
    if is_within_ours(there) {
        let message = format!("{} ends with the group that this process is in", group.display());
        return Err(Error::new(ErrorKind::InvalidArgument, message).with_repair(NAME_ANOTHER));
    }
    Ok(())
}

/// Puts a process into `group`, which is made where only it is missing.
///
/// # Errors
/// When it stays where it is.
pub fn put(group: &Path, pid: u32) -> Result<()> {
    // On a thread that is thrown away: one that has left the process's own namespace must never do
    // anything else.
    let attempt = || {
        // Counted is the namespace of who opens the file, and a container's own may not reach beyond
        // itself (cgroup_procs_write_permission). Where it stays the own one, the write will tell.
        let _ = File::open("/proc/1/ns/cgroup")
            .and_then(|initial| Ok(setns(initial, CloneFlags::CLONE_NEWCGROUP)?));
        let mut members = members(&open_or_make(group)?)?;
        members.write_all(pid.to_string().as_bytes())
    };
    let moved = std::thread::scope(|scope| scope.spawn(attempt).join());
    let moved = moved.unwrap_or_else(|_| Err(io::Error::other("the attempt panicked")));
    moved.map_err(|error| unusable(group, error))
}

fn open_or_make(group: &Path) -> io::Result<File> {
    let parent = match (open(group), group.parent()) {
        (Err(error), Some(parent)) if error.kind() == io::ErrorKind::NotFound => parent,
        (opened, _) => return opened,
    };
    open(parent)?;
    match fs::create_dir(group) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => open(group),
    }
}

/// A group's directory, once it is known to be one.
fn open(group: &Path) -> io::Result<File> {
    let directory = File::options().read(true).custom_flags(libc::O_DIRECTORY).open(group)?;
    if fstatfs(&directory)?.filesystem_type() == CGROUP2_SUPER_MAGIC {
        return Ok(directory);
    }
    Err(io::Error::new(io::ErrorKind::Unsupported, "it is not of cgroup v2"))
}

fn members(directory: &impl AsFd) -> io::Result<File> {
    Ok(openat(directory, MEMBERS, OFlag::O_WRONLY | OFlag::O_CLOEXEC, Mode::empty())?.into())
}

/// Whether a group is, or lies in, the one that this process is in. Not where that is the root, which
/// nobody can end.
fn is_within_ours(group: &Path) -> bool {
    let own = std::process::id().to_string();
    let group = group.canonicalize().unwrap_or_else(|_| group.to_owned());
    group.ancestors().take_while(|group| open(group).is_ok()).any(|group| {
        // The root alone has no type.
        let members = fs::read_to_string(group.join(MEMBERS)).unwrap_or_default();
        group.join("cgroup.type").exists() && members.lines().any(|pid| pid == own)
    })
}

const NAME_ANOTHER: &str = "name one below the top of the host's hierarchy in workers.cgroup, such as \
                            /sys/fs/cgroup/cleat-workers; in a pod, mount the host's /sys/fs/cgroup";

fn unusable(group: &Path, error: io::Error) -> Error {
    let repair = match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::EBUSY) => "it passes controllers on to groups below it: name another",
        Some(Errno::EACCES | Errno::EPERM | Errno::EROFS) => {
            "run it as root; in a pod, mount the host's /sys/fs/cgroup writable"
        }
        Some(Errno::ENOENT) => {
            "make the group above it; in a pod, mount the host's /sys/fs/cgroup and set hostPID: true"
        }
        _ => NAME_ANOTHER,
    };
    let message = format!("workers cannot be put into the control group {}", group.display());
    Error::from_io(message, error).with_repair(repair)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_control_group_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let group = directory.path().join("group");
        let pid = std::process::id();
        for error in [examine(&group), put(&group, pid)].map(Result::unwrap_err) {
            assert!(error.report().contains("not of cgroup v2"), "{}", error.report());
            assert!(error.repair().is_some());
        }
        assert!(!group.exists());
        fs::write(directory.path().join(MEMBERS), "").unwrap();
        put(directory.path(), pid).unwrap_err();
        assert_eq!(fs::read(directory.path().join(MEMBERS)).unwrap(), b"");
        let missing = examine(&group.join("below")).unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
    }
}
