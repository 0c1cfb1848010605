//! Opens a device exclusively for an unmap, which finds users inside the kernel and keeps others away.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::context::Context;
use crate::holders::{in_use_error, or_by_force};
use crate::mapping::Guard;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_kernel::{DeviceIndex, ExclusiveOpen, Identity, Kernel};

/// How long a short-lived exclusive open of another program is waited for, for example that of a scan for
/// members of a btrfs (before Linux 6.2) or of `wipefs`.
const TRANSIENT_TIMEOUT: Duration = Duration::from_secs(1);

/// Opens the device of a mapping, as an action of a plan. The guard keeps it open until the disconnect.
pub(crate) async fn run(
    cx: &Context,
    guard: &mut Guard,
    index: DeviceIndex,
    deadline: Instant,
) -> Result<()> {
    if guard.exclusive.contains_key(&index) {
        return Ok(());
    }
    let (identity, name) = (guard.record.identity(), guard.record.name.clone());
    let open = open_exclusively(cx, index, &identity, &name, deadline).await?;
    guard.exclusive.insert(index, open);
    Ok(())
}

/// Opens a device exclusively. `name` is that of its mapping, or its path.
///
/// # Errors
/// Returns `InUse`, with the users, if the device or a partition of it is claimed for longer than
/// [`TRANSIENT_TIMEOUT`]; `Unavailable` if it is not connected any more; `TimedOut` at `deadline`.
pub(crate) async fn open_exclusively(
    cx: &Context,
    index: DeviceIndex,
    identity: &Identity,
    name: &str,
    deadline: Instant,
) -> Result<ExclusiveOpen> {
    let transient_deadline = deadline.min(Instant::now() + TRANSIENT_TIMEOUT);
    loop {
        let identity = identity.clone();
        let open = move |k: &dyn Kernel, _| k.open_exclusively(index, &identity);
        let opened = cx.kernel.wait("open the device exclusively", deadline, None, open).await;
        match opened {
            Ok(Ok(open)) => return Ok(open),
            Ok(Err(holders)) if Instant::now() >= transient_deadline => {
                return Err(or_by_force(in_use_error(name, &holders), name));
            }
            Ok(Err(_)) => sleep(Duration::from_millis(50)).await,
            // The mapping is observed again.
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(Error::new(ErrorKind::Unavailable, error.report()));
            }
            Err(error) => return Err(error),
        }
    }
}
