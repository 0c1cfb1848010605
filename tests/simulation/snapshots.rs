//! Snapshots of a volume, as its simulated worker observes them: a snapshot waits until the device is
//! quiesced, is made, and ends.

use std::time::{Duration, Instant};

use cleat_worker::protocol::FromWorker;

/// The time after which a snapshot without an answer fails, as in librbd.
const PAUSE_TIMEOUT: Duration = Duration::from_secs(50);

/// The snapshots of one volume; at most one is in progress.
#[derive(Debug, Default)]
pub(crate) struct Snapshots {
    number: u64,
    phase: Phase,
    reported: Option<u64>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    None,
    /// Waits until this time for the quiesce; making the snapshot then takes this long.
    Waits(Instant, Duration),
    /// Is being made until this time.
    Made(Instant),
}

impl Snapshots {
    /// A client makes a snapshot, unless one is in progress.
    pub(crate) fn begin(&mut self, now: Instant, time: Duration) {
        if self.phase == Phase::None {
            self.number += 1;
            self.phase = Phase::Waits(now + PAUSE_TIMEOUT, time);
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

    /// Returns a change that the worker has to report. A snapshot does not wait if the quiesce is not `wanted`
    /// or there is no supervisor.
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
        if self.reported == waiting {
            return None;
        }
        self.reported = waiting;
        Some(FromWorker::SnapshotPending { snapshot: waiting })
    }

    pub(crate) fn start_over(&self) -> Option<FromWorker> {
        let waits = matches!(self.phase, Phase::Waits(..)) && self.reported.is_some();
        waits.then_some(FromWorker::SnapshotPending { snapshot: self.reported })
    }

    /// Handles the answer of the supervisor. Returns whether the snapshot waited for it.
    pub(crate) fn answer(&mut self, number: u64, errno: i32, now: Instant) -> bool {
        let Phase::Waits(_, time) = self.phase else { return false };
        if number != self.number {
            return false;
        }
        self.phase = if errno == 0 { Phase::Made(now + time) } else { Phase::None };
        true
    }
}
