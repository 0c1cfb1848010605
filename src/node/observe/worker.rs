//! Observes the worker of a mapping, and adopts one that an earlier supervisor left.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::context::Context;
use crate::mapping::Guard;
use crate::planner::{Intent, ObservedWorker};
use crate::retry::count_failure;
use crate::workers::{Process, Worker, has_ended, stops_listening};
use cleat_core::error::Result;
use cleat_worker_protocol::protocol::ToWorker;

/// The timeout for a worker to answer on its control socket.
const ADOPT_TIMEOUT: Duration = Duration::from_secs(5);

/// The same in a forced unmap, which kills a worker that does not answer.
const FORCED_ADOPT_TIMEOUT: Duration = Duration::from_millis(500);

/// How long to wait for the end of a process that does not listen, since it may be ending.
const ENDING_TIMEOUT: Duration = Duration::from_secs(1);

/// One of the workers of a mapping, which has two during a handover.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WorkerSlot {
    Worker,
    Predecessor,
}

impl WorkerSlot {
    fn of(self, guard: &mut Guard) -> &mut Option<Worker> {
        match self {
            Self::Worker => &mut guard.worker,
            Self::Predecessor => &mut guard.predecessor,
        }
    }
}

pub(crate) async fn observe_worker(
    cx: &Context,
    guard: &mut Guard,
    slot: WorkerSlot,
    deadline: Instant,
) -> Result<ObservedWorker> {
    let (worker, id) = match slot {
        WorkerSlot::Worker => (&guard.worker, guard.record.worker),
        WorkerSlot::Predecessor => (&guard.predecessor, guard.record.predecessor),
    };
    let process = match worker {
        Some(worker) if worker.has_ended() => return Ok(worker_ended(cx, guard, slot).await),
        Some(worker) if worker.is_fenced() => return Ok(ObservedWorker::Fenced),
        Some(worker) if !worker.is_broken() => return Ok(alive(worker)),
        Some(worker) => worker.process(),
        None => {
            let Some(id) = id else { return Ok(ObservedWorker::Gone) };
            match cx.workers.find(id)? {
                None => return Ok(unseen_worker(cx, guard, id.pid).await),
                Some(process) => Arc::new(process),
            }
        }
    };
    adopt_worker(cx, guard, slot, process, deadline).await
}

/// Observes a worker whose process does not exist in this pid namespace. This proves its end only if
/// no process listens on its control socket, because the worker may run in another pid namespace.
async fn unseen_worker(cx: &Context, guard: &Guard, pid: u32) -> ObservedWorker {
    let mapping_id = &guard.record.mapping_id;
    if stops_listening(|| cx.workers.sockets.probe_worker(mapping_id, pid)).await {
        return ObservedWorker::Gone;
    }
    let reason = "is not visible to the daemon, probably in another pid namespace".to_owned();
    ObservedWorker::Unreachable { pid, reason }
}

async fn adopt_worker(
    cx: &Context,
    guard: &mut Guard,
    slot: WorkerSlot,
    process: Arc<Process>,
    deadline: Instant,
) -> Result<ObservedWorker> {
    let forced = matches!(guard.record.intent, Intent::Forced(_));
    let (adopting, ending) = match forced {
        true => (FORCED_ADOPT_TIMEOUT, Duration::ZERO),
        false => (ADOPT_TIMEOUT, ENDING_TIMEOUT),
    };
    let limit = deadline.min(Instant::now() + adopting);
    let mapping_id = guard.record.mapping_id.clone();
    match cx.workers.adopt(&mapping_id, Arc::clone(&process), limit).await {
        Ok(worker) => {
            tracing::info!(
                mapping = guard.mapping().name,
                pid = process.id.pid,
                "adopted a worker"
            );
            // The previous supervisor may have ended before it sent a changed policy. Or it had begun a
            // forced unmap that could not be recorded.
            let mut commands = vec![ToWorker::SetPolicy(guard.record.options.policy)];
            if guard.record.intent == Intent::Mapped {
                commands.push(ToWorker::FailIo { fail: false });
            }
            for command in commands {
                if let Err(error) = worker.call(command, Vec::new(), limit).await {
                    let name = &guard.mapping().name;
                    tracing::warn!(
                        mapping = name,
                        "cannot set up an adopted worker: {}",
                        error.report()
                    );
                }
            }
            guard.mapping().show_statistics(Some(worker.statistics.clone()));
            guard.statistics = Some(worker.statistics.clone());
            let observed = alive(&worker);
            *slot.of(guard) = Some(worker);
            Ok(observed)
        }
        Err(error) => {
            let until = Instant::now() + ending;
            while !has_ended(&process) && Instant::now() < until {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            if has_ended(&process) {
                process.handle.reap();
                return Ok(worker_ended(cx, guard, slot).await);
            }
            Ok(ObservedWorker::Unreachable { pid: process.id.pid, reason: error.report() })
        }
    }
}

/// Handles the end of a worker, which is proved.
async fn worker_ended(cx: &Context, guard: &mut Guard, slot: WorkerSlot) -> ObservedWorker {
    let worker = slot.of(guard).take();
    if let Some(worker) = &worker {
        worker.last_messages().await;
    }
    // The end of one of two workers is the normal end of a handover.
    if guard.record.predecessor.is_some() {
        return ObservedWorker::Gone;
    }
    if let Some(worker) = &worker {
        guard.teardown.volume_closed |= worker.has_closed();
        let (pid, how) = (worker.id().pid, worker.exit_reason());
        guard.health.worker_failures.exited(cx.clock.as_ref(), pid, how);
    }
    if worker.is_some() && guard.record.established && guard.record.intent == Intent::Mapped {
        let how = guard.health.worker_failures.last_exit().unwrap_or_default();
        tracing::warn!(mapping = guard.mapping().name, "the worker has died: {how}");
        count_failure(cx, guard);
    }
    ObservedWorker::Gone
}

fn alive(worker: &Worker) -> ObservedWorker {
    ObservedWorker::Alive {
        connections: u32::try_from(worker.statistics.snapshot().connections).unwrap_or(u32::MAX),
        size: worker.size(),
    }
}
