//! The report of a benchmark in which servers take turns: Markdown, JSON, and a plot.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use super::histogram::Histogram;
use super::{Measured, client, median, plot};

pub const CLEAT: &str = "cleat";
pub const BARE: &str = "bare server in C";
pub const NBDKIT: &str = "nbdkit";
pub const QEMU_NBD: &str = "qemu-nbd";
pub const NBD_SERVER: &str = "nbd-server";
pub const FIO: &str = "fio, no server";

/// What one contestant has reached in one round.
#[derive(Debug, Clone)]
pub struct Measurement {
    /// Operations per second, of all connections.
    pub rate: f64,
    /// The CPU time per operation, in microseconds.
    pub cpu_us: f64,
    /// The median, the 99th and the 99.9th percentile in microseconds; `None` where they are not measured.
    pub latency_us: Option<[f64; 3]>,
}

impl Measurement {
    /// Of clients that ran at the same time, whose servers used `cpu_s` seconds of CPU time.
    pub fn of_clients(figures: &[client::Figures], cpu_s: f64) -> Self {
        let count: u64 = figures.iter().map(|figures| figures.count).sum();
        let mut latency = Histogram::new();
        figures.iter().for_each(|figures| latency.merge(&figures.latency));
        Self {
            rate: figures.iter().map(|figures| figures.rate).sum(),
            cpu_us: cpu_s * 1e6 / count as f64,
            latency_us: Some(
                [0.5, 0.99, 0.999].map(|share| latency.percentile_ns(share) as f64 / 1e3),
            ),
        }
    }
}

