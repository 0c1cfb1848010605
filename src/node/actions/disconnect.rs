//! Flushes a device and disconnects it, unless it has holders.

use tokio::time::Instant;

use super::fail_io::process_of;
use crate::context::Context;
use crate::holders::{check_unused, or_by_force};
use crate::kernel_calls::COMMAND_TIMEOUT;
use crate::mapping::Guard;
use crate::planner::Intent;
use crate::workers::exit_of;
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
    // A worker without a channel may serve, too.
    let process = process_of(cx, guard)?;
    let worker_ended = async {
        let ended = match &process {
            Some(process) => exit_of(process).await.is_ok(),
            None => false,
        };
        if !ended {
            // Only the end of the flush ends the wait.
            std::future::pending::<()>().await;
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

/// Explains, in an unmap, the error of a step that has to precede the flush. Returns other errors as they are.
pub(crate) fn not_flushed(guard: &Guard, error: Error) -> Error {
    if guard.record.intent != Intent::Unmapped {
        return error;
    }
    let name = &guard.record.name;
    // The mapping exists, even if its volume does not.
    let kind = match error.kind() {
        ErrorKind::NotFound => ErrorKind::Unavailable,
        kind => kind,
    };
    let message = format!(
        "{name} is not unmapped, because its data cannot be flushed without a worker: {}",
        error.report()
    );
    let explained = Error::new(kind, message);
    let explained = match error.repair() {
        Some(repair) => explained.with_repair(repair),
        None => explained,
    };
    or_by_force(explained, name)
}

pub(crate) async fn disconnect(
    cx: &Context,
    guard: &mut Guard,
    index: DeviceIndex,
    deadline: Instant,
) -> Result<()> {
    // A process may have opened the device during the flush.
    check_unused(cx, guard, index, deadline).await?;
    let (identity, exclusive) = (guard.record.identity(), guard.exclusive.remove(&index));
    cx.kernel
        .wait("disconnect the device", deadline, Some(COMMAND_TIMEOUT), move |kernel, until| {
            match exclusive {
                Some(open) => kernel.disconnect_exclusively(index, &identity, open, until),
                None => kernel.disconnect(index, &identity, until),
            }
        })
        .await
}
