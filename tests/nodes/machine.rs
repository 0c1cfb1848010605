//! A virtual machine that is a node.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use test_kit::control_plane::{ControlPlane, HOST_OF_MACHINES, tail};

use crate::programs::{fill, project};

/// The limit for the start of the machine and of kubelet, with the import of the images.
const BOOT: Duration = Duration::from_secs(400);

/// The limit for a command on the node.
const COMMAND: Duration = Duration::from_secs(300);

/// A node of the cluster. It ends with the value.
pub(crate) struct Machine {
    process: Child,
    shell: Mutex<BufReader<TcpStream>>,
    out: PathBuf,
}

impl Machine {
    /// Boots a machine, and waits until its kubelet has been started.
    pub(crate) fn start(plane: &ControlPlane, name: &str, images: &[(String, &str)]) -> Self {
        let directory = plane.directory().join(name);
        let (payload, out) = (directory.join("payload"), directory.join("out"));
        let kubeconfig = plane.kubelet_kubeconfig(name);
        fill(&payload, &kubeconfig, images);
        std::fs::copy(plane.authority(), payload.join("ca.crt")).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let shell = format!("{HOST_OF_MACHINES}:{}", listener.local_addr().unwrap().port());
        let log = directory.join("vm.log");
        let mut process = run(
            &payload,
            &out,
            &log,
            &[
                format!("NODE={name}"),
                format!("API_SERVER={HOST_OF_MACHINES}:{}", plane.port()),
                format!("SHELL_ADDRESS={shell}"),
            ],
        );
        let shell = accept(&listener, &mut process, &log);
        Self { process, shell: Mutex::new(BufReader::new(shell)), out }
    }

    /// Runs a command of bash on the node, and returns its output. The command must succeed.
    pub(crate) fn run(&self, command: &str) -> String {
        let (status, output) = self.try_run(command);
        assert_eq!(status, 0, "{command}: {output}");
        output
    }

    /// Runs a command of bash on the node, and returns its exit status and its output.
    pub(crate) fn try_run(&self, command: &str) -> (i64, String) {
        let mut shell = self.shell.lock().unwrap();
        let mut line = json!(command).to_string();
        line.push('\n');
        shell.get_mut().write_all(line.as_bytes()).unwrap();
        let mut answer = String::new();
        shell.read_line(&mut answer).unwrap_or_else(|error| panic!("{command}: {error}"));
        let answer: Value =
            serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{command}: {error}"));
        (answer["status"].as_i64().unwrap(), answer["output"].as_str().unwrap().to_owned())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if std::thread::panicking() {
            show(&self.out);
        }
        // The harness of the machine ends QEMU.
        let _ = self.shell.lock().map(|shell| shell.get_ref().shutdown(std::net::Shutdown::Both));
        let _ = self.process.wait();
    }
}

/// Starts the machine, in which the script `start` uses these variables.
fn run(payload: &Path, out: &Path, log: &Path, variables: &[String]) -> Child {
    let file = File::create(log).unwrap();
    let errors = file.try_clone().unwrap();
    let mut command = Command::new(project("tests/vm/run"));
    command.arg("--payload").arg(payload).arg("--out").arg(out);
    command.args(["--network", "--disk", "8G", "--memory", "2G", "--timeout", "3600"]);
    command.args(variables.iter().flat_map(|variable| ["--env", variable]));
    command.args(["--", "./start"]);
    command.stdin(Stdio::null()).stdout(file).stderr(errors).spawn().unwrap()
}

/// Waits for the shell of the machine.
fn accept(listener: &TcpListener, process: &mut Child, log: &Path) -> TcpStream {
    listener.set_nonblocking(true).unwrap();
    let deadline = Instant::now() + BOOT;
    loop {
        if let Ok((shell, _)) = listener.accept() {
            shell.set_nonblocking(false).unwrap();
            shell.set_read_timeout(Some(COMMAND)).unwrap();
            return shell;
        }
        let has_ended = process.try_wait().unwrap().is_some();
        assert!(!has_ended && Instant::now() < deadline, "the node does not start: {}", tail(log));
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Prints the ends of the logs of a node. They are complete only when the machine has ended.
fn show(out: &Path) {
    for name in ["console.log", "qemu.log"] {
        println!("{name}: {}", tail(&out.join(name)));
    }
}
