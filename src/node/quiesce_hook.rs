//! The administrator's program that makes a device quiet, and ends that again: run as rbd-nbd runs its
//! quiesce hook, with the device and `quiesce` or `unquiesce`.
//!
//! It runs with the daemon's rights, so only root may be able to write it; with a minimal environment;
//! and never beyond its deadline: it is killed then, with everything in its process group.

use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use cleat_core::error::{Error, ErrorKind, Result};

/// What is kept of what it writes, for the log.
const MAX_OUTPUT: usize = 8192;

/// Between looks whether it has ended.
const PAUSE: Duration = Duration::from_millis(5);

const SEARCHED: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Runs it to its end. Blocks.
///
/// # Errors
/// `PermissionDenied` when others than root could have written it; `TimedOut` when it was killed;
/// `Unavailable` when it fails.
pub(super) fn run(hook: &Path, device: &str, verb: &str, deadline: Instant) -> Result<()> {
    check(hook)?;
    let name = hook.display();
    let failed = |error| Error::from_io(format!("the hook {name} cannot be run"), error);
    let (reader, writer) = nix::unistd::pipe2(OFlag::O_CLOEXEC).map_err(|e| failed(e.into()))?;
    fcntl(&reader, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).map_err(|e| failed(e.into()))?;
    let mut command = Command::new(hook);
    command.args([device, verb]).env_clear().env("PATH", SEARCHED).current_dir("/");
    command.process_group(0).stdin(Stdio::null());
    command.stdout(writer.try_clone().map_err(failed)?).stderr(writer);
    let mut child = command.spawn().map_err(failed)?;
    // Its copies of the pipe's end are ours, too, as long as it lives.
    drop(command);
    let mut output = Output { pipe: reader.into(), text: Vec::new() };
    let ended = wait(&mut child, &mut output, deadline);
    output.log(hook, verb);
    match ended.map_err(failed)? {
        Some(status) if status.success() => Ok(()),
        Some(status) => {
            let message = format!("the hook {name} failed to {verb} {device} ({status})");
            Err(Error::new(ErrorKind::Unavailable, message)
                .with_repair("see the daemon's log for what it said"))
        }
        None => {
            let message =
                format!("the hook {name} did not {verb} {device} in time, and was killed");
            Err(Error::new(ErrorKind::TimedOut, message)
                .with_repair("see what it waits for, or raise map.quiesce_deadline"))
        }
    }
}

/// Whoever can write it could have the daemon do anything.
fn check(hook: &Path) -> Result<()> {
    let name = hook.display();
    let found = std::fs::metadata(hook)
        .map_err(|error| Error::from_io(format!("the hook {name} cannot be run"), error))?;
    let own = nix::unistd::geteuid().as_raw();
    if !found.is_file() || ![0, own].contains(&found.uid()) || found.mode() & 0o022 != 0 {
        let message = format!("the hook {name} is no file that only root can write");
        return Err(Error::new(ErrorKind::PermissionDenied, message)
            .with_repair(format!("chown root {name}; chmod go-w {name}")));
    }
    Ok(())
}

/// `None`: it was killed at the deadline.
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
        // One that writes more than a pipe holds waits for us.
        output.take();
        match ended {
            Ok(None) if Instant::now() < deadline => std::thread::sleep(PAUSE),
            Ok(None) | Err(_) => break,
            Ok(Some(status)) => return Ok(Some(status)),
        }
    }
    let group = Pid::from_raw(i32::try_from(child.id()).map_err(io::Error::other)?);
    // It is our child and not reaped, so the number is its own.
    killpg(group, Signal::SIGKILL)?;
    let killed = Instant::now() + Duration::from_secs(1);
    while child.try_wait()?.is_none() && Instant::now() < killed {
        std::thread::sleep(PAUSE);
    }
    output.take();
    Ok(None)
}

/// What it writes.
struct Output {
    pipe: std::fs::File,
    text: Vec<u8>,
}

impl Output {
    /// What is there now, as much as a pipe holds: whoever writes without end keeps nobody here. What it
    /// left running may write on, to nobody.
    fn take(&mut self) {
        let mut some = [0; 4096];
        for _ in 0..16 {
            // An error is the end of it, or that there is nothing now.
            let Ok(length @ 1..) = self.pipe.read(&mut some) else { break };
            let room = MAX_OUTPUT - self.text.len();
            self.text.extend_from_slice(&some[..length.min(room)]);
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

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    struct Hook {
        directory: tempfile::TempDir,
    }

    impl Hook {
        fn new(text: &str) -> Self {
            let directory = tempfile::tempdir().unwrap();
            std::fs::write(directory.path().join("hook"), format!("#!/bin/sh\n{text}\n")).unwrap();
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
            // Another test may just be starting a process, which has the script open until it runs.
            loop {
                match run(&self.path("hook"), "/dev/nbd7", "quiesce", deadline) {
                    Err(error) if error.report().contains("busy") => {}
                    other => return other,
                }
            }
        }
    }

    #[test]
    fn it_is_told_device_and_verb_and_little_else() {
        let hook = Hook::new("cd \"$(dirname \"$0\")\" && echo \"$@\" >told && env >environment");
        hook.run(soon()).unwrap();
        assert_eq!(std::fs::read_to_string(hook.path("told")).unwrap(), "/dev/nbd7 quiesce\n");
        let environment = std::fs::read_to_string(hook.path("environment")).unwrap();
        assert!(environment.lines().all(|line| {
            ["PATH=", "PWD=", "OLDPWD=", "SHLVL=", "_="].iter().any(|known| line.starts_with(known))
        }));
    }

    #[test]
    fn one_that_fails_hangs_or_writes_without_end_is_told() {
        let error = Hook::new("echo no >&2; exit 3").run(soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.report().contains("exit status: 3"), "{}", error.report());
        Hook::new("head -c 1000000 /dev/zero").run(soon()).unwrap();
        let soon_over = Instant::now() + Duration::from_millis(300);
        let error = Hook::new("exec cat /dev/zero").run(soon_over).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        // With what it has started; and what it has left running with the pipe keeps nobody.
        let hook = Hook::new("sleep 600 & echo $! >\"${0%/*}/child\"; wait");
        let error = hook.run(Instant::now() + Duration::from_millis(300)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        let child = std::fs::read_to_string(hook.path("child")).unwrap();
        let process = format!("/proc/{}/cmdline", child.trim());
        while std::fs::read(&process).is_ok_and(|line| line.starts_with(b"sleep")) {
            std::thread::sleep(PAUSE);
        }
        let hook = Hook::new("sleep 600 & echo $! >\"${0%/*}/child\"");
        hook.run(soon()).unwrap();
        let child = std::fs::read_to_string(hook.path("child")).unwrap().trim().parse().unwrap();
        nix::sys::signal::kill(Pid::from_raw(child), Signal::SIGKILL).unwrap();
    }

    #[test]
    fn one_that_others_could_have_written_is_not_run() {
        let hook = Hook::new("true");
        for mode in [0o775, 0o757] {
            hook.set_mode(mode);
            assert_eq!(hook.run(soon()).unwrap_err().kind(), ErrorKind::PermissionDenied);
        }
        hook.set_mode(0o644);
        assert_eq!(hook.run(soon()).unwrap_err().kind(), ErrorKind::PermissionDenied);
        let missing = run(Path::new("/nowhere/hook"), "/dev/nbd0", "quiesce", soon()).unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
    }
}
