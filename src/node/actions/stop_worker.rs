//! Stops a worker, and kills one that does not stop. Its end is proved before this succeeds.

use std::time::Duration;

use tokio::time::Instant;

use crate::context::Context;
use crate::mapping::Guard;
use crate::planner::{Intent, WorkerId};
use crate::worker_start::within;
use crate::workers::{Worker, stop_process, stops_listening};
use cleat_core::error::{Error, ErrorKind, Result};

pub(crate) const STOP_GRACE: Duration = Duration::from_secs(2);

pub(crate) const FORCED_STOP_GRACE: Duration = Duration::from_millis(300);

const STOP_LIMIT: Duration = Duration::from_secs(7);

pub(crate) async fn stop_worker(cx: &Context, guard: &mut Guard, deadline: Instant) -> Result<()> {
    end_worker(cx, guard, guard.worker.as_ref(), guard.record.worker, deadline).await?;
    guard.worker = None;
    Ok(())
}

/// Ends a worker that nothing is asked of any more, whether it speaks to us or not.
pub(crate) async fn end_worker(
    cx: &Context,
    guard: &Guard,
    worker: Option<&Worker>,
    id: Option<WorkerId>,
    deadline: Instant,
) -> Result<()> {
    // By force, all the time that is left may go into this.
    let (grace, deadline) = match guard.record.intent {
        Intent::Forced(_) => (FORCED_STOP_GRACE, deadline),
        Intent::Mapped | Intent::Unmapped => (STOP_GRACE, within(deadline, STOP_LIMIT)),
    };
    if let Some(worker) = worker {
        return worker.stop(grace, deadline).await;
    }
    let Some(id) = id else { return Ok(()) };
    let socket = || cx.workers.sockets.probe_worker(&guard.record.mapping_id, id.pid);
    match cx.workers.find(id)? {
        Some(process) => stop_process(&process, deadline).await,
        None if stops_listening(socket).await => Ok(()),
        None => Err(unseen(id.pid)),
    }
}

/// Somebody listens for a worker whose process cannot be seen.
fn unseen(pid: u32) -> Error {
    let message = format!("worker {pid} lives on where it cannot be seen from here");
    Error::new(ErrorKind::Unavailable, message)
        .with_repair("end it in the pid namespace that it was started in")
}
