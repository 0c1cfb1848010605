//! `cargo bench --bench rbd`: compares `cleat serve` on an RBD image with raw librbd (fio's rbd engine) and
//! with qemu-nbd on librbd, on one cluster, in alternating rounds.
//!
//! Each contestant has an image of the same layout, filled with data, and the same ceph.conf. In each round they start anew,
//! and the NBD servers have other images. qemu-nbd
//! is measured with `--cache=none`, where it answers a write after replication like the others, and without
//! options, where librbd's cache writes through until the first flush. The client of the NBD servers
//! batches requests (`common`) over a unix socket; with `FIO=1` it is fio's nbd engine, which uses more CPU
//! time than the kernel's client. `ROUNDS`, `SECONDS` and `ONLY` (a part of a row's name) select what is
//! measured. The CPU time of raw librbd includes the start of fio.
//!
//! `WITH='rbd_non_blocking_aio=true,debug_rbd=20/20'` adds another cleat with these options of Ceph.
//! `BINARY`, with or without `WITH`, is the executable of that cleat instead of this build. `NO_POLLING=1` adds cleat
//! without busy polling.

#![allow(
    clippy::cast_possible_truncation,
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    unreachable_pub,
    reason = "a benchmark measures real time, prints figures, and fails by panicking"
)]

mod common;

use std::cell::Cell;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use common::client::{Client, Load, stamped};
use common::fio::Fio;
use common::{Measured, Server, cpu_seconds, in_rounds, median, number};
use librbd::{Config, NewImage, Pool};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::signal::Signal;
use test_kit::ceph::{Cluster, ID, POOL};
use test_kit::process::kill;
use test_kit::wait::wait_until;

/// The size of each image, in bytes. All of them fill half of the OSD, which has 4 GiB.
const SIZE: u64 = 256 << 20;

/// The options of all contestants: a write is answered after its replication.
const OPTIONS: &str = "[client]\nrbd_cache = false\n";

/// The number of images of servers. It is prime, so that each server has another image in each round.
const IMAGES: usize = 7;

struct Row {
    name: &'static str,
    load: Load,
    depth: usize,
}

const fn row(name: &'static str, write: bool, sequential: bool, block: usize, depth: usize) -> Row {
    let writes_percent = if write { 100 } else { 0 };
    Row { name, load: Load { writes_percent, sequential, block }, depth }
}

const ROWS: [Row; 6] = [
    row("4K random read, depth 1", false, false, 4096, 1),
    row("4K random read, depth 32", false, false, 4096, 32),
    row("4K random write, depth 1", true, false, 4096, 1),
    row("4K random write, depth 32", true, false, 4096, 32),
    row("1M sequential read, depth 4", false, true, 1 << 20, 4),
    row("1M sequential write, depth 4", true, true, 1 << 20, 4),
];

fn main() {
    let setup = Setup::new();
    let osd = setup.osd();
    let rounds = number("ROUNDS", 5.0) as usize;
    let time = Duration::from_secs_f64(number("SECONDS", 2.0));
    let only = std::env::var("ONLY").unwrap_or_default();
    let rows: Vec<&Row> = ROWS.iter().filter(|row| row.name.contains(&only)).collect();
    let start = || setup.contestants();
    let measured = in_rounds(rounds, &rows, start, |row, contestant: &mut Contestant| {
        contestant.measure(row.load, row.depth, time, osd)
    });
    println!("medians of {rounds} rounds of {time:?}; CPU in µs per operation");
    println!(
        "  {:<14}{:>9}{:>10}{:>10}{:>9}{:>9}{:>9}",
        "", "per s", "cleat is", "server", "client", "OSD", "all"
    );
    for (row, measured) in rows.iter().zip(measured) {
        println!("{}", row.name);
        print(&measured);
    }
}

/// Prints the medians of a row: the rate, and the CPU time of the server, the client and the OSD in microseconds.
fn print(measured: &Measured<[f64; 4]>) {
    let first = &measured[0].1;
    for (name, rounds) in measured {
        // Ratios within one round, because other load on the machine changes between rounds.
        let mut ratios: Vec<f64> =
            first.iter().zip(rounds).map(|(first, round)| first[0] / round[0]).collect();
        let ratio = median(&mut ratios);
        let of = |index: usize| {
            median(&mut rounds.iter().map(|round| round[index]).collect::<Vec<f64>>())
        };
        let [rate, server, client, osd] = [0, 1, 2, 3].map(of);
        let all = server + client + osd;
        println!(
            "  {name:<14}{rate:>9.0}{ratio:>9.2}x{server:>10.1}{client:>9.1}{osd:>9.1}{all:>9.1}"
        );
    }
}

