//! NodeExpandVolume: the device and its filesystem grow to the size of the volume.

use std::path::Path;

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_csi_api::csi::v1 as csi;
use cleat_node::executor::NewSize;
use tokio::time::Instant;

use super::not_mapped;
use crate::driver::Driver;
use crate::host::Kind;
use crate::volume_id::mapping_name;

/// Checks the wanted range of the size, and returns its lower bound; 0 without one.
pub(crate) fn size(range: Option<csi::CapacityRange>) -> Result<u64> {
    let range = range.unwrap_or_default();
    let invalid = |message: &str| Err(Error::new(ErrorKind::InvalidArgument, message));
    let (Ok(required), Ok(limit)) =
        (u64::try_from(range.required_bytes), u64::try_from(range.limit_bytes))
    else {
        return invalid("the capacity range is negative");
    };
    if limit != 0 && limit < required {
        return invalid("the upper bound of the capacity range is below its lower bound");
    }
    Ok(required)
}

/// Grows a volume at `path` to at least `wanted` bytes, or to what its storage says, and returns the size.
///
/// # Errors
/// Returns `NotFound` if the volume is not staged, or not at `path`.
pub(crate) async fn expand(
    driver: &Driver,
    id: &str,
    path: &Path,
    wanted: u64,
    deadline: Instant,
) -> Result<i64> {
    let view = driver.mapped(id, deadline).await?.ok_or_else(|| not_mapped(id))?;
    let device = driver.device(&view, deadline).await?;
    let mount =
        driver.host.mount_at(path).await?.filter(|mount| mount.device == Some(device.number));
    let node = driver.host.block_device(path, deadline).await?;
    if mount.is_none() && node != Some(device.number) {
        let message = format!("volume {id} is not at {}", path.display());
        return Err(Error::new(ErrorKind::NotFound, message));
    }
    let name = mapping_name(id);
    let adopt = NewSize { bytes: 0, shrink: false };
    let mut view = driver.executor.resize(&name, adopt, deadline).await?;
    let size = |view: &cleat_node::mapping::View| view.device.map_or(0, |device| device.size);
    if size(&view) < wanted {
        let grow = NewSize { bytes: wanted, shrink: false };
        view = driver.executor.resize(&name, grow, deadline).await?;
    }
    if driver.host.unlocked(&name, deadline).await?.is_some() {
        driver.host.grow_unlocked(&name, deadline).await?;
    }
    if let Some(mount) = mount.filter(|mount| !mount.read_only) {
        let kind: Kind = mount.filesystem.parse()?;
        driver.host.grow(&device.node, path, kind, deadline).await?;
    }
    Ok(i64::try_from(size(&view)).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_sizes() {
        let range = |required_bytes, limit_bytes| {
            size(Some(csi::CapacityRange { required_bytes, limit_bytes }))
        };
        assert_eq!(size(None).unwrap(), 0);
        assert_eq!(range(5, 0).unwrap(), 5);
        assert_eq!(range(5, 5).unwrap(), 5);
        for (required, limit) in [(-1, 0), (0, -1), (5, 4)] {
            assert_eq!(range(required, limit).unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
    }
}
