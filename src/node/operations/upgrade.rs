//! Upgrades: the daemon restarts as the installed build, then replaces its workers one by one.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};
use tonic::Status;

use super::handover::hand_over;
use crate::api::validate;
use crate::blocking::blocking;
use crate::context::Context;
use crate::mapping::{Guard, Mapping};
use crate::planner::{Intent, Record, State};
use crate::reconcile::reconcile;
use crate::restart::{self, Binary};
use crate::status::publish;
use crate::target::get;
use crate::unlock;
use cleat_api::v1::{self as api, upgrade_event::Outcome};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_worker_protocol::version::BUILD;

/// How long the daemon waits before its restart for the caller to receive the event and hang up.
const HANG_UP_TIMEOUT: Duration = Duration::from_secs(1);

/// The interval between attempts to take the guard of a mapping.
const GUARD_RETRY_DELAY: Duration = Duration::from_millis(500);

/// How long a restart waits for running calls to the kernel.
const KERNEL_IDLE_TIMEOUT: Duration = Duration::from_secs(3);

type Events = mpsc::Sender<Result<api::UpgradeEvent, Status>>;

/// Upgrades the daemon and the workers, and sends an event for each part. If the receiver is dropped, the
/// upgrade ends after the current volume.
///
/// # Errors
/// Returns `NotFound` if a target is not mapped. Nothing is upgraded then.
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
            let lock = mapping.lock_for_call(Instant::now() + limit);
            let event = upgrade_mapping(&context, &mapping, lock, request.force, limit).await;
            if events.send(Ok(event)).await.is_err() {
                tracing::info!("the caller of the upgrade has hung up: the upgrade ends");
                return;
            }
        }
    });
    Ok(receiver)
}

/// Replaces the workers of other builds by workers of this build, each when its guard is free. A failure is
/// logged, and that worker stays.
pub(crate) async fn upgrade_all_workers(cx: &Context, limit: Duration) {
    for mapping in cx.register.all() {
        // Taken in the background, so that calls wait for the handover.
        let lock = async {
            let until = Instant::now() + limit;
            loop {
                if let Some(guard) = mapping.try_lock_in_background() {
                    return Ok(guard);
                }
                if Instant::now() >= until {
                    return mapping.try_lock();
                }
                sleep(GUARD_RETRY_DELAY).await;
            }
        };
        upgrade_mapping(cx, &mapping, lock, false, limit).await;
    }
}

/// Returns whether the daemon restarts. The caller then requests the upgrade of the workers from the new
/// daemon.
async fn upgrade_daemon(cx: &Context, events: &Events) -> bool {
    let mut event =
        api::UpgradeEvent { from_version: BUILD.to_owned(), ..api::UpgradeEvent::default() };
    let new_binary = match binary_on_disk(cx).await {
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
    let Some(path) = new_binary else { return false };
    // The caller hangs up after the event. A caller that does not must not prevent the restart.
    let _ = tokio::time::timeout(HANG_UP_TIMEOUT, events.closed()).await;
    cx.restart.send_replace(Some(path));
    true
}

async fn binary_on_disk(cx: &Context) -> Result<Binary> {
    let binary = blocking(restart::on_disk).await?;
    for mapping in cx.register.all() {
        check_not_quiesced(&mapping.view().record)?;
    }
    // A thread that is blocked in the kernel would block `execve`, and with it the whole daemon.
    let until = Instant::now() + KERNEL_IDLE_TIMEOUT;
    if binary != Binary::Current
        && !(cx.kernel.wait_until_idle(until).await && cx.urgent.wait_until_idle(until).await)
    {
        let message = "cannot restart the daemon: a call to the kernel does not return";
        return Err(Error::new(ErrorKind::Unavailable, message)
            .with_repair("see the kernel's log (dmesg) for the cause"));
    }
    let (state_directory, copies) = (&cx.records.state_directory, &cx.records.copies);
    if binary != Binary::Current
        && !(state_directory.wait_until_idle(until).await && copies.wait_until_idle(until).await)
    {
        let message = "cannot restart the daemon: a write of the journal does not return";
        return Err(Error::new(ErrorKind::Unavailable, message)
            .with_repair("check the disk of the state directory: see dmesg"));
    }
    Ok(binary)
}

async fn upgrade_mapping(
    cx: &Context,
    mapping: &Arc<Mapping>,
    lock: impl Future<Output = Result<Guard>>,
    force: bool,
    limit: Duration,
) -> api::UpgradeEvent {
    let mut event = api::UpgradeEvent {
        name: mapping.name.clone(),
        from_version: mapping.view().worker_build,
        ..api::UpgradeEvent::default()
    };
    let upgraded = upgrade_worker(cx, mapping, lock, force, limit);
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
            tracing::warn!(
                mapping = mapping.name,
                "cannot hand over to a new worker: {}",
                event.message
            );
        }
    }
    event
}

/// Hands the mapping over to a new worker, and returns the pause. Returns `None` if its worker is of this
/// build already, or if it is not mapped any more.
async fn upgrade_worker(
    cx: &Context,
    mapping: &Arc<Mapping>,
    lock: impl Future<Output = Result<Guard>>,
    force: bool,
    limit: Duration,
) -> Result<Option<Duration>> {
    let mut guard = lock.await?;
    let deadline = Instant::now() + limit + unlock::extra_open_time(cx.registry, &guard.record.uri);
    if guard.teardown.removed || guard.record.intent != Intent::Mapped {
        return Ok(None);
    }
    match reconcile(cx, &mut guard, deadline).await? {
        State::Mapped => {}
        State::Failed(failure) => return Err(failure.into_error()),
        state => {
            let message = format!("cannot hand over {} in state {state:?}", mapping.name);
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
    let handed_over = hand_over(cx, &mut guard, deadline).await;
    // Only a lasting cause is shown, not one that another attempt may not meet.
    let refusal = handed_over.as_ref().err().filter(|error| error.kind() == ErrorKind::Unsupported);
    if let Some(error) = refusal {
        let cause = error.report();
        let message =
            format!("its worker cannot be handed over, and stays until it is unmapped: {cause}");
        guard.upgrade_refusal = Some(message.clone());
        publish(cx, mapping, |view| {
            // The message of a failed mapping says why it failed.
            if view.state == State::Mapped {
                view.message = message;
            }
        });
    }
    handed_over.map(Some)
}

/// Checks that the mapping is not quiesced, since a restart or a handover would end that too early.
///
/// # Errors
/// Returns `Unavailable` while the mapping is quiesced.
fn check_not_quiesced(record: &Record) -> Result<()> {
    if record.quiesced.is_none() {
        return Ok(());
    }
    let message =
        format!("a snapshot of {} is being made, and its device is quiesced", record.name);
    Err(Error::new(ErrorKind::Unavailable, message).with_repair("try again in a moment"))
}
