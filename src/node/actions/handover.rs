//! The end of a handover: the predecessor is stopped, or becomes the worker again.

use tokio::time::Instant;

use super::stop_worker::end_worker;
use crate::context::Context;
use crate::mapping::Guard;
use crate::records::store_eventually;
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
    guard.record.predecessor = None;
    // A supervisor with the old record finds out that the predecessor has ended.
    store_eventually(cx, guard).await;
    Ok(())
}

/// Makes the predecessor the worker again, after the end of the new worker is proved.
pub(crate) async fn restore_predecessor(cx: &Context, guard: &mut Guard) {
    let page = guard.statistics.as_ref();
    if page.is_some_and(|page| page.is_handed_over_to(guard.record.generation)) {
        // The new worker took over before it ended. The next plan observes this.
        return;
    }
    guard.record.worker = guard.record.predecessor.take();
    guard.worker = guard.predecessor.take();
    // A supervisor with the old record finds out that the new worker has ended.
    store_eventually(cx, guard).await;
}
