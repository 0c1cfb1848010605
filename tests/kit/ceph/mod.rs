//! A small Ceph cluster for tests: one monitor, one OSD in memory, cephx. It starts within seconds.
//!
//! `tests/kit/ceph/cluster` creates and runs the cluster; this module starts that script and sends it
//! commands. The cluster stops when the [`Cluster`] is dropped or the process exits, because the
//! script's standard input is closed then.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The pool that [`Cluster::ID`] may use.
pub const POOL: &str = "volumes";

/// The client that may use [`POOL`] with `profile rbd`, and no other pool.
pub const ID: &str = "volumes";

/// The bucket of the gateway.
pub const BUCKET: &str = "volumes";

/// A running cluster.
#[derive(Debug)]
pub struct Cluster {
    directory: PathBuf,
    script: Mutex<Script>,
    /// Whether the gateway was started.
    gateway: Mutex<bool>,
}

#[derive(Debug)]
struct Script {
    process: Child,
    /// `None` after the script has been asked to stop.
    commands: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

/// Returns the cluster that the tests of this process share. It runs until the process exits.
pub fn shared() -> &'static Cluster {
    static SHARED: OnceLock<Cluster> = OnceLock::new();
    SHARED.get_or_init(Cluster::start)
}

/// Set in processes that run under valgrind.
const VALGRIND: &str = "CLEAT_TEST_VALGRIND";

/// Returns whether this process runs under valgrind, where everything takes twenty times as long.
pub fn is_under_valgrind() -> bool {
    std::env::var_os(VALGRIND).is_some()
}

/// Runs the tests of this executable whose names start with one of `tests` once more, under valgrind,
/// and checks that no memory is lost and that no freed memory is read.
pub fn run_under_valgrind(tests: &[&str]) {
    let output = Command::new("valgrind")
        .args(["--leak-check=full", "--errors-for-leak-kinds=definite,indirect"])
        .args(["--error-exitcode=9", "--num-callers=25"])
        .arg(std::env::current_exe().expect("the path of this executable"))
        .arg("--test-threads=1")
        .args(tests)
        .env(VALGRIND, "1")
        .output()
        .expect("valgrind runs (apt install valgrind)");
    let printed = String::from_utf8_lossy(&output.stderr);
    let passed = format!("{} passed", tests.len());
    let passed = String::from_utf8_lossy(&output.stdout).contains(&passed);
    assert!(output.status.success() && passed, "{printed}");
    assert!(printed.contains("definitely lost: 0 bytes"), "{printed}");
}

impl Cluster {
    /// Starts a cluster that only the caller uses, for a test that stops its daemons.
    pub fn start() -> Self {
        Self::start_in("memory")
    }

    /// Starts a cluster whose OSD keeps its data on disk, and has it again after it was killed.
    pub fn start_on_disk() -> Self {
        Self::start_in("disk")
    }

    /// Starts a cluster with two OSDs, `osd` and `osd1`, that keep different objects.
    pub fn start_with_two_osds() -> Self {
        Self::start_with(&Self::script(), &["memory", "2"])
    }

    /// Starts a cluster at an address of this host, for clients on other machines.
    pub fn start_at(address: &str) -> Self {
        Self::start_with(&Self::script(), &["memory", "1", address])
    }

    fn start_in(store: &str) -> Self {
        Self::start_by(&Self::script(), store)
    }

