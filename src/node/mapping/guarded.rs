//! The part of a mapping that only the holder of its guard may read and change.

use tokio::time::Instant;

use super::force_progress::ForceProgress;
use crate::planner::Record;
use crate::worker_failures::WorkerFailures;
use crate::workers::Worker;
use cleat_kernel::DevicePaths;
use cleat_statistics::Page;
use cleat_worker::refuse::Refusing;

/// What the guard protects.
pub struct Guarded {
    /// What the journal holds, or will.
    pub record: Record,
    /// The worker, if we have a channel to it.
    pub worker: Option<Worker>,
    /// The worker that it is to succeed, likewise.
    pub predecessor: Option<Worker>,
    /// Why the worker stays although a newer build is there.
    pub refusal: Option<String>,
    /// Counters; they outlive their worker.
    pub statistics: Option<Page>,
    /// Where the device is, once it has been seen.
    pub paths: Option<DevicePaths>,
    /// Whether the journal says that it is being taken down.
    pub renounced: bool,
    /// Nothing is left of it; who waited for the guard looks for the name again.
    pub withdrawn: bool,
    /// Repairs that failed or did not last, in a row.
    pub failures: u32,
    /// Whoever asked for it has said that its volume is to be taken from whoever has it.
    pub take_over: bool,
    /// What went wrong with its workers.
    pub worker_failures: WorkerFailures,
    /// Since when it has worked without interruption.
    pub sound_since: Option<Instant>,
    /// Since when no worker lived for long, if so.
    pub dead_since: Option<Instant>,
    /// Answers in place of a worker.
    pub refusing: Option<Refusing>,
    /// No repair before.
    pub not_before: Option<Instant>,
    /// Nothing of a worker that was told to fail its I/O is under way at the backend.
    pub silent: bool,
    /// Of a forced unmap that somebody waits for.
    pub progress: Option<ForceProgress>,
    /// A growth of the device that was put off, until when and why.
    pub growth: Option<(Instant, String)>,
    /// The last snapshot that a worker was answered about, by this supervisor.
    pub answered: Option<Answered>,
    /// No thaw before.
    pub thaw_again: Option<Instant>,
    /// What was wrong with the last snapshot.
    pub unquiet: Option<String>,
}

impl Guarded {
    /// Of a record that nothing else is known of.
    pub fn new(record: Record) -> Self {
        Self {
            record,
            worker: None,
            predecessor: None,
            refusal: None,
            statistics: None,
            paths: None,
            renounced: false,
            withdrawn: false,
            failures: 0,
            take_over: false,
            worker_failures: WorkerFailures::default(),
            sound_since: None,
            dead_since: None,
            refusing: None,
            not_before: None,
            silent: false,
            progress: None,
            growth: None,
            answered: None,
            thaw_again: None,
            unquiet: None,
        }
    }
}

/// The last snapshot that a worker was answered about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answered {
    /// The worker.
    pub pid: u32,
    /// Its number for it.
    pub snapshot: u64,
    /// How long the device may stay quiet, where it is.
    pub until: Option<Instant>,
}
