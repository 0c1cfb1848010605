//! Runs the administrator's program that quiesces and unquiesces a device. The arguments are those of
//! rbd-nbd's quiesce hook: the device, and `quiesce` or `unquiesce`.
//!
//! The program runs with the daemon's rights, so only root may be able to change it, its directories and the
//! symbolic links that lead to it ([`check_program`]). It gets a minimal
//! environment. At its deadline it is killed, with its process group.

use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use crate::directory::check_program;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_sys::process::make_ordinary;

/// How many bytes of the program's output are logged.
const MAX_OUTPUT: usize = 8192;

/// The interval between two checks whether the program has ended.
const PAUSE: Duration = Duration::from_millis(5);

/// The program's PATH.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The program that runs a script without `#!`.
const SHELL: &str = "/bin/sh";

/// Runs the program and waits for its end. Blocks until `deadline`, and a second longer if the program must
/// be killed.
///
/// # Errors
/// Returns `PermissionDenied` if users other than root can change the program or a directory on its path,
/// `TimedOut` if it was killed
/// at the deadline, and `Unavailable` if it fails.
pub(super) fn run(hook: &Path, device: &str, verb: &str, deadline: Instant) -> Result<()> {
    let name = hook.display();
    check_program(hook).map_err(|error| {
        let repair = error.repair().unwrap_or("use a program that only root can change").to_owned();
        Error::new(error.kind(), format!("cannot run the hook {name}"))
            .with_repair(repair)
            .with_source(error)
    })?;
    let failed = |error| Error::from_io(format!("cannot run the hook {name}"), error);
    let (reader, writer) = nix::unistd::pipe2(OFlag::O_CLOEXEC).map_err(|e| failed(e.into()))?;
    fcntl(&reader, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).map_err(|e| failed(e.into()))?;
    let mut child = spawn(hook, [device, verb], &writer).map_err(|error| match error.kind() {
        // The file itself exists, as `check_program` has found.
        io::ErrorKind::NotFound => no_interpreter(hook, error),
        _ => failed(error),
    })?;
    // Otherwise the pipe would stay open.
    drop(writer);
    let mut output = Output { pipe: reader.into(), text: Vec::new() };
    let ended = wait(&mut child, &mut output, deadline);
    output.log(hook, verb);
    match ended.map_err(failed)? {
        Some(status) if status.success() => Ok(()),
        Some(status) => {
            let message = format!("the hook {name} failed to {verb} {device} ({status})");
            Err(Error::new(ErrorKind::Unavailable, message)
                .with_repair("see its output in the daemon's log"))
        }
        None => {
            let message = format!("the hook {name} did not {verb} {device} in time and was killed");
            Err(Error::new(ErrorKind::TimedOut, message)
                .with_repair("check what the hook waits for, or raise map.quiesce_deadline"))
        }
    }
}

/// Starts the program. A file that is neither a binary nor begins with `#!` is run by the shell, as execvp(3) and
/// so rbd-nbd do it.
fn spawn(hook: &Path, arguments: [&str; 2], output: &OwnedFd) -> io::Result<Child> {
    let start = |mut command: Command| {
        command.args(arguments).env_clear().env("PATH", PATH).current_dir("/");
        command.process_group(0).stdin(Stdio::null());
        command.stdout(output.try_clone()?).stderr(output.try_clone()?);
        make_ordinary(&mut command).spawn()
    };
    match start(Command::new(hook)) {
        Err(error) if error.raw_os_error() == Some(libc::ENOEXEC) => {
            let mut shell = Command::new(SHELL);
            shell.arg(hook);
            start(shell)
        }
        started => started,
    }
}

fn no_interpreter(hook: &Path, error: io::Error) -> Error {
    let name = hook.display();
    let message = format!("cannot run the hook {name}: the interpreter that it names is missing");
    Error::new(ErrorKind::NotFound, message)
        .with_source(error)
        .with_repair(format!("correct the first line of {name}, for example to #!/bin/sh"))
}

/// Waits for the end of the program. Returns `None` if it was killed at the deadline.
#[allow(
    clippy::disallowed_methods,
    reason = "a blocking thread waits for a real process, which does not follow simulated time"
)]
fn wait(
    child: &mut Child,
    output: &mut Output,
    deadline: Instant,
) -> io::Result<Option<ExitStatus>> {
    loop {
        let ended = child.try_wait();
        // A program that writes more than the pipe's capacity blocks until the output is read.
        output.read_available();
        match ended {
            Ok(None) if Instant::now() < deadline => std::thread::sleep(PAUSE),
            Ok(None) | Err(_) => break,
            Ok(Some(status)) => return Ok(Some(status)),
        }
    }
    let group = Pid::from_raw(i32::try_from(child.id()).map_err(io::Error::other)?);
    // The child has not been reaped, so no other process has its number.
    killpg(group, Signal::SIGKILL)?;
    let killed = Instant::now() + Duration::from_secs(1);
    while child.try_wait()?.is_none() && Instant::now() < killed {
        std::thread::sleep(PAUSE);
    }
    output.read_available();
    Ok(None)
}

/// The output of the program.
struct Output {
    pipe: std::fs::File,
    text: Vec<u8>,
}

