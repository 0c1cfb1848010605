//! Proves that the backend executes no request of a worker that has ended, and releases its claim.

use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout_at};

use super::stop_worker::{KILL_TIME, end_worker};
use crate::context::Context;
use crate::credentials::open_credentials;
use crate::holders::or_by_force;
use crate::mapping::Guard;
use crate::planner::{Intent, Record};
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

/// Opens the volume for writing, and closes it again, which releases the claim.
///
/// Requests of a process may outlive it, in the kernel's block layer or on their way to the storage. Its
/// claim is released only after them. If the volume can be opened for writing, they have therefore ended.
/// Nothing is left to prove if the worker has answered every request and has closed the volume itself.
///
/// # Errors
/// Returns `TimedOut` if the claim is not free at `deadline`.
pub(crate) async fn prove_no_writes(
    cx: &Context,
    guard: &mut Guard,
    deadline: Instant,
) -> Result<()> {
    if !may_have_claim(&guard.record) {
        return Ok(());
    }
    let claim_released = guard.teardown.volume_closed || !claim_outlives_process(cx, &guard.record);
    if guard.teardown.no_writes_proved && claim_released {
        return Ok(());
    }
    // If the worker has answered every request, only its claim is left. A storage that does not answer must not
    // keep the device for its sake: the next worker of this node takes the claim over.
    let only_claim = guard.teardown.no_writes_proved;
    let until = if only_claim { half_way_to(deadline) } else { deadline };
    let mut delay = FIRST_RETRY_DELAY;
    loop {
        match claim_once(cx, guard, until).await {
            Ok(()) => break,
            // The URI leads to no volume or to another one, on which no request of the ended worker is. A new
            // mapping of the volume under another name has to claim it.
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Replaced) => {
                break;
            }
            Err(error) if error.kind() == ErrorKind::InUse && Instant::now() < until => {
                guard.note(error.report());
                sleep_until(until.min(Instant::now() + delay)).await;
                delay = MAX_RETRY_DELAY.min(delay * 2);
            }
            Err(error)
                if only_claim && matches!(error.kind(), ErrorKind::InUse | ErrorKind::TimedOut) =>
            {
                guard.note(format!("its claim on the volume may stand: {}", error.report()));
                end_worker(cx, guard, None, guard.record.worker, deadline).await?;
                break;
            }
            Err(error) if matches!(error.kind(), ErrorKind::InUse | ErrorKind::TimedOut) => {
                let message =
                    "requests of the ended worker may still be in flight, or its claim may stand";
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
    // Also if the volume cannot be opened: a repetition would not release the claim either.
    guard.teardown.volume_closed = true;
    Ok(())
}

/// Releases the claim of a worker that has ended without closing the volume, for example because it was killed.
/// Starts no worker for a volume whose claim ends with the process.
///
/// # Errors
/// Returns an error if the volume cannot be opened and closed until `deadline`. The claim may stand then.
pub(crate) async fn release_claim(
    cx: &Context,
    guard: &mut Guard,
    deadline: Instant,
) -> Result<()> {
    let record = &guard.record;
    if guard.teardown.volume_closed
        || !may_have_claim(record)
        || !claim_outlives_process(cx, record)
    {
        return Ok(());
    }
    match claim_once(cx, guard, deadline).await {
        Ok(()) => {}
        // There is no volume, or another client has claimed it since.
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::NotFound | ErrorKind::Replaced | ErrorKind::InUse | ErrorKind::Fenced
            ) =>
        {
            let name = &guard.record.name;
            tracing::info!(mapping = name, "no claim to release: {}", error.report());
        }
        Err(error) => {
            let message = "the claim of its volume may stand, because it could not be released";
            let failed = Error::new(error.kind(), message).with_source(error.report());
            return Err(or_by_force(failed, &guard.record.name));
        }
    }
    guard.teardown.volume_closed = true;
    Ok(())
}

fn half_way_to(deadline: Instant) -> Instant {
    let now = Instant::now();
    now + deadline.saturating_duration_since(now) / 2
}

/// Returns whether workers of the mapping claim the volume, and whether a claim can outlive them. Content in
/// memory ends with the worker, and the storage rejects the writes of a fenced worker.
fn may_have_claim(record: &Record) -> bool {
    let outlives = record.volume.as_ref().is_some_and(|volume| volume.outlives_worker);
    record.worker.is_some() && outlives && !record.options.read_only && !record.fenced
}

/// Returns whether another process has to release the claim of a worker that has ended without doing so. The
/// kernel removes the lock of a file with its process.
fn claim_outlives_process(cx: &Context, record: &Record) -> bool {
    let volume = cx.registry.volume(&record.uri);
    volume.map_or(true, |volume| volume.spec().claim_outlives_process())
}

/// Starts a worker that takes the claim, and stops it again, which releases the claim. It opens the volume as well, unless
/// the unmap is forced.
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
    // To open a volume may take long: it may continue with what earlier workers have left. A forced unmap gives that up.
    let claim_only = matches!(guard.record.intent, Intent::Forced(_));
    let start = Start { uri, credentials: credentials.paths, claim_only, ..start };
    let starting = cx.workers.start(launched, start, None, credentials.descriptors, deadline);
    let started = timeout_at(deadline, starting);
    let late = |_| Error::new(ErrorKind::TimedOut, "opening the volume timed out");
    let worker = started.await.map_err(late)?.map_err(|start_failed| start_failed.error)?;
    let left = deadline.saturating_duration_since(Instant::now());
    worker.stop(left.saturating_sub(KILL_TIME), deadline).await?;
    if !worker.has_closed() {
        let message = "the volume was opened, and closing it timed out";
        return Err(Error::new(ErrorKind::TimedOut, message));
    }
    guard.teardown.volume_closed = true;
    Ok(())
}
