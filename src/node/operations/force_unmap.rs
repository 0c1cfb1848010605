//! `unmap --force`: the mapping goes, whatever hangs and whoever holds it.
//!
//! In this order, each step bounded, all within the deadline of the call:
//! 1. The wish is recorded. From here on it is never taken back: a supervisor that dies goes on with
//!    it, and so does this one when the deadline is over.
//! 2. The worker answers every request with an error, those under way included. So nobody waits any
//!    more, for as long as it lives. One that does not do so (stopped, hung) is killed at once, since
//!    DISCONNECT sends through its sockets and would wait for it.
//! 3. Lazy unmounts, of file systems that are thawed (`quiesce`). What they write back is answered, or, without a worker, waits for step 4.
//! 4. DISCONNECT, on a thread that can be given up. What is open stays open, and fails.
//! 5. The worker's end, proved.
//! 6. The end of what it had under way at the backend: the worker has said so in step 2, or its claim
//!    on the volume is free again, which the kernel, or the storage, gives back no sooner.
//!
//! Whoever still holds the device keeps its number, not the volume: that can be mapped again at once,
//! under the same name, as another device.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use crate::actions::{self, FAIL_LIMIT, UNMOUNT_LIMIT};
use crate::context::Context;
use crate::devices::devices;
use crate::find::{Target, find};
use crate::mapping::{ForceProgress, Forced};
use crate::planner::{Intent, State};
use crate::reconcile::reconcile;
use crate::retry::after_failure;
use crate::worker_start::within;
use crate::workers::stop_process;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_kernel::{Device, DeviceIndex, Identity, UnmountScope};

/// Kept back from the deadline for the report.
const REPORT_TIME: Duration = Duration::from_millis(200);

/// Takes a mapping, or a device of ours without a record, down by force. `None`: there is none.
///
/// # Errors
/// `TimedOut` when not all of it could be done by `deadline`: what was, stands in the message,
/// and the rest is tried again behind the scenes.
pub(crate) async fn force_unmap(
    cx: &Context,
    target: &str,
    unmount: UnmountScope,
    deadline: Instant,
) -> Result<Option<Forced>> {
    let mapping = match find(cx, target, deadline).await? {
        Target::Mapping(mapping) => mapping,
        Target::Nothing => return Ok(None),
        Target::Orphan(index, identity) => {
            return force_unmap_orphan(cx, index, identity, unmount, deadline).await.map(Some);
        }
    };
    let mut guard = mapping.lock_by_force(deadline).await?;
    let identity = guard.record.identity();
    if guard.teardown.removed {
        // By another forced unmap, which this one has waited for.
        let progress = ForceProgress::default();
        return Ok(Some(report(cx, progress, &identity, deadline).await));
    }
    let before = (guard.record.intent, guard.teardown.recorded);
    guard.record.intent = Intent::Forced(unmount);
    guard.teardown.recorded = false;
    guard.teardown.no_writes_proved = false;
    guard.teardown.force = Some(ForceProgress::default());
    tracing::warn!(mapping = mapping.name, ?unmount, "unmapping by force");
    let until = deadline - REPORT_TIME.min((deadline - Instant::now()) / 10);
    let converged = timeout_at(until, reconcile(cx, &mut guard, until)).await;
    let outcome = match converged {
        Ok(Ok(State::Unmapped)) => Ok(()),
        Ok(Ok(other)) => {
            let message = format!("a forced unmap came to rest in {other:?}");
            Err(Error::new(ErrorKind::Internal, message))
        }
        Ok(Err(error)) => Err(error),
        Err(_) => Err(Error::new(ErrorKind::TimedOut, "the time is over")),
    };
    let progress = guard.teardown.force.take().unwrap_or_default();
    let Err(error) = outcome else {
        tracing::warn!(mapping = mapping.name, "unmapped by force");
        return Ok(Some(report(cx, progress, &identity, deadline).await));
    };
    // Out of time while it was being recorded: the journal may hold it, now or later, so it stands.
    let recording = error.kind() == ErrorKind::TimedOut && progress.under_way.is_some();
    if progress.steps.is_empty() && !recording && before.0 == Intent::Mapped {
        // It could not even be recorded: nothing has been done.
        (guard.record.intent, guard.teardown.recorded) = before;
        return Err(error);
    }
    let error = progress.unfinished(error, &mapping.name);
    after_failure(cx, &mut guard, &error);
    Err(error)
}

