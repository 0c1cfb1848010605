//! Shared claims on a simulated image: a crash at every step of the processes of a node and of a controller, while
//! other nodes use the image, and any order of the steps of several nodes.

use cleat_grants::object::{Generation, Mode};
use cleat_grants::record::{Record, Target};

use super::seals::{granted, record, seal_as};
use super::world::{End, STEPS, World};
use super::*;
use crate::claim::beside::{Eviction, leave};

const SHARED: [Mode; 2] = [Mode::SharedReadWrite, Mode::ReadOnly];

fn resuming(of: &Claimant) -> Claimant {
    Claimant { resumes: true, ..of.clone() }
}

fn evict(world: &World, claimant: &Claimant, at: &str, client: &str, steps: u32) -> Result<()> {
    let process = world.start(claimant, 1, at, steps);
    let clock = &cleat_core::clock::SystemClock;
    let (header, name, address) = (&process, "i", client);
    let evicted = Eviction { header, name, claimant, address, clock }.run();
    process.close();
    evicted
}

fn target(node: &str, generation: u64, mode: Mode) -> Target {
    Target { node: node.to_owned(), generation: Generation(generation), mode }
}

fn nodes(record: &Record) -> Vec<&str> {
    record.claims.iter().map(|claim| &*claim.node).collect()
}

#[test]
fn a_node_claims_again_after_any_two_crashes_while_another_one_works() {
    let own = granted("a", "m", 2);
    for mode in SHARED {
        for steps in (0..STEPS.pow(2)).map(|n| [n % STEPS, n / STEPS]) {
            let world = World::new();
            let other = world.start_beside(&granted("b", "x", 1), mode, 1, "B/1", 4 * STEPS);
            other.acquire_beside(mode, Purpose::Open).unwrap().unwrap();
            world.run_beside(&own, mode, 0, "A/1", steps[0]);
            let has_claimed = record(&world).claim_of("a").is_some();
            let next = if has_claimed { resuming(&own) } else { own.clone() };
            other.use_data(1).unwrap();
            let second = world.run_beside(&next, mode, 0, "A/2", steps[1]);
            other.use_data(1).unwrap();
            let third = world.run_beside(&next, mode, 0, "A/3", STEPS);
            assert_eq!(third, End::Served, "{mode:?} {steps:?}: {second:?}");
            other.use_data(2).unwrap();
            let known = record(&world);
            assert_eq!(nodes(&known), ["b"], "{mode:?} {steps:?}");
            let state = world.state();
            assert!(!state.blocklist.contains_key("B/1"), "{mode:?} {steps:?}");
            let short = state.blocklist.values().all(|entry| *entry == Liveness::Ended);
            assert!(short, "{mode:?} {steps:?}: a crash costs an entry for years");
        }
    }
}

#[test]
fn one_node_is_fenced_wherever_it_and_a_controller_crashed_and_the_other_one_goes_on() {
    let own = granted("a", "m", 2);
    for mode in SHARED {
        for (node, first) in (0..STEPS).flat_map(|node| (0..STEPS).map(move |first| (node, first)))
        {
            let at = format!("{mode:?} {node}, {first}");
            let world = World::new();
            let other = world.start_beside(&granted("b", "x", 1), mode, 2, "B/1", 4 * STEPS);
            other.acquire_beside(mode, Purpose::Open).unwrap().unwrap();
            world.run_beside(&own, mode, 0, "A/1", node);
            let target = target("a", 2, mode);
            let done = seal_as(&world, 1, "C/1", &target, first);
            if done.is_err() || record(&world).proof_of(&target).is_none() {
                other.use_data(1).unwrap();
                seal_as(&world, 1, "C/2", &target, STEPS).expect(&at);
            }
            let known = record(&world);
            assert!(known.proof_of(&target).is_some(), "{at}: {known:?}");
            assert_eq!(nodes(&known), ["b"], "{at}");
            let again = world.run_beside(&own, mode, 0, "A/2", STEPS);
            let is_sealed = |message: &str| message.contains("was fenced");
            assert!(matches!(&again, End::Failed(_, why) if is_sealed(why)), "{at}: {again:?}");
            let resumed = world.run_beside(&resuming(&own), mode, 0, "A/3", STEPS);
            assert_eq!(resumed, End::Superseded, "{at}");
            for osd in [1, 2] {
                other.use_data(osd).expect(&at);
            }
            let next = world.run_beside(&granted("a", "n", 3), mode, 0, "A/4", STEPS);
            assert_eq!(next, End::Served, "{at}");
        }
    }
}

