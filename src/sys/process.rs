//! Processes by descriptor: a pidfd always names the same process, while the kernel reuses pids.
//!
//! Invariants: a [`PidFd`] always names the one process that it was opened for; a child is started
//! with exactly the descriptors 0–2, its channel, and at most one that it only keeps open.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::time::Duration;

use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{SigHandler, Signal, signal};
use nix::unistd::{ForkResult, fork};
use rustix::process::{
    Pid, PidfdFlags, Resource, Rlimit, configure_io_flusher_behavior, getrlimit, pidfd_open,
    pidfd_send_signal, setrlimit,
};

/// A process, held by descriptor.
#[derive(Debug)]
pub struct PidFd(OwnedFd);

impl PidFd {
    /// Opens the process that has the number `pid` now.
    ///
    /// # Errors
    /// Returns `ESRCH` if no process has that number.
    pub fn open(pid: u32) -> io::Result<Self> {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))?;
        // Every pidfd is close-on-exec (pidfd_open(2)).
        Ok(Self(pidfd_open(pid, PidfdFlags::empty())?))
    }

    /// Kills the process with SIGKILL. Succeeds when the process has ended already.
    ///
    /// # Errors
    /// Returns `EPERM` if this process may not signal it.
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
    /// Returns `EMFILE` if this process has no descriptor left.
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
/// Returns `NotFound` if no process has that number; otherwise the error of the read from /proc.
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

/// Returns the inode number of this process's pid namespace.
///
/// # Errors
/// Returns an error if /proc is not mounted.
pub fn pid_namespace() -> io::Result<u64> {
    use std::os::unix::fs::MetadataExt;
    Ok(std::fs::metadata("/proc/self/ns/pid")?.ino())
}

/// Returns whether no process, zombies included, has this number in the pid namespace of this process.
/// Returns false if that is not known.
pub fn is_gone(pid: u32) -> bool {
    let Ok(pid) = libc::pid_t::try_from(pid) else { return true };
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), None) == Err(nix::Error::ESRCH)
}

/// Ends the process without running exit handlers. A thread of a C++ library that still waits for an
/// unresponsive cluster would use objects that the library's destructors free, and the process would end
/// by SIGABRT. Buffered output is lost, so callers flush it first (`cli/output.rs`).
pub fn exit_now(code: u8) -> ! {
    // SAFETY: `_exit` takes an integer and does not return.
    unsafe { libc::_exit(code.into()) }
}

/// Marks this thread, and every thread that it starts later, as part of the path by which dirty pages
/// reach storage: its memory allocations do not wait for dirty pages to be written
/// (PR_SET_IO_FLUSHER, prctl(2)).
///
/// # Errors
/// Returns `EPERM` without CAP_SYS_RESOURCE; `EINVAL` before Linux 5.6.
pub fn set_io_flusher() -> io::Result<()> {
    Ok(configure_io_flusher_behavior(true)?)
}

/// Makes the program that `command` starts an ordinary one: it does not inherit that this process is an I/O flusher
/// ([`set_io_flusher`]), and its private memory is limited only by the hard limit (see
/// `memory_limit::limit_data_softly`). A program that repairs a filesystem may need more memory than this process,
/// and must wait for write-back as others do.
///
/// If the kernel refuses, the program has the properties of this process.
pub fn make_ordinary(command: &mut Command) -> &mut Command {
    let prepare = || -> io::Result<()> {
        // Fails without CAP_SYS_RESOURCE, and then this process is no I/O flusher either.
        let _ = configure_io_flusher_behavior(false);
        let limit = getrlimit(Resource::Data);
        let _ = setrlimit(Resource::Data, Rlimit { current: limit.maximum, ..limit });
        Ok(())
    };
    // SAFETY: `prepare` makes only three system calls, allocates nothing and takes no lock, so it may run between
    // fork and exec of a process with threads.
    unsafe { command.pre_exec(prepare) }
}

