//! fio as a process that makes a load and measures it.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use super::client::Load;

/// The arguments that name what fio loads.
pub struct Fio {
    arguments: Vec<String>,
    conf: Option<PathBuf>,
}

impl Fio {
    /// Makes a load with these arguments, separated by spaces; `conf` is the configuration of Ceph.
    pub fn new(arguments: &str, conf: Option<PathBuf>) -> Self {
        Self { arguments: arguments.split(' ').map(str::to_owned).collect(), conf }
    }

    /// Runs fio. Returns operations per second, and their number.
    pub fn run(&self, load: Load, depth: usize, time: Duration) -> (f64, f64) {
        let figures = self.figures(load, depth, time, &["--gtod_reduce=1"]);
        (figures["iops"].as_f64().unwrap(), figures["total_ios"].as_f64().unwrap())
    }

    /// The same, and the median, the 99th and the 99.9th percentile of the latency in microseconds. fio then reads the clock for
    /// each operation.
    pub fn run_with_latency(
        &self,
        load: Load,
        depth: usize,
        time: Duration,
    ) -> (f64, f64, [f64; 3]) {
        let figures = self.figures(load, depth, time, &["--percentile_list=50:99:99.9"]);
        let percentiles = &figures["clat_ns"]["percentile"];
        let latency_us = ["50.000000", "99.000000", "99.900000"]
            .map(|name| percentiles[name].as_f64().unwrap() / 1e3);
        (figures["iops"].as_f64().unwrap(), figures["total_ios"].as_f64().unwrap(), latency_us)
    }

    /// Runs fio. Returns what it reports of the reads or writes.
    fn figures(&self, load: Load, depth: usize, time: Duration, more: &[&str]) -> Value {
        let writes = load.writes_percent > 0;
        let mode = match (load.sequential, writes) {
            (false, false) => "randread",
            (false, true) => "randwrite",
            (true, false) => "read",
            (true, true) => "write",
        };
        let mut command = Command::new("fio");
        command.args(&self.arguments).args(["--name=raw", "--output-format=json", "--thread"]);
        command.args(["--time_based", "--group_reporting"]).args(more);
        command.arg(format!("--runtime={}ms", time.as_millis()));
        command.arg(format!("--rw={mode}")).arg(format!("--bs={}", load.block));
        command.arg(format!("--iodepth={depth}"));
        if let Some(conf) = &self.conf {
            command.env("CEPH_CONF", conf);
        }
        let output = command.stderr(Stdio::inherit()).output().expect("apt install fio");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        let from = output.stdout.iter().position(|byte| *byte == b'{').unwrap();
        let mut json: Value = serde_json::from_slice(&output.stdout[from..]).unwrap();
        json["jobs"][0][if writes { "write" } else { "read" }].take()
    }
}
