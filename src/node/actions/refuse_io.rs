//! Has every request of a device answered with an error while no worker serves it.

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
    let taken = reconfigure(cx, guard, index, connections, deadline).await?;
    guard.refusing = Some(blocking(move || Refusing::start(taken)).await?);
    let name = &guard.record.name;
    tracing::warn!(mapping = name, device = index, "nobody serves it: its I/O fails from now on");
    Ok(())
}

/// Before a worker takes the refusal's place: the kernel takes new sockets for closed ones only.
pub(crate) async fn stop_refusing_io(guard: &mut Guard) -> Result<()> {
    let Some(refusing) = guard.refusing.take() else { return Ok(()) };
    blocking(move || {
        drop(refusing);
        Ok(())
    })
    .await
}
