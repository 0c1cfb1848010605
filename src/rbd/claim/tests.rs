//! Claim attempts on a simulated image: a crash at every step of consecutive processes, and any order of the
//! steps of two mappings and of clients without claims, on OSDs that get the blocklist late.

mod beside;
mod seals;
mod world;

use proptest::prelude::*;

use super::*;
use crate::claim::decision::Holder;
use world::{ACTORS, End, HEADER, OSDS, STEPS, World};

fn claimant(node: &str, mapping: &str) -> Claimant {
    Claimant {
        node: node.to_owned(),
        boot_id: format!("boot of {node}"),
        mapping_id: mapping.to_owned(),
        ..Claimant::default()
    }
}

/// The third process claims the image without `take_over`, while the OSDs still have the watches of the
/// first two.
#[test]
fn a_mapping_recovers_from_any_two_consecutive_crashes() {
    let own = claimant("a", "m");
    let mut crashes = 0;
    for first in 0..STEPS {
        for second in 0..STEPS {
            let world = World::new();
            let ends = [
                world.run(&own, 0, "A/1", first),
                world.run(&own, 0, "A/2", second),
                world.run(&own, 0, "A/3", STEPS),
            ];
            let crashed = |end: &&End| [End::Crashed, End::CrashedUnclaimed].contains(end);
            crashes += ends.iter().filter(crashed).count();
            let expected = ends.iter().all(|end| crashed(&end) || *end == End::Served);
            assert!(expected && ends[2] == End::Served, "{first}, {second}: {ends:?}");
            let short = world.state().blocklist.values().all(|entry| *entry == Liveness::Ended);
            assert!(short, "{first}, {second}: a crash costs an entry for years");
        }
    }
    assert!(crashes > 200, "{crashes}");
}

/// Each process after the first resumes a device, so a state that the mapping's own processes have left must
/// not be taken for that of another client.
#[test]
fn a_mapping_resumes_after_any_three_consecutive_crashes() {
    let own = claimant("a", "m");
    let resuming = Claimant { resumes: true, ..own.clone() };
    for steps in (0..STEPS.pow(3)).map(|n| [n % STEPS, n / STEPS % STEPS, n / STEPS / STEPS]) {
        let world = World::new();
        world.run(&own, 0, "A/1", steps[0]);
        if world.state().seen.claim.is_none() {
            // The first process has not opened the image, so there is no device.
            continue;
        }
        world.run(&resuming, 0, "A/2", steps[1]);
        world.run(&resuming, 0, "A/3", steps[2]);
        assert_eq!(world.run(&resuming, 0, "A/4", STEPS), End::Served, "{steps:?}");
    }
}

/// krbd, qemu and `rbd` write no claim. They break the lock of a dead client, or an administrator does.
#[test]
fn a_mapping_does_not_resume_after_a_client_without_a_claim_wherever_its_process_crashed() {
    let own = claimant("a", "m");
    let resuming = Claimant { resumes: true, ..own.clone() };
    let foreign = |alive| Holder { address: "T/1".to_owned(), alive, made_by_hand: None };
    let mut crashes = 0;
    for steps in 0..STEPS {
        for holder in [None, Some(foreign(true)), Some(foreign(false))] {
            let world = World::new();
            world.run(&own, 0, "A/1", steps);
            let active = |claim: &Claim| !claim.released;
            if !world.state().seen.claim.as_ref().is_some_and(active) {
                continue;
            }
            crashes += 1;
            world.state().seen.holder.clone_from(&holder);
            let next = world.run(&resuming, 0, "A/2", STEPS);
            assert_eq!(next, End::Superseded, "{steps}: {holder:?}");
            let state = world.state();
            let entries: Vec<_> = state.blocklist.iter().collect();
            // The dead client could still write, and the foreign one is not fenced.
            assert_eq!(entries, [(&"A/1".to_owned(), &Liveness::Ended)], "{steps}");
            assert_eq!(state.seen.holder, holder, "{steps}: its lock was changed");
        }
    }
    assert!(crashes >= 9, "{crashes}");
}

