//! Has a worker answer every request with an error, and kills one that does not.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::context::Context;
use crate::mapping::Guard;
use crate::worker_start::within;
use crate::workers::{Process, Worker, stop_process, unexpected};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_worker::protocol::{FromWorker, ToWorker};

/// For the worker to fail its requests. Within it, the worker has its own, shorter bound.
pub(crate) const FAIL_LIMIT: Duration = Duration::from_secs(1);

/// For the end of a killed process before the next step is taken nevertheless.
const KILL_LIMIT: Duration = Duration::from_millis(500);

pub(crate) async fn fail_io(cx: &Context, guard: &mut Guard, deadline: Instant) -> Result<()> {
    let failed = match &guard.worker {
        Some(worker) => fail_all(worker, within(deadline, FAIL_LIMIT)).await,
        None => Err(Error::new(ErrorKind::Unavailable, "the worker does not answer")),
    };
    let note = match failed {
        Ok(0) => {
            guard.teardown.no_writes_proved = true;
            String::new()
        }
        Ok(at_backend) => format!("{at_backend} requests hang at the backend"),
        Err(error) => {
            let process = process_of(cx, guard)?;
            format!("{}; {}", error.report(), kill(process, deadline).await)
        }
    };
    guard.note(note);
    Ok(())
}

/// Has a worker fail all I/O; returns how many requests its backend still has.
pub(crate) async fn fail_all(worker: &Worker, deadline: Instant) -> Result<u32> {
    match worker.call(ToWorker::FailIo { fail: true }, Vec::new(), deadline).await? {
        FromWorker::IoFails { at_backend } => Ok(at_backend),
        other => Err(unexpected(&other)),
    }
}

/// Kills a worker and says what came of it. That its end takes long keeps nothing else from being
/// done; it is waited for again in the end.
pub(crate) async fn kill(process: Option<Arc<Process>>, deadline: Instant) -> String {
    let Some(process) = process else { return "it has ended".to_owned() };
    match stop_process(&process, within(deadline, KILL_LIMIT)).await {
        Ok(()) => format!("worker {} was killed", process.id.pid),
        Err(error) => error.report(),
    }
}

/// The worker's process, if it has not ended.
pub(crate) fn process_of(cx: &Context, guard: &Guard) -> Result<Option<Arc<Process>>> {
    match (&guard.worker, guard.record.worker) {
        (Some(worker), _) => Ok(Some(worker.process())),
        (None, Some(id)) => Ok(cx.workers.find(id)?.map(Arc::new)),
        (None, None) => Ok(None),
    }
}