#[test]
fn a_client_that_is_fenced_writes_nothing_and_its_seal_names_it() {
    for mode in SHARED {
        let world = World::new();
        let own = world.start_beside(&granted("a", "m", 2), mode, 0, "A/1", STEPS);
        own.acquire_beside(mode, Purpose::Open).unwrap().unwrap();
        own.use_data(1).unwrap();
        seal_as(&world, 1, "C/1", &target("a", 2, mode), STEPS).unwrap();
        assert_eq!(own.use_data(1).unwrap_err().kind(), ErrorKind::Fenced);
        let known = record(&world);
        assert_eq!(known.seal_of(Generation(2)).unwrap().client.as_deref(), Some("A/1"));
        assert_eq!(world.state().blocklist.get("A/1"), Some(&Liveness::MayLive));
        // It had the lock, with which no other client could write.
        assert!(world.state().seen.holder.is_none());
        // A stale controller changes nothing for the next claim of the node.
        let next = world.start_beside(&granted("a", "n", 3), mode, 0, "A/2", STEPS);
        next.acquire_beside(mode, Purpose::Open).unwrap().unwrap();
        seal_as(&world, 1, "C/2", &target("a", 2, mode), STEPS).unwrap();
        next.use_data(1).unwrap();
    }
}

/// Other writers would wait until the OSDs have dropped its watch.
#[test]
fn a_fenced_client_does_not_keep_a_lock_that_it_has_acquired_after_the_image_was_observed() {
    let (own, mode) = (granted("a", "m", 2), Mode::SharedReadWrite);
    for (seals, steps) in [(true, 0), (true, 4), (false, 0), (false, 4)] {
        let world = &World::in_turns();
        std::thread::scope(|scope| {
            // It claims, and acquires the lock with its first write.
            let client = || world.run_beside(&own, mode, 0, "A/1", 6);
            let client = scope.spawn(move || act(world, 0, client));
            (0..5).for_each(|_| world.grant(0));
            let own = &own;
            let fence = move || match seals {
                true => seal_as(world, 1, "C/1", &target("a", 2, mode), STEPS).unwrap(),
                false => {
                    let next = world.start_beside(&resuming(own), mode, 1, "A/2", STEPS);
                    next.acquire_beside(mode, Purpose::Open).unwrap().unwrap();
                }
            };
            let fence = scope.spawn(move || act(world, 1, fence));
            (0..steps).for_each(|_| world.grant(1));
            world.grant(0);
            assert_eq!(client.join().unwrap(), End::Crashed);
            let holder = world.state().seen.holder.clone();
            assert!(holder.is_some_and(|holder| holder.address == "A/1"));
            while !fence.is_finished() {
                world.grant(1);
            }
            fence.join().unwrap();
            assert_eq!(world.state().seen.holder, None, "{seals} {steps}");
        });
    }
}

/// A claim stays active wherever its client has crashed, until the controller or its own node removes it.
#[test]
fn a_writer_and_the_other_kinds_of_claims_exclude_each_other_wherever_a_process_crashed() {
    let (first, second) = (granted("a", "m", 1), granted("b", "x", 2));
    let run = |world: &World, mode: Mode, of: &Claimant, actor, address: &str, steps| match mode {
        Mode::ReadWrite => world.run(of, actor, address, steps),
        _ => world.run_beside(of, mode, actor, address, steps),
    };
    let kinds = [Mode::ReadWrite, Mode::SharedReadWrite, Mode::ReadOnly];
    for (mode, other) in kinds.iter().flat_map(|one| kinds.map(|other| (*one, other))) {
        if mode.is_compatible(other) {
            continue;
        }
        let mut refused = 0;
        for steps in 0..STEPS {
            let world = World::new();
            run(&world, mode, &first, 0, "A/1", steps);
            world.drop_watch("A/1");
            let is_claimed = record(&world).claim_of("a").is_some();
            let next = run(&world, other, &second, 1, "B/1", STEPS);
            let at = format!("{mode:?} {other:?} {steps}: {next:?}");
            assert_eq!(next == End::Served, !is_claimed, "{at}");
            if let End::Failed(kind, message) = &next {
                refused += 1;
                assert_eq!(*kind, ErrorKind::InUse, "{at}");
                assert!(message.contains("claimed by the node a (the mapping m"), "{at}");
                seal_as(&world, 2, "C/1", &target("a", 1, mode), STEPS).expect(&at);
                assert_eq!(run(&world, other, &second, 1, "B/2", STEPS), End::Served, "{at}");
            }
            let resumed = run(&world, mode, &resuming(&first), 0, "A/2", STEPS);
            assert_eq!(resumed, End::Superseded, "{at}");
        }
        assert!(refused > 2, "{mode:?} {other:?}: {refused}");
    }
}