/// Gives the calling thread a table of descriptors of its own, which has 0 to 2 and `kept` only. A thread that hangs in the
/// kernel then keeps no lock, socket or file of the process open after the end of the other threads. From here on, the thread
/// must use only `kept` and what it opens itself.
///
/// # Errors
/// Returns `ENOMEM` or `EMFILE`; `ENOSYS` before Linux 5.9. The thread may share the table of the process then.
pub fn keep_only(kept: &[BorrowedFd<'_>]) -> io::Result<()> {
    unshare(CloneFlags::CLONE_FILES)?;
    let numbers = kept.iter().filter_map(|kept| u32::try_from(kept.as_raw_fd()).ok());
    let mut numbers: Vec<u32> = numbers.filter(|number| *number > 2).collect();
    numbers.sort_unstable();
    let mut first = 3;
    for number in numbers {
        if number > first {
            close_range(first, number - 1)?;
        }
        first = number + 1;
    }
    close_range(first, u32::MAX)
}

fn close_range(first: u32, last: u32) -> io::Result<()> {
    // SAFETY: the system call takes integers only. The table is that of the calling thread alone, so the descriptors of
    // other threads stay open; the thread itself uses none of those that are closed.
    match unsafe { libc::syscall(libc::SYS_close_range, first, last, 0_u32) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Ignores a signal in this process and in its children.
///
/// # Errors
/// Returns `EINVAL` for signals that cannot be ignored.
pub fn ignore_signal(which: Signal) -> io::Result<()> {
    // SAFETY: SIG_IGN installs no handler, so no code of this program runs in signal context.
    unsafe { signal(which, SigHandler::SigIgn) }.map(drop).map_err(io::Error::from)
}

/// A process that does one thing after this process. Dropping it makes the process do that now, and waits for
/// it for [`JANITOR_TIMEOUT`] at most.
#[derive(Debug)]
pub struct Janitor(UnixStream);

/// How long a dropped [`Janitor`] may take.
pub const JANITOR_TIMEOUT: Duration = Duration::from_secs(2);

/// Starts a process that calls `work` as soon as this process has ended, however it ends, or has dropped the
/// result. A process that confines itself leaves to it what it can do no more. It has no descriptor of this
/// process open, and ignores SIGINT, SIGTERM and SIGHUP. Must be called while this process has one thread.
///
/// # Errors
/// Returns the errors of socketpair(2) and fork(2).
pub fn after_this_process(work: impl FnOnce()) -> io::Result<Janitor> {
    let (ours, theirs) = UnixStream::pair()?;
    ours.set_read_timeout(Some(JANITOR_TIMEOUT))?;
    let janitor = move |mut channel: UnixStream| {
        // Nothing is ever sent.
        while matches!(channel.read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::Interrupted)
        {
        }
        work();
    };
    beside_this_process(ours, theirs, janitor).map(Janitor)
}

/// Starts a process that calls `work` with its end of a pair of connected sockets, `theirs`, and ends when `work`
/// returns. Returns `ours`. The process has no other descriptor of this process open, and ignores SIGINT, SIGTERM and
/// SIGHUP, so `work` must return when the other end is closed. It has a copy of the memory of this process. Must be
/// called while this process has one thread.
///
/// # Errors
/// Returns the error of fork(2).
pub fn beside_this_process<E: AsRawFd>(ours: E, theirs: E, work: impl FnOnce(E)) -> io::Result<E> {
    // SAFETY: this process has one thread, so no lock is held in the child, and it may run any code.
    match unsafe { fork() }? {
        ForkResult::Parent { .. } => Ok(ours),
        ForkResult::Child => {
            for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
                let _ = ignore_signal(signal);
            }
            // Also where close_range is missing: `work` waits for the end of this channel.
            drop(ours);
            close_all_but(theirs.as_raw_fd());
            work(theirs);
            exit_now(0);
        }
    }
}

/// Closes every descriptor but `kept`, for a process that never returns to the owners of the others. The numbers 0 to 2
/// lead to /dev/null, so that no text reaches a descriptor that is opened later.
fn close_all_but(kept: RawFd) {
    let own = kept.cast_unsigned();
    let ranges = [(0, own.saturating_sub(1)), (own + 1, libc::c_uint::MAX)];
    for (first, last) in ranges.into_iter().filter(|(first, last)| first <= last && *last != own) {
        // SAFETY: close_range takes integers. The owners of these descriptors never run in this process, because
        // it ends by `exit_now`. ENOSYS before Linux 5.9 is harmless.
        unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
    }
    // The lowest free number is taken, so the third one is at least 2.
    for _ in 0..3 {
        match File::options().read(true).write(true).open("/dev/null") {
            Ok(null) if null.as_raw_fd() <= 2 => drop(null.into_raw_fd()),
            _ => return,
        }
    }
}

impl Drop for Janitor {
    fn drop(&mut self) {
        // If it takes too long, it still does its work later.
        let _ = self.0.shutdown(std::net::Shutdown::Write).and_then(|()| self.0.read(&mut [0]));
    }
}

/// Starts `command` in a new session. The child inherits `channel` as the descriptor `number`, `also` as the
/// next one, and no descriptor above.
///
/// # Errors
/// Returns an error if the process cannot be started.
pub fn spawn_with_channel(
    command: &mut Command,
    channel: &OwnedFd,
    number: RawFd,
    also: Option<&OwnedFd>,
) -> io::Result<Child> {
    let sources = [Some(channel.as_raw_fd()), also.map(AsRawFd::as_raw_fd)];
    let first_unused = if also.is_some() { number + 2 } else { number + 1 };
    let prepare = move || -> io::Result<()> {
        // Both are copied out of the way first: one may have the number that the other one gets.
        let mut copies = sources;
        for copy in copies.iter_mut().flatten() {
            *copy = duplicate(*copy, first_unused)?;
        }
        for (copy, target) in copies.into_iter().flatten().zip(number..) {
            // SAFETY: dup2 on two integers; async-signal-safe, as the child of a fork demands.
            if unsafe { libc::dup2(copy, target) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        // Async-signal-safe. It fails only for a group leader, which a new child is not.
        nix::unistd::setsid()?;
        // No descriptor above may leak into the worker, not even one without O_CLOEXEC. They are marked
        // close-on-exec rather than closed, because the standard library's own pipe must stay open until
        // exec.
        // SAFETY: close_range takes integers. ENOSYS before Linux 5.9 is harmless.
        unsafe {
            libc::syscall(
                libc::SYS_close_range,
                first_unused,
                libc::c_uint::MAX,
                libc::CLOSE_RANGE_CLOEXEC,
            )
        };
        Ok(())
    };
    // SAFETY: `prepare` makes only async-signal-safe system calls, allocates nothing and takes no
    // lock, so it may run between fork and exec of a process with threads.
    unsafe { command.pre_exec(prepare) };
    command.spawn()
}

/// Copies a descriptor to a number from `least` on, close-on-exec. Async-signal-safe.
fn duplicate(source: RawFd, least: RawFd) -> io::Result<RawFd> {
    // SAFETY: fcntl on integers; the caller owns the new descriptor.
    match unsafe { libc::fcntl(source, libc::F_DUPFD_CLOEXEC, least) } {
        copy if copy < 0 => Err(io::Error::last_os_error()),
        copy => Ok(copy),
    }
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
    fn the_pidfd_of_a_killed_process_is_readable() {
        let (_ours, theirs) = UnixStream::pair().unwrap();
        let mut command = Command::new("/bin/sleep");
        command.arg("60");
        let mut child = spawn_with_channel(&mut command, &theirs.into(), 3, None).unwrap();
        let pidfd = PidFd::open(child.id()).unwrap();
        assert!(!ended(&pidfd, 0));
        pidfd.kill().unwrap();
        assert!(ended(&pidfd, 5000));
        child.wait().unwrap();
        pidfd.kill().unwrap();
        assert!(PidFd::open(u32::MAX).is_err());
    }

    /// Returns the descriptors of a child that inherits a channel and `also`.
    fn descriptors_of_a_child(also: Option<&OwnedFd>) -> String {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let theirs: OwnedFd = theirs.into();
        let mut command = Command::new("/bin/sh");
        // A pipe in the script would briefly add descriptors to the shell, so the list is a `for` loop.
        let numbers: Vec<_> = (0..256).map(|number: u32| number.to_string()).collect();
        let test = "[ -e /proc/$$/fd/$n ] && printf \"$n \" >&3";
        command.args(["-c", &format!("for n in {}; do {test}; done", numbers.join(" "))]);
        let mut child = spawn_with_channel(&mut command, &theirs, 3, also).unwrap();
        drop(theirs);
        child.wait().unwrap();
        let mut seen = String::new();
        Read::read_to_string(&mut { ours }, &mut seen).unwrap();
        seen.trim().to_owned()
    }

    #[test]
    fn a_child_inherits_what_is_passed_and_no_descriptor_above() {
        // dash opens a script file as descriptor 10; with -c there is no such file.
        assert_eq!(descriptors_of_a_child(None), "0 1 2 3");
        let (reader, _writer) = nix::unistd::pipe().unwrap();
        assert_eq!(descriptors_of_a_child(Some(&reader)), "0 1 2 3 4");
    }

    /// Set in the process that runs only this test: it changes properties of its process.
    const ALONE: &str = "CLEAT_TEST_ALONE";

    #[test]
    fn an_ordinary_program_inherits_neither_the_memory_limit_nor_the_io_flusher() {
        if std::env::var_os(ALONE).is_none() {
            let mut test = Command::new(std::env::current_exe().unwrap());
            let name = "process::tests::an_ordinary_program_inherits_neither_the_memory_limit_nor_the_io_flusher";
            let output = test.args(["--exact", name]).env(ALONE, "1").output().unwrap();
            let printed = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && printed.contains("1 passed"), "{printed}");
            return;
        }
        let limit = 3 << 30;
        crate::memory_limit::limit_data_softly(limit).unwrap();
        let is_flusher = set_io_flusher().is_ok();
        let started = |prepare: fn(&mut Command) -> &mut Command| {
            let mut command = Command::new("/bin/cat");
            command.args(["/proc/self/stat", "/proc/self/limits"]);
            let output = prepare(&mut command).output().unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            let flags = text.split_whitespace().nth(8).unwrap().parse::<u32>().unwrap();
            // PF_MEMALLOC_NOIO and PF_LOCAL_THROTTLE of linux/sched.h.
            (flags & 0x0018_0000 != 0, text.contains(&format!(" {limit} ")))
        };
        assert_eq!(started(|command| command), (is_flusher, true));
        assert_eq!(started(make_ordinary), (false, false));
    }
}
