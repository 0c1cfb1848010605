//! Finds the mapping or device that a user names by a name, a URI or a path.

use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;

use tokio::time::Instant;

use crate::context::Context;
use crate::devices::{devices, orphans};
use crate::mapping::{Guard, Mapping};
use crate::naming::mapped_as;
use crate::planner::Intent;
use cleat_backend::uri::shown;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_kernel::{Device, DeviceIndex, Identity};

/// The result of a search for a name, URI or path.
pub(crate) enum Target {
    /// A mapping.
    Mapping(Arc<Mapping>),
    /// A device of cleat that has no record.
    Orphan(DeviceIndex, Identity),
    /// Nothing of cleat has this name.
    Nothing,
}

/// Finds the mapping or device that `target` names.
///
/// # Errors
/// Returns `InvalidArgument` if `target` is ambiguous or a device of another program, and an error if the kernel's
/// devices cannot be listed until `deadline`.
pub(crate) async fn find(cx: &Context, target: &str, deadline: Instant) -> Result<Target> {
    if let Some(mapping) = cx.register.get(target) {
        return Ok(Target::Mapping(mapping));
    }
    if target.starts_with('/') {
        return find_device(cx, Path::new(target), deadline).await;
    }
    let mut named = mapped_as(&cx.register, target).into_iter();
    match (named.next(), named.next()) {
        (None, _) => find_orphan(cx, target, deadline).await,
        (Some(mapping), None) => Ok(Target::Mapping(mapping)),
        (Some(one), Some(other)) => {
            let message = format!(
                "{} is ambiguous: it is mapped as {} and as {}",
                shown(target),
                one.name,
                other.name
            );
            Err(Error::new(ErrorKind::InvalidArgument, message)
                .with_repair("use the name of the mapping"))
        }
    }
}

/// Finds a device without a record by the name in its identity, which `cleat ls` shows.
async fn find_orphan(cx: &Context, name: &str, deadline: Instant) -> Result<Target> {
    let mut named = orphans(cx, deadline).await?.into_iter().filter(|(_, id)| id.name() == name);
    match (named.next(), named.next()) {
        (None, _) => Ok(Target::Nothing),
        (Some((device, identity)), None) => Ok(Target::Orphan(device.index, identity)),
        (Some((one, _)), Some((other, _))) => {
            let (one, other) = (one.index, other.index);
            let message = format!(
                "{name} is ambiguous: /dev/nbd{one} and /dev/nbd{other} have this name and no record"
            );
            Err(Error::new(ErrorKind::InvalidArgument, message)
                .with_repair("use the path of the device"))
        }
    }
}

/// Finds the mapping or orphan of a device node or of a symlink to one.
async fn find_device(cx: &Context, path: &Path, deadline: Instant) -> Result<Target> {
    // Only paths under /dev are resolved: elsewhere a file server that hangs could block this thread. A
    // path that does not exist may still name a device whose node is gone.
    let normal = path.components().all(|part| part != std::path::Component::ParentDir);
    let real = match path.starts_with("/dev") && normal {
        true => std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned()),
        false => return Ok(Target::Nothing),
    };
    let index = real
        .strip_prefix("/dev")
        .ok()
        .and_then(|name| name.to_str()?.strip_prefix("nbd")?.parse::<DeviceIndex>().ok());
    let Some(index) = index else {
        let name = path.to_str().and_then(|p| p.strip_prefix("/dev/disk/by-id/cleat-"));
        return match name.and_then(|name| cx.register.get(name)) {
            Some(mapping) => Ok(Target::Mapping(mapping)),
            None if is_block_device(&real) => Err(foreign(path, &real)),
            None => Ok(Target::Nothing),
        };
    };
    // A device that is not connected is free: nothing is mapped.
    let Some(device) = connected(cx, index, deadline).await? else { return Ok(Target::Nothing) };
    let Some(identity) = device.identity() else { return Err(foreign(path, &real)) };
    let mapping = cx.register.get(identity.name());
    match mapping.filter(|mapping| mapping.mapping_id == identity.mapping_id()) {
        Some(mapping) => Ok(Target::Mapping(mapping)),
        None => Ok(Target::Orphan(index, identity)),
    }
}

