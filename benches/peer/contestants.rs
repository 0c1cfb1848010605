//! The servers and their clients.

use std::cell::{Cell, RefCell};
use std::io::ErrorKind;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};

use crate::common::client::{Client, Figures, Load, UNIT, fill_file};
use crate::common::fio::Fio;
use crate::common::report::{BARE, CLEAT, FIO, Measurement, NBD_SERVER, NBDKIT, QEMU_NBD};
use crate::common::{Server, cpu_seconds};
use crate::rows::{Group, LARGE_WRITE, NO_POLLING, OTHER, Row};

/// The size of each volume, in bytes.
const SIZE: u64 = 256 << 20;

/// A volume in memory of this size.
const MEMORY: &str = "mem:256M";

/// One or more servers of a kind with their clients, or a process that is both.
pub struct Contestant {
    kind: Kind,
    /// Writes 1 MiB before each measurement.
    large_write: bool,
}

enum Kind {
    Servers { servers: Vec<Server>, clients: Vec<Client> },
    Process(Fio),
}

impl Contestant {
    fn clients(&mut self) -> &mut [Client] {
        match &mut self.kind {
            Kind::Servers { clients, .. } => clients,
            Kind::Process(_) => &mut [],
        }
    }

    /// Runs the load of a row with every client at the same time.
    pub fn measure(&mut self, row: &Row, time: Duration) -> Measurement {
        match &mut self.kind {
            Kind::Process(fio) => {
                let before = children_cpu_seconds();
                let (rate, count) = fio.run(row.load, row.depth, time);
                let cpu_us = (children_cpu_seconds() - before) * 1e6 / count;
                Measurement { rate, cpu_us, latency_us: None }
            }
            Kind::Servers { servers, clients } => {
                if self.large_write {
                    let load = Load { writes_percent: 100, sequential: false, block: 1 << 20 };
                    clients.iter_mut().for_each(|client| {
                        client.run(load, 1, Duration::ZERO);
                    });
                }
                let cpu = |servers: &[Server]| {
                    servers.iter().map(|server| cpu_seconds(server.id())).sum::<f64>()
                };
                let before = cpu(servers);
                let figures = run_all(clients, row, time);
                Measurement::of_clients(&figures, cpu(servers) - before)
            }
        }
    }
}

