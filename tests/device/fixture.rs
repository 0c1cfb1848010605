//! A daemon for each test, and the actions of a user.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The timeout of each wait of a test. It is long because emulation (tcg) is slow.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// The number of repetitions of each situation. A campaign sets it, on a machine without other load.
pub(crate) fn repeat() -> Option<u32> {
    let given = std::env::var("CLEAT_REPEAT").ok();
    given.map(|text| text.parse().expect("CLEAT_REPEAT is a number"))
}

/// Checks a documented time limit. A campaign checks the limit itself; otherwise the machine may have
/// other load, and the check allows 8 times the limit.
#[track_caller]
pub(crate) fn promised(took: Duration, limit: Duration, what: &str) {
    let limit = if repeat().is_some() { limit } else { 8 * limit };
    assert!(took < limit, "{what}: took {took:?}");
}

/// The log of the daemons.
pub(crate) const LOG: &str = "/out/node.log";
const SOCKET: &str = "/run/cleat/cleat.sock";

/// A running `cleat node`. Dropping it kills the daemon and its workers, and disconnects the devices.
pub(crate) struct Node {
    child: Child,
}

impl Node {
    /// Starts a daemon without mappings.
    pub(crate) fn start() -> Self {
        Self::start_as(cleat_command(&["node"]))
    }

    /// As [`Node::start`], with a command that becomes the daemon.
    pub(crate) fn start_as(command: Command) -> Self {
        install_rules();
        clean_up();
        Self { child: spawn(command) }
    }

    /// Starts it again after [`Node::kill`] or [`Node::terminate`], with the same state.
    pub(crate) fn restart(&mut self) {
        self.restart_as(cleat_command(&["node"]));
    }

    /// As [`Node::restart`], with a command that becomes the daemon. Waits until the last daemon has ended.
    pub(crate) fn restart_as(&mut self, command: Command) {
        self.child.wait().expect("waiting for the daemon");
        self.child = spawn(command);
    }

