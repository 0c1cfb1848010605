//! Worker processes as the supervisor holds them: started, found again, watched, ended.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use nix::errno::Errno;
use nix::sys::signal::Signal;
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};

use crate::planner::WorkerId;
use cleat_core::error::{Error, Result};
use cleat_kernel::cgroup;
use cleat_sys::process::{PidFd, spawn_with_channel, started_ticks};
use cleat_worker::protocol::CHANNEL_FD;
use cleat_worker::version::binary_id;

/// A worker process, whoever its parent is.
pub struct Process {
    /// Which.
    pub id: WorkerId,
    /// Becomes readable once no thread of the process is left.
    pub exit: OwnedFd,
    /// Ends and reaps it.
    pub handle: Box<dyn Handle>,
}

/// What can be done to a process.
pub trait Handle: Send + Sync {
    /// Ends it with SIGKILL.
    ///
    /// # Errors
    /// When it is not ours to end.
    fn kill(&self) -> io::Result<()>;

    /// Takes its exit status, so that it does not stay a zombie. Not an error when it is not a
    /// child of ours. Says how it ended, if known.
    fn reap(&self) -> Option<String>;
}

/// Starts and finds worker processes. Tests put threads in their place.
pub trait Launcher: Send + Sync {
    /// Starts a worker whose end of the channel is `channel`. It waits there for its first message,
    /// and exits when the channel ends before.
    ///
    /// # Errors
    /// When no process can be started.
    fn launch(&self, channel: OwnedFd) -> Result<Process>;

    /// The process that was started under this id; `None` when its end is proved.
    ///
    /// # Errors
    /// When it cannot be told.
    fn find(&self, id: WorkerId) -> Result<Option<Process>>;

    /// Of the executable that new workers run, see `worker::version::binary_id`. Empty: not known.
    fn binary(&self) -> String {
        String::new()
    }

    /// The process that has this number now; `None` where there is none, or they have no numbers.
    ///
    /// # Errors
    /// When it cannot be told.
    fn of_number(&self, pid: u32) -> Result<Option<Process>> {
        let _ = pid;
        Ok(None)
    }
}

/// Real processes: this executable as `cleat worker`.
#[derive(Debug)]
pub struct Processes {
    executable: PathBuf,
    environment: Vec<(OsString, OsString)>,
    cgroup: Option<PathBuf>,
}

impl Processes {
    /// Workers of this very executable, even if its file has been replaced meanwhile.
    pub fn of_this_executable() -> Self {
        Self::of(PathBuf::from("/proc/self/exe"))
    }

    /// Workers of another executable.
    pub fn of(executable: PathBuf) -> Self {
        Self { executable, environment: Vec::new(), cgroup: None }
    }

    /// Gives every worker a variable more.
    #[must_use]
    pub fn with_variable(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// Puts every worker into a control group, see [`cgroup`].
    #[must_use]
    pub fn in_cgroup(mut self, group: Option<PathBuf>) -> Self {
        self.cgroup = group;
        self
    }
}

impl Launcher for Processes {
    fn launch(&self, channel: OwnedFd) -> Result<Process> {
        let failed = |error| Error::from_io("cannot start a worker process", error);
        let mut command = Command::new(&self.executable);
        command.arg("worker").env_clear().current_dir("/");
        // The two that change what a process says when it fails, and nothing else.
        for name in ["RUST_BACKTRACE", "JOURNAL_STREAM"] {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
        command.envs(self.environment.iter().cloned());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::inherit());
        let child = spawn_with_channel(&mut command, &channel, CHANNEL_FD).map_err(failed)?;
        drop(channel);
        // Ours until reaped, and only `reap` does that: the number cannot be another's yet. The
        // standard library's `Child` neither ends nor reaps it when dropped.
        let pid = child.id();
        let pidfd = PidFd::open(pid).map_err(failed)?;
        let started_ticks = started_ticks(pid).map_err(failed)?;
        // It has been told nothing yet. Where it stays in our group, it works until that is ended.
        if let Some(group) = &self.cgroup
            && let Err(error) = cgroup::move_process(group, pid)
        {
            let repair = error.repair().unwrap_or_default();
            tracing::warn!(pid, repair, "{}", error.report());
        }
        process(WorkerId { pid, started_ticks }, pidfd).map_err(failed)
    }

