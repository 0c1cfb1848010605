//! Publishes the state of mappings: to their views, and to the subscribers of changes.

use std::sync::Arc;
use std::time::UNIX_EPOCH;

use tokio::time::Instant;

use crate::context::Context;
use crate::holders::in_use_error;
use crate::mapping::{Change, Guard, Guarded, Mapping, OutageView, Place, View};
use crate::planner::{Failure, Observed, State};
use cleat_core::error::Error;
use cleat_core::space::SpaceUse;

/// Changes the view of a mapping and notifies the subscribers. Returns the new view, or `None` if the view
/// did not change.
pub(crate) fn publish(
    cx: &Context,
    mapping: &Arc<Mapping>,
    change: impl FnOnce(&mut View),
) -> Option<View> {
    let view = mapping.update(change)?;
    // An error means that there are no subscribers.
    let _ = cx.changes.send(Change { view: view.clone(), removed: false });
    Some(view)
}

/// Publishes the state that a plan found, with what was observed. Logs the start and the end of an outage.
pub(crate) fn publish_state(cx: &Context, guard: &mut Guard, state: &State, observed: &Observed) {
    let works = *state == State::Mapped;
    match (works, guard.health.working_since) {
        (true, None) => guard.health.working_since = Some(Instant::now()),
        (false, Some(_)) if matches!(state, State::Failed(_)) => guard.health.working_since = None,
        _ => {}
    }
    // A refused unmap does not change the state. A failed map that cannot be undone does.
    if matches!(state, State::Held(_)) && !guard.teardown.recorded && guard.record.established {
        return;
    }
    let guarded: &Guarded = guard;
    let message = match state {
        State::Failed(failure) => with_repair_hint(failure),
        State::Held(holders) => in_use_error(&guarded.record.name, holders).message().to_owned(),
        State::Mapped if guarded.record.sync_failed => sync_failure(&guarded.record.name),
        State::Mapped if guard.mapping().recorded.is_behind() => record_problem(guard),
        State::Mapped => {
            let resize = guarded.resize_deferred.as_ref().map(|(_, why)| why.clone());
            let refused = resize.or_else(|| guarded.upgrade_refusal.clone());
            refused.or_else(|| guarded.quiesce.warning.clone()).unwrap_or_default()
        }
        _ => String::new(),
    };
    let keeps_message = matches!(state, State::Recovering | State::Unmapping);
    let (record, paths) = (guarded.record.clone(), guarded.paths.clone());
    let worker = guarded.worker.as_ref();
    let worker_pid = worker.map_or(0, |worker| worker.id().pid);
    let worker_build = worker.map_or(String::new(), |worker| worker.ready.build.clone());
    let device = observed.devices.first().copied();
    let outage = outage_of(guarded);
    let last_exit = guarded.health.worker_failures.last_exit();
    let state = state.clone();
    let failed = matches!(state, State::Failed(_));
    if let Some(view) = publish(cx, guard.mapping(), |view| {
        if !(keeps_message && view.state == state) {
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
            unsaved_bytes: 0,
            space: SpaceUse::default(),
            last_exit,
        };
    }) && failed
    {
        tracing::error!(mapping = view.record.name, "failed: {}", view.message);
    }
}

/// Publishes that a mapping has failed with `error`.
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

/// Returns the outage that a mapping's worker reports, or that prevents the start of a worker.
pub(crate) fn outage_of(guarded: &Guarded) -> Option<OutageView> {
    if let Some(worker) = &guarded.worker {
        let outage = worker.outage()?;
        let (since_unix_ms, reason) = (outage.since_unix_ms, outage.reason);
        return Some(OutageView { since_unix_ms, reason, queued: 0 });
    }
    let failure = guarded.health.worker_failures.backend_failure()?;
    let since = failure.since.duration_since(UNIX_EPOCH).unwrap_or_default();
    let since_unix_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
    Some(OutageView { since_unix_ms, reason: Some(failure.reason.clone()), queued: 0 })
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

/// Describes a failed sync of a mapping's volume, and its repair.
pub(crate) fn sync_failure(name: &str) -> String {
    format!(
        "the storage of {name} failed to make written data durable: acknowledged writes may be lost, and every flush \
         fails from now on; check the storage (dmesg), unmount the device, run: cleat unmap --force {name}, map it \
         again, and check its file system (fsck)"
    )
}

/// Describes why the record of a mapping is not in the state directory.
fn record_problem(guard: &Guard) -> String {
    let name = &guard.record.name;
    match guard.mapping().recorded.place() {
        Place::StateDirectory => String::new(),
        Place::Copy(cause) => {
            format!(
                "the state directory does not take the record of {name}, which is kept in the runtime \
                 directory: {cause}"
            )
        }
        Place::Memory(cause) => {
            format!(
                "the record of {name} cannot be written, and a restart of the daemon would lose its last \
                 changes: {cause}"
            )
        }
    }
}

fn with_repair_hint(failure: &Failure) -> String {
    format!("{}; {}", failure.message, failure.repair)
}
