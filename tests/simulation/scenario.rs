//! The scenario of a seed: lives of supervisors, the actions of users and the failures in each, and the
//! end.

use std::time::Duration;

use cleat_core::error::ErrorKind;
use cleat_core::policy::{self, OnOutage};
use cleat_core::random::Random;
use cleat_kernel::sim::{Call, Fault};
use cleat_node::executor::NewSize;

use crate::quirks::{Open, Quirks};
use crate::world::StateDisk;

/// The scenario of one seed.
#[derive(Debug)]
pub(crate) struct Scenario {
    pub(crate) volumes: Vec<VolumePlan>,
    /// How many of 1000 kernel calls fail, until the failures end.
    pub(crate) faults_per_mille: u32,
    pub(crate) lives: Vec<Life>,
    /// The failure that lasts to the end.
    pub(crate) lasting: Option<Lasting>,
    /// Whether a new supervisor follows the last one, or the last one lives to the end.
    pub(crate) fresh: bool,
    /// Whether all mappings are unmapped by force at the end, with the lasting failure still active.
    pub(crate) by_force: bool,
}

/// A volume and how it is mapped.
#[derive(Debug)]
pub(crate) struct VolumePlan {
    pub(crate) name: &'static str,
    pub(crate) uri: String,
    pub(crate) connections: u32,
    pub(crate) read_only: bool,
    /// Whether the device is quiesced for snapshots.
    pub(crate) quiesce: bool,
}

/// The time from the start of a supervisor to the start of the next one.
#[derive(Debug)]
pub(crate) struct Life {
    /// The steps, each after a pause.
    pub(crate) steps: Vec<(Duration, Op)>,
    pub(crate) end: End,
    /// What happens while there is no supervisor.
    pub(crate) between: Vec<Op>,
    /// Whether the supervisor cannot see its workers' processes.
    pub(crate) blind: bool,
    /// What happens when the executor first passes a point of a handover, and the duration of a stop.
    pub(crate) handover_fault: Option<(&'static str, HandoverFault, Option<Duration>)>,
    pub(crate) slow: Option<Slow>,
}

/// Delays the start of the nth call of its kind, until its caller has given up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slow {
    pub(crate) what: &'static str,
    pub(crate) nth: u64,
    pub(crate) time: Duration,
}

/// The kinds of calls that are sometimes slow: kernel calls by their purpose, and all other calls.
const SLOW: [&str; 8] = [
    "connect a device",
    "connect a device",
    "give the device new connections",
    "resize the device",
    "disconnect the device",
    "flush the device",
    "list nbd devices",
    "a call that blocks",
];

/// The failure that occurs during a handover.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HandoverFault {
    /// The supervisor crashes.
    Crash,
    KillOld,
    KillNew,
    KillBoth,
    StopOld,
    StopNew,
    StopBoth,
}

/// The points of a handover and of its end.
const POINTS: [&str; 10] = [
    "successor launched",
    "successor recorded",
    "successor ready",
    "before the pause",
    "handover offered",
    "taken over",
    "handed over or failed",
    "before StopPredecessor",
    "before StopWorker",
    "before RestorePredecessor",
];

impl Life {
    /// A life without steps.
    pub(crate) fn quiet() -> Self {
        let (steps, between) = (Vec::new(), Vec::new());
        Self { steps, end: End::Crash, between, blind: false, handover_fault: None, slow: None }
    }
}

/// How a life ends. It ends with the last step at the latest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Crash,
    /// The supervisor crashes at the nth point that the executor passes.
    AtPoint(u64),
    /// The supervisor crashes at the nth call that may block: before it, or after its effect.
    AtCall(u64, bool),
    Shutdown,
}

/// A failure that lasts to the end. Volumes are given by their index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lasting {
    Stopped(usize),
    Gone(usize),
    Held(usize),
}

