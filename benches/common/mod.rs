//! What the benchmarks share: the load generator, processes, and medians.

#![allow(dead_code, reason = "each benchmark uses a part of it")]

pub mod client;
pub mod fio;
pub mod histogram;
mod plot;
pub mod report;

use std::path::Path;
use std::process::Child;
use std::time::Duration;

use nix::sys::signal::Signal;

use self::client::{Client, READS};

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
}

impl Drop for Server {
    fn drop(&mut self) {
        test_kit::process::kill(self.id(), Signal::SIGKILL);
        if let Self::Child(child) = self {
            let _ = child.wait();
        }
    }
}

/// Measures the servers in alternating rounds and prints medians: reads per second, and the server's CPU
/// time per read. Also prints the ratio of the first server's rate to that of each server.
pub fn compare(servers: &[(&str, &Server, &Path)], depths: &[usize]) {
    let rounds = number("ROUNDS", 5.0) as usize;
    let time = Duration::from_millis(700);
    let mut clients: Vec<Client> =
        servers.iter().map(|(_, _, socket)| Client::connect(socket)).collect();
    clients.iter_mut().for_each(Client::fill);
    println!("4 KiB random reads, unix socket, one connection; medians of {rounds}");
    println!(
        "{:>6} {:<14} {:>12} {:>12} {:>7}",
        "depth", "server", "reads/s", "ns CPU/read", "first/"
    );
    for &depth in depths {
        let mut iops = vec![Vec::new(); servers.len()];
        let mut cpu_ns = vec![Vec::new(); servers.len()];
        for _ in 0..rounds {
            for (index, (_, server, _)) in servers.iter().enumerate() {
                let before = cpu_seconds(server.id());
                let figures = clients[index].run(READS, depth, time);
                let used = cpu_seconds(server.id()) - before;
                iops[index].push(figures.rate);
                cpu_ns[index].push(used * 1e9 / figures.count as f64);
            }
        }
        let medians: Vec<f64> = iops.iter_mut().map(|values| median(values)).collect();
        for (index, (name, _, _)) in servers.iter().enumerate() {
            let (iops, cpu) = (medians[index], median(&mut cpu_ns[index]));
            let ratio = medians[0] / iops;
            println!("{depth:>6} {name:<14} {iops:>12.0} {cpu:>12.0} {ratio:>6.2}x");
        }
    }
}