    fn find(&self, id: WorkerId) -> Result<Option<Process>> {
        let failed = |error| Error::from_io(format!("cannot look at process {}", id.pid), error);
        let pidfd = match PidFd::open(id.pid) {
            // EINVAL: the number now belongs to a thread that leads no group.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ESRCH | libc::EINVAL)) => {
                return Ok(None);
            }
            other => other.map_err(failed)?,
        };
        // After the descriptor: if this is the worker's start time, the descriptor is the worker.
        match started_ticks(id.pid) {
            Ok(ticks) if ticks == id.started_ticks => process(id, pidfd).map(Some).map_err(failed),
            Ok(_) => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(None),
            Err(error) => Err(failed(error)),
        }
    }

    fn binary(&self) -> String {
        binary_id(&self.executable)
    }

    fn of_number(&self, pid: u32) -> Result<Option<Process>> {
        match started_ticks(pid) {
            Ok(started_ticks) => self.find(WorkerId { pid, started_ticks }),
            // It is gone.
            Err(_) => Ok(None),
        }
    }
}

fn process(id: WorkerId, pidfd: PidFd) -> io::Result<Process> {
    let exit = pidfd.try_clone()?.into_descriptor();
    Ok(Process { id, exit, handle: Box::new(pidfd) })
}

impl Handle for PidFd {
    fn kill(&self) -> io::Result<()> {
        Self::kill(self)
    }

    fn reap(&self) -> Option<String> {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG;
        match waitid(Id::PIDFd(self.as_fd()), flags) {
            Ok(status) => described(status),
            // Started by an earlier supervisor: its parent is init, which reaps it.
            Err(Errno::ECHILD) => None,
            Err(errno) => Some(errno.to_string()),
        }
    }
}

/// How a process ended; `None` when it has not.
fn described(status: WaitStatus) -> Option<String> {
    Some(match status {
        WaitStatus::Exited(_, code) => format!("exited with code {code}"),
        WaitStatus::Signaled(_, Signal::SIGKILL, _) => {
            // The system does so, too, when memory runs out.
            "was killed by SIGKILL".to_owned()
        }
        WaitStatus::Signaled(_, signal, _) => format!("was ended by {signal}"),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_found_by_its_start_and_not_by_its_number() {
        let pid = std::process::id();
        let started_ticks = started_ticks(pid).unwrap();
        let launcher = Processes::of_this_executable();
        assert!(launcher.find(WorkerId { pid, started_ticks }).unwrap().is_some());
        let earlier = WorkerId { pid, started_ticks: started_ticks - 1 };
        assert!(launcher.find(earlier).unwrap().is_none());
        assert!(launcher.find(WorkerId { pid: u32::MAX, started_ticks }).unwrap().is_none());
    }

    #[test]
    fn a_launched_process_is_killed_and_reaped() {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        // `yes worker` runs until it is told otherwise.
        let launcher = Processes::of(PathBuf::from("/usr/bin/yes"));
        let process = launcher.launch(theirs.into()).unwrap();
        assert!(launcher.find(process.id).unwrap().is_some());
        process.handle.kill().unwrap();
        let mut set = [nix::poll::PollFd::new(process.exit.as_fd(), nix::poll::PollFlags::POLLIN)];
        assert_eq!(nix::poll::poll(&mut set, 5000u16).unwrap(), 1);
        assert!(process.handle.reap().unwrap().contains("SIGKILL"));
        assert!(launcher.find(process.id).unwrap().is_none());
        drop(ours);
    }
}
