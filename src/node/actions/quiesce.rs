//! Quiesces a device while a snapshot of its volume is made, so that the content of the snapshot needs no
//! repair. The file systems on the device are frozen, or the hook of the administrator is run.
//!
//! The quiescing always ends:
//! - when the snapshot has been made or given up;
//! - when it takes longer than `map.quiesce_deadline`, or when the worker that requested it, or the
//!   backend, is lost. Then the snapshot may be inconsistent, and a warning is shown;
//! - before the device is disconnected;
//! - by the next supervisor, because it is recorded before anything is frozen.
//!
//! Freezing writes through the worker, and the backend may not answer. The wait for it has a timeout, and
//! a freeze that ends later is undone (`kernel::freeze`). Thawing writes, too, so a dead worker is
//! replaced first. A thaw that does not end in time is deferred and is no failure of a mapping that works.

use std::path::PathBuf;
use std::time::Duration;

use tokio::time::Instant;

use crate::blocking::blocking;
use crate::context::Context;
use crate::mapping::{AnsweredSnapshot, Guard, node_of};
use crate::planner::Quiesced;
use crate::quiesce_hook as hook;
use crate::records::store;
use crate::worker_start::{no_worker, within};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_kernel::DeviceIndex;
use cleat_worker_protocol::protocol::ToWorker;

/// The upper limit for quiescing a device, regardless of the configuration: librbd gives up after 50 s,
/// and then requests it again.
const BEGIN_TIMEOUT: Duration = Duration::from_secs(35);

/// The timeout for passing the answer to the worker.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Quiesces a device for a snapshot, and sends the worker the result. A failure is a failure of the
/// snapshot, not of the mapping.
///
/// # Errors
/// Returns an error if the mapping has no worker.
pub(crate) async fn quiesce(
    cx: &Context,
    guard: &mut Guard,
    index: DeviceIndex,
    snapshot: u64,
    deadline: Instant,
) -> Result<()> {
    let worker = guard.worker.as_ref().ok_or_else(|| no_worker(&guard.record))?;
    let pid = worker.id().pid;
    let until = Instant::now() + cx.settings.quiesce.limit;
    let begin_deadline = within(deadline.min(until), BEGIN_TIMEOUT);
    let quiesced = quiesce_device(cx, guard, index, begin_deadline).await;
    cx.point("quiesced, not answered").await;
    let errno = quiesced.as_ref().map_or_else(|error| errno(error.kind()), |()| 0);
    let name = guard.record.name.clone();
    if let Err(error) = &quiesced {
        let warning = format!("a snapshot failed: cannot quiesce the device: {}", error.report());
        tracing::warn!(mapping = name, "{warning}");
        guard.quiesce.warning = Some(warning);
    }
    // The request counts as answered, even if sending the answer fails.
    guard.quiesce.answered =
        Some(AnsweredSnapshot { pid, snapshot, until: Some(until).filter(|_| errno == 0) });
    let worker = guard.worker.as_ref().ok_or_else(|| no_worker(&guard.record))?;
    let answer = ToWorker::Quiesced { snapshot, errno };
    match worker.call(answer, Vec::new(), Instant::now() + ANSWER_TIMEOUT).await {
        Ok(_) if errno == 0 => {
            tracing::info!(mapping = name, "the device is quiesced for a snapshot");
            cx.wake_at(&name, until);
        }
        // The next plan thaws what was frozen before the failure.
        Ok(_) => {}
        Err(error) => {
            tracing::warn!(
                mapping = name,
                "cannot tell the worker that the device is quiesced: {}",
                error.report()
            );
            guard.quiesce.answered = Some(AnsweredSnapshot { pid, snapshot, until: None });
        }
    }
    Ok(())
}

async fn quiesce_device(
    cx: &Context,
    guard: &mut Guard,
    index: DeviceIndex,
    deadline: Instant,
) -> Result<()> {
    if guard.worker.as_ref().is_some_and(|worker| worker.outage().is_some()) {
        let message = "cannot write dirty pages: the backend does not answer";
        return Err(Error::new(ErrorKind::Unavailable, message));
    }
    let hook = cx.settings.quiesce.hook.clone();
    guard.record.quiesced = Some(Quiesced {
        device: index,
        since_unix_ms: cx.clock.unix_ms(),
        hook: hook.clone(),
        already_frozen: Vec::new(),
    });
    store(cx, guard).await?;
    cx.point("quiesce recorded").await;
    if let Some(hook) = hook {
        return run_hook(hook, index, "quiesce", deadline).await;
    }
    let already_frozen = cx.kernel.freeze(index, guard.record.identity(), deadline).await?;
    cx.point("frozen").await;
    if already_frozen.is_empty() {
        return Ok(());
    }
    tracing::info!(
        mapping = guard.mapping().name,
        ?already_frozen,
        "another process has frozen file systems"
    );
    if let Some(quiesced) = &mut guard.record.quiesced {
        quiesced.already_frozen = already_frozen;
    }
    store(cx, guard).await
}

pub(crate) async fn run_hook(
    hook: PathBuf,
    index: DeviceIndex,
    verb: &'static str,
    deadline: Instant,
) -> Result<()> {
    let deadline = deadline.into_std();
    let device = node_of(index).display().to_string();
    blocking(move || hook::run(&hook, &device, verb, deadline)).await
}

/// Returns the error number that `rbd snap create` shows. It is never EOPNOTSUPP, which librbd treats as
/// success, and never ETIMEDOUT, after which librbd repeats its request without end.
fn errno(kind: ErrorKind) -> i32 {
    match kind {
        ErrorKind::Unavailable => libc::EAGAIN,
        ErrorKind::PermissionDenied => libc::EPERM,
        _ => libc::EIO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn librbd_neither_ignores_nor_repeats_a_failure() {
        for kind in [ErrorKind::Unsupported, ErrorKind::TimedOut, ErrorKind::Internal] {
            assert!(![0, libc::EOPNOTSUPP, libc::ETIMEDOUT].contains(&errno(kind)));
        }
    }
}
