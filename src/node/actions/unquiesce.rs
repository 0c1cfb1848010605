//! Ends the quiescing of a device for a snapshot.

use std::time::Duration;

use tokio::time::Instant;

use super::quiesce::run_hook;
use crate::context::Context;
use crate::mapping::{AnsweredSnapshot, Guard, Guarded};
use crate::planner::Intent;
use crate::records::store_eventually;
use crate::worker_start::within;
use cleat_core::error::Result;

/// The timeout for a thaw. A thaw that takes longer continues on its thread.
const THAW_TIMEOUT: Duration = Duration::from_secs(5);

/// The timeout for a thaw in a forced unmap.
const FORCED_THAW_TIMEOUT: Duration = Duration::from_millis(500);

/// The delay before a deferred thaw is retried.
const RETRY_DELAY: Duration = Duration::from_secs(5);

/// Ends the quiescing of a mapping's device. If this fails and the mapping stays, it is deferred.
///
/// # Errors
/// Returns the error of the thaw if the mapping is to be removed.
pub(crate) async fn unquiesce(cx: &Context, guard: &mut Guard, deadline: Instant) -> Result<()> {
    let by_hook = guard.record.quiesced.as_ref().is_some_and(|quiesced| quiesced.hook.is_some());
    let limit = match guard.record.intent {
        Intent::Forced(_) => FORCED_THAW_TIMEOUT,
        Intent::Mapped | Intent::Unmapped if by_hook => cx.settings.quiesce.limit,
        Intent::Mapped | Intent::Unmapped => THAW_TIMEOUT,
    };
    let early = early_end_reason(guard);
    let thawed = unquiesce_device(cx, guard, within(deadline, limit)).await;
    let name = guard.record.name.clone();
    match thawed {
        Ok(()) => {
            guard.quiesce.retry_at = None;
            tracing::info!(mapping = name, "the device is no longer quiesced");
            if let Some(reason) = early {
                let warning = format!("its last snapshot may not be consistent: {reason}");
                tracing::warn!(mapping = name, "{warning}");
                guard.quiesce.warning = Some(warning);
            } else if guard.quiesce.answered.is_some_and(|answered| answered.until.is_some()) {
                guard.quiesce.warning = None;
            }
            Ok(())
        }
        Err(error) if guard.record.intent == Intent::Mapped => {
            tracing::warn!(mapping = name, "cannot thaw the device yet: {}", error.report());
            let at = Instant::now() + RETRY_DELAY;
            guard.quiesce.retry_at = Some(at);
            cx.wake_at(&name, at);
            Ok(())
        }
        Err(error) => Err(error),
    }
}

/// Ends the quiescing during a forced unmap, because a frozen file system cannot be unmounted. A failure
/// is only noted in the report.
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
        // The mounted file systems must not stay frozen.
        let name = &guard.record.name;
        tracing::error!(mapping = name, "thawing without the hook: {}", error.report());
    }
    if !matches!(by_hook, Some(Ok(()))) {
        let until = deadline.max(Instant::now() + FORCED_THAW_TIMEOUT);
        let already_frozen = quiesced.already_frozen.clone();
        let thaw = move |k: &dyn cleat_kernel::Kernel, until| {
            k.thaw(index, &identity, &already_frozen, until)
        };
        cx.urgent.wait("thaw the file systems", until, None, thaw).await?;
    }
    cx.point("thawed").await;
    guard.record.quiesced = None;
    // A supervisor with the old record thaws again, which does no harm.
    store_eventually(cx, guard).await;
    Ok(())
}

/// Ends the quiescing of every mapping, because no supervisor would do it after this one has ended.
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
            tracing::error!(
                mapping = mapping.name,
                "the device stays quiesced: {}",
                error.report()
            );
        }
    }
}

/// Returns why the quiescing ends before the snapshot has been made; `None` if it does not.
fn early_end_reason(guarded: &Guarded) -> Option<&'static str> {
    let Some(AnsweredSnapshot { pid, snapshot, until }) = guarded.quiesce.answered else {
        return Some("the daemon that had quiesced the device has ended");
    };
    // The worker was told that the device is not quiesced.
    let until = until?;
    match &guarded.worker {
        Some(worker) if worker.id().pid == pid && !worker.has_ended() => {
            if worker.snapshot() != Some(snapshot) {
                return None;
            }
            Some(match Instant::now() < until {
                true => "the backend or the mapping was lost meanwhile",
                false => "it took longer than map.quiesce_deadline",
            })
        }
        _ => Some("the worker that had requested it has ended"),
    }
}