#[test]
fn another_mapping_is_rejected_with_the_name_of_the_client_wherever_that_crashed() {
    let (own, other) = (claimant("a", "m"), claimant("b", "x"));
    let mut refused = 0;
    for steps in 0..STEPS {
        let world = World::new();
        let first = world.run(&own, 0, "A/1", steps);
        let held = world.state().seen.holder.is_some();
        let claimed = world.state().seen.claim.as_ref().is_some_and(|claim| !claim.released);
        let second = world.run(&other, 1, "B/1", STEPS);
        assert_eq!(second == End::Served, !held && !claimed, "{steps}: {first:?}, {second:?}");
        if let End::Failed(kind, message) = &second {
            refused += 1;
            assert_eq!(*kind, ErrorKind::InUse);
            assert!(message.contains("claimed by the node a (the mapping m"), "{message}");
        }
        world.drop_watch("A/1");
        // A claim stays active without a watch. Without a claim, nothing was written.
        let later = world.run(&other, 1, "B/2", STEPS);
        assert_eq!(later == End::Served, !claimed, "{steps}: {later:?}");
        let forced = Claimant { take_over: true, ..other.clone() };
        assert_eq!(world.run(&forced, 1, "B/3", STEPS), End::Served, "{steps}");
        // The first mapping must not resume its device.
        let resuming = Claimant { resumes: true, ..own.clone() };
        assert_eq!(world.run(&resuming, 0, "A/2", STEPS), End::Superseded, "{steps}");
    }
    assert!(refused > 4, "{refused}");
}

/// The old image may have had an active claim, which a copy of the image inherits.
#[test]
fn an_image_that_replaces_another_one_is_new_to_every_mapping_wherever_a_process_crashed() {
    let (own, other) = (claimant("a", "m"), claimant("b", "x"));
    for steps in 0..STEPS {
        for next in [&own, &other] {
            let world = World::new();
            world.run(&own, 0, "A/1", steps);
            world.replace_image();
            let resuming = Claimant { resumes: true, ..own.clone() };
            assert_eq!(world.run(&resuming, 0, "A/2", STEPS), End::Superseded, "{steps}");
            // No client of the old image is fenced, as the simulation asserts.
            assert_eq!(world.run(next, 0, "A/3", STEPS), End::Served, "{steps}");
            assert!(world.state().blocklist.is_empty(), "{steps}");
        }
    }
}

/// A client that fences another one waits for the map. Its requests then bring the map to each OSD.
#[test]
fn a_late_write_never_follows_one_of_the_successor_on_the_same_osd() {
    for waits_for_map in [true, false] {
        let world = World::lagging(waits_for_map);
        let first = world.start(&claimant("a", "m"), 0, "A/1", STEPS);
        first.acquire().unwrap().unwrap();
        let forced = Claimant { take_over: true, ..claimant("b", "x") };
        let second = world.start(&forced, 1, "B/1", STEPS);
        second.acquire().unwrap().unwrap();
        // This OSD has neither the map nor a request of the new client.
        first.write_data(1).unwrap();
        second.write_data(2).unwrap();
        let late = std::panic::AssertUnwindSafe(|| first.write_data(2));
        match std::panic::catch_unwind(late) {
            Ok(late) => assert!(waits_for_map && late.unwrap_err().kind() == ErrorKind::Fenced),
            // Otherwise this simulation would find nothing.
            Err(_) => assert!(!waits_for_map),
        }
    }
}

/// A forced unmap fences only the clients that its user has agreed to.
#[test]
fn only_listed_clients_are_fenced() {
    let world = World::new();
    let own = claimant("a", "m");
    assert_eq!(world.run(&own, 0, "A/1", 9), End::Crashed);
    let acquire = |address: &str, only: &[String]| {
        let next = world.start(&own, 0, address, STEPS);
        let clock = &cleat_core::clock::SystemClock;
        let (purpose, only) = (Purpose::Open, Some(only));
        ClaimAttempt { header: &next, name: "i", claimant: &own, purpose, only, clock }.acquire()
    };
    let error = acquire("A/2", &["T/1".to_owned()]).unwrap_err();
    assert_eq!((error.kind(), world.state().blocklist.len()), (ErrorKind::InUse, 0));
    acquire("A/3", &["T/1".to_owned(), "A/1".to_owned()]).unwrap().unwrap();
    assert_eq!(world.state().blocklist.keys().collect::<Vec<_>>(), ["A/1"]);
}

