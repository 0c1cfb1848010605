//! The time in which this process serves the volume: from its claim to the release of the claim.

use std::sync::Arc;
use std::time::Instant;

use cleat_backend::claimant::Claimant;
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_object::store::Store;
use cleat_object::volume::{Config, Failure, Keep, Place, Volume};

use super::shared::Shared;
use crate::ask::Answered;
use crate::claim::Attempt;
use crate::claim::decision::Purpose;
use crate::claim::record::Use;
use crate::collector::Grants;
use crate::errors::{failed, no_answer, wait};
use crate::executor::{TaskId, block_until};
use crate::timeouts::{CALL_TIMEOUT, SECOND, after};
use crate::watched::Watched;

/// The number of failures for which the store waits the longest: this is the time between two looks at the claims.
const LONGEST: u32 = u32::MAX;

/// A claim, and the futures that work for it.
pub(crate) struct Serving {
    place: Place,
    volume: Volume,
    tasks: [TaskId; 3],
}

impl Serving {
    /// Claims the volume, opens it and starts its work in the background.
    ///
    /// # Errors
    /// Returns `Fenced` if the mapping has lost the volume, `InUse` if another client has a claim, and otherwise the
    /// error of the store. The claim is then released as far as the store permits it, unless the tail file may have writes
    /// of an earlier process.
    pub(crate) fn start(
        place: Place,
        (claimant, keep): (&Claimant, Option<&Keep>),
        purpose: Purpose,
        shared: &Arc<Shared>,
        store: &Arc<Watched>,
    ) -> Result<Self> {
        let (name, deadline) = (&*shared.name, after(CALL_TIMEOUT));
        let epoch = acquire(&place, claimant, purpose, shared)?;
        let mut config =
            Config { max_copies: Grants::max(shared.collector.rate), ..Config::default() };
        if let Some(percent) = shared.collector.max_space {
            config.max_space_percent = percent;
        }
        let opened = block_until(deadline, place.open_with(epoch, config, keep));
        if let Some(Err(failure @ Failure::Stale { .. })) = &opened {
            tracing::error!(volume = %name, %failure, "acknowledged writes are lost");
            shared.set_fenced();
        }
        let opened = opened
            .map_or_else(|| Err(no_answer(name)), |opened| opened.map_err(|f| failed(name, f)));
        let volume = opened.inspect_err(|_| {
            // Nothing was written. Without this, another node would need --take-over, which is right only if an earlier
            // process has acknowledged writes that only the tail file has. Before a handover it has flushed them, and
            // goes on if the claim is released.
            let may_have_writes = claimant.resumes && keep.is_some() && purpose == Purpose::Open;
            if !may_have_writes {
                let _ = block_until(deadline, place.release(epoch));
            }
        })?;
        shared.set_volume(Some(volume.clone()));
        let tasks = [
            shared.spawner.spawn(run(volume.clone(), Arc::clone(shared))),
            shared.spawner.spawn(watch(volume.clone(), Arc::clone(shared), Arc::clone(store))),
            shared.spawner.spawn(send_older(volume.clone(), Arc::clone(shared), Arc::clone(store))),
        ];
        Ok(Self { place, volume, tasks })
    }

    pub(crate) fn volume(&self) -> &Volume {
        &self.volume
    }

    /// Waits until everything is durable and no work is in progress, and releases the claim. If that fails, the
    /// claim stays, and the futures have ended.
    ///
    /// # Errors
    /// Returns the error of the store, and `TimedOut` at the deadline.
    pub(crate) fn stop(self, shared: &Shared, deadline: Instant) -> Result<()> {
        let quiet = self.settle(&shared.name, deadline);
        self.tasks.iter().for_each(|task| shared.spawner.cancel(*task));
        shared.set_volume(None);
        // A fenced client has no claim to release.
        if shared.is_fenced() {
            return Ok(());
        }
        quiet?;
        shared.report_unsaved(0);
        wait(&shared.name, deadline, self.place.release(self.volume.epoch()))
    }

    /// Waits until everything is durable and no work is in progress. The work stays stopped.
    ///
    /// # Errors
    /// Returns the failure of the volume, and `TimedOut` at the deadline.
    pub(crate) fn settle(&self, name: &str, deadline: Instant) -> Result<()> {
        wait(name, deadline, async {
            self.volume.flush().await?;
            self.volume.pause().await
        })
    }
}

/// Claims the volume for this mapping, and returns its epoch. Blocks for at most [`CALL_TIMEOUT`].
///
/// # Errors
/// Returns `Fenced` if the mapping has lost the volume, `InUse` if another client has a claim, and otherwise the error of
/// the store.
pub(crate) fn acquire(
    place: &Place,
    claimant: &Claimant,
    purpose: Purpose,
    shared: &Shared,
) -> Result<u64> {
    let (name, usage, clock) = (&*shared.name, Use::Serve, &SystemClock);
    let attempt = Attempt { place, name, claimant, purpose, usage, only: None, clock };
    let acquired = block_until(after(CALL_TIMEOUT), attempt.acquire());
    acquired.unwrap_or_else(|| Err(no_answer(name)))?.map_err(|lost| {
        shared.set_fenced();
        let message = format!("another client may have written to {name}: {lost}");
        Error::new(ErrorKind::Fenced, message)
    })
}

/// Works in the background until the volume fails.
async fn run(volume: Volume, shared: Arc<Shared>) {
    let failure = volume.run().await;
    shared.note(&failure, None);
}

/// Sends records that no flush covers, about a second after they were written, and does what else is due about every
/// second.
async fn send_older(volume: Volume, shared: Arc<Shared>, store: Arc<Watched>) {
    let mut seen = 0;
    let mut grants = Grants::new(shared.collector.rate, SystemClock.now());
    loop {
        store.back_off(SECOND).await;
        shared.is_working();
        store.look_for_hangs();
        volume.grant_copies(grants.due(SystemClock.now()));
        seen = volume.send_older(seen);
        let status = volume.status();
        shared.report_unsaved(status.kept_bytes);
        shared.report_space(&status);
    }
}

/// Looks from time to time whether another client has claimed the volume, and executes the requests of commands.
async fn watch(volume: Volume, shared: Arc<Shared>, store: Arc<Watched>) {
    let mut answered = Answered::default();
    answered.tidy(&*store).await;
    loop {
        store.back_off(LONGEST).await;
        if let Err(failure @ Failure::Fenced) = volume.check_claim().await {
            shared.note(&failure, None);
            return;
        }
        answered.answer(&*store, &volume, &shared.quiesce).await;
        shared.note_size(volume.size());
    }
}
