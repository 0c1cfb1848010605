//! `cargo bench --bench growth`: what volumes cost as their number grows. A supervisor maps files as devices of a
//! simulated kernel, each with a worker process of its own, as on a node. The report (Markdown, JSON, and a plot as SVG) is
//! below `target/bench/`.
//!
//! For each number of volumes: the time of a mapping, the memory of the workers and of the supervisor, how often idle
//! processes wake up, the time until a new supervisor serves all volumes after a crash, and how evenly volumes with the
//! same load share the processors: each has one reader of 4 KiB blocks.
//!
//! `VOLUMES` are the numbers (`1,10,100,500`), and `SECONDS` is the length of a load (20, because in 5 s 100 volumes
//! on two processors have too few turns to be compared). With `BUSY_POLL=off` the workers never poll.

#![allow(
    clippy::cast_possible_truncation,
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    unreachable_pub,
    reason = "a benchmark measures real time, prints figures, and fails by panicking"
)]

#[path = "common/mod.rs"]
mod common;

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cleat_api::v1::{Mapping, MappingState};
use cleat_core::policy::BusyPoll;
use cleat_kernel::DeviceIndex;
use common::{median, number};
use test_kit::node::{Machine, SIZE, Supervisor};
use test_kit::process::wakeups;

const BLOCK: u32 = 4096;

/// What one number of volumes costs. The names of the fields are those of the JSON report.
#[derive(serde::Serialize)]
struct Figures {
    volumes: usize,
    /// The median of the mappings, and the last one, in milliseconds.
    map_ms: [f64; 2],
    /// Proportional set sizes in MiB: of a worker, and of the supervisor without the benchmark.
    worker_mib: f64,
    supervisor_mib: f64,
    /// Of all processes while nothing is read.
    wakeups_per_s: f64,
    recovery_ms: f64,
    reads_per_s: f64,
    /// The highest rate of a volume relative to the lowest one.
    unevenness: f64,
}

fn main() {
    let numbers = std::env::var("VOLUMES").unwrap_or_else(|_| "1,10,100,500".to_owned());
    let time = Duration::from_secs_f64(number("SECONDS", 20.0));
    let numbers = numbers.split(',').map(|text| text.trim().parse().expect("VOLUMES"));
    let figures: Vec<Figures> = numbers.map(|volumes| measure(volumes, time)).collect();
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap().join("bench");
    fs::create_dir_all(&directory).unwrap();
    let report = markdown(&figures);
    print!("{report}");
    fs::write(directory.join("growth.md"), report).unwrap();
    let json = serde_json::to_string_pretty(&figures).unwrap();
    fs::write(directory.join("growth.json"), json + "\n").unwrap();
    fs::write(directory.join("growth.svg"), svg(&figures)).unwrap();
    println!("the report: {}", directory.join("growth.md").display());
}

fn measure(volumes: usize, time: Duration) -> Figures {
    let mut machine = Machine::new();
    if std::env::var("BUSY_POLL").is_ok_and(|text| text == "off") {
        machine.config.map.busy_poll = BusyPoll::Off;
    }
    let before_mib = pss_mib("self");
    let supervisor = machine.start();
    let mut map_ms = Vec::new();
    for number in 0..volumes {
        let (name, began) = (format!("v{number}"), Instant::now());
        supervisor.map(&name, &machine.volume(&name)).unwrap();
        map_ms.push(milliseconds(began));
    }
    let last_ms = map_ms[volumes - 1];
    // Heaps shrink, files are written back, and the supervisor pings each new worker once.
    thread::sleep(Duration::from_secs(12));
    let workers = machine.workers();
    let worker_mib =
        workers.iter().map(|pid| pss_mib(&pid.to_string())).sum::<f64>() / workers.len() as f64;
    let supervisor_mib = pss_mib("self") - before_mib;
    let wakeups_per_s = wakeups_per_second(&workers);
    supervisor.crash();
    let began = Instant::now();
    let supervisor = machine.start();
    let is_served = |mapping: &Mapping| mapping.state() == MappingState::Mapped;
    while !supervisor.list().iter().all(is_served) {
        thread::sleep(Duration::from_millis(5));
    }
    let recovery_ms = milliseconds(began);
    let rates = load(&machine, &supervisor, time);
    let [lowest, highest] = [f64::min, f64::max].map(|of| rates.iter().copied().reduce(of));
    let figures = Figures {
        volumes,
        map_ms: [median(&mut map_ms), last_ms],
        worker_mib,
        supervisor_mib,
        wakeups_per_s,
        recovery_ms,
        reads_per_s: rates.iter().sum(),
        unevenness: highest.unwrap() / lowest.unwrap(),
    };
    println!("{volumes} volumes are measured");
    supervisor.shut_down();
    figures
}

