//! Seals on a simulated image: a crash at every step of a node's process and of the processes that seal.

use cleat_grants::object::{Generation, Mode};
use cleat_grants::record::{Record, Target};

use super::claimant;
use super::world::{End, STEPS, World};
use super::*;
use crate::claim::seal::Seal;

const GRANT: u64 = 3;

/// The steps of a first claim up to its announcement, and up to its lock.
const ANNOUNCED: u32 = 5;
const LOCKED: u32 = 6;

pub(super) fn granted(node: &str, mapping: &str, grant: u64) -> Claimant {
    Claimant { grant: Some(grant), ..claimant(node, mapping) }
}

fn target(node: &str, generation: u64) -> Target {
    Target { node: node.to_owned(), generation: Generation(generation), mode: Mode::ReadWrite }
}

/// Seals the generation of `target` as a process that crashes after `steps` steps.
fn seal(world: &World, address: &str, target: &Target, steps: u32) -> Result<()> {
    seal_as(world, 1, address, target, steps)
}

/// Seals as the process of `actor`.
pub(super) fn seal_as(
    world: &World,
    actor: usize,
    address: &str,
    target: &Target,
    steps: u32,
) -> Result<()> {
    let controller = Claimant { take_over: true, ..claimant("controller", address) };
    let process = world.start(&controller, actor, address, steps);
    let listed: Vec<String> = world.state().blocklist.keys().cloned().collect();
    let seal = Seal {
        header: &process,
        name: "i",
        claimant: &controller,
        target,
        listed: &listed,
        clock: &cleat_core::clock::SystemClock,
    };
    let sealed = match target.mode {
        Mode::ReadWrite => seal.write(),
        _ => seal.write_beside(),
    };
    process.close();
    sealed
}

pub(super) fn record(world: &World) -> Record {
    let state = world.state();
    let listed: Vec<String> = state.blocklist.keys().cloned().collect();
    state.seen.claim.as_ref().map(|claim| claim.record(&listed)).unwrap_or_default()
}

#[test]
fn a_generation_is_sealed_wherever_the_node_and_a_controller_crashed() {
    for (node, first) in (0..STEPS).flat_map(|node| (0..STEPS).map(move |first| (node, first))) {
        let world = World::new();
        let old = granted("a", "m", GRANT);
        world.run(&old, 0, "A/1", node);
        let at = format!("{node}, {first}");
        // The watch of a crashed client, which holds the lock, delays the next one.
        if seal(&world, "C/1", &target("a", GRANT), first).is_err() {
            world.drop_watch("A/1");
            world.drop_watch("C/1");
            seal(&world, "C/2", &target("a", GRANT), STEPS).expect(&at);
        }
        // It may have crashed after its write, with the lock.
        world.drop_watch("C/1");
        let known = record(&world);
        assert!(known.proof_of(&target("a", GRANT)).is_some(), "{at}: {known:?}");
        assert!(known.claims.is_empty(), "{at}: {known:?}");
        let again = world.run(&old, 0, "A/2", STEPS);
        let is_sealed = |message: &str| message.contains("was fenced");
        assert!(matches!(&again, End::Failed(_, why) if is_sealed(why)), "{at}: {again:?}");
        let next = granted("b", "x", GRANT + 1);
        assert_eq!(world.run(&next, 2, "B/1", STEPS), End::Served, "{at}");
        // The process of a mapping with a device.
        let resuming = Claimant { resumes: true, ..old };
        assert_eq!(world.run(&resuming, 0, "A/3", STEPS), End::Superseded, "{at}");
    }
}

#[test]
fn a_client_that_was_cut_off_is_named_until_the_blocklist_does_not_list_it() {
    let world = World::new();
    let node = world.start(&granted("a", "m", GRANT), 0, "A/1", STEPS);
    node.acquire().unwrap().unwrap();
    seal(&world, "C/1", &target("a", GRANT), STEPS).unwrap();
    assert_eq!(node.write_data(1).unwrap_err().kind(), ErrorKind::Fenced);
    let seal_of = |record: Record| record.seal_of(Generation(GRANT)).cloned().unwrap();
    assert_eq!(seal_of(record(&world)).client.as_deref(), Some("A/1"));
    world.state().blocklist.clear();
    assert_eq!(seal_of(record(&world)).client, None);
}

