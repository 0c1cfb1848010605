//! A virtual machine that is a node.

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use test_kit::control_plane::{ControlPlane, HOST_OF_MACHINES, MACHINES, tail};

use crate::network::{address, make_tap};
use crate::programs::{output, project};

/// The limit for the start of the machine and of kubelet. If the machine imports the images, it takes minutes.
const BOOT: Duration = Duration::from_secs(600);

/// Kernel parameters with which Go programs cost an emulated processor less: their many short timers end with the next
/// tick, instead of setting the timer of the interrupt controller each time, and pressure is not accounted.
const QUIET: &str = "highres=off nohz=off psi=0";

/// The limit for a command on the node.
const COMMAND: Duration = Duration::from_secs(300);

/// The address of this host for the shell of the machine. Nothing of the cluster uses it, so that the shell works when
/// the network of the node is cut.
const HOST_OF_SHELL: &str = "10.0.2.2";

/// A node of the cluster. It ends with the value.
pub(crate) struct Machine {
    pub(crate) name: &'static str,
    /// The sockets and logs.
    directory: PathBuf,
    /// The arguments of the harness that are the same for each boot.
    arguments: Vec<OsString>,
    boot: Mutex<Boot>,
}

/// A machine that runs.
struct Boot {
    /// Which one of the machine it is, from 1.
    number: usize,
    process: Child,
    shell: BufReader<TcpStream>,
}

impl Machine {
    /// Boots the machine with this number, the files of `payload` and a copy of `disk`, and waits until its kubelet has
    /// been started.
    pub(crate) fn start(
        plane: &ControlPlane,
        number: usize,
        cpus: usize,
        payload: &Path,
        disk: &Path,
    ) -> Self {
        let name = MACHINES[number];
        let directory = plane.directory().join(name);
        std::fs::create_dir_all(&directory).unwrap();
        make_tap(name);
        let own_disk = disk.with_file_name(format!("disk-{name}"));
        output(Command::new("cp").arg("--sparse=always").args([disk, &own_disk]));
        let kubeconfig = plane.kubelet_kubeconfig(name);
        let authority = std::fs::read_to_string(plane.authority()).unwrap();
        let variables = [
            format!("NODE={name}"),
            format!("ADDRESS={}", address(number)),
            format!("HOST={HOST_OF_MACHINES}"),
            format!("API_SERVER={HOST_OF_MACHINES}:{}", plane.port()),
            format!("KUBECONFIG={kubeconfig}"),
            format!("AUTHORITY={authority}"),
        ];
        let card = format!("{name},52:54:00:00:00:{:02x}", 11 + number);
        let mut arguments: Vec<OsString> = vec!["--payload".into(), payload.into()];
        arguments.extend(["--qmp".into(), directory.join("qmp").into()]);
        arguments.extend(["--disk".into(), own_disk.into()]);
        arguments
            .extend(["--network", "--tap", &card, "--cpus", &cpus.to_string()].map(Into::into));
        arguments.extend(["--memory", "2G", "--timeout", "36000"].map(Into::into));
        arguments.extend(["--append", QUIET].map(Into::into));
        arguments.extend(variables.iter().flat_map(|one| ["--env".into(), one.into()]));
        let boot = Mutex::new(Boot::start(&directory, &arguments, 1));
        Self { name, directory, arguments, boot }
    }

    /// Cuts the power of the machine, and boots it again on its disk. What the kernel has not written yet is lost.
    pub(crate) fn reset(&self) {
        self.qmp("quit", &json!({}));
        self.boot_again();
    }

    /// Ends the machine as an init does, and boots it again on its disk.
    pub(crate) fn reboot(&self) {
        self.run("setsid ./shutdown >>/out/shutdown.log 2>&1 </dev/null &");
        self.boot_again();
    }

    /// Boots the machine when it has ended.
    fn boot_again(&self) {
        let mut boot = self.boot.lock().unwrap();
        let deadline = Instant::now() + COMMAND;
        while boot.process.try_wait().unwrap().is_none() {
            assert!(Instant::now() < deadline, "the machine does not end");
            std::thread::sleep(Duration::from_millis(100));
        }
        *boot = Boot::start(&self.directory, &self.arguments, boot.number + 1);
    }

    /// Runs a command of bash on the node, and returns its output. The command must succeed.
    pub(crate) fn run(&self, command: &str) -> String {
        let (status, output) = self.try_run(command);
        assert_eq!(status, 0, "{command} on {}: {output}", self.name);
        output
    }

    /// Runs a command of bash on the node, and returns its exit status and its output.
    pub(crate) fn try_run(&self, command: &str) -> (i64, String) {
        let mut boot = self.boot.lock().unwrap();
        let shell = &mut boot.shell;
        let mut line = json!(command).to_string();
        line.push('\n');
        shell.get_mut().write_all(line.as_bytes()).unwrap();
        let mut answer = String::new();
        shell.read_line(&mut answer).unwrap_or_else(|error| panic!("{command}: {error}"));
        let answer: Value =
            serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{command}: {error}"));
        (answer["status"].as_i64().unwrap(), answer["output"].as_str().unwrap().to_owned())
    }

    /// Stops the processors of the machine. Its clocks stop, too.
    pub(crate) fn freeze(&self) {
        self.qmp("stop", &json!({}));
    }

    /// Continues a machine that is frozen.
    pub(crate) fn thaw(&self) {
        self.qmp("cont", &json!({}));
    }

    /// Pulls or plugs the cable of the card with which the node reaches the cluster.
    pub(crate) fn set_link(&self, is_up: bool) {
        self.qmp("set_link", &json!({ "name": "card", "up": is_up }));
    }

    /// Runs a command of QEMU's machine protocol.
    fn qmp(&self, command: &str, arguments: &Value) {
        let socket = UnixStream::connect(self.directory.join("qmp")).unwrap();
        let mut lines = BufReader::new(socket);
        for request in [
            json!({ "execute": "qmp_capabilities" }),
            json!({ "execute": command, "arguments": arguments }),
        ] {
            lines.get_mut().write_all(request.to_string().as_bytes()).unwrap();
            // Before the answer there are a greeting and events.
            loop {
                let mut line = String::new();
                lines.read_line(&mut line).unwrap();
                let answer: Value = serde_json::from_str(&line).unwrap();
                assert!(answer["error"].is_null(), "{request}: {answer}");
                if answer["return"].is_object() {
                    break;
                }
            }
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let boot = self.boot.get_mut().unwrap_or_else(PoisonError::into_inner);
        if std::thread::panicking() {
            show(&self.directory.join(format!("out{}", boot.number)));
        }
        // The harness of the machine ends QEMU.
        let _ = boot.shell.get_ref().shutdown(std::net::Shutdown::Both);
        let _ = boot.process.wait();
    }
}

impl Boot {
    /// Boots a machine, and waits until its kubelet has been started.
    fn start(directory: &Path, arguments: &[OsString], number: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut command = Command::new(project("tests/vm/run"));
        command.arg("--out").arg(directory.join(format!("out{number}"))).args(arguments);
        command.args(["--env", &format!("SHELL_ADDRESS={HOST_OF_SHELL}:{port}")]);
        command.args(["--", "./start"]);
        let path = directory.join("vm.log");
        let log = File::options().create(true).append(true).open(&path).unwrap();
        let errors = log.try_clone().unwrap();
        let mut process = command.stdin(Stdio::null()).stdout(log).stderr(errors).spawn().unwrap();
        let shell = BufReader::new(accept(&listener, &mut process, &path));
        Self { number, process, shell }
    }
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
