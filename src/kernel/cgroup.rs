//! The control group for workers, so that they outlive the supervisor's own group: when a pod ends, the
//! container runtime kills every process in the pod's group (`cgroup.kill`).
//!
//! The administrator configures the path. This module checks, on the descriptor that it then uses, only that
//! the path is a group of cgroup v2.

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
use cleat_sys::descriptor::set_attribute;

/// The file with the processes of a group. A process moves to the group when its pid is written there.
const MEMBERS: &str = "cgroup.procs";

/// Checks that processes can be moved into `group`, and outlive the group of this process there. The group
/// need not exist yet. Changes nothing.
///
/// # Errors
/// Returns the reason, with a repair, if it is not possible.
pub fn check(group: &Path) -> Result<()> {
    let there = if group.exists() { group } else { group.parent().unwrap_or(group) };
    let seen = open(there).and_then(|directory| members(&directory).map(drop));
    seen.map_err(|error| unusable(group, error))?;
    if is_within_ours(there) {
        let message = format!(
            "{} is inside the control group of this process and ends with it",
            group.display()
        );
        return Err(Error::new(ErrorKind::InvalidArgument, message).with_repair(NAME_ANOTHER));
    }
    Ok(())
}

/// Moves a process into `group`, which is created if its parent exists.
///
/// # Errors
/// Returns an error if the process stays in its group; the error has a repair.
pub fn move_process(group: &Path, pid: u32) -> Result<()> {
    // On a separate thread: a thread that has left the process's own namespace must do nothing else.
    let attempt = || {
        // The kernel checks the cgroup namespace of the process that opened the file, and a container's
        // own namespace does not allow groups outside of it (cgroup_procs_write_permission). If the
        // thread cannot change its namespace, the write may fail.
        let _ = File::open("/proc/1/ns/cgroup")
            .and_then(|initial| Ok(setns(initial, CloneFlags::CLONE_NEWCGROUP)?));
        let directory = open_or_make(group)?;
        configure(&directory);
        let mut members = members(&directory)?;
        members.write_all(pid.to_string().as_bytes())
    };
    let moved = std::thread::scope(|scope| scope.spawn(attempt).join());
    let moved = moved.unwrap_or_else(|_| Err(io::Error::other("the thread panicked")));
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

/// Sets the properties of a group of workers that the unit sets under systemd. A kernel or a systemd without
/// support for one of them is no error.
fn configure(group: &File) {
    // Workers are not swapped out. The file exists if the parent group has enabled the memory controller.
    let flags = OFlag::O_WRONLY | OFlag::O_CLOEXEC;
    if let Ok(file) = openat(group, "memory.swap.max", flags, Mode::empty()) {
        let _ = File::from(file).write_all(b"0");
    }
    // At the end of a shutdown systemd (255 and later) kills no process in a group with this attribute, so that
    // what is left mounted can be unmounted (SurviveFinalKillSignal= in systemd.unit(5)).
    let _ = set_attribute(group, "user.survive_final_kill_signal", b"1");
}

/// Opens the directory of a group, and checks that it is one.
fn open(group: &Path) -> io::Result<File> {
    let directory = File::options().read(true).custom_flags(libc::O_DIRECTORY).open(group)?;
    if fstatfs(&directory)?.filesystem_type() == CGROUP2_SUPER_MAGIC {
        return Ok(directory);
    }
    Err(io::Error::new(io::ErrorKind::Unsupported, "not a group of cgroup v2"))
}

fn members(directory: &impl AsFd) -> io::Result<File> {
    Ok(openat(directory, MEMBERS, OFlag::O_WRONLY | OFlag::O_CLOEXEC, Mode::empty())?.into())
}

/// Returns whether a group is the group of this process, or inside it. False if that is the root group, which
/// cannot be killed.
fn is_within_ours(group: &Path) -> bool {
    let own = std::process::id().to_string();
    let group = group.canonicalize().unwrap_or_else(|_| group.to_owned());
    group.ancestors().take_while(|group| open(group).is_ok()).any(|group| {
        // Only the root group has no type.
        let members = fs::read_to_string(group.join(MEMBERS)).unwrap_or_default();
        group.join("cgroup.type").exists() && members.lines().any(|pid| pid == own)
    })
}

const NAME_ANOTHER: &str = "set workers.cgroup to a group below the host's root group, such as \
                            /sys/fs/cgroup/cleat-workers; in a pod, mount the host's /sys/fs/cgroup";

fn unusable(group: &Path, error: io::Error) -> Error {
    let repair = match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::EBUSY) => {
            "it has controllers enabled for the groups below it: set workers.cgroup to another group"
        }
        Some(Errno::EACCES | Errno::EPERM | Errno::EROFS) => {
            "run cleat node as root; in a pod, mount the host's /sys/fs/cgroup writable"
        }
        Some(Errno::ENOENT) => {
            "create its parent group; in a pod, mount the host's /sys/fs/cgroup and set hostPID: true"
        }
        _ => NAME_ANOTHER,
    };
    let message = format!("cannot move workers into the control group {}", group.display());
    Error::from_io(message, error).with_repair(repair)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_directories_are_not_changed() {
        let directory = tempfile::tempdir().unwrap();
        let group = directory.path().join("group");
        let pid = std::process::id();
        for error in [check(&group), move_process(&group, pid)].map(Result::unwrap_err) {
            assert!(error.report().contains("not a group of cgroup v2"), "{}", error.report());
            assert!(error.repair().is_some());
        }
        assert!(!group.exists());
        fs::write(directory.path().join(MEMBERS), "").unwrap();
        move_process(directory.path(), pid).unwrap_err();
        assert_eq!(fs::read(directory.path().join(MEMBERS)).unwrap(), b"");
        let missing = check(&group.join("below")).unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
    }
}
