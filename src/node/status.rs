//! Publishes the state of a mapping to everybody who reads or watches it.

use std::sync::Arc;
use std::time::UNIX_EPOCH;

use tokio::time::Instant;

use crate::context::Context;
use crate::holders::in_use_error;
use crate::mapping::{Change, Guard, Guarded, Mapping, OutageView, View};
use crate::planner::{Failure, Observed, State};
use cleat_core::error::Error;

/// Changes what everybody sees, and tells those who watch.
pub(crate) fn publish(
    cx: &Context,
    mapping: &Arc<Mapping>,
    change: impl FnOnce(&mut View),
) -> Option<View> {
    let view = mapping.update(change)?;
    // No receiver: nobody watches.
    let _ = cx.changes.send(Change { view: view.clone(), removed: false });
    Some(view)
}

pub(crate) fn publish_state(cx: &Context, guard: &mut Guard, state: &State, observed: &Observed) {
    let sound = *state == State::Mapped;
    match (sound, guard.health.working_since) {
        (true, None) => guard.health.working_since = Some(Instant::now()),
        (false, Some(_)) if matches!(state, State::Failed(_)) => guard.health.working_since = None,
        _ => {}
    }
    // An unmap that is refused changes nothing; that a failed map cannot be undone is told.
    if matches!(state, State::Held(_)) && !guard.teardown.recorded && guard.record.established {
        return;
    }
    let guarded: &Guarded = guard;
    let message = match state {
        State::Failed(failure) => with_repair_hint(failure),
        State::Held(holders) => in_use_error(&guarded.record.name, holders).message().to_owned(),
        State::Mapped => {
            let growth = guarded.resize_deferred.as_ref().map(|(_, why)| why.clone());
            let told = growth.or_else(|| guarded.upgrade_refusal.clone());
            told.or_else(|| guarded.quiesce.warning.clone()).unwrap_or_default()
        }
        _ => String::new(),
    };
    let keep = matches!(state, State::Recovering | State::Unmapping);
    let (record, paths) = (guarded.record.clone(), guarded.paths.clone());
    let serving = guarded.worker.as_ref();
    let worker_pid = serving.map_or(0, |worker| worker.id().pid);
    let worker_build = serving.map_or(String::new(), |worker| worker.ready.build.clone());
    let device = observed.devices.first().copied();
    let outage = outage_of(guarded);
    let last_exit = guarded.health.worker_failures.last_exit();
    let state = state.clone();
    let failed = matches!(state, State::Failed(_));
    if let Some(view) = publish(cx, guard.mapping(), |view| {
        if !(keep && view.state == state) {
            view.message = message;
        }
        log_outage(&record.name, view.outage.as_ref(), outage.as_ref());
        let holders = std::mem::take(&mut view.holders);
        let message = std::mem::take(&mut view.message);
        *view = View {
            record,
            state,
            message,
            device,
            paths,
            worker_pid,
            worker_build,
            holders,
            outage,
            last_exit,
        };
    }) && failed
    {
        tracing::error!(mapping = view.record.name, "failed: {}", view.message);
    }
}

pub(crate) fn publish_failure(cx: &Context, guard: &Guard, error: &Error) {
    let failure = Failure {
        kind: error.kind(),
        message: error.report(),
        repair: format!("cleat unmap {}", guard.mapping().name),
    };
    publish(cx, guard.mapping(), |view| {
        view.message = with_repair_hint(&failure);
        view.state = State::Failed(failure);
    });
}

/// The outage that a mapping's worker, or the attempts to start one, have met.
pub(crate) fn outage_of(guarded: &Guarded) -> Option<OutageView> {
    if let Some(worker) = &guarded.worker {
        let outage = worker.outage()?;
        let (since_unix_ms, reason) = (outage.since_unix_ms, outage.reason);
        return Some(OutageView { since_unix_ms, reason, queued: 0 });
    }
    let refusal = guarded.health.worker_failures.backend_failure()?;
    let since = refusal.since.duration_since(UNIX_EPOCH).unwrap_or_default();
    let since_unix_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
    Some(OutageView { since_unix_ms, reason: Some(refusal.reason.clone()), queued: 0 })
}

fn log_outage(name: &str, before: Option<&OutageView>, now: Option<&OutageView>) {
    match (before, now) {
        (None, Some(outage)) => tracing::warn!(
            mapping = name,
            reason = outage.reason.as_deref().unwrap_or("unknown"),
            "the backend does not answer"
        ),
        (Some(_), None) => tracing::info!(mapping = name, "the backend answers again"),
        _ => {}
    }
}

fn with_repair_hint(failure: &Failure) -> String {
    format!("{}; {}", failure.message, failure.repair)
}
