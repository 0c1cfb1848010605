//! Looks at every mapping from time to time, since events may be lost.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::context::Context;
use crate::devices::devices;
use crate::liveness::check_liveness;
use crate::planner::State;

/// How often everything is looked at without any event: events may be lost.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);

/// Finds what no event told: every mapping whose device is not as it should be, that does not work,
/// or whose worker gives no sign of life.
pub(crate) async fn sweep(cx: Arc<Context>) {
    let mut tick = interval(SWEEP_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut asking = JoinSet::new();
    loop {
        tick.tick().await;
        let devices = match devices(&cx, Instant::now() + SWEEP_INTERVAL).await {
            Ok(devices) => devices,
            Err(error) => {
                tracing::warn!("cannot look at the devices: {}", error.report());
                continue;
            }
        };
        while asking.try_join_next().is_some() {}
        for mapping in cx.register.all() {
            let view = mapping.view();
            let device = view.device.and_then(|seen| {
                devices.iter().find(|device| device.index == seen.index && device.connected)
            });
            let right = device.is_some_and(|device| {
                device.identity().is_some_and(|id| id.mapping_id() == mapping.mapping_id)
            });
            let served = mapping.statistics().is_some_and(|page| {
                page.snapshot().connections >= u64::from(view.record.options.connections)
            });
            if view.state != State::Mapped || !right || !served || view.record.quiesced.is_some() {
                // A full queue: at the next sweep.
                cx.wake(&mapping.name);
            } else {
                let cx = Arc::clone(&cx);
                asking.spawn(async move { check_liveness(&cx, &mapping).await });
            }
        }
    }
}
