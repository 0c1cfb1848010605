//! Claim attempts on a simulated header: a crash at every step of consecutive processes, and any order of
//! the steps of two mappings that claim the image at the same time.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use proptest::prelude::*;

use super::*;
use crate::claim::decision::{Holder, Observation};
use cleat_core::clock::ManualClock;

/// More steps than a process makes.
const STEPS: u32 = 20;

/// The state of the storage, and the processes that run.
#[derive(Default)]
struct State {
    seen: Observation,
    watching: BTreeSet<String>,
    blocklist: BTreeMap<String, Liveness>,
    running: BTreeSet<String>,
    /// The address of the client with the newest claim that is not released.
    owner: Option<String>,
    /// The mapping that may make the next step.
    turn: Option<usize>,
    ended: [bool; 2],
}

/// A simulated image. With `in_turns`, each step of a mapping waits until the test grants it.
struct World {
    state: Mutex<State>,
    changed: Condvar,
    in_turns: bool,
    clock: ManualClock,
}

/// A process of a mapping, from its start to its end or crash.
struct Process<'a> {
    world: &'a World,
    mapping: usize,
    claimant: Claimant,
    address: String,
    /// The number of steps before the process crashes.
    left: Cell<u32>,
}

/// How a process ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Served,
    Superseded,
    Failed(ErrorKind, String),
    Crashed,
}

impl World {
    fn new(in_turns: bool) -> Self {
        let clock = ManualClock::new();
        Self { state: Mutex::default(), changed: Condvar::new(), in_turns, clock }
    }

    /// Ignores poisoning: the thread whose assertion failed reports it.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the mapping make one step, unless it has ended.
    fn grant(&self, mapping: usize) {
        let mut state = self.state();
        state.turn = Some(mapping);
        self.changed.notify_all();
        while state.turn.is_some() && !state.ended[mapping] {
            state = self.wait(state);
        }
        state.turn = None;
    }

    fn end(&self, mapping: usize) {
        self.state().ended[mapping] = true;
        self.changed.notify_all();
    }

    /// The OSDs drop the watch of a client.
    fn drop_watch(&self, address: &str) {
        let mut state = self.state();
        state.watching.remove(address);
        if let Some(holder) = &mut state.seen.holder {
            holder.alive &= holder.address != address;
        }
    }

    /// Runs a process of `mapping`, which crashes after `steps` steps.
    fn run(&self, claimant: &Claimant, mapping: usize, address: &str, steps: u32) -> End {
        let process = Process {
            world: self,
            mapping,
            claimant: claimant.clone(),
            address: address.to_owned(),
            left: Cell::new(steps),
        };
        self.state().watching.insert(process.address.clone());
        self.state().running.insert(process.address.clone());
        let end = process.main();
        self.state().running.remove(&process.address);
        if end != End::Crashed {
            // Closing releases the lock and the watch.
            let mut state = self.state();
            if state.seen.holder.as_ref().is_some_and(|holder| holder.address == process.address) {
                state.seen.holder = None;
            }
            state.watching.remove(&process.address);
        }
        end
    }
}

impl Process<'_> {
    fn main(&self) -> End {
        let attempt = ClaimAttempt {
            header: self,
            name: "i",
            claimant: &self.claimant,
            purpose: Purpose::Open,
            only: None,
            clock: &self.world.clock,
        };
        let served = attempt.acquire().and_then(|claim| {
            let Ok(claim) = claim else { return Ok(End::Superseded) };
            for _ in 0..2 {
                self.write_data()?;
            }
            self.write(&claim.released())?;
            self.unlock().map(|()| End::Served)
        });
        match served {
            _ if self.left.get() == 0 => End::Crashed,
            Ok(end) => end,
            Err(error) => End::Failed(error.kind(), error.message().to_owned()),
        }
    }

    /// Sends one request to the storage. Fails if the process has crashed or its client is fenced.
    fn step<T>(&self, request: impl FnOnce(&mut State) -> Result<T>) -> Result<T> {
        if self.left.get() == 0 {
            return Err(Error::new(ErrorKind::Internal, "the process has crashed"));
        }
        self.left.set(self.left.get() - 1);
        let mut state = self.world.state();
        while self.world.in_turns && state.turn != Some(self.mapping) {
            state = self.world.wait(state);
        }
        let done = if state.blocklist.contains_key(&self.address) {
            Err(Error::new(ErrorKind::Fenced, "the client is fenced"))
        } else {
            request(&mut state)
        };
        state.turn = None;
        self.world.changed.notify_all();
        done
    }

    /// Writes data. Asserts the main rule: no write takes effect after another client has claimed the
    /// image.
    fn write_data(&self) -> Result<()> {
        self.step(|state| {
            assert_eq!(
                state.owner.as_ref(),
                Some(&self.address),
                "a fenced client's write took effect"
            );
            Ok(())
        })
    }
}

