//! Grows a device to the size of its volume.

use std::time::Duration;

use tokio::time::Instant;

use super::resize_device::{record_size, resize_device};
use crate::context::Context;
use crate::mapping::Guard;
use cleat_kernel::DeviceIndex;

/// How long a growth without a request of a user waits for the requests in flight. It is short because
/// calls wait meanwhile, and the growth can be deferred.
const GROWTH_DRAIN_TIMEOUT: Duration = Duration::from_millis(300);

/// The delay before a deferred growth is retried.
const RETRY_DELAY: Duration = Duration::from_secs(10);

/// Grows the device to the size of its volume, or defers that.
pub(crate) async fn grow(
    cx: &Context,
    guard: &mut Guard,
    index: DeviceIndex,
    size: u64,
    deadline: Instant,
) {
    let resized = resize_device(cx, guard, index, size, GROWTH_DRAIN_TIMEOUT, deadline).await;
    let Err(error) = resized else {
        guard.resize_deferred = None;
        tracing::info!(mapping = guard.record.name, size, "the device has grown with its volume");
        record_size(cx, guard).await;
        return;
    };
    let why = format!("cannot grow the device to its volume of {size} bytes: {}", error.report());
    tracing::warn!(mapping = guard.record.name, "{why}");
    guard.resize_deferred = Some((Instant::now() + RETRY_DELAY, why));
    cx.wake_at(&guard.mapping().name, Instant::now() + RETRY_DELAY);
}