/// The claim of the image may be that of this client, whose lock was broken.
#[test]
fn a_client_that_has_lost_the_image_does_not_fence_itself() {
    let world = World::new();
    let resuming = Claimant { resumes: true, ..claimant("a", "m") };
    assert_eq!(world.run(&claimant("a", "m"), 0, "A/1", 9), End::Crashed);
    let next = world.start(&resuming, 0, "A/2", STEPS);
    next.acquire().unwrap().unwrap();
    world.state().blocklist.clear();
    world.state().seen.holder = None;
    assert_eq!(next.acquire().unwrap().unwrap_err(), Lost::NoLock);
    assert!(world.state().blocklist.is_empty());
}

/// Runs an actor. Also after a panic, `end` must run: `grant` waits for the actor otherwise.
fn act<T>(world: &World, actor: usize, work: impl FnOnce() -> T) -> T {
    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    world.end(actor);
    ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// A client without a claim breaks the lock, writes, and has gone when the mapping's process breaks the lock.
#[test]
fn a_lock_that_another_client_has_broken_after_it_was_read_is_noticed() {
    let own = claimant("a", "m");
    let resuming = Claimant { resumes: true, ..own.clone() };
    // The process has read the lock, has fenced the client of the claim, or has announced its claim.
    for steps in 4..7 {
        let world = &World::in_turns();
        let end = std::thread::scope(|scope| {
            let first = scope.spawn(|| act(world, 1, || world.run(&own, 1, "A/1", 9)));
            while !first.is_finished() {
                world.grant(1);
            }
            assert_eq!(first.join().unwrap(), End::Crashed);
            world.drop_watch("A/1");
            let second = scope.spawn(|| act(world, 0, || world.run(&resuming, 0, "A/2", STEPS)));
            (0..steps).for_each(|_| world.grant(0));
            let foreign = scope.spawn(|| act(world, 2, || world.run_foreign(2, "T/1", STEPS)));
            while !foreign.is_finished() {
                world.grant(2);
            }
            assert_eq!(foreign.join().unwrap(), End::Served);
            while !second.is_finished() {
                world.grant(0);
            }
            second.join().unwrap()
        });
        assert_eq!(end, End::Superseded, "{steps}");
    }
}

/// Runs the consecutive processes of an actor: of a mapping, or for the last actor of clients without claims.
fn run_all(world: &World, actor: usize, crashes: [u32; 3], forced: [bool; 3]) {
    let claimants = [("a", "m"), ("b", "x")].map(|(node, id)| claimant(node, id));
    let mut resumes = false;
    for (number, steps) in crashes.into_iter().enumerate() {
        let address = format!("{actor}/{number}");
        let Some(claimant) = claimants.get(actor) else {
            world.run_foreign(actor, &address, steps);
            continue;
        };
        let claimant = Claimant { take_over: forced[number], resumes, ..claimant.clone() };
        let end = world.run(&claimant, actor, &address, steps);
        // The process may have made a device.
        resumes |= end == End::Crashed;
    }
}

/// Something that happens at the storage between two steps.
fn happen(world: &World, event: u8) {
    match event {
        0 => {
            let watching = world.state().watching.iter().next().cloned();
            watching.iter().for_each(|address| world.drop_watch(address));
        }
        1 => world.deliver(HEADER),
        2 => world.deliver(OSDS - 1),
        3 => {
            let watching = world.state().watching.iter().next_back().cloned();
            watching.iter().for_each(|address| world.drop_watch(address));
        }
        4 => world.replace_image(),
        _ => {}
    }
}

proptest! {
    /// Two mappings of two nodes and clients without claims, each with three consecutive processes. Their
    /// steps run in any order, each process may crash, some have `take_over`, the OSDs drop the watches of some
    /// while they run and get maps late, and another image may get the name. The steps themselves assert the
    /// rules.
    #[test]
    fn no_write_of_a_fenced_client_takes_effect_and_live_clients_are_fenced_only_on_take_over(
        crashes in prop::array::uniform3(prop::array::uniform3(0..2 * STEPS)),
        forced in prop::array::uniform3(prop::array::uniform3(any::<bool>())),
        schedule in prop::collection::vec((0..ACTORS, 0_u8..40), 0..160),
    ) {
        let world = World::in_turns();
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..ACTORS).map(|actor| {
                let world = &world;
                let run = move || run_all(world, actor, crashes[actor], forced[actor]);
                scope.spawn(move || act(world, actor, run))
            }).collect();
            for (actor, event) in schedule {
                happen(&world, event);
                world.grant(actor);
            }
            while threads.iter().any(|thread| !thread.is_finished()) {
                (0..ACTORS).for_each(|actor| world.grant(actor));
            }
        });
    }
}
