//! Processes by descriptor: a pidfd cannot come to mean another process, a number can.
//!
//! Invariants: a [`PidFd`] always names the one process that it was opened for; a child is started
//! with exactly the descriptors 0–2 and its channel.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use nix::sys::signal::{SigHandler, Signal, signal};
use rustix::process::{
    Pid, PidfdFlags, configure_io_flusher_behavior, pidfd_open, pidfd_send_signal,
};

/// A process, held by descriptor.
#[derive(Debug)]
pub struct PidFd(OwnedFd);

impl PidFd {
    /// Opens the process that has this number now.
    ///
    /// # Errors
    /// `ESRCH` when no process has it.
    pub fn open(pid: u32) -> io::Result<Self> {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))?;
        // Close-on-exec, as every pidfd (pidfd_open(2)).
        Ok(Self(pidfd_open(pid, PidfdFlags::empty())?))
    }

    /// Ends the process with SIGKILL. A process that has ended already is success.
    ///
    /// # Errors
    /// `EPERM` when this process may not end it.
    pub fn kill(&self) -> io::Result<()> {
        match pidfd_send_signal(&self.0, rustix::process::Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the descriptor. It becomes readable once every thread of the process has ended.
    pub fn into_descriptor(self) -> OwnedFd {
        self.0
    }

    /// Returns another descriptor of the same process.
    ///
    /// # Errors
    /// `EMFILE` when this process has no descriptor left.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self(self.0.try_clone()?))
    }
}

impl AsFd for PidFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Returns when the process `pid` started, in clock ticks since boot: field 22 of /proc/PID/stat
/// (proc_pid_stat(5)). Together with the pid it names one process of one boot.
///
/// # Errors
/// `NotFound` when no process has that number; what /proc gives otherwise.
pub fn started_ticks(pid: u32) -> io::Result<u64> {
    let stat = std::fs::read(format!("/proc/{pid}/stat"))?;
    parse_started_ticks(&stat).ok_or_else(|| io::Error::other("cannot read /proc/pid/stat"))
}

/// The second field, the command, is in parentheses and may hold any bytes: other parentheses, and
/// text that is not UTF-8. So the fields are counted from the last parenthesis.
fn parse_started_ticks(stat: &[u8]) -> Option<u64> {
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    let fields = std::str::from_utf8(&stat[end + 1..]).ok()?;
    fields.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// The pid namespace of this process.
///
/// # Errors
/// When /proc is not there.
pub fn pid_namespace() -> io::Result<u64> {
    use std::os::unix::fs::MetadataExt;
    Ok(std::fs::metadata("/proc/self/ns/pid")?.ino())
}

/// Whether no process, and no zombie, has this number in our pid namespace. What may not be told is no.
pub fn is_gone(pid: u32) -> bool {
    let Ok(pid) = libc::pid_t::try_from(pid) else { return true };
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), None) == Err(nix::Error::ESRCH)
}

/// Ends the process, and runs nothing of what is registered for that moment: the destructors of C++
/// libraries take from under their own threads what those still use, where one was left alone because a
/// cluster does not answer, and the process would end by SIGABRT. What is printed is flushed each time
/// (`cli/output.rs`).
pub fn exit_now(code: u8) -> ! {
    // SAFETY: it takes an integer and does not return.
    unsafe { libc::_exit(code.into()) }
}

/// Marks this thread, and every thread that it starts later, as part of the path by which dirty pages
/// reach storage: its memory allocations do not wait for dirty pages to be written
/// (PR_SET_IO_FLUSHER, prctl(2)).
///
/// # Errors
/// `EPERM` without CAP_SYS_RESOURCE; `EINVAL` before Linux 5.6.
pub fn set_io_flusher() -> io::Result<()> {
    Ok(configure_io_flusher_behavior(true)?)
}

/// Makes a signal do nothing, here and in children.
///
/// # Errors
/// EINVAL for signals that cannot be ignored.
pub fn ignore_signal(which: Signal) -> io::Result<()> {
    // SAFETY: SIG_IGN installs no handler, so no code of ours runs in signal context.
    unsafe { signal(which, SigHandler::SigIgn) }.map(drop).map_err(io::Error::from)
}

