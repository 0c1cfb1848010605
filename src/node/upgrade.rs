//! What `cleat upgrade` asks for: the daemon becomes what is on disk, then its workers, one by one.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};
use tonic::Status;

use super::convert;
use super::executor::{Executor, blocking};
use super::mapping::{Intent, State};
use super::quiesce;
use super::restart::{self, Binary};
use super::unlocking;
use super::volume::{Guard, Volume};
use cleat_api::v1::{self as api, upgrade_event::Outcome};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_worker::version::BUILD;

/// How long the caller gets to hear that the daemon starts anew, before it does.
const LAST_WORD_LIMIT: Duration = Duration::from_secs(1);

/// Between two looks whether somebody else is still busy with a volume.
const BUSY_PAUSE: Duration = Duration::from_millis(500);

/// For calls to the kernel that are under way.
const STUCK_LIMIT: Duration = Duration::from_secs(3);

type Events = mpsc::Sender<Result<api::UpgradeEvent, Status>>;

impl Executor {
    /// Upgrades, and tells what becomes of each part as it happens. When nobody listens any more it
    /// ends after the volume at hand.
    ///
    /// # Errors
    /// `NotFound` for a target that is not mapped; then nothing has been done.
    pub async fn upgrade(
        self: &Arc<Self>,
        request: api::UpgradeRequest,
        limit: Duration,
    ) -> Result<mpsc::Receiver<Result<api::UpgradeEvent, Status>>> {
        let mut volumes = Vec::new();
        for target in request.targets {
            let target = convert::target(target)?;
            volumes.push(self.get(&target, Instant::now() + limit).await?);
        }
        if volumes.is_empty() {
            volumes = self.register().all();
        }
        let (events, receiver) = mpsc::channel(1);
        let executor = Arc::clone(self);
        tokio::spawn(async move {
            if !request.workers_only && executor.upgrade_daemon(&events).await {
                return;
            }
            for volume in volumes {
                let enter = volume.enter_call();
                let event = executor.upgrade_volume(&volume, enter, request.force, limit).await;
                if events.send(Ok(event)).await.is_err() {
                    tracing::info!("nobody waits for the upgrade any more; it ends here");
                    return;
                }
            }
        });
        Ok(receiver)
    }

    /// Has the workers that another build has left handed over to such of this one, each as soon as
    /// nobody else is busy with its volume. What fails stays as it is, and is logged.
    pub(super) async fn succeed_all(&self, limit: Duration) {
        for volume in self.register().all() {
            // As one that looks after the volume by itself: calls wait for it.
            let enter = async {
                let until = Instant::now() + limit;
                loop {
                    if let Some(guard) = volume.enter_keeper() {
                        return Ok(guard);
                    }
                    if Instant::now() >= until {
                        return volume.enter();
                    }
                    sleep(BUSY_PAUSE).await;
                }
            };
            self.upgrade_volume(&volume, enter, false, limit).await;
        }
    }

    /// Returns whether the daemon starts anew: then the caller asks the next one for the rest.
    async fn upgrade_daemon(&self, events: &Events) -> bool {
        let mut event =
            api::UpgradeEvent { from_version: BUILD.to_owned(), ..api::UpgradeEvent::default() };
        let found = match self.binary_on_disk().await {
            Ok(Binary::Current) => {
                event.set_outcome(Outcome::Current);
                None
            }
            Ok(Binary::Other { path, version, id }) => {
                event.set_outcome(Outcome::Restarting);
                (event.to_version, event.binary) = (version, id);
                Some(path)
            }
            Err(error) => {
                event.set_outcome(Outcome::Failed);
                event.message = error.report();
                event.repair = error.repair().unwrap_or_default().to_owned();
                None
            }
        };
        let _ = events.send(Ok(event)).await;
        let Some(path) = found else { return false };
        // The caller hangs up when it has heard; one that does not must not keep the old build.
        let _ = tokio::time::timeout(LAST_WORD_LIMIT, events.closed()).await;
        self.restart.send_replace(Some(path));
        true
    }

    async fn binary_on_disk(&self) -> Result<Binary> {
        let binary = blocking(restart::on_disk).await?;
        // A thread that the kernel does not let go would keep the process from going on as another
        // executable, and everything else in it.
        for volume in self.register().all() {
            quiesce::check_none(&volume.view().record)?;
        }
        let until = Instant::now() + STUCK_LIMIT;
        if binary != Binary::Current
            && !(self.kernel.rest(until).await && self.urgent.rest(until).await)
        {
            let message = "a call to the kernel is stuck; the daemon cannot start anew";
            return Err(Error::new(ErrorKind::Unavailable, message)
                .with_repair("see the kernel's log for what it waits for"));
        }
        Ok(binary)
    }

    async fn upgrade_volume(
        &self,
        volume: &Arc<Volume>,
        enter: impl Future<Output = Result<Guard>>,
        force: bool,
        limit: Duration,
    ) -> api::UpgradeEvent {
        let mut event = api::UpgradeEvent {
            name: volume.name.clone(),
            from_version: volume.view().worker_build,
            ..api::UpgradeEvent::default()
        };
        let upgraded = self.upgrade_worker(volume, enter, force, limit);
        match volume.giving_way(upgraded).await {
            Ok(None) => event.set_outcome(Outcome::Current),
            Ok(Some(pause)) => {
                event.set_outcome(Outcome::HandedOver);
                event.paused_us = u32::try_from(pause.as_micros()).unwrap_or(u32::MAX);
                event.to_version = volume.view().worker_build;
                let paused_ms = pause.as_millis();
                tracing::info!(mapping = volume.name, paused_ms, "handed over to a new worker");
            }
            Err(error) => {
                event.set_outcome(Outcome::Failed);
                event.message = error.report();
                event.repair = error.repair().unwrap_or_default().to_owned();
                tracing::warn!(mapping = volume.name, "not handed over: {}", event.message);
            }
        }
        event
    }

    /// `None`: its worker is of this build already, or it is not mapped any more.
    async fn upgrade_worker(
        &self,
        volume: &Arc<Volume>,
        enter: impl Future<Output = Result<Guard>>,
        force: bool,
        limit: Duration,
    ) -> Result<Option<Duration>> {
        let mut guard = enter.await?;
        let deadline = Instant::now() + limit + unlocking::patience(&guard.record.uri);
        if guard.withdrawn || guard.record.intent != Intent::Mapped {
            return Ok(None);
        }
        match self.converge(&mut guard, deadline).await? {
            State::Mapped => {}
            State::Failed(trouble) => return Err(trouble.into_error()),
            state => {
                let message = format!("{} is not at rest: {state:?}", volume.name);
                return Err(Error::new(ErrorKind::Unavailable, message));
            }
        }
        quiesce::check_none(&guard.record)?;
        let binary = self.workers.binary();
        let runs = guard.worker.as_ref().map(|worker| worker.ready.binary.as_str());
        if !force && !binary.is_empty() && runs == Some(&binary) {
            return Ok(None);
        }
        guard.refusal = None;
        let passed = self.hand_over(&mut guard, deadline).await;
        // What lasts, and not what another attempt may change.
        let refusal = passed.as_ref().err().filter(|error| error.kind() == ErrorKind::Unsupported);
        if let Some(error) = refusal {
            let why = error.report();
            let message =
                format!("its worker stays until it is unmapped, and cannot be handed over: {why}");
            guard.refusal = Some(message.clone());
            self.publish(volume, |view| {
                // Of one that fails it is of more use to know why.
                if view.state == State::Mapped {
                    view.message = message;
                }
            });
        }
        passed.map(Some)
    }
}
