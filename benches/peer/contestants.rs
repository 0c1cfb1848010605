//! The servers and their clients.

use std::cell::RefCell;
use std::io::ErrorKind;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};

use crate::common::client::{Client, Figures, Load};
use crate::common::fio::Fio;
use crate::common::histogram::Histogram;
use crate::common::report::{BARE, CLEAT, FIO, Measurement, NBD_SERVER, NBDKIT, QEMU_NBD};
use crate::common::{Server, cpu_seconds};
use crate::rows::{Group, LARGE_WRITE, NO_POLLING, OTHER, Row};

/// The size of each volume, in bytes.
const SIZE: u64 = 256 << 20;

/// One or more servers of a kind with their clients, or a process that is both.
pub struct Contestant {
    pub name: String,
    kind: Kind,
    /// Writes 1 MiB before each measurement.
    large_write: bool,
}

enum Kind {
    Servers { servers: Vec<Server>, clients: Vec<Client> },
    Process(Fio),
}

impl Contestant {
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
                let used = cpu(servers) - before;
                let count: u64 = figures.iter().map(|figures| figures.count).sum();
                let mut latency = Histogram::new();
                figures.iter().for_each(|figures| latency.merge(&figures.latency));
                let percentile_us = |share| latency.percentile_ns(share) as f64 / 1e3;
                Measurement {
                    rate: figures.iter().map(|figures| figures.rate).sum(),
                    cpu_us: used * 1e6 / count as f64,
                    latency_us: Some([0.5, 0.99, 0.999].map(percentile_us)),
                }
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

/// Starts contestants.
pub struct Setup {
    dir: tempfile::TempDir,
    binary: PathBuf,
    other: Option<PathBuf>,
    skipped: RefCell<Vec<String>>,
}

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
        Self { dir, binary, other, skipped: RefCell::default() }
    }

    /// Returns why contestants are missing.
    pub fn skipped(&self) -> Vec<String> {
        self.skipped.borrow().clone()
    }

    /// Starts the contestants of a group and fills their volumes. The cleat that is measured is the first one.
    pub fn contestants(&self, group: Group) -> Vec<Contestant> {
        let one = |name: &str, command: fn(&Self, &str, &Path) -> Command| {
            self.servers(name, 1, 1, |_, socket| command(self, name, socket))
        };
        match group {
            Group::Memory => self.memory(one),
            Group::File => self.files(1),
            Group::FourConnections => self.files(4),
            Group::FourVolumes => {
                let four = |name: &str, polling: &str| {
                    self.servers(name, 4, 1, |_, socket| {
                        let mut command = self.cleat(&self.binary, "mem:256M", socket);
                        command.args(["--busy-poll", polling]);
                        command
                    })
                };
                [four(CLEAT, "auto"), four(NO_POLLING, "off")].into_iter().flatten().collect()
            }
            Group::AfterLargeWrite => {
                let cleat = |this: &Self, _: &str, socket: &Path| {
                    this.cleat(&this.binary, "mem:256M", socket)
                };
                let mut both: Vec<_> =
                    [CLEAT, LARGE_WRITE].into_iter().filter_map(|name| one(name, cleat)).collect();
                both[0].large_write = true;
                both
            }
            Group::Direct => self.direct(one),
        }
    }

    fn memory(
        &self,
        one: impl Fn(&str, fn(&Self, &str, &Path) -> Command) -> Option<Contestant>,
    ) -> Vec<Contestant> {
        let mut all =
            vec![one(CLEAT, |this, _, socket| this.cleat(&this.binary, "mem:256M", socket))];
        if self.other.is_some() {
            all.push(one(OTHER, |this, _, socket| {
                this.cleat(this.other.as_deref().unwrap(), "mem:256M", socket)
            }));
        }
        all.push(one(NBDKIT, |_, _, socket| nbdkit(socket, &["memory".into(), "256M".into()])));
        all.push(one(BARE, |this, _, socket| {
            let mut command = Command::new(this.dir.path().join("bare"));
            command.arg(socket).arg(SIZE.to_string());
            command
        }));
        all.into_iter().flatten().collect()
    }

    /// Servers of files in the page cache, with this number of connections.
    fn files(&self, connections: u64) -> Vec<Contestant> {
        let cleat = |binary: &Path, file: &Path, socket: &Path| {
            self.cleat(binary, &format!("file:{}", file.display()), socket)
        };
        let start = |name: &str, command: &dyn Fn(&Path, &Path) -> Command| {
            self.servers(name, 1, connections, |file, socket| command(file, socket))
        };
        let mut all = vec![start(CLEAT, &|file, socket| cleat(&self.binary, file, socket))];
        if let Some(other) = &self.other {
            all.push(start(OTHER, &|file, socket| cleat(other, file, socket)));
        }
        all.push(start(NBDKIT, &|file, socket| nbdkit(socket, &["file".into(), file.into()])));
        all.push(start(QEMU_NBD, &|file, socket| qemu_nbd(file, socket, "--cache=writeback")));
        all.push(start(NBD_SERVER, &nbd_server));
        all.into_iter().flatten().collect()
    }

    fn direct(
        &self,
        one: impl Fn(&str, fn(&Self, &str, &Path) -> Command) -> Option<Contestant>,
    ) -> Vec<Contestant> {
        let mut all = vec![one(CLEAT, |this, name, socket| {
            let uri = format!("file:{}?direct=true", this.file(name).display());
            this.cleat(&this.binary, &uri, socket)
        })];
        all.push(one(QEMU_NBD, |this, name, socket| {
            let mut command = qemu_nbd(&this.file(name), socket, "--cache=none");
            command.arg("--aio=io_uring");
            command
        }));
        // fio reads the file that cleat serves.
        let file = self.file(CLEAT);
        let arguments = format!("--ioengine=io_uring --direct=1 --filename={}", file.display());
        let kind = Kind::Process(Fio::new(&arguments, None));
        all.push(Some(Contestant { name: FIO.to_owned(), kind, large_write: false }));
        all.into_iter().flatten().collect()
    }

    /// Starts `count` servers with `connections` clients each. Returns `None` if the program is missing.
    fn servers(
        &self,
        name: &str,
        count: usize,
        connections: u64,
        command: impl Fn(&Path, &Path) -> Command,
    ) -> Option<Contestant> {
        let (mut servers, mut clients) = (Vec::new(), Vec::new());
        for index in 0..count {
            let socket = self.dir.path().join(format!("{name}-{index}.socket"));
            let _ = std::fs::remove_file(&socket);
            let file = self.file(name);
            servers.push(self.spawn(name, &mut command(&file, &socket))?);
            let export = if name == NBD_SERVER { "volume" } else { "" };
            for part in 0..connections {
                clients.push(Client::connect_part(&socket, export, part, connections));
            }
        }
        clients.iter_mut().for_each(Client::fill);
        let kind = Kind::Servers { servers, clients };
        Some(Contestant { name: name.to_owned(), kind, large_write: false })
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

    fn cleat(&self, binary: &Path, uri: &str, socket: &Path) -> Command {
        let mut command = Command::new(binary);
        command.args(["serve", uri, "--socket"]).arg(socket);
        // The size of the file is that of the volume.
        let path = uri.strip_prefix("file:").and_then(|rest| rest.split('?').next());
        path.into_iter().for_each(|path| make_file(Path::new(path)));
        command
    }

    /// The file of a contestant, which exists.
    fn file(&self, name: &str) -> PathBuf {
        let path = self.dir.path().join(format!("{name}.volume"));
        make_file(&path);
        path
    }
}

fn make_file(path: &Path) {
    let file = std::fs::File::options().create(true).append(true).open(path).unwrap();
    file.set_len(SIZE).unwrap();
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
