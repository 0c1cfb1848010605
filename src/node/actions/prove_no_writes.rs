//! Proves that the backend executes no request of a worker that has ended.

use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout_at};

use super::stop_worker::FORCED_STOP_GRACE;
use crate::context::Context;
use crate::credentials::open_credentials;
use crate::mapping::Guard;
use crate::records::store;
use crate::unlock;
use crate::worker_start::start_message;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_worker_protocol::protocol::Start;

/// The delay before the second attempt to take the claim. It doubles with each attempt, because each starts a
/// process.
const FIRST_RETRY_DELAY: Duration = Duration::from_millis(20);

/// The maximum delay between two attempts.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(1);

/// Opens the volume for writing, and closes it again.
///
/// Requests of a process may outlive it, in the kernel's block layer or on their way to the storage. Its
/// claim is released only after them. If the volume can be opened for writing, they have therefore ended.
///
/// # Errors
/// Returns `TimedOut` if the claim is not free at `deadline`.
pub(crate) async fn prove_no_writes(
    cx: &Context,
    guard: &mut Guard,
    deadline: Instant,
) -> Result<()> {
    let record = &guard.record;
    // Content in memory ended with the worker, and the storage rejects the writes of a fenced worker.
    let outlives = record.volume.as_ref().is_some_and(|volume| volume.outlives_worker);
    let harmless = record.options.read_only || record.fenced || !outlives;
    if guard.teardown.no_writes_proved || record.worker.is_none() || harmless {
        return Ok(());
    }
    let mut delay = FIRST_RETRY_DELAY;
    loop {
        match claim_once(cx, guard, deadline).await {
            Ok(()) => break,
            // The URI leads to no volume or to another one, on which no request of the ended worker is. A new
            // mapping of the volume under another name has to claim it.
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Replaced) => {
                break;
            }
            Err(error) if error.kind() == ErrorKind::InUse && Instant::now() < deadline => {
                guard.note(error.report());
                sleep_until(deadline.min(Instant::now() + delay)).await;
                delay = MAX_RETRY_DELAY.min(delay * 2);
            }
            Err(error) if matches!(error.kind(), ErrorKind::InUse | ErrorKind::TimedOut) => {
                let message = "requests of the ended worker may still be in flight";
                return Err(Error::new(ErrorKind::TimedOut, message)
                    .with_source(error.report())
                    .with_repair("check the storage of the volume: it does not answer"));
            }
            // No client can open the volume, so no client is harmed. But nothing is proved.
            Err(error) => {
                guard.set_unproven(error.report());
                break;
            }
        }
    }
    guard.teardown.no_writes_proved = true;
    Ok(())
}

/// Starts a worker that opens the volume and takes the claim, and stops it again.
async fn claim_once(cx: &Context, guard: &mut Guard, deadline: Instant) -> Result<()> {
    let uri = unlock::without_content_key(cx.registry, &guard.record.uri);
    // A missing volume is a proof (`NotFound`); a missing file is not.
    let credentials = open_credentials(cx, &uri, deadline)
        .await
        .map_err(|error| Error::new(ErrorKind::Unavailable, error.report()))?;
    let launched = cx.workers.launch().await?;
    // As every worker, this one is recorded so that it can be found and ended after a crash.
    guard.record.generation += 1;
    guard.record.worker = Some(launched.id());
    // A journal that does not answer says nothing about the claim.
    store(cx, guard).await.map_err(|error| Error::new(ErrorKind::Unavailable, error.report()))?;
    let start = start_message(cx, &guard.record, false);
    let start = Start { uri, credentials: credentials.paths, ..start };
    let starting = cx.workers.start(launched, start, None, credentials.descriptors, deadline);
    let started = timeout_at(deadline, starting);
    let late = |_| Error::new(ErrorKind::TimedOut, "opening the volume timed out");
    let worker = started.await.map_err(late)?.map_err(|start_failed| start_failed.error)?;
    worker.stop(FORCED_STOP_GRACE, deadline).await
}
