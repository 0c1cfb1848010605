//! Decides which workers a sweep does not ping because they are idle. A ping wakes the threads of the worker, so many
//! idle volumes would keep the processors of the node awake.
//!
//! A worker is idle if its process runs, its counters have not changed since the last sweep, and the kernel waits for no
//! answer of it. A worker that has stopped while it was idle is therefore pinged when the next request waits for it, and
//! after [`IDLE_PING_INTERVAL`] in any case. With a ping the worker also reads the size of its volume. For an idle one, the
//! supervisor compares the size itself, where it can see it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;

use crate::blocking;
use crate::context::Context;
use crate::liveness::check_liveness;
use crate::mapping::{Mapping, View};
use crate::workers::Worker;
use cleat_backend::{Registry, VisibleSize};
use cleat_kernel::Device;
use cleat_statistics::Snapshot;

/// The longest time between two pings of a worker.
const IDLE_PING_INTERVAL: Duration = Duration::from_secs(300);

/// What the sweeps have seen of the workers.
#[derive(Default)]
pub(super) struct IdleWorkers {
    /// By the id of the mapping.
    seen: BTreeMap<String, Seen>,
    /// The last check of sizes.
    check: Option<AbortHandle>,
}

/// A worker when it was last pinged.
struct Seen {
    pid: u32,
    counters: Snapshot,
    pinged_at: Instant,
}

/// An idle worker, whose device has the size that the worker has reported.
pub(super) struct IdleWorker {
    mapping: Arc<Mapping>,
    uri: String,
    device_size: u64,
    block_size: u64,
}

impl IdleWorkers {
    /// Forgets what belongs to no mapping any more.
    pub(super) fn forget_all_but(&mut self, mappings: &[Arc<Mapping>]) {
        let ids: BTreeSet<&str> = mappings.iter().map(|it| it.mapping_id.as_str()).collect();
        self.seen.retain(|id, _| ids.contains(id.as_str()));
    }

    /// Returns the worker of a mapping that works if it is idle. Otherwise the caller pings it.
    pub(super) fn observe(
        &mut self,
        mapping: &Arc<Mapping>,
        view: &View,
        device: &Device,
    ) -> Option<IdleWorker> {
        let counters = mapping.statistics()?.snapshot();
        let (id, pid, now) = (&mapping.mapping_id, view.worker_pid, Instant::now());
        let idle = IdleWorker {
            mapping: Arc::clone(mapping),
            uri: view.record.uri.clone(),
            device_size: device.size,
            block_size: u64::from(device.block_size),
        };
        let is_idle = device.in_flight == 0
            && self.seen.get(id).is_some_and(|seen| seen.is_unchanged(pid, &counters, now))
            && idle.works();
        if !is_idle {
            self.seen.insert(id.clone(), Seen { pid, counters, pinged_at: now });
        }
        is_idle.then_some(idle)
    }

    /// Pings the idle workers whose volumes may have another size. Returns at once; the size of a file may be read from
    /// a server that does not answer. Until the last check has ended, all idle workers are pinged, as busy ones are.
    pub(super) fn check_sizes(
        &mut self,
        cx: &Arc<Context>,
        idle: Vec<IdleWorker>,
        checks: &mut JoinSet<()>,
    ) {
        if self.check.as_ref().is_some_and(|check| !check.is_finished()) {
            for worker in idle {
                let cx = Arc::clone(cx);
                checks.spawn(async move { check_liveness(&cx, &worker.mapping).await });
            }
        } else if !idle.is_empty() {
            self.check = Some(checks.spawn(check(Arc::clone(cx), idle)));
        }
    }
}

impl Seen {
    fn is_unchanged(&self, pid: u32, counters: &Snapshot, now: Instant) -> bool {
        self.pid == pid && self.counters == *counters && now < self.pinged_at + IDLE_PING_INTERVAL
    }
}

impl IdleWorker {
    /// Returns whether the process runs, its channel can be used, and it has reported the size that the device has. The
    /// event that reports the end of a worker may be lost: the queue of events has a limit.
    fn works(&self) -> bool {
        let Some(guard) = self.mapping.try_lock_in_background() else { return false };
        let is_fine = |worker: &Worker| {
            !worker.has_ended() && !worker.is_broken() && self.device_has(worker.size())
        };
        guard.worker.as_ref().is_some_and(is_fine)
    }

    /// May block, see [`visible_size`](cleat_backend::VolumeSpec::visible_size).
    fn may_have_another_size(&self, registry: Registry) -> bool {
        match registry.volume(&self.uri).map(|uri| uri.spec().visible_size()) {
            Ok(VisibleSize::Fixed) => false,
            Ok(VisibleSize::Bytes(bytes)) => !self.device_has(bytes),
            Ok(VisibleSize::Unknown) | Err(_) => true,
        }
    }

    /// Returns whether the device has the size of a volume of `bytes`.
    fn device_has(&self, bytes: u64) -> bool {
        bytes - bytes % self.block_size == self.device_size
    }
}

async fn check(cx: Arc<Context>, idle: Vec<IdleWorker>) {
    let registry = cx.registry;
    let find = move || -> Vec<IdleWorker> {
        idle.into_iter().filter(|worker| worker.may_have_another_size(registry)).collect()
    };
    // A panic is a defect of a backend. The workers are pinged after `IDLE_PING_INTERVAL` then.
    let found = blocking::spawn("read the sizes of volumes", find).await.unwrap_or_default();
    let mut pings = JoinSet::new();
    for worker in found {
        let cx = Arc::clone(&cx);
        pings.spawn(async move { check_liveness(&cx, &worker.mapping).await });
    }
    while pings.join_next().await.is_some() {}
}
