//! Unmaps a volume whose device has no holders.

use std::sync::Arc;

use tokio::time::Instant;

use super::orphans::disconnect_orphan;
use crate::context::Context;
use crate::mapping::Guard;
use crate::planner::Intent;
use crate::reconcile::take_down;
use crate::records::store_eventually;
use crate::retry::after_failure;
use crate::status::publish;
use crate::target::{Target, find};
use cleat_core::error::{ErrorKind, Result};

/// Removes a mapping or an orphan. Returns whether there was one.
///
/// # Errors
/// Returns `InUse`, with the holders, if the device has any, and the cause if the data of the device cannot be
/// flushed. The mapping then stays as it is. After any other error, the unmap is retried in the background.
/// Returns `Unsupported` or `Unavailable` for a device whose record this build leaves in place.
pub(crate) async fn unmap(cx: &Context, target: &str, deadline: Instant) -> Result<bool> {
    let mapping = match find(cx, target, deadline).await? {
        Target::Mapping(mapping) => mapping,
        Target::Nothing => return Ok(false),
        Target::Orphan(index, identity) => {
            cx.unmanaged.check_device(&identity)?;
            return disconnect_orphan(cx, index, identity, deadline).await.map(|()| true);
        }
    };
    let guard = mapping.lock_for_call(deadline).await?;
    if guard.teardown.removed {
        return Ok(false);
    }
    mapping.until_forced(unmap_locked(cx, guard, deadline)).await.map(|()| true)
}

async fn unmap_locked(cx: &Context, mut guard: Guard, deadline: Instant) -> Result<()> {
    let mapping = Arc::clone(guard.mapping());
    let (intent, view) = (guard.record.intent, mapping.view());
    // A forced unmap that has begun stays a forced unmap.
    if intent == Intent::Mapped {
        guard.record.intent = Intent::Unmapped;
    }
    let Err(error) = take_down(cx, &mut guard, deadline).await else {
        tracing::info!(mapping = mapping.name, "unmapped");
        return Ok(());
    };
    if intent == Intent::Mapped && (!guard.teardown.recorded || error.kind() == ErrorKind::InUse) {
        guard.record.intent = Intent::Mapped;
        if guard.teardown.recorded {
            store_eventually(cx, &guard).await;
            guard.teardown.recorded = false;
        }
        publish(cx, &mapping, |now| *now = view);
        // Events may have been missed meanwhile.
        cx.wake(&mapping.name);
    } else {
        after_failure(cx, &mut guard, &error);
    }
    Err(error)
}
