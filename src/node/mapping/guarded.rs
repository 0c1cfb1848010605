//! The part of a mapping that only the holder of its guard may read and change.

use tokio::time::Instant;

use super::force_progress::ForceProgress;
use crate::planner::Record;
use crate::worker_failures::WorkerFailures;
use crate::workers::{RefusingWorker, Worker};
use cleat_kernel::DevicePaths;
use cleat_statistics::Page;

/// What the guard of a mapping protects.
pub struct Guarded {
    /// The record that the journal holds, or will hold after the next write.
    pub record: Record,
    /// The worker, if the supervisor has a channel to it.
    pub worker: Option<Worker>,
    /// During a handover, the worker that hands over, if the supervisor has a channel to it.
    pub predecessor: Option<Worker>,
    /// The counters of the mapping's requests. They outlive the worker.
    pub statistics: Option<Page>,
    /// The paths of the device, once udev has made them.
    pub paths: Option<DevicePaths>,
    /// The worker that answers every request with an error because no worker serves the volume.
    pub refusing: Option<RefusingWorker>,
    /// Whether the caller of the current map allows taking the volume from its present owner.
    pub take_over: bool,
    /// Why an upgrade left the worker at its old build.
    pub upgrade_refusal: Option<String>,
    /// A growth of the device that failed: when to try it again, and why it failed.
    pub resize_deferred: Option<(Instant, String)>,
    /// The failures and repairs of the mapping.
    pub health: Health,
    /// The quiescing for snapshots.
    pub quiesce: QuiesceState,
    /// The progress of removing the mapping.
    pub teardown: Teardown,
}

/// The failures and repairs of a mapping. They decide whether and when a repair is tried.
#[derive(Debug, Default)]
pub struct Health {
    /// Repairs in a row that failed or did not last.
    pub failures: u32,
    /// The failures of the mapping's workers.
    pub worker_failures: WorkerFailures,
    /// Since when the mapping has worked without interruption.
    pub working_since: Option<Instant>,
    /// Since when no worker has served the device without interruption.
    pub unserved_since: Option<Instant>,
    /// No repair starts before this time.
    pub retry_at: Option<Instant>,
}

/// What this supervisor has done for snapshots of a mapping's volume.
#[derive(Debug, Default)]
pub struct QuiesceState {
    /// The last snapshot request that was answered.
    pub answered: Option<AnsweredSnapshot>,
    /// The next attempt to unquiesce does not start before this time.
    pub retry_at: Option<Instant>,
    /// What was wrong with the last snapshot.
    pub warning: Option<String>,
}

/// The progress of removing a mapping.
#[derive(Debug, Default)]
pub struct Teardown {
    /// Whether the removal has begun: the journal says so, unless it could not be written.
    pub recorded: bool,
    /// Whether the mapping was removed. A task that waited for the guard looks up the name again.
    pub removed: bool,
    /// Whether no request of its worker can reach the backend any more.
    pub no_writes_proved: bool,
    /// Whether the last worker has closed the volume, which releases the claim.
    pub volume_closed: bool,
    /// The progress of a forced unmap that a caller waits for.
    pub force: Option<ForceProgress>,
}

impl Guarded {
    /// Makes the state of a mapping of which only the record is known.
    pub fn new(record: Record) -> Self {
        Self {
            record,
            worker: None,
            predecessor: None,
            statistics: None,
            paths: None,
            refusing: None,
            take_over: false,
            upgrade_refusal: None,
            resize_deferred: None,
            health: Health::default(),
            quiesce: QuiesceState::default(),
            teardown: Teardown::default(),
        }
    }

    /// Whether a worker without a volume answers the requests of the device.
    pub(crate) fn is_refusing(&self) -> bool {
        self.refusing.as_ref().is_some_and(RefusingWorker::serves)
    }
}

/// A worker's request for a snapshot that was answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AnsweredSnapshot {
    /// The pid of the worker.
    pub pid: u32,
    /// The worker's number for the snapshot.
    pub snapshot: u64,
    /// How long the device may stay quiesced; `None` if it was not quiesced.
    pub until: Option<Instant>,
}