impl Output {
    /// Reads what the pipe contains now, 64 KiB at most, so that endless output does not block the caller.
    /// Keeps the first [`MAX_OUTPUT`] bytes.
    fn read_available(&mut self) {
        let mut buffer = [0; 4096];
        for _ in 0..16 {
            // An error means that the pipe is empty or closed.
            let Ok(length @ 1..) = self.pipe.read(&mut buffer) else { break };
            let kept = length.min(MAX_OUTPUT - self.text.len());
            self.text.extend_from_slice(&buffer[..kept]);
        }
    }

    fn log(&self, hook: &Path, verb: &str) {
        for line in String::from_utf8_lossy(&self.text).lines() {
            tracing::info!(hook = %hook.display(), verb, "{}", line.escape_debug());
        }
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "the tests run real processes")]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn far_deadline() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    struct Hook {
        directory: tempfile::TempDir,
    }

    impl Hook {
        fn new(text: &str) -> Self {
            Self::with_content(&format!("#!/bin/sh\n{text}\n"))
        }

        fn with_content(content: &str) -> Self {
            let directory = tempfile::tempdir().unwrap();
            std::fs::write(directory.path().join("hook"), content).unwrap();
            let hook = Self { directory };
            hook.set_mode(0o755);
            hook
        }

        fn path(&self, name: &str) -> std::path::PathBuf {
            self.directory.path().join(name)
        }

        fn set_mode(&self, mode: u32) {
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(self.path("hook"), mode).unwrap();
        }

        fn run(&self, deadline: Instant) -> Result<()> {
            // A process that another test starts has the script open until its exec.
            loop {
                match run(&self.path("hook"), "/dev/nbd7", "quiesce", deadline) {
                    Err(error) if error.report().contains("busy") => {}
                    other => return other,
                }
            }
        }
    }

    #[test]
    fn the_hook_gets_the_device_the_verb_and_a_minimal_environment() {
        let hook =
            Hook::new("cd \"$(dirname \"$0\")\" && echo \"$@\" >arguments && env >environment");
        hook.run(far_deadline()).unwrap();
        assert_eq!(std::fs::read_to_string(hook.path("arguments")).unwrap(), "/dev/nbd7 quiesce\n");
        let environment = std::fs::read_to_string(hook.path("environment")).unwrap();
        assert!(environment.lines().all(|line| {
            ["PATH=", "PWD=", "OLDPWD=", "SHLVL=", "_="].iter().any(|known| line.starts_with(known))
        }));
    }

    #[test]
    fn a_hook_without_an_interpreter_is_run_by_the_shell() {
        let text = "cd \"$(dirname \"$0\")\" && echo \"$@\" >arguments";
        for first in ["", "\n", "# a comment\n", " #!/bin/sh\n"] {
            let hook = Hook::with_content(&format!("{first}{text}\n"));
            hook.run(far_deadline()).unwrap();
            let arguments = std::fs::read_to_string(hook.path("arguments")).unwrap();
            assert_eq!(arguments, "/dev/nbd7 quiesce\n", "{first:?}");
        }
        let failing = Hook::with_content("exit 3\n");
        let error = failing.run(far_deadline()).unwrap_err();
        assert!(error.report().contains("exit status: 3"), "{}", error.report());
    }

    #[test]
    fn a_missing_interpreter_is_named_as_the_cause() {
        let hook = Hook::with_content("#!/no/such/interpreter\n");
        let error = hook.run(far_deadline()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.report().contains("interpreter"), "{}", error.report());
        assert!(error.repair().unwrap().contains("first line"), "{error:?}");
    }

    #[test]
    fn a_hook_that_fails_hangs_or_writes_without_end_is_an_error() {
        let error = Hook::new("echo no >&2; exit 3").run(far_deadline()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.report().contains("exit status: 3"), "{}", error.report());
        Hook::new("head -c 1000000 /dev/zero").run(far_deadline()).unwrap();
        let near_deadline = Instant::now() + Duration::from_millis(300);
        let error = Hook::new("exec cat /dev/zero").run(near_deadline).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        // Its children are killed, too. A child that outlives a successful hook does not delay the result.
        let hook = Hook::new("sleep 600 & echo $! >\"${0%/*}/child\"; wait");
        let error = hook.run(Instant::now() + Duration::from_millis(300)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        let child = std::fs::read_to_string(hook.path("child")).unwrap();
        let process = format!("/proc/{}/cmdline", child.trim());
        while std::fs::read(&process).is_ok_and(|line| line.starts_with(b"sleep")) {
            std::thread::sleep(PAUSE);
        }
        let hook = Hook::new("sleep 600 & echo $! >\"${0%/*}/child\"");
        hook.run(far_deadline()).unwrap();
        let child = std::fs::read_to_string(hook.path("child")).unwrap().trim().parse().unwrap();
        nix::sys::signal::kill(Pid::from_raw(child), Signal::SIGKILL).unwrap();
    }

    #[test]
    fn a_hook_that_others_can_write_is_not_run() {
        let hook = Hook::new("true");
        for mode in [0o775, 0o757] {
            hook.set_mode(mode);
            assert_eq!(hook.run(far_deadline()).unwrap_err().kind(), ErrorKind::PermissionDenied);
        }
        hook.set_mode(0o644);
        assert_eq!(hook.run(far_deadline()).unwrap_err().kind(), ErrorKind::PermissionDenied);
        let missing =
            run(Path::new("/nowhere/hook"), "/dev/nbd0", "quiesce", far_deadline()).unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
    }
}
