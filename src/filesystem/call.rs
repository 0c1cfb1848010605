//! Starts a program, waits for its end, and decides what happens to it at the deadline.
//!
//! A program runs in a process group of its own, in the directory `/`, without input unless the caller gives it
//! one, and with an environment that consists of `PATH`, `LC_ALL=C` and what the caller adds. A task of its own
//! waits for each program, so that its end is noticed also after the caller has left.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_sys::descriptor::DeviceNumber;
use cleat_sys::process::{PidFd, make_ordinary};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until, timeout};

use crate::output::Output;
use crate::tools::{Tool, search_path};
use crate::writers::Writer;

/// How long a killed program may take to end. A program that waits in the kernel for a device takes longer.
const KILL_TIMEOUT: Duration = Duration::from_secs(1);

/// The maximum length of the part of a program's output that an error message contains, in bytes.
const QUOTED_MAX: usize = 500;

/// A program with its arguments.
#[derive(Debug)]
pub(crate) struct Call<'a> {
    tool: Tool,
    arguments: Vec<OsString>,
    /// The device or mount point, for messages.
    subject: &'a Path,
    /// The device, if the program writes to it and must not be killed in the middle.
    written: Option<DeviceNumber>,
    /// What the program reads as its input; nothing without it.
    input: Option<OwnedFd>,
    /// Variables of the environment beside `PATH` and `LC_ALL`.
    environment: Vec<(&'static str, &'static str)>,
}

/// A program that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    /// The name of the program and its subject.
    title: String,
}

impl<'a> Call<'a> {
    /// Describes a call of `tool`. `subject` is the device or the mount point that it works on; it appears in
    /// messages and is not an argument.
    pub(crate) fn new(tool: Tool, subject: &'a Path) -> Self {
        let (arguments, environment) = (Vec::new(), Vec::new());
        Self { tool, arguments, subject, written: None, input: None, environment }
    }

    pub(crate) fn arg(mut self, argument: impl Into<OsString>) -> Self {
        self.arguments.push(argument.into());
        self
    }

    pub(crate) fn args<T: Into<OsString>>(
        mut self,
        arguments: impl IntoIterator<Item = T>,
    ) -> Self {
        self.arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// Declares that the program writes to the device `number`. It is then not killed at the deadline, and
    /// until it has ended, other calls for the device fail.
    pub(crate) fn writes(mut self, number: DeviceNumber) -> Self {
        self.written = Some(number);
        self
    }

    /// Sets the input of the program. Without it, the input is empty.
    pub(crate) fn input(mut self, input: OwnedFd) -> Self {
        self.input = Some(input);
        self
    }

    /// Sets a variable of the program's environment.
    pub(crate) fn env(mut self, name: &'static str, value: &'static str) -> Self {
        self.environment.push((name, value));
        self
    }

    /// Runs the program. At the deadline, and when the returned future is dropped, kills it with its process
    /// group, or leaves it running if it writes to a device.
    ///
    /// # Errors
    /// Returns `Unsupported` if the program is not installed; `TimedOut` at the deadline; `Aborted` if an
    /// earlier program still writes to the device. A failure of the program is no error.
    pub(crate) async fn run(self, deadline: Instant) -> Result<Ended> {
        let path = self.tool.find(self.subject)?;
        let title = format!("{} {}", self.tool.name, self.subject.display());
        if Instant::now() >= deadline {
            let message = format!("{title} was not started: the deadline has expired");
            return Err(Error::new(ErrorKind::TimedOut, message));
        }
        let register = |number| Writer::register(number, self.subject, self.tool.name);
        let writer = self.written.map(register).transpose()?;
        let failed = |error| Error::from_io(format!("cannot start {title}"), error);
        let [output, errors] = [Output::new().map_err(failed)?, Output::new().map_err(failed)?];
        let mut command = Command::new(path);
        command
            .args(&self.arguments)
            .env_clear()
            .env("PATH", search_path())
            .env("LC_ALL", "C")
            .envs(self.environment)
            .current_dir("/")
            .process_group(0)
            .stdin(self.input.map_or_else(Stdio::null, Stdio::from))
            .stdout(output.stdio().map_err(failed)?)
            .stderr(errors.stdio().map_err(failed)?);
        let began = Instant::now();
        let child = make_ordinary(&mut command).spawn().map_err(failed)?;
        tracing::debug!(pid = child.id(), command = ?command, "started a program");
        let process = Process::new(child).map_err(failed)?;
        if let Some(writer) = &writer {
            writer.started(process.child.id());
        }
        let (answer, ended) = oneshot::channel();
        let running = Running { process, title, output, errors, writer };
        tokio::spawn(running.supervise(deadline, answer));
        let ended = ended.await.unwrap_or_else(|_| {
            let message = "internal: the task that waits for a program has ended";
            Err(Error::new(ErrorKind::Internal, message))
        });
        let took_us = began.elapsed().as_micros();
        tracing::debug!(program = self.tool.name, took_us, "a program has ended");
        ended
    }
}

impl Ended {
    /// Returns a program that has ended with this exit code.
    #[cfg(test)]
    pub(crate) fn of(code: i32, stdout: &str, stderr: &str) -> Self {
        let [stdout, stderr, title] = [stdout, stderr, "program /dev/nbd0"].map(str::to_owned);
        Self { status: ExitStatus::from_raw(code << 8), stdout, stderr, title }
    }

