//! Starts and stops the worker that fails every request of a device that no worker serves.

use std::time::Duration;

use tokio::time::Instant;

use super::sockets::replace_connections;
use crate::context::Context;
use crate::mapping::Guard;
use crate::worker_start::{start_permit, within};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_kernel::DeviceIndex;

/// How long the worker may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the worker may take to stop before it is killed. It has no volume, so that a kill loses nothing.
const STOP_TIMEOUT: Duration = Duration::from_millis(500);

/// How long a worker that was killed may take to end.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);

/// Starts a worker without a volume, and connects the device to it.
///
/// # Errors
/// Returns an error if the worker cannot be started, if it has died since the last attempt, or if the kernel
/// does not take its sockets. The caller retries with a backoff.
pub(crate) async fn refuse_io(
    cx: &Context,
    guard: &mut Guard,
    index: DeviceIndex,
    connections: u32,
    deadline: Instant,
) -> Result<()> {
    if let Some(before) = guard.refusing.take_if(|before| before.worker.has_ended()) {
        let (pid, how) = (before.worker.id().pid, before.worker.exit_reason());
        let message = format!("worker {pid}, which failed the device's I/O, {how}");
        return Err(Error::new(ErrorKind::Unavailable, message));
    }
    stop_refusing_io(guard, deadline).await?;
    let permit = start_permit(cx, deadline).await?;
    let started = cx.workers.start_refusing(&guard.record, within(deadline, START_TIMEOUT)).await?;
    drop(permit);
    guard.refusing = Some(started);
    cx.point("refusing worker started").await;
    if let Some(refusing) = &guard.refusing {
        replace_connections(cx, guard, &refusing.worker, index, connections, deadline).await?;
    }
    guard.refusing.iter_mut().for_each(|refusing| refusing.has_connections = true);
    let name = &guard.record.name;
    tracing::warn!(
        mapping = name,
        device = index,
        "no worker serves the device: its I/O fails now"
    );
    Ok(())
}

/// Stops the worker that fails every request, if there is one. The kernel replaces only the sockets of a
/// worker that has ended.
///
/// # Errors
/// Returns `TimedOut` if the process does not end after it was killed.
pub(crate) async fn stop_refusing_io(guard: &mut Guard, deadline: Instant) -> Result<()> {
    let Some(refusing) = guard.refusing.take() else { return Ok(()) };
    refusing.worker.stop(STOP_TIMEOUT, within(deadline, STOP_TIMEOUT + KILL_TIMEOUT)).await
}