    fn script() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("ceph/cluster")
    }

    /// Starts a cluster by a copy of the script, for callers without access to this directory.
    /// `store` is `memory` or `disk`.
    pub fn start_by(script: &Path, store: &str) -> Self {
        Self::start_with(script, &[store])
    }

    fn start_with(script: &Path, arguments: &[&str]) -> Self {
        let mut process = Command::new(script)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("tests/kit/ceph/cluster starts (it needs python3)");
        let commands = process.stdin.take();
        let answers = BufReader::new(process.stdout.take().expect("standard output is a pipe"));
        let mut script = Script { process, commands, answers };
        let first = script.line();
        let Some(directory) = first.strip_prefix("directory ") else {
            panic!("the test cluster did not start: {first}");
        };
        assert_eq!(script.line(), "ready");
        Self { directory: directory.into(), script: Mutex::new(script), gateway: Mutex::new(false) }
    }

    /// The cluster's configuration file.
    pub fn conf(&self) -> PathBuf {
        self.directory.join("ceph.conf")
    }

    /// The key of a client: `admin` or [`ID`].
    pub fn keyring(&self, id: &str) -> PathBuf {
        self.directory.join(format!("{id}.keyring"))
    }

    /// Returns the address `HOST:PORT` of a gateway with the S3 API, which is started at the first call, and the path
    /// of the file with its keys. It has the bucket [`BUCKET`].
    pub fn s3(&self) -> (String, PathBuf) {
        let mut started = self.gateway.lock().unwrap_or_else(PoisonError::into_inner);
        if !*started {
            self.tell("start rgw");
            *started = true;
        }
        let endpoint = std::fs::read_to_string(self.directory.join("s3.endpoint"));
        (endpoint.expect("the script has written it"), self.directory.join("s3.credentials"))
    }

    /// As [`Self::s3`], with TLS. Returns the certificate of the gateway, too.
    pub fn s3_with_tls(&self) -> (String, PathBuf, PathBuf) {
        let (_, credentials) = self.s3();
        let endpoint = std::fs::read_to_string(self.directory.join("s3.tls-endpoint"));
        let endpoint = endpoint.expect("the script has written it");
        (endpoint, credentials, self.directory.join("s3.crt"))
    }

    /// Sends a command for a daemon: `stop osd`, `kill mon`, `start mon`, `pause osd`, `resume osd`,
    /// `start mgr`, or `start rgw`. Quotas need the manager.
    pub fn tell(&self, command: &str) {
        let mut script = self.script.lock().unwrap_or_else(PoisonError::into_inner);
        let commands = script.commands.as_mut().expect("the script was not asked to stop");
        writeln!(commands, "{command}").expect("the script reads commands");
        assert_eq!(script.line(), "ok", "{command}");
    }

    /// Runs `ceph` as the administrator and returns its standard output.
    pub fn ceph(&self, arguments: &[&str]) -> String {
        let printed = self.run("ceph", &[&["--connect-timeout", "60"], arguments].concat());
        String::from_utf8(printed.expect("ceph succeeds")).expect("UTF-8")
    }

    /// Creates another pool for images. A pool of that name that exists already is no error.
    pub fn make_pool(&self, name: &str) {
        self.ceph(&["osd", "pool", "create", name, "8"]);
        self.ceph(&["osd", "pool", "application", "enable", name, "rbd"]);
    }

    /// Runs `rbd` as the administrator and returns its standard output.
    ///
    /// # Errors
    /// The exit status and the standard error output of a command that fails.
    pub fn rbd(&self, arguments: &[&str]) -> Result<Vec<u8>, String> {
        self.run("rbd", arguments)
    }

    /// Runs `rados` as [`Cluster::rbd`] runs `rbd`.
    ///
    /// # Errors
    /// The exit status and the standard error output of a command that fails.
    pub fn rados(&self, arguments: &[&str]) -> Result<Vec<u8>, String> {
        self.run("rados", arguments)
    }

    /// Runs the command `ceph auth caps` that an error message recommends, in a shell.
    ///
    /// # Errors
    /// A message without such a command, or the standard error output of the command.
    pub fn grant(&self, message: &str) -> Result<(), String> {
        let (_, rest) =
            message.split_once("ceph auth caps ").ok_or("the message recommends no command")?;
        let (command, _) =
            rest.split_once(" (this replaces").ok_or("the recommended command has no end")?;
        let script =
            format!("ceph --connect-timeout 60 --id admin --conf \"$1\" auth caps {command}");
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(script).arg("sh").arg(self.conf()).env_remove("CEPH_ARGS");
        let output = shell.output().expect("sh starts");
        let complaint = String::from_utf8_lossy(&output.stderr);
        output.status.success().then_some(()).ok_or_else(|| complaint.into_owned())
    }

    fn run(&self, program: &str, arguments: &[&str]) -> Result<Vec<u8>, String> {
        let output = Command::new(program)
            .args(["--id", "admin", "--conf"])
            .arg(self.conf())
            .args(arguments)
            .env_remove("CEPH_ARGS")
            .output()
            .unwrap_or_else(|error| panic!("{program}: {error}"));
        if output.status.success() {
            return Ok(output.stdout);
        }
        let complaint = String::from_utf8_lossy(&output.stderr);
        Err(format!("{program} {arguments:?}: {}: {complaint}", output.status))
    }
}

impl Script {
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).expect("the script writes UTF-8");
        line.trim_end().to_owned()
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        drop(self.commands.take());
        let _ = self.process.wait();
    }
}
