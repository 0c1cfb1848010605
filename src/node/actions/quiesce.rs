//! A volume is made quiet for the moment in which a snapshot of it is made, so that what it holds then
//! needs no repair: the file systems on its device are frozen, or the administrator's hook does what
//! it takes. And that is always ended again:
//! - when the snapshot has been made, or given up;
//! - when it lasts longer than `map.quiesce_deadline`, when the worker that asked is gone, or its
//!   backend is: then the snapshot may not be what it should be, which is told;
//! - before the device goes;
//! - by the next supervisor, since it is recorded before anything is frozen.
//!
//! Freezing writes through the worker, and the backend may hang: nobody waits for that beyond a limit,
//! and what hangs undoes itself (`kernel::freeze`). Thawing writes, too, so a dead worker is replaced
//! first, and a thaw that hangs is put off and never the failure of a mapping that works.

use std::path::PathBuf;
use std::time::Duration;

use tokio::time::Instant;

use crate::blocking::blocking;
use crate::context::Context;
use crate::mapping::{Answered, Guard, node_of};
use crate::planner::Quiesced;
use crate::quiesce_hook as hook;
use crate::records::store;
use crate::worker_start::{no_worker, within};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_kernel::DeviceIndex;
use cleat_worker::protocol::ToWorker;

/// For a device to become quiet, whatever the configuration says: librbd gives up after 50 s, and its
/// user asks anew.
const BEGIN_LIMIT: Duration = Duration::from_secs(35);

/// For the worker to pass the answer on.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// Makes a device quiet for a snapshot, and says so, or why it is not. A failure is the snapshot's,
/// not the mapping's.
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
    let begun = within(deadline.min(until), BEGIN_LIMIT);
    let quiesced = quiesce_device(cx, guard, index, begun).await;
    cx.point("quiet, not answered").await;
    let errno = quiesced.as_ref().map_or_else(|error| errno(error.kind()), |()| 0);
    let name = guard.record.name.clone();
    if let Err(error) = &quiesced {
        let why = format!("a snapshot of it failed: it is not quiet: {}", error.report());
        tracing::warn!(mapping = name, "{why}");
        guard.quiesce.warning = Some(why);
    }
    // From here on it is answered, whatever becomes of that.
    guard.quiesce.answered =
        Some(Answered { pid, snapshot, until: Some(until).filter(|_| errno == 0) });
    let worker = guard.worker.as_ref().ok_or_else(|| no_worker(&guard.record))?;
    let answer = ToWorker::Quiesced { snapshot, errno };
    match worker.call(answer, Vec::new(), Instant::now() + ANSWER_LIMIT).await {
        Ok(_) if errno == 0 => {
            tracing::info!(mapping = name, "quiet for a snapshot");
            cx.wake_at(&name, until);
        }
        // It is thawed by the next plan.
        Ok(_) => {}
        Err(error) => {
            tracing::warn!(mapping = name, "a snapshot does not wait: {}", error.report());
            guard.quiesce.answered = Some(Answered { pid, snapshot, until: None });
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
        let message = "what is dirty cannot be written: the backend does not answer";
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
    cx.point("quiet recorded").await;
    if let Some(hook) = hook {
        return run_hook(hook, index, "quiesce", deadline).await;
    }
    let already_frozen = cx.kernel.freeze(index, guard.record.identity(), deadline).await?;
    cx.point("frozen").await;
    if already_frozen.is_empty() {
        return Ok(());
    }
    tracing::info!(mapping = guard.mapping().name, ?already_frozen, "frozen by somebody else");
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

/// What `rbd snap create` shows. Not EOPNOTSUPP, which librbd takes for consent, and not ETIMEDOUT, upon
/// which it asks again, without end.
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
    fn no_failure_is_told_as_consent_or_repeated_without_end() {
        for kind in [ErrorKind::Unsupported, ErrorKind::TimedOut, ErrorKind::Internal] {
            assert!(![0, libc::EOPNOTSUPP, libc::ETIMEDOUT].contains(&errno(kind)));
        }
    }
}