    /// Kills the daemon with SIGKILL.
    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("killing the daemon");
        self.child.wait().expect("waiting for the daemon");
    }

    /// Stops the daemon with SIGTERM, as `systemctl stop` does.
    pub(crate) fn terminate(&mut self) {
        signal("TERM", self.child.id());
        let done = Instant::now() + TIMEOUT;
        while self.child.try_wait().expect("waiting for the daemon").is_none() {
            assert!(Instant::now() < done, "the daemon ignores SIGTERM; see {LOG}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // It has ended already if the test killed it.
        let _ = self.child.kill();
        let _ = self.child.wait();
        clean_up();
    }
}

fn spawn(mut command: Command) -> Child {
    let log = std::fs::File::options().create(true).append(true).open(LOG).expect("the log opens");
    let child = command
        .stdin(Stdio::null())
        .stdout(log.try_clone().expect("the log's descriptor"))
        .stderr(log)
        .spawn()
        .expect("cleat node starts");
    let done = Instant::now() + TIMEOUT;
    // Try to connect first: it is cheaper than a process of the command line.
    while UnixStream::connect(SOCKET).is_err() || !cleat(&["ls"]).status.success() {
        assert!(Instant::now() < done, "the daemon does not answer; see {LOG}");
        std::thread::sleep(Duration::from_millis(50));
    }
    child
}

/// Kills all workers, disconnects all devices, and deletes all records.
fn clean_up() {
    for line in shell("pgrep -f '[c]leat worker' || true").lines() {
        signal("KILL", line.parse().expect("pgrep prints numbers"));
    }
    for index in 0..200 {
        if Path::new(&format!("/sys/block/nbd{index}/pid")).exists() {
            shell(&format!(
                "umount -l /dev/nbd{index} || true; nbd-client -d /dev/nbd{index} || true"
            ));
        }
    }
    shell("rm -rf /run/cleat /var/lib/cleat");
}

/// Installs the udev rules of cleat.
pub(crate) fn install_rules() {
    let target = Path::new("/etc/udev/rules.d/60-cleat.rules");
    if !target.exists() {
        std::fs::copy("60-cleat.rules", target).expect("the udev rules are in the payload");
        shell("udevadm control --reload");
    }
}

/// Sends a signal. It is no error when the process has ended already.
pub(crate) fn signal(name: &str, pid: u32) {
    shell(&format!("kill -{name} {pid} || true"));
}

pub(crate) fn cleat_command(arguments: &[&str]) -> Command {
    let mut command = Command::new("./cleat");
    command.args(arguments);
    command
}

/// Runs `cleat` with these arguments.
pub(crate) fn cleat(arguments: &[&str]) -> Output {
    cleat_command(arguments).output().expect("cleat runs")
}

/// Runs `cleat` with these arguments, which must succeed. Returns its trimmed stdout.
pub(crate) fn cleat_ok(arguments: &[&str]) -> String {
    let output = cleat(arguments);
    assert!(
        output.status.success(),
        "cleat {arguments:?}: {}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).expect("output is UTF-8").trim_end().to_owned()
}

/// The output of `cleat status NAME -o json`.
pub(crate) fn status(target: &str) -> serde_json::Value {
    let text = cleat_ok(&["status", target, "-o", "json"]);
    let value: serde_json::Value = serde_json::from_str(&text).expect("status prints JSON");
    match value {
        serde_json::Value::Array(mut list) => list.remove(0),
        other => other,
    }
}

/// Waits until `status` shows `state`.
pub(crate) fn wait_for_state(target: &str, state: &str) {
    let done = Instant::now() + TIMEOUT;
    loop {
        let status = status(target);
        if status["state"] == state {
            return;
        }
        assert!(Instant::now() < done, "{target} is not {state}: {status}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Runs a shell script, which must succeed. Returns its trimmed stdout.
pub(crate) fn shell(script: &str) -> String {
    // With -e, bash ignores the status of `! COMMAND`, unless it is the last command.
    let fails = "fails() { if \"$@\"; then echo \"this succeeded: $*\"; return 1; fi; }";
    let text = format!("{fails}\n{script}");
    let output = Command::new("bash").args(["-euo", "pipefail", "-c", &text]).output();
    let output = output.expect("bash runs");
    assert!(
        output.status.success(),
        "{script}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
}

/// Whether this kernel is of the series `major.minor` or a later one.
pub(crate) fn kernel_is_at_least(major: u32, minor: u32) -> bool {
    let release = shell("uname -r");
    let mut numbers = release.split(['.', '-']).map(|n| n.parse::<u32>().unwrap_or(0));
    (numbers.next(), numbers.next()) >= (Some(major), Some(minor))
}

/// One block, aligned for direct access.
#[repr(align(4096))]
pub(crate) struct Block(pub(crate) [u8; 4096]);

impl Block {
    pub(crate) fn new() -> Box<Self> {
        Box::new(Self([0; 4096]))
    }
}

/// A sparse file, which is removed when the value is dropped.
pub(crate) struct Image(PathBuf);

impl Image {
    pub(crate) fn new(name: &str, size: &str) -> Self {
        Self::below("/tmp", name, size)
    }

    /// Makes the file on a disk: tmpfs does not support direct I/O before Linux 6.6.
    pub(crate) fn on_disk(name: &str, size: &str) -> Self {
        Self::below("/var/tmp", name, size)
    }

    fn below(directory: &str, name: &str, size: &str) -> Self {
        let path = PathBuf::from(format!("{directory}/{name}.img"));
        shell(&format!("rm -f {0}; truncate -s {size} {0}", path.display()));
        Self(path)
    }

    pub(crate) fn uri(&self) -> String {
        format!("file:{}", self.0.display())
    }

    pub(crate) fn path(&self) -> &str {
        self.0.to_str().expect("the path is ASCII")
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // An error leaves only a temporary file behind.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A loop device on a sparse file, which is detached when the value is dropped.
pub(crate) struct Loop {
    device: String,
    _image: Image,
}

impl Loop {
    pub(crate) fn new(name: &str, size: &str) -> Self {
        let image = Image::new(&format!("{name}-loop"), size);
        let device = shell(&format!("losetup --find --show {}", image.path()));
        Self { device, _image: image }
    }

    pub(crate) fn uri(&self) -> String {
        format!("file:{}", self.device)
    }

    pub(crate) fn device(&self) -> &str {
        &self.device
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        shell(&format!("losetup -d {} || true", self.device));
    }
}
