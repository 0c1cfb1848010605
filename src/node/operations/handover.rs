//! A planned hand-over: a worker of the build at hand succeeds the one that serves, and the device
//! waits only from the moment that the old one's connections rest until the new one reads.
//!
//! The order, which makes every crash recoverable: the new process is recorded beside the old one
//! before it is told anything; it opens the volume and is found to answer before the old one is asked
//! for anything that costs time. Who serves is decided by the handover word (`statistics::handover`), and how it
//! ends by the planner, which looks at it: forwards, ending the old worker, or backwards, ending the
//! new one.

use std::os::fd::OwnedFd;
use std::time::Duration;

use tokio::time::Instant;

use crate::actions::wait_for_connections;
use crate::context::Context;
use crate::mapping::Guard;
use crate::planner::State;
use crate::reconcile::reconcile;
use crate::records::store;
use crate::unlock::{self, unlock_permit};
use crate::worker_start::{device_properties, no_worker, start_message, start_permit, within};
use crate::workers::{Launched, unexpected};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_worker::protocol::{FromWorker, ToWorker};

/// For the new worker to open the volume.
const OPEN_LIMIT: Duration = Duration::from_secs(20);

/// For the old worker to bring its connections to rest; what the backend does not finish in this
/// time keeps the volume where it is.
const REST_LIMIT: Duration = Duration::from_secs(2);

/// For an answer that should come at once.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);

/// Has a new worker succeed the one that serves. The mapping must be at rest. Returns how long
/// nobody served.
///
/// # Errors
/// Anything; then the old worker serves on, unless the error's report says otherwise.
pub(crate) async fn hand_over(
    cx: &Context,
    guard: &mut Guard,
    deadline: Instant,
) -> Result<Duration> {
    let old = guard.worker.as_ref().ok_or_else(|| no_worker(&guard.record))?;
    let until = within(deadline, ANSWER_LIMIT);
    let (answer, prepared) = old.exchange(ToWorker::PrepareHandover, Vec::new(), until).await?;
    if answer != FromWorker::HandoverPrepared {
        return Err(unexpected(&answer));
    }
    let unlocking = unlock_permit(cx, guard, deadline).await?;
    let turn = start_permit(cx, deadline).await?;
    let launched = cx.workers.launch().await?;
    cx.point("successor launched").await;
    record_successor(cx, guard, &launched).await?;
    cx.point("successor recorded").await;
    let passed = start_successor(cx, guard, launched, prepared, deadline).await;
    drop((turn, unlocking));
    if passed.is_ok() {
        wait_for_connections(guard).await;
    }
    cx.point("passed or not").await;
    // Forwards or backwards, by what is to be seen.
    let state = reconcile(cx, guard, deadline).await;
    match (passed, state) {
        (Ok(pause), Ok(State::Mapped)) => Ok(pause),
        (Err(error), Ok(State::Mapped)) => Err(error),
        (Err(error), Ok(State::Failed(failure))) => {
            let message = format!("{}; after that: {}", error.report(), failure.message);
            Err(Error::new(error.kind(), message).with_repair(failure.repair))
        }
        (Ok(_), Ok(State::Failed(failure))) => Err(failure.into_error()),
        (_, Ok(state)) => {
            let message = format!("the hand-over came to rest in {state:?}");
            Err(Error::new(ErrorKind::Internal, message))
        }
        (Ok(_), Err(after)) => Err(after),
        (Err(error), Err(after)) => {
            let message = format!("{}; after that: {}", error.report(), after.report());
            Err(Error::new(error.kind(), message))
        }
    }
}

async fn record_successor(cx: &Context, guard: &mut Guard, launched: &Launched) -> Result<()> {
    let before = guard.record.clone();
    guard.record.generation += 1;
    guard.record.predecessor = guard.record.worker;
    guard.record.worker = Some(launched.id());
    // Together with the record: this may be cut off while it is being stored.
    guard.predecessor = guard.worker.take();
    let stored = store(cx, guard).await;
    if stored.is_err() {
        guard.record = before;
        guard.worker = guard.predecessor.take();
    }
    stored
}

/// From the start of the new process to the moment that it serves.
async fn start_successor(
    cx: &Context,
    guard: &mut Guard,
    launched: Launched,
    prepared: Vec<OwnedFd>,
    deadline: Instant,
) -> Result<Duration> {
    let start = start_message(cx, &guard.record, true);
    let page = guard.statistics.clone();
    let until =
        within(deadline, OPEN_LIMIT + unlock::extra_open_time(cx.registry, &guard.record.uri));
    let started = cx.workers.start(launched, start, page, prepared, until).await;
    let new = started.map_err(|failed| failed.error)?;
    let volume = device_properties(&guard.record, &new.ready);
    let before = guard.record.volume;
    // From here on the planner ends it, where this comes to nothing.
    let new = guard.worker.insert(new);
    let volume = volume?;
    if before.is_some_and(|before| volume.size < before.size) {
        let message = "the new worker finds the volume smaller than its device";
        return Err(Error::new(ErrorKind::Internal, message));
    }
    cx.point("successor ready").await;
    // Before the device has to wait for it.
    new.call(ToWorker::Ping, Vec::new(), within(deadline, ANSWER_LIMIT)).await?;
    cx.point("before the pause").await;
    switch(cx, guard).await
}

/// The only part in which the device waits.
async fn switch(cx: &Context, guard: &Guard) -> Result<Duration> {
    let (Some(old), Some(new)) = (&guard.predecessor, &guard.worker) else {
        return Err(no_worker(&guard.record));
    };
    let began = Instant::now();
    let limit_ms = u32::try_from(REST_LIMIT.as_millis()).unwrap_or(u32::MAX);
    let rest = ToWorker::OfferHandover { generation: guard.record.generation, limit_ms };
    let rested = old.exchange(rest, Vec::new(), began + REST_LIMIT + ANSWER_LIMIT).await?;
    cx.point("at rest").await;
    let (FromWorker::HandoverOffered { unread, state }, descriptors) = rested else {
        return Err(unexpected(&rested.0));
    };
    let take = ToWorker::TakeOver { unread, state };
    let taken = new.call(take, descriptors, Instant::now() + ANSWER_LIMIT).await;
    let pause = began.elapsed();
    cx.point("taken over").await;
    if let Err(error) = taken {
        // At once: nobody serves. Where the new one was faster all the same, the old one ends.
        let until = Instant::now() + ANSWER_LIMIT;
        let _ = old.call(ToWorker::CancelHandover, Vec::new(), until).await;
        let page = guard.statistics.as_ref();
        if !page.is_some_and(|page| page.is_handed_over_to(guard.record.generation)) {
            return Err(error);
        }
        tracing::warn!(mapping = guard.record.name, "taken over late: {}", error.report());
        return Ok(began.elapsed());
    }
    Ok(pause)
}
