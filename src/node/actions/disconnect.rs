//! Flushes a device and disconnects it, unless it has holders.

use tokio::time::Instant;

use crate::context::Context;
use crate::holders::{check_unused, or_by_force};
use crate::kernel_calls::COMMAND_TIMEOUT;
use crate::mapping::Guard;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_kernel::{DeviceIndex, Kernel};

/// Writes back the page cache of the device.
///
/// # Errors
/// Returns `Unavailable` at once if the worker ends during the flush, so that the next plan replaces it. The
/// flush then continues on its thread, and the next one waits for it.
pub(crate) async fn flush(
    cx: &Context,
    guard: &Guard,
    index: DeviceIndex,
    deadline: Instant,
) -> Result<()> {
    let flush = move |k: &dyn Kernel, until| k.flush(index, until);
    let flush = cx.kernel.wait("flush the device", deadline, None, flush);
    let worker_ended = async {
        match &guard.worker {
            Some(worker) => worker.ended().await,
            // A worker without a channel may serve. Its end is not noticed here.
            None => std::future::pending().await,
        }
    };
    let flushed = tokio::select! {
        biased;
        flushed = flush => flushed,
        () = worker_ended => {
            Err(Error::new(ErrorKind::Unavailable, "the worker died during the flush"))
        }
    };
    flushed.map_err(|error| or_by_force(error, &guard.record.name))
}

pub(crate) async fn disconnect(
    cx: &Context,
    guard: &Guard,
    index: DeviceIndex,
    deadline: Instant,
) -> Result<()> {
    // A process may have opened the device during the flush.
    check_unused(cx, guard, index, deadline).await?;
    let identity = guard.record.identity();
    cx.kernel
        .wait("disconnect the device", deadline, Some(COMMAND_TIMEOUT), move |kernel, until| {
            kernel.disconnect(index, &identity, until)
        })
        .await
}