/// A device of ours without a record: what can be done without one.
async fn force_unmap_orphan(
    cx: &Context,
    index: DeviceIndex,
    identity: Identity,
    unmount: UnmountScope,
    deadline: Instant,
) -> Result<Forced> {
    let mut progress = ForceProgress::default();
    let until = deadline - REPORT_TIME.min((deadline - Instant::now()) / 10);
    let done = force_disconnect_orphan(cx, &mut progress, index, &identity, unmount, until);
    let outcome = timeout_at(until, done).await;
    let outcome =
        outcome.unwrap_or_else(|_| Err(Error::new(ErrorKind::TimedOut, "the time is over")));
    match outcome {
        Ok(()) => Ok(report(cx, progress, &identity, deadline).await),
        Err(error) => Err(progress.unfinished(error, &format!("/dev/nbd{index}"))),
    }
}

async fn force_disconnect_orphan(
    cx: &Context,
    progress: &mut ForceProgress,
    index: DeviceIndex,
    identity: &Identity,
    unmount: UnmountScope,
    deadline: Instant,
) -> Result<()> {
    let id = identity.mapping_id();
    progress.begin("fail I/O");
    let process = cx.workers.listener(id).await?.map(Arc::new);
    let mut silent = cx.force_disconnected.contains(index, identity);
    if let Some(process) = &process {
        let adopted = cx.workers.adopt(id, Arc::clone(process), within(deadline, FAIL_LIMIT));
        let failed = match adopted.await {
            Ok(worker) => actions::fail_all(&worker, within(deadline, FAIL_LIMIT)).await,
            Err(error) => Err(error),
        };
        match failed {
            Ok(at_backend) => silent = at_backend == 0,
            Err(error) => {
                let killed = actions::kill(Some(Arc::clone(process)), deadline).await;
                progress.note = format!("{}; {killed}", error.report());
            }
        }
    }
    progress.end();
    progress.begin("unmount");
    actions::unmount(cx, progress, index, unmount, within(deadline, UNMOUNT_LIMIT)).await;
    progress.end();
    progress.begin("disconnect");
    actions::force_disconnect(cx, progress, index, identity, process.clone(), deadline).await?;
    progress.end();
    if let Some(process) = process {
        progress.begin("end the worker");
        stop_process(&process, deadline).await?;
        cx.workers.sockets.remove(id);
        progress.end();
    }
    if !silent {
        progress.unproven = Some("the device had no record, which names its volume".to_owned());
    }
    Ok(())
}

/// What is left of a device that was severed.
async fn report(
    cx: &Context,
    progress: ForceProgress,
    identity: &Identity,
    deadline: Instant,
) -> Forced {
    let ForceProgress { steps, mounts, left, unproven, .. } = progress;
    let mut forced = Forced { steps, unproven, device_left: left, ..Forced::default() };
    let ours = |d: &&Device| d.connected && d.identity().as_ref() == Some(identity);
    match devices(cx, deadline).await {
        Ok(devices) => forced.device_left = devices.iter().find(ours).map(|d| d.index),
        // Then it is as it was when it was severed.
        Err(error) => tracing::warn!("{}", error.report()),
    }
    if let Some(index) = forced.device_left {
        let look = cx.urgent.wait("look for holders", deadline, None, move |k, _| k.holders(index));
        match look.await {
            Ok(holders) => forced.holders = holders,
            Err(error) => tracing::warn!(device = index, "{}", error.report()),
        }
    }
    forced.unmounted = mounts;
    forced.unmounted.retain(|mount| !forced.holders.contains(mount));
    forced
}
