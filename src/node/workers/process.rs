//! Worker processes: starts them, finds them again, and ends them.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::errno::Errno;
use nix::sys::signal::Signal;
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};

use super::log_pipe::LogPipe;
use super::users::{User, UserRange, Users};
use crate::planner::WorkerId;
use cleat_core::error::{Error, Result};
use cleat_kernel::cgroup;
use cleat_sys::process::{PidFd, spawn_with_channel, started_ticks};
use cleat_worker_protocol::isolation::Isolation;
use cleat_worker_protocol::protocol::CHANNEL_FD;
use cleat_worker_protocol::version::binary_id;

/// A worker process, which may be a child of this process or of an earlier supervisor.
pub struct Process {
    /// Its number and start time.
    pub id: WorkerId,
    /// A descriptor that becomes readable when all threads of the process have ended.
    pub exit: OwnedFd,
    /// Ends and reaps it.
    pub handle: Box<dyn Handle>,
}

/// Operations on a process.
pub trait Handle: Send + Sync {
    /// Sends SIGKILL.
    ///
    /// # Errors
    /// Returns an error if the kernel refuses the signal.
    fn kill(&self) -> io::Result<()>;

    /// Takes the exit status, so that the process does not stay a zombie, and returns how it ended. Returns
    /// `None` if that is unknown, for example for a child of an earlier supervisor.
    fn reap(&self) -> Option<String>;

    /// Returns whether the kernel knows the process by the number of its [`WorkerId`], so that the owner of a
    /// socket can be compared with it.
    fn is_known_to_the_kernel(&self) -> bool {
        false
    }
}

/// Starts and finds worker processes. The simulation replaces it.
pub trait Launcher: Send + Sync {
    /// Starts a worker whose end of the channel is `channel`. The worker waits for its first message, and
    /// exits if the channel is closed before.
    ///
    /// # Errors
    /// Returns an error if no process can be started.
    fn launch(&self, channel: OwnedFd) -> Result<Process>;

    /// Returns the process `id`, or `None` if it has provably ended.
    ///
    /// # Errors
    /// Returns an error if the state of the process cannot be determined.
    fn find(&self, id: WorkerId) -> Result<Option<Process>>;

    /// Returns the identity of the executable that new workers run, see
    /// `cleat_worker_protocol::version::binary_id`. Empty: unknown.
    fn binary(&self) -> String {
        String::new()
    }

    /// Returns the process that has this number now, or `None` if there is none.
    ///
    /// # Errors
    /// Returns an error if the state of the process cannot be determined.
    fn of_number(&self, pid: u32) -> Result<Option<Process>> {
        let _ = pid;
        Ok(None)
    }
}

/// Starts real processes: `cleat worker` of an executable.
#[derive(Debug)]
pub struct Processes {
    executable: PathBuf,
    /// The name of the program in the command line of a worker, without the leading '@'.
    name: OsString,
    environment: Vec<(OsString, OsString)>,
    cgroup: Option<PathBuf>,
    log: Option<LogPipe>,
    users: Option<Users>,
    allow_missing: Vec<String>,
}

impl Processes {
    /// Starts workers of the running executable, even if its file has been replaced.
    pub fn of_this_executable() -> Self {
        Self { name: "cleat".into(), ..Self::of(PathBuf::from("/proc/self/exe")) }
    }

    /// Starts workers of the executable at a path.
    pub fn of(executable: PathBuf) -> Self {
        Self {
            name: executable.clone().into(),
            executable,
            environment: Vec::new(),
            cgroup: None,
            log: None,
            users: None,
            allow_missing: Vec::new(),
        }
    }