/// An event. Volumes are given by their index.
#[derive(Debug, Clone)]
pub(crate) enum Op {
    Map(usize, u64),
    Unmap(usize, By),
    Resize(usize, NewSize),
    SetPolicy(usize, policy::Change),
    Force(usize),
    /// An upgrade to a newer build, or by force to the same one.
    Upgrade(usize, bool),
    Write(usize, u64),
    Read(usize, u64),
    Kill(usize),
    Stop(usize),
    Continue(usize),
    CutChannel(usize),
    Fence(usize),
    Latency(usize, Duration),
    Next(Quirks),
    Inject(Call, Fault),
    Vanish(usize),
    /// The device vanishes, and a foreign device takes its number.
    Usurp(usize),
    KillLinks(usize),
    /// A file system is mounted from its device.
    Mount(usize),
    /// A snapshot of the volume, which takes this long once the device is quiesced.
    Snapshot(usize, Duration),
    LoseEvents(bool),
    Hold(usize),
    Release(usize),
    Module(bool),
    Foreign(u32),
    Gone(usize, bool),
    Hung(usize, bool),
    Size(usize, u64),
    /// The worker is killed, and another volume takes the place of its volume before the next worker starts.
    Replace(usize),
    JournalFull(usize),
    /// The state of the disk with the state directory, and whether the runtime directory is full.
    StateDisk(StateDisk, bool),
    /// This and the following events happen only between lives.
    Corrupt(usize),
    Forget(usize),
    Reboot,
    Pass(Duration),
}

/// How a user names a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    Name,
    Uri,
    Device,
}

