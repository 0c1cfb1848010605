//! Changes the size of a volume and of its device.

use std::sync::Arc;

use tokio::time::Instant;

use crate::actions::resize_device::{
    DRAIN_TIMEOUT, block_size, record_size, request_size, resize_device,
};
use crate::context::Context;
use crate::holders::check_unused;
use crate::kernel_calls::COMMAND_TIMEOUT;
use crate::mapping::{Guard, Mapping, View};
use crate::planner::{ObservedDevice, State};
use crate::reconcile::reconcile;
use crate::target::{get, lock_mapped, not_mapped};
use crate::workers::Worker;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_worker_protocol::protocol::ToWorker;

/// A requested size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewSize {
    /// The size in bytes; 0 for the size of the volume at the backend.
    pub bytes: u64,
    /// Whether the data beyond a smaller size may be lost.
    pub shrink: bool,
}

/// Sets the size of a volume and of its device.
///
/// # Errors
/// Returns `InvalidArgument` if the device would shrink without `shrink`, `InUse` if a device to shrink
/// has holders, and `Unavailable` if the backend does not answer.
pub(crate) async fn resize(
    cx: &Context,
    target: &str,
    wanted: NewSize,
    deadline: Instant,
) -> Result<View> {
    let mapping = get(cx, target, deadline).await?;
    mapping.until_forced(resize_mapping(cx, &mapping, wanted, deadline)).await
}

async fn resize_mapping(
    cx: &Context,
    mapping: &Arc<Mapping>,
    wanted: NewSize,
    deadline: Instant,
) -> Result<View> {
    let mut guard = lock_mapped(mapping, deadline).await?;
    // An explicit request retries a deferred growth at once.
    guard.resize_deferred = None;
    let state = reconcile(cx, &mut guard, deadline).await?;
    let block = guard.record.volume.as_ref().map(|volume| u64::from(volume.block_size));
    let (Some(device), Some(block)) = (mapping.view().device, block) else {
        return Err(not_mapped(mapping));
    };
    match state {
        State::Failed(failure) if !(wanted.shrink && has_shrunk(&guard, device)) => {
            return Err(failure.into_error());
        }
        _ => {}
    }
    if !wanted.bytes.is_multiple_of(block) {
        let message =
            format!("size {} is not a multiple of the block size, {block} bytes", wanted.bytes);
        return Err(Error::new(ErrorKind::InvalidArgument, message));
    }
    let resized = resize_both(cx, &guard, device, wanted, deadline).await;
    if resized.is_err() {
        // The volume may have grown nevertheless. Then the reconcile grows the device.
        cx.wake(&mapping.name);
    }
    resized?;
    record_size(cx, &mut guard).await;
    reconcile(cx, &mut guard, deadline).await?;
    Ok(mapping.view())
}

async fn resize_both(
    cx: &Context,
    guard: &Guard,
    device: ObservedDevice,
    wanted: NewSize,
    deadline: Instant,
) -> Result<()> {
    let size = match wanted.bytes {
        0 => request_size(guard, ToWorker::RefreshSize, deadline).await?,
        bytes => bytes,
    };
    let size = size - size % block_size(guard);
    if size >= device.size {
        grow_both(cx, guard, device, wanted.bytes, deadline).await
    } else if wanted.shrink {
        shrink_both(cx, guard, device, size, deadline).await
    } else {
        Err(would_shrink(guard, device, size))
    }
}

/// Grows the volume first, then the device: a device must never be larger than its volume.
async fn grow_both(
    cx: &Context,
    guard: &Guard,
    device: ObservedDevice,
    bytes: u64,
    deadline: Instant,
) -> Result<()> {
    let size = match bytes {
        0 => guard.worker.as_ref().map_or(0, Worker::size),
        size => {
            let command = ToWorker::Resize { size, shrink: false };
            request_size(guard, command, deadline).await?
        }
    };
    let size = size - size % block_size(guard);
    if size < device.size {
        return Err(would_shrink(guard, device, size));
    }
    if size == device.size {
        return Ok(());
    }
    resize_device(cx, guard, device.index, size, DRAIN_TIMEOUT, deadline).await
}

/// Shrinks the device first, then the volume, and restores the size of the device if the volume cannot be
/// shrunk.
async fn shrink_both(
    cx: &Context,
    guard: &Guard,
    device: ObservedDevice,
    size: u64,
    deadline: Instant,
) -> Result<()> {
    if guard.mapping().view().is_read_only() {
        let message = format!("cannot shrink {}: it is mapped read-only", guard.record.name);
        return Err(Error::new(ErrorKind::PermissionDenied, message));
    }
    if size == 0 {
        let message = "size must be greater than 0";
        return Err(Error::new(ErrorKind::InvalidArgument, message));
    }
    check_unused(cx, guard, device.index, deadline).await?;
    resize_device(cx, guard, device.index, size, DRAIN_TIMEOUT, deadline).await?;
    cx.point("device shrunk, volume not").await;
    let command = ToWorker::Resize { size, shrink: true };
    let Err(error) = request_size(guard, command, deadline).await else { return Ok(()) };
    // The next observation shows the size of the volume. The device grows again if the volume is larger.
    let until = Instant::now() + COMMAND_TIMEOUT;
    let (index, before) = (device.index, device.size);
    if let Err(undo) = resize_device(cx, guard, index, before, DRAIN_TIMEOUT, until).await {
        tracing::warn!(
            mapping = guard.record.name,
            "cannot restore the size of the device: {}",
            undo.report()
        );
    }
    Err(error)
}

fn has_shrunk(guard: &Guard, device: ObservedDevice) -> bool {
    guard.worker.as_ref().is_some_and(|worker| worker.size() < device.size)
}

fn would_shrink(guard: &Guard, device: ObservedDevice, size: u64) -> Error {
    let name = &guard.record.name;
    let message = format!("{name} has {} bytes and would shrink to {size} bytes", device.size);
    Error::new(ErrorKind::InvalidArgument, message).with_repair(
        "data beyond the new size would be lost; to shrink: shrink the filesystem, unmount it, then \
         cleat resize --shrink",
    )
}
