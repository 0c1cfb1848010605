//! Replaces the daemon by the build that is on disk. The process executes the other file, so that its
//! children stay its children and the service manager sees no process end.

use std::ffi::OsString;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};

use cleat_core::error::{Error, ErrorKind, Result};
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

/// The timeout for another build to print its version, and for its check of the configuration.
const RUN_TIMEOUT: Duration = Duration::from_secs(5);

/// The maximum length of the output of another build, in bytes.
const MAX_OUTPUT: usize = 4096;

/// The option of `cleat node` that checks the configuration and the other options, and starts nothing.
const CHECK_CONFIG: &str = "--check-config";

/// Compares the executable on disk with the running one. Another build must print its version, so that an
/// executable that does not run never replaces one that works. It must also accept the configuration and the
/// arguments of this process: a daemon that refuses them ends, and devices have no supervisor then. Blocks for
/// twice [`RUN_TIMEOUT`] at most.
///
/// # Errors
/// Returns an error if the file does not exist, does not run, or is not cleat, or if it refuses the configuration.
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
    check_config(&path, std::env::args_os().skip(1))?;
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
    command.arg("--version").env_clear().stdout(Stdio::piped()).stderr(Stdio::null());
    let (status, text) = run(&mut command)?;
    let first = text.lines().next().and_then(|line| line.strip_prefix("cleat "));
    match first.filter(|_| status.success()) {
        Some(version) => Ok(version.to_owned()),
        None => Err(io::Error::other(format!("it does not print its version ({status})"))),
    }
}

/// Lets the build at `path` check the configuration, with the arguments with which this process was started.
/// Accepts a build that does not know the option: it is older than the option, and a downgrade must work.
///
/// # Errors
/// Returns an error with the build's message if it refuses the configuration or an argument, or does not answer.
fn check_config(path: &Path, arguments: impl Iterator<Item = OsString>) -> Result<()> {
    let mut command = Command::new(path);
    command.args(arguments).arg(CHECK_CONFIG).stdout(Stdio::null()).stderr(Stdio::piped());
    // The check is not the daemon that the service manager waits for.
    command.env_remove("NOTIFY_SOCKET");
    let refused = format!("{} refuses the configuration of this daemon", path.display());
    let repair = "correct the configuration or the arguments of the daemon, or install another build, then repeat \
                  cleat upgrade; cleat node --check-config shows what is wrong";
    let (status, text) = run(&mut command)
        .map_err(|error| Error::from_io(refused.clone(), error).with_repair(repair))?;
    let first = text.lines().next().unwrap_or_default();
    let why = first.strip_prefix("cleat: error: ").unwrap_or(first);
    if status.success() || why.contains(&format!("unexpected argument '{CHECK_CONFIG}'")) {
        return Ok(());
    }
    let why = if why.is_empty() { status.to_string() } else { why.to_owned() };
    Err(Error::new(ErrorKind::InvalidArgument, format!("{refused}: {why}")).with_repair(repair))
}

/// Runs a command until its end, for [`RUN_TIMEOUT`] at most, and returns its status and the beginning of its
/// output: of stdout or of stderr, whichever is a pipe.
fn run(command: &mut Command) -> io::Result<(ExitStatus, String)> {
    let mut child = command.stdin(Stdio::null()).spawn()?;
    let ended = wait(&mut child, RUN_TIMEOUT);
    if !matches!(ended, Ok(Some(_))) {
        let _ = child.kill();
        let _ = child.wait();
    }
    let status = ended?.ok_or(io::ErrorKind::TimedOut)?;
    let text = match (child.stdout.take(), child.stderr.take()) {
        (Some(stdout), _) => read(stdout)?,
        (None, Some(stderr)) => read(stderr)?,
        (None, None) => Vec::new(),
    };
    Ok((status, String::from_utf8_lossy(&text).into_owned()))
}

/// Reads what is in a pipe. The process has ended, so its output is there. The pipe may still be open in a child
/// that it left running, so the read must not wait for its end.
fn read(mut pipe: impl Read + AsFd) -> io::Result<Vec<u8>> {
    fcntl(&pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    let mut text = vec![0; MAX_OUTPUT];
    let length = match pipe.read(&mut text) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
        read => read?,
    };
    text.truncate(length);
    Ok(text)
}

#[allow(
    clippy::disallowed_methods,
    reason = "a blocking thread waits for a real process, which does not follow simulated time"
)]
fn wait(child: &mut Child, timeout: Duration) -> io::Result<Option<ExitStatus>> {
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

    /// Makes an executable script, and passes its path to `with`.
    fn with_script<T>(text: &str, with: impl Fn(&Path) -> T) -> T {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("other");
        let text = format!("#!/bin/sh\n[ \"$1\" = probe ] && exit\n{text}\n");
        std::fs::write(&path, text).unwrap();
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        // A process that another test starts has the script open until its exec.
        let is_busy = |error: io::Error| error.kind() == io::ErrorKind::ExecutableFileBusy;
        while Command::new(&path).arg("probe").status().is_err_and(is_busy) {}
        with(&path)
    }

    #[test]
    fn a_build_that_refuses_the_configuration_is_refused_with_its_message() {
        let check = |text: &str| {
            let arguments = ["node", "--config", "/a file"].map(OsString::from);
            with_script(text, |path| check_config(path, arguments.clone().into_iter()))
        };
        check("test \"$*\" = 'node --config /a file --check-config' && test -z \"$NOTIFY_SOCKET\"")
            .unwrap();
        let message = "/a file, line 3: unknown field `old`";
        let error = check(&format!("echo 'cleat: error: {message}' >&2; echo more >&2; exit 2"));
        let error = error.expect_err("it exits with 2");
        assert!(error.message().ends_with(&format!("this daemon: {message}")), "{error}");
        assert!(check("exit 1").is_err_and(|error| error.message().ends_with("exit status: 1")));
        let refused = |argument: &str| {
            check(&format!(
                "echo \"cleat: error: unexpected argument '{argument}' found\" >&2; exit 2"
            ))
        };
        assert!(refused("--node-name").is_err());
        refused("--check-config").expect("an older build");
        assert!(check_config(Path::new("/nowhere"), std::iter::empty()).is_err());
    }

    #[test]
    fn only_a_file_that_prints_its_version_is_accepted() {
        let script = |text: &str| with_script(text, version);
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
