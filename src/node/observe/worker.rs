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
use cleat_worker::protocol::ToWorker;

/// For a worker to answer on its control socket.
const ADOPT_LIMIT: Duration = Duration::from_secs(5);

/// As above, when it is killed if it does not.
const FORCED_ADOPT_LIMIT: Duration = Duration::from_millis(500);

/// For a process that does not listen to have ended: it was perhaps on its way out.
const ENDING_LIMIT: Duration = Duration::from_secs(1);

/// Which of a mapping's workers, of which there are two during a hand-over.
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
    seat: WorkerSlot,
    deadline: Instant,
) -> Result<ObservedWorker> {
    let (worker, id) = match seat {
        WorkerSlot::Worker => (&guard.worker, guard.record.worker),
        WorkerSlot::Predecessor => (&guard.predecessor, guard.record.predecessor),
    };
    let process = match worker {
        Some(worker) if worker.has_ended() => return Ok(worker_ended(cx, guard, seat)),
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
    adopt_worker(cx, guard, seat, process, deadline).await
}

/// No process has the worker's number. In a pid namespace other than that of the supervisor
/// before, this would prove nothing; that nobody listens on its control socket does.
async fn unseen_worker(cx: &Context, guard: &Guard, pid: u32) -> ObservedWorker {
    let mapping_id = &guard.record.mapping_id;
    if stops_listening(|| cx.workers.sockets.probe_worker(mapping_id, pid)).await {
        return ObservedWorker::Gone;
    }
    let reason = "cannot be seen from here: is this another pid namespace?".to_owned();
    ObservedWorker::Unreachable { pid, reason }
}

async fn adopt_worker(
    cx: &Context,
    guard: &mut Guard,
    seat: WorkerSlot,
    process: Arc<Process>,
    deadline: Instant,
) -> Result<ObservedWorker> {
    let forced = matches!(guard.record.intent, Intent::Forced(_));
    let (adopting, ending) = match forced {
        true => (FORCED_ADOPT_LIMIT, Duration::ZERO),
        false => (ADOPT_LIMIT, ENDING_LIMIT),
    };
    let limit = deadline.min(Instant::now() + adopting);
    let mapping_id = guard.record.mapping_id.clone();
    match cx.workers.adopt(&mapping_id, Arc::clone(&process), limit).await {
        Ok(worker) => {
            tracing::info!(mapping = guard.mapping().name, pid = process.id.pid, "adopted");
            // Who changed its policy last may have died before it was told; and who unmapped it by
            // force, where that could not be recorded.
            let mut orders = vec![ToWorker::SetPolicy(guard.record.options.policy)];
            if guard.record.intent == Intent::Mapped {
                orders.push(ToWorker::FailIo { fail: false });
            }
            for order in orders {
                if let Err(error) = worker.call(order, Vec::new(), limit).await {
                    tracing::warn!(mapping = guard.mapping().name, "adopted: {}", error.report());
                }
            }
            guard.mapping().show_statistics(Some(worker.statistics.clone()));
            guard.statistics = Some(worker.statistics.clone());
            let seen = alive(&worker);
            *seat.of(guard) = Some(worker);
            Ok(seen)
        }
        Err(error) => {
            let until = Instant::now() + ending;
            while !has_ended(&process) && Instant::now() < until {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            if has_ended(&process) {
                process.handle.reap();
                return Ok(worker_ended(cx, guard, seat));
            }
            Ok(ObservedWorker::Unreachable { pid: process.id.pid, reason: error.report() })
        }
    }
}

/// The worker's end is proved.
fn worker_ended(cx: &Context, guard: &mut Guard, seat: WorkerSlot) -> ObservedWorker {
    let worker = seat.of(guard).take();
    // One of two may end: that is what a hand-over comes to, either way.
    if guard.record.predecessor.is_some() {
        return ObservedWorker::Gone;
    }
    if let Some(worker) = &worker {
        let (pid, how) = (worker.id().pid, worker.exit_reason());
        guard.health.worker_failures.exited(cx.clock.as_ref(), pid, how);
    }
    if worker.is_some() && guard.record.established && guard.record.intent == Intent::Mapped {
        let how = guard.health.worker_failures.last_exit().unwrap_or_default();
        tracing::warn!(mapping = guard.mapping().name, "its worker has died: {how}");
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
