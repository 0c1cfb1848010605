//! Encrypted volumes: the content of the mapped device, decrypted, is a device of the device mapper with the name of
//! the mapping. The passphrase is in the secret of the call and is stored nowhere.

use std::path::Path;

use cleat_core::error::{Error, ErrorKind, Result};
use tokio::time::Instant;

use super::{Wanted, staging};
use crate::driver::{Device, Driver};
use crate::host::Content;
use crate::volume_id::mapping_name;

/// The name that blkid gives to an encrypted device.
const ENCRYPTED: &str = "crypto_LUKS";

/// Returns the device with the decrypted content of `mapped`, which it makes if there is none. An empty volume becomes
/// an encrypted one. Removes a device of the same name that is on another device, with its mount at the staging path
/// `path`.
///
/// # Errors
/// Returns `InUse` for a volume that contains anything but an encrypted device, and if a stale device has users;
/// `InvalidArgument` if the passphrase is needed and missing; `PermissionDenied` for a wrong one.
pub(super) async fn unlocked(
    driver: &Driver,
    wanted: &Wanted,
    mapped: &Device,
    path: &Path,
    deadline: Instant,
) -> Result<Device> {
    let (id, name) = (&wanted.id, mapping_name(&wanted.id));
    if let Some(device) = driver.host.unlocked(&name, deadline).await? {
        if device.below == [mapped.number] {
            return Ok(device.into());
        }
        tracing::warn!(volume = id, "removing {name}, which is on another device");
        staging::remove_mounts(driver, path, deadline).await?;
        driver.host.lock(&name, false, deadline).await?;
    }
    let passphrase = wanted.secrets.passphrase().ok_or_else(|| missing(id))?;
    let read_only = wanted.capability.read_only;
    match driver.host.content(&mapped.node, deadline).await? {
        Content::Other(found) if found == ENCRYPTED => {}
        Content::Empty if !read_only => {
            tracing::info!(volume = id, "encrypting the empty volume");
            driver.host.encrypt(&mapped.node, passphrase, deadline).await?;
        }
        found => {
            let message = format!(
                "volume {id} ({}) contains {found}, and not an encrypted device; it is not formatted",
                mapped.node.display()
            );
            return Err(Error::new(ErrorKind::InUse, message).with_repair(
                "remove encrypted from the attributes of the volume; or, if it is new and its first format was cut \
                 off, or if its data is not needed, erase it: blkdiscard --force --zeroout",
            ));
        }
    }
    match driver.host.unlock(&mapped.node, &name, passphrase, read_only, deadline).await {
        // A program of an earlier daemon has made it meanwhile.
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        unlocked => unlocked?,
    }
    let made = driver.host.unlocked(&name, deadline).await?;
    made.filter(|made| made.below == [mapped.number]).map(Device::from).ok_or_else(|| {
        let message = format!("the device {name} of volume {id} has ended or is on another device");
        Error::new(ErrorKind::Unavailable, message).with_repair("repeat the call")
    })
}

fn missing(id: &str) -> Error {
    let message =
        format!("volume {id} is encrypted, and the call has no secret with encryptionPassphrase");
    Error::new(ErrorKind::InvalidArgument, message).with_repair(
        "name the secret in csi.storage.k8s.io/node-stage-secret-name of the StorageClass, and stage the volume",
    )
}
