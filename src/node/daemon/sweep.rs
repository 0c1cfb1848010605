//! Checks all mappings periodically, since events may be lost.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::idle_workers::IdleWorkers;
use crate::context::Context;
use crate::devices::devices;
use crate::liveness::check_liveness;
use crate::planner::State;
use crate::records::{check_state_directory, finish_removals};

/// The interval between two sweeps.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);

/// Schedules a reconcile for every mapping that does not work, whose device is not the expected one or is quiesced,
/// or whose record is not in the state directory. Pings the workers of mappings that seem to work, unless they are
/// idle. Those of quiesced mappings are always pinged, because a thaw waits for the worker, and those of failed ones,
/// because the size of the volume may be right again. Runs until the daemon ends.
pub(crate) async fn sweep(cx: Arc<Context>) {
    let mut tick = interval(SWEEP_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut checks = JoinSet::new();
    let mut idle_workers = IdleWorkers::default();
    loop {
        tick.tick().await;
        let devices = match devices(&cx, Instant::now() + SWEEP_INTERVAL).await {
            Ok(devices) => devices,
            Err(error) => {
                tracing::warn!("cannot list the nbd devices: {}", error.report());
                continue;
            }
        };
        while checks.try_join_next().is_some() {}
        if !cx.records.removals.all().is_empty() {
            let cx = Arc::clone(&cx);
            checks.spawn(async move { finish_removals(&cx).await });
        }
        // A record that is to be written again is such a check.
        if !cx.register.all().iter().any(|mapping| mapping.recorded.is_behind()) {
            let cx = Arc::clone(&cx);
            checks.spawn(async move { check_state_directory(&cx).await });
        }
        let mappings = cx.register.all();
        idle_workers.forget_all_but(&mappings);
        let mut idle = Vec::new();
        for mapping in mappings {
            let view = mapping.view();
            let device = view.device.and_then(|seen| {
                devices.iter().find(|device| device.index == seen.index && device.connected)
            });
            let has_identity = device.is_some_and(|device| {
                device.identity().is_some_and(|id| id.mapping_id() == mapping.mapping_id)
            });
            let served = mapping.statistics().is_some_and(|page| {
                page.snapshot().connections >= u64::from(view.record.options.connections)
            });
            let works = view.state == State::Mapped && has_identity && served;
            if !works || view.record.quiesced.is_some() || mapping.recorded.is_behind() {
                cx.wake(&mapping.name);
            }
            if let Some(device) = device.filter(|_| works && view.record.quiesced.is_none())
                && let Some(worker) = idle_workers.observe(&mapping, &view, device)
            {
                idle.push(worker);
            } else if works || matches!(view.state, State::Failed(_)) {
                let cx = Arc::clone(&cx);
                checks.spawn(async move { check_liveness(&cx, &mapping).await });
            }
        }
        idle_workers.check_sizes(&cx, idle, &mut checks);
    }
}
