//! Finds what a user means by a name, a URI or a path.

use std::path::Path;
use std::sync::Arc;

use tokio::time::Instant;

use crate::context::Context;
use crate::devices::{devices, orphans};
use crate::mapping::{Guard, Mapping};
use crate::naming::mapped_as;
use crate::planner::Intent;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_kernel::{Device, DeviceIndex, Identity};

/// What stands behind a name, URI or path.
pub(crate) enum Target {
    /// A mapping.
    Mapping(Arc<Mapping>),
    /// A device of ours that has no record.
    Orphan(DeviceIndex, Identity),
    /// Nothing of ours.
    Nothing,
}

/// What a user means.
///
/// # Errors
/// `InvalidArgument` when several mappings are meant.
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
            let message = format!("{target} is mapped as {} and as {}", one.name, other.name);
            Err(Error::new(ErrorKind::InvalidArgument, message)
                .with_repair("say which by its name"))
        }
    }
}

/// A device without a record, by the name that its identity gives it and that lists show.
async fn find_orphan(cx: &Context, name: &str, deadline: Instant) -> Result<Target> {
    let mut named = orphans(cx, deadline).await?.into_iter().filter(|(_, id)| id.name() == name);
    match (named.next(), named.next()) {
        (None, _) => Ok(Target::Nothing),
        (Some((device, identity)), None) => Ok(Target::Orphan(device.index, identity)),
        (Some((one, _)), Some((other, _))) => {
            let (one, other) = (one.index, other.index);
            let message = format!("{name} is /dev/nbd{one} and /dev/nbd{other}, without a record");
            Err(Error::new(ErrorKind::InvalidArgument, message)
                .with_repair("say which by its device"))
        }
    }
}

/// What is behind a device node or a symlink to one.
async fn find_device(cx: &Context, path: &Path, deadline: Instant) -> Result<Target> {
    // Only what lies under /dev is looked at: elsewhere a file server that hangs could keep this
    // thread. A path that does not exist may still be the name of a device whose node is gone.
    let plain = path.components().all(|part| part != std::path::Component::ParentDir);
    let real = match path.starts_with("/dev") && plain {
        true => std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned()),
        false => return Ok(Target::Nothing),
    };
    let index = real
        .strip_prefix("/dev")
        .ok()
        .and_then(|name| name.to_str()?.strip_prefix("nbd")?.parse::<DeviceIndex>().ok());
    let Some(index) = index else {
        let name = path.to_str().and_then(|p| p.strip_prefix("/dev/disk/by-id/cleat-"));
        let mapping = name.and_then(|name| cx.register.get(name));
        return Ok(mapping.map_or(Target::Nothing, Target::Mapping));
    };
    let devices = devices(cx, deadline).await?;
    let device = devices.iter().find(|device| device.index == index && device.connected);
    let Some(identity) = device.and_then(Device::identity) else { return Ok(Target::Nothing) };
    let mapping = cx.register.get(identity.name());
    match mapping.filter(|mapping| mapping.mapping_id == identity.mapping_id()) {
        Some(mapping) => Ok(Target::Mapping(mapping)),
        None => Ok(Target::Orphan(index, identity)),
    }
}

/// The mapping that a user means.
///
/// # Errors
/// `NotFound` when there is none; `InUse`, for an orphan, which can only be unmapped.
pub(crate) async fn get(cx: &Context, target: &str, deadline: Instant) -> Result<Arc<Mapping>> {
    match find(cx, target, deadline).await? {
        Target::Mapping(mapping) => Ok(mapping),
        Target::Nothing => {
            let message = format!("nothing is mapped as {target}");
            Err(Error::new(ErrorKind::NotFound, message).with_repair("cleat ls shows what is"))
        }
        Target::Orphan(index, identity) => {
            let message = format!("/dev/nbd{index} ({}) has no record", identity.as_str());
            Err(Error::new(ErrorKind::NotFound, message)
                .with_repair(format!("cleat unmap /dev/nbd{index}")))
        }
    }
}

pub(crate) async fn lock_mapped(mapping: &Arc<Mapping>) -> Result<Guard> {
    let guard = mapping.lock_for_call().await?;
    if guard.teardown.removed || guard.record.intent != Intent::Mapped {
        return Err(not_mapped(mapping));
    }
    Ok(guard)
}

pub(crate) fn not_mapped(mapping: &Mapping) -> Error {
    Error::new(ErrorKind::Unavailable, format!("{} does not work just now", mapping.name))
        .with_repair(format!("cleat status {} says why", mapping.name))
}