/// Starts `command` in a session of its own, with `channel` as the descriptor `number` and none
/// other above it.
///
/// # Errors
/// When the process cannot be started.
pub fn spawn_with_channel(
    command: &mut Command,
    channel: &OwnedFd,
    number: RawFd,
) -> io::Result<Child> {
    let source = channel.as_raw_fd();
    let prepare = move || {
        if source == number {
            // SAFETY: fcntl on an integer; async-signal-safe, as the child of a fork demands.
            if unsafe { libc::fcntl(source, libc::F_SETFD, 0) } < 0 {
                return Err(io::Error::last_os_error());
            }
        // SAFETY: dup2 on two integers; async-signal-safe.
        } else if unsafe { libc::dup2(source, number) } < 0 {
            return Err(io::Error::last_os_error());
        }
        // Async-signal-safe. Fails only for a group leader, which a process fresh from fork is not.
        nix::unistd::setsid()?;
        // Everything above must not leak into the worker, whoever forgot O_CLOEXEC. Marked rather
        // than closed: the standard library's own pipe must live until exec.
        // SAFETY: close_range takes integers. ENOSYS before Linux 5.9 is harmless.
        unsafe {
            libc::syscall(
                libc::SYS_close_range,
                number + 1,
                libc::c_uint::MAX,
                libc::CLOSE_RANGE_CLOEXEC,
            )
        };
        Ok(())
    };
    // SAFETY: `prepare` makes only async-signal-safe system calls, allocates nothing and takes no
    // lock, so that it may run between fork and exec of a process with threads.
    unsafe { command.pre_exec(prepare) };
    command.spawn()
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    fn ended(pidfd: &PidFd, timeout_ms: u16) -> bool {
        let mut set = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
        poll(&mut set, PollTimeout::from(timeout_ms)).unwrap() == 1
    }

    #[test]
    fn the_start_time_follows_a_command_of_any_bytes() {
        let fields: Vec<String> = (3..=52).map(|field: u32| field.to_string()).collect();
        let stat = [b"7 (a) b\xff (c) ", fields.join(" ").as_bytes(), b"\n"].concat();
        assert_eq!(parse_started_ticks(&stat), Some(22));
        assert_eq!(parse_started_ticks(b"7 (a) S 1"), None);
        assert!(started_ticks(std::process::id()).unwrap() > 0);
    }

    #[test]
    fn a_killed_process_shows_on_its_descriptor() {
        let (_ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut command = Command::new("/bin/sleep");
        command.arg("60");
        let mut child = spawn_with_channel(&mut command, &theirs.into(), 3).unwrap();
        let pidfd = PidFd::open(child.id()).unwrap();
        assert!(!ended(&pidfd, 0));
        pidfd.kill().unwrap();
        assert!(ended(&pidfd, 5000));
        child.wait().unwrap();
        pidfd.kill().unwrap();
        assert!(PidFd::open(u32::MAX).is_err());
    }

    #[test]
    fn the_child_sees_its_channel_as_the_number_and_nothing_above() {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let theirs: OwnedFd = theirs.into();
        let mut command = Command::new("/bin/sh");
        // No pipe: its ends would be the shell's as well for a moment.
        let numbers: Vec<_> = (0..256).map(|number: u32| number.to_string()).collect();
        let look = "[ -e /proc/$$/fd/$n ] && printf \"$n \" >&3";
        command.args(["-c", &format!("for n in {}; do {look}; done", numbers.join(" "))]);
        let mut child = spawn_with_channel(&mut command, &theirs, 3).unwrap();
        drop(theirs);
        child.wait().unwrap();
        let mut seen = String::new();
        io::Read::read_to_string(&mut { ours }, &mut seen).unwrap();
        // dash keeps its script, if any, from 10 on; with -c there is none.
        assert_eq!(seen.trim(), "0 1 2 3");
    }
}