/// Runs the clients at the same time; one client runs on this thread.
fn run_all(clients: &mut [Client], row: &Row, time: Duration) -> Vec<Figures> {
    if let [client] = clients {
        return vec![client.run(row.load, row.depth, time)];
    }
    std::thread::scope(|scope| {
        let start = |client| {
            let client: &mut Client = client;
            scope.spawn(move || client.run(row.load, row.depth, time))
        };
        let running: Vec<_> = clients.iter_mut().map(start).collect();
        running.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Returns the CPU time of the children that have ended, in seconds.
fn children_cpu_seconds() -> f64 {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN).unwrap();
    let times = [usage.user_time(), usage.system_time()];
    times.iter().map(|time| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6).sum()
}

/// A contestant and its name; `None` if its program is missing.
type Started = Option<(String, Contestant)>;

/// Starts contestants.
pub struct Setup {
    dir: tempfile::TempDir,
    binary: PathBuf,
    other: Option<PathBuf>,
    skipped: RefCell<Vec<String>>,
    /// The number of the next file that a contestant gets.
    next_file: Cell<usize>,
}

/// The number of files with volumes. It is prime, so that each contestant has another file in each round.
const FILES: usize = 7;

impl Setup {
    /// Prepares a directory on the disk of the target directory, and compiles the bare server.
    pub fn new() -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/bare.c");
        let mut compile = Command::new("cc");
        compile.arg("-O2").arg(source).arg("-o").arg(dir.path().join("bare"));
        assert!(compile.status().expect("apt install gcc").success(), "bare.c compiles");
        let binary = std::env::var_os("CLEAT_BENCH_BINARY");
        let binary = binary.map_or_else(|| env!("CARGO_BIN_EXE_cleat").into(), PathBuf::from);
        let other = std::env::var_os("CLEAT_BENCH_OTHER").map(PathBuf::from);
        Self { dir, binary, other, skipped: RefCell::default(), next_file: Cell::new(0) }
    }

    /// Returns why contestants are missing.
    pub fn skipped(&self) -> Vec<String> {
        self.skipped.borrow().clone()
    }

    /// Starts the contestants of a group. The cleat that is measured is the first one.
    pub fn contestants(&self, group: Group) -> Vec<(String, Contestant)> {
        let all = match group {
            Group::Memory => self.memory(),
            Group::File => self.files(1),
            Group::FourConnections => self.files(4),
            Group::FourVolumes => [(CLEAT, "auto"), (NO_POLLING, "off")]
                .map(|(name, polling)| {
                    self.in_memory(name, 4, |socket| {
                        let mut command = cleat(&self.binary, MEMORY, socket);
                        command.args(["--busy-poll", polling]);
                        command
                    })
                })
                .into(),
            Group::AfterLargeWrite => {
                let start =
                    |name| self.in_memory(name, 1, |socket| cleat(&self.binary, MEMORY, socket));
                let mut both = vec![start(CLEAT), start(LARGE_WRITE)];
                both[0].iter_mut().for_each(|(_, contestant)| contestant.large_write = true);
                both
            }
            Group::Direct => self.direct(),
        };
        all.into_iter().flatten().collect()
    }

    fn memory(&self) -> Vec<Started> {
        let start = |name, command: &dyn Fn(&Path) -> Command| self.in_memory(name, 1, command);
        let mut all = vec![start(CLEAT, &|socket| cleat(&self.binary, MEMORY, socket))];
        if let Some(other) = &self.other {
            all.push(start(OTHER, &|socket| cleat(other, MEMORY, socket)));
        }
        all.push(start(NBDKIT, &|socket| nbdkit(socket, &["memory".into(), "256M".into()])));
        all.push(start(BARE, &|socket| {
            let mut command = Command::new(self.dir.path().join("bare"));
            command.arg(socket).arg(SIZE.to_string());
            command
        }));
        all
    }

    /// Servers of files in the page cache, with this number of connections.
    fn files(&self, connections: u64) -> Vec<Started> {
        let start = |name, command: &dyn Fn(&Path, &Path) -> Command| {
            self.on_file(name, connections, command)
        };
        let uri = |file: &Path| format!("file:{}", file.display());
        let mut all = vec![start(CLEAT, &|file, socket| cleat(&self.binary, &uri(file), socket))];
        if let Some(other) = &self.other {
            all.push(start(OTHER, &|file, socket| cleat(other, &uri(file), socket)));
        }
        all.push(start(NBDKIT, &|file, socket| nbdkit(socket, &["file".into(), file.into()])));
        all.push(start(QEMU_NBD, &|file, socket| qemu_nbd(file, socket, "--cache=writeback")));
        all.push(start(NBD_SERVER, &nbd_server));
        all
    }

    fn direct(&self) -> Vec<Started> {
        let cleat = self.on_file(CLEAT, 1, |file, socket| {
            cleat(&self.binary, &format!("file:{}?direct=true", file.display()), socket)
        });
        let qemu = self.on_file(QEMU_NBD, 1, |file, socket| {
            let mut command = qemu_nbd(file, socket, "--cache=none");
            command.arg("--aio=io_uring");
            command
        });
        let file = self.next_file();
        let arguments = format!("--ioengine=io_uring --direct=1 --filename={}", file.display());
        let kind = Kind::Process(Fio::new(&arguments, None));
        let fio = Contestant { kind, large_write: false };
        vec![cleat, qemu, Some((FIO.to_owned(), fio))]
    }

    /// Starts `count` servers of memory with a client each, which fills the volume.
    fn in_memory(&self, name: &str, count: usize, command: impl Fn(&Path) -> Command) -> Started {
        let mut started = self.servers(name, count, 1, command)?;
        started.1.clients().iter_mut().for_each(Client::fill);
        Some(started)
    }

    /// Starts a server of a file with this number of clients.
    fn on_file(
        &self,
        name: &str,
        connections: u64,
        command: impl Fn(&Path, &Path) -> Command,
    ) -> Started {
        let file = self.next_file();
        let mut started = self.servers(name, 1, connections, |socket| command(&file, socket))?;
        started.1.clients().iter_mut().for_each(|client| client.learn(UNIT));
        Some(started)
    }

    /// Starts `count` servers with `connections` clients each.
    fn servers(
        &self,
        name: &str,
        count: usize,
        connections: u64,
        command: impl Fn(&Path) -> Command,
    ) -> Started {
        let (mut servers, mut clients) = (Vec::new(), Vec::new());
        for index in 0..count {
            let socket = self.dir.path().join(format!("{name}-{index}.socket"));
            let _ = std::fs::remove_file(&socket);
            servers.push(self.spawn(name, &mut command(&socket))?);
            let export = if name == NBD_SERVER { "volume" } else { "" };
            for part in 0..connections {
                clients.push(Client::connect_part(&socket, export, part, connections));
            }
        }
        let kind = Kind::Servers { servers, clients };
        Some((name.to_owned(), Contestant { kind, large_write: false }))
    }

    /// Starts a server. Returns `None` if its program is missing.
    fn spawn(&self, name: &str, command: &mut Command) -> Option<Server> {
        match command.stdout(Stdio::null()).stderr(Stdio::inherit()).spawn() {
            Ok(mut child) if name == NBD_SERVER => {
                assert!(child.wait().unwrap().success(), "{command:?} fails");
                Some(Server::Daemon(read_pid(&self.dir.path().join(NBD_SERVER_PID))))
            }
            Ok(child) => Some(Server::Child(child)),
            Err(error) if error.kind() == ErrorKind::NotFound && name != CLEAT => {
                let program = command.get_program().display();
                let message = format!("{name} is not measured: the program {program} is missing");
                let mut skipped = self.skipped.borrow_mut();
                if !skipped.contains(&message) {
                    println!("{message}");
                    skipped.push(message);
                }
                None
            }
            Err(error) => panic!("{command:?}: {error}"),
        }
    }

    /// Returns the next file, in turns. It is full and in the page cache.
    fn next_file(&self) -> PathBuf {
        let number = self.next_file.get();
        self.next_file.set((number + 1) % FILES);
        let path = self.dir.path().join(format!("{number}.volume"));
        fill_file(&path, SIZE);
        path
    }
}

fn cleat(binary: &Path, uri: &str, socket: &Path) -> Command {
    let mut command = Command::new(binary);
    command.args(["serve", uri, "--socket"]).arg(socket);
    command
}

fn nbdkit(socket: &Path, plugin: &[PathBuf]) -> Command {
    let mut command = Command::new("nbdkit");
    command.args(["--foreground", "--unix"]).arg(socket).args(plugin);
    command
}

fn qemu_nbd(file: &Path, socket: &Path, cache: &str) -> Command {
    let mut command = Command::new("qemu-nbd");
    command.args(["--persistent", "--format=raw", "--shared=0", cache, "--socket"]);
    command.arg(socket).arg(file);
    command
}

/// nbd-server takes its options from a file, always listens on TCP too, and detaches itself.
fn nbd_server(file: &Path, socket: &Path) -> Command {
    let config = socket.with_extension("conf");
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let text = format!(
        "[generic]\nunixsock = {}\nlistenaddr = 127.0.0.1\nport = {port}\n\
         [volume]\nexportname = {}\n",
        socket.display(),
        file.display()
    );
    std::fs::write(&config, text).unwrap();
    let mut command = Command::new("nbd-server");
    command.arg("-C").arg(config).arg("-p").arg(socket.with_file_name(NBD_SERVER_PID));
    command
}

/// The name of the file in which nbd-server writes its process number.
const NBD_SERVER_PID: &str = "nbd-server.pid";

/// Waits for the file with the number of a process.
fn read_pid(path: &Path) -> u32 {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        if let Ok(pid) = text.trim().parse() {
            std::fs::remove_file(path).unwrap();
            return pid;
        }
        assert!(Instant::now() < deadline, "no process number in {}", path.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}
