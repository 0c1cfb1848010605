//! Actions that only record a decision.

use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use crate::context::Context;
use crate::mapping::Guard;
use crate::planner::Intent;
use crate::records::store;
use crate::worker_start::within;
use cleat_core::error::Result;

/// For the journal to take the wish. Later ones of the mapping's records follow in order.
const RECORD_LIMIT: Duration = Duration::from_secs(1);

/// Records that the mapping has been made: from here on a missing device is a fault.
pub(crate) async fn record_mapped(cx: &Context, guard: &mut Guard) -> Result<()> {
    guard.record.established = true;
    let stored = store(cx, guard).await;
    guard.record.established = stored.is_ok();
    stored
}

/// Records that somebody else owns the volume.
pub(crate) async fn record_fenced(cx: &Context, guard: &mut Guard) -> Result<()> {
    guard.record.fenced = true;
    let stored = store(cx, guard).await;
    guard.record.fenced = stored.is_ok();
    stored
}

/// Records that the mapping is being taken down.
///
/// # Errors
/// When the record cannot be stored. By force it never fails.
pub(crate) async fn record_unmapping(
    cx: &Context,
    guard: &mut Guard,
    deadline: Instant,
) -> Result<()> {
    if matches!(guard.record.intent, Intent::Forced(_)) {
        try_record_intent(cx, guard, within(deadline, RECORD_LIMIT)).await;
        return Ok(());
    }
    record_intent(cx, guard).await
}

pub(crate) async fn record_intent(cx: &Context, guard: &mut Guard) -> Result<()> {
    if guard.teardown.recorded {
        return Ok(());
    }
    // Nothing was ever recorded of a map that failed early.
    if guard.record.worker.is_some() {
        store(cx, guard).await?;
    }
    guard.teardown.recorded = true;
    Ok(())
}

/// Never fails: that the journal cannot be written keeps nobody's device.
pub(crate) async fn try_record_intent(cx: &Context, guard: &mut Guard, deadline: Instant) {
    let why = match timeout_at(deadline, record_intent(cx, guard)).await {
        Ok(Ok(())) => return,
        Ok(Err(error)) => error.report(),
        Err(_) => "the disk of the journal does not answer".to_owned(),
    };
    tracing::warn!(mapping = guard.mapping().name, "force is not recorded: {why}");
    guard.note(format!("{why}; a daemon that is started before the end does not go on with it"));
}
