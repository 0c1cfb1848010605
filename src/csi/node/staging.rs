//! The mounts at staging paths.

use std::path::Path;
use std::time::Duration;

use cleat_core::error::Result;
use tokio::time::Instant;

use crate::driver::{Device, Driver};
use crate::host::MountInfo;

/// A part of the names of Nomad's staging paths, as in `rw-file-system-single-node-writer`.
const NOMAD: &str = "-file-system-";

/// The timeout for removing a stale mount.
const STALE_TIMEOUT: Duration = Duration::from_secs(10);

/// Removes every mount at the staging path.
pub(super) async fn remove_mounts(
    driver: &Driver,
    staging: &Path,
    deadline: Instant,
) -> Result<()> {
    while driver.host.mount_at(staging).await?.is_some() {
        remove_mount(driver, staging, deadline).await?;
    }
    Ok(())
}

/// Removes a stale mount, which may not answer any more.
pub(super) async fn remove_mount(driver: &Driver, staging: &Path, deadline: Instant) -> Result<()> {
    let stale_deadline = deadline.min(Instant::now() + STALE_TIMEOUT);
    if driver.host.unmount(staging, stale_deadline).await.is_err() {
        driver.host.detach(staging, deadline).await?;
    }
    Ok(())
}

/// Returns whether another mount of the same device is at the same path, below this one.
pub(super) async fn is_mounted_twice(driver: &Driver, mount: &MountInfo) -> Result<bool> {
    let mounts = driver.host.mounts().await?;
    let is_same = |other: &&MountInfo| other.path == mount.path && other.device == mount.device;
    Ok(mounts.iter().filter(is_same).count() > 1)
}

/// Returns the mount of the volume at another staging path. Nomad has one for each way of use, all in one directory and
/// with [`NOMAD`] in their names; kubelet has only one.
pub(super) async fn other_staging(
    driver: &Driver,
    device: &Device,
    staging: &Path,
) -> Result<Option<MountInfo>> {
    let is_nomad =
        |path: &Path| path.file_name().is_some_and(|name| name.to_string_lossy().contains(NOMAD));
    if !is_nomad(staging) {
        return Ok(None);
    }
    let mut mounts = driver.host.mounts().await?.into_iter();
    Ok(mounts.find(|mount| {
        mount.device == Some(device.number)
            && mount.path != staging
            && mount.path.parent() == staging.parent()
            && is_nomad(&mount.path)
    }))
}
