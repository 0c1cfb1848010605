//! Makes a device as large as its volume has become.

use std::time::Duration;

use tokio::time::Instant;

use super::resize_device::{record_size, resize_device};
use crate::context::Context;
use crate::mapping::Guard;
use cleat_core::error::Result;
use cleat_kernel::DeviceIndex;

/// The same for a growth that nobody has asked for: calls wait meanwhile, and it can be put off.
const GROWTH_FLOW_LIMIT: Duration = Duration::from_millis(300);

/// How soon a growth that was put off is tried again.
const AGAIN_AFTER: Duration = Duration::from_secs(10);

/// Makes the device as large as its volume, or puts that off.
///
/// # Errors
/// When the record cannot be stored.
pub(crate) async fn grow(
    cx: &Context,
    guard: &mut Guard,
    index: DeviceIndex,
    size: u64,
    deadline: Instant,
) -> Result<()> {
    let resized = resize_device(cx, guard, index, size, GROWTH_FLOW_LIMIT, deadline).await;
    let Err(error) = resized else {
        guard.resize_deferred = None;
        tracing::info!(mapping = guard.record.name, size, "grown with its volume");
        return record_size(cx, guard).await;
    };
    let why = format!("its volume has grown to {size} bytes: {}", error.report());
    tracing::warn!(mapping = guard.record.name, "{why}");
    guard.resize_deferred = Some((Instant::now() + AGAIN_AFTER, why));
    cx.wake_at(&guard.mapping().name, Instant::now() + AGAIN_AFTER);
    Ok(())
}