/// Returns the device `index` if it is connected.
async fn connected(cx: &Context, index: DeviceIndex, deadline: Instant) -> Result<Option<Device>> {
    let find = |devices: Vec<Device>| {
        devices.into_iter().find(|device| device.index == index && device.connected)
    };
    match find(devices(cx, deadline).await?) {
        // The kernel removes `pid` and `backend` one after the other, so this device may be ours, and free soon.
        Some(device) if device.backend.is_none() => Ok(find(devices(cx, deadline).await?)),
        device => Ok(device),
    }
}

/// Returns whether `path`, which is below /dev, is the node of a block device.
fn is_block_device(path: &Path) -> bool {
    path.starts_with("/dev")
        && std::fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_block_device())
}

/// Returns the error for a device that cleat has not made. Success would mean that it is free. `real` is the path
/// of the device node that `path` leads to.
fn foreign(path: &Path, real: &Path) -> Error {
    let (path, real) = (path.display(), real.to_str().unwrap_or_default());
    let disk = real.rsplit_once('p').map(|(disk, _)| disk);
    let (message, repair) = match disk.filter(|disk| disk.starts_with("/dev/nbd")) {
        Some(disk) => (
            format!("{path} is a partition, which is not mapped by itself"),
            format!("name the whole device: {disk}"),
        ),
        None => (
            format!("{path} is not a device of cleat"),
            "cleat ls lists the devices of cleat; another program has made this one".to_owned(),
        ),
    };
    Error::new(ErrorKind::InvalidArgument, message).with_repair(repair)
}

/// Returns the mapping that `target` names.
///
/// # Errors
/// Returns `NotFound` if there is none, also for a device without a record, which can only be unmapped;
/// otherwise as [`find`].
pub(crate) async fn get(cx: &Context, target: &str, deadline: Instant) -> Result<Arc<Mapping>> {
    match find(cx, target, deadline).await? {
        Target::Mapping(mapping) => Ok(mapping),
        Target::Nothing => {
            let message = format!("no mapping has the name, URI or device {}", shown(target));
            Err(Error::new(ErrorKind::NotFound, message).with_repair("cleat ls lists the mappings"))
        }
        Target::Orphan(index, identity) => {
            let message = format!("/dev/nbd{index} ({}) has no record", identity.as_str());
            Err(Error::new(ErrorKind::NotFound, message).with_repair(format!(
                "cleat map URI --name {} adopts it; cleat unmap /dev/nbd{index} removes it",
                identity.name()
            )))
        }
    }
}

/// Locks a mapping that is to stay mapped. Waits until `deadline` for the supervisor's own work on it.
///
/// # Errors
/// Returns `Aborted` if another operation holds the guard, and `Unavailable` if the mapping is being
/// unmapped.
pub(crate) async fn lock_mapped(mapping: &Arc<Mapping>, deadline: Instant) -> Result<Guard> {
    let guard = mapping.lock_for_call(deadline).await?;
    if guard.teardown.removed || guard.record.intent != Intent::Mapped {
        return Err(not_mapped(mapping));
    }
    Ok(guard)
}

/// Returns the error for a mapping whose device does not work.
pub(crate) fn not_mapped(mapping: &Mapping) -> Error {
    Error::new(ErrorKind::Unavailable, format!("the device of {} does not work now", mapping.name))
        .with_repair(format!("cleat status {} shows the cause", mapping.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_not_ours_is_named_with_a_way_out() {
        let foreign = |path: &str, real: &str| {
            let error = foreign(Path::new(path), Path::new(real));
            (error.message().to_owned(), error.repair().unwrap().to_owned())
        };
        for (path, real) in
            [("/dev/nbd3", "/dev/nbd3"), ("/dev/sda", "/dev/sda"), ("/dev/mapper/p", "/dev/dm-0")]
        {
            assert_eq!(foreign(path, real).0, format!("{path} is not a device of cleat"));
        }
        let (message, repair) = foreign("/dev/disk/by-id/cleat-x-part2", "/dev/nbd3p2");
        assert!(message.starts_with("/dev/disk/by-id/cleat-x-part2 is a partition"), "{message}");
        assert_eq!(repair, "name the whole device: /dev/nbd3");
    }
}
