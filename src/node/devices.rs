//! The nbd devices of the node, and which of them are cleat's.

use tokio::time::Instant;

use crate::context::Context;
use cleat_core::error::Result;
use cleat_kernel::{Device, Identity};

/// Every nbd device.
pub(crate) async fn devices(cx: &Context, deadline: Instant) -> Result<Vec<Device>> {
    cx.urgent.command("list nbd devices", deadline, |kernel| kernel.devices()).await
}

/// Devices that carry an identity of ours and have no record.
///
/// # Errors
/// When the kernel cannot be asked.
pub(crate) async fn orphans(cx: &Context, deadline: Instant) -> Result<Vec<(Device, Identity)>> {
    // Before and after the look: a mapping that comes or goes meanwhile is no orphan.
    let mut known = cx.register.ids();
    let devices = devices(cx, deadline).await?;
    known.extend(cx.register.ids());
    let orphans = devices.into_iter().filter(|device| device.connected).filter_map(|device| {
        let identity = device.identity()?;
        (!known.contains(identity.mapping_id())).then_some((device, identity))
    });
    Ok(orphans.collect())
}
