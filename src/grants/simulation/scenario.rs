//! The scenario of a seed: what users do, what fails, and the state that must be reached at the end.

use cleat_core::random::Random;

use crate::object::Mode;
use crate::policy::Policy;

/// The end of the failures, in milliseconds of the world's time.
pub(crate) const FAULTS_END_MS: u64 = 40_000;

#[derive(Debug)]
pub(crate) struct Scenario {
    /// How each node uses the volume.
    pub(crate) modes: Vec<Mode>,
    pub(crate) policy: Policy,
    /// Whether a node is lost as soon as its lease is stale.
    pub(crate) remediates: bool,
    /// How many of 1000 messages are lost, and how many arrive seconds late.
    pub(crate) lost_per_mille: u64,
    pub(crate) late_per_mille: u64,
    /// Whether the record names only the last client that was cut off.
    pub(crate) forgets: bool,
    /// What happens at which millisecond, in order.
    pub(crate) acts: Vec<(u64, Act)>,
    /// The nodes that use the volume at the end.
    pub(crate) last: Vec<usize>,
}

/// An event of a scenario. Nodes and controllers are given by their index, durations in milliseconds.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Act {
    /// The volume is requested for a node, and its pod starts.
    Attach(usize),
    /// The pod ends, and the request goes away afterwards.
    Detach(usize),
    /// The request goes away although the pod still runs.
    Withdraw(usize),
    Stage(usize),
    Unstage(usize),
    /// The whole node stands still. Its requests may still arrive at the storage.
    Freeze(usize, u64),
    CutFromApi(usize, u64),
    CutFromStorage(usize, u64),
    RestartAgent(usize),
    Reboot(usize),
    /// The node is installed anew with its old name: its agent has no journal.
    Reinstall(usize),
    /// Another machine gets the name of a node whose client was fenced, and the first one stands still.
    ReplaceMachine(usize),
    /// The worker dies, or only seems to.
    CrashWorker(usize, bool),
    Taint(usize, bool),
    Delete(usize, bool),
    ApiDown(u64),
    StorageDown(u64),
    DropWatches,
    /// The sender of the next call of this kind stands still after it, and the call arrives in this time.
    FreezeAt(usize, Kind, u64),
    PauseAt(usize, Kind, u64),
    /// The next call of this kind arrives after this time, and the sender goes on.
    DelayAt(usize, Kind, u64),
    PauseController(usize, u64),
    RestartController(usize),
    Backup,
    Restore,
}

/// The calls at which an actor can be stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Claim,
    WriteEntry,
    Release,
    Cut,
    Seal,
    WriteSpec,
}

/// The only source of random choices.
pub(crate) struct Dice(Random);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(Random::seeded(seed))
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0.next() % bound
    }

    pub(crate) fn index(&mut self, bound: usize) -> usize {
        usize::try_from(self.below(bound as u64)).unwrap_or(0)
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.index(from.len())]
    }
}

/// Returns the scenario of a seed.
pub(crate) fn of(seed: u64) -> Scenario {
    let mut dice = Dice::new(seed);
    let nodes = dice.pick(&[2, 2, 3, 4]);
    let shared = dice.one_in(6);
    let modes = if shared { dice.shared_modes(nodes) } else { vec![Mode::ReadWrite; nodes] };
    let policy = Policy {
        release_timeout_s: dice.pick(&[0, 1, 3, 5]),
        forced_detach_s: dice.pick(&[4, 10, 360]),
        lease_timeout_s: dice.pick(&[None, Some(2), Some(6)]),
        ..Policy::default()
    };
    let remediates = dice.one_in(3);
    let restores = dice.one_in(4);
    let mut acts = vec![(0, Act::Attach(dice.index(nodes)))];
    for _ in 0..8 + dice.below(22) {
        let at = dice.below(FAULTS_END_MS);
        let act = dice.act(nodes, restores);
        acts.push((at, act));
    }
    if restores && dice.one_in(2) {
        dice.script(nodes, &mut acts);
    }
    if dice.one_in(16) {
        dice.late_signal(nodes, &mut acts);
    }
    acts.sort_by_key(|(at, _)| *at);
    let last = match dice.below(8) {
        0 => Vec::new(),
        1..=3 if shared => {
            let first = dice.index(nodes);
            let is_beside = |node: &usize| modes[*node].is_compatible(modes[first]);
            (0..nodes).filter(|node| *node == first || is_beside(node)).collect()
        }
        _ => vec![dice.index(nodes)],
    };
    let lost_per_mille = dice.pick(&[0, 10, 60]);
    let late_per_mille = dice.pick(&[0, 20, 100]);
    let policy = Policy { max_nodes: dice.pick(&[0, 0, 1, 64]), ..policy };
    let forgets = dice.one_in(8);
    if dice.one_in(8) {
        dice.replaced_machine(nodes, &mut acts);
        acts.sort_by_key(|(at, _)| *at);
    }
    Scenario { modes, policy, remediates, lost_per_mille, late_per_mille, forgets, acts, last }
}

