//! Unmounts a device lazily.

use std::time::Duration;

use tokio::time::Instant;

use crate::context::Context;
use crate::mapping::{ForceProgress, Guard};
use crate::worker_start::within;
use cleat_core::error::ErrorKind;
use cleat_kernel::{DeviceIndex, Holder, UnmountScope};

/// The timeout for lazy unmounts of a device that is served.
pub(crate) const UNMOUNT_TIMEOUT: Duration = Duration::from_millis(1500);

/// The timeout for lazy unmounts of a device without a worker. Only the disconnect ends their writeback.
const UNSERVED_UNMOUNT_TIMEOUT: Duration = Duration::from_millis(200);

/// The timeout for finding the holders.
const HOLDERS_TIMEOUT: Duration = Duration::from_secs(1);

/// Unmounts the device of a mapping, as an action of a plan.
pub(crate) async fn run(
    cx: &Context,
    guard: &mut Guard,
    index: DeviceIndex,
    scope: UnmountScope,
    deadline: Instant,
) {
    let served = guard.worker.as_ref().is_some_and(|worker| !worker.has_ended());
    let limit = match served || guard.is_refusing() {
        true => UNMOUNT_TIMEOUT,
        false => UNSERVED_UNMOUNT_TIMEOUT,
    };
    // The progress stays in the guard, because this function may be cancelled at any await.
    let mut unreported = ForceProgress::default();
    let progress = guard.teardown.force.as_mut().unwrap_or(&mut unreported);
    unmount(cx, progress, index, scope, within(deadline, limit)).await;
}

/// Unmounts a device lazily. Never fails: the report of the forced unmap names the remaining holders.
pub(crate) async fn unmount(
    cx: &Context,
    progress: &mut ForceProgress,
    index: DeviceIndex,
    scope: UnmountScope,
    deadline: Instant,
) {
    let holders_deadline = within(deadline, HOLDERS_TIMEOUT);
    match cx
        .urgent
        .wait("look for mounts", holders_deadline, None, move |k, _| k.holders(index))
        .await
    {
        Ok(holders) => {
            let mounts = holders.into_iter().filter(|h| matches!(h, Holder::Mount { .. }));
            progress.mounts.extend(mounts);
            if progress.mounts.is_empty() {
                return;
            }
        }
        Err(error) => progress.note = error.report(),
    }
    if scope == UnmountScope::None {
        return;
    }
    let unmount = move |k: &dyn cleat_kernel::Kernel, until| k.unmount(index, scope, until);
    let unmounted = cx.urgent.wait("unmount the device", deadline, None, unmount).await;
    if let Err(error) = unmounted {
        progress.note = match error.kind() {
            ErrorKind::TimedOut => "the writeback continues until the disconnect".to_owned(),
            _ => error.report(),
        };
    }
}
