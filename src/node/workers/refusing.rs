//! Workers without a volume, which answer every request of a device with an I/O error.
//!
//! Such a worker has no control socket and is not in the journal: it ends when its channel closes, at the
//! latest with this supervisor, and the next supervisor starts another one. Starting it needs no storage and
//! no file.

use std::sync::Arc;

use tokio::time::{Instant, timeout_at};

use super::Workers;
use super::process::Process;
use super::start::{NotOpened, expect_ready};
use super::worker::{Worker, channel_broke, exit_of};
use crate::planner::Record;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_statistics::Page;
use cleat_worker_protocol::protocol::{Refuse, ToWorker};
use cleat_worker_protocol::version::ProtocolVersions;

/// A worker without a volume. Dropping it ends its process.
pub struct RefusingWorker {
    /// The worker, as the supervisor exchanges messages with it.
    pub(crate) worker: Worker,
    /// Whether the worker has received the connections of the device.
    pub(crate) has_connections: bool,
    /// Ends and reaps the process. The last field, so that it is dropped last.
    _process: EndedOnDrop,
}

impl RefusingWorker {
    /// Returns whether the worker answers the requests of the device: it runs, and the kernel has not closed all of its
    /// connections.
    pub(crate) fn serves(&self) -> bool {
        let is_connected = || self.worker.statistics.snapshot().connections > 0;
        self.has_connections && !self.worker.has_ended() && is_connected()
    }
}

impl Workers {
    /// Starts a worker that answers every request of `record`'s device with an error. It has no connections
    /// yet.
    ///
    /// # Errors
    /// Returns an error if no process can be started, and `TimedOut` if it is not ready at `deadline`. Then
    /// the process is ended.
    pub(crate) async fn start_refusing(
        &self,
        record: &Record,
        deadline: Instant,
    ) -> Result<RefusingWorker> {
        let late = || {
            let message = "the worker that fails the I/O did not start in time";
            Error::new(ErrorKind::TimedOut, message)
        };
        let launched = timeout_at(deadline, self.launch()).await.map_err(|_| late())??;
        let (process, link) = launched.into_parts();
        let process = EndedOnDrop(Arc::new(process));
        let versions = ProtocolVersions::of_this_build();
        let (mapping_id, name) = (record.mapping_id.clone(), record.name.clone());
        let refuse = Refuse { versions, mapping_id, name, log: self.log.clone() };
        let (page, _) = Page::create()?;
        let file = page.file().map_err(|e| Error::from_io("cannot share statistics", e))?;
        let starting = async {
            let command = ToWorker::Refuse(Box::new(refuse));
            link.send(&command, &[file]).await.map_err(channel_broke)?;
            expect_ready(&link).await.map_err(NotOpened::into_error)
        };
        let (ready, _) = timeout_at(deadline, starting).await.map_err(|_| late())??;
        let (watched, events) = (Arc::clone(&process.0), self.events.clone());
        let worker = Worker::watch(&record.mapping_id, watched, link, ready, page, events)?;
        Ok(RefusingWorker { worker, has_connections: false, _process: process })
    }
}

/// Kills the process on drop, and reaps it in the background.
struct EndedOnDrop(Arc<Process>);

impl Drop for EndedOnDrop {
    fn drop(&mut self) {
        let _ = self.0.handle.kill();
        let process = Arc::clone(&self.0);
        // Without a runtime the supervisor is about to end, and its children become those of init.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                let _ = exit_of(&process).await;
                process.handle.reap();
            });
        }
    }
}
