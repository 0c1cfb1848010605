//! Snapshots of a volume as its simulated worker sees them: one waits for the device to be quiet, is
//! made, and is over.

use std::time::{Duration, Instant};

use cleat_worker::protocol::FromWorker;

/// As librbd: then it is given up.
const PATIENCE: Duration = Duration::from_secs(50);

/// One at a time.
#[derive(Debug, Default)]
pub(crate) struct Snapshots {
    number: u64,
    phase: Phase,
    told: Option<u64>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    None,
    /// For the device to be quiet, until then; once it is, making it takes so long.
    Waits(Instant, Duration),
    /// Until then.
    Made(Instant),
}

impl Snapshots {
    /// Somebody makes one, unless another is being made.
    pub(crate) fn begin(&mut self, now: Instant, time: Duration) {
        if self.phase == Phase::None {
            self.number += 1;
            self.phase = Phase::Waits(now + PATIENCE, time);
        }
    }

    pub(crate) fn is_wanted(&self) -> bool {
        self.phase != Phase::None
    }

    pub(crate) fn next_due(&self) -> Option<Instant> {
        match self.phase {
            Phase::None => None,
            Phase::Waits(until, _) | Phase::Made(until) => Some(until),
        }
    }

    /// What there is to tell. Where it is not `wanted`, or nobody is there, it is not waited for.
    pub(crate) fn look(
        &mut self,
        now: Instant,
        wanted: bool,
        supervised: bool,
    ) -> Option<FromWorker> {
        let waits = matches!(self.phase, Phase::Waits(..));
        if self.next_due().is_some_and(|due| due <= now) || !wanted || waits && !supervised {
            self.phase = Phase::None;
        }
        let waiting = Some(self.number).filter(|_| self.is_wanted());
        if self.told == waiting {
            return None;
        }
        self.told = waiting;
        Some(FromWorker::SnapshotPending { snapshot: waiting })
    }

    pub(crate) fn start_over(&self) -> Option<FromWorker> {
        let waits = matches!(self.phase, Phase::Waits(..)) && self.told.is_some();
        waits.then_some(FromWorker::SnapshotPending { snapshot: self.told })
    }

    /// Whether it waited for that.
    pub(crate) fn answer(&mut self, number: u64, errno: i32, now: Instant) -> bool {
        let Phase::Waits(_, time) = self.phase else { return false };
        if number != self.number {
            return false;
        }
        self.phase = if errno == 0 { Phase::Made(now + time) } else { Phase::None };
        true
    }
}
