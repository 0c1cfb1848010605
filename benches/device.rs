//! `cargo bench --bench device`: /dev/nbdX of cleat beside those of nbd-client with other servers, and of rbd-nbd, in a
//! virtual machine (`tests/vm/run`). fio loads each device with direct I/O, in turns. Figures are medians, and ratios are
//! medians of the ratios within one round. The report (Markdown, JSON, and a plot as SVG) is below `target/bench/device`.
//!
//! `ROUNDS` (5) and `SECONDS` (3) change the number of rounds and the length of a measurement. Without KVM the machine is
//! emulated, so only the ratios say something.

#![allow(
    clippy::cast_possible_truncation,
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    unreachable_pub,
    reason = "a benchmark measures real time, prints figures, and fails by panicking"
)]

mod common;

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use test_kit::ceph::{Cluster, ID, POOL};

use common::client::Load;
use common::fio::Fio;
use common::report::{CLEAT, Measurement, Must, REVISION, Report, revision};
use common::{in_rounds, number};

/// Set in the machine.
const GUEST: &str = "CLEAT_BENCH_GUEST";

/// The length of each volume.
const SIZE: &str = "64M";

/// What cleat must reach at depth 32, relative to nbd-client with nbdkit and to rbd-nbd.
const BOUND: f64 = 1.3;

const NBDKIT: &str = "nbd-client, nbdkit";
const RBD_NBD: &str = "rbd-nbd";

/// How the figures are measured, for the report.
const CONDITIONS: &str = "Devices in a virtual machine; fio with direct I/O. CPU is that of all processes of the machine, fio \
                          and, for images, the Ceph cluster included.";

/// What fio does with the devices of a group.
struct Row {
    name: &'static str,
    writes_percent: u64,
    depth: usize,
    must: &'static [Must],
}

/// The loads of a group of devices, with what cleat must reach relative to one of them.
macro_rules! rows {
    ($group:literal, $peer:ident) => {
        [
            Row {
                name: concat!($group, ": 4K random read, depth 1"),
                writes_percent: 0,
                depth: 1,
                must: &[],
            },
            Row {
                name: concat!($group, ": 4K random read, depth 32"),
                writes_percent: 0,
                depth: 32,
                must: &[Must::Rate($peer, BOUND)],
            },
            Row {
                name: concat!($group, ": 4K random write, depth 1"),
                writes_percent: 100,
                depth: 1,
                must: &[],
            },
            Row {
                name: concat!($group, ": 4K random write, depth 32"),
                writes_percent: 100,
                depth: 32,
                must: &[Must::Rate($peer, BOUND)],
            },
        ]
    };
}

const FILE_ROWS: [Row; 4] = rows!("file", NBDKIT);
const MEMORY_ROWS: [Row; 4] = rows!("memory", NBDKIT);
const IMAGE_ROWS: [Row; 4] = rows!("RBD image", RBD_NBD);

/// A device, and how it is removed.
struct Contestant {
    name: &'static str,
    device: String,
    end: String,
}

fn main() {
    if std::env::var_os(GUEST).is_some() {
        measure_all();
    } else {
        boot();
    }
}

/// Runs this program in a machine.
fn boot() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let payload = tempfile::tempdir().unwrap();
    let put = |from: &Path, name: &str| {
        std::fs::copy(from, payload.path().join(name)).unwrap();
    };
    put(Path::new(env!("CARGO_BIN_EXE_cleat")), "cleat");
    put(&std::env::current_exe().unwrap(), "bench");
    put(&root.join("systemd/60-cleat.rules"), "60-cleat.rules");
    put(&root.join("tests/kit/ceph/cluster"), "ceph-cluster");
    let results = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap().join("bench/device");
    std::fs::create_dir_all(&results).unwrap();
    let mut machine = Command::new(root.join("tests/vm/run"));
    machine.args(["--memory", "3G", "--cpus", "2", "--timeout", "3600"]);
    machine.arg("--out").arg(&results).arg("--payload").arg(payload.path());
    machine.args(["--", "env", &format!("{GUEST}=1"), &format!("{REVISION}={}", revision())]);
    for name in ["ROUNDS", "SECONDS"] {
        machine.args(std::env::var(name).map(|value| format!("{name}={value}")));
    }
    let status = machine.arg("./bench").status().expect("tests/vm/run; scripts/install-deps.sh vm");
    assert!(status.success(), "{status}; see {}", results.display());
    println!("the report: {}", results.join("report.md").display());
}

/// Measures all groups, in the machine.
fn measure_all() {
    shell("cp 60-cleat.rules /etc/udev/rules.d/; udevadm control --reload");
    shell("./cleat node > /out/node.log 2>&1 &");
    until("the daemon answers", "./cleat ls");
    let rounds = number("ROUNDS", 5.0) as usize;
    let time = Duration::from_secs_f64(number("SECONDS", 3.0));
    let mut report = Report::new(CONDITIONS, rounds, time);
    for (rows, make) in [
        (&FILE_ROWS, files as fn() -> Vec<Contestant>),
        (&MEMORY_ROWS, memory),
        (&IMAGE_ROWS, images),
    ] {
        let contestants = make();
        contestants.iter().for_each(|contestant| fill(&contestant.device));
        let named = || contestants.iter().map(|it| (it.name.to_owned(), it)).collect();
        let measured = in_rounds(rounds, rows, named, |row, it| measure(row, &it.device, time));
        for (row, measured) in rows.iter().zip(measured) {
            report.add(row.name, row.must, measured);
        }
        contestants.iter().for_each(|contestant| drop(shell(&contestant.end)));
    }
    report.write(Path::new("/out"));
}

