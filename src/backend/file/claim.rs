//! Claims of files and devices: one writer at a time, and the name of the present holder, if it can be found.

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

/// The number of attempts to claim a busy file. A process that was killed with requests in flight releases
/// its files a moment after its end, when the kernel has destroyed its ring.
const ATTEMPTS: u32 = 20;

/// The time between two attempts.
const PAUSE: Duration = Duration::from_millis(50);

/// The maximum number of processes that a search for a holder examines.
const MAX_PROCESSES: usize = 10_000;

/// Claims the whole file for writing. Blocks for about a second while the file is busy.
///
/// # Errors
/// Returns `InUse` if another process holds the lock, and the kernel's error otherwise.
pub(super) fn lock(file: &File, path: &str) -> Result<()> {
    lock_as(libc::F_WRLCK, file, path)
}

/// Checks that `path` still leads to the file, which was locked after it was opened. A removal or a replacement takes the
/// lock first, too.
///
/// # Errors
/// Returns `Aborted` if it leads to another file or to none, and the kernel's error otherwise.
pub(super) fn check_name(file: &File, path: &Path) -> Result<()> {
    let shown = path.display();
    let failed = |error| Error::from_io(format!("cannot read the properties of {shown}"), error);
    let opened = file.metadata().map_err(failed)?;
    let is_it = match fs::metadata(path) {
        Ok(found) => (opened.dev(), opened.ino()) == (found.dev(), found.ino()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
        Err(error) => return Err(failed(error)),
    };
    if is_it {
        return Ok(());
    }
    let message = format!("{shown} was removed or replaced while it was opened");
    Err(Error::new(ErrorKind::Aborted, message).with_repair("repeat the command"))
}

/// Keeps writers away from the whole file until the file is closed, and not other readers. The file must be
/// open for reading. Blocks for about a second while the file is busy.
///
/// # Errors
/// Returns `InUse` if another process may write to the file, and the kernel's error otherwise.
pub(super) fn lock_out_writers(file: &File, path: &str) -> Result<()> {
    lock_as(libc::F_RDLCK, file, path)
}

fn lock_as(kind: libc::c_int, file: &File, path: &str) -> Result<()> {
    // An open-file-description lock (fcntl(2)): it exists as long as the description, so that neither a
    // fork nor the close of another descriptor of the file releases it.
    #[allow(clippy::cast_possible_truncation, reason = "small constants, wider in C than needed")]
    let whole = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    let attempt = || fcntl(file.as_fd(), FcntlArg::F_OFD_SETLK(&whole)).map_err(io::Error::from);
    let Err(error) = retry_while_busy(attempt, |e| e.kind() == io::ErrorKind::WouldBlock) else {
        return Ok(());
    };
    if error.kind() != io::ErrorKind::WouldBlock {
        return Err(Error::from_io(format!("cannot lock {path}"), error)
            .with_repair("move the file to a file system that supports locks"));
    }
    let holder = lock_holder(file).unwrap_or_else(|| "another process".to_owned());
    Err(Error::new(ErrorKind::InUse, format!("{path} is being written by {holder}"))
        .with_repair("unmap it there first, or map it read-only here"))
}

/// Returns the error for a block device that O_EXCL reports as busy.
pub(super) fn device_in_use(path: &Path) -> Error {
    let users = device_users(path).unwrap_or_default();
    let by = if users.is_empty() { "another user".to_owned() } else { users.join(", ") };
    Error::new(ErrorKind::InUse, format!("{} is held by {by}", path.display()))
        .with_repair("release it there (umount, swapoff, dmsetup remove), or map it read-only")
}

/// Calls `attempt` until it returns anything but a `busy` error, for about a second at most.
#[allow(
    clippy::disallowed_methods,
    reason = "waits for another process, while no request is served"
)]
pub(super) fn retry_while_busy<T>(
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

/// Returns the process that has a lock on `file`, from `/proc/PID/fdinfo`; `None` if there is none, or if
/// this process may not read the files of the holder.
pub(super) fn lock_holder(file: &File) -> Option<String> {
    let wanted = file.metadata().ok()?;
    let processes = fs::read_dir("/proc").ok()?.flatten().take(MAX_PROCESSES);
    for process in processes {
        let pid = process.file_name();
        let Some(pid) = pid.to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
        for descriptor in descriptors.flatten() {
            let Ok(found) = fs::metadata(descriptor.path()) else { continue };
            if (found.dev(), found.ino()) != (wanted.dev(), wanted.ino()) {
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

/// Returns the mounts of a block device in this mount namespace, and the devices that are stacked on it.
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
