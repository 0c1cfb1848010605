//! Replaces the daemon by the build that is on disk. The process executes the other file, so that its
//! children stay its children and the service manager sees no process end.

use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};

use cleat_core::error::{Error, Result};
use cleat_worker_protocol::version::binary_id;

/// The executable at the path from which this process was started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Binary {
    /// The build that runs.
    Current,
    /// Another build, which can run on this machine.
    Other {
        /// The path of its executable.
        path: PathBuf,
        /// The version that it prints.
        version: String,
        /// The identity of its file, see `cleat_worker_protocol::version::binary_id`.
        id: String,
    },
}

const OWN: &str = "/proc/self/exe";

/// The timeout for another build to print its version.
const VERSION_TIMEOUT: Duration = Duration::from_secs(5);

/// The maximum length of the printed version, in bytes.
const MAX_VERSION: usize = 4096;

/// Compares the executable on disk with the running one. Another build must print its version, so that an
/// executable that does not run never replaces one that works. Blocks for [`VERSION_TIMEOUT`] at most.
///
/// # Errors
/// Returns an error if the file does not exist, does not run, or is not cleat.
pub(super) fn on_disk() -> Result<Binary> {
    let own = std::fs::read_link(OWN)
        .map_err(|error| Error::from_io("cannot read /proc/self/exe", error))?;
    let path = installed_path(&own);
    let id = binary_id(&path);
    if id == binary_id(Path::new(OWN)) {
        return Ok(Binary::Current);
    }
    let version = version(&path).map_err(|error| {
        let message = format!("{} cannot replace this daemon", path.display());
        Error::from_io(message, error)
            .with_repair("install the build again, then repeat cleat upgrade")
    })?;
    Ok(Binary::Other { path, version, id })
}

/// Executes `path` in this process, with the arguments that this process was started with. Returns only if
/// that fails.
pub(super) fn exec(path: &Path) -> Error {
    let mut arguments = std::env::args_os();
    let name = arguments.next().unwrap_or_else(|| path.into());
    let error = Command::new(path).arg0(name).args(arguments).exec();
    Error::from_io(format!("cannot execute {}", path.display()), error)
}

/// Takes the exit status of all children that have ended. They were started by the executable that this
/// one replaced in the same process. Must be called before this executable starts children.
pub(super) fn reap_children() {
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG;
    while waitid(Id::All, flags).is_ok_and(|status| status != WaitStatus::StillAlive) {}
}

/// Returns the path from which the process was started. The kernel appends " (deleted)" if the file has been
/// replaced (proc_pid_exe(5)).
fn installed_path(link: &Path) -> PathBuf {
    let text = link.to_str().and_then(|text| text.strip_suffix(" (deleted)"));
    text.map_or_else(|| link.to_owned(), PathBuf::from)
}

fn version(path: &Path) -> io::Result<String> {
    let mut command = Command::new(path);
    command.arg("--version").env_clear().stdin(Stdio::null()).stderr(Stdio::null());
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let ended = wait(&mut child, VERSION_TIMEOUT);
    if !matches!(ended, Ok(Some(_))) {
        let _ = child.kill();
        let _ = child.wait();
    }
    let status = ended?.ok_or(io::ErrorKind::TimedOut)?;
    let mut text = vec![0; MAX_VERSION];
    if let Some(mut stdout) = child.stdout.take() {
        // The process has ended, so its output is in the pipe. The pipe may still be open in a child that it
        // left running, so the read must not wait for its end.
        fcntl(&stdout, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        let length = match stdout.read(&mut text) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
            read => read?,
        };
        text.truncate(length);
    }
    let text = String::from_utf8_lossy(&text);
    let first = text.lines().next().and_then(|line| line.strip_prefix("cleat "));
    match first.filter(|_| status.success()) {
        Some(version) => Ok(version.to_owned()),
        None => Err(io::Error::other(format!("it does not print its version ({status})"))),
    }
}

#[allow(
    clippy::disallowed_methods,
    reason = "a blocking thread waits for a real process, which does not follow simulated time"
)]
fn wait(child: &mut Child, timeout: Duration) -> io::Result<Option<std::process::ExitStatus>> {
    let deadline = Instant::now() + timeout;
    loop {
        let ended = child.try_wait()?;
        if ended.is_some() || Instant::now() >= deadline {
            return Ok(ended);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "the tests run real processes")]
mod tests {
    use nix::sys::signal::Signal;

    use super::*;

    #[test]
    fn the_path_of_a_replaced_executable_is_found() {
        let path = Path::new("/usr/bin/cleat");
        assert_eq!(installed_path(Path::new("/usr/bin/cleat (deleted)")), path);
        assert_eq!(installed_path(path), path);
        assert_eq!(on_disk().unwrap(), Binary::Current);
    }

    #[test]
    fn only_a_file_that_prints_its_version_is_accepted() {
        let script = |text: &str| {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("other");
            std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
            use std::os::unix::fs::PermissionsExt;
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
            // A process that another test starts has the script open until its exec.
            loop {
                match version(&path) {
                    Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy => {}
                    other => return other,
                }
            }
        };
        assert_eq!(script("echo 'cleat 9.9 (x)'; echo more").unwrap(), "9.9 (x)");
        assert!(script("echo 'cleat 9.9'; exit 1").is_err());
        assert!(script("echo 'something else'").is_err());
        assert!(script("true").is_err());
        // A program that leaves a child running, which has the pipe open.
        let child = script("sleep 600 & echo \"cleat $!\"").unwrap().parse().unwrap();
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(child), None).unwrap();
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(child), Signal::SIGKILL).unwrap();
        assert!(version(Path::new("/nowhere")).is_err());
        assert!(version(Path::new("/etc/hostname")).is_err());
    }

    #[test]
    fn the_wait_for_a_process_ends_at_its_timeout() {
        let mut child = Command::new("/bin/sleep").arg("60").spawn().unwrap();
        assert!(wait(&mut child, Duration::from_millis(20)).unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
