//! Connects a new device to the worker.

use std::time::Duration;

use tokio::time::Instant;

use super::sockets::{SERVE_LIMIT, serve, socket_pairs, wait_for_connections};
use crate::context::Context;
use crate::mapping::Guard;
use crate::worker_start::{no_worker, within};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_kernel::ConnectSpec;

pub(crate) async fn connect(cx: &Context, guard: &mut Guard, deadline: Instant) -> Result<()> {
    let Some(turn) = guard.mapping().connect_permit() else {
        // Its device may have come since the look that led here.
        guard.mapping().wait_for_connect(deadline).await?;
        let message = "an earlier attempt to connect the device has only now ended";
        return Err(Error::new(ErrorKind::Unavailable, message));
    };
    let record = &guard.record;
    let volume = record.volume.ok_or_else(|| no_worker(record))?;
    let options = &record.options;
    let (kernel_ends, ends) = socket_pairs(options.connections)?;
    // Served before it exists, so that the device answers from its first moment.
    serve(guard, ends, within(deadline, SERVE_LIMIT)).await?;
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
    let index = cx.kernel.connect(spec, turn, deadline).await?;
    tracing::info!(mapping = record.name, device = index, "connected");
    wait_for_connections(guard).await;
    Ok(())
}
