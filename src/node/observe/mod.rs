//! Observes a mapping for the planner: its devices, their holders, and the workers.

mod quiesce;
mod worker;

use std::time::Duration;

use tokio::time::Instant;

use crate::context::Context;
use crate::devices::devices;
use crate::holders::holders_of;
use crate::mapping::Guard;
use crate::planner::{Intent, Observed, ObservedDevice, ObservedWorker};
use cleat_core::error::Result;
use cleat_kernel::Device;
use cleat_statistics::Page;
use worker::{WorkerSlot, observe_worker};

/// Observes a mapping. Adopts workers that an earlier supervisor left.
///
/// # Errors
/// Returns an error if the kernel's devices cannot be listed or a worker cannot be looked up.
pub(crate) async fn observe(
    cx: &Context,
    guard: &mut Guard,
    deadline: Instant,
) -> Result<Observed> {
    let identity = guard.record.identity();
    let ours = |device: &Device| device.connected && device.identity() == Some(identity.clone());
    let devices: Vec<ObservedDevice> = devices(cx, deadline)
        .await?
        .iter()
        .filter(|device| ours(device))
        .map(|device| ObservedDevice { index: device.index, size: device.size })
        .collect();
    let mut holders = Vec::new();
    if guard.record.intent == Intent::Unmapped {
        for device in &devices {
            holders.extend(holders_of(cx, device.index, deadline).await?);
        }
    }
    let worker = observe_worker(cx, guard, WorkerSlot::Worker, deadline).await?;
    let predecessor = observe_worker(cx, guard, WorkerSlot::Predecessor, deadline).await?;
    let page = guard.statistics.as_ref().filter(|_| guard.record.predecessor.is_some());
    let handed_over = page.map(|page| page.is_handed_over_to(guard.record.generation));
    let paths_known = guard.paths.is_some();
    let resize_deferred =
        guard.resize_deferred.as_ref().is_some_and(|(until, _)| *until > Instant::now());
    let (failures, history) = (guard.health.failures, guard.health.worker_failures.history());
    if worker == ObservedWorker::Gone && !devices.is_empty() {
        guard.health.unserved_since.get_or_insert_with(Instant::now);
    }
    let limit_s = guard.record.options.dead_connection_timeout_s;
    let limit = Duration::from_secs(u64::from(limit_s));
    let unserved_too_long =
        guard.health.unserved_since.is_some_and(|since| since.elapsed() >= limit);
    Ok(Observed {
        devices,
        worker,
        predecessor,
        handed_over,
        holders,
        paths_known,
        failures,
        history,
        unserved_too_long,
        refusing: guard.is_refusing(),
        resize_deferred,
        quiesced: quiesce::observe(guard),
        sync_failed: guard.statistics.as_ref().is_some_and(Page::sync_failed),
        connecting: guard.mapping().is_connecting(),
    })
}