impl Header for Process<'_> {
    fn id(&self) -> Result<String> {
        Ok("id".to_owned())
    }

    fn own_address(&self) -> Result<String> {
        Ok(self.address.clone())
    }

    fn observe(&self) -> Result<Observation> {
        let claim = self.claim()?;
        let announced = self.step(|state| Ok(state.seen.announced.clone()))?;
        let watching = self.step(|state| Ok(state.watching.iter().cloned().collect()))?;
        let holder = self.step(|state| Ok(state.seen.holder.clone()))?;
        Ok(Observation { claim, announced, holder, watching })
    }

    fn claim(&self) -> Result<Option<Claim>> {
        self.step(|state| Ok(state.seen.claim.clone()))
    }

    fn fence(&self, address: &str, liveness: Liveness) -> Result<()> {
        self.step(|state| {
            let running = state.running.contains(address);
            let alive = running && state.watching.contains(address);
            assert!(self.claimant.take_over || !alive, "{address} is fenced without take_over");
            let short = liveness == Liveness::Ended;
            assert!(!(short && running), "{address} could write again after an hour");
            state.blocklist.insert(address.to_owned(), liveness);
            state.watching.remove(address);
            Ok(())
        })
    }

    fn break_lock(&self, address: &str) -> Result<()> {
        self.step(|state| match &state.seen.holder {
            Some(holder) if holder.address == address => {
                state.seen.holder = None;
                Ok(())
            }
            None => Ok(()),
            Some(_) => Err(Error::new(ErrorKind::InUse, "another client has the lock")),
        })
    }

    fn announce(&self, next: &Claim) -> Result<()> {
        self.step(|state| {
            state.seen.announced = Some(next.clone());
            Ok(())
        })
    }

    fn lock(&self) -> Result<Option<String>> {
        self.step(|state| {
            if let Some(holder) = &state.seen.holder {
                return Ok(Some(holder.address.clone()));
            }
            let address = self.address.clone();
            let alive = state.watching.contains(&address);
            state.seen.holder = Some(Holder { address, alive, made_by_hand: None });
            Ok(None)
        })
    }

    fn unlock(&self) -> Result<()> {
        self.step(|state| {
            state.seen.holder.take_if(|holder| holder.address == self.address);
            Ok(())
        })
    }

    fn write(&self, claim: &Claim) -> Result<()> {
        self.step(|state| {
            let holder = state.seen.holder.as_ref();
            if holder.is_none_or(|holder| holder.address != self.address) {
                return Err(Error::new(ErrorKind::PermissionDenied, "the lock is lost"));
            }
            state.seen.claim = Some(claim.clone());
            state.owner = (!claim.released).then(|| self.address.clone());
            Ok(())
        })
    }
}

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
            let world = World::new(false);
            let ends = [
                world.run(&own, 0, "A/1", first),
                world.run(&own, 0, "A/2", second),
                world.run(&own, 0, "A/3", STEPS),
            ];
            crashes += ends.iter().filter(|end| **end == End::Crashed).count();
            let expected = ends.iter().all(|end| [End::Crashed, End::Served].contains(end));
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
        let world = World::new(false);
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
            let world = World::new(false);
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
        let world = World::new(false);
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

proptest! {
    /// Two mappings of two nodes, each with three consecutive processes. Their steps run in any order,
    /// each process may crash, some have `take_over`, and the OSDs drop the watches of some while they
    /// run. The steps themselves assert the rules.
    #[test]
    fn no_write_of_a_fenced_client_takes_effect_and_live_clients_are_fenced_only_on_take_over(
        crashes in prop::array::uniform2(prop::array::uniform3(0..2 * STEPS)),
        forced in prop::array::uniform2(prop::array::uniform3(any::<bool>())),
        schedule in prop::collection::vec((0_usize..2, 0_u8..20), 0..120),
    ) {
        let world = World::new(true);
        let claimants = [("a", "m"), ("b", "x")].map(|(node, id)| claimant(node, id));
        std::thread::scope(|scope| {
            let threads: Vec<_> = claimants.iter().enumerate().map(|(mapping, claimant)| {
                let world = &world;
                scope.spawn(move || {
                    let run = || {
                        let mut resumes = false;
                        for (number, steps) in crashes[mapping].into_iter().enumerate() {
                            let take_over = forced[mapping][number];
                            let claimant = Claimant { take_over, resumes, ..claimant.clone() };
                            let address = format!("{mapping}/{number}");
                            let end = world.run(&claimant, mapping, &address, steps);
                            // A crashed process may have made a device.
                            resumes |= end == End::Crashed;
                        }
                    };
                    // Also after a panic, `end` must run: `grant` waits for the mapping otherwise.
                    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
                    world.end(mapping);
                    ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                })
            }).collect();
            for (mapping, event) in schedule {
                if event == 0 {
                    let running = world.state().running.iter().next().cloned();
                    running.iter().for_each(|address| world.drop_watch(address));
                }
                world.grant(mapping);
            }
            while threads.iter().any(|thread| !thread.is_finished()) {
                (0..2).for_each(|mapping| world.grant(mapping));
            }
        });
    }
}
