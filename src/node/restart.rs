//! The daemon becomes the build that is on disk: the same process goes on with another executable, so
//! that its children stay its children, and the service manager sees nothing end.

use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};

use cleat_core::error::{Error, Result};
use cleat_worker::version::binary_id;

/// What is there in the place that this process was started from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Binary {
    /// What runs.
    Current,
    /// Another build, which runs on this machine.
    Other {
        /// Where.
        path: PathBuf,
        /// What it calls itself.
        version: String,
        /// See `worker::version::binary_id`.
        id: String,
    },
}

const OWN: &str = "/proc/self/exe";

/// For another build to say its version.
const VERSION_LIMIT: Duration = Duration::from_secs(5);

/// The longest version.
const MAX_VERSION: usize = 4096;

/// Looks at what is on disk. Another build must be able to say what it is: one that cannot even do
/// that does not replace one that works. Blocks, for seconds at most.
///
/// # Errors
/// When there is nothing there, or it does not run, or it is not cleat.
pub(super) fn on_disk() -> Result<Binary> {
    let own = std::fs::read_link(OWN)
        .map_err(|error| Error::from_io("cannot tell which executable this is", error))?;
    let path = place(&own);
    let id = binary_id(&path);
    if id == binary_id(Path::new(OWN)) {
        return Ok(Binary::Current);
    }
    let version = version(&path).map_err(|error| {
        let message = format!("{} cannot take this daemon's place", path.display());
        Error::from_io(message, error).with_repair("install the build anew, then upgrade again")
    })?;
    Ok(Binary::Other { path, version, id })
}

/// Goes on as `path`, with the arguments that this process was started with. Returns only when that
/// is not possible.
pub(super) fn exec(path: &Path) -> Error {
    let mut arguments = std::env::args_os();
    let name = arguments.next().unwrap_or_else(|| path.into());
    let error = Command::new(path).arg0(name).args(arguments).exec();
    Error::from_io(format!("cannot go on as {}", path.display()), error)
}

/// Takes the exit status of every child that has ended: of an executable before this one, in the same
/// process. To be called before there are children of this one.
pub(super) fn reap_children() {
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG;
    while waitid(Id::All, flags).is_ok_and(|status| status != WaitStatus::StillAlive) {}
}

/// Where the executable was: the kernel marks one whose file has been replaced (proc_pid_exe(5)).
fn place(link: &Path) -> PathBuf {
    let text = link.to_str().and_then(|text| text.strip_suffix(" (deleted)"));
    text.map_or_else(|| link.to_owned(), PathBuf::from)
}

fn version(path: &Path) -> io::Result<String> {
    let mut command = Command::new(path);
    command.arg("--version").env_clear().stdin(Stdio::null()).stderr(Stdio::null());
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let ended = wait(&mut child, VERSION_LIMIT);
    if !matches!(ended, Ok(Some(_))) {
        let _ = child.kill();
        let _ = child.wait();
    }
    let status = ended?.ok_or(io::ErrorKind::TimedOut)?;
    let mut text = vec![0; MAX_VERSION];
    if let Some(mut stdout) = child.stdout.take() {
        // It has ended, so all that it wrote is there. The end of the pipe may not be: what it left
        // running can have it open.
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
        None => Err(io::Error::other(format!("it does not say its version ({status})"))),
    }
}

#[allow(
    clippy::disallowed_methods,
    reason = "a blocking thread waits for a real process, which does not follow simulated time"
)]
fn wait(child: &mut Child, limit: Duration) -> io::Result<Option<std::process::ExitStatus>> {
    let until = Instant::now() + limit;
    loop {
        let ended = child.try_wait()?;
        if ended.is_some() || Instant::now() >= until {
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
    fn a_replaced_executable_is_looked_for_where_it_was() {
        assert_eq!(place(Path::new("/usr/bin/cleat (deleted)")), Path::new("/usr/bin/cleat"));
        assert_eq!(place(Path::new("/usr/bin/cleat")), Path::new("/usr/bin/cleat"));
        assert_eq!(on_disk().unwrap(), Binary::Current);
    }

    #[test]
    fn only_what_says_its_version_may_take_over() {
        let script = |text: &str| {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("other");
            std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
            use std::os::unix::fs::PermissionsExt;
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
            // Another test may just be starting a process, which has the script open until it runs.
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
        // One that leaves something running, with the pipe open.
        let left = script("sleep 600 & echo \"cleat $!\"").unwrap().parse().unwrap();
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(left), None).unwrap();
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(left), Signal::SIGKILL).unwrap();
        assert!(version(Path::new("/nowhere")).is_err());
        assert!(version(Path::new("/etc/hostname")).is_err());
    }

    #[test]
    fn what_hangs_is_given_up() {
        let mut child = Command::new("/bin/sleep").arg("60").spawn().unwrap();
        assert!(wait(&mut child, Duration::from_millis(20)).unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
