//! The binary, and `rbd` beside it, on the cluster that the tests share.

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::NamedTempFile;
use test_kit::ceph::{Cluster, ID, POOL, shared};

pub(crate) const MIB: u64 = 1 << 20;

/// How long a command may take before something is wrong with the test itself, in seconds.
const LIMIT_S: &str = "300";

/// What a command of `cleat` has led to.
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

    /// Its result as JSON.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The message of its error, of the exit code `code`, with the repair.
    pub(crate) fn error(&self, code: i32) -> &str {
        assert_eq!(self.code, code, "{self:?}");
        assert_eq!(self.stdout, "", "{self:?}");
        assert!(self.stderr.contains("cleat: error: "), "{self:?}");
        &self.stderr
    }
}

/// Runs `cleat volume`; `words` are what a shell would make of it.
pub(crate) fn volume(words: &[&str]) -> Run {
    let mut command = Command::new("timeout");
    command.arg(LIMIT_S).arg(env!("CARGO_BIN_EXE_cleat")).arg("volume").args(words);
    Run::of(clean(&mut command).output().expect("it runs"))
}

/// As [`volume`], which has to succeed; whether it changed anything.
pub(crate) fn changed(words: &[&str]) -> bool {
    let run = volume(&[words, &["-o", "json"]].concat());
    assert_eq!(run.code, 0, "{words:?}: {run:?}");
    run.json()["changed"].as_bool().unwrap_or_else(|| panic!("{run:?}"))
}

/// As [`volume`] with `-o json`, which has to succeed.
pub(crate) fn json(words: &[&str]) -> Value {
    let run = volume(&[words, &["-o", "json"]].concat());
    assert_eq!(run.code, 0, "{words:?}: {run:?}");
    assert!(run.stderr.lines().all(|line| line.starts_with("{\"progress\":")), "{run:?}");
    run.json()
}

/// As [`volume`], and goes on at once.
pub(crate) fn spawn(words: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cleat"));
    let command = clean(command.arg("volume").args(words));
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it runs")
}

/// How it ended: by a code, or by a signal.
pub(crate) fn end(status: ExitStatus) -> (Option<i32>, Option<i32>) {
    (status.code(), status.signal())
}

/// What `rbd` says, as the administrator.
pub(crate) fn rbd(words: &[&str]) -> Value {
    let said = run_rbd(shared(), &[words, &["--format", "json"]].concat());
    serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error}: {said}"))
}

/// Has `rbd` do something, as the administrator.
pub(crate) fn run_rbd(cluster: &Cluster, words: &[&str]) -> String {
    let mut command = Command::new("timeout");
    command.args([LIMIT_S, "rbd", "--id", "admin", "--conf"]).arg(cluster.conf()).args(words);
    let output = clean(&mut command).output().expect("rbd runs");
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "rbd {words:?}: {complaint}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// The names that `rbd` lists in the tests' pool.
pub(crate) fn listed() -> Vec<String> {
    serde_json::from_value(rbd(&["ls", POOL])).expect("names")
}

/// What stands behind the `?` for the tests' client.
pub(crate) fn options() -> String {
    options_of(shared(), ID)
}

pub(crate) fn options_of(cluster: &Cluster, id: &str) -> String {
    let (conf, keyring) = (cluster.conf(), cluster.keyring(id));
    format!("conf={}&keyring={}&id={id}", conf.display(), keyring.display())
}

/// An image or a snapshot in the tests' pool, by its name.
pub(crate) fn uri(name: &str) -> String {
    format!("rbd:{POOL}/{name}?{}", options())
}

/// The tests' pool, or a namespace in it.
pub(crate) fn place(namespace: &str) -> String {
    format!("rbd:{POOL}{namespace}?{}", options())
}

/// Fills an image of `size` bytes in small objects, so that what is done to all of it takes a while.
pub(crate) fn many_objects(name: &str, size: &str) {
    let size_args = ["--object-size", "4K"];
    assert!(changed(&[&["create", &uri(name), size][..], &size_args].concat()));
    let target = format!("{POOL}/{name}");
    let bench = ["bench", "--io-type", "write", "--io-size", "4K", "--io-pattern", "seq"];
    run_rbd(shared(), &[&bench[..], &["--io-threads", "64", "--io-total", size, &target]].concat());
}

/// A volume that is open in another process until this is dropped.
#[derive(Debug)]
pub(crate) struct User {
    process: Child,
    /// Where it serves it.
    nbd: String,
    log: NamedTempFile,
}

impl User {
    /// Serves `uri`, to clients that may never come.
    pub(crate) fn of(uri: &str) -> Self {
        Self::try_of(uri).unwrap_or_else(|said| panic!("it does not serve {uri}: {said}"))
    }

    /// The same; what it says instead, where it does not.
    pub(crate) fn try_of(uri: &str) -> Result<Self, String> {
        let log = NamedTempFile::new().expect("a file");
        let mut command = Command::new(env!("CARGO_BIN_EXE_cleat"));
        let command = clean(command.args(["serve", uri, "--listen", "127.0.0.1:0"]));
        let stderr = log.reopen().expect("it is there");
        let mut process = command.stdout(Stdio::piped()).stderr(stderr).spawn().expect("it runs");
        let stdout = process.stdout.take().expect("it is piped");
        let mut user = Self { process, nbd: String::new(), log };
        let mut line = String::new();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(stdout), &mut line)
            .expect("it can be read");
        if !line.starts_with("nbd://") {
            return Err(user.end());
        }
        line.trim_end().clone_into(&mut user.nbd);
        Ok(user)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.process.id().cast_signed()), signal).expect("it is ours");
    }

    /// Ends it as a crash does.
    pub(crate) fn die(mut self) {
        self.signal(Signal::SIGKILL);
        self.process.wait().expect("it is ours");
    }

    /// Whether it still writes for its clients.
    pub(crate) fn writes(&self) -> bool {
        self.does("write 0 4k")
    }

    /// Whether it does for a client what `qemu-io` calls so.
    pub(crate) fn does(&self, what: &str) -> bool {
        let mut command = Command::new("timeout");
        let read_only = if what.starts_with("read") { &["-r"][..] } else { &[] };
        command.args([LIMIT_S, "qemu-io"]).args(read_only);
        command.args(["-f", "raw", &self.nbd, "-c", what]);
        command.output().expect("qemu-io runs").status.success()
    }

    /// Ends it in order, so that the image is closed; what it has said on its standard error.
    pub(crate) fn end(&mut self) -> String {
        if matches!(self.process.try_wait(), Ok(None)) {
            self.signal(Signal::SIGTERM);
            self.signal(Signal::SIGCONT);
            self.process.wait().expect("it is ours");
        }
        std::fs::read_to_string(self.log.path()).expect("it is there")
    }
}

impl Drop for User {
    fn drop(&mut self) {
        self.end();
    }
}

/// Without what the environment could change.
pub(crate) fn clean(command: &mut Command) -> &mut Command {
    command.env_remove("CEPH_ARGS").env_remove("CEPH_CONF").env_remove("CLEAT_SOCKET")
}
