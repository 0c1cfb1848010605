//! Seeded runs of the whole control side: the real supervisor with a simulated kernel and simulated
//! workers, volumes, users and failures, in virtual time and on one thread. From any state, each mapping
//! must become mapped and working, or unmapped and reported.
//!
//! A seed that fails prints its scenario and its events. `CLEAT_SIM_SEED=n` repeats one seed and prints all
//! events; `CLEAT_SIM_SEEDS=from..to` runs other seeds than the default ones.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test, which prints what failed"
)]

mod checks;
mod clock;
mod connections;
mod csi;
mod disks;
mod handover;
mod lives;
mod quirks;
mod scenario;
mod snapshots;
mod trace;
mod workers;
mod world;

use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The seeds of a full test.
const SEEDS: Range<u64> = 0..5_000;

/// Seeds that have found a defect; the history of this line names the defects.
const REGRESSIONS: &[u64] = &[2697, 2790, 3624, 9283, 100_600];

/// The number of failures that are printed in full. Of the others only one line is printed.
const SHOWN: usize = 3;

/// Held by each test: the recording of one covers the threads of all, and which events are recorded is decided for the
/// whole process.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

#[test]
fn every_seed_ends_well() {
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(seed) = number("CLEAT_SIM_SEED") {
        let (failures, trace) = trace::record(|| run(seed));
        println!("{:#?}\n{trace}", scenario::of(seed));
        assert!(failures.is_empty(), "seed {seed}: {failures:#?}");
        return;
    }
    a_seed_replays();
    what_once_failed_does_not_fail_again();
    let seeds = seeds();
    assert!(!seeds.is_empty(), "no seed is in {seeds:?}");
    let next = AtomicU64::new(seeds.start);
    let watchdog = Watchdog::default();
    let failed = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        let (watchdog, next, failed, seeds) = (&watchdog, &next, &failed, &seeds);
        for _ in 0..threads {
            let guard = Working::new(watchdog);
            scope.spawn(move || {
                let _guard = guard;
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        return;
                    }
                    watchdog.begin(seed);
                    let failures = run(seed);
                    watchdog.end(seed);
                    if !failures.is_empty() {
                        failed.lock().unwrap().push((seed, failures));
                    }
                }
            });
        }
        scope.spawn(|| watchdog.watch());
    });
    let mut failed = failed.into_inner().unwrap();
    failed.sort();
    for (seed, failures) in failed.iter().take(SHOWN) {
        show(*seed, failures);
    }
    for (seed, failures) in failed.iter().skip(SHOWN) {
        println!("seed {seed}: {}", failures[0]);
    }
    let all: Vec<u64> = failed.iter().map(|(seed, _)| *seed).collect();
    assert!(all.is_empty(), "{} of {seeds:?} failed: {all:?}", all.len());
}

fn what_once_failed_does_not_fail_again() {
    for seed in REGRESSIONS {
        let failures = run(*seed);
        if !failures.is_empty() {
            show(*seed, &failures);
        }
        assert!(failures.is_empty(), "seed {seed} fails again");
    }
}

/// Checks that the same seed gives the same run, so that a failure can be repeated. Must run before the
/// threads start: the recording covers all threads.
fn a_seed_replays() {
    for seed in 0..20 {
        let (first, again) = (trace::record(|| run(seed)).1, trace::record(|| run(seed)).1);
        let differs = first.lines().zip(again.lines()).find(|(one, other)| one != other);
        assert_eq!((differs, first.len()), (None, again.len()), "seed {seed}");
    }
}

/// Limits the real time of each seed, because the seeds themselves run in virtual time.
#[derive(Default)]
struct Watchdog {
    running: Mutex<BTreeMap<u64, Instant>>,
    threads: AtomicUsize,
}

/// The limit of real time: many times the time of a seed on a busy machine.
const SEED_LIMIT: Duration = Duration::from_secs(60);

#[allow(clippy::disallowed_methods, reason = "it limits the real time of a seed")]
impl Watchdog {
    fn begin(&self, seed: u64) {
        self.running.lock().unwrap().insert(seed, Instant::now());
    }

    fn end(&self, seed: u64) {
        self.running.lock().unwrap().remove(&seed);
    }

    /// Watches until all seeds are done. A seed that hangs cannot be cancelled: prints its number and exits.
    fn watch(&self) {
        while self.threads.load(Ordering::Relaxed) > 0 {
            std::thread::sleep(Duration::from_millis(100));
            let running = self.running.lock().unwrap();
            let hangs = running.iter().find(|(_, since)| since.elapsed() > SEED_LIMIT);
            if let Some((seed, _)) = hangs {
                eprintln!("seed {seed} hangs; run it again with CLEAT_SIM_SEED={seed}");
                std::process::exit(1);
            }
        }
    }
}

/// A thread that runs seeds.
struct Working<'a>(&'a Watchdog);

impl<'a> Working<'a> {
    fn new(watchdog: &'a Watchdog) -> Self {
        watchdog.threads.fetch_add(1, Ordering::Relaxed);
        Self(watchdog)
    }
}

impl Drop for Working<'_> {
    fn drop(&mut self) {
        self.0.threads.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Runs a seed and returns its failures.
fn run(seed: u64) -> Vec<String> {
    let scenario = scenario::of(seed);
    catch_unwind(AssertUnwindSafe(|| lives::run(seed, &scenario))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("?");
        vec![format!("panicked: {text}")]
    })
}

fn show(seed: u64, failures: &[String]) {
    let (again, trace) = trace::record(|| run(seed));
    let replayed = if again == failures { "" } else { " (the second run went otherwise)" };
    println!("seed {seed}{replayed}: {failures:#?}\n{:#?}\n{trace}", scenario::of(seed));
    println!("run it again with CLEAT_SIM_SEED={seed}");
}

fn seeds() -> Range<u64> {
    let Ok(text) = std::env::var("CLEAT_SIM_SEEDS") else { return SEEDS };
    let (from, to) = text.split_once("..").expect("CLEAT_SIM_SEEDS=from..to");
    from.parse().unwrap()..to.parse().unwrap()
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}
