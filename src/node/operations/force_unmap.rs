//! `unmap --force`: removes a mapping also if its device has holders or a component does not answer.
//!
//! The steps run in this order, each with a timeout, and all within the deadline of the call:
//! 1. The intent is recorded. From here on it is never taken back: the next supervisor continues it after
//!    a crash, and this one after the deadline.
//! 2. The worker answers every request with an error, also those in flight. From then on no process waits
//!    for I/O, as long as the worker lives. A worker that does not do so (stopped, hung) is killed at once,
//!    because DISCONNECT sends through its sockets and would wait for it.
//! 3. The file systems are thawed (`quiesce`) and unmounted lazily. The worker answers their writeback;
//!    without a worker it waits for step 4.
//! 4. DISCONNECT runs on a thread that can be abandoned. Open files stay open, and their I/O fails.
//! 5. The worker is stopped, and its end is proved.
//! 6. The end of its requests at the backend is proved: either the worker reported it in step 2, or its
//!    claim on the volume is free, which the kernel or the storage releases no sooner.
//!
//! Remaining holders keep the number of the device, but not the volume. The volume can be mapped again at
//! once, under the same name, as another device.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use crate::actions::{self, FAIL_TIMEOUT, UNMOUNT_TIMEOUT};
use crate::context::Context;
use crate::devices::devices;
use crate::holders::without_own;
use crate::mapping::{ForceProgress, ForceReport};
use crate::planner::{Intent, State};
use crate::reconcile::reconcile;
use crate::records;
use crate::retry::after_failure;
use crate::target::{Target, find};
use crate::worker_start::within;
use crate::workers::stop_process;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_kernel::{Device, DeviceIndex, Identity, UnmountScope};

/// The part of the time before the deadline that is reserved for the report.
const REPORT_TIME: Duration = Duration::from_millis(200);

/// Removes a mapping or an orphan by force. Returns `None` if there is none.
///
/// # Errors
/// Returns `TimedOut` if steps are left at `deadline`. The message lists the steps that were done, and the
/// supervisor retries the others in the background.
pub(crate) async fn force_unmap(
    cx: &Context,
    target: &str,
    unmount: UnmountScope,
    deadline: Instant,
) -> Result<Option<ForceReport>> {
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
        // Another forced unmap, which this one has waited for, has removed the mapping.
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
            let message = format!("internal: the forced unmap ended in state {other:?}");
            Err(Error::new(ErrorKind::Internal, message))
        }
        Ok(Err(error)) => Err(error),
        Err(_) => Err(Error::new(ErrorKind::TimedOut, "the deadline has passed")),
    };
    let progress = guard.teardown.force.take().unwrap_or_default();
    let Err(error) = outcome else {
        tracing::warn!(mapping = mapping.name, "unmapped by force");
        return Ok(Some(report(cx, progress, &identity, deadline).await));
    };
    // If the deadline passed while the intent was being written, the journal may contain it, now or later.
    // Then the intent stays.
    let recording = error.kind() == ErrorKind::TimedOut && progress.running.is_some();
    if progress.steps.is_empty() && !recording && before.0 == Intent::Mapped {
        // The intent was not recorded, and nothing was done.
        (guard.record.intent, guard.teardown.recorded) = before;
        return Err(error);
    }
    let error = progress.unfinished(error, &mapping.name);
    after_failure(cx, &mut guard, &error);
    Err(error)
}

/// Removes an orphan by force, as far as this is possible without a record.
async fn force_unmap_orphan(
    cx: &Context,
    index: DeviceIndex,
    identity: Identity,
    unmount: UnmountScope,
    deadline: Instant,
) -> Result<ForceReport> {
    let mut progress = ForceProgress::default();
    let until = deadline - REPORT_TIME.min((deadline - Instant::now()) / 10);
    let done = force_disconnect_orphan(cx, &mut progress, index, &identity, unmount, until);
    let outcome = timeout_at(until, done).await;
    let outcome =
        outcome.unwrap_or_else(|_| Err(Error::new(ErrorKind::TimedOut, "the deadline has passed")));
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
    let mut no_writes_proved = cx.force_disconnected.contains(index, identity);
    if let Some(process) = &process {
        let adopted = cx.workers.adopt(id, Arc::clone(process), within(deadline, FAIL_TIMEOUT));
        let failed = match adopted.await {
            Ok(worker) => actions::fail_all(&worker, within(deadline, FAIL_TIMEOUT)).await,
            Err(error) => Err(error),
        };
        match failed {
            Ok(at_backend) => no_writes_proved = at_backend == 0,
            Err(error) => {
                let killed = actions::kill(Some(Arc::clone(process)), deadline).await;
                progress.note = format!("{}; {killed}", error.report());
            }
        }
    }
    progress.end();
    progress.begin("unmount");
    actions::unmount(cx, progress, index, unmount, within(deadline, UNMOUNT_TIMEOUT)).await;
    progress.end();
    progress.begin("disconnect");
    actions::force_disconnect(cx, progress, index, identity, process.clone(), deadline).await?;
    progress.end();
    if let Some(process) = process {
        progress.begin("end the worker");
        stop_process(&process, deadline).await?;
        cx.workers.remove_files(id);
        progress.end();
    }
    if cx.unmanaged.is_unreadable(id) {
        // Otherwise the mapping would be restored as soon as its record can be read.
        progress.begin("remove the record");
        records::discard(cx, id).await?;
        cx.unmanaged.remove(id);
        progress.end();
    }
    if !no_writes_proved {
        progress.unproven = Some("without a record the volume is not known".to_owned());
    }
    Ok(())
}

/// Reports a forced unmap, and what is left of the device.
async fn report(
    cx: &Context,
    progress: ForceProgress,
    identity: &Identity,
    deadline: Instant,
) -> ForceReport {
    let ForceProgress { steps, mounts, device_left, unproven, .. } = progress;
    let mut forced = ForceReport { steps, unproven, device_left, ..ForceReport::default() };
    let ours = |d: &&Device| d.connected && d.identity().as_ref() == Some(identity);
    match devices(cx, deadline).await {
        Ok(devices) => forced.device_left = devices.iter().find(ours).map(|d| d.index),
        // The state right after the disconnect is reported.
        Err(error) => tracing::warn!("{}", error.report()),
    }
    if let Some(index) = forced.device_left {
        let holders =
            cx.urgent.wait("look for holders", deadline, None, move |k, _| k.holders(index));
        match holders.await {
            Ok(holders) => forced.holders = without_own(holders),
            Err(error) => tracing::warn!(device = index, "{}", error.report()),
        }
    }
    forced.unmounted = mounts;
    forced.unmounted.retain(|mount| !forced.holders.contains(mount));
    forced
}
