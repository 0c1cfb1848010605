//! What a scrape shows, taken at one moment.

use std::time::Duration;

use tokio::time::Instant;

use super::Source;
use crate::kernel_calls::Load;
use crate::mapping::View;
use crate::planner::ObservedDevice;
use cleat_statistics::{Snapshot, boot_now_ns, now_ns};

/// For the kernel's list of devices. A scrape without it is better than none.
const KERNEL_LIMIT: Duration = Duration::from_secs(2);

/// Everything that is shown.
#[derive(Debug)]
pub(super) struct Scene {
    pub(super) volumes: Vec<ShownVolume>,
    pub(super) started_at_s: u64,
    pub(super) findings: usize,
    pub(super) log_lines_dropped: u64,
    /// Devices of ours without a record; `None` when the kernel did not say.
    pub(super) orphans: Option<usize>,
    pub(super) kernel: Load,
    /// Calls of the control API by method and code.
    pub(super) calls: Vec<((String, &'static str), u64)>,
    /// On the clock of the statistics.
    pub(super) now_ns: u64,
    /// On that of outages, which counts the time that the machine slept.
    pub(super) boot_now_ns: u64,
}

/// A mapping that is shown.
#[derive(Debug)]
pub(super) struct ShownVolume {
    pub(super) view: View,
    /// Of the volume, in bytes, as far as known.
    pub(super) size: Option<u64>,
    /// `None` as long as it had no worker.
    pub(super) counted: Option<Counted>,
}

/// What a statistics page says.
#[derive(Debug)]
pub(super) struct Counted {
    pub(super) snapshot: Snapshot,
    pub(super) reconnects: u64,
}

/// Takes a look.
pub(super) async fn take(source: &Source) -> Scene {
    let executor = &source.executor;
    let volumes = executor.register().all().into_iter().map(|volume| {
        let view = volume.view();
        let device = view.device.map(|ObservedDevice { size, .. }| size);
        let size = device.or(view.record.volume.map(|volume| volume.size));
        let counted = volume
            .statistics()
            .map(|page| Counted { snapshot: page.snapshot(), reconnects: page.reconnects() });
        ShownVolume { view, size, counted }
    });
    let volumes = volumes.collect();
    let orphans = executor.orphans(Instant::now() + KERNEL_LIMIT).await;
    Scene {
        volumes,
        started_at_s: source.started_at_s,
        findings: executor.findings().len(),
        log_lines_dropped: cleat_telemetry::dropped_lines(),
        orphans: orphans.ok().map(|orphans| orphans.len()),
        kernel: executor.kernel_load(),
        calls: source.calls.counts(),
        now_ns: now_ns(),
        boot_now_ns: boot_now_ns(),
    }
}