/// The record does not name it: it has stopped between its lock and its claim.
#[test]
fn a_client_that_has_only_announced_its_claim_is_cut_off_and_named() {
    for grant in [GRANT, GRANT - 1] {
        let world = World::new();
        assert_eq!(world.run(&granted("a", "m", grant), 0, "A/1", LOCKED), End::CrashedUnclaimed);
        assert!(world.state().seen.holder.as_ref().is_some_and(|holder| holder.alive));
        seal(&world, "C/1", &target("a", GRANT), STEPS).unwrap();
        assert_eq!(world.state().blocklist.get("A/1"), Some(&Liveness::MayLive));
        let known = record(&world);
        let sealed = known.seal_of(Generation(GRANT)).unwrap();
        assert_eq!(sealed.client.as_deref(), Some("A/1"), "{known:?}");
    }
}

/// An administrator may have removed the announcement.
#[test]
fn a_client_that_the_record_names_is_cut_off_without_its_announcement() {
    let world = World::new();
    let node = world.start(&granted("a", "m", GRANT), 0, "A/1", STEPS);
    node.acquire().unwrap().unwrap();
    world.state().seen.announced = None;
    seal(&world, "C/1", &target("a", GRANT), STEPS).unwrap();
    assert_eq!(node.write_data(1).unwrap_err().kind(), ErrorKind::Fenced);
}

/// Only the client of the target may be cut off while it lives.
#[test]
fn a_seal_breaks_the_lock_of_another_client_only_after_its_end() {
    let prepare = |node: &str, grant, steps| {
        let world = World::new();
        world.run(&granted(node, "m", grant), 0, "A/1", steps);
        world
    };
    let foreign = || {
        // An announcement of the target's node, and another client that has the lock.
        let world = prepare("a", GRANT, ANNOUNCED);
        assert_eq!(world.run_foreign(2, "T/1", 2), End::Crashed);
        world
    };
    let cases = [
        (prepare("b", GRANT, LOCKED), "A/1"),
        (prepare("a", GRANT + 1, LOCKED), "A/1"),
        (foreign(), "T/1"),
    ];
    for (world, address) in cases {
        let before = world.state().seen.clone();
        assert!(before.holder.as_ref().is_some_and(|holder| holder.address == address));
        let error = seal(&world, "C/1", &target("a", GRANT), STEPS).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InUse);
        assert!(error.message().contains(address), "{error:?}");
        assert_eq!(world.state().seen.holder, before.holder);
        assert!(world.state().blocklist.is_empty());
        world.drop_watch(address);
        seal(&world, "C/2", &target("a", GRANT), STEPS).unwrap();
        assert!(record(&world).proof_of(&target("a", GRANT)).is_some());
    }
    let world = World::new();
    let (address, made_by_hand) = ("T/1".to_owned(), Some("backup".to_owned()));
    world.state().seen.holder = Some(Holder { address, alive: false, made_by_hand });
    let error = seal(&world, "C/1", &target("a", GRANT), STEPS).unwrap_err();
    assert!(error.message().contains("locked with the id \"backup\""), "{error:?}");
}

#[test]
fn a_stale_seal_changes_nothing() {
    let world = World::new();
    let node = world.start(&granted("b", "x", GRANT + 1), 0, "B/1", STEPS);
    node.acquire().unwrap().unwrap();
    let before = world.state().seen.clone();
    // An earlier generation, and one of a node that has no claim while another one has.
    for target in [target("a", GRANT), target("a", GRANT + 2)] {
        seal(&world, "C/1", &target, STEPS).unwrap();
        assert_eq!(world.state().seen.claim, before.claim);
    }
    assert!(world.state().blocklist.is_empty());
    node.write_data(1).unwrap();
}

#[test]
fn a_generation_that_is_too_old_is_refused_without_a_takeover() {
    let world = World::new();
    assert_eq!(world.run(&granted("a", "m", GRANT), 0, "A/1", STEPS), End::Served);
    for grant in [GRANT - 1, 0] {
        let old = world.run(&granted("b", "x", grant), 0, "B/1", STEPS);
        assert!(matches!(&old, End::Failed(ErrorKind::InUse, _)), "{old:?}");
    }
    let forced = Claimant { take_over: true, ..granted("b", "x", 0) };
    assert_eq!(world.run(&forced, 0, "B/2", STEPS), End::Served);
    assert_eq!(record(&world).generation, Generation(GRANT), "the record keeps the generation");
}
