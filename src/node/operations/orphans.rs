//! Removes orphans: devices with an identity of cleat and without a record. Users request it, and the
//! daemon does it when it starts.

use tokio::time::Instant;

use crate::actions::open_exclusively;
use crate::context::Context;
use crate::devices::orphans;
use crate::holders::{holders_of, in_use_error, or_by_force};
use crate::kernel_calls::COMMAND_TIMEOUT;
use crate::mapping::node_of;
use crate::workers::{Probe, stops_listening};
use cleat_core::error::Result;
use cleat_kernel::{DeviceIndex, Identity};

/// Disconnects an orphan.
///
/// # Errors
/// Returns `InUse` if the device has holders, and errors of the kernel.
pub(crate) async fn disconnect_orphan(
    cx: &Context,
    index: DeviceIndex,
    identity: Identity,
    deadline: Instant,
) -> Result<()> {
    let holders = holders_of(cx, index, deadline).await?;
    let name = format!("/dev/nbd{index}");
    if !holders.is_empty() {
        return Err(or_by_force(in_use_error(&name, &holders), &name));
    }
    let exclusive = open_exclusively(cx, index, &identity, &name, deadline).await?;
    let mapping_id = identity.mapping_id().to_owned();
    if cx.workers.sockets.probe(&mapping_id) == Probe::Answers {
        // The worker still serves the writeback of the page cache. It ends after the disconnect.
        cx.kernel
            .wait("flush an orphan", deadline, None, move |k, until| k.flush(index, until))
            .await?;
    }
    cx.kernel
        .wait("disconnect an orphan", deadline, Some(COMMAND_TIMEOUT), move |kernel, until| {
            kernel.disconnect_exclusively(index, &identity, exclusive, until)
        })
        .await?;
    tracing::warn!(device = index, mapping_id, "disconnected an orphan");
    if stops_listening(|| cx.workers.sockets.probe(&mapping_id)).await {
        cx.workers.remove_files(&mapping_id);
    }
    Ok(())
}

/// Disconnects orphans whose worker has ended and that have no holders, and reports all others.
///
/// # Errors
/// Returns an error if the kernel's devices cannot be listed.
pub(crate) async fn clear_orphans(cx: &Context, deadline: Instant) -> Result<()> {
    let orphans = orphans(cx, deadline).await?;
    let mut known = cx.register.ids();
    known.extend(orphans.iter().map(|(_, identity)| identity.mapping_id().to_owned()));
    known.extend(cx.unmanaged.ids());
    let probe = |identity: &Identity| cx.workers.sockets.probe(identity.mapping_id());
    // A worker that is about to exit may still listen.
    stops_listening(|| {
        let mut probes = orphans.iter().map(|(_, identity)| probe(identity));
        probes.find(|found| *found == Probe::Answers).unwrap_or(Probe::Refused)
    })
    .await;
    for (device, identity) in orphans {
        let name = format!("/dev/nbd{} ({})", device.index, identity.as_str());
        if let Err(error) = cx.unmanaged.check_device(&identity) {
            cx.found(format!("{name} was left connected: {}", error.report()));
            continue;
        }
        // A missing socket proves nothing: the worker may belong to a daemon with other directories.
        if probe(&identity) != Probe::Refused {
            let (node, named) = (node_of(device.index), identity.name());
            let node = node.display();
            cx.found(format!(
                "{name} has no record, and its worker may be running: left connected; cleat map URI --name \
                 {named} adopts it, cleat unmap {node} removes it"
            ));
            continue;
        }
        match disconnect_orphan(cx, device.index, identity, deadline).await {
            Ok(()) => cx.found(format!("{name} had no record and no worker: disconnected")),
            Err(error) => {
                cx.found(format!("{name} has no record and no worker: {}", error.report()));
            }
        }
    }
    // Sockets that removed mappings have left.
    for (id, _) in cx.workers.sockets.all().iter().filter(|(id, _)| !known.contains(id)) {
        if cx.workers.sockets.probe(id) == Probe::Refused {
            cx.workers.remove_files(id);
        }
    }
    Ok(())
}
