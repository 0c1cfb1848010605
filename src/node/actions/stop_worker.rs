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

/// As `STOP_GRACE`, in an unmap: the worker releases its claim, at a storage that may be slow. Longer than its
/// own limits for that (`STOP_TIMEOUT` in the worker's session, and `CLOSE_TIMEOUT` of RBD images).
const CLOSE_GRACE: Duration = Duration::from_secs(29);

/// The part of the time before the deadline of an unmap that is reserved for a kill.
pub(crate) const KILL_TIME: Duration = Duration::from_secs(1);

/// As `STOP_GRACE`, in a forced unmap whose worker has requests at the backend.
const FORCED_STOP_GRACE: Duration = Duration::from_millis(300);

/// The timeout for stopping a worker, SIGKILL included.
const STOP_TIMEOUT: Duration = Duration::from_secs(7);

pub(crate) async fn stop_worker(cx: &Context, guard: &mut Guard, deadline: Instant) -> Result<()> {
    end_worker(cx, guard, guard.worker.as_ref(), guard.record.worker, deadline).await?;
    let worker = guard.worker.take();
    // During a handover, the other worker has the volume open.
    if guard.record.predecessor.is_none() {
        guard.teardown.volume_closed |= worker.is_some_and(|worker| worker.has_closed());
    }
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
    let left = deadline.saturating_duration_since(Instant::now());
    // A forced unmap may use all of its remaining time. It has to prove the end of the worker's requests, by
    // another worker that opens the volume, only if the worker could not do so.
    let (grace, deadline) = match guard.record.intent {
        Intent::Forced(_) if guard.teardown.no_writes_proved => {
            (FORCED_STOP_GRACE.max(left / 2), deadline)
        }
        Intent::Forced(_) => (FORCED_STOP_GRACE, deadline),
        Intent::Unmapped => (CLOSE_GRACE.min(left.saturating_sub(KILL_TIME)), deadline),
        Intent::Mapped => (STOP_GRACE, within(deadline, STOP_TIMEOUT)),
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
