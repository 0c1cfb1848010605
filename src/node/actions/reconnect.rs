//! Replaces dead connections of a device by new ones to the worker.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::refuse_io::stop_refusing_io;
use super::sockets::{SERVE_LIMIT, reconfigure, serve, wait_for_connections};
use crate::context::Context;
use crate::mapping::Guard;
use crate::worker_start::within;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_kernel::DeviceIndex;
use cleat_statistics::Page;

/// How long the kernel may take to notice that the sockets of the dead worker are closed.
const DEAD_LINK_TIMEOUT: Duration = Duration::from_secs(3);

/// Passes new sockets to the kernel until it has replaced `missing` dead connections.
///
/// RECONFIGURE replaces only dead connections and silently drops the other sockets
/// (nbd_genl_reconfigure). A dropped socket shows as a hang-up on its other end. The worker gets only the
/// ends of sockets that the kernel accepted.
pub(crate) async fn reconnect(
    cx: &Context,
    guard: &mut Guard,
    index: DeviceIndex,
    missing: u32,
    deadline: Instant,
) -> Result<()> {
    stop_refusing_io(guard).await?;
    let until = within(deadline, DEAD_LINK_TIMEOUT);
    let mut missing = missing;
    loop {
        let accepted = reconfigure(cx, guard, index, missing, deadline).await?;
        missing -= u32::try_from(accepted.len()).unwrap_or(missing).min(missing);
        if !accepted.is_empty() {
            serve(guard, accepted, within(deadline, SERVE_LIMIT)).await?;
        }
        if missing == 0 {
            wait_for_connections(guard).await;
            guard.statistics.iter().for_each(Page::count_reconnect);
            tracing::info!(mapping = guard.record.name, device = index, "reconnected");
            return Ok(());
        }
        if Instant::now() >= until {
            let message = format!(
                "cannot reconnect /dev/nbd{index}: the kernel still treats {missing} of its old \
                 connections as alive"
            );
            return Err(Error::new(ErrorKind::Unavailable, message));
        }
        sleep(Duration::from_millis(20)).await;
    }
}
