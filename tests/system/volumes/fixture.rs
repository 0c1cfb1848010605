//! Helpers that run `cleat` and `rbd` on the cluster that the tests share.

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::NamedTempFile;
use test_kit::ceph::{Cluster, ID, POOL, shared};

pub(crate) const MIB: u64 = 1 << 20;

/// The time limit of a command, in seconds. No command takes so long unless the test is broken.
const LIMIT_S: &str = "300";

/// The result of a `cleat` command.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Run {
    fn of(output: std::process::Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
        let code = output.status.code().unwrap_or_else(|| panic!("{:?}", output.status));
        Self { code, stdout: text(output.stdout), stderr: text(output.stderr) }
    }

    /// Parses standard output as JSON.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Checks the exit code, and returns the error message with its repair hint.
    pub(crate) fn error(&self, code: i32) -> &str {
        assert_eq!(self.code, code, "{self:?}");
        assert_eq!(self.stdout, "", "{self:?}");
        assert!(self.stderr.contains("cleat: error: "), "{self:?}");
        &self.stderr
    }
}

/// Runs `cleat volume` with the arguments `words`.
pub(crate) fn volume(words: &[&str]) -> Run {
    volume_with(words, &[])
}

/// Runs [`volume`] with more variables in its environment.
pub(crate) fn volume_with(words: &[&str], variables: &[(&str, &str)]) -> Run {
    let mut command = Command::new("timeout");
    command.arg(LIMIT_S).arg(env!("CARGO_BIN_EXE_cleat")).arg("volume").args(words);
    let command = clean(&mut command).envs(variables.iter().copied());
    Run::of(command.output().expect("cleat starts"))
}

/// Runs [`volume`], checks that it succeeds, and returns whether it changed anything.
pub(crate) fn changed(words: &[&str]) -> bool {
    let run = volume(&[words, &["-o", "json"]].concat());
    assert_eq!(run.code, 0, "{words:?}: {run:?}");
    run.json()["changed"].as_bool().unwrap_or_else(|| panic!("{run:?}"))
}

/// Runs [`volume`] with `-o json`, checks that it succeeds, and returns the parsed output.
pub(crate) fn json(words: &[&str]) -> Value {
    let run = volume(&[words, &["-o", "json"]].concat());
    assert_eq!(run.code, 0, "{words:?}: {run:?}");
    assert!(run.stderr.lines().all(|line| line.starts_with("{\"progress\":")), "{run:?}");
    run.json()
}

/// Starts `cleat volume` and does not wait for it.
pub(crate) fn spawn(words: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cleat"));
    let command = clean(command.arg("volume").args(words));
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("cleat starts")
}

/// Returns the exit code or the signal that ended the process.
pub(crate) fn end(status: ExitStatus) -> (Option<i32>, Option<i32>) {
    (status.code(), status.signal())
}

/// Runs `rbd` as the administrator and returns its JSON output.
pub(crate) fn rbd(words: &[&str]) -> Value {
    let printed = run_rbd(shared(), &[words, &["--format", "json"]].concat());
    serde_json::from_str(&printed).unwrap_or_else(|error| panic!("{error}: {printed}"))
}

