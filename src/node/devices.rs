//! Lists the nbd devices of the node, and those of cleat that have no record.

use tokio::time::Instant;

use crate::context::Context;
use cleat_core::error::Result;
use cleat_kernel::{Device, Identity};

/// Returns all nbd devices.
///
/// # Errors
/// Returns an error if the kernel's devices cannot be listed until `deadline`.
pub(crate) async fn devices(cx: &Context, deadline: Instant) -> Result<Vec<Device>> {
    cx.urgent.command("list nbd devices", deadline, |kernel| kernel.devices()).await
}

/// Returns the devices that have an identity of cleat but no record.
///
/// # Errors
/// Returns an error if the kernel's devices cannot be listed until `deadline`.
pub(crate) async fn orphans(cx: &Context, deadline: Instant) -> Result<Vec<(Device, Identity)>> {
    // The ids before and after the listing: a mapping that is added or removed meanwhile is not an orphan.
    let mut known = cx.register.ids();
    let devices = devices(cx, deadline).await?;
    known.extend(cx.register.ids());
    let orphans = devices.into_iter().filter(|device| device.connected).filter_map(|device| {
        let identity = device.identity()?;
        (!known.contains(identity.mapping_id())).then_some((device, identity))
    });
    Ok(orphans.collect())
}
