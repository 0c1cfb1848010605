//! What the benchmarks share: the load generator, rounds, processes, and medians.

#![allow(dead_code, reason = "each benchmark uses a part of it")]

pub mod client;
pub mod fio;
pub mod histogram;
mod plot;
pub mod report;

use std::process::Child;

use nix::sys::signal::Signal;

/// The measurements of each contestant in a row, with its name.
pub type Measured<Measurement> = Vec<(String, Vec<Measurement>)>;

/// Measures all rows in each round, and returns the measurements of each row. `start` returns the contestants of a round,
/// with their names, and should start them anew, because where the memory of a server and of its volume is, makes a
/// difference of up to a factor of 2. Each round begins with another contestant, and every second one goes backwards, so
/// that none always follows the same one.
pub fn in_rounds<Row, Contestant, Measurement>(
    rounds: usize,
    rows: &[Row],
    mut start: impl FnMut() -> Vec<(String, Contestant)>,
    mut measure: impl FnMut(&Row, &mut Contestant) -> Measurement,
) -> Vec<Measured<Measurement>> {
    let mut all: Vec<Measured<Measurement>> = rows.iter().map(|_| Vec::new()).collect();
    for round in 0..rounds {
        let mut contestants = start();
        let count = contestants.len();
        let mut turns: Vec<usize> = (0..count).map(|turn| (round + turn) % count).collect();
        if round % 2 == 1 {
            turns.reverse();
        }
        for (row, measured) in rows.iter().zip(&mut all) {
            if measured.is_empty() {
                let names = contestants.iter().map(|(name, _)| name.clone());
                *measured = names.map(|name| (name, Vec::new())).collect();
            }
            for index in &turns {
                measured[*index].1.push(measure(row, &mut contestants[*index].1));
            }
        }
    }
    all
}

/// Returns the CPU time that a process and its descendants have used, in seconds.
pub fn cpu_seconds(pid: u32) -> f64 {
    // A descendant may have ended.
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return 0.0 };
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    let ticks: f64 = fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    let children = children.unwrap_or_default();
    let children = children.split_whitespace().map(|child| cpu_seconds(child.parse().unwrap()));
    // USER_HZ is 100 on all supported platforms.
    ticks / 100.0 + children.sum::<f64>()
}

/// Sorts `values` and returns their median.
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Returns the number in an environment variable.
pub fn number(name: &str, default: f64) -> f64 {
    std::env::var(name).map_or(default, |text| text.parse().expect(name))
}

/// A server process, which is killed when the value is dropped.
pub enum Server {
    Child(Child),
    /// A process that has left its parent.
    Daemon(u32),
}

impl Server {
    /// Returns the number of the process.
    pub fn id(&self) -> u32 {
        match self {
            Self::Child(child) => child.id(),
            Self::Daemon(pid) => *pid,
        }
    }

    /// Returns whether the process has ended.
    pub fn has_ended(&mut self) -> bool {
        match self {
            Self::Child(child) => child.try_wait().unwrap().is_some(),
            Self::Daemon(pid) => !test_kit::process::is_alive(*pid),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        test_kit::process::kill(self.id(), Signal::SIGKILL);
        if let Self::Child(child) = self {
            let _ = child.wait();
        }
    }
}
