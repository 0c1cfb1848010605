//! Makes a worker answer every request with an error, and kills a worker that does not do so.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::context::Context;
use crate::mapping::Guard;
use crate::worker_start::within;
use crate::workers::{Process, Worker, stop_process, unexpected};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_worker_protocol::protocol::{FromWorker, ToWorker};

/// The timeout for the worker to fail its requests. The worker's own limit is shorter.
pub(crate) const FAIL_TIMEOUT: Duration = Duration::from_secs(1);

/// How long to wait for the end of a killed process. Then the next action begins anyway.
const KILL_TIMEOUT: Duration = Duration::from_millis(500);

pub(crate) async fn fail_io(cx: &Context, guard: &mut Guard, deadline: Instant) -> Result<()> {
    let failed = match &guard.worker {
        Some(worker) => fail_all(worker, within(deadline, FAIL_TIMEOUT)).await,
        None => Err(Error::new(ErrorKind::Unavailable, "the worker does not answer")),
    };
    let note = match failed {
        Ok(0) => {
            guard.teardown.no_writes_proved = true;
            String::new()
        }
        Ok(at_backend) => format!("the backend has not answered {at_backend} requests"),
        Err(error) => {
            let process = process_of(cx, guard)?;
            format!("{}; {}", error.report(), kill(process, deadline).await)
        }
    };
    guard.note(note);
    Ok(())
}

/// Makes a worker fail all I/O. Returns the number of requests that its backend still executes.
pub(crate) async fn fail_all(worker: &Worker, deadline: Instant) -> Result<u32> {
    match worker.call(ToWorker::FailIo { fail: true }, Vec::new(), deadline).await? {
        FromWorker::IoFails { at_backend } => Ok(at_backend),
        other => Err(unexpected(&other)),
    }
}

/// Kills a worker, and returns a note about the result. The worker may end later than this returns; a later
/// action waits for its end again.
pub(crate) async fn kill(process: Option<Arc<Process>>, deadline: Instant) -> String {
    let Some(process) = process else { return "the worker has ended".to_owned() };
    match stop_process(&process, within(deadline, KILL_TIMEOUT)).await {
        Ok(()) => format!("worker {} was killed", process.id.pid),
        Err(error) => error.report(),
    }
}

/// Returns the worker's process, if it has not ended.
pub(crate) fn process_of(cx: &Context, guard: &Guard) -> Result<Option<Arc<Process>>> {
    match (&guard.worker, guard.record.worker) {
        (Some(worker), _) => Ok(Some(worker.process())),
        (None, Some(id)) => Ok(cx.workers.find(id)?.map(Arc::new)),
        (None, None) => Ok(None),
    }
}
