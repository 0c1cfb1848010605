//! NodeGetVolumeStats: how full a volume is.

use std::path::Path;

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_csi_api::csi::v1 as csi;
use csi::volume_usage::Unit;
use tokio::time::Instant;

use super::not_mapped;
use crate::driver::Driver;

/// Returns the usage of the volume at `path`: bytes and inodes of a filesystem, or the size of a block volume.
///
/// # Errors
/// Returns `NotFound` if the volume is not at `path`.
pub(crate) async fn usage(
    driver: &Driver,
    id: &str,
    path: &Path,
    deadline: Instant,
) -> Result<Vec<csi::VolumeUsage>> {
    let view = driver.mapped(id, deadline).await?.ok_or_else(|| not_mapped(id))?;
    let device = driver.device(&view, deadline).await?;
    if driver.host.block_device(path, deadline).await? == Some(device.number) {
        let total = signed(device.size);
        return Ok(vec![csi::VolumeUsage {
            total,
            unit: Unit::Bytes.into(),
            ..Default::default()
        }]);
    }
    let mount =
        driver.host.mount_at(path).await?.filter(|mount| mount.device == Some(device.number));
    if mount.is_none() {
        let message = format!("volume {id} is not mounted at {}", path.display());
        return Err(Error::new(ErrorKind::NotFound, message));
    }
    let usage = driver.host.usage(path, deadline).await?;
    let entry = |unit: Unit, total, available, used| csi::VolumeUsage {
        total: signed(total),
        available: signed(available),
        used: signed(used),
        unit: unit.into(),
    };
    let bytes = entry(Unit::Bytes, usage.bytes.total, usage.bytes.available, usage.bytes.used);
    let inodes = &usage.inodes;
    // btrfs has no limit of inodes, and reports none.
    let inodes = (inodes.total > 0)
        .then(|| entry(Unit::Inodes, inodes.total, inodes.available, inodes.used));
    Ok([bytes].into_iter().chain(inodes).collect())
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