    /// Returns the exit code; `None` if a signal ended the program.
    pub(crate) fn code(&self) -> Option<i32> {
        self.status.code()
    }

    /// Returns an error with what the program wrote, unless the program succeeded.
    pub(crate) fn success(self) -> Result<Self> {
        if self.status.success() { Ok(self) } else { Err(self.failure(ErrorKind::Internal)) }
    }

    /// Returns the error for a failure of the program.
    pub(crate) fn failure(&self, kind: ErrorKind) -> Error {
        let how = match (self.status.code(), self.status.signal()) {
            (Some(code), _) => format!("exit status {code}"),
            (None, signal) => format!("ended by signal {}", signal.unwrap_or_default()),
        };
        let errors = Some(&self.stderr).filter(|text| !text.trim().is_empty());
        let text = one_line(errors.unwrap_or(&self.stdout));
        let title = &self.title;
        Error::new(
            kind,
            match text.is_empty() {
                true => format!("{title} failed: {how}"),
                false => format!("{title} failed: {text} ({how})"),
            },
        )
    }

    /// Returns whether the program wrote `text` to its error output.
    pub(crate) fn reports(&self, text: &str) -> bool {
        self.stderr.contains(text)
    }
}

/// A started program with everything that belongs to it.
struct Running {
    process: Process,
    title: String,
    output: Output,
    errors: Output,
    writer: Option<Writer>,
}

impl Running {
    /// Waits for the end of the program, and sends the result at the deadline at the latest. Then waits on
    /// until the program has ended, so that it does not stay a zombie.
    async fn supervise(mut self, deadline: Instant, mut answer: oneshot::Sender<Result<Ended>>) {
        let in_time = tokio::select! {
            biased;
            ended = self.process.ended() => Some(ended),
            () = sleep_until(deadline) => None,
            () = answer.closed() => None,
        };
        if let Some(ended) = in_time {
            let result = self.result(ended);
            // The device is free before the caller continues.
            drop(self.writer);
            let _ = answer.send(result);
            return;
        }
        if self.writer.is_none() {
            self.process.kill();
            if let Ok(ended) = timeout(KILL_TIMEOUT, self.process.ended()).await {
                // A program that succeeded in the last moment has done its work.
                let has_succeeded = ended.as_ref().is_ok_and(ExitStatus::success);
                let result = if has_succeeded { self.result(ended) } else { Err(self.killed()) };
                let _ = answer.send(result);
                return;
            }
        }
        let pid = self.process.child.id();
        let _ = answer.send(Err(self.left_behind(pid)));
        let ended = self.process.ended().await;
        let title = self.title;
        tracing::info!(pid, ?ended, "{title}: the program that missed its deadline has ended");
    }

