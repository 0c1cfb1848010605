//! Devices with an identity of cleat and without a record: removed as users ask, or at the start.

use tokio::time::Instant;

use crate::context::Context;
use crate::devices::orphans;
use crate::holders::{holders_of, in_use_error, or_by_force};
use crate::kernel_calls::COMMAND_TIMEOUT;
use crate::workers::{Probe, stops_listening};
use cleat_core::error::Result;
use cleat_kernel::{DeviceIndex, Identity};

/// Disconnects an orphan that nobody holds, as a user asked.
pub(crate) async fn disconnect_orphan(
    cx: &Context,
    index: DeviceIndex,
    identity: Identity,
    deadline: Instant,
) -> Result<()> {
    let holders = holders_of(cx, index, deadline).await?;
    if !holders.is_empty() {
        let name = format!("/dev/nbd{index}");
        return Err(or_by_force(in_use_error(&name, &holders), &name));
    }
    let mapping_id = identity.mapping_id().to_owned();
    if cx.workers.sockets.probe(&mapping_id) == Probe::Answers {
        // Its page cache is written back through the worker, which ends by the disconnect.
        cx.kernel
            .wait("flush an orphan", deadline, None, move |k, until| k.flush(index, until))
            .await?;
    }
    cx.kernel
        .wait("disconnect an orphan", deadline, Some(COMMAND_TIMEOUT), move |kernel, until| {
            kernel.disconnect(index, &identity, until)
        })
        .await?;
    tracing::warn!(device = index, mapping_id, "disconnected an orphan");
    if stops_listening(|| cx.workers.sockets.probe(&mapping_id)).await {
        cx.workers.sockets.remove(&mapping_id);
    }
    Ok(())
}

/// Removes or reports devices of ours without a record.
///
/// # Errors
/// When the kernel cannot be asked.
pub(crate) async fn clear_orphans(cx: &Context, deadline: Instant) -> Result<()> {
    let orphans = orphans(cx, deadline).await?;
    let mut known = cx.register.ids();
    known.extend(orphans.iter().map(|(_, identity)| identity.mapping_id().to_owned()));
    for (device, identity) in orphans {
        let name = format!("/dev/nbd{} ({})", device.index, identity.as_str());
        // Absent proves nothing: the worker may belong to a daemon with other directories.
        if cx.workers.sockets.probe(identity.mapping_id()) != Probe::Refused {
            cx.found(format!("{name} has no record; it was left alone"));
            continue;
        }
        match disconnect_orphan(cx, device.index, identity, deadline).await {
            Ok(()) => cx.found(format!("{name} had no record and no worker: disconnected")),
            Err(error) => {
                cx.found(format!("{name} has no record and no worker: {}", error.report()));
            }
        }
    }
    // What is left of mappings that have ended otherwise.
    for (id, _) in cx.workers.sockets.all().iter().filter(|(id, _)| !known.contains(id)) {
        if cx.workers.sockets.probe(id) == Probe::Refused {
            cx.workers.sockets.remove(id);
        }
    }
    Ok(())
}
