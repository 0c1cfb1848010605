//! Ends the quiescing of a device for a snapshot.

use std::time::Duration;

use tokio::time::Instant;

use super::quiesce::run_hook;
use crate::context::Context;
use crate::mapping::{Answered, Guard, Guarded};
use crate::planner::Intent;
use crate::records::store;
use crate::worker_start::within;
use cleat_core::error::Result;

/// For a thaw; what hangs goes on behind the scenes.
const THAW_LIMIT: Duration = Duration::from_secs(5);

/// The same where a forced unmap waits for it.
const FORCED_THAW_LIMIT: Duration = Duration::from_millis(500);

/// How soon a thaw that was put off is tried again.
const AGAIN_AFTER: Duration = Duration::from_secs(5);

/// Ends it.
///
/// # Errors
/// `TimedOut` where it cannot be done now, and the mapping is to go; else it is put off.
pub(crate) async fn unquiesce(cx: &Context, guard: &mut Guard, deadline: Instant) -> Result<()> {
    let by_hook = guard.record.quiesced.as_ref().is_some_and(|quiesced| quiesced.hook.is_some());
    let limit = match guard.record.intent {
        Intent::Forced(_) => FORCED_THAW_LIMIT,
        Intent::Mapped | Intent::Unmapped if by_hook => cx.settings.quiesce.limit,
        Intent::Mapped | Intent::Unmapped => THAW_LIMIT,
    };
    let early = why_early(guard);
    let thawed = unquiesce_device(cx, guard, within(deadline, limit)).await;
    let name = guard.record.name.clone();
    match thawed {
        Ok(()) => {
            guard.quiesce.retry_at = None;
            tracing::info!(mapping = name, "quiet no more");
            if let Some(why) = early {
                let why = format!("its last snapshot may not be consistent: {why}");
                tracing::warn!(mapping = name, "{why}");
                guard.quiesce.warning = Some(why);
            } else if guard.quiesce.answered.is_some_and(|answered| answered.until.is_some()) {
                guard.quiesce.warning = None;
            }
            Ok(())
        }
        Err(error) if guard.record.intent == Intent::Mapped => {
            tracing::warn!(mapping = name, "not thawed yet: {}", error.report());
            let at = Instant::now() + AGAIN_AFTER;
            guard.quiesce.retry_at = Some(at);
            cx.wake_at(&name, at);
            Ok(())
        }
        Err(error) => Err(error),
    }
}

/// Ends it on the way of a forced unmap: a file system that is frozen is not unmounted. A failure is
/// noted in the report.
pub(crate) async fn try_unquiesce(cx: &Context, guard: &mut Guard, deadline: Instant) {
    if let Err(error) = unquiesce(cx, guard, deadline).await {
        guard.note(error.report());
    }
}

async fn unquiesce_device(cx: &Context, guard: &mut Guard, deadline: Instant) -> Result<()> {
    let Some(quiesced) = guard.record.quiesced.clone() else { return Ok(()) };
    let (index, identity) = (quiesced.device, guard.record.identity());
    let by_hook = match quiesced.hook.clone() {
        Some(hook) => Some(run_hook(hook, index, "unquiesce", deadline).await),
        None => None,
    };
    if let Some(Err(error)) = &by_hook {
        // What is mounted is not to stay frozen.
        tracing::error!(mapping = guard.record.name, "thawed without it: {}", error.report());
    }
    if !matches!(by_hook, Some(Ok(()))) {
        let until = deadline.max(Instant::now() + FORCED_THAW_LIMIT);
        let already_frozen = quiesced.already_frozen.clone();
        let thaw = move |k: &dyn cleat_kernel::Kernel, until| {
            k.thaw(index, &identity, &already_frozen, until)
        };
        cx.urgent.wait("thaw the file systems", until, None, thaw).await?;
    }
    cx.point("thawed").await;
    guard.record.quiesced = None;
    let stored = store(cx, guard).await;
    if stored.is_err() {
        // Thawing once more does no harm.
        guard.record.quiesced = Some(quiesced);
    }
    stored
}

/// Ends it for every mapping: nobody would, once this supervisor is gone.
pub(crate) async fn unquiesce_all(cx: &Context, deadline: Instant) {
    for mapping in cx.register.all() {
        if mapping.view().record.quiesced.is_none() {
            continue;
        }
        let thawed = match mapping.try_lock() {
            Ok(mut guard) => unquiesce(cx, &mut guard, deadline).await,
            Err(error) => Err(error),
        };
        if let Err(error) = thawed {
            tracing::error!(mapping = mapping.name, "stays frozen: {}", error.report());
        }
    }
}

/// Why it ends before the snapshot has been made, where it does.
fn why_early(guarded: &Guarded) -> Option<&'static str> {
    let Some(Answered { pid, snapshot, until }) = guarded.quiesce.answered else {
        return Some("the daemon that had made it quiet has ended");
    };
    // Refused, and told so.
    let until = until?;
    match &guarded.worker {
        Some(worker) if worker.id().pid == pid && !worker.has_ended() => {
            if worker.snapshot() != Some(snapshot) {
                return None;
            }
            Some(match Instant::now() < until {
                true => "its backend or its mapping went away meanwhile",
                false => "it took longer than map.quiesce_deadline",
            })
        }
        _ => Some("the worker that had asked for it has ended"),
    }
}
