//! Who may write: one opener at a time, and the name of the other one where it can be found.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;
use std::time::Duration;

use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::stat::{major, minor};

use cleat_core::error::{Error, ErrorKind, Result};

/// How often, and how far apart, a busy file is tried again. A process that was killed with requests
/// in flight lets go of its files a moment after it is gone, when its ring has been torn down.
const ATTEMPTS: u32 = 20;
const PAUSE: Duration = Duration::from_millis(50);

/// Processes that are looked at to find a holder; there is no bound on how many a machine has.
const MAX_PROCESSES: usize = 10_000;

/// Claims the whole file for writing.
pub(super) fn lock(file: &File, path: &str) -> Result<()> {
    // An open-file-description lock (fcntl(2)): it lasts as long as the description, so neither a
    // fork nor closing another descriptor of the file loses it.
    #[allow(clippy::cast_possible_truncation, reason = "small constants, wider in C than needed")]
    let whole = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    let attempt = || fcntl(file.as_fd(), FcntlArg::F_OFD_SETLK(&whole)).map_err(io::Error::from);
    let Err(error) = patiently(attempt, |e| e.kind() == io::ErrorKind::WouldBlock) else {
        return Ok(());
    };
    if error.kind() != io::ErrorKind::WouldBlock {
        return Err(Error::from_io(format!("cannot lock {path}"), error)
            .with_repair("put the file on a file system that supports locks"));
    }
    let holder = lock_holder(file).unwrap_or_else(|| "another process".to_owned());
    Err(Error::new(ErrorKind::InUse, format!("{path} is being written by {holder}"))
        .with_repair("unmap it there first, or map it read-only here"))
}

/// The error for a block device that O_EXCL found busy.
pub(super) fn device_in_use(path: &Path) -> Error {
    let users = device_users(path).unwrap_or_default();
    let by = if users.is_empty() { "another user".to_owned() } else { users.join(", ") };
    Error::new(ErrorKind::InUse, format!("{} is held by {by}", path.display()))
        .with_repair("let go of it there (umount, swapoff, dmsetup remove), or map it read-only")
}

/// Calls `attempt` until it gives anything but `busy`, at most for about a second.
pub(super) fn patiently<T>(
    attempt: impl Fn() -> io::Result<T>,
    busy: impl Fn(&io::Error) -> bool,
) -> io::Result<T> {
    for _ in 1..ATTEMPTS {
        match attempt() {
            Err(error) if busy(&error) => thread::sleep(PAUSE),
            other => return other,
        }
    }
    attempt()
}

/// The process that has a lock on `file`, as /proc/PID/fdinfo shows it. Needs to be allowed to look.
pub(super) fn lock_holder(file: &File) -> Option<String> {
    let ours = file.metadata().ok()?;
    let processes = fs::read_dir("/proc").ok()?.flatten().take(MAX_PROCESSES);
    for process in processes {
        let pid = process.file_name();
        let Some(pid) = pid.to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
        for descriptor in descriptors.flatten() {
            let Ok(theirs) = fs::metadata(descriptor.path()) else { continue };
            if (theirs.dev(), theirs.ino()) != (ours.dev(), ours.ino()) {
                continue;
            }
            let number = descriptor.file_name();
            let info = format!("/proc/{pid}/fdinfo/{}", number.display());
            if fs::read_to_string(info).is_ok_and(|info| info.contains("\nlock:")) {
                return Some(describe(pid));
            }
        }
    }
    None
}

fn describe(pid: u32) -> String {
    let command = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    match command.trim_end() {
        "" => format!("process {pid}"),
        command => format!("process {pid} ({command})"),
    }
}

/// Mounts of a block device in our namespace, and devices stacked on it.
fn device_users(path: &Path) -> io::Result<Vec<String>> {
    let device = fs::metadata(path)?.rdev();
    let number = format!("{}:{}", major(device), minor(device));
    let mut users = Vec::new();
    // proc_pid_mountinfo(5): the third field is major:minor, the fifth the mount point.
    for line in fs::read_to_string("/proc/self/mountinfo")?.lines() {
        let mut fields = line.split(' ').skip(2);
        if fields.next() == Some(&number) {
            users.extend(fields.nth(1).map(|point| format!("a mount at {point}")));
        }
    }
    if let Ok(holders) = fs::read_dir(format!("/sys/dev/block/{number}/holders")) {
        users.extend(holders.flatten().map(|h| format!("the device {}", h.file_name().display())));
    }
    users.truncate(8);
    Ok(users)
}
