//! Proves that no request of a worker that has ended is still under way at the backend.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

use super::stop_worker::FORCED_STOP_GRACE;
use crate::context::Context;
use crate::mapping::Guard;
use crate::records::store;
use crate::unlock;
use crate::worker_start::start_message;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_worker::protocol::Start;

/// Between looks at a claim that is not free yet.
const CLAIM_PAUSE: Duration = Duration::from_millis(20);

/// Requests that a process has begun may outlive it, in the kernel's block layer or on their way
/// to the storage. What it had claimed is free only after them: so whoever can open the volume
/// for writing knows that they have ended.
pub(crate) async fn prove_no_writes(
    cx: &Context,
    guard: &mut Guard,
    deadline: Instant,
) -> Result<()> {
    let record = &guard.record;
    // What was kept in memory died with it; and the storage itself keeps out who is fenced.
    let outlives = record.volume.is_some_and(|volume| volume.outlives_worker);
    let harmless = record.options.read_only || record.fenced || !outlives;
    if guard.teardown.no_writes_proved || record.worker.is_none() || harmless {
        return Ok(());
    }
    loop {
        match claim_once(cx, guard, deadline).await {
            Ok(()) => break,
            Err(error) if error.kind() == ErrorKind::NotFound => break,
            Err(error) if error.kind() == ErrorKind::InUse && Instant::now() < deadline => {
                guard.note(error.report());
                sleep(CLAIM_PAUSE).await;
            }
            Err(error) if matches!(error.kind(), ErrorKind::InUse | ErrorKind::TimedOut) => {
                let message = "requests of the worker, which is gone, may be under way";
                return Err(Error::new(ErrorKind::TimedOut, message)
                    .with_source(error.report())
                    .with_repair("look after what the volume is stored in: it does not answer"));
            }
            // Nobody can open it, so nobody will be harmed; but it is not known.
            Err(error) => {
                guard.unproven(error.report());
                break;
            }
        }
    }
    guard.teardown.no_writes_proved = true;
    Ok(())
}

/// Opens the volume in a worker of its own, which takes the claim, and closes it again.
async fn claim_once(cx: &Context, guard: &mut Guard, deadline: Instant) -> Result<()> {
    let launched = cx.workers.launch().await?;
    // As for every worker: it can be found and ended after a crash.
    guard.record.generation += 1;
    guard.record.worker = Some(launched.id());
    store(cx, guard).await?;
    let start = start_message(cx, &guard.record, false);
    let start = Start { uri: unlock::without_content_key(cx.registry, &start.uri), ..start };
    let starting = cx.workers.start(launched, start, None, Vec::new(), deadline);
    let started = timeout_at(deadline, starting);
    let late = |_| Error::new(ErrorKind::TimedOut, "the volume did not open in time");
    let worker = started.await.map_err(late)?.map_err(|start_failed| start_failed.error)?;
    worker.stop(FORCED_STOP_GRACE, deadline).await
}
