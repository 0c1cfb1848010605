//! What happens after an attempt at a mapping has failed: it is shown, counted and tried again later.

use std::time::Duration;

use tokio::time::Instant;

use crate::context::Context;
use crate::mapping::Guard;
use crate::status::{outage_of, publish};
use cleat_core::error::Error;

/// A mapping that has worked for so long has recovered from what was before. Short, so that only
/// workers which die soon after their start are given up: with the others, I/O gets on.
const RECOVERED_AFTER: Duration = Duration::from_secs(5);

/// A failure that nobody may be waiting for: shown, counted, and tried again later.
pub(crate) fn after_failure(cx: &Context, guard: &mut Guard, error: &Error) {
    let policy = guard.record.options.policy.outage;
    let refusals = guard.health.worker_failures.backend_wait_attempts(policy);
    let name = &guard.mapping().name;
    let mut message = error.report();
    match refusals {
        Some(attempt) => {
            message = format!("waits for its backend: {message}");
            // An outage may last for days.
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
    match refusals {
        Some(attempt) => set_backoff(cx, guard, attempt),
        None => count_failure(cx, guard),
    }
    wake_later(cx, guard);
}

/// One more repair that failed or did not last; the next one waits the longer.
pub(crate) fn count_failure(cx: &Context, guard: &mut Guard) {
    if guard.health.working_since.take().is_some_and(|since| since.elapsed() > RECOVERED_AFTER) {
        guard.health.failures = 0;
        guard.health.unserved_since = None;
    }
    guard.health.failures = guard.health.failures.saturating_add(1);
    set_backoff(cx, guard, guard.health.failures);
}

/// The first repair is immediate: its cause is most likely past. The others wait ever longer.
fn set_backoff(cx: &Context, guard: &mut Guard, attempts: u32) {
    if attempts > 1 {
        let (first, most) = (Duration::from_millis(100), Duration::from_secs(10));
        let wait = cx.random.backoff(attempts - 1, first, most);
        guard.health.retry_at = Some(Instant::now() + wait);
    }
}

/// Has the mapping looked at when its time has come.
pub(crate) fn wake_later(cx: &Context, guard: &mut Guard) {
    let (name, work_queue) = (guard.mapping().name.clone(), cx.work_queue.clone());
    let at = guard.health.retry_at.unwrap_or_else(|| Instant::now() + Duration::from_secs(1));
    tokio::spawn(async move {
        tokio::time::sleep_until(at).await;
        let _ = work_queue.try_send(name);
    });
}
