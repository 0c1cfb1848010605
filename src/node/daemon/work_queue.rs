//! The work queue: the mappings that are to be reconciled.

use std::collections::BTreeSet;
use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::context::Context;
use crate::reconcile::reconcile_in_background;

/// Reconciles the mappings in the queue, each in a separate task, so that one that hangs does not delay the
/// others. The guards limit them to one task per mapping.
pub(crate) async fn run(cx: Arc<Context>, mut work_queue: mpsc::Receiver<String>) {
    let mut reconciling = JoinSet::new();
    let mut batch = Vec::new();
    while work_queue.recv_many(&mut batch, 256).await > 0 {
        for name in batch.drain(..).collect::<BTreeSet<String>>() {
            let Some(mapping) = cx.register.get(&name) else { continue };
            let cx = Arc::clone(&cx);
            reconciling.spawn(async move { reconcile_in_background(&cx, &mapping).await });
        }
        while reconciling.try_join_next().is_some() {}
    }
}
