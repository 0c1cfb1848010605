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

use super::executor::Executor;
use super::mapping::State;
use super::steps::{no_worker, volume_of, within};
use super::unlocking;
use super::volume::Guard;
use super::workers::{Launched, unexpected};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_worker::protocol::{FromWorker, ToWorker};

/// For the new worker to open the volume.
const OPEN_LIMIT: Duration = Duration::from_secs(20);

/// For the old worker to bring its connections to rest; what the backend does not finish in this
/// time keeps the volume where it is.
const REST_LIMIT: Duration = Duration::from_secs(2);

/// For an answer that should come at once.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);

impl Executor {
    /// Has a new worker succeed the one that serves. The mapping must be at rest. Returns how long
    /// nobody served.
    ///
    /// # Errors
    /// Anything; then the old worker serves on, unless the error's report says otherwise.
    pub(super) async fn hand_over(&self, guard: &mut Guard, deadline: Instant) -> Result<Duration> {
        let old = guard.worker.as_ref().ok_or_else(|| no_worker(&guard.record))?;
        let until = within(deadline, ANSWER_LIMIT);
        let (answer, prepared) = old.exchange(ToWorker::PrepareHandover, Vec::new(), until).await?;
        if answer != FromWorker::HandoverPrepared {
            return Err(unexpected(&answer));
        }
        let unlocking = self.turn_to_unlock(guard, deadline).await?;
        let turn = self.turn_to_start(deadline).await?;
        let launched = self.workers.launch().await?;
        self.point("successor launched").await;
        self.record_successor(guard, &launched).await?;
        self.point("successor recorded").await;
        let passed = self.pass(guard, launched, prepared, deadline).await;
        drop((turn, unlocking));
        if passed.is_ok() {
            self.counted(guard).await;
        }
        self.point("passed or not").await;
        // Forwards or backwards, by what is to be seen.
        let state = self.converge(guard, deadline).await;
        match (passed, state) {
            (Ok(pause), Ok(State::Mapped)) => Ok(pause),
            (Err(error), Ok(State::Mapped)) => Err(error),
            (Err(error), Ok(State::Failed(trouble))) => {
                let message = format!("{}; after that: {}", error.report(), trouble.message);
                Err(Error::new(error.kind(), message).with_repair(trouble.repair))
            }
            (Ok(_), Ok(State::Failed(trouble))) => Err(trouble.into_error()),
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

    async fn record_successor(&self, guard: &mut Guard, launched: &Launched) -> Result<()> {
        let before = guard.record.clone();
        guard.record.generation += 1;
        guard.record.predecessor = guard.record.worker;
        guard.record.worker = Some(launched.id());
        // Together with the record: this may be cut off while it is being stored.
        guard.predecessor = guard.worker.take();
        let stored = self.store(guard).await;
        if stored.is_err() {
            guard.record = before;
            guard.worker = guard.predecessor.take();
        }
        stored
    }

    /// From the start of the new process to the moment that it serves.
    async fn pass(
        &self,
        guard: &mut Guard,
        launched: Launched,
        prepared: Vec<OwnedFd>,
        deadline: Instant,
    ) -> Result<Duration> {
        let start = self.start_message(&guard.record, true);
        let page = guard.statistics.clone();
        let until = within(deadline, OPEN_LIMIT + unlocking::patience(&guard.record.uri));
        let started = self.workers.start(launched, start, page, prepared, until).await;
        let new = started.map_err(|failed| failed.error)?;
        let volume = volume_of(&guard.record, &new.ready);
        let before = guard.record.volume;
        // From here on the planner ends it, where this comes to nothing.
        let new = guard.worker.insert(new);
        let volume = volume?;
        if before.is_some_and(|before| volume.size < before.size) {
            let message = "the new worker finds the volume smaller than its device";
            return Err(Error::new(ErrorKind::Internal, message));
        }
        self.point("successor ready").await;
        // Before the device has to wait for it.
        new.call(ToWorker::Ping, Vec::new(), within(deadline, ANSWER_LIMIT)).await?;
        self.point("before the pause").await;
        self.switch(guard).await
    }

    /// The only part in which the device waits.
    async fn switch(&self, guard: &Guard) -> Result<Duration> {
        let (Some(old), Some(new)) = (&guard.predecessor, &guard.worker) else {
            return Err(no_worker(&guard.record));
        };
        let began = Instant::now();
        let limit_ms = u32::try_from(REST_LIMIT.as_millis()).unwrap_or(u32::MAX);
        let rest = ToWorker::OfferHandover { generation: guard.record.generation, limit_ms };
        let rested = old.exchange(rest, Vec::new(), began + REST_LIMIT + ANSWER_LIMIT).await?;
        self.point("at rest").await;
        let (FromWorker::HandoverOffered { unread, state }, descriptors) = rested else {
            return Err(unexpected(&rested.0));
        };
        let take = ToWorker::TakeOver { unread, state };
        let taken = new.call(take, descriptors, Instant::now() + ANSWER_LIMIT).await;
        let pause = began.elapsed();
        self.point("taken over").await;
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

    /// Ends the worker that was succeeded, and forgets it.
    pub(super) async fn end_predecessor(&self, guard: &mut Guard, deadline: Instant) -> Result<()> {
        let (worker, id) = (guard.predecessor.as_ref(), guard.record.predecessor);
        self.end_worker(guard, worker, id, deadline).await?;
        guard.predecessor = None;
        let predecessor = guard.record.predecessor.take();
        let stored = self.store(guard).await;
        if stored.is_err() {
            guard.record.predecessor = predecessor;
        }
        stored
    }

    /// Makes the old worker the worker again, once the new one's end is proved.
    pub(super) async fn reinstate(&self, guard: &mut Guard) -> Result<()> {
        let page = guard.statistics.as_ref();
        if page.is_some_and(|page| page.is_handed_over_to(guard.record.generation)) {
            // It took over with its last breath; the next plan knows.
            return Ok(());
        }
        let before = guard.record.clone();
        guard.record.worker = guard.record.predecessor.take();
        guard.worker = guard.predecessor.take();
        let stored = self.store(guard).await;
        if stored.is_err() {
            guard.record = before;
            guard.predecessor = guard.worker.take();
        }
        stored
    }
}
