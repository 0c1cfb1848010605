//! Contests on a simulated header: every crash of a few processes in a row, and any order of the steps
//! of two mappings that want the image at once.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use proptest::prelude::*;

use super::*;
use crate::claim::decision::Sight;

/// More than a life has.
const STEPS: u32 = 20;

/// What the storage knows, and who is running.
#[derive(Default)]
struct State {
    sight: Sight,
    watching: BTreeSet<String>,
    blocked: BTreeSet<String>,
    running: BTreeSet<String>,
    /// Who has claimed last.
    owner: Option<String>,
    /// Whose step is next.
    turn: Option<usize>,
    ended: [bool; 2],
}

/// One image. Without `in_turns`, whoever comes does its steps.
struct World {
    state: Mutex<State>,
    changed: Condvar,
    in_turns: bool,
}

/// A process of a mapping, from its start to its end or crash.
struct Life<'a> {
    world: &'a World,
    mapping: usize,
    claimant: Claimant,
    address: String,
    /// Steps before it crashes.
    left: Cell<u32>,
}

/// How a life went.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Served,
    Superseded,
    Failed(ErrorKind, String),
    Crashed,
}

impl World {
    fn new(in_turns: bool) -> Self {
        Self { state: Mutex::default(), changed: Condvar::new(), in_turns }
    }

    /// A rule that is broken is reported by whoever broke it.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the mapping do one step, if it is still there.
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

    /// The OSDs forget a client that they have not heard of.
    fn forget(&self, address: &str) {
        let mut state = self.state();
        state.watching.remove(address);
        if let Some(holder) = &mut state.sight.holder {
            holder.alive &= holder.address != address;
        }
    }

    /// A process of a mapping on a node, which crashes after so many steps.
    fn live(&self, claimant: &Claimant, mapping: usize, address: &str, steps: u32) -> End {
        let life = Life {
            world: self,
            mapping,
            claimant: claimant.clone(),
            address: address.to_owned(),
            left: Cell::new(steps),
        };
        self.state().watching.insert(life.address.clone());
        self.state().running.insert(life.address.clone());
        let end = life.lead();
        self.state().running.remove(&life.address);
        if end != End::Crashed {
            // Closing gives up the lock and the watch.
            let mut state = self.state();
            if state.sight.holder.as_ref().is_some_and(|holder| holder.address == life.address) {
                state.sight.holder = None;
            }
            state.watching.remove(&life.address);
        }
        end
    }
}