    fn result(&mut self, ended: io::Result<ExitStatus>) -> Result<Ended> {
        let collect = || -> io::Result<Ended> {
            let (status, title) = (ended?, self.title.clone());
            Ok(Ended { status, stdout: self.output.text()?, stderr: self.errors.text()?, title })
        };
        collect().map_err(|error| {
            Error::from_io(format!("cannot read the result of {}", self.title), error)
        })
    }

    fn killed(&self) -> Error {
        let message = format!("{} did not end before the deadline and was killed", self.title);
        Error::new(ErrorKind::TimedOut, message)
            .with_repair("check the storage of the volume, for example with cleat list, then retry")
    }

    fn left_behind(&self, pid: u32) -> Error {
        let why = match self.writer {
            Some(_) => "continues, because half of its work would make the volume unusable",
            None => "cannot be killed, because it waits in the kernel for the storage",
        };
        let message =
            format!("{} did not end before the deadline; process {pid} {why}", self.title);
        Error::new(ErrorKind::TimedOut, message).with_repair(format!(
            "check the storage of the volume, for example with cleat list, then retry; \
             ps -o stat,wchan:20,args {pid} shows what the process waits for"
        ))
    }
}

/// A child process and the descriptor that shows its end.
struct Process {
    child: Child,
    descriptor: AsyncFd<OwnedFd>,
}

impl Process {
    fn new(mut child: Child) -> io::Result<Self> {
        // The child has not been waited for, so the number is still its own.
        let opened = PidFd::open(child.id()).map(PidFd::into_descriptor);
        match opened.and_then(watched) {
            Ok(descriptor) => Ok(Self { child, descriptor }),
            Err(error) => {
                // Without a descriptor nothing can wait for the child but a thread.
                kill_group(&child);
                std::thread::spawn(move || child.wait());
                Err(error)
            }
        }
    }

    /// Waits for the end. May be dropped and called again.
    async fn ended(&mut self) -> io::Result<ExitStatus> {
        loop {
            let mut ready = self.descriptor.readable().await?;
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            ready.clear_ready();
        }
    }

    fn kill(&self) {
        kill_group(&self.child);
    }
}

#[expect(
    deprecated,
    reason = "the replacement is unsafe for types whose descriptor may change; an OwnedFd's does not"
)]
fn watched(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(descriptor, Interest::READABLE)
}

/// Kills the process group of a child that has not been waited for. No other group can have its number.
fn kill_group(child: &Child) {
    let killed = i32::try_from(child.id()).map(|pid| killpg(Pid::from_raw(pid), Signal::SIGKILL));
    tracing::debug!(pid = child.id(), ?killed, "killed a program");
}

