//! Stops a worker, and kills it if it does not stop. Succeeds only when its end is proved.

use std::time::Duration;

use tokio::time::Instant;

use crate::context::Context;
use crate::mapping::Guard;
use crate::planner::{Intent, WorkerId};
use crate::worker_start::within;
use crate::workers::{Worker, stop_process, stops_listening};
use cleat_core::error::{Error, ErrorKind, Result};

/// How long a worker may take to end before it is killed.
pub(crate) const STOP_GRACE: Duration = Duration::from_secs(2);

/// As `STOP_GRACE`, in a forced unmap.
pub(crate) const FORCED_STOP_GRACE: Duration = Duration::from_millis(300);

/// The timeout for stopping a worker, SIGKILL included.
const STOP_TIMEOUT: Duration = Duration::from_secs(7);

pub(crate) async fn stop_worker(cx: &Context, guard: &mut Guard, deadline: Instant) -> Result<()> {
    end_worker(cx, guard, guard.worker.as_ref(), guard.record.worker, deadline).await?;
    guard.worker = None;
    Ok(())
}

/// Ends a worker, whether the supervisor has a channel to it or not.
pub(crate) async fn end_worker(
    cx: &Context,
    guard: &Guard,
    worker: Option<&Worker>,
    id: Option<WorkerId>,
    deadline: Instant,
) -> Result<()> {
    // A forced unmap may use all of its remaining time.
    let (grace, deadline) = match guard.record.intent {
        Intent::Forced(_) => (FORCED_STOP_GRACE, deadline),
        Intent::Mapped | Intent::Unmapped => (STOP_GRACE, within(deadline, STOP_TIMEOUT)),
    };
    if let Some(worker) = worker {
        return worker.stop(grace, deadline).await;
    }
    let Some(id) = id else { return Ok(()) };
    let socket = || cx.workers.sockets.probe_worker(&guard.record.mapping_id, id.pid);
    match cx.workers.find(id)? {
        Some(process) => stop_process(&process, deadline).await,
        None if stops_listening(socket).await => Ok(()),
        None => Err(in_other_namespace(id.pid)),
    }
}

/// A process listens on the worker's socket, but the worker is not in this pid namespace.
fn in_other_namespace(pid: u32) -> Error {
    let message = format!("cannot end worker {pid}: it runs in another pid namespace");
    Error::new(ErrorKind::Unavailable, message)
        .with_repair("end it in the pid namespace that it was started in")
}
