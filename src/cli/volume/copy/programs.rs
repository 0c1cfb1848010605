//! The programs that copy a volume: a child process with `cleat serve`, and `qemu-img`.

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Read};
use std::ops::ControlFlow;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde::Deserialize;

use cleat_backend::store::Progress;
use cleat_backend::uri::VolumeUri;
use cleat_core::error::{Error, ErrorKind, Result};

/// How often a copy looks for signals.
const LOOK: Duration = Duration::from_millis(200);

/// The length of a program's error output that is kept, in bytes.
const MAX_ERRORS: u64 = 16 << 10;

/// The maximum length of what `qemu-img info` prints, in bytes.
const MAX_INFO: u64 = 1 << 20;

/// The scale of progress: `qemu-img` prints hundredths of a percent.
const WHOLE: u64 = 10_000;

/// A child process with its error output. It is killed, with its children, when it is dropped.
struct Program {
    child: Child,
    errors: Option<JoinHandle<String>>,
}

impl Program {
    fn start(command: &mut Command) -> io::Result<Self> {
        Self::with_input(command, Stdio::null())
    }

    fn with_input(command: &mut Command, input: Stdio) -> io::Result<Self> {
        // A signal of the terminal goes to this process only, which then ends the program.
        let mut child = command
            .process_group(0)
            .stdin(input)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let errors = child.stderr.take().map(|mut stream| {
            thread::spawn(move || {
                let mut text = Vec::new();
                // What cannot be read is not shown.
                let _ = (&mut stream).take(MAX_ERRORS).read_to_end(&mut text);
                let _ = io::copy(&mut stream, &mut io::sink());
                String::from_utf8_lossy(&text).into_owned()
            })
        });
        Ok(Self { child, errors })
    }

    fn signal(&self, signal: Signal) {
        if let Ok(pid) = i32::try_from(self.child.id()) {
            // An error means that it has ended.
            let _ = killpg(Pid::from_raw(pid), signal);
        }
    }

    /// Waits for the end. Returns whether the program has succeeded, and its error output.
    fn end(&mut self) -> (bool, String) {
        let succeeded = self.child.wait().is_ok_and(|status| status.success());
        let errors = self.errors.take().and_then(|thread| thread.join().ok());
        (succeeded, errors.unwrap_or_default())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if self.errors.is_some() {
            self.signal(Signal::SIGKILL);
            self.end();
        }
    }
}

/// A process that serves a volume on a socket that only this user can open. It is killed when it is dropped.
pub(super) struct Server {
    program: Program,
    uri: String,
    _directory: tempfile::TempDir,
}

impl Server {
    /// Opens the volume, and returns when clients can connect.
    ///
    /// # Errors
    /// Returns the error of `cleat serve`, and an error if it cannot be started.
    pub(super) fn start(uri: &VolumeUri, options: &[&str]) -> Result<Self> {
        let failed = |error| Error::from_io("cannot start the server of the volume", error);
        let directory = tempfile::Builder::new().prefix("cleat-").tempdir().map_err(failed)?;
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        command.args(["serve", &uri.to_string(), "--output", "json", "--connections", "4"]);
        command.args(options).arg("--socket").arg(directory.path().join("nbd"));
        // If this process is killed, the server releases the volume, and `qemu-img` loses its connection.
        command.arg("--end-with-stdin");
        let mut program = Program::with_input(&mut command, Stdio::piped()).map_err(failed)?;
        let mut line = String::new();
        if let Some(output) = program.child.stdout.take() {
            BufReader::new(output).read_line(&mut line).map_err(failed)?;
        }
        if line.is_empty() {
            let (_, errors) = program.end();
            return Err(error_of(&errors));
        }
        Ok(Self { program, uri: line.trim_end().to_owned(), _directory: directory })
    }

    /// The NBD URI.
    pub(super) fn uri(&self) -> &str {
        &self.uri
    }

    /// Ends the server. It has released the volume, and everything is durable, when this returns.
    ///
    /// # Errors
    /// Returns the error of the server.
    pub(super) fn stop(mut self) -> Result<()> {
        self.program.signal(Signal::SIGTERM);
        match self.program.end() {
            (true, _) => Ok(()),
            (false, errors) => Err(error_of(&errors)),
        }
    }
}

/// Returns the error that `cleat -o json` has printed as its last line.
fn error_of(errors: &str) -> Error {
    #[derive(Deserialize)]
    struct Outer {
        error: Inner,
    }
    #[derive(Deserialize)]
    struct Inner {
        kind: ErrorKind,
        message: String,
        repair: Option<String>,
    }
    let last = errors.lines().rev().find_map(|line| serde_json::from_str::<Outer>(line).ok());
    match last {
        Some(Outer { error: Inner { kind, message, repair } }) => {
            let error = Error::new(kind, message);
            repair.into_iter().fold(error, Error::with_repair)
        }
        None => {
            let message = format!("the server of the volume has ended: {}", errors.trim());
            Error::new(ErrorKind::Internal, message)
        }
    }
}