/// Returns `text` on one line, at most [`QUOTED_MAX`] bytes of it, without control characters. Of a longer
/// text the end is kept, where programs state what failed.
fn one_line(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let joined = lines.join("; ").replace(char::is_control, " ");
    let start = joined.len().saturating_sub(QUOTED_MAX);
    let start = (start..=joined.len()).find(|at| joined.is_char_boundary(*at)).unwrap_or_default();
    match start {
        0 => joined,
        start => format!("… {}", &joined[start..]),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    const SHELL: Tool = Tool::new("sh", "dash", "dash");

    fn shell(script: &str) -> Call<'static> {
        Call::new(SHELL, Path::new("/dev/nbd0")).args(["-c", script])
    }

    fn within(time: Duration) -> Instant {
        Instant::now() + time
    }

    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(300);

    /// Returns the numbers that a script writes to `file`, one on each line, once there are `count`.
    async fn pids(file: &PathBuf, count: usize) -> Vec<String> {
        loop {
            let text = std::fs::read_to_string(file).unwrap_or_default();
            let found: Vec<_> = text.split_inclusive('\n').map(|line| line.trim().into()).collect();
            if found.len() >= count && text.ends_with('\n') {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn wait_until_gone(pid: &str) {
        let is_gone = || {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
            stat.map_or(true, |stat| stat.contains(") Z "))
        };
        while !is_gone() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    #[tokio::test]
    async fn a_program_has_a_fixed_environment_and_a_group_of_its_own() {
        let script =
            "echo $PWD $LC_ALL; env | wc -l; ps -o pgid= -p $$; echo $$; readlink /proc/$$/fd/0";
        let ended = shell(script).run(within(LONG)).await.unwrap().success().unwrap();
        let lines: Vec<_> = ended.stdout.lines().map(str::trim).collect();
        // PATH, LC_ALL, and the PWD that the shell sets.
        assert_eq!(lines[..2], ["/ C", "3"], "{ended:?}");
        assert_eq!(lines[2], lines[3]);
        assert_eq!(lines[4], "/dev/null");
    }

    #[tokio::test]
    async fn a_failure_quotes_the_error_output_on_one_line() {
        let ended = shell("echo out; echo first >&2; printf 'second\\033[1m\\n\\n' >&2; exit 3");
        let error = ended.run(within(LONG)).await.unwrap().success().unwrap_err();
        assert_eq!(error.message(), "sh /dev/nbd0 failed: first; second [1m (exit status 3)");
        let ended = shell("echo out; kill -TERM $$").run(within(LONG)).await.unwrap();
        assert_eq!(ended.code(), None);
        let message = ended.failure(ErrorKind::Internal).to_string();
        assert_eq!(message, "sh /dev/nbd0 failed: out (ended by signal 15)");
    }

    #[tokio::test]
    async fn a_program_is_killed_at_the_deadline_with_its_group() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("pids");
        let script = format!("sleep 600 & echo $! >{0}; echo $$ >>{0}; wait", file.display());
        let error = shell(&script).run(within(SHORT)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert!(error.message().ends_with("before the deadline and was killed"), "{error}");
        for pid in pids(&file, 2).await {
            wait_until_gone(&pid).await;
        }
        let late = shell("exit").run(Instant::now()).await.unwrap_err();
        assert_eq!(late.kind(), ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn a_program_is_killed_when_its_caller_leaves() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("pids");
        let script = format!("echo $$ >{}; exec sleep 600", file.display());
        let call = shell(&script).run(within(LONG));
        let pid = tokio::select! {
            ended = call => panic!("{ended:?}"),
            found = pids(&file, 1) => found[0].clone(),
        };
        wait_until_gone(&pid).await;
    }

    #[tokio::test]
    async fn a_program_that_writes_continues_and_refuses_others() {
        let directory = tempfile::tempdir().unwrap();
        let (gate, done) = (directory.path().join("gate"), directory.path().join("done"));
        let script = format!(
            "while ! [ -e {} ]; do sleep 0.02; done; echo output; echo done >{}",
            gate.display(),
            done.display()
        );
        let number = DeviceNumber { major: 4095, minor: 1 };
        let error = shell(&script).writes(number).run(within(SHORT)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert!(error.message().contains("continues"), "{error}");
        let busy = shell("exit").writes(number).run(within(LONG)).await.unwrap_err();
        assert_eq!(busy.kind(), ErrorKind::Aborted);
        assert!(!done.exists());
        std::fs::write(&gate, "").unwrap();
        while shell("exit").writes(number).run(within(LONG)).await.is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert!(done.exists());
    }

    #[test]
    fn long_output_is_shortened_at_its_start() {
        let text = format!("{}\nthe reason", "ä".repeat(600));
        let line = one_line(&text);
        assert!(line.starts_with("… ä") && line.ends_with("; the reason"), "{line}");
        assert!(line.len() <= QUOTED_MAX + 5, "{}", line.len());
    }
}
