//! Adopts a device whose record is lost while its worker serves: a call of `map` for the volume, under the name
//! of the device, makes a new record.
//!
//! The record gets what the caller says about the volume. What the worker says has only to agree: a worker that an
//! attacker has taken over could otherwise name another file, and its successor would open that one.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::map::{self, MapSpec, difference, new_record};
use crate::context::Context;
use crate::devices::orphans;
use crate::mapping::{Change, Mapping, View, node_of};
use crate::naming::{is_same, other_volume};
use crate::planner::{DeviceProperties, Record};
use crate::records::store;
use crate::worker_start::within;
use crate::workers::Worker;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_kernel::{Device, Identity};

/// The timeout for a worker to answer on its control socket.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Maps a volume as [`map::map`] does. Before, adopts a device of the volume that has the name of `spec` and no
/// record.
///
/// # Errors
/// As [`map::map`]. Returns `AlreadyExists` if the device is one of another volume or has other options.
pub(crate) async fn adopt_or_map(cx: &Context, spec: &MapSpec, deadline: Instant) -> Result<View> {
    if cx.register.get(&spec.name).is_none() {
        adopt(cx, spec, deadline).await?;
    }
    match map::map(cx, spec, deadline).await {
        Err(error) if error.kind() == ErrorKind::InUse => {
            Err(explain(cx, spec, error, deadline).await)
        }
        mapped => mapped,
    }
}

/// Makes a mapping of the device that has the name of `spec` and no record. Does nothing if there is no such
/// device, or if its worker cannot be reached.
///
/// # Errors
/// Returns `AlreadyExists` if the device is one of another volume or has other options, and the errors of the
/// journal.
async fn adopt(cx: &Context, spec: &MapSpec, deadline: Instant) -> Result<()> {
    for (device, identity) in without_record(cx, deadline).await {
        if identity.name() != spec.name {
            continue;
        }
        // A new record would replace the one that this daemon cannot use.
        cx.unmanaged.check_name(&spec.name)?;
        cx.unmanaged.check_device(&identity)?;
        let Some(worker) = worker_of(cx, &identity, deadline).await else { continue };
        let record = lost_record(cx, spec, &device, &identity, &worker)?;
        return register(cx, record, &device).await;
    }
    Ok(())
}

/// Adds to the error of a volume in use that it is in use by a device without a record.
async fn explain(cx: &Context, spec: &MapSpec, error: Error, deadline: Instant) -> Error {
    for (device, identity) in without_record(cx, deadline).await {
        let Some(worker) = worker_of(cx, &identity, deadline).await else { continue };
        let opened = worker.ready.opened.as_ref();
        if opened.is_some_and(|opened| is_same(&opened.uri, &spec.uri)) {
            let (node, uri, name) = (node_of(device.index), &spec.uri, identity.name());
            let node = node.display();
            return error.with_repair(format!(
                "its device {node} has no record: cleat map '{uri}' --name {name} adopts it; \
                 cleat unmap {node} removes it"
            ));
        }
    }
    error
}

/// Returns the devices without a record.
async fn without_record(cx: &Context, deadline: Instant) -> Vec<(Device, Identity)> {
    match orphans(cx, deadline).await {
        Ok(mut devices) => {
            devices.retain(|(device, identity)| {
                !cx.force_disconnected.contains(device.index, identity)
            });
            devices
        }
        // The next step of the map fails for the same reason.
        Err(error) => {
            tracing::warn!("cannot look for devices without a record: {}", error.report());
            Vec::new()
        }
    }
}

/// Returns the worker that serves a device without a record; `None` if it cannot be reached.
async fn worker_of(cx: &Context, identity: &Identity, deadline: Instant) -> Option<Worker> {
    let id = identity.mapping_id();
    let found = async {
        let Some(process) = cx.workers.listener(id).await? else { return Ok(None) };
        let answered = within(deadline, ANSWER_TIMEOUT);
        cx.workers.adopt(id, Arc::new(process), answered).await.map(Some)
    };
    match found.await {
        Ok(worker) => worker.filter(|worker| worker.ready.connections > 0),
        Err(error) => {
            let why = error.report();
            tracing::warn!(
                mapping_id = id,
                "cannot reach the worker of a device without a record: {why}"
            );
            None
        }
    }
}

/// Makes the record of a device and its worker.
fn lost_record(
    cx: &Context,
    spec: &MapSpec,
    device: &Device,
    identity: &Identity,
    worker: &Worker,
) -> Result<Record> {
    let (name, node, ready) = (&spec.name, node_of(device.index), &worker.ready);
    let node = node.display();
    let refused = |why: &str, repair: &str| {
        let message = format!("{name} is the name of {node}, which has no record, {why}");
        let repair = format!("{repair}; or remove the device: cleat unmap {node}");
        Error::new(ErrorKind::AlreadyExists, message).with_repair(repair)
    };
    let Some(opened) = &ready.opened else {
        let why = "and whose worker is of a build that does not say which volume it serves";
        return Err(refused(why, "choose another name (--name)"));
    };
    if !is_same(&opened.uri, &spec.uri) {
        let repair = "choose another name (--name), or map the volume of the device to adopt it";
        return Err(refused("and serves another volume", repair));
    }
    // The number of connections decides about other defaults.
    let mut record = new_record(cx, &MapSpec { connections: ready.connections, ..spec.clone() });
    let as_opened = Record { uri: opened.uri.clone(), ..record.clone() };
    record.mapping_id = identity.mapping_id().to_owned();
    record.options.read_only = opened.read_only;
    record.options.quiesce = opened.quiesce;
    record.generation = ready.generation;
    record.worker = Some(worker.id());
    record.volume = Some(DeviceProperties {
        identity: ready.identity.clone(),
        size: device.size,
        block_size: device.block_size,
        transmission_flags: ready.transmission_flags,
        outlives_worker: ready.outlives_worker,
    });
    record.established = true;
    let repeat = "repeat the command with the options of the device, which adopts it";
    // The options in the worker's URI are not shown, because they are not checked.
    if other_volume(&as_opened, &spec.uri).is_some() {
        return Err(refused("and was mapped with other options of the volume", repeat));
    }
    match difference(&record, spec) {
        Some(difference) => Err(refused(&format!("and was mapped with {difference}"), repeat)),
        None => Ok(record),
    }
}

/// Registers the mapping of an adopted device, and writes its record.
async fn register(cx: &Context, record: Record, device: &Device) -> Result<()> {
    let name = record.name.clone();
    let make = || Mapping::new(record, cx.work_queue.clone());
    let (mapping, fresh) = cx.register.find_or_insert(&name, cx.settings.mappings, make)?;
    // Otherwise another call has adopted the device, or has mapped the volume.
    let Some(mut guard) = fresh else { return Ok(()) };
    if let Err(error) = mapping.until_forced(store(cx, &guard)).await {
        guard.teardown.removed = true;
        cx.register.remove(&mapping);
        return Err(error);
    }
    let _ = cx.changes.send(Change { view: mapping.view(), removed: false });
    tracing::warn!(mapping = name, device = device.index, "adopted a device whose record was lost");
    Ok(())
}