/// What `qemu-img info` says about a file.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct ImageInfo {
    /// The size of the content in bytes.
    pub(super) virtual_size: u64,
    backing_filename: Option<String>,
    #[serde(default)]
    format_specific: FormatSpecific,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct FormatSpecific {
    data: FormatData,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
struct FormatData {
    data_file: Option<String>,
}

/// Returns what `qemu-img` says about a file of the format.
///
/// # Errors
/// Returns `InvalidArgument` for a file of another format, and for one that refers to other files: its author could have
/// chosen files that only this user can read.
pub(super) fn inspect(file: &Path, format: &str) -> Result<ImageInfo> {
    let found = std::fs::metadata(file)
        .map_err(|error| Error::from_io(format!("cannot read {}", file.display()), error))?;
    if !found.is_file() && !found.file_type().is_block_device() {
        let message = format!("{} is neither a file nor a block device", file.display());
        return Err(Error::new(ErrorKind::InvalidArgument, message)
            .with_repair("copy the content to a file first"));
    }
    let mut command = Command::new("qemu-img");
    command.args(["info", "--output=json", "-f", format]).arg(file);
    let mut program = Program::start(&mut command).map_err(no_qemu_img)?;
    let mut text = String::new();
    if let Some(output) = program.child.stdout.take() {
        // An incomplete text is not valid JSON.
        let _ = output.take(MAX_INFO).read_to_string(&mut text);
    }
    let (_, errors) = program.end();
    let wrong = |why: &str| {
        let message = format!("{} cannot be used as a {format} file: {why}", file.display());
        Error::new(ErrorKind::InvalidArgument, message)
    };
    let info: ImageInfo = serde_json::from_str(&text)
        .map_err(|_| wrong(errors.trim()).with_repair("name the format with --format"))?;
    let other = info.backing_filename.as_ref().or(info.format_specific.data.data_file.as_ref());
    match other {
        Some(other) => Err(wrong(&format!("it refers to the file {other}")).with_repair(format!(
            "make a file of its own: qemu-img convert -O qcow2 {} NEW.qcow2",
            file.display()
        ))),
        None => Ok(info),
    }
}

/// Copies `from` to `to` with `qemu-img convert`, and flushes the target at the end.
///
/// # Errors
/// Returns the error of `qemu-img`, and `Aborted` after a signal.
pub(super) fn convert(
    source: &[&str],
    from: impl AsRef<OsStr>,
    target: &[&str],
    to: &OsStr,
    progress: Progress<'_>,
) -> Result<()> {
    let mut command = Command::new("qemu-img");
    // The default of -t ignores flushes.
    command.args(["convert", "-p", "-t", "writeback"]).args(source).args(target);
    command.args([from.as_ref(), to]);
    let mut program = Program::start(&mut command).map_err(no_qemu_img)?;
    if let Some(output) = program.child.stdout.take() {
        let (sender, steps) = channel();
        thread::spawn(move || {
            for part in BufReader::new(output).split(b'\r').map_while(io::Result::ok) {
                // The receiver ends with the copy.
                let _ = steps_of(&part).map(|done| sender.send(done));
            }
        });
        follow(&steps, progress)?;
    }
    match program.end() {
        (true, _) => Ok(()),
        (false, errors) => {
            let message = format!("the copy has failed: {}", errors.trim());
            Err(Error::new(ErrorKind::Internal, message))
        }
    }
}

/// Reports progress until the program has closed its output.
fn follow(steps: &Receiver<u64>, progress: Progress<'_>) -> Result<()> {
    let mut done = 0;
    loop {
        match steps.recv_timeout(LOOK) {
            Ok(step) => done = step,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
        if let ControlFlow::Break(()) = progress(done, WHOLE) {
            return Err(Error::new(ErrorKind::Aborted, "a signal has ended the copy"));
        }
    }
}

/// Parses `    (12.34/100%)`.
fn steps_of(text: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(text).ok()?.trim().strip_prefix('(')?;
    let (whole, hundredths) = text.split_once('/')?.0.split_once('.')?;
    Some(whole.parse::<u64>().ok()? * 100 + hundredths.parse::<u64>().ok()?)
}

fn no_qemu_img(error: io::Error) -> Error {
    let missing = error.kind() == io::ErrorKind::NotFound;
    let error = Error::from_io("cannot start qemu-img", error);
    if missing {
        let error = Error::new(ErrorKind::Unsupported, "the program qemu-img is missing");
        return error.with_repair("apt install qemu-utils");
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_read_from_the_output_of_qemu_img() {
        assert_eq!(steps_of(b"    (0.00/100%)"), Some(0));
        assert_eq!(steps_of(b"    (12.34/100%)"), Some(1234));
        assert_eq!(steps_of(b"    (100.00/100%)"), Some(WHOLE));
        for other in [&b""[..], b"(1/100%)", b"(a.b/100%)", b"\xff"] {
            assert_eq!(steps_of(other), None);
        }
    }

    #[test]
    fn the_error_of_the_server_is_the_last_json_line() {
        let text = "WARN something\n{\"error\":{\"kind\":\"in_use\",\"message\":\"a\",\"repair\":\"b\"}}\n";
        let error = error_of(text);
        assert_eq!(
            (error.kind(), error.message(), error.repair()),
            (ErrorKind::InUse, "a", Some("b"))
        );
        assert!(error_of("nothing").message().ends_with("nothing"));
    }
}