/// A bound on the median of a ratio.
#[derive(Debug, Clone, Copy)]
pub enum Must {
    /// The first contestant's rate relative to that of this one is at least this.
    Rate(&'static str, f64),
    /// The first contestant's rate relative to that of the fastest other server is at least this. Limits and
    /// other builds of cleat do not count.
    FastestPeer(f64),
    /// The first contestant's CPU time per operation relative to that of this one is at most this.
    Cpu(&'static str, f64),
}

/// Returns whether a contestant is another NBD server that people use.
fn is_peer(name: &str) -> bool {
    [NBDKIT, QEMU_NBD, NBD_SERVER].contains(&name)
}

/// The results of a run.
pub struct Report {
    /// How it was measured, as a sentence.
    conditions: &'static str,
    machine: Vec<(&'static str, String)>,
    rounds: usize,
    time: Duration,
    results: Vec<Result>,
    pub skipped: Vec<String>,
}

/// The results of a row.
pub struct Result {
    pub name: &'static str,
    /// In the order of the contestants.
    pub figures: Vec<Figures>,
    checks: Vec<Check>,
}

/// The medians of one contestant, and what they were made from.
pub struct Figures {
    pub name: String,
    pub rate: f64,
    /// The rate of the first contestant relative to this one.
    pub ratio: f64,
    pub cpu_us: f64,
    pub latency_us: Option<[f64; 3]>,
    rounds: Vec<Measurement>,
}

/// A bound, and the figure that it bounds.
struct Check {
    what: String,
    bound: String,
    figure: f64,
    holds: bool,
}

impl Result {
    /// Calculates medians from the measurements of each contestant, the first of which is compared with the others.
    pub fn new(name: &'static str, must: &[Must], measurements: Measured<Measurement>) -> Self {
        let first = measurements[0].1.clone();
        let figures: Vec<Figures> = measurements
            .into_iter()
            .map(|(name, rounds)| {
                let of = |value: &dyn Fn(&Measurement) -> f64| median_of(&rounds, value);
                let latency_us = rounds[0]
                    .latency_us
                    .map(|_| [0, 1, 2].map(|index| of(&|round| round.latency_us.unwrap()[index])));
                let (rate, cpu_us) = (of(&|round| round.rate), of(&|round| round.cpu_us));
                let ratio = ratio(&first, &rounds, |round| round.rate);
                Figures { name, rate, ratio, cpu_us, latency_us, rounds }
            })
            .collect();
        let checks = must.iter().filter_map(|must| check(*must, &figures)).collect();
        Self { name, figures, checks }
    }

    /// Returns the results as lines for a terminal.
    fn text(&self) -> String {
        let mut text = self.name.to_owned();
        for Figures { name, rate, ratio, cpu_us, latency_us, .. } in &self.figures {
            let latency = latency_us.map_or_else(String::new, |[p50, p99, p999]| {
                format!("  p50 {p50:.0}, p99 {p99:.0}, p99.9 {p999:.0} µs")
            });
            write!(text, "\n  {name:<22}{rate:>9.0}/s {ratio:>6.2}x {cpu_us:>7.2} µs CPU{latency}")
                .unwrap();
        }
        for Check { what, bound, figure, holds } in &self.checks {
            let outcome = if *holds { "holds" } else { "DOES NOT HOLD" };
            write!(text, "\n  {outcome}: {what} {figure:.2}, must be {bound}").unwrap();
        }
        text
    }

    fn json(&self) -> Value {
        let contestant = |figures: &Figures| {
            let rounds = figures.rounds.iter().map(|round| {
                let Measurement { rate, cpu_us, latency_us } = round;
                json!({"rate": rate, "cpu_us": cpu_us, "latency_us": latency_us})
            });
            json!({
                "name": figures.name,
                "rate": figures.rate,
                "ratio_of_first": figures.ratio,
                "cpu_us": figures.cpu_us,
                "latency_us": figures.latency_us,
                "rounds": rounds.collect::<Vec<_>>(),
            })
        };
        let check = |check: &Check| {
            let Check { what, bound, figure, holds } = check;
            json!({"what": what, "bound": bound, "figure": figure, "holds": holds})
        };
        json!({
            "row": self.name,
            "contestants": self.figures.iter().map(contestant).collect::<Vec<_>>(),
            "checks": self.checks.iter().map(check).collect::<Vec<_>>(),
        })
    }
}

impl Report {
    /// Begins a report with the state of the machine.
    pub fn new(conditions: &'static str, rounds: usize, time: Duration) -> Self {
        let machine = vec![
            ("processor", processor()),
            ("kernel", read("/proc/sys/kernel/osrelease")),
            // How long an idle processor of a virtual machine polls before it halts, which decides what a wake-up costs.
            ("guest_halt_poll_ns", idle_polling()),
            ("load before", read("/proc/loadavg")),
            ("cleat", revision()),
            ("nbdkit", first_line("nbdkit", &["--version"])),
            ("qemu-nbd", first_line("qemu-nbd", &["--version"])),
            ("nbd-server", first_line("nbd-server", &["-V"])),
            ("fio", first_line("fio", &["--version"])),
        ];
        Self { conditions, machine, rounds, time, results: Vec::new(), skipped: Vec::new() }
    }

    /// Adds a row, and prints it.
    pub fn add(&mut self, name: &'static str, must: &[Must], measured: Measured<Measurement>) {
        let result = Result::new(name, must, measured);
        println!("{}", result.text());
        self.results.push(result);
    }

    /// Writes `report.md`, `report.json` and `report.svg`.
    pub fn write(mut self, directory: &Path) {
        self.machine.push(("load after", read("/proc/loadavg")));
        let write = |name: &str, text: String| std::fs::write(directory.join(name), text).unwrap();
        write("report.svg", plot::svg(&self.results));
        write("report.json", format!("{:#}\n", self.json()));
        write("report.md", self.markdown());
    }

    fn json(&self) -> Value {
        let machine = self.machine.iter().map(|(name, text)| ((*name).to_owned(), json!(text)));
        json!({
            "machine": machine.collect::<serde_json::Map<_, _>>(),
            "rounds": self.rounds,
            "seconds": self.time.as_secs_f64(),
            "skipped": self.skipped,
            "rows": self.results.iter().map(Result::json).collect::<Vec<_>>(),
        })
    }

    fn markdown(&self) -> String {
        let mut text = "# cleat beside other NBD servers\n\n".to_owned();
        for (name, value) in &self.machine {
            writeln!(text, "- {name}: {value}").unwrap();
        }
        for skipped in &self.skipped {
            writeln!(text, "- {skipped}").unwrap();
        }
        write!(
            text,
            "\n{} Medians of {} rounds of {:.1} s; the contestants take turns. A ratio is the median of the ratios within one round.\n\n\
             ![rates](report.svg)\n\n## Bounds\n\n| row | ratio | bound | measured | |\n|---|---|---|---|---|\n",
            self.conditions,
            self.rounds,
            self.time.as_secs_f64()
        )
        .unwrap();
        for result in &self.results {
            for Check { what, bound, figure, holds } in &result.checks {
                let outcome = if *holds { "holds" } else { "**does not hold**" };
                let name = result.name;
                writeln!(text, "| {name} | {what} | {bound} | {figure:.2} | {outcome} |").unwrap();
            }
        }
        text += "\n## Figures\n\n| row | server | per second | first relative to it | CPU µs per operation \
                 | p50, p99, p99.9 µs |\n|---|---|---|---|---|---|\n";
        for result in &self.results {
            for (index, figures) in result.figures.iter().enumerate() {
                let row = if index == 0 { result.name } else { "" };
                let Figures { name, rate, ratio, cpu_us, latency_us, .. } = figures;
                let latency = latency_us.map_or_else(String::new, |[p50, p99, p999]| {
                    format!("{p50:.0}, {p99:.0}, {p999:.0}")
                });
                writeln!(
                    text,
                    "| {row} | {name} | {rate:.0} | {ratio:.2} | {cpu_us:.2} | {latency} |"
                )
                .unwrap();
            }
        }
        text
    }
}

/// Compares the first contestant with a bound. Returns `None` if the contestant that it names is missing.
fn check(must: Must, figures: &[Figures]) -> Option<Check> {
    let first = &figures[0].rounds;
    let named = |name: &str| figures.iter().find(|figures| figures.name == name);
    let at_least = |what, figure, bound: f64| Check {
        what,
        bound: format!("at least {bound}"),
        figure,
        holds: figure >= bound,
    };
    match must {
        Must::Rate(name, bound) => {
            let figures = named(name)?;
            Some(at_least(format!("rate relative to {name}"), figures.ratio, bound))
        }
        Must::FastestPeer(bound) => {
            let peers = figures.iter().filter(|figures| is_peer(&figures.name));
            let slowest_lead = peers.min_by(|one, other| one.ratio.total_cmp(&other.ratio))?;
            let what = format!("rate relative to the fastest peer, {}", slowest_lead.name);
            Some(at_least(what, slowest_lead.ratio, bound))
        }
        Must::Cpu(name, bound) => {
            let figure = ratio(first, &named(name)?.rounds, |round| round.cpu_us);
            let what = format!("CPU per operation relative to {name}");
            let holds = figure <= bound;
            Some(Check { what, bound: format!("at most {bound}"), figure, holds })
        }
    }
}

fn median_of(rounds: &[Measurement], value: impl Fn(&Measurement) -> f64) -> f64 {
    median(&mut rounds.iter().map(value).collect::<Vec<_>>())
}

/// Returns the median of the ratios within one round.
fn ratio(
    first: &[Measurement],
    rounds: &[Measurement],
    value: impl Fn(&Measurement) -> f64,
) -> f64 {
    let ratios = first.iter().zip(rounds).map(|(first, other)| value(first) / value(other));
    median(&mut ratios.collect::<Vec<_>>())
}

/// Passes [`revision`] to a benchmark in a virtual machine, which has no repository.
pub const REVISION: &str = "CLEAT_BENCH_REVISION";

/// Returns which cleat is measured.
pub fn revision() -> String {
    let of_repository = |_| first_line("git", &["log", "-1", "--format=%h of %cs"]);
    std::env::var(REVISION).unwrap_or_else(of_repository)
}

fn processor() -> String {
    let text = read("/proc/cpuinfo");
    let model = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let count = text.lines().filter(|line| line.starts_with("processor")).count();
    format!("{count} × {}", model.map_or("?", |(_, model)| model))
}

fn idle_polling() -> String {
    let text = read("/sys/module/haltpoll/parameters/guest_halt_poll_ns");
    if text.is_empty() { "not in use".to_owned() } else { text }
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

/// Returns the first line that a program prints.
fn first_line(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let output = output.map(|output| [output.stdout, output.stderr].concat()).unwrap_or_default();
    String::from_utf8_lossy(&output).lines().next().unwrap_or("missing").to_owned()
}
