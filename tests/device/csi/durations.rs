//! How long it takes to stage and to unstage a volume, and what takes the time.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::*;
use crate::fixture::LOG;

/// The number of times that each call is made: 3, or 15 if `CLEAT_REPEAT` is set.
fn repetitions() -> usize {
    if repeat().is_some() { 15 } else { 3 }
}

/// The parts of a call, each with the actions and the programs that the daemon's log names.
const PARTS: [(&str, &[&str]); 5] = [
    ("kernel: nbd device", &["Connect", "OpenExclusively", "Flush", "Disconnect"]),
    ("udev", &["WaitForDevice"]),
    ("kernel: mount(8), umount(8)", &["mount", "umount"]),
    ("blkid, mkfs, e2fsck", &["blkid", "mkfs.ext4", "e2fsck"]),
    ("ours: worker started or ended", &["StartWorker", "StopWorker"]),
];

/// The rest of a call: requests, records, mount tables, reads of the device.
const REST: &str = "ours: the rest";

/// The durations of a call, by part.
type Parts = BTreeMap<&'static str, Vec<Duration>>;

/// Measures how long it takes to stage a volume that is empty, and to stage and to unstage one with a filesystem.
pub(crate) fn of_stage_and_unstage() {
    let mut daemon = daemon();
    daemon.args(["--log-level", "info,cleat_node::reconcile=debug,cleat_filesystem=debug"]);
    daemon.args(["--log-format", "json"]);
    let scene = Scene::with_daemon(&format!("directories = {{ d = \"{VOLUMES}\" }}"), daemon);
    let capability = filesystem("ext4", Mode::SingleNodeWriter);
    let mut calls: BTreeMap<&str, Parts> = BTreeMap::new();
    for number in 0..repetitions() {
        let empty = scene.volume(&format!("empty-{number}"), "64M");
        let stage = || scene.stage(&empty, &capability).expect("stage");
        let unstage = || scene.unstage(&empty);
        measure(calls.entry("stage, empty").or_default(), stage);
        unstage();
        measure(calls.entry("stage, ext4").or_default(), stage);
        measure(calls.entry("unstage, ext4").or_default(), unstage);
    }
    for (call, parts) in calls {
        for (part, mut durations) in parts {
            durations.sort();
            let median = durations[durations.len() / 2].as_millis();
            println!("figures: {call}: {part}: median {median} ms");
        }
    }
    scene.nothing_is_left();
}

/// Makes a call, and adds its duration and those of its parts, which the log of the daemon has.
fn measure(parts: &mut Parts, call: impl FnOnce()) {
    let before = std::fs::read_to_string(LOG).expect("the log").len();
    let began = Instant::now();
    call();
    let all = began.elapsed();
    let log = std::fs::read_to_string(LOG).expect("the log");
    let mut rest = all;
    for (part, names) in PARTS {
        let took = log[before..].lines().filter_map(|line| took(line, names)).sum();
        rest = rest.saturating_sub(took);
        parts.entry(part).or_default().push(took);
    }
    parts.entry(REST).or_default().push(rest);
    parts.entry("all").or_default().push(all);
}

/// Returns the duration that a line of the log says, if it is that of one of these actions and programs.
fn took(line: &str, names: &[&str]) -> Option<Duration> {
    let line: serde_json::Value = serde_json::from_str(line).ok()?;
    let field = |name: &str| line.get(name).or_else(|| line["fields"].get(name));
    let action = field("action").or_else(|| field("program"))?.as_str()?;
    // An action has the device in parentheses.
    let name = action.split('(').next()?;
    let us = field("took_us")
        .and_then(|value| value.as_str().map_or(value.as_u64(), |text| text.parse().ok()));
    names.contains(&name).then(|| us.map(Duration::from_micros))?
}