    /// Adds a variable to the environment of every worker.
    #[must_use]
    pub fn with_variable(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// Gives every worker a user of its own from `range`. The locks of the users are in the directory `users`
    /// of `runtime_dir`. Only root can do this; otherwise workers keep the user of this process.
    #[must_use]
    pub fn with_users(mut self, range: UserRange, runtime_dir: &Path) -> Self {
        let is_root = nix::unistd::geteuid().is_root();
        self.users = is_root.then(|| Users::new(range, runtime_dir.join("users")));
        self
    }

    /// Lets workers start without these layers of their confinement, see
    /// `cleat_worker_protocol::isolation::layer`.
    #[must_use]
    pub fn allow_missing(mut self, layers: Vec<String>) -> Self {
        self.allow_missing = layers;
        self
    }

    /// Gives workers this pipe as stderr, instead of the stderr of this process.
    #[must_use]
    pub fn with_log(mut self, log: Option<LogPipe>) -> Self {
        self.log = log;
        self
    }

    /// Moves every worker into a control group, see [`cgroup`].
    #[must_use]
    pub fn in_cgroup(mut self, group: Option<PathBuf>) -> Self {
        self.cgroup = group;
        self
    }
}

impl Launcher for Processes {
    fn launch(&self, channel: OwnedFd) -> Result<Process> {
        let failed = |error| Error::from_io("cannot start a worker process", error);
        let user = self.users.as_ref().map(Users::take).transpose()?;
        let isolation = Isolation {
            user: user.as_ref().map(|user| user.number),
            allow_missing: self.allow_missing.clone(),
        };
        let mut command = Command::new(&self.executable);
        // At the end of a shutdown systemd kills no process of root whose command begins with '@'
        // (https://systemd.io/ROOT_STORAGE_DAEMONS). For workers that run as root; others see cleat.service.
        let mut name = OsString::from("@");
        name.push(&self.name);
        command.arg0(name);
        command.arg("worker").args(isolation.arguments()).env_clear().current_dir("/");
        // Only the variables that affect backtraces and the log are passed on.
        for name in ["RUST_BACKTRACE", "JOURNAL_STREAM"] {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
        command.envs(self.environment.iter().cloned());
        let log = self.log.as_ref().map(LogPipe::writer).transpose().map_err(failed)?;
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(log.map_or_else(Stdio::inherit, Stdio::from));
        let (lock, own) = user.map(|User { lock, own, .. }| (lock, own)).unzip();
        let child = spawn_with_channel(&mut command, &channel, CHANNEL_FD, lock.as_ref());
        let child = child.map_err(failed)?;
        drop((channel, lock));
        // The child is reaped only by `reap`, so its number cannot be reused yet. Dropping the standard
        // library's `Child` neither ends nor reaps the process.
        let pid = child.id();
        let pidfd = PidFd::open(pid).map_err(failed)?;
        let started_ticks = started_ticks(pid).map_err(failed)?;
        // A worker that stays in the daemon's group works, but ends with the daemon's service.
        if let Some(group) = &self.cgroup
            && let Err(error) = cgroup::move_process(group, pid)
        {
            let repair = error.repair().unwrap_or_default();
            tracing::warn!(pid, repair, "{}", error.report());
        }
        process(WorkerId { pid, started_ticks }, pidfd, own).map_err(failed)
    }

    fn find(&self, id: WorkerId) -> Result<Option<Process>> {
        let failed = |error| Error::from_io(format!("cannot inspect process {}", id.pid), error);
        let pidfd = match PidFd::open(id.pid) {
            // EINVAL, or ENOENT since Linux 6.16: the number belongs to a thread that is not the leader of its process.
            Err(error) if is_no_process(&error) => return Ok(None),
            other => other.map_err(failed)?,
        };
        // Read after the descriptor was opened: if the start time is the worker's, so is the descriptor.
        match started_ticks(id.pid) {
            Ok(ticks) if ticks == id.started_ticks => {
                process(id, pidfd, self.share_user(id.pid)).map(Some).map_err(failed)
            }
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
            // The process has ended.
            Err(_) => Ok(None),
        }
    }
}

impl Processes {
    /// Keeps the user of a worker of an earlier supervisor taken. A worker of an earlier version has the user of
    /// the supervisor.
    fn share_user(&self, pid: u32) -> Option<OwnedFd> {
        let (users, number) = (self.users.as_ref()?, user_of(pid).ok()?);
        users.share(number).unwrap_or_else(|error| {
            tracing::warn!(pid, user = number, %error, "cannot lock the user of a worker");
            None
        })
    }
}

/// Returns the user of a process. The owner of its directory in /proc is root, because it is not dumpable
/// (proc_pid(5)).
fn user_of(pid: u32) -> io::Result<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    number.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn process(id: WorkerId, pidfd: PidFd, user: Option<OwnedFd>) -> io::Result<Process> {
    let exit = pidfd.try_clone()?.into_descriptor();
    Ok(Process { id, exit, handle: Box::new(WorkerProcess { pidfd, _user: user }) })
}

/// A worker process, and the lock that keeps its user taken as long as the supervisor knows the process.
struct WorkerProcess {
    pidfd: PidFd,
    _user: Option<OwnedFd>,
}

impl Handle for WorkerProcess {
    fn kill(&self) -> io::Result<()> {
        self.pidfd.kill()
    }

    fn is_known_to_the_kernel(&self) -> bool {
        true
    }

    fn reap(&self) -> Option<String> {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG;
        match waitid(Id::PIDFd(self.pidfd.as_fd()), flags) {
            Ok(status) => description(status),
            // An earlier supervisor started the process, and init reaps it.
            Err(Errno::ECHILD) => None,
            Err(errno) => Some(errno.to_string()),
        }
    }
}

/// Describes how a process ended; returns `None` if it has not ended.
fn description(status: WaitStatus) -> Option<String> {
    Some(match status {
        WaitStatus::Exited(_, code) => format!("exited with code {code}"),
        // The kernel also sends SIGKILL when memory runs out.
        WaitStatus::Signaled(_, Signal::SIGKILL, _) => "was killed by SIGKILL".to_owned(),
        WaitStatus::Signaled(_, signal, _) => format!("was ended by {signal}"),
        _ => return None,
    })
}

/// Whether an error of `pidfd_open` means that no process has the number.
fn is_no_process(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ESRCH | libc::EINVAL | libc::ENOENT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_found_only_with_its_start_time() {
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
        // `yes worker` runs until it is killed.
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