/// Returns the scenario of a seed.
pub(crate) fn of(seed: u64) -> Scenario {
    let mut scenario = Dice::new(seed).scenario();
    // These use separate dice, so that the scenarios of existing seeds do not change.
    Dice::new(!seed).enrich(&mut scenario);
    Dice::new(!seed ^ 0x517e).snap(&mut scenario);
    Dice::new(!seed ^ 0x1de7).replace(&mut scenario);
    Dice::new(!seed ^ 0xd15c).fail_state_disk(&mut scenario);
    scenario
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

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        let at = self.below(from.len() as u64);
        from[usize::try_from(at).unwrap_or(0)].clone()
    }

    fn millis(&mut self, of: &[u64]) -> Duration {
        Duration::from_millis(self.pick(of))
    }

    fn scenario(&mut self) -> Scenario {
        let count = self.pick(&[1, 1, 1, 2, 2, 3]);
        let volumes: Vec<VolumePlan> = (0..count).map(|at| self.volume(at)).collect();
        let faults_per_mille = self.pick(&[0, 0, 10, 50, 150]);
        let lives = self.pick(&[1, 2, 2, 3, 4]);
        let lives = (0..lives).map(|nth| self.life(count, nth == 0)).collect();
        let at = usize::try_from(self.below(count as u64)).unwrap_or(0);
        let lasting = [Lasting::Stopped(at), Lasting::Gone(at), Lasting::Held(at)];
        let lasting = self.one_in(4).then(|| self.pick(&lasting));
        let (fresh, by_force) = (!self.one_in(3), self.one_in(3));
        Scenario { volumes, faults_per_mille, lives, lasting, fresh, by_force }
    }

    fn volume(&mut self, at: usize) -> VolumePlan {
        let name = ["a", "b", "c"][at];
        let uri = match self.below(8) {
            0 | 1 => "mem:64K".to_owned(),
            // Sometimes two mappings use the same volume.
            2 => "file:/a".to_owned(),
            _ => format!("file:/{name}"),
        };
        let read_only = self.one_in(12);
        VolumePlan {
            name,
            uri,
            connections: self.pick(&[1, 1, 1, 2, 3]),
            read_only,
            quiesce: false,
        }
    }

    fn life(&mut self, volumes: usize, first: bool) -> Life {
        let count = 2 + self.below(9);
        let mut steps: Vec<(Duration, Op)> = (0..count)
            .map(|_| {
                let pause = self.millis(&[0, 0, 0, 1, 10, 100, 1000, 4000, 12_000]);
                (pause, self.op(volumes))
            })
            .collect();
        if first {
            // Map all volumes first, because most events need a mapping.
            steps.splice(0..0, (0..volumes).map(|at| (Duration::ZERO, Op::Map(at, 30))));
        }
        let end = match self.below(8) {
            0 => End::Shutdown,
            1 | 2 => End::AtPoint(self.below(60)),
            3..=5 => End::AtCall(self.below(80), self.one_in(2)),
            _ => End::Crash,
        };
        let between = (0..self.below(4)).map(|_| self.between(volumes)).collect();
        let blind = self.one_in(16);
        let handover_fault = self.one_in(3).then(|| self.handover_fault());
        if handover_fault.is_some() {
            // After the first steps, so that there is a device to hand over.
            let at = self.below(steps.len() as u64 + 1).max(volumes as u64);
            let upgrade = self.upgrade(volumes);
            let at = usize::try_from(at).unwrap_or(0).min(steps.len());
            steps.insert(at, (self.millis(&[200, 4000, 4000]), upgrade));
        }
        Life { steps, end, between, blind, handover_fault, slow: None }
    }

    fn enrich(&mut self, scenario: &mut Scenario) {
        for life in &mut scenario.lives {
            let time = self.millis(&[2000, 12_000, 30_000]);
            let slow = Slow { what: self.pick(&SLOW), nth: self.below(3), time };
            life.slow = self.one_in(2).then_some(slow);
            let ops = life.steps.iter_mut().map(|(_, op)| op).chain(&mut life.between);
            for op in ops {
                let Op::Next(quirks) = op else { continue };
                if quirks.never_ends || self.one_in(6) {
                    quirks.linger = self.millis(&[0, 20, 900, 4000]);
                    quirks.never_ends = true;
                }
            }
        }
    }

    /// Adds snapshots of some volumes, with file systems on their devices.
    fn snap(&mut self, scenario: &mut Scenario) {
        let count = scenario.volumes.len();
        for (at, volume) in scenario.volumes.iter_mut().enumerate() {
            volume.quiesce = !volume.read_only && self.one_in(3);
            if !volume.quiesce {
                continue;
            }
            for life in &mut scenario.lives {
                let pause = self.millis(&[0, 100, 4000]);
                life.steps.insert(count.min(life.steps.len()), (pause, Op::Mount(at)));
                for _ in 0..1 + self.below(3) {
                    let step = (self.millis(&[0, 10, 1000]), self.snapshot(at));
                    let place = count as u64 + 1 + self.below(life.steps.len() as u64);
                    let place = usize::try_from(place).unwrap_or(0).min(life.steps.len());
                    life.steps.insert(place, step);
                }
                if self.one_in(4) {
                    let what = self.pick(&["freeze the file systems", "thaw the file systems"]);
                    let time = self.millis(&[100, 6000, 40_000]);
                    life.slow = Some(Slow { what, nth: self.below(2), time });
                }
            }
        }
    }

    /// Replaces a volume in every sixth life, while its worker is dead.
    fn replace(&mut self, scenario: &mut Scenario) {
        let count = scenario.volumes.len();
        for life in &mut scenario.lives {
            if !self.one_in(6) {
                continue;
            }
            let at = usize::try_from(self.below(count as u64)).unwrap_or(0);
            if self.one_in(3) {
                life.between.push(Op::Replace(at));
                continue;
            }
            let places = life.steps.len().saturating_sub(count) as u64 + 1;
            let place = count + usize::try_from(self.below(places)).unwrap_or(0);
            let place = place.min(life.steps.len());
            let pause = self.millis(&[100, 1000, 4000]);
            life.steps.insert(place, (pause, Op::Replace(at)));
            if self.one_in(3) {
                let quirks = Quirks { ignores_identity: true, ..Quirks::default() };
                life.steps.insert(place, (Duration::ZERO, Op::Next(quirks)));
            }
        }
    }

    /// Makes the disk with the state directory fail in every fourth life, sometimes over the end of the life, and
    /// kills a worker meanwhile.
    fn fail_state_disk(&mut self, scenario: &mut Scenario) {
        let count = scenario.volumes.len();
        for life in &mut scenario.lives {
            if !self.one_in(4) {
                continue;
            }
            let disk = self.pick(&[StateDisk::Full, StateDisk::ReadOnly, StateDisk::Hung]);
            let runtime_full = self.one_in(4);
            let places = (life.steps.len() + 1) as u64;
            let place = usize::try_from(self.below(places)).unwrap_or(0);
            let at = usize::try_from(self.below(count as u64)).unwrap_or(0);
            let lasts = self.millis(&[100, 5000, 30_000, 120_000]);
            let mut steps = vec![(Duration::ZERO, Op::StateDisk(disk, runtime_full))];
            if self.one_in(2) {
                steps.push((self.millis(&[0, 1000]), Op::Kill(at)));
            }
            if !self.one_in(4) {
                let last = place + usize::try_from(self.below(4)).unwrap_or(0);
                let last = last.min(life.steps.len());
                let works = Op::StateDisk(StateDisk::Works, false);
                life.steps.insert(last, (lasts, works));
            }
            life.steps.splice(place..place, steps);
        }
    }

    fn snapshot(&mut self, at: usize) -> Op {
        let faults = [Fault::Fail(ErrorKind::Internal), Fault::Hang, Fault::LateEffect];
        match self.below(6) {
            0 => Op::Inject(self.pick(&[Call::Freeze, Call::Thaw]), self.pick(&faults)),
            1 => Op::Mount(at),
            // The last one exceeds every wait: the quiesce deadline has to end it.
            _ => Op::Snapshot(at, self.millis(&[1, 300, 5000, 600_000])),
        }
    }

    fn upgrade(&mut self, volumes: usize) -> Op {
        let at = usize::try_from(self.below(volumes as u64)).unwrap_or(0);
        Op::Upgrade(at, !self.one_in(4))
    }

    fn handover_fault(&mut self) -> (&'static str, HandoverFault, Option<Duration>) {
        use HandoverFault::{Crash, KillBoth, KillNew, KillOld, StopBoth, StopNew, StopOld};
        let blows =
            [Crash, Crash, Crash, KillOld, KillNew, KillBoth, StopOld, StopOld, StopNew, StopBoth];
        let (point, fault) = (self.pick(&POINTS), self.pick(&blows));
        let stops = matches!(fault, StopOld | StopNew | StopBoth) && !self.one_in(3);
        (point, fault, stops.then(|| self.millis(&[300, 900, 1500, 5000])))
    }

    fn op(&mut self, volumes: usize) -> Op {
        let at = usize::try_from(self.below(volumes as u64)).unwrap_or(0);
        let sector = self.below(crate::disks::SECTORS);
        match self.below(63) {
            0..=7 => Op::Map(at, self.pick(&[1, 5, 30, 60])),
            8 => Op::Force(at),
            9..=12 => Op::Unmap(at, self.pick(&[By::Name, By::Name, By::Uri, By::Device])),
            13 | 14 => {
                let bytes = self.pick(&[0, 1 << 15, 1 << 16, 1 << 17, (1 << 17) + 512, 100]);
                Op::Resize(at, NewSize { bytes, shrink: self.one_in(4) })
            }
            15..=23 => Op::Write(at, sector),
            24..=26 => Op::Read(at, sector),
            27..=31 => Op::Kill(at),
            32 | 33 => Op::Stop(at),
            34 | 35 => Op::Continue(at),
            36 => Op::CutChannel(at),
            37 => self.rarely(Op::Fence(at)),
            38 => Op::Latency(at, self.millis(&[0, 5, 300, 5000])),
            39..=43 => Op::Next(self.quirks()),
            44..=46 => self.inject(),
            47 if self.one_in(2) => Op::Usurp(at),
            47 => Op::Vanish(at),
            48 | 49 => Op::KillLinks(at),
            50 => Op::LoseEvents(self.one_in(2)),
            51 if self.one_in(2) => Op::Force(at),
            51 => Op::Hold(at),
            52 => Op::Release(at),
            53 => Op::Module(!self.one_in(3)),
            54 => Op::Foreign(u32::try_from(self.below(6)).unwrap_or(0)),
            55 if self.one_in(2) => Op::SetPolicy(at, self.policy()),
            55 => Op::Gone(at, self.one_in(2)),
            56 => Op::Hung(at, self.one_in(2)),
            57 => Op::Size(at, self.pick(&[1 << 15, 1 << 16, 1 << 17])),
            58 => Op::JournalFull(at),
            59..=61 => self.upgrade(volumes),
            _ => Op::Pass(Duration::from_secs(20)),
        }
    }

    fn policy(&mut self) -> policy::Change {
        let limited = OnOutage::QueueFor(Duration::from_secs(30));
        let outage = Some(self.pick(&[OnOutage::Queue, limited, OnOutage::Fail]));
        policy::Change { outage, iops: Some(self.below(1000)), ..policy::Change::default() }
    }

    fn rarely(&mut self, op: Op) -> Op {
        if self.one_in(3) { op } else { Op::Pass(Duration::from_secs(1)) }
    }

    fn between(&mut self, volumes: usize) -> Op {
        let at = usize::try_from(self.below(volumes as u64)).unwrap_or(0);
        let sector = self.below(crate::disks::SECTORS);
        match self.below(17) {
            16 => Op::Usurp(at),
            0..=3 => Op::Kill(at),
            4 => Op::Stop(at),
            5 => Op::Vanish(at),
            6 => Op::Corrupt(at),
            7 => Op::Forget(at),
            8 => self.rarely(Op::Reboot),
            9 | 10 => Op::Write(at, sector),
            11 => Op::Next(self.quirks()),
            12 => Op::KillLinks(at),
            13 => Op::Hold(at),
            _ => Op::Pass(self.millis(&[1, 1000, 30_000])),
        }
    }

    fn quirks(&mut self) -> Quirks {
        use ErrorKind::{InUse, InvalidArgument, NotFound, Unavailable};
        let nth = u32::try_from(self.below(6)).unwrap_or(0);
        let none = Quirks::default();
        match self.below(14) {
            12 => Quirks { declines: true, ..none },
            0 => Quirks { not_launched: true, ..none },
            1 => Quirks { dies_at_start: true, ..none },
            2 => {
                let kinds = [NotFound, Unavailable, InUse, InvalidArgument];
                Quirks { open: Open::Fails(self.pick(&kinds)), ..none }
            }
            3 => Quirks { open: Open::Takes(self.millis(&[100, 3000, 25_000])), ..none },
            4 => Quirks { open: Open::Hangs, ..none },
            5 | 6 => Quirks { dies_at_answer: Some((nth, self.one_in(2))), ..none },
            7 => Quirks { mute_at_answer: Some(nth), ..none },
            8 => Quirks { nonsense_at_answer: Some(nth), ..none },
            9 => Quirks { hangs_up_at_answer: Some(nth), ..none },
            10 => Quirks { size_lie: self.pick(&[-4096, -512, 100, 512, 8192]), ..none },
            11 => Quirks { never_ends: true, ..none },
            _ => Quirks {
                linger: self.millis(&[20, 900, 4000, 15_000]),
                latency: self.millis(&[0, 500]),
                ..none
            },
        }
    }

    fn inject(&mut self) -> Op {
        use ErrorKind::{Internal, NotFound, TimedOut, Unavailable};
        let call = self.pick(&[
            Call::Connect,
            Call::Connect,
            Call::Reconfigure,
            Call::Reconfigure,
            Call::Resize,
            Call::Disconnect,
            Call::Devices,
            Call::Holders,
            Call::WaitReady,
            Call::Flush,
        ]);
        let mut faults =
            vec![Fault::Fail(self.pick(&[Internal, NotFound, TimedOut, Unavailable])), Fault::Hang];
        match call {
            Call::Connect => faults.extend([Fault::LateEffect, Fault::NoSymlink, Fault::Vanish]),
            Call::Reconfigure => faults.extend([Fault::LateEffect, Fault::DropSockets]),
            Call::Resize | Call::Disconnect => faults.push(Fault::LateEffect),
            _ => {}
        }
        Op::Inject(call, self.pick(&faults))
    }
}
