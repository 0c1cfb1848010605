//! Upgrades: the daemon becomes what is on disk, then its workers, one by one.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};
use tonic::Status;

use super::handover::hand_over;
use crate::api::validate;
use crate::blocking::blocking;
use crate::context::Context;
use crate::find::get;
use crate::mapping::{Guard, Mapping};
use crate::planner::{Intent, Record, State};
use crate::reconcile::reconcile;
use crate::restart::{self, Binary};
use crate::status::publish;
use crate::unlock;
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

/// Upgrades, and tells what becomes of each part as it happens. When nobody listens any more it
/// ends after the volume at hand.
///
/// # Errors
/// `NotFound` for a target that is not mapped; then nothing has been done.
pub(crate) async fn upgrade(
    cx: &Arc<Context>,
    request: api::UpgradeRequest,
    limit: Duration,
) -> Result<mpsc::Receiver<Result<api::UpgradeEvent, Status>>> {
    let mut mappings = Vec::new();
    for target in request.targets {
        let target = validate::target(target)?;
        mappings.push(get(cx, &target, Instant::now() + limit).await?);
    }
    if mappings.is_empty() {
        mappings = cx.register.all();
    }
    let (events, receiver) = mpsc::channel(1);
    let context = Arc::clone(cx);
    tokio::spawn(async move {
        if !request.workers_only && upgrade_daemon(&context, &events).await {
            return;
        }
        for mapping in mappings {
            let enter = mapping.lock_for_call();
            let event = upgrade_mapping(&context, &mapping, enter, request.force, limit).await;
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
pub(crate) async fn upgrade_all_workers(cx: &Context, limit: Duration) {
    for mapping in cx.register.all() {
        // As one that looks after the volume by itself: calls wait for it.
        let enter = async {
            let until = Instant::now() + limit;
            loop {
                if let Some(guard) = mapping.try_lock_in_background() {
                    return Ok(guard);
                }
                if Instant::now() >= until {
                    return mapping.try_lock();
                }
                sleep(BUSY_PAUSE).await;
            }
        };
        upgrade_mapping(cx, &mapping, enter, false, limit).await;
    }
}

/// Returns whether the daemon starts anew: then the caller asks the next one for the rest.
async fn upgrade_daemon(cx: &Context, events: &Events) -> bool {
    let mut event =
        api::UpgradeEvent { from_version: BUILD.to_owned(), ..api::UpgradeEvent::default() };
    let found = match binary_on_disk(cx).await {
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
    cx.restart.send_replace(Some(path));
    true
}

async fn binary_on_disk(cx: &Context) -> Result<Binary> {
    let binary = blocking(restart::on_disk).await?;
    // A thread that the kernel does not let go would keep the process from going on as another
    // executable, and everything else in it.
    for mapping in cx.register.all() {
        check_not_quiesced(&mapping.view().record)?;
    }
    let until = Instant::now() + STUCK_LIMIT;
    if binary != Binary::Current
        && !(cx.kernel.wait_until_idle(until).await && cx.urgent.wait_until_idle(until).await)
    {
        let message = "a call to the kernel is stuck; the daemon cannot start anew";
        return Err(Error::new(ErrorKind::Unavailable, message)
            .with_repair("see the kernel's log for what it waits for"));
    }
    Ok(binary)
}

async fn upgrade_mapping(
    cx: &Context,
    mapping: &Arc<Mapping>,
    enter: impl Future<Output = Result<Guard>>,
    force: bool,
    limit: Duration,
) -> api::UpgradeEvent {
    let mut event = api::UpgradeEvent {
        name: mapping.name.clone(),
        from_version: mapping.view().worker_build,
        ..api::UpgradeEvent::default()
    };
    let upgraded = upgrade_worker(cx, mapping, enter, force, limit);
    match mapping.until_forced(upgraded).await {
        Ok(None) => event.set_outcome(Outcome::Current),
        Ok(Some(pause)) => {
            event.set_outcome(Outcome::HandedOver);
            event.paused_us = u32::try_from(pause.as_micros()).unwrap_or(u32::MAX);
            event.to_version = mapping.view().worker_build;
            let paused_ms = pause.as_millis();
            tracing::info!(mapping = mapping.name, paused_ms, "handed over to a new worker");
        }
        Err(error) => {
            event.set_outcome(Outcome::Failed);
            event.message = error.report();
            event.repair = error.repair().unwrap_or_default().to_owned();
            tracing::warn!(mapping = mapping.name, "not handed over: {}", event.message);
        }
    }
    event
}

/// `None`: its worker is of this build already, or it is not mapped any more.
async fn upgrade_worker(
    cx: &Context,
    mapping: &Arc<Mapping>,
    enter: impl Future<Output = Result<Guard>>,
    force: bool,
    limit: Duration,
) -> Result<Option<Duration>> {
    let mut guard = enter.await?;
    let deadline = Instant::now() + limit + unlock::extra_open_time(cx.registry, &guard.record.uri);
    if guard.teardown.removed || guard.record.intent != Intent::Mapped {
        return Ok(None);
    }
    match reconcile(cx, &mut guard, deadline).await? {
        State::Mapped => {}
        State::Failed(failure) => return Err(failure.into_error()),
        state => {
            let message = format!("{} is not at rest: {state:?}", mapping.name);
            return Err(Error::new(ErrorKind::Unavailable, message));
        }
    }
    check_not_quiesced(&guard.record)?;
    let binary = cx.workers.binary();
    let runs = guard.worker.as_ref().map(|worker| worker.ready.binary.as_str());
    if !force && !binary.is_empty() && runs == Some(&binary) {
        return Ok(None);
    }
    guard.upgrade_refusal = None;
    let passed = hand_over(cx, &mut guard, deadline).await;
    // What lasts, and not what another attempt may change.
    let refusal = passed.as_ref().err().filter(|error| error.kind() == ErrorKind::Unsupported);
    if let Some(error) = refusal {
        let why = error.report();
        let message =
            format!("its worker stays until it is unmapped, and cannot be handed over: {why}");
        guard.upgrade_refusal = Some(message.clone());
        publish(cx, mapping, |view| {
            // Of one that fails it is of more use to know why.
            if view.state == State::Mapped {
                view.message = message;
            }
        });
    }
    passed.map(Some)
}

/// Refuses what would end a moment that a snapshot needs.
///
/// # Errors
/// `Unavailable` while a mapping is quiet.
fn check_not_quiesced(record: &Record) -> Result<()> {
    if record.quiesced.is_none() {
        return Ok(());
    }
    let message = format!("a snapshot of {} is being made: it is quiet for that", record.name);
    Err(Error::new(ErrorKind::Unavailable, message).with_repair("try again in a moment"))
}