/// Reads all volumes at the same time. Returns the reads per second of each.
fn load(machine: &Machine, supervisor: &Supervisor, time: Duration) -> Vec<f64> {
    let devices: Vec<DeviceIndex> = supervisor.list().iter().map(device).collect();
    let counts: Vec<AtomicU64> = devices.iter().map(|_| AtomicU64::new(0)).collect();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        for (index, count) in devices.iter().zip(&counts) {
            let (kernel, is_over) = (&machine.kernel, &is_over);
            thread::Builder::new()
                .stack_size(128 << 10)
                .spawn_scoped(scope, move || {
                    let mut offset = 0;
                    while !is_over.load(Ordering::Relaxed) {
                        kernel.read(*index, offset, BLOCK).unwrap();
                        offset = (offset + u64::from(BLOCK)) % SIZE;
                        count.fetch_add(1, Ordering::Relaxed);
                    }
                })
                .unwrap();
        }
        thread::sleep(time / 5);
        let before: Vec<u64> = counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        let began = Instant::now();
        thread::sleep(time);
        let seconds = began.elapsed().as_secs_f64();
        let done = |(count, before): (&AtomicU64, &u64)| {
            (count.load(Ordering::Relaxed) - before) as f64 / seconds
        };
        let rates = counts.iter().zip(&before).map(done).collect();
        is_over.store(true, Ordering::Relaxed);
        rates
    })
}

fn device(mapping: &Mapping) -> DeviceIndex {
    let number = mapping.device.strip_prefix("/dev/nbd").unwrap();
    number.parse().unwrap()
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// The proportional set size of a process, in MiB.
fn pss_mib(pid: &str) -> f64 {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<f64>().unwrap() / 1024.0
}

/// The voluntary context switches of processes per second, within 20 seconds.
fn wakeups_per_second(processes: &[u32]) -> f64 {
    let count = || processes.iter().map(|pid| wakeups(*pid)).sum::<u64>();
    let (before, began) = (count(), Instant::now());
    thread::sleep(Duration::from_secs(20));
    (count() - before) as f64 / began.elapsed().as_secs_f64()
}

fn markdown(figures: &[Figures]) -> String {
    let mut text = "# What volumes cost as their number grows\n\n\
        Files of 1 MiB, a simulated kernel, real workers. ![plot](growth.svg)\n\n\
        | volumes | map, median and last, ms | worker, MiB | supervisor, MiB | wake-ups of all idle workers /s \
        | recovery after a crash, ms | 4 KiB reads/s in sum | highest rate / lowest |\n\
        |---|---|---|---|---|---|---|---|\n"
        .to_owned();
    for row in figures {
        let Figures { volumes, map_ms: [median, last], worker_mib, supervisor_mib, .. } = row;
        let Figures { wakeups_per_s, recovery_ms, reads_per_s, unevenness, .. } = row;
        writeln!(
            text,
            "| {volumes} | {median:.1}, {last:.1} | {worker_mib:.2} | {supervisor_mib:.1} \
             | {wakeups_per_s:.1} | {recovery_ms:.0} | {reads_per_s:.0} | {unevenness:.2} |"
        )
        .unwrap();
    }
    text
}

/// The colour and the name of a line, and its value for a number of volumes.
type Line = (&'static str, &'static str, fn(&Figures) -> f64);

/// Draws the time of a mapping, the recovery, and the memory of all workers and of the supervisor against the number of volumes,
/// both axes logarithmic.
fn svg(figures: &[Figures]) -> String {
    const WIDTH: f64 = 760.0;
    const HEIGHT: f64 = 420.0;
    const LEFT: f64 = 70.0;
    const TOP: f64 = 50.0;
    let lines: [Line; 4] = [
        ("#1f77b4", "map, median, ms", |row| row.map_ms[0]),
        ("#d62728", "recovery, ms", |row| row.recovery_ms),
        ("#2ca02c", "memory of all workers, MiB", |row| row.worker_mib * row.volumes as f64),
        ("#9467bd", "of the supervisor, MiB", |row| row.supervisor_mib),
    ];
    let log = |value: f64| value.max(0.1).log10();
    let x = |row: &Figures| LEFT + log(row.volumes as f64) / 3.0 * (WIDTH - LEFT - 40.0);
    let y = |value: f64| HEIGHT - 40.0 - (log(value) + 1.0) / 6.0 * (HEIGHT - TOP - 40.0);
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for power in -1..=5 {
        let (value, at) = (10f64.powi(power), y(10f64.powi(power)));
        writeln!(
            text,
            "<line x1=\"{LEFT}\" x2=\"{WIDTH}\" y1=\"{at:.0}\" y2=\"{at:.0}\" stroke=\"#dddddd\"/>\
             <text x=\"{}\" y=\"{:.0}\" text-anchor=\"end\">{value}</text>",
            LEFT - 8.0,
            at + 4.0
        )
        .unwrap();
    }
    for row in figures {
        let (at, volumes) = (x(row), row.volumes);
        writeln!(text, "<text x=\"{at:.0}\" y=\"{}\">{volumes}</text>", HEIGHT - 16.0).unwrap();
    }
    for (number, (colour, name, value)) in lines.iter().enumerate() {
        let points: Vec<String> =
            figures.iter().map(|row| format!("{:.0},{:.0}", x(row), y(value(row)))).collect();
        writeln!(
            text,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>\
             <text x=\"{}\" y=\"20\" fill=\"{colour}\">{name}</text>",
            points.join(" "),
            LEFT + 170.0 * number as f64
        )
        .unwrap();
    }
    text + "</svg>\n"
}
