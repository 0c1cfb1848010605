//! Handles the failure of an attempt to map or repair: reports it, counts it, and schedules a retry.

use std::time::Duration;

use tokio::time::Instant;

use crate::context::Context;
use crate::mapping::Guard;
use crate::status::{outage_of, publish};
use cleat_core::error::Error;

/// After this time of work, a mapping's earlier failures no longer count. It is short, so that a mapping
/// fails for good only if its workers die soon after their start. With the others, I/O makes progress.
const RECOVERED_AFTER: Duration = Duration::from_secs(5);

/// Reports a failure, counts it, and schedules a retry with a backoff. A refusal of the backend does not
/// count as a failure while the outage policy allows requests to wait. A journal that cannot be written never
/// counts: the mapping is not at fault, and works again when the journal does.
pub(crate) fn after_failure(cx: &Context, guard: &mut Guard, error: &Error) {
    let policy = guard.record.options.policy.outage;
    let backend_attempt = guard.health.worker_failures.backend_wait_attempts(policy);
    let record_attempt = guard.mapping().recorded.take_failure();
    let name = &guard.mapping().name;
    let mut message = error.report();
    let waits = match (record_attempt, backend_attempt) {
        (Some(attempt), _) => {
            let repair = error.repair().unwrap_or("check the disk of the state directory");
            message = format!("waiting for the state directory: {message}; {repair}");
            Some(attempt)
        }
        (None, Some(attempt)) => {
            message = format!("waiting for the backend: {message}");
            Some(attempt)
        }
        (None, None) => None,
    };
    match waits {
        Some(attempt) => {
            // An outage may last for days, so most attempts are not logged.
            if attempt <= 3 || attempt.is_multiple_of(60) {
                tracing::warn!(mapping = name, attempt, "{message}");
            }
        }
        None => tracing::warn!(mapping = name, attempt = guard.health.failures + 1, "{message}"),
    }
    let outage = outage_of(guard);
    publish(cx, guard.mapping(), |view| {
        view.message = message;
        view.outage = outage;
    });
    match waits {
        Some(attempt) => set_backoff(cx, guard, attempt),
        None => count_failure(cx, guard),
    }
    wake_later(cx, guard);
}

/// Counts a repair that failed or whose worker died, and extends the backoff of the next one.
pub(crate) fn count_failure(cx: &Context, guard: &mut Guard) {
    if guard.health.working_since.take().is_some_and(|since| since.elapsed() > RECOVERED_AFTER) {
        guard.health.failures = 0;
        guard.health.unserved_since = None;
    }
    guard.health.failures = guard.health.failures.saturating_add(1);
    set_backoff(cx, guard, guard.health.failures);
}

/// Sets the time of the next attempt. The first retry is immediate, since a single failure is usually over.
/// The delay of the later ones grows from 0.1 s to 10 s.
fn set_backoff(cx: &Context, guard: &mut Guard, attempts: u32) {
    if attempts > 1 {
        let (first, max) = (Duration::from_millis(100), Duration::from_secs(10));
        let wait = cx.random.backoff(attempts - 1, first, max);
        guard.health.retry_at = Some(Instant::now() + wait);
    }
}

/// Schedules a reconcile of the mapping at its retry time, or in a second if it has none.
pub(crate) fn wake_later(cx: &Context, guard: &mut Guard) {
    let (name, work_queue) = (guard.mapping().name.clone(), cx.work_queue.clone());
    let at = guard.health.retry_at.unwrap_or_else(|| Instant::now() + Duration::from_secs(1));
    tokio::spawn(async move {
        tokio::time::sleep_until(at).await;
        let _ = work_queue.try_send(name);
    });
}