/// The cluster, and the configuration of all contestants.
struct Setup {
    cluster: Cluster,
    dir: tempfile::TempDir,
    pool: Arc<Pool>,
    /// The number of the next image that a server gets.
    next_image: Cell<usize>,
}

impl Setup {
    fn new() -> Self {
        let cluster = Cluster::start();
        let dir = tempfile::tempdir().unwrap();
        let conf = dir.path().join("ceph.conf");
        let text = std::fs::read_to_string(cluster.conf()).unwrap();
        std::fs::write(&conf, text + OPTIONS).unwrap();
        let config = Config { conf: Some(conf), id: Some(ID.to_owned()), ..Config::default() };
        let pool = librbd::Cluster::connect(&config).unwrap().pool(POOL, None).unwrap();
        Self { cluster, dir, pool, next_image: Cell::new(0) }
    }

    fn osd(&self) -> u32 {
        let conf = self.cluster.conf();
        let is_osd = |pid: &u32| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let mut words = line.split(|byte| *byte == 0);
            words.next() == Some(b"ceph-osd")
                && words.any(|w| w == conf.as_os_str().as_encoded_bytes())
        };
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        let mut pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        pids.find(is_osd).expect("the cluster has an OSD")
    }

    fn conf(&self) -> PathBuf {
        self.dir.path().join("ceph.conf")
    }

    /// Starts the contestants. This build of cleat, the reference of the comparison, is the first.
    fn contestants(&self) -> Vec<(String, Contestant)> {
        let ours = env!("CARGO_BIN_EXE_cleat");
        let mut all = vec![self.cleat("cleat", ours, "", "auto")];
        if std::env::var("NO_POLLING").is_ok() {
            all.push(self.cleat("cleat, no poll", ours, "", "off"));
        }
        let (binary, with) = (std::env::var("BINARY"), std::env::var("WITH"));
        if binary.is_ok() || with.is_ok() {
            let (binary, with) = (binary.as_deref().unwrap_or(ours), with.unwrap_or_default());
            all.push(self.cleat("cleat, other", binary, &with, "auto"));
        }
        all.push(self.qemu_nbd("qemu, none", &["--cache=none"]));
        all.push(self.qemu_nbd("qemu, default", &[]));
        all.push(self.raw());
        all
    }

    fn cleat(
        &self,
        name: &str,
        binary: &str,
        options: &str,
        busy_poll: &str,
    ) -> (String, Contestant) {
        let (conf, keyring) = (self.conf(), self.cluster.keyring(ID));
        let (image, conf, keyring) = (self.next_image(), conf.display(), keyring.display());
        let mut uri = format!("rbd:{POOL}/{image}?conf={conf}&id={ID}&keyring={keyring}");
        for option in options.split(',').filter(|option| !option.is_empty()) {
            uri += &format!("&config.{option}");
        }
        let mut command = Command::new(binary);
        command.args(["serve", &uri, "--busy-poll", busy_poll, "--socket"]);
        self.server(name, command)
    }

    fn qemu_nbd(&self, name: &str, options: &[&str]) -> (String, Contestant) {
        let (image, conf) = (self.next_image(), self.conf());
        let mut command = Command::new("qemu-nbd");
        command.args(["--persistent", "--format=raw"]).args(options);
        command.arg(format!("rbd:{POOL}/{image}:id={ID}:conf={}", conf.display())).arg("--socket");
        self.server(name, command)
    }

    /// Starts a server; the last argument, which is missing, is the path of its socket.
    fn server(&self, name: &str, mut command: Command) -> (String, Contestant) {
        let socket = self.dir.path().join(name.replace([',', ' '], "-"));
        let _ = std::fs::remove_file(&socket);
        let server = command.arg(&socket).stdout(Stdio::null()).spawn();
        let server = Server::Child(server.unwrap_or_else(|error| panic!("{command:?}: {error}")));
        let mut client = Client::connect(&socket);
        let contestant = if std::env::var("FIO").is_ok() {
            drop(client);
            let uri = format!("nbd+unix:///?socket={}", socket.display());
            let fio = Fio::new(&format!("--ioengine=nbd --uri={uri} --size={SIZE}"), None);
            Contestant::ServerFio(server, fio)
        } else {
            client.learn(1 << 20);
            Contestant::Server(server, client)
        };
        (name.to_owned(), contestant)
    }

    /// fio destroys the stamps that the clients of servers check, so it has an image of its own.
    fn raw(&self) -> (String, Contestant) {
        self.fill("raw");
        let uri =
            format!("--ioengine=rbd --rbdname=raw --pool={POOL} --clientname={ID} --size={SIZE}");
        ("raw librbd".to_owned(), Contestant::Process(Fio::new(&uri, Some(self.conf()))))
    }

    /// Returns the name of the next image, in turns.
    fn next_image(&self) -> String {
        let number = self.next_image.get();
        self.next_image.set((number + 1) % IMAGES);
        let name = format!("image-{number}");
        self.fill(&name);
        name
    }

    /// Makes and fills an image, if it does not exist yet.
    fn fill(&self, name: &str) {
        match self.pool.create(name, SIZE, &NewImage::default()) {
            Err(error) if error.errno() == Some(libc::EEXIST) => return,
            created => created.unwrap(),
        };
        let image = self.pool.open(name, None, librbd::Open::Write).unwrap();
        let (sender, completed) = std::sync::mpsc::channel();
        let mut submitter = image.submitter(1, move |completion| sender.send(completion).unwrap());
        const PIECE: usize = 4 << 20;
        for offset in (0..SIZE).step_by(PIECE) {
            let data = stamped(offset, PIECE);
            submitter.start((), librbd::Io::Write { offset }, Some(data)).unwrap();
            assert_eq!(completed.recv().unwrap().result, 0, "the write to {name} at {offset}");
        }
    }
}

