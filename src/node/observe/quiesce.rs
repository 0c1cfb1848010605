//! Observes what a snapshot requests of a mapping, and what was done for it.

use tokio::time::Instant;

use crate::mapping::Guarded;
use crate::planner::ObservedQuiesce;

/// Observes the quiescing of a mapping.
pub(crate) fn observe(guarded: &Guarded) -> ObservedQuiesce {
    let worker = guarded.worker.as_ref().filter(|worker| !worker.has_ended());
    let waiting = worker.and_then(|worker| Some((worker.id().pid, worker.snapshot()?)));
    let answered = guarded.quiesce.answered.map(|answered| (answered.pid, answered.snapshot));
    let unavailable = worker.is_some_and(|worker| worker.outage().is_some() || worker.is_fenced());
    let until = guarded.quiesce.answered.and_then(|answered| answered.until);
    ObservedQuiesce {
        snapshot: waiting.filter(|_| waiting != answered).map(|(_, snapshot)| snapshot),
        in_progress: waiting.is_some()
            && waiting == answered
            && !unavailable
            && until.is_some_and(|until| Instant::now() < until),
        retry_later: guarded.quiesce.retry_at.is_some_and(|at| Instant::now() < at),
    }
}
