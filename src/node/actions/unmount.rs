//! Unmounts a device lazily.

use std::time::Duration;

use tokio::time::Instant;

use crate::context::Context;
use crate::mapping::{ForceProgress, Guard};
use crate::worker_start::within;
use cleat_core::error::ErrorKind;
use cleat_kernel::{DeviceIndex, Holder, UnmountScope};

/// For lazy unmounts: with a worker that answers, and with one that is gone, when only the disconnect
/// will end what they write back.
pub(crate) const UNMOUNT_LIMIT: Duration = Duration::from_millis(1500);

pub(crate) const UNMOUNT_LIMIT_UNSERVED: Duration = Duration::from_millis(200);

/// For a look at the holders.
const LOOK_LIMIT: Duration = Duration::from_secs(1);

/// Unmounts the device of a mapping as an action of a plan.
pub(crate) async fn run(
    cx: &Context,
    guard: &mut Guard,
    index: DeviceIndex,
    unmount_what: UnmountScope,
    deadline: Instant,
) {
    let served = guard.worker.as_ref().is_some_and(|worker| !worker.has_ended());
    let limit = match served || guard.refusing.is_some() {
        true => UNMOUNT_LIMIT,
        false => UNMOUNT_LIMIT_UNSERVED,
    };
    // Never taken out of the guard: this may be cut off anywhere.
    let mut unreported = ForceProgress::default();
    let progress = guard.teardown.force.as_mut().unwrap_or(&mut unreported);
    unmount(cx, progress, index, unmount_what, within(deadline, limit)).await;
}

/// Never fails: whatever keeps the device shows in the end.
pub(crate) async fn unmount(
    cx: &Context,
    progress: &mut ForceProgress,
    index: DeviceIndex,
    unmount: UnmountScope,
    deadline: Instant,
) {
    let look = within(deadline, LOOK_LIMIT);
    match cx.urgent.wait("look for mounts", look, None, move |k, _| k.holders(index)).await {
        Ok(holders) => {
            let mounts = holders.into_iter().filter(|h| matches!(h, Holder::Mount { .. }));
            progress.mounts.extend(mounts);
            if progress.mounts.is_empty() {
                return;
            }
        }
        Err(error) => progress.note = error.report(),
    }
    if unmount == UnmountScope::None {
        return;
    }
    let detach = move |k: &dyn cleat_kernel::Kernel, until| k.unmount(index, unmount, until);
    let detached = cx.urgent.wait("unmount the device", deadline, None, detach).await;
    if let Err(error) = detached {
        progress.note = match error.kind() {
            ErrorKind::TimedOut => "writing back goes on until the disconnect".to_owned(),
            _ => error.report(),
        };
    }
}
