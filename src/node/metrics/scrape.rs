//! Collects the values of a scrape.

use std::time::Duration;

use tokio::time::Instant;

use super::Source;
use crate::kernel_calls::KernelLoad;
use crate::mapping::View;
use crate::planner::ObservedDevice;
use cleat_statistics::Snapshot;

/// The timeout for the kernel's list of devices. After it, the scrape is returned without the list.
const KERNEL_TIMEOUT: Duration = Duration::from_secs(2);

/// The values of a scrape.
#[derive(Debug)]
pub(super) struct Scrape {
    pub(super) volumes: Vec<VolumeSample>,
    pub(super) started_at_s: u64,
    pub(super) findings: usize,
    pub(super) service_problems: usize,
    /// Whether the state directory took the last record.
    pub(super) state_directory_writable: bool,
    pub(super) log_lines_dropped: u64,
    /// The number of devices of cleat without a record; `None` if the kernel did not answer.
    pub(super) orphans: Option<usize>,
    pub(super) kernel: KernelLoad,
    /// The number of calls of the control API by method and code.
    pub(super) calls: Vec<((String, &'static str), u64)>,
    /// The present time on the clock of the statistics (CLOCK_MONOTONIC).
    pub(super) now_ns: u64,
    /// The present time on the clock of outages (CLOCK_BOOTTIME).
    pub(super) boot_now_ns: u64,
}

/// The values of a mapping.
#[derive(Debug)]
pub(super) struct VolumeSample {
    pub(super) view: View,
    /// The size of the device in bytes, or of the volume while there is no device.
    pub(super) size: Option<u64>,
    /// `None` until the mapping has a worker.
    pub(super) counters: Option<VolumeCounters>,
}

/// The content of a statistics page.
#[derive(Debug)]
pub(super) struct VolumeCounters {
    pub(super) snapshot: Snapshot,
    pub(super) reconnects: u64,
}

impl Scrape {
    /// Collects the values. Takes [`KERNEL_TIMEOUT`] at most.
    pub(super) async fn collect(source: &Source) -> Self {
        let (executor, clock) = (&source.executor, &source.executor.context().clock);
        let volumes = executor.register().all().into_iter().map(|mapping| {
            let view = mapping.view();
            let device = view.device.map(|ObservedDevice { size, .. }| size);
            let size = device.or(view.record.volume.as_ref().map(|volume| volume.size));
            let counters = mapping.statistics().map(|page| VolumeCounters {
                snapshot: page.snapshot(),
                reconnects: page.reconnects(),
            });
            VolumeSample { view, size, counters }
        });
        let volumes = volumes.collect();
        let orphans = executor.orphans(Instant::now() + KERNEL_TIMEOUT).await;
        Self {
            volumes,
            started_at_s: source.started_at_s,
            findings: executor.findings().len(),
            service_problems: executor.service_problems().len(),
            state_directory_writable: executor.state_directory_problem().is_none(),
            log_lines_dropped: cleat_telemetry::dropped_lines(),
            orphans: orphans.ok().map(|orphans| orphans.len()),
            kernel: executor.kernel_load(),
            calls: source.calls.counts(),
            now_ns: clock.monotonic_ns(),
            boot_now_ns: clock.boot_ns(),
        }
    }
}
