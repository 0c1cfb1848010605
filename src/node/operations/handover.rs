//! A planned handover: a worker of the current build replaces the worker that serves. The device pauses
//! only from the moment at which the old worker has stopped its connections until the new one reads.
//!
//! The order makes every crash recoverable:
//! 1. The new process is recorded beside the old one before it receives a command.
//! 2. The new worker opens the volume, and answers a ping.
//! 3. Only then the old worker stops its connections.
//!
//! The handover word (`statistics::handover`) decides which worker serves. The planner reads it and ends
//! the handover: it stops the old worker, or the new one.

use std::os::fd::OwnedFd;
use std::time::Duration;

use tokio::time::Instant;

use crate::actions::wait_for_connections;
use crate::context::Context;
use crate::credentials::{OpenCredentials, open_credentials};
use crate::mapping::Guard;
use crate::planner::State;
use crate::reconcile::reconcile;
use crate::records::store;
use crate::unlock::{self, unlock_permit};
use crate::worker_start::{device_properties, no_worker, start_message, start_permit, within};
use crate::workers::{Launched, unexpected};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_worker_protocol::protocol::{FromWorker, Start, ToWorker};

/// The timeout for the new worker to open the volume.
const OPEN_TIMEOUT: Duration = Duration::from_secs(20);

/// How long the old worker may take to stop its connections. If the backend does not finish its requests in
/// this time, the old worker keeps the volume.
const OFFER_TIMEOUT: Duration = Duration::from_secs(2);

/// The timeout for an answer that needs no work.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// Replaces the worker of a mapping by a new one. No plan for the mapping may be pending. Returns how long
/// no worker served.
///
/// # Errors
/// Returns the error of the step that failed. The old worker then continues to serve, unless the error
/// says otherwise.
pub(crate) async fn hand_over(
    cx: &Context,
    guard: &mut Guard,
    deadline: Instant,
) -> Result<Duration> {
    let old = guard.worker.as_ref().ok_or_else(|| no_worker(&guard.record))?;
    let until = within(deadline, ANSWER_TIMEOUT);
    let (answer, prepared) = old.exchange(ToWorker::PrepareHandover, Vec::new(), until).await?;
    if answer != FromWorker::HandoverPrepared {
        return Err(unexpected(&answer));
    }
    let unlock_permit = unlock_permit(cx, guard, deadline).await?;
    let credentials = open_credentials(cx, &guard.record.uri, deadline).await?;
    let start_permit = start_permit(cx, deadline).await?;
    let launched = cx.workers.launch().await?;
    cx.point("successor launched").await;
    record_successor(cx, guard, &launched).await?;
    cx.point("successor recorded").await;
    let handed_over = start_successor(cx, guard, launched, credentials, prepared, deadline).await;
    drop((start_permit, unlock_permit));
    if handed_over.is_ok() {
        wait_for_connections(guard).await;
    }
    cx.point("handed over or failed").await;
    // The planner ends the handover according to the handover word.
    let state = reconcile(cx, guard, deadline).await;
    match (handed_over, state) {
        (Ok(pause), Ok(State::Mapped)) => Ok(pause),
        (Err(error), Ok(State::Mapped)) => Err(error),
        (Err(error), Ok(State::Failed(failure))) => {
            let message = format!("{}; after that: {}", error.report(), failure.message);
            Err(Error::new(error.kind(), message).with_repair(failure.repair))
        }
        (Ok(_), Ok(State::Failed(failure))) => Err(failure.into_error()),
        (_, Ok(state)) => {
            let message = format!("internal: the handover ended in state {state:?}");
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
    // Changed together with the record, because this function may be cancelled while the record is written.
    guard.predecessor = guard.worker.take();
    let stored = store(cx, guard).await;
    if stored.is_err() {
        guard.record = before;
        guard.worker = guard.predecessor.take();
    }
    stored
}

/// Starts the volume in the new process, and switches to it. Returns the pause of the device.
async fn start_successor(
    cx: &Context,
    guard: &mut Guard,
    launched: Launched,
    credentials: OpenCredentials,
    prepared: Vec<OwnedFd>,
    deadline: Instant,
) -> Result<Duration> {
    let OpenCredentials { paths, mut descriptors, .. } = credentials;
    descriptors.extend(prepared);
    let start = Start { credentials: paths, ..start_message(cx, &guard.record, true) };
    let page = guard.statistics.clone();
    let until =
        within(deadline, OPEN_TIMEOUT + unlock::extra_open_time(cx.registry, &guard.record.uri));
    let started = cx.workers.start(launched, start, page, descriptors, until).await;
    let new = started.map_err(|failed| failed.error)?;
    let volume = device_properties(&guard.record, &new.ready);
    let before = guard.record.volume.clone();
    // From here on, the planner stops the new worker if the handover fails.
    let new = guard.worker.insert(new);
    let volume = volume?;
    if before.is_some_and(|before| volume.size < before.size) {
        let message = "in the new worker the volume is smaller than its device";
        return Err(Error::new(ErrorKind::Internal, message));
    }
    cx.point("successor ready").await;
    // The device does not pause for a new worker that does not answer.
    new.call(ToWorker::Ping, Vec::new(), within(deadline, ANSWER_TIMEOUT)).await?;
    cx.point("before the pause").await;
    switch(cx, guard).await
}

/// Passes the connections from the old worker to the new one. The device pauses only here.
async fn switch(cx: &Context, guard: &Guard) -> Result<Duration> {
    let (Some(old), Some(new)) = (&guard.predecessor, &guard.worker) else {
        return Err(no_worker(&guard.record));
    };
    let began = Instant::now();
    let limit_ms = u32::try_from(OFFER_TIMEOUT.as_millis()).unwrap_or(u32::MAX);
    let offer = ToWorker::OfferHandover { generation: guard.record.generation, limit_ms };
    let offered = old.exchange(offer, Vec::new(), began + OFFER_TIMEOUT + ANSWER_TIMEOUT).await?;
    cx.point("handover offered").await;
    let (FromWorker::HandoverOffered { unread, state }, descriptors) = offered else {
        return Err(unexpected(&offered.0));
    };
    let take = ToWorker::TakeOver { unread, state };
    let taken = new.call(take, descriptors, Instant::now() + ANSWER_TIMEOUT).await;
    let pause = began.elapsed();
    cx.point("taken over").await;
    if let Err(error) = taken {
        // No worker may be serving, so the old one resumes at once. If the new worker has taken over
        // nevertheless, the old one does not resume.
        let until = Instant::now() + ANSWER_TIMEOUT;
        let _ = old.call(ToWorker::CancelHandover, Vec::new(), until).await;
        let page = guard.statistics.as_ref();
        if !page.is_some_and(|page| page.is_handed_over_to(guard.record.generation)) {
            return Err(error);
        }
        tracing::warn!(
            mapping = guard.record.name,
            "the new worker took over without an answer: {}",
            error.report()
        );
        return Ok(began.elapsed());
    }
    Ok(pause)
}
