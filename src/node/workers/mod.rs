//! Workers: started, adopted, spoken to, stopped. The processes behind them are `process`'s.
//!
//! A worker owns its sockets and outlives the supervisor: dropping a [`Worker`] never ends it. A
//! later supervisor finds it through its control socket, so nothing has to be kept in the service
//! manager's descriptor store.

mod link;
mod process;
mod reader;
mod socket_owner;
mod sockets;
mod start;
mod worker;

use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::mpsc;

use crate::blocking::blocking;
use crate::planner::WorkerId;
use cleat_core::error::Result;
use socket_owner::listener_of;

pub use process::{Handle, Launcher, Process, Processes};
pub use reader::WorkerEvent;
pub(crate) use sockets::{ControlSockets, Probe, stops_listening};
pub(crate) use start::Launched;
pub use worker::Worker;
pub(crate) use worker::{has_ended, stop_process, unexpected};

/// Starts and adopts workers.
pub struct Workers {
    launcher: Arc<dyn Launcher>,
    pub(crate) sockets: ControlSockets,
    log: String,
    events: mpsc::Sender<WorkerEvent>,
}

impl Workers {
    /// Workers whose control sockets are in `directory`. `log` is passed on to them.
    pub fn new(
        launcher: Arc<dyn Launcher>,
        directory: PathBuf,
        log: String,
        events: mpsc::Sender<WorkerEvent>,
    ) -> Self {
        Self { launcher, sockets: ControlSockets::new(directory), log, events }
    }

    /// Of the executable that new workers run, see `worker::version::binary_id`. Empty: not known.
    pub fn binary(&self) -> String {
        self.launcher.binary()
    }

    /// The process that was started under `id`; `None` when its end is proved.
    ///
    /// # Errors
    /// When it cannot be told.
    pub fn find(&self, id: WorkerId) -> Result<Option<Process>> {
        self.launcher.find(id)
    }

    /// The process that listens on a control socket of a mapping that nothing else is known of.
    ///
    /// # Errors
    /// When /proc cannot be read.
    pub async fn listener(&self, mapping_id: &str) -> Result<Option<Process>> {
        let (paths, launcher) = (self.sockets.of_mapping(mapping_id), Arc::clone(&self.launcher));
        // Looks at what every process has open.
        let look = move || {
            for path in paths {
                let Some(pid) = listener_of(&path)? else { continue };
                let process = launcher.of_number(pid)?;
                // Still the one that listens: so it is the one that the descriptor names.
                if process.is_some() && listener_of(&path)? == Some(pid) {
                    return Ok(process);
                }
            }
            Ok(None)
        };
        blocking(look).await
    }
}
