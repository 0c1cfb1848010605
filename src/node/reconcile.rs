//! Brings a mapping to its desired state: observe, plan, act, and observe again, under its guard.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::actions;
use crate::context::Context;
use crate::holders::{TRANSIENT_TIMEOUT, in_use_error, is_transient, or_by_force};
use crate::mapping::{Guard, Mapping};
use crate::observe::observe;
use crate::planner::{Action, State, plan};
use crate::records::store_again;
use crate::retry::{after_failure, wake_later};
use crate::status::publish_state;
use crate::unlock;
use cleat_core::error::{Error, ErrorKind, Result};

/// The maximum number of plans in one reconcile. More of them mean an error in the planner or in the
/// observed state.
const MAX_ROUNDS: u32 = 8;

/// The maximum number of attempts of an operation that a user waits for.
const MAX_ATTEMPTS: u32 = 4;

/// The timeout of one attempt to repair a mapping.
const REPAIR_TIMEOUT: Duration = Duration::from_secs(60);

/// Reconciles a mapping after an event or a sweep. Does nothing if a call holds the guard: the end of the
/// call schedules another reconcile.
pub(crate) async fn reconcile_in_background(cx: &Context, mapping: &Arc<Mapping>) {
    let Some(mut guard) = mapping.try_lock_in_background() else { return };
    if guard.teardown.removed {
        return;
    }
    let reconciled = mapping.until_forced(async {
        reconcile_locked(cx, &mut guard).await;
        Ok(())
    });
    if let Err(error) = reconciled.await {
        tracing::info!(mapping = mapping.name, "{}", error.report());
    }
}

async fn reconcile_locked(cx: &Context, guard: &mut Guard) {
    if guard.health.retry_at.is_some_and(|at| at > Instant::now()) {
        return wake_later(cx, guard);
    }
    guard.health.retry_at = None;
    store_again(cx, guard).await;
    let deadline =
        Instant::now() + REPAIR_TIMEOUT + unlock::extra_open_time(cx.registry, &guard.record.uri);
    match reconcile(cx, guard, deadline).await {
        Ok(State::Failed(failure)) => {
            tracing::debug!(mapping = guard.mapping().name, "failed: {}", failure.message);
        }
        Ok(_) => {}
        Err(error) => after_failure(cx, guard, &error),
    }
}

/// Observes, plans and acts until the plan contains no actions. Returns the final state.
///
/// # Errors
/// Returns the first error of an observation or an action. Completed actions are not undone.
pub(crate) async fn reconcile(cx: &Context, guard: &mut Guard, deadline: Instant) -> Result<State> {
    // A failure of an earlier call does not count for this one.
    guard.mapping().recorded.take_failure();
    for _ in 0..MAX_ROUNDS {
        let observed = observe(cx, guard, deadline).await?;
        let plan = plan(&guard.record, &observed);
        publish_state(cx, guard, &plan.state, &observed);
        if plan.actions.is_empty() {
            return Ok(plan.state);
        }
        // The observation found a dead worker again. No call waits for the next one, so the backoff
        // applies.
        if guard.is_background() && guard.health.retry_at.is_some_and(|at| at > Instant::now()) {
            wake_later(cx, guard);
            return Ok(plan.state);
        }
        for action in plan.actions {
            tracing::debug!(mapping = guard.mapping().name, ?action, "runs an action");
            cx.point(&format!("before {action:?}")).await;
            guard.step_begins(action);
            let began = Instant::now();
            actions::run(cx, guard, action, deadline).await?;
            tracing::debug!(?action, took_us = began.elapsed().as_micros(), "has run an action");
            guard.step_ends();
            if action == Action::RemoveRecord {
                return Ok(State::Unmapped);
            }
        }
        cx.point("after a plan").await;
    }
    let message = format!(
        "internal: {} is not in a final state after {MAX_ROUNDS} plans",
        guard.mapping().name
    );
    Err(Error::new(ErrorKind::Internal, message))
}

/// Reconciles as [`reconcile`] does, and retries after a temporary error, [`MAX_ATTEMPTS`] times in all.
///
/// # Errors
/// Returns the error of the last attempt.
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
        tracing::info!(mapping = guard.mapping().name, "retrying: {}", error.report());
        sleep(wait).await;
        attempt += 1;
    }
}

/// Unmaps a mapping whose record has the intent to unmap. Waits [`TRANSIENT_TIMEOUT`] for udev probes.
///
/// # Errors
/// Returns `InUse`, with the holders, if the device has any, and otherwise the error of the last attempt.
pub(crate) async fn take_down(cx: &Context, guard: &mut Guard, deadline: Instant) -> Result<()> {
    let transient_deadline = deadline.min(Instant::now() + TRANSIENT_TIMEOUT);
    loop {
        match reconcile_with_retries(cx, guard, deadline).await? {
            State::Unmapped => return Ok(()),
            // udev probes a device after every change of it and closes it soon.
            State::Held(holders)
                if holders.iter().all(is_transient) && Instant::now() < transient_deadline =>
            {
                sleep(Duration::from_millis(50)).await;
            }
            State::Held(holders) => {
                let name = &guard.mapping().name;
                return Err(or_by_force(in_use_error(name, &holders), name));
            }
            State::Failed(failure) => return Err(failure.into_error()),
            other => {
                let message = format!("internal: the unmap ended in state {other:?}");
                return Err(Error::new(ErrorKind::Internal, message));
            }
        }
    }
}

/// Returns whether another attempt may succeed soon.
fn is_temporary(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::Unavailable | ErrorKind::Aborted)
}