impl Dice {
    /// Returns the modes of nodes that can hold the volume at the same time, or of some that cannot.
    fn shared_modes(&mut self, nodes: usize) -> Vec<Mode> {
        let modes = [Mode::SharedReadWrite, Mode::ReadOnly, Mode::ReadWrite];
        match self.below(3) {
            0 => vec![Mode::SharedReadWrite; nodes],
            1 => vec![Mode::ReadOnly; nodes],
            _ => (0..nodes).map(|_| self.pick(&modes)).collect(),
        }
    }

    /// Adds a sequence that random events rarely produce: a backup is taken between two uses of the volume and
    /// restored during the second one.
    fn script(&mut self, nodes: usize, acts: &mut Vec<(u64, Act)>) {
        let (first, second) = (self.index(nodes), self.index(nodes));
        let (cut_ms, stop_ms) = (self.pick(&[500, 15_000]), self.pick(&[500, 6_000]));
        let sequence = match self.one_in(2) {
            // The same generation is staged again: the backup has the SafeToDetach of the first use.
            true => vec![
                Act::Attach(first),
                Act::Unstage(first),
                Act::Backup,
                Act::Stage(first),
                Act::CutFromApi(first, cut_ms),
                Act::Restore,
                Act::Detach(first),
                Act::Attach(second),
            ],
            // A grant that the backup does not have is claimed before or after the restore.
            false => vec![
                Act::Detach(second),
                Act::Backup,
                Act::FreezeAt(first, Kind::Claim, stop_ms),
                Act::Attach(first),
                Act::Restore,
                Act::Withdraw(first),
                Act::Attach(second),
            ],
        };
        let mut at = self.below(FAULTS_END_MS / 2);
        // The other events would mostly prevent it.
        let end = at + 12_000;
        acts.retain(|(other, _)| *other < at || *other > end);
        for act in sequence {
            acts.push((at, act));
            at += 100 + self.below(1_400);
        }
    }

    /// Adds a sequence in which a SafeToDetach is on its way while the node is about to claim the same generation
    /// again, and nothing else has changed the object.
    fn late_signal(&mut self, nodes: usize, acts: &mut Vec<(u64, Act)>) {
        let node = self.index(nodes);
        acts.retain(|(at, _)| *at > 20_000);
        // The first claim fails, so that the mapping is not published.
        acts.push((0, Act::CutFromStorage(node, 1_500)));
        acts.push((0, Act::Attach(node)));
        let unstage_at = 500 + self.below(800);
        acts.push((unstage_at, Act::Unstage(node)));
        acts.push((unstage_at, Act::DelayAt(node, Kind::WriteEntry, 4_000 + self.below(4_000))));
        let stage_at = 3_500 + self.below(1_000);
        acts.push((stage_at, Act::FreezeAt(node, Kind::Claim, 15_000)));
        acts.push((stage_at, Act::Stage(node)));
    }

    /// Has another machine get the name of a node soon after the node was fenced.
    fn replaced_machine(&mut self, nodes: usize, acts: &mut Vec<(u64, Act)>) {
        let node = self.index(nodes);
        let stop_at = self.below(FAULTS_END_MS / 2);
        acts.push((stop_at, Act::Freeze(node, FAULTS_END_MS)));
        acts.push((stop_at + self.below(1_000), Act::Taint(node, true)));
        acts.push((stop_at + self.below(2_000), Act::Withdraw(node)));
        let replaced_at = stop_at + 2_000 + self.below(10_000);
        acts.push((replaced_at, Act::ReplaceMachine(node)));
        acts.push((replaced_at + self.below(2_000), Act::Taint(node, false)));
    }

    fn act(&mut self, nodes: usize, restores: bool) -> Act {
        let node = self.index(nodes);
        let controller = self.index(2);
        let while_ms = self.pick(&[200, 2_000, 6_000, 15_000]);
        let is_on = self.one_in(2);
        match self.below(if restores { 46 } else { 40 }) {
            0..=5 => Act::Attach(node),
            6..=8 => Act::Detach(node),
            9 | 10 => Act::Withdraw(node),
            11 | 12 => Act::Stage(node),
            13 | 14 => Act::Unstage(node),
            15..=17 => Act::Freeze(node, while_ms),
            18 | 19 => Act::CutFromApi(node, while_ms),
            20 | 21 => Act::CutFromStorage(node, while_ms),
            22 => Act::RestartAgent(node),
            23 if is_on => Act::Reboot(node),
            23 => Act::Reinstall(node),
            24 | 25 => Act::CrashWorker(node, is_on),
            26 => Act::Taint(node, is_on),
            27 => Act::Delete(node, is_on),
            28 => Act::ApiDown(while_ms.min(6_000)),
            29 => Act::StorageDown(while_ms.min(6_000)),
            30 => Act::DropWatches,
            31 | 32 => Act::PauseController(controller, while_ms),
            33 => Act::RestartController(controller),
            34 | 35 => Act::FreezeAt(node, Kind::Claim, while_ms),
            36 | 37 => {
                let kind = self.pick(&[Kind::WriteEntry, Kind::Release]);
                Act::FreezeAt(node, kind, while_ms)
            }
            38 | 39 => {
                let kind = self.pick(&[Kind::Cut, Kind::Seal, Kind::WriteSpec]);
                Act::PauseAt(controller, kind, while_ms)
            }
            40..=42 => Act::Backup,
            _ => Act::Restore,
        }
    }
}
