//! Answers every request of a device with an error while no worker serves it.

use tokio::time::Instant;

use super::sockets::reconfigure;
use crate::blocking::blocking;
use crate::context::Context;
use crate::mapping::Guard;
use cleat_core::error::Result;
use cleat_kernel::DeviceIndex;
use cleat_worker::refuse::Refusing;

pub(crate) async fn refuse_io(
    cx: &Context,
    guard: &mut Guard,
    index: DeviceIndex,
    connections: u32,
    deadline: Instant,
) -> Result<()> {
    let sockets = reconfigure(cx, guard, index, connections, deadline).await?;
    guard.refusing = Some(blocking(move || Refusing::start(sockets)).await?);
    let name = &guard.record.name;
    tracing::warn!(
        mapping = name,
        device = index,
        "no worker serves the device: its I/O fails now"
    );
    Ok(())
}

/// Closes the sockets of the refusal, because the kernel replaces only closed sockets by those of a
/// worker.
pub(crate) async fn stop_refusing_io(guard: &mut Guard) -> Result<()> {
    let Some(refusing) = guard.refusing.take() else { return Ok(()) };
    blocking(move || {
        drop(refusing);
        Ok(())
    })
    .await
}
