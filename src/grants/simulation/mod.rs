//! Seeded runs of the whole protocol in virtual time: two controllers, one of them often with an old view, the
//! agents of two to four nodes, an API server with conflicts, stale lists, dropped watches, lost and late
//! answers and restored backups, and a storage that enforces what it has recorded.
//!
//! After every event: never two writers; SafeToDetach, Fenced and Cleaned are never true of a generation that
//! can still write; no client is cut off without a recorded revocation. At the end the requested state is
//! reached, and nothing is written while nothing changes.
//!
//! A seed that fails prints its scenario and its events. `CLEAT_SIM_SEED=n` repeats one seed and prints all
//! events; `CLEAT_SIM_SEEDS=from..to` runs other seeds than the default ones.

mod api;
mod controllers;
mod messages;
mod nodes;
mod rules;
mod scenario;
mod storage;
mod world;

use std::collections::BTreeMap;
use std::io::Write as _;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::object::Mode;
use crate::policy::Policy;
use scenario::{Act, Scenario};
use world::World;

/// The seeds of a full test.
const SEEDS: Range<u64> = 0..5_000;

/// Seeds that have found a defect: a mapping of another generation after a restore, and a fence that a restore
/// had removed.
const REGRESSIONS: &[u64] = &[290, 653, 3369];

/// The number of failures that are printed in full.
const SHOWN: usize = 2;

/// Situations that the default seeds contain.
const SITUATIONS: [&str; 16] = [
    "conflict",
    "client cut off",
    "fenced before a claim",
    "released",
    "superseded",
    "refused: sealed",
    "claimed elsewhere",
    "claimed",
    "ended",
    "ended by force",
    "adopted",
    "cleaned up",
    "fence restored",
    "fence forgotten",
    "node forgotten",
    "machine replaced",
];

#[test]
fn every_seed_ends_well() {
    if let Some(seed) = number("CLEAT_SIM_SEED") {
        let (violation, trace) = run(seed, true);
        print(&format!("{:#?}\n{trace}\n", scenario::of(seed)));
        assert_eq!(violation, None, "seed {seed}");
        return;
    }
    let seeds = seeds();
    let mut failed = Vec::new();
    let mut tally = BTreeMap::new();
    for seed in REGRESSIONS.iter().copied().chain(seeds.clone()) {
        if let Some(violation) = run_and_count(seed, &mut tally) {
            failed.push((seed, violation));
        }
    }
    for (seed, violation) in failed.iter().take(SHOWN) {
        let (again, trace) = run(*seed, true);
        let replayed =
            if again.as_ref() == Some(violation) { "" } else { " (the second run went otherwise)" };
        print(&format!("seed {seed}{replayed}: {violation}\n{:#?}\n{trace}", scenario::of(*seed)));
        print(&format!("seed {seed}: {violation}: run it again with CLEAT_SIM_SEED={seed}\n"));
    }
    for (seed, violation) in failed.iter().skip(SHOWN) {
        print(&format!("seed {seed}: {violation}\n"));
    }
    let all: Vec<u64> = failed.iter().map(|(seed, _)| *seed).collect();
    assert!(all.is_empty(), "{} of {seeds:?} failed: {all:?}", all.len());
    // A simulation in which a situation never occurs could not find its defects.
    let missing: Vec<_> = SITUATIONS.iter().filter(|name| !tally.contains_key(*name)).collect();
    assert!(missing.is_empty() || seeds != SEEDS, "{missing:?} never occur: {tally:?}");
}

#[test]
fn a_seed_replays() {
    for seed in 0..20 {
        assert_eq!(run(seed, true), run(seed, true), "seed {seed}");
    }
}

/// The number of writes that `docs/grants.md` states.
#[test]
fn a_use_of_a_volume_takes_six_writes() {
    for seed in 0..20 {
        // The other controller stands still: with an old list of requests, it would revoke the grant.
        let scenario = quiet(vec![
            (0, Act::PauseController(1, 60_000)),
            (0, Act::Attach(0)),
            (20_000, Act::Detach(0)),
        ]);
        let mut world = World::new(seed, &scenario, false);
        assert_eq!(world.run(), None, "seed {seed}");
        assert_eq!(world.api.writes, 6, "seed {seed}");
    }
}

/// A restored backup has no grant, the node was installed anew, and nothing requests the volume any more.
#[test]
fn a_claim_that_nobody_remembers_is_released() {
    for seed in 0..20 {
        let scenario = quiet(vec![
            (0, Act::Backup),
            (100, Act::Attach(0)),
            (10_000, Act::Reinstall(0)),
            (10_000, Act::Detach(0)),
            (10_000, Act::Restore),
        ]);
        assert_eq!(World::new(seed, &scenario, false).run(), None, "seed {seed}");
    }
}

/// Two nodes of which nothing fails but what `acts` say, and which do not use the volume at the end.
fn quiet(acts: Vec<(u64, Act)>) -> Scenario {
    Scenario {
        modes: vec![Mode::ReadWrite; 2],
        policy: Policy::default(),
        remediates: false,
        lost_per_mille: 0,
        late_per_mille: 0,
        forgets: false,
        acts,
        last: Vec::new(),
    }
}

/// Runs a seed. Returns the violation that it has found, and the events if `traces` is set.
fn run(seed: u64, traces: bool) -> (Option<String>, String) {
    let scenario = scenario::of(seed);
    let mut world = World::new(seed, &scenario, traces);
    (run_world(&mut world), world.trace.unwrap_or_default())
}

fn run_and_count(seed: u64, tally: &mut BTreeMap<&'static str, u64>) -> Option<String> {
    let scenario = scenario::of(seed);
    let mut world = World::new(seed, &scenario, false);
    let violation = run_world(&mut world);
    for (situation, times) in world.tally {
        *tally.entry(situation).or_insert(0) += times;
    }
    violation
}

fn run_world(world: &mut World<'_>) -> Option<String> {
    let result = catch_unwind(AssertUnwindSafe(|| world.run()));
    result.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("?");
        Some(format!("panicked: {text}"))
    })
}

fn print(text: &str) {
    let _ = std::io::stderr().write_all(text.as_bytes());
}

fn seeds() -> Range<u64> {
    let Ok(text) = std::env::var("CLEAT_SIM_SEEDS") else { return SEEDS };
    let (from, to) = text.split_once("..").expect("CLEAT_SIM_SEEDS=from..to");
    from.parse().unwrap()..to.parse().unwrap()
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}