impl Life<'_> {
    fn lead(&self) -> End {
        let contest = Contest {
            header: self,
            name: "i",
            claimant: &self.claimant,
            occasion: Occasion::Opening,
            only: None,
        };
        let served = contest.acquire().and_then(|claim| {
            let Some(claim) = claim else { return Ok(End::Superseded) };
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

    /// One request to the storage, unless the process has crashed before or it is cut off.
    fn step<T>(&self, request: impl FnOnce(&mut State) -> Result<T>) -> Result<T> {
        if self.left.get() == 0 {
            return Err(Error::new(ErrorKind::Internal, "it has crashed"));
        }
        self.left.set(self.left.get() - 1);
        let mut state = self.world.state();
        while self.world.in_turns && state.turn != Some(self.mapping) {
            state = self.world.wait(state);
        }
        let done = if state.blocked.contains(&self.address) {
            Err(Error::new(ErrorKind::Fenced, "it is cut off"))
        } else {
            request(&mut state)
        };
        state.turn = None;
        self.world.changed.notify_all();
        done
    }

    /// What it is all about: nobody's write lands once somebody else has claimed the image.
    fn write_data(&self) -> Result<()> {
        self.step(|state| {
            assert_eq!(state.owner.as_ref(), Some(&self.address), "a loser's write lands");
            Ok(())
        })
    }
}

impl Header for Life<'_> {
    fn id(&self) -> Result<String> {
        Ok("id".to_owned())
    }

    fn own_address(&self) -> Result<String> {
        Ok(self.address.clone())
    }

    fn look(&self) -> Result<Sight> {
        let claim = self.claim()?;
        let announced = self.step(|state| Ok(state.sight.announced.clone()))?;
        let holder = self.step(|state| Ok(state.sight.holder.clone()))?;
        Ok(Sight { claim, announced, holder })
    }

    fn claim(&self) -> Result<Option<Claim>> {
        self.step(|state| Ok(state.sight.claim.clone()))
    }

    fn cut_off(&self, address: &str) -> Result<()> {
        self.step(|state| {
            let lives = state.running.contains(address) && state.watching.contains(address);
            assert!(self.claimant.take_over || !lives, "{address} is pushed aside untold");
            state.blocked.insert(address.to_owned());
            state.watching.remove(address);
            Ok(())
        })
    }

    fn break_lock(&self, address: &str) -> Result<()> {
        self.step(|state| match &state.sight.holder {
            Some(holder) if holder.address == address => {
                state.sight.holder = None;
                Ok(())
            }
            None => Ok(()),
            Some(_) => Err(Error::new(ErrorKind::InUse, "another one has it")),
        })
    }

    fn announce(&self, next: &Claim) -> Result<()> {
        self.step(|state| {
            state.sight.announced = Some(next.clone());
            Ok(())
        })
    }

    fn lock(&self) -> Result<Option<String>> {
        self.step(|state| {
            if let Some(holder) = &state.sight.holder {
                return Ok(Some(holder.address.clone()));
            }
            let address = self.address.clone();
            let alive = state.watching.contains(&address);
            state.sight.holder = Some(Holder { address, alive });
            Ok(None)
        })
    }

    fn unlock(&self) -> Result<()> {
        self.step(|state| {
            state.sight.holder.take_if(|holder| holder.address == self.address);
            Ok(())
        })
    }

    fn write(&self, claim: &Claim) -> Result<()> {
        self.step(|state| {
            let holder = state.sight.holder.as_ref();
            if holder.is_none_or(|holder| holder.address != self.address) {
                return Err(Error::new(ErrorKind::PermissionDenied, "the lock is lost"));
            }
            state.sight.claim = Some(claim.clone());
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

/// Untold and at once, whatever its predecessors died of: the OSDs still take them for alive.
#[test]
fn a_mapping_survives_any_two_crashes_in_a_row() {
    let own = claimant("a", "m");
    let mut crashes = 0;
    for first in 0..STEPS {
        for second in 0..STEPS {
            let world = World::new(false);
            let ends = [
                world.live(&own, 0, "A/1", first),
                world.live(&own, 0, "A/2", second),
                world.live(&own, 0, "A/3", STEPS),
            ];
            crashes += ends.iter().filter(|end| **end == End::Crashed).count();
            let whole = ends.iter().all(|end| [End::Crashed, End::Served].contains(end));
            assert!(whole && ends[2] == End::Served, "{first}, {second}: {ends:?}");
        }
    }
    assert!(crashes > 200, "{crashes}");
}

#[test]
fn a_stranger_is_told_whom_it_would_push_aside_wherever_that_one_died() {
    let (own, other) = (claimant("a", "m"), claimant("b", "x"));
    let mut refused = 0;
    for steps in 0..STEPS {
        let world = World::new(false);
        let first = world.live(&own, 0, "A/1", steps);
        let held = world.state().sight.holder.is_some();
        let claimed = world.state().sight.claim.as_ref().is_some_and(|claim| !claim.released);
        let untold = world.live(&other, 1, "B/1", STEPS);
        assert_eq!(untold == End::Served, !held && !claimed, "{steps}: {first:?}, {untold:?}");
        if let End::Failed(kind, message) = &untold {
            refused += 1;
            assert_eq!(*kind, ErrorKind::InUse);
            assert!(message.contains("claimed by the node a (the mapping m"), "{message}");
        }
        world.forget("A/1");
        // Nothing was written without a claim, which stands however long nothing is heard.
        let later = world.live(&other, 1, "B/2", STEPS);
        assert_eq!(later == End::Served, !claimed, "{steps}: {later:?}");
        let told = Claimant { take_over: true, ..other.clone() };
        assert_eq!(world.live(&told, 1, "B/3", STEPS), End::Served, "{steps}");
        // And whoever has a device that missed this gets errors.
        let resuming = Claimant { resumes: true, ..own.clone() };
        assert_eq!(world.live(&resuming, 0, "A/2", STEPS), End::Superseded, "{steps}");
    }
    assert!(refused > 4, "{refused}");
}

proptest! {
    /// Two mappings of two nodes, each in three lives: the steps in any order, each life with its crash,
    /// some told to take over, some forgotten by the OSDs while they run. The rules that may not be
    /// broken are asserted where the steps are.
    #[test]
    fn no_losers_write_lands_and_nobody_is_pushed_aside_untold(
        crashes in prop::array::uniform2(prop::array::uniform3(0..2 * STEPS)),
        told in prop::array::uniform2(prop::array::uniform3(any::<bool>())),
        schedule in prop::collection::vec((0_usize..2, 0_u8..20), 0..120),
    ) {
        let world = World::new(true);
        let lives = [("a", "m"), ("b", "x")].map(|(node, id)| claimant(node, id));
        std::thread::scope(|scope| {
            let threads: Vec<_> = lives.iter().enumerate().map(|(mapping, claimant)| {
                let world = &world;
                scope.spawn(move || {
                    let lead = || {
                        let mut resumes = false;
                        for (life, steps) in crashes[mapping].into_iter().enumerate() {
                            let take_over = told[mapping][life];
                            let claimant = Claimant { take_over, resumes, ..claimant.clone() };
                            let address = format!("{mapping}/{life}");
                            let end = world.live(&claimant, mapping, &address, steps);
                            // A device may have been made.
                            resumes |= end == End::Crashed;
                        }
                    };
                    // So that whoever waits for its steps does not wait for ever.
                    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(lead));
                    world.end(mapping);
                    ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                })
            }).collect();
            for (mapping, what) in schedule {
                if what == 0 {
                    let running = world.state().running.iter().next().cloned();
                    running.iter().for_each(|address| world.forget(address));
                }
                world.grant(mapping);
            }
            while threads.iter().any(|thread| !thread.is_finished()) {
                (0..2).for_each(|mapping| world.grant(mapping));
            }
        });
    }
}
