//! Gives a device's dead connections new sockets to the worker.

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

/// For the kernel to notice that the dead worker's sockets are closed.
const DEAD_LINK_TIMEOUT: Duration = Duration::from_secs(3);

/// RECONFIGURE replaces dead connections only and drops other sockets without a word
/// (nbd_genl_reconfigure): a dropped one shows as a hang-up on our end. Only sockets that were
/// taken go to the worker.
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
        let taken = reconfigure(cx, guard, index, missing, deadline).await?;
        missing -= u32::try_from(taken.len()).unwrap_or(missing).min(missing);
        if !taken.is_empty() {
            serve(guard, taken, within(deadline, SERVE_LIMIT)).await?;
        }
        if missing == 0 {
            wait_for_connections(guard).await;
            guard.statistics.iter().for_each(Page::count_reconnect);
            tracing::info!(mapping = guard.record.name, device = index, "reconnected");
            return Ok(());
        }
        if Instant::now() >= until {
            let message = format!(
                "/dev/nbd{index} does not take new connections: {missing} of its old ones \
                 still count as alive"
            );
            return Err(Error::new(ErrorKind::Unavailable, message));
        }
        sleep(Duration::from_millis(20)).await;
    }
}
