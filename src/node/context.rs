//! The state that all operations and actions of the supervisor share.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Semaphore, broadcast, mpsc, watch};
use tokio::time::{Instant, sleep_until};

use crate::force_disconnected::ForceDisconnected;
use crate::kernel_calls::KernelCalls;
use crate::mapping::{Change, Register};
use crate::planner::Options;
use crate::record_directory::Problem;
use crate::record_store::Records;
use crate::unmanaged::Unmanaged;
use crate::workers::Workers;
use cleat_backend::Registry;
use cleat_core::clock::Clock;
use cleat_core::error::Error;
use cleat_core::random::Random;

/// The settings of a daemon, which do not change while it runs.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// The options of a mapping that a request does not set.
    pub defaults: Options,
    /// How devices are quiesced for snapshots.
    pub quiesce: QuiesceSettings,
    /// The maximum number of mappings.
    pub mappings: usize,
    /// The node's name.
    pub node: String,
    /// Distinguishes the machine from another one of the same node name.
    pub machine: String,
    /// The boot id of the running kernel.
    pub boot_id: String,
}

/// How devices are quiesced for snapshots.
#[derive(Debug, Clone)]
pub(crate) struct QuiesceSettings {
    /// The program that quiesces a device; `None`: the supervisor freezes its file systems.
    pub hook: Option<PathBuf>,
    /// The maximum duration of a quiesce, its beginning included.
    pub limit: Duration,
}

/// Decides for a named point whether a test stops the supervisor there, as a crash would.
pub type Halt = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// The state that operations and actions share; one per daemon.
pub(crate) struct Context {
    /// The backends, which state how long a volume may take to open.
    pub(crate) registry: Registry,
    /// The durable records.
    pub(crate) records: Records,
    /// Calls to the kernel.
    pub(crate) kernel: KernelCalls,
    /// The same kernel with separate threads, for queries about devices and for forced unmaps while other
    /// calls are stuck.
    pub(crate) urgent: KernelCalls,
    /// Devices that were disconnected by force and still have holders.
    pub(crate) force_disconnected: ForceDisconnected,
    /// Starts and finds workers.
    pub(crate) workers: Workers,
    /// Limits how many workers start at the same time.
    pub(crate) starts: Semaphore,
    /// Limits how many workers unlock an encrypted volume at the same time.
    pub(crate) unlocks: Semaphore,
    /// Limits how many threads open credential files at the same time.
    pub(crate) credential_opens: Arc<Semaphore>,
    /// The same for the checks whether they have changed.
    pub(crate) credential_checks: Arc<Semaphore>,
    /// All mappings.
    pub(crate) register: Register,
    /// The settings of the daemon.
    pub(crate) settings: Settings,
    /// The clock of recorded and shown times. Deadlines and durations use tokio's time, which a simulation
    /// pauses.
    pub(crate) clock: Arc<dyn Clock>,
    /// The source of mapping ids and of the jitter of retries.
    pub(crate) random: Random,
    /// The queue of names of mappings to reconcile.
    pub(crate) work_queue: mpsc::Sender<String>,
    /// Publishes every change of a mapping's view.
    pub(crate) changes: broadcast::Sender<Change>,
    /// Stops the supervisor at a named point. For tests.
    pub(crate) halt: Option<Halt>,
    /// The executable that is to replace this daemon; `None`: none.
    pub(crate) restart: watch::Sender<Option<PathBuf>>,
    /// Problems that were found when the daemon started.
    pub(crate) findings: Mutex<Vec<String>>,
    /// What is wrong with services beside the control API, by service.
    pub(crate) service_problems: Mutex<BTreeMap<&'static str, Problem>>,
    /// The records that this build cannot use and leaves in place.
    pub(crate) unmanaged: Unmanaged,
}

impl Context {
    /// Marks a named point, at which a test can stop the supervisor, as a crash would.
    pub(crate) async fn point(&self, name: &str) {
        if self.halt.as_ref().is_some_and(|halt| halt(name)) {
            std::future::pending::<()>().await;
        }
    }

    /// Returns the problems that were found when the daemon started.
    pub(crate) fn findings(&self) -> Vec<String> {
        self.findings.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Logs a problem and keeps it for the health check.
    pub(crate) fn found(&self, finding: String) {
        const MAX_FINDINGS: usize = 64;
        tracing::warn!("{finding}");
        let mut findings = self.findings.lock().unwrap_or_else(PoisonError::into_inner);
        if findings.len() < MAX_FINDINGS {
            findings.push(finding);
        }
    }

    /// Sets what is wrong with a service beside the control API; `None` if nothing is.
    pub(crate) fn report_service(&self, service: &'static str, problem: Option<Error>) {
        let mut problems = self.service_problems.lock().unwrap_or_else(PoisonError::into_inner);
        match problem {
            Some(error) => {
                let repair = error.repair().unwrap_or("see the log of the daemon").to_owned();
                problems.insert(service, Problem { message: error.report(), repair });
            }
            None => drop(problems.remove(service)),
        }
    }

    /// Returns what is wrong with services beside the control API.
    pub(crate) fn service_problems(&self) -> Vec<(&'static str, Problem)> {
        let problems = self.service_problems.lock().unwrap_or_else(PoisonError::into_inner);
        problems.iter().map(|(service, problem)| (*service, problem.clone())).collect()
    }

    /// Adds a mapping to the work queue. If the queue is full, the next sweep finds the mapping.
    pub(crate) fn wake(&self, name: &str) {
        let _ = self.work_queue.try_send(name.to_owned());
    }

    /// Adds a mapping to the work queue at the time `at`, and waits while the queue is full. Returns at
    /// once.
    pub(crate) fn wake_at(&self, name: &str, at: Instant) {
        let (name, work_queue) = (name.to_owned(), self.work_queue.clone());
        tokio::spawn(async move {
            sleep_until(at).await;
            // An error means that the daemon is shutting down.
            let _ = work_queue.send(name).await;
        });
    }
}