/// Runs the load of a row.
fn measure(row: &Row, device: &str, time: Duration) -> Measurement {
    let load = Load { writes_percent: row.writes_percent, sequential: false, block: 4096 };
    let fio = Fio::new(&format!("--filename={device} --ioengine=libaio --direct=1"), None);
    let before = busy_seconds();
    let (rate, count, latency_us) = fio.run_with_latency(load, row.depth, time);
    let cpu_us = (busy_seconds() - before) * 1e6 / count;
    Measurement { rate, cpu_us, latency_us: Some(latency_us) }
}

/// The time that the processors of the machine were not idle, in seconds.
fn busy_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/stat").unwrap();
    let fields = stat.lines().next().unwrap().split_whitespace().skip(1);
    let ticks: Vec<f64> = fields.map(|ticks| ticks.parse().unwrap()).collect();
    // user, nice, system, then idle and iowait, then interrupts (proc_stat(5)). USER_HZ is 100.
    (ticks[..3].iter().sum::<f64>() + ticks[5..8].iter().sum::<f64>()) / 100.0
}

/// Each on a file of its own, in the page cache.
fn files() -> Vec<Contestant> {
    let file = |name: &str| {
        let path = format!("/tmp/{name}.img");
        shell(&format!("truncate -s {SIZE} {path}"));
        path
    };
    let config = "/tmp/nbd-server.conf";
    let volume = file("nbd-server");
    let text = format!(
        "[generic]\nunixsock = /tmp/nbd-server.sock\nlistenaddr = 127.0.0.1\n[volume]\nexportname = {volume}\n"
    );
    std::fs::write(config, text).unwrap();
    let nbdkit = format!("nbdkit -U /tmp/nbdkit.sock file {}", file("nbdkit"));
    let qemu = format!(
        "qemu-nbd --fork --persistent --format=raw --shared=0 --cache=writeback -k /tmp/qemu-nbd.sock {}",
        file("qemu-nbd")
    );
    vec![
        cleat(CLEAT, &format!("file:{}", file("cleat"))),
        nbd_client(NBDKIT, &nbdkit, "nbdkit.sock", 12, ""),
        nbd_client("nbd-client, qemu-nbd", &qemu, "qemu-nbd.sock", 13, ""),
        nbd_client(
            "nbd-client, nbd-server",
            &format!("nbd-server -C {config}"),
            "nbd-server.sock",
            14,
            "-N volume",
        ),
    ]
}

fn memory() -> Vec<Contestant> {
    let nbdkit = format!("nbdkit -U /tmp/memory.sock memory {SIZE}");
    vec![cleat(CLEAT, &format!("mem:{SIZE}")), nbd_client(NBDKIT, &nbdkit, "memory.sock", 12, "")]
}

/// Images of one Ceph cluster, which is in the machine.
fn images() -> Vec<Contestant> {
    // It runs until the machine ends.
    let cluster = Box::leak(Box::new(Cluster::start_by(Path::new("./ceph-cluster"), "memory")));
    let (conf, keyring) = (cluster.conf(), cluster.keyring(ID));
    let (conf, keyring) = (conf.display(), keyring.display());
    for name in ["cleat", "rbd-nbd"] {
        cluster.rbd(&["create", &format!("{POOL}/{name}"), "--size", SIZE]).expect("rbd create");
    }
    let client = format!("--conf {conf} --id {ID} --keyring {keyring}");
    let device = shell(&format!("rbd-nbd map {POOL}/rbd-nbd {client}"));
    vec![
        cleat(CLEAT, &format!("rbd:{POOL}/cleat?conf={conf}&keyring={keyring}&id={ID}")),
        Contestant { name: RBD_NBD, end: format!("rbd-nbd unmap {device}"), device },
    ]
}

fn cleat(name: &'static str, uri: &str) -> Contestant {
    let device = shell(&format!("./cleat map '{uri}' --name bench"));
    Contestant { name, device, end: "./cleat unmap bench".to_owned() }
}

/// Starts a server and connects a device to it. `more` are options of nbd-client.
fn nbd_client(
    name: &'static str,
    server: &str,
    socket: &str,
    number: u32,
    more: &str,
) -> Contestant {
    let device = format!("/dev/nbd{number}");
    shell(&format!("{server} > /tmp/{socket}.log 2>&1"));
    until("the server listens", &format!("test -S /tmp/{socket}"));
    shell(&format!("nbd-client -unix /tmp/{socket} {device} -b 4096 {more} > /dev/null"));
    until("the device has a size", &format!("test $(blockdev --getsize64 {device}) -gt 0"));
    let end = format!("nbd-client -d {device}");
    Contestant { name, device, end }
}

/// Writes all of a device, so that each has data everywhere.
fn fill(device: &str) {
    shell(&format!(
        "head -c {SIZE} /dev/urandom | dd of={device} bs=1M oflag=direct iflag=fullblock"
    ));
}

/// Runs a command again and again until it succeeds.
fn until(what: &str, command: &str) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !Command::new("sh")
        .args(["-c", &format!("{command} > /dev/null 2>&1")])
        .status()
        .unwrap()
        .success()
    {
        assert!(Instant::now() < deadline, "waiting until {what}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Runs a command, which must succeed. Returns what it prints.
fn shell(command: &str) -> String {
    let output = Command::new("bash").args(["-euo", "pipefail", "-c", command]).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command}: {}\n{errors}", output.status);
    String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
}
