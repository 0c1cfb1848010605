//! Asks workers for a sign of life.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::context::Context;
use crate::mapping::Mapping;
use cleat_core::error::ErrorKind;
use cleat_worker::protocol::ToWorker;

/// For a worker's control thread to give a sign of life.
const LIFE_LIMIT: Duration = Duration::from_secs(5);

/// Asks a mapping's worker for a sign of life. When none comes, the mapping is looked at.
pub(crate) async fn check_liveness(cx: &Context, mapping: &Arc<Mapping>) {
    let Some(guard) = mapping.try_lock_in_background() else { return };
    let Some(worker) = guard.worker.as_ref() else { return };
    let limit = Instant::now() + LIFE_LIMIT;
    let asked = mapping.until_forced(worker.call(ToWorker::Ping, Vec::new(), limit)).await;
    if let Err(error) = asked
        && error.kind() != ErrorKind::Aborted
    {
        let pid = worker.id().pid;
        tracing::warn!(mapping = mapping.name, pid, "gives no sign of life: {}", error.report());
        drop(guard);
        let _ = cx.work_queue.send(mapping.name.clone()).await;
    }
}
