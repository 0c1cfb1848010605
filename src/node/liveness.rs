//! Checks that workers answer. A worker whose backend requests it reads the size of its volume then, too.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::context::Context;
use crate::mapping::Mapping;
use crate::planner::State;
use cleat_core::error::ErrorKind;
use cleat_worker_protocol::protocol::ToWorker;

/// The timeout for the answer of a worker's control thread.
const PING_TIMEOUT: Duration = Duration::from_secs(5);

/// Pings a mapping's worker. If it does not answer, schedules a reconcile of the mapping.
pub(crate) async fn check_liveness(cx: &Context, mapping: &Arc<Mapping>) {
    let Some(guard) = mapping.try_lock_in_background() else { return };
    let Some(worker) = guard.worker.as_ref() else { return };
    if worker.is_broken() && matches!(mapping.view().state, State::Failed(_)) {
        // The supervisor has reported that this worker does not answer.
        return;
    }
    let deadline = Instant::now() + PING_TIMEOUT;
    let answer = mapping.until_forced(worker.call(ToWorker::Ping, Vec::new(), deadline)).await;
    if let Err(error) = answer
        && error.kind() != ErrorKind::Aborted
    {
        let pid = worker.id().pid;
        tracing::warn!(
            mapping = mapping.name,
            pid,
            "the worker does not answer: {}",
            error.report()
        );
        drop(guard);
        let _ = cx.work_queue.send(mapping.name.clone()).await;
    }
}
