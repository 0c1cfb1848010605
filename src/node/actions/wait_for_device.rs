//! Waits for a device's node, symlink and size.

use tokio::time::Instant;

use crate::context::Context;
use crate::devices::devices;
use crate::mapping::Guard;
use cleat_core::error::{Error, ErrorKind, Result};

pub(crate) async fn wait_for_device(
    cx: &Context,
    guard: &mut Guard,
    deadline: Instant,
) -> Result<()> {
    let (identity, name) = (guard.record.identity(), guard.record.name.clone());
    let devices = devices(cx, deadline).await?;
    let device = devices
        .iter()
        .find(|device| device.connected && device.identity().as_ref() == Some(&identity))
        .ok_or_else(|| {
            let message = format!("the device of {name} was disconnected while it was set up");
            Error::new(ErrorKind::Unavailable, message)
        })?;
    let (index, size) =
        (device.index, guard.record.volume.as_ref().map_or(device.size, |v| v.size));
    // After a resize the record may be older than the device, so the size of the device counts.
    let size = if guard.record.established { device.size } else { size };
    let paths = cx
        .kernel
        .wait("wait for udev", deadline, None, move |kernel, until| {
            kernel.wait_ready(index, &identity, size, until)
        })
        .await?;
    guard.paths = Some(paths);
    Ok(())
}
