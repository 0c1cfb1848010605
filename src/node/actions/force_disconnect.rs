//! Disconnects a device regardless of its holders.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::fail_io::{kill, process_of};
use crate::context::Context;
use crate::mapping::{ForceProgress, Guard};
use crate::worker_start::within;
use crate::workers::Process;
use cleat_core::error::{ErrorKind, Result};
use cleat_kernel::{DeviceIndex, Disconnected, Identity};

/// How long DISCONNECT may take before the worker is killed, because it may block the command.
const FIRST_ATTEMPT_TIMEOUT: Duration = Duration::from_millis(1500);

/// Disconnects the device of a mapping, as an action of a plan.
pub(crate) async fn run(
    cx: &Context,
    guard: &mut Guard,
    index: DeviceIndex,
    deadline: Instant,
) -> Result<()> {
    let (identity, process) = (guard.record.identity(), process_of(cx, guard)?);
    let mut unreported = ForceProgress::default();
    let progress = guard.teardown.force.as_mut().unwrap_or(&mut unreported);
    force_disconnect(cx, progress, index, &identity, process, deadline).await
}

/// Disconnects a device. If the kernel does not finish in time, the worker is killed.
///
/// # Errors
/// Returns `TimedOut` if the device is not disconnected at `deadline`, and other errors of the kernel.
pub(crate) async fn force_disconnect(
    cx: &Context,
    progress: &mut ForceProgress,
    index: DeviceIndex,
    identity: &Identity,
    process: Option<Arc<Process>>,
    deadline: Instant,
) -> Result<()> {
    let attempt = |deadline: Instant| {
        let identity = identity.clone();
        cx.urgent.wait("disconnect the device", deadline, None, move |kernel, until| {
            kernel.force_disconnect(index, &identity, until)
        })
    };
    let first = within(deadline, FIRST_ATTEMPT_TIMEOUT.min((deadline - Instant::now()) / 2));
    let disconnected = match attempt(first).await {
        // The kernel may be sending to a worker that does not read. Its end closes the sockets.
        Err(error) if error.kind() == ErrorKind::TimedOut => {
            progress.note = kill(process, deadline).await;
            attempt(deadline).await?
        }
        other => other?,
    };
    tracing::warn!(device = index, ?disconnected, "the device was disconnected by force");
    if disconnected == Disconnected::Held {
        progress.note = format!("/dev/nbd{index} stays until its holders close it");
        progress.device_left = Some(index);
        cx.force_disconnected.insert(index, identity);
    }
    Ok(())
}