enum Contestant {
    /// A server and its client.
    Server(Server, Client),
    ServerFio(Server, Fio),
    /// A process that is server and client in one.
    Process(Fio),
}

impl Drop for Contestant {
    /// Ends the server as a service manager does, so that it releases the lock of the image. qemu-nbd ends after its last
    /// client has gone.
    fn drop(&mut self) {
        if let Self::Server(_, client) = self {
            client.disconnect();
        }
        if let Self::Server(server, _) | Self::ServerFio(server, _) = self {
            kill(server.id(), Signal::SIGTERM);
            wait_until("the server ends", || server.has_ended());
        }
    }
}

impl Contestant {
    /// Measures operations per second, and the CPU time per operation in microseconds: that of the server,
    /// that of the client if it is another process, and that of the OSD.
    fn measure(&mut self, load: Load, depth: usize, time: Duration, osd: u32) -> [f64; 4] {
        let before = (own_cpu_seconds(), cpu_seconds(osd));
        let (rate, operations, server_s) = self.run(load, depth, time);
        let own_s = own_cpu_seconds() - before.0;
        let client_s = if matches!(self, Self::Process(_)) { 0.0 } else { own_s };
        let osd_s = cpu_seconds(osd) - before.1;
        let per_operation = |cpu_s: f64| cpu_s * 1e6 / operations;
        [rate, per_operation(server_s), per_operation(client_s), per_operation(osd_s)]
    }

    /// Runs the load. Returns operations per second, their number, and the server's CPU time in seconds.
    fn run(&mut self, load: Load, depth: usize, time: Duration) -> (f64, f64, f64) {
        match self {
            Self::Process(fio) => {
                let before = own_cpu_seconds();
                let (rate, operations) = fio.run(load, depth, time);
                (rate, operations, own_cpu_seconds() - before)
            }
            Self::Server(server, client) => {
                let before = cpu_seconds(server.id());
                let figures = client.run(load, depth, time);
                let cpu_s = cpu_seconds(server.id()) - before;
                (figures.rate, figures.count as f64, cpu_s)
            }
            Self::ServerFio(server, fio) => {
                let before = cpu_seconds(server.id());
                let (rate, operations) = fio.run(load, depth, time);
                (rate, operations, cpu_seconds(server.id()) - before)
            }
        }
    }
}

/// Returns the CPU time in seconds of this process and of all children that it has waited for.
fn own_cpu_seconds() -> f64 {
    [UsageWho::RUSAGE_SELF, UsageWho::RUSAGE_CHILDREN]
        .iter()
        .map(|usage| getrusage(*usage).unwrap())
        .flat_map(|usage| [usage.user_time(), usage.system_time()])
        .map(|time| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6)
        .sum()
}
