//! NodePublishVolume and NodeUnpublishVolume: a staged volume becomes visible at the path of a pod.

use std::path::Path;
use std::time::Duration;

use cleat_core::error::{Error, ErrorKind, Result};
use tokio::time::Instant;

use super::{Wanted, stage};
use crate::capability::Access;
use crate::driver::{Device, Driver};
use crate::host::MountInfo;

/// The timeout for unmounting a target path before it is detached.
const UNMOUNT_TIMEOUT: Duration = Duration::from_secs(20);

/// The types of the filesystem of /dev. In a container, it is often a tmpfs.
const DEV_FILESYSTEMS: [&str; 2] = ["devtmpfs", "tmpfs"];

/// Where a volume is to be published.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Target<'a> {
    pub(crate) staging: &'a Path,
    pub(crate) path: &'a Path,
    pub(crate) read_only: bool,
}

/// Publishes a volume. Stages it first if that is necessary, because kubelet does not always repeat
/// NodeStageVolume. A volume that is published already as wanted is success.
pub(crate) async fn publish(
    driver: &Driver,
    wanted: &Wanted,
    target: &Target<'_>,
    deadline: Instant,
) -> Result<()> {
    let is_block = wanted.capability.access == Access::Block;
    if is_block && target.read_only && !wanted.capability.read_only {
        let message = format!("volume {} is writable, so its device is so at each path", wanted.id);
        return Err(Error::new(ErrorKind::InvalidArgument, message)
            .with_repair("use the access mode ReadOnlyMany, which makes the device read-only"));
    }
    let wanted = &stage::stage(driver, wanted, target.staging, deadline).await?;
    let missing = || super::not_mapped(&wanted.id);
    let view = driver.mapped(&wanted.id, deadline).await?.ok_or_else(missing)?;
    let device = driver.device(&view, deadline).await?;
    // First, because kubelet makes further mounts of a volume that is published (`subPath`, block volumes), and repeats
    // this call when it has been restarted.
    if is_published(driver, wanted, &device, target, deadline).await? {
        return Ok(());
    }
    check_other_targets(driver, wanted, &device, target, deadline).await?;
    match &wanted.capability.access {
        Access::Block => {
            driver.host.make_file(target.path, deadline).await?;
            driver.host.bind_device(&device.node, target.path, deadline).await
        }
        Access::Filesystem { group, .. } => {
            if let Some(group) = group.filter(|_| !wanted.capability.read_only) {
                driver.host.apply_group(target.staging, group, deadline).await?;
            }
            driver.host.make_directory(target.path, deadline).await?;
            let read_only = target.read_only || wanted.capability.read_only;
            driver.host.bind(target.staging, target.path, read_only, deadline).await
        }
    }
}

/// Returns whether a mount shows the device: as its filesystem, or, for a block volume, as its node.
async fn shows(
    driver: &Driver,
    mount: &MountInfo,
    access: &Access,
    device: &Device,
    deadline: Instant,
) -> Result<bool> {
    match access {
        Access::Filesystem { .. } => Ok(mount.device == Some(device.number)),
        // The mount of a node has the filesystem of /dev.
        Access::Block if DEV_FILESYSTEMS.contains(&&*mount.filesystem) => {
            Ok(driver.host.block_device(&mount.path, deadline).await? == Some(device.number))
        }
        Access::Block => Ok(false),
    }
}

/// Refuses a second target path for a volume that only one pod may use.
async fn check_other_targets(
    driver: &Driver,
    wanted: &Wanted,
    device: &Device,
    target: &Target<'_>,
    deadline: Instant,
) -> Result<()> {
    if !wanted.capability.single_target {
        return Ok(());
    }
    // The table has the paths without symbolic links.
    let mut own = Vec::new();
    for path in [target.path, target.staging] {
        own.extend(driver.host.mount_at(path).await?.map(|mount| mount.path));
    }
    let mut other = None;
    for mount in driver.host.mounts().await? {
        if !own.contains(&mount.path)
            && shows(driver, &mount, &wanted.capability.access, device, deadline).await?
        {
            other = Some(mount);
            break;
        }
    }
    let Some(other) = other else { return Ok(()) };
    let message = format!(
        "volume {} is published at {} already, and its access mode allows one target path",
        wanted.id,
        other.path.display()
    );
    Err(Error::new(ErrorKind::InUse, message)
        .with_repair("end the other pod, or use the access mode ReadWriteOnce"))
}

/// Returns whether the volume is published at the target path as wanted. Removes every other mount there.
async fn is_published(
    driver: &Driver,
    wanted: &Wanted,
    device: &Device,
    target: &Target<'_>,
    deadline: Instant,
) -> Result<bool> {
    while let Some(mount) = driver.host.mount_at(target.path).await? {
        if shows(driver, &mount, &wanted.capability.access, device, deadline).await? {
            let writable = !mount.read_only;
            // The device of a block volume refuses writes by itself, if it is read-only.
            let is_block = wanted.capability.access == Access::Block;
            let wants_writes = !target.read_only && !wanted.capability.read_only;
            if is_block || writable == wants_writes {
                return Ok(true);
            }
            let message = format!(
                "volume {} is published at {} {} already",
                wanted.id,
                target.path.display(),
                if writable { "read-write" } else { "read-only" }
            );
            return Err(
                Error::new(ErrorKind::AlreadyExists, message).with_repair("unpublish it first")
            );
        }
        tracing::warn!(
            volume = wanted.id,
            path = %target.path.display(),
            "removing a stale mount of another device"
        );
        unmount_or_detach(driver, target.path, deadline).await?;
    }
    Ok(false)
}

/// Unpublishes a volume and removes its target path. A path that does not exist is success.
pub(crate) async fn unpublish(
    driver: &Driver,
    id: &str,
    target: &Path,
    deadline: Instant,
) -> Result<()> {
    while driver.host.mount_at(target).await?.is_some() {
        unmount_or_detach(driver, target, deadline).await?;
    }
    driver.host.remove(target, deadline).await?;
    tracing::debug!(volume = id, path = %target.display(), "unpublished");
    Ok(())
}

/// Unmounts a path. A bind mount has no data of its own, so one that cannot be unmounted in time is detached:
/// the staging mount still writes what is dirty.
async fn unmount_or_detach(driver: &Driver, path: &Path, deadline: Instant) -> Result<()> {
    let plain_deadline = deadline.min(Instant::now() + UNMOUNT_TIMEOUT);
    match driver.host.unmount(path, plain_deadline).await {
        Err(error) if matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::InUse) => {
            tracing::warn!(path = %path.display(), "detaching: {}", error.report());
            driver.host.detach(path, deadline).await
        }
        other => other,
    }
}
