//! Actions that only write the record.

use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use crate::context::Context;
use crate::mapping::Guard;
use crate::planner::Intent;
use crate::records::store;
use crate::status::sync_failure;
use crate::worker_start::within;
use cleat_core::error::{Error, ErrorKind, Result};

/// The timeout for recording a forced intent. Later records of the mapping are written after it.
const RECORD_TIMEOUT: Duration = Duration::from_secs(1);

/// Records that the mapping has been created. From here on, a missing device is a failure.
pub(crate) async fn record_mapped(cx: &Context, guard: &mut Guard) -> Result<()> {
    guard.record.established = true;
    let stored = store(cx, guard).await;
    guard.record.established = stored.is_ok();
    stored
}

/// Records that another client owns the volume.
pub(crate) async fn record_fenced(cx: &Context, guard: &mut Guard) -> Result<()> {
    guard.record.fenced = true;
    let stored = store(cx, guard).await;
    guard.record.fenced = stored.is_ok();
    stored
}

/// Records that a sync of the volume has failed. If the journal cannot be written, the workers of this
/// supervisor get the failure from the record in memory, and the record is written again later.
pub(crate) async fn record_sync_failed(cx: &Context, guard: &mut Guard) {
    guard.record.sync_failed = true;
    let name = &guard.record.name;
    tracing::error!(mapping = name, "{}", sync_failure(name));
    if let Err(error) = store(cx, guard).await {
        tracing::warn!(mapping = name, "cannot record the failed sync: {}", error.report());
        guard.mapping().store_again_later();
    }
}

/// Records that a worker has found another volume in place of the mapping's volume, if `error` says so.
///
/// A record that cannot be written stays changed in memory, so that this supervisor starts no other worker.
/// The next supervisor starts one, which finds the same.
pub(crate) async fn record_if_replaced(cx: &Context, guard: &mut Guard, error: &Error) {
    if error.kind() != ErrorKind::Replaced {
        return;
    }
    tracing::error!(mapping = guard.mapping().name, "the volume was replaced: {}", error.report());
    guard.record.replaced = Some(error.report());
    if let Err(error) = store(cx, guard).await {
        let mapping = &guard.mapping().name;
        tracing::warn!(mapping, "cannot record the replaced volume: {}", error.report());
    }
}

/// Records that the mapping is being removed.
///
/// # Errors
/// Returns an error if the record cannot be written. A forced unmap continues without it and gets none.
pub(crate) async fn record_unmapping(
    cx: &Context,
    guard: &mut Guard,
    deadline: Instant,
) -> Result<()> {
    if matches!(guard.record.intent, Intent::Forced(_)) {
        try_record_intent(cx, guard, within(deadline, RECORD_TIMEOUT)).await;
        return Ok(());
    }
    record_intent(cx, guard).await
}

/// Writes the record, unless the intent is recorded already.
pub(crate) async fn record_intent(cx: &Context, guard: &mut Guard) -> Result<()> {
    if guard.teardown.recorded {
        return Ok(());
    }
    // A map that failed before its worker was recorded has no record, and needs none.
    if guard.record.worker.is_some() {
        store(cx, guard).await?;
    }
    guard.teardown.recorded = true;
    Ok(())
}

/// Never fails: a journal error must not block a forced unmap.
pub(crate) async fn try_record_intent(cx: &Context, guard: &mut Guard, deadline: Instant) {
    let cause = match timeout_at(deadline, record_intent(cx, guard)).await {
        Ok(Ok(())) => return,
        Ok(Err(error)) => error.report(),
        Err(_) => "writing the journal timed out".to_owned(),
    };
    tracing::warn!(mapping = guard.mapping().name, "cannot record the forced unmap: {cause}");
    guard.note(format!("{cause}; a daemon that restarts before its end does not go on with it"));
}
