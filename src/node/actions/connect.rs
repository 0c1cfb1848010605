//! Connects a new device to the worker.

use std::time::Duration;

use tokio::time::Instant;

use super::sockets::{SERVE_TIMEOUT, serve, socket_pairs, wait_for_connections};
use crate::context::Context;
use crate::mapping::{Guard, Place};
use crate::records::store;
use crate::worker_start::{no_worker, within};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_kernel::ConnectSpec;

pub(crate) async fn connect(cx: &Context, guard: &mut Guard, deadline: Instant) -> Result<()> {
    let Some(permit) = guard.mapping().connect_permit() else {
        // The kernel may have created the device since the last observation.
        guard.mapping().wait_for_connect(deadline).await?;
        let message = "cannot connect a device: an earlier attempt was still in progress";
        return Err(Error::new(ErrorKind::Unavailable, message));
    };
    // The next supervisor could not tell what a device is that no record describes.
    if let Place::Memory(_) = guard.mapping().recorded.place() {
        store(cx, guard).await?;
    }
    let record = &guard.record;
    let volume = record.volume.as_ref().ok_or_else(|| no_worker(record))?;
    let options = &record.options;
    let (kernel_ends, worker_ends) = socket_pairs(options.connections)?;
    // The worker serves before the device exists, so that the first request is answered.
    let limit = if guard.is_background() { within(deadline, SERVE_TIMEOUT) } else { deadline };
    serve(guard, worker_ends, limit).await?;
    cx.point("serving, not connected").await;
    let delay = Duration::from_millis(u64::from(options.replay_delay_ms));
    let spec = ConnectSpec {
        sockets: kernel_ends,
        size: volume.size,
        block_size: volume.block_size,
        transmission_flags: volume.transmission_flags,
        identity: record.identity(),
        dead_connection_timeout: Duration::from_secs(u64::from(options.dead_connection_timeout_s)),
        request_timeout: Duration::ZERO,
        replay_delay: (!delay.is_zero()).then_some(delay),
    };
    let index = cx.kernel.connect(spec, permit, deadline).await?;
    tracing::info!(mapping = record.name, device = index, "connected");
    wait_for_connections(guard).await;
    Ok(())
}
