//! Replaces dead connections of a device by new ones to the worker.

use tokio::time::Instant;

use super::refuse_io::stop_refusing_io;
use super::sockets::{replace_connections, wait_for_connections};
use crate::context::Context;
use crate::mapping::Guard;
use crate::worker_start::no_worker;
use cleat_core::error::Result;
use cleat_kernel::DeviceIndex;
use cleat_statistics::Page;

/// Replaces `missing` dead connections of the device by new ones to the worker.
pub(crate) async fn reconnect(
    cx: &Context,
    guard: &mut Guard,
    index: DeviceIndex,
    missing: u32,
    deadline: Instant,
) -> Result<()> {
    stop_refusing_io(guard, deadline).await?;
    let worker = guard.worker.as_ref().ok_or_else(|| no_worker(&guard.record))?;
    replace_connections(cx, guard, worker, index, missing, deadline).await?;
    wait_for_connections(guard).await;
    guard.statistics.iter().for_each(Page::count_reconnect);
    tracing::info!(mapping = guard.record.name, device = index, "reconnected");
    Ok(())
}
