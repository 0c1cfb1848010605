//! What every operation and action of the supervisor works with.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Semaphore, broadcast, mpsc, watch};
use tokio::time::{Instant, sleep_until};

use crate::force_disconnected::ForceDisconnected;
use crate::journal::Journal;
use crate::kernel_calls::KernelCalls;
use crate::mapping::{Change, Register};
use crate::planner::Options;
use crate::workers::Workers;
use cleat_backend::Registry;
use cleat_core::clock::Clock;
use cleat_core::random::Random;

/// What stays the same while the daemon runs.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// For what a request leaves open.
    pub defaults: Options,
    /// How devices are made quiet for snapshots.
    pub quiesce: QuiesceSettings,
    /// The most mappings.
    pub mappings: usize,
    /// The node's name.
    pub node: String,
    /// What tells it from another one of the name.
    pub machine: String,
    /// Of the kernel now running.
    pub boot_id: String,
}

/// How devices are made quiet.
#[derive(Debug, Clone)]
pub(crate) struct QuiesceSettings {
    /// In place of freezing file systems.
    pub hook: Option<PathBuf>,
    /// The longest that it may last, the beginning included.
    pub limit: Duration,
}

/// Where a test stops the executor, as a crash would: the named point, and whether to stop there.
pub type Halt = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// The parts of the supervisor that operations and actions share; one per daemon.
pub(crate) struct Context {
    /// The backends, which know how long a volume may take to open.
    pub(crate) registry: Registry,
    /// The durable records.
    pub(crate) journal: Arc<Journal>,
    /// Calls to the kernel.
    pub(crate) kernel: KernelCalls,
    /// The same kernel with threads of its own: for looking at devices, and for what is done by
    /// force while other calls are stuck.
    pub(crate) urgent: KernelCalls,
    /// Devices that were disconnected by force and still have holders.
    pub(crate) force_disconnected: ForceDisconnected,
    /// Starts and finds workers.
    pub(crate) workers: Workers,
    /// Limits the workers that start at one time.
    pub(crate) starts: Semaphore,
    /// Limits the workers that unlock an encrypted volume at one time.
    pub(crate) unlocks: Semaphore,
    /// Every mapping.
    pub(crate) register: Register,
    /// What stays the same while the daemon runs.
    pub(crate) settings: Settings,
    /// The wall clock. Deadlines and durations use tokio's time, which a simulation pauses.
    pub(crate) clock: Arc<dyn Clock>,
    /// Mapping ids and the spread of retries.
    pub(crate) random: Random,
    /// Names of mappings to reconcile.
    pub(crate) work_queue: mpsc::Sender<String>,
    /// Every change of a mapping's view.
    pub(crate) changes: broadcast::Sender<Change>,
    /// Where a test stops the supervisor.
    pub(crate) halt: Option<Halt>,
    /// The executable that the daemon is to continue as.
    pub(crate) restart: watch::Sender<Option<PathBuf>>,
    /// What an operator should know of how the daemon began.
    pub(crate) findings: Mutex<Vec<String>>,
}

impl Context {
    /// A point at which tests make the supervisor stop, as a crash would.
    pub(crate) async fn point(&self, name: &str) {
        if self.halt.as_ref().is_some_and(|halt| halt(name)) {
            std::future::pending::<()>().await;
        }
    }

    /// What an operator should know of how the daemon began.
    pub(crate) fn findings(&self) -> Vec<String> {
        self.findings.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Logs a finding and keeps it for `cleat status`.
    pub(crate) fn found(&self, finding: String) {
        const KEPT: usize = 64;
        tracing::warn!("{finding}");
        let mut findings = self.findings.lock().unwrap_or_else(PoisonError::into_inner);
        if findings.len() < KEPT {
            findings.push(finding);
        }
    }

    /// Puts a mapping on the work queue. A full queue loses it: the next sweep finds the mapping.
    pub(crate) fn wake(&self, name: &str) {
        let _ = self.work_queue.try_send(name.to_owned());
    }

    /// Puts a mapping on the work queue at a time, and waits for a place in it.
    pub(crate) fn wake_at(&self, name: &str, at: Instant) {
        let (name, work_queue) = (name.to_owned(), self.work_queue.clone());
        tokio::spawn(async move {
            sleep_until(at).await;
            // An error means that the daemon has ended.
            let _ = work_queue.send(name).await;
        });
    }
}