/// It reads the record before it locks the image, and a build without shared claims writes without comparing.
#[test]
fn the_first_shared_claim_is_not_written_while_a_client_holds_the_lock() {
    for steps in 0..5 {
        let world = &World::in_turns();
        let end = std::thread::scope(|scope| {
            let reader =
                || world.run_beside(&granted("a", "m", 1), Mode::ReadOnly, 0, "A/1", STEPS);
            let reader = scope.spawn(move || act(world, 0, reader));
            (0..steps).for_each(|_| world.grant(0));
            let writer = || world.run(&granted("b", "x", 2), 1, "B/1", STEPS);
            let writer = scope.spawn(move || act(world, 1, writer));
            // Up to its lock.
            (0..6).for_each(|_| world.grant(1));
            while !reader.is_finished() {
                world.grant(0);
            }
            while !writer.is_finished() {
                world.grant(1);
            }
            assert_eq!(writer.join().unwrap(), End::Served, "{steps}");
            reader.join().unwrap()
        });
        assert!(matches!(&end, End::Failed(ErrorKind::InUse, _)), "{steps}: {end:?}");
    }
}

#[test]
fn a_claim_is_handed_over_and_released_one_by_one() {
    for mode in SHARED {
        let world = World::new();
        let start = |node: &str, mapping: &str, grant, address: &str| {
            world.start_beside(&granted(node, mapping, grant), mode, 0, address, 4 * STEPS)
        };
        let (a, b) = (start("a", "m", 1, "A/1"), start("b", "x", 2, "B/1"));
        let claim = a.acquire_beside(mode, Purpose::Open).unwrap().unwrap();
        let of_b = b.acquire_beside(mode, Purpose::Open).unwrap().unwrap();
        // The predecessor has not released its claim.
        let next = start("a", "m", 1, "A/2");
        let early = next.acquire_beside(mode, Purpose::Handover).unwrap_err();
        assert_eq!(early.kind(), ErrorKind::InUse);
        leave(&a, "i", &claim.client).unwrap();
        let taken = next.acquire_beside(mode, Purpose::Handover).unwrap().unwrap();
        next.use_data(1).unwrap();
        // The old process does not release the claim of the next one.
        leave(&a, "i", &claim.client).unwrap();
        assert_eq!(nodes(&record(&world)), ["a", "b"]);
        assert!(taken.is_same(&taken) && !taken.is_same(&claim));
        b.use_data(1).unwrap();
        leave(&b, "i", &of_b.client).unwrap();
        assert_eq!(nodes(&record(&world)), ["a"]);
        assert!(world.state().blocklist.is_empty());
        leave(&next, "i", &taken.client).unwrap();
        for process in [&a, &b, &next] {
            process.close();
        }
        assert_eq!(world.run(&granted("c", "y", 3), 0, "C/1", STEPS), End::Served);
        // A single writer came between.
        let late = start("a", "m", 1, "A/3").acquire_beside(mode, Purpose::Handover).unwrap();
        assert!(late.is_err());
    }
}