/// Runs `rbd` as the administrator, checks that it succeeds, and returns its standard output.
pub(crate) fn run_rbd(cluster: &Cluster, words: &[&str]) -> String {
    let mut command = Command::new("timeout");
    command.args([LIMIT_S, "rbd", "--id", "admin", "--conf"]).arg(cluster.conf()).args(words);
    let output = clean(&mut command).output().expect("rbd runs");
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "rbd {words:?}: {complaint}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// Returns the image names that `rbd` lists in the tests' pool.
pub(crate) fn listed() -> Vec<String> {
    serde_json::from_value(rbd(&["ls", POOL])).expect("names")
}

/// Returns the URI options of the tests' client.
pub(crate) fn options() -> String {
    options_of(shared(), ID)
}

pub(crate) fn options_of(cluster: &Cluster, id: &str) -> String {
    let (conf, keyring) = (cluster.conf(), cluster.keyring(id));
    format!("conf={}&keyring={}&id={id}", conf.display(), keyring.display())
}

/// Returns the URI of an image or a snapshot in the tests' pool.
pub(crate) fn uri(name: &str) -> String {
    format!("rbd:{POOL}/{name}?{}", options())
}

/// Returns the URI of the tests' pool, or of a namespace in it (`/NAME`).
pub(crate) fn place(namespace: &str) -> String {
    format!("rbd:{POOL}{namespace}?{}", options())
}

/// Creates and fills an image of `size` with small objects, so that operations on all of it take seconds.
pub(crate) fn many_objects(name: &str, size: &str) {
    let size_args = ["--object-size", "4K"];
    assert!(changed(&[&["create", &uri(name), size][..], &size_args].concat()));
    let target = format!("{POOL}/{name}");
    let bench = ["bench", "--io-type", "write", "--io-size", "4K", "--io-pattern", "seq"];
    run_rbd(shared(), &[&bench[..], &["--io-threads", "64", "--io-total", size, &target]].concat());
}

/// A `cleat serve` process that has a volume open until this value is dropped.
#[derive(Debug)]
pub(crate) struct User {
    process: Child,
    /// The NBD URI of the server.
    nbd: String,
    log: NamedTempFile,
}

impl User {
    /// Starts a server of `uri`, or panics with its log.
    pub(crate) fn of(uri: &str) -> Self {
        Self::try_of(uri).unwrap_or_else(|log| panic!("the server of {uri} did not start: {log}"))
    }

    /// Starts a server of `uri`.
    pub(crate) fn try_of(uri: &str) -> Result<Self, String> {
        let log = NamedTempFile::new().expect("a file");
        let mut command = Command::new(env!("CARGO_BIN_EXE_cleat"));
        let command = clean(command.args(["serve", uri, "--listen", "127.0.0.1:0"]));
        let stderr = log.reopen().expect("the log file");
        let mut process =
            command.stdout(Stdio::piped()).stderr(stderr).spawn().expect("cleat starts");
        let stdout = process.stdout.take().expect("standard output is piped");
        let mut user = Self { process, nbd: String::new(), log };
        let mut line = String::new();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(stdout), &mut line)
            .expect("standard output is readable");
        if !line.starts_with("nbd://") {
            return Err(user.end());
        }
        line.trim_end().clone_into(&mut user.nbd);
        Ok(user)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.process.id().cast_signed()), signal)
            .expect("the process is a child");
    }

    /// Returns what the server has logged.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.log.path()).expect("the log file")
    }

    /// Kills the server with SIGKILL, as a crash does.
    pub(crate) fn die(mut self) {
        self.signal(Signal::SIGKILL);
        self.process.wait().expect("the process is a child");
    }

    /// Returns whether a client's write succeeds.
    pub(crate) fn writes(&self) -> bool {
        self.does("write 0 4k")
    }

    /// Returns whether the `qemu-io` command `what` succeeds.
    pub(crate) fn does(&self, what: &str) -> bool {
        self.does_all(&[what])
    }

    /// Returns whether the `qemu-io` commands succeed, one after the other.
    pub(crate) fn does_all(&self, commands: &[impl AsRef<str>]) -> bool {
        let mut command = Command::new("timeout");
        let reads = commands.iter().all(|what| what.as_ref().starts_with("read"));
        let read_only = if reads { &["-r"][..] } else { &[] };
        command.args([LIMIT_S, "qemu-io"]).args(read_only).args(["-f", "raw", &self.nbd]);
        for what in commands {
            command.args(["-c", what.as_ref()]);
        }
        command.output().expect("qemu-io runs").status.success()
    }

    /// Stops the server with SIGTERM, so that it closes the image, and returns its standard error output.
    pub(crate) fn end(&mut self) -> String {
        if matches!(self.process.try_wait(), Ok(None)) {
            self.signal(Signal::SIGTERM);
            self.signal(Signal::SIGCONT);
            self.process.wait().expect("the process is a child");
        }
        self.log()
    }
}

impl Drop for User {
    fn drop(&mut self) {
        self.end();
    }
}

/// Removes environment variables that change the behaviour of a command.
pub(crate) fn clean(command: &mut Command) -> &mut Command {
    command.env_remove("CEPH_ARGS").env_remove("CEPH_CONF").env_remove("CLEAT_SOCKET")
}
