//! Starts, adopts, commands and stops workers.
//!
//! A worker owns its sockets and outlives the supervisor: dropping a [`Worker`] does not end it. A later
//! supervisor finds it through its control socket, so the service manager's descriptor store is not
//! needed.

mod cache_files;
mod link;
mod log_pipe;
mod process;
mod reader;
mod refusing;
mod socket_owner;
mod sockets;
mod start;
mod tail_files;
mod users;
mod worker;

use std::sync::Arc;

use tokio::sync::mpsc;

use crate::blocking::blocking;
use crate::config::Config;
use crate::planner::WorkerId;
use cache_files::CacheFiles;
use cleat_backend::Registry;
use cleat_core::error::Result;
use socket_owner::listener_of;
use tail_files::TailFiles;

pub use log_pipe::{LogPipe, stderr_is_pipe};
pub use process::{Handle, Launcher, Process, Processes};
pub use reader::WorkerEvent;
pub use refusing::RefusingWorker;
pub(crate) use sockets::{ControlSockets, Probe, stops_listening};
pub(crate) use start::Launched;
pub use users::UserRange;
pub use worker::Worker;
pub(crate) use worker::{exit_of, has_ended, stop_process, unexpected};

/// Starts and adopts workers.
pub struct Workers {
    launcher: Arc<dyn Launcher>,
    pub(crate) sockets: ControlSockets,
    tails: TailFiles,
    caches: Arc<CacheFiles>,
    registry: Registry,
    log: String,
    events: mpsc::Sender<WorkerEvent>,
}

impl Workers {
    /// Creates the starter of workers with volumes of `registry`.
    pub fn new(
        launcher: Arc<dyn Launcher>,
        registry: Registry,
        config: &Config,
        events: mpsc::Sender<WorkerEvent>,
    ) -> Self {
        let (directory, log) = (config.workers_dir(), config.log().decided().to_string());
        let tails = TailFiles::new(directory.clone());
        let (sockets, caches) =
            (ControlSockets::new(directory), Arc::new(CacheFiles::new(&config.cache)));
        Self { launcher, sockets, tails, caches, registry, log, events }
    }

    /// Removes the control sockets, the tail file and the cache of a mapping that does not exist any more.
    pub(crate) fn remove_files(&self, mapping_id: &str) {
        self.tails.remove(mapping_id);
        // A later supervisor finds what is left by the sockets.
        if self.caches.remove(mapping_id) {
            self.sockets.remove(mapping_id);
        }
    }

    /// Returns the identity of the executable that new workers run, see
    /// `cleat_worker_protocol::version::binary_id`. Empty: unknown.
    pub fn binary(&self) -> String {
        self.launcher.binary()
    }

    /// Returns the process `id`, or `None` if it has provably ended.
    ///
    /// # Errors
    /// Returns an error if the state of the process cannot be determined.
    pub fn find(&self, id: WorkerId) -> Result<Option<Process>> {
        self.launcher.find(id)
    }

    /// Returns the process that listens on a control socket of a mapping without a record. Searches the open
    /// files of all processes.
    ///
    /// # Errors
    /// Returns an error if /proc cannot be read.
    pub async fn listener(&self, mapping_id: &str) -> Result<Option<Process>> {
        let (paths, launcher) = (self.sockets.of_mapping(mapping_id), Arc::clone(&self.launcher));
        let search = move || {
            for path in paths {
                let Some(pid) = listener_of(&path)? else { continue };
                let process = launcher.of_number(pid)?;
                // It still listens, so its number was not reused before the descriptor was opened.
                if process.is_some() && listener_of(&path)? == Some(pid) {
                    return Ok(process);
                }
            }
            Ok(None)
        };
        blocking(search).await
    }
}
