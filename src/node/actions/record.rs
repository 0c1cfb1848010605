//! Actions that only write the record.

use std::time::Duration;

use crate::context::Context;
use crate::mapping::{Guard, Place};
use crate::planner::Intent;
use crate::records::{store, store_eventually, store_within};
use crate::status::sync_failure;
use cleat_core::error::{Error, ErrorKind, Result};

/// The timeout of the state directory for recording a forced unmap.
const FORCED_TIMEOUT: Duration = Duration::from_millis(500);

/// The timeout of the state directory for recording an unmap.
const UNMAP_TIMEOUT: Duration = Duration::from_secs(2);

/// Records that the mapping has been created. From here on, a missing device is a failure.
pub(crate) async fn record_mapped(cx: &Context, guard: &mut Guard) -> Result<()> {
    guard.record.established = true;
    let stored = store(cx, guard).await;
    guard.record.established = stored.is_ok();
    stored
}

/// Records that another client owns the volume. If the journal cannot be written, this supervisor starts no
/// worker because of the record in memory, and a later one observes that the worker is fenced.
pub(crate) async fn record_fenced(cx: &Context, guard: &mut Guard) {
    guard.record.fenced = true;
    store_eventually(cx, guard).await;
}

/// Records that a sync of the volume has failed. If the journal cannot be written, the workers of this
/// supervisor get the failure from the record in memory, and the record is written again later.
pub(crate) async fn record_sync_failed(cx: &Context, guard: &mut Guard) {
    guard.record.sync_failed = true;
    let name = &guard.record.name;
    tracing::error!(mapping = name, "{}", sync_failure(name));
    store_eventually(cx, guard).await;
}

/// Records that a worker has found another volume in place of the mapping's volume, if `error` says so.
///
/// A record that cannot be written stays changed in memory, so that this supervisor starts no other worker,
/// and is written again later. A later supervisor without it starts a worker, which finds the same.
pub(crate) async fn record_if_replaced(cx: &Context, guard: &mut Guard, error: &Error) {
    if error.kind() != ErrorKind::Replaced {
        return;
    }
    tracing::error!(mapping = guard.mapping().name, "the volume was replaced: {}", error.report());
    guard.record.replaced = Some(error.report());
    store_eventually(cx, guard).await;
}

/// Records that the mapping is being removed, unless that is recorded already.
///
/// Never fails: the removal needs no record. If a supervisor starts after a crash in the middle of a removal
/// that is not recorded, it either repairs the mapping, or reports that the device is missing and removes the
/// mapping when a user unmaps it again.
pub(crate) async fn record_unmapping(cx: &Context, guard: &mut Guard) {
    if guard.teardown.recorded {
        return;
    }
    let limit = match guard.record.intent {
        Intent::Forced(_) => FORCED_TIMEOUT,
        Intent::Mapped | Intent::Unmapped => UNMAP_TIMEOUT,
    };
    // Before the write, because only then the record gets the new intent.
    guard.teardown.recorded = true;
    // A map that failed before its worker was recorded has no record, and needs none.
    if guard.record.worker.is_some()
        && let Err(error) = store_within(cx, guard, limit).await
    {
        guard.mapping().recorded.take_failure();
        let cause = error.report();
        tracing::warn!(mapping = guard.mapping().name, "cannot record the unmap: {cause}");
        guard
            .note(format!("{cause}; a daemon that restarts before its end does not go on with it"));
    } else if let Place::Copy(cause) = guard.mapping().recorded.place() {
        guard.note(format!("only in the runtime directory: {cause}"));
    }
}