#[test]
fn the_claim_of_an_ended_client_is_removed_wherever_the_node_crashed() {
    for mode in SHARED {
        for steps in 0..STEPS {
            let world = World::new();
            let own = granted("a", "m", 1);
            let other = world.start_beside(&granted("b", "x", 2), mode, 2, "B/1", STEPS);
            other.acquire_beside(mode, Purpose::Open).unwrap().unwrap();
            assert_eq!(world.run_beside(&own, mode, 0, "A/1", 8), End::Crashed);
            // Another node, and a process that has not ended.
            for stranger in [claimant("c", "z"), claimant("a", "n")] {
                let error = evict(&world, &stranger, "D/1", "A/1", STEPS).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::InUse, "{steps}");
            }
            if evict(&world, &own, "A/2", "A/1", steps).is_err() {
                evict(&world, &own, "A/3", "A/1", STEPS).unwrap();
            }
            assert_eq!(nodes(&record(&world)), ["b"], "{steps}");
            let keys: Vec<String> = world.state().blocklist.keys().cloned().collect();
            assert_eq!(keys, ["A/1"], "{steps}");
            other.use_data(1).unwrap();
            // The generation is not sealed.
            assert_eq!(world.run_beside(&own, mode, 0, "A/4", STEPS), End::Served, "{steps}");
        }
    }
}

#[test]
fn a_lock_of_another_tool_keeps_a_shared_claim_out_until_its_client_has_ended() {
    for mode in SHARED {
        let world = World::new();
        assert_eq!(world.run_foreign(1, "T/1", 3), End::Crashed);
        let own = granted("a", "m", 1);
        let refused = world.run_beside(&own, mode, 0, "A/1", STEPS);
        assert!(matches!(&refused, End::Failed(ErrorKind::InUse, _)), "{refused:?}");
        world.drop_watch("T/1");
        assert_eq!(world.run_beside(&own, mode, 0, "A/2", STEPS), End::Served);
        assert_eq!(world.state().blocklist.get("T/1"), Some(&Liveness::MayLive));
        let (address, made_by_hand) = ("T/2".to_owned(), Some("backup".to_owned()));
        world.state().seen.holder = Some(Holder { address, alive: false, made_by_hand });
        let refused = world.run_beside(&own, mode, 0, "A/3", STEPS);
        assert!(matches!(&refused, End::Failed(_, why) if why.contains("\"backup\"")));
    }
}

/// Runs consecutive processes of two nodes that share the image in `mode`, and of a third actor that seals or is a
/// single writer.
fn run_beside_all(world: &World, actor: usize, mode: Mode, crashes: [u32; 3], writes: [bool; 3]) {
    let mut resumes = false;
    for (number, steps) in crashes.into_iter().enumerate() {
        let address = format!("{actor}/{number}");
        let next = 1 + u64::try_from(number).unwrap_or(0);
        match (actor, writes[number]) {
            (2, true) => {
                world.run(&granted("c", "y", 2 * next), 2, &address, steps);
            }
            (2, false) => {
                let _ = seal_as(world, 2, &address, &target("a", next, mode), steps);
            }
            _ => {
                let (node, mapping) = [("a", "m"), ("b", "x")][actor];
                let claimant = Claimant { resumes, ..granted(node, mapping, next) };
                let end = world.run_beside(&claimant, mode, actor, &address, steps);
                resumes |= end == End::Crashed;
            }
        }
    }
}

proptest! {
    /// Two nodes share the image while controllers seal generations of one of them, and a third node claims it for
    /// itself. Their steps run in any order, each process may crash, and the OSDs get maps late. The steps themselves
    /// assert the rules: no claim is lost, and no request takes effect after the claim was removed.
    #[test]
    fn no_claim_is_lost_and_no_request_of_a_fenced_client_takes_effect(
        is_reading: bool,
        crashes in prop::array::uniform3(prop::array::uniform3(0..2 * STEPS)),
        writes in prop::array::uniform3(any::<bool>()),
        schedule in prop::collection::vec((0..ACTORS, 0_u8..40), 0..160),
    ) {
        let mode = if is_reading { Mode::ReadOnly } else { Mode::SharedReadWrite };
        let world = World::in_turns();
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..ACTORS).map(|actor| {
                let world = &world;
                let run = move || run_beside_all(world, actor, mode, crashes[actor], writes);
                scope.spawn(move || act(world, actor, run))
            }).collect();
            for (actor, event) in schedule {
                // The image is not replaced.
                happen(&world, if event == 4 { 5 } else { event });
                world.grant(actor);
            }
            while threads.iter().any(|thread| !thread.is_finished()) {
                (0..ACTORS).for_each(|actor| world.grant(actor));
            }
        });
    }
}
