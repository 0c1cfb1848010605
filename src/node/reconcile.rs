//! Brings a mapping to what is wanted: observe, plan, act, and observe again, under its guard.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::actions;
use crate::context::Context;
use crate::holders::{TRANSIENT_LIMIT, in_use_error, is_transient, or_by_force};
use crate::mapping::{Guard, Mapping};
use crate::observe::observe;
use crate::planner::{Action, State, plan};
use crate::records::store_again;
use crate::retry::{after_failure, wake_later};
use crate::status::publish_state;
use crate::unlock;
use cleat_core::error::{Error, ErrorKind, Result};

/// Plans that may follow each other before something is wrong with the planner or the world.
const MAX_ROUNDS: u32 = 8;

/// Attempts at an operation that a user waits for.
const MAX_ATTEMPTS: u32 = 4;

/// For one attempt at a repair.
const REPAIR_LIMIT: Duration = Duration::from_secs(60);

/// Looks after a mapping by itself: after an event, or because it is time.
pub(crate) async fn reconcile_in_background(cx: &Context, mapping: &Arc<Mapping>) {
    let Some(mut guard) = mapping.try_lock_in_background() else { return };
    if guard.teardown.removed {
        return;
    }
    let tended = mapping.until_forced(async {
        reconcile_locked(cx, &mut guard).await;
        Ok(())
    });
    if let Err(error) = tended.await {
        tracing::info!(mapping = mapping.name, "{}", error.report());
    }
}

async fn reconcile_locked(cx: &Context, guard: &mut Guard) {
    if guard.health.retry_at.is_some_and(|at| at > Instant::now()) {
        return wake_later(cx, guard);
    }
    guard.health.retry_at = None;
    if let Err(error) = store_again(cx, guard).await {
        tracing::warn!(mapping = guard.mapping().name, "{}", error.report());
        wake_later(cx, guard);
    }
    let deadline =
        Instant::now() + REPAIR_LIMIT + unlock::extra_open_time(cx.registry, &guard.record.uri);
    match reconcile(cx, guard, deadline).await {
        Ok(State::Failed(failure)) => {
            tracing::debug!(mapping = guard.mapping().name, "failed: {}", failure.message);
        }
        Ok(_) => {}
        Err(error) => after_failure(cx, guard, &error),
    }
}

/// Look, plan, act, until the planner rests.
///
/// # Errors
/// The first failure; what has been done until then stays.
pub(crate) async fn reconcile(cx: &Context, guard: &mut Guard, deadline: Instant) -> Result<State> {
    for _ in 0..MAX_ROUNDS {
        let observed = observe(cx, guard, deadline).await?;
        let plan = plan(&guard.record, &observed);
        publish_state(cx, guard, &plan.state, &observed);
        if plan.actions.is_empty() {
            return Ok(plan.state);
        }
        // A worker that was just found dead, not for the first time: nobody waits for its successor
        // so urgently that one may be started after the other.
        if guard.is_background() && guard.health.retry_at.is_some_and(|at| at > Instant::now()) {
            wake_later(cx, guard);
            return Ok(plan.state);
        }
        for action in plan.actions {
            tracing::debug!(mapping = guard.mapping().name, ?action, "step");
            cx.point(&format!("before {action:?}")).await;
            guard.step_begins(action);
            actions::run(cx, guard, action, deadline).await?;
            guard.step_ends();
            if action == Action::RemoveRecord {
                return Ok(State::Unmapped);
            }
        }
        cx.point("after a plan").await;
    }
    let message = format!("{} does not come to rest", guard.mapping().name);
    Err(Error::new(ErrorKind::Internal, message))
}

/// As `converge`, with a few attempts where that may help.
pub(crate) async fn reconcile_with_retries(
    cx: &Context,
    guard: &mut Guard,
    deadline: Instant,
) -> Result<State> {
    let mut attempt = 1;
    loop {
        let error = match reconcile(cx, guard, deadline).await {
            Err(error) if is_temporary(error.kind()) && attempt < MAX_ATTEMPTS => error,
            other => return other,
        };
        let wait = cx.random.backoff(attempt, Duration::from_millis(50), Duration::from_secs(1));
        if Instant::now() + wait >= deadline {
            return Err(error);
        }
        tracing::info!(mapping = guard.mapping().name, "tried again: {}", error.report());
        sleep(wait).await;
        attempt += 1;
    }
}

/// Brings a mapping to nothing, or says who holds it.
pub(crate) async fn take_down(cx: &Context, guard: &mut Guard, deadline: Instant) -> Result<()> {
    let patience = deadline.min(Instant::now() + TRANSIENT_LIMIT);
    loop {
        match reconcile_with_retries(cx, guard, deadline).await? {
            State::Unmapped => return Ok(()),
            // udev looks at a device after every change of it; that passes.
            State::Held(holders)
                if holders.iter().all(is_transient) && Instant::now() < patience =>
            {
                sleep(Duration::from_millis(50)).await;
            }
            State::Held(holders) => {
                let name = &guard.mapping().name;
                return Err(or_by_force(in_use_error(name, &holders), name));
            }
            State::Failed(failure) => return Err(failure.into_error()),
            other => {
                let message = format!("unmap came to rest in {other:?}");
                return Err(Error::new(ErrorKind::Internal, message));
            }
        }
    }
}

/// Whether another attempt may succeed soon.
fn is_temporary(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::Unavailable | ErrorKind::Aborted)
}
