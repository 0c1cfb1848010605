//! The end of a handover: the predecessor is stopped, or becomes the worker again.

use tokio::time::Instant;

use super::stop_worker::end_worker;
use crate::context::Context;
use crate::mapping::Guard;
use crate::records::store;
use cleat_core::error::Result;

/// Ends the predecessor and removes it from the record.
pub(crate) async fn stop_predecessor(
    cx: &Context,
    guard: &mut Guard,
    deadline: Instant,
) -> Result<()> {
    let (worker, id) = (guard.predecessor.as_ref(), guard.record.predecessor);
    end_worker(cx, guard, worker, id, deadline).await?;
    guard.predecessor = None;
    let predecessor = guard.record.predecessor.take();
    let stored = store(cx, guard).await;
    if stored.is_err() {
        guard.record.predecessor = predecessor;
    }
    stored
}

/// Makes the predecessor the worker again, after the end of the new worker is proved.
pub(crate) async fn restore_predecessor(cx: &Context, guard: &mut Guard) -> Result<()> {
    let page = guard.statistics.as_ref();
    if page.is_some_and(|page| page.is_handed_over_to(guard.record.generation)) {
        // The new worker took over before it ended. The next plan observes this.
        return Ok(());
    }
    let before = guard.record.clone();
    guard.record.worker = guard.record.predecessor.take();
    guard.worker = guard.predecessor.take();
    let stored = store(cx, guard).await;
    if stored.is_err() {
        guard.record = before;
        guard.predecessor = guard.worker.take();
    }
    stored
}
