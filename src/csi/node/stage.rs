//! NodeStageVolume and NodeUnstageVolume: a volume becomes a device and, with a filesystem, a mount at the
//! staging path.

use std::path::Path;
use std::time::Duration;

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_node::executor::MapSpec;
use cleat_node::mapping::View;
use tokio::time::Instant;

use super::staging::{is_mounted_twice, other_staging, remove_mount};
use super::{Wanted, encryption, key};
use crate::capability::Access;
use crate::driver::{Device, Driver};
use crate::grants::Permission;
use crate::host::{Content, Kind, NewMount};
use crate::source;
use crate::volume_id::mapping_name;

/// The filesystem of an empty volume whose caller names none.
const DEFAULT_KIND: Kind = Kind::Ext4;

/// The part of an unstage's time that a plain unmount may take. The rest is for the forced one.
const PLAIN_PART: f64 = 0.6;

/// How long a call waits until the storage has no claim on an unmapped volume.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// Stages a volume. A volume that is staged already as wanted is success. Returns the volume as it may be used.
pub(crate) async fn stage(
    driver: &Driver,
    wanted: &Wanted,
    staging: &Path,
    deadline: Instant,
) -> Result<Wanted> {
    let (view, granted) = match map(driver, wanted, deadline).await {
        Ok(mapped) => mapped,
        Err(error) => {
            if !driver.is_mapped(&wanted.id) {
                forget_key(driver, &wanted.id, deadline).await;
            }
            return Err(error);
        }
    };
    let wanted = &granted;
    let mut device = Device::of(&*driver.host, &view);
    if wanted.attributes.encrypted {
        device = Ok(encryption::unlocked(driver, wanted, &device?, staging, deadline).await?);
    }
    match &wanted.capability.access {
        Access::Block => {}
        Access::Filesystem { kind, options, .. } => {
            let device = device?;
            let read_only = wanted.capability.read_only;
            let record = &view.record;
            let may_skip_journal = record.grant != 0 || source::keeps_writers_away(&record.uri);
            let filesystem = Wish { kind: *kind, options, read_only, may_skip_journal };
            stage_filesystem(driver, wanted, &device, &filesystem, staging, deadline).await?;
        }
    }
    Ok(granted)
}

/// Removes the client of a volume that is not mapped. With grants, the agent still needs it to find out whether the
/// claim is released.
async fn forget_key(driver: &Driver, id: &str, deadline: Instant) {
    let until = deadline.min(Instant::now() + RELEASE_TIMEOUT);
    let is_released = match &driver.grants {
        Some(grants) => grants.released(id, until).await,
        None => true,
    };
    if is_released {
        key::forget(id);
    }
}

/// Maps the volume with its grant, as the client that the secrets name. Returns the volume as it may be used.
async fn map(driver: &Driver, wanted: &Wanted, deadline: Instant) -> Result<(View, Wanted)> {
    let permission = match &driver.grants {
        Some(grants) => grants.admit(&wanted.id, deadline).await?,
        None => without_grants(driver, wanted)?,
    };
    let wanted = wanted.granted(permission.usage)?;
    let (this, volume) = (driver.clone(), wanted.clone());
    let find = move || {
        let (id, attributes) = (&volume.id, &volume.attributes);
        let client = if source::uses_secrets(id, attributes, &volume.secrets)? {
            key::client(id, &volume.secrets, this.is_mapped(id))?
        } else {
            None
        };
        let capability = &volume.capability;
        source::map_spec(&this.config, &this.node, id, attributes, client.as_ref(), capability)
    };
    let spec = driver.host.find(&wanted.id, Box::new(find), deadline).await?;
    let spec = MapSpec { grant: permission.generation, ..spec };
    let view = driver.map(&wanted.id, &wanted.attributes, &spec, deadline).await?;
    Ok((view, wanted))
}

/// Returns the permission of a node that does not use grants.
///
/// # Errors
/// Returns `Unsupported` if the controller has granted the volume, and it is not mapped yet: a claim without the
/// generation could not be fenced.
fn without_grants(driver: &Driver, wanted: &Wanted) -> Result<Permission> {
    let generation = wanted.attributes.generation;
    if generation == 0 || driver.is_mapped(&wanted.id) {
        return Ok(Permission::default());
    }
    let message = format!(
        "volume {} is granted to this node (generation {generation}), and csi.grants is false",
        wanted.id
    );
    let repair = "set csi.grants = true in the configuration of the daemon, and restart it";
    Err(Error::new(ErrorKind::Unsupported, message).with_repair(repair))
}

/// The filesystem that a caller wants.
struct Wish<'a> {
    kind: Option<Kind>,
    options: &'a [String],
    read_only: bool,
    may_skip_journal: bool,
}

async fn stage_filesystem(
    driver: &Driver,
    wanted: &Wanted,
    device: &Device,
    wish: &Wish<'_>,
    staging: &Path,
    deadline: Instant,
) -> Result<()> {
    driver.host.make_directory(staging, deadline).await?;
    let mut staged = staged_kind(driver, &wanted.id, device, wish, staging, deadline).await?;
    if staged.is_none() {
        let kind = match other_staging(driver, device, staging).await? {
            Some(other) => other.filesystem.parse()?,
            None => prepare(driver, wanted, device, wish, deadline).await?,
        };
        let mount = NewMount {
            device: &device.node,
            target: staging,
            kind,
            options: wish.options,
            read_only: wish.read_only,
            may_skip_journal: wish.may_skip_journal,
        };
        driver.host.mount(mount, deadline).await?;
        // A mount of an earlier daemon may have ended meanwhile.
        staged = staged_kind(driver, &wanted.id, device, wish, staging, deadline).await?;
    }
    let kind = staged.ok_or_else(|| {
        let message = format!("volume {} did not stay mounted at {}", wanted.id, staging.display());
        Error::new(ErrorKind::Aborted, message).with_repair("repeat the call")
    })?;
    // Also if the volume was staged already: the call that mounted it may have been killed before this.
    if !wish.read_only {
        driver.host.grow(&device.node, staging, kind, deadline).await?;
    }
    Ok(())
}

/// Returns the type of the filesystem that is mounted at the staging path once and as wanted. Removes all other
/// mounts there.
async fn staged_kind(
    driver: &Driver,
    id: &str,
    device: &Device,
    wish: &Wish<'_>,
    staging: &Path,
    deadline: Instant,
) -> Result<Option<Kind>> {
    while let Some(mount) = driver.host.mount_at(staging).await? {
        let problem = if mount.device != Some(device.number) {
            "it is on another device"
        } else if mount.super_read_only && !wish.read_only {
            "the kernel has made its filesystem read-only after an error"
        } else if mount.read_only != wish.read_only {
            let message = format!(
                "volume {id} is staged at {} {} already",
                staging.display(),
                if mount.read_only { "read-only" } else { "read-write" }
            );
            return Err(
                Error::new(ErrorKind::AlreadyExists, message).with_repair("unstage it first")
            );
        } else if wish.kind.is_some_and(|kind| kind.name() != mount.filesystem) {
            let message = format!("volume {id} is staged already, with {}", mount.filesystem);
            return Err(
                Error::new(ErrorKind::AlreadyExists, message).with_repair("unstage it first")
            );
        } else if is_mounted_twice(driver, &mount).await? {
            "it is mounted twice"
        } else {
            return mount.filesystem.parse().map(Some);
        };
        tracing::warn!(volume = id, path = %staging.display(), "removing a stale staging mount: {problem}");
        remove_mount(driver, staging, deadline).await?;
    }
    Ok(None)
}

/// Makes sure that the device has the wanted filesystem, and that it is sound. Formats an empty device.
async fn prepare(
    driver: &Driver,
    wanted: &Wanted,
    device: &Device,
    wish: &Wish<'_>,
    deadline: Instant,
) -> Result<Kind> {
    let id = &wanted.id;
    let refused = |found: String, repair: &str| {
        let message = format!("volume {id} ({}) contains {found}", device.node.display());
        Err(Error::new(ErrorKind::InUse, message).with_repair(repair.to_owned()))
    };
    match driver.host.content(&device.node, deadline).await? {
        Content::Empty if wish.read_only => {
            refused("nothing, and a read-only volume is not formatted".into(), "write to it first")
        }
        Content::Empty => {
            let kind = wish.kind.unwrap_or(DEFAULT_KIND);
            tracing::info!(volume = id, "formatting the empty volume with {}", kind.name());
            driver.host.format(&device.node, kind, deadline).await?;
            Ok(kind)
        }
        Content::Filesystem(found) => {
            let Ok(kind) = found.kind.parse::<Kind>() else {
                return refused(
                    format!(
                        "the filesystem {}, which this driver does not mount; it is not formatted",
                        found.kind
                    ),
                    "copy its data to a volume with ext4, xfs or btrfs",
                );
            };
            if wish.kind.is_some_and(|wish| wish != kind) {
                return refused(
                    format!("the filesystem {}, and not the one that was asked for", kind.name()),
                    "set fsType to that filesystem, or leave it out",
                );
            }
            if !wish.read_only {
                let policy = wanted.attributes.check;
                driver.host.check(&device.node, kind, policy, deadline).await?;
            }
            Ok(kind)
        }
        Content::Other(what) => refused(
            format!("{what}, which is no filesystem; it is not formatted"),
            "use encrypted: \"true\" for crypto_LUKS, or volumeMode: Block, or erase the volume if its data is \
             not needed: wipefs --all",
        ),
        Content::Unknown(what) => refused(
            format!("{what}, but no known filesystem; it is not formatted"),
            "use volumeMode: Block; or, if the volume is new and its first format was cut off, or if its data is not \
             needed, erase it: blkdiscard --force --zeroout",
        ),
    }
}

/// Unstages a volume. A volume that is not staged is success. One whose backend does not answer, or that
/// another client owns, is unmapped by force in the last part of the time; one that is only slow is not.
///
/// # Errors
/// Returns `InUse` if the device has other users, and `TimedOut` if the volume is slow; the caller repeats the
/// call, and nothing is lost.
pub(crate) async fn unstage(
    driver: &Driver,
    id: &str,
    staging: &Path,
    deadline: Instant,
) -> Result<()> {
    end_use(driver, id, staging, deadline).await?;
    forget_key(driver, id, deadline).await;
    Ok(())
}

async fn end_use(driver: &Driver, id: &str, staging: &Path, deadline: Instant) -> Result<()> {
    if driver.is_lost(id, deadline).await? {
        tracing::warn!(
            volume = id,
            "another client owns the volume, or it has failed: unstaging by force"
        );
        return by_force(driver, id, staging, deadline).await;
    }
    let now = Instant::now();
    let plain_deadline = now + deadline.saturating_duration_since(now).mul_f64(PLAIN_PART);
    match plain(driver, id, staging, plain_deadline).await {
        Err(error) if error.kind() == ErrorKind::TimedOut => {
            if !driver.is_hung(id, deadline).await? {
                return Err(error.with_repair("repeat the call: the volume answers, but slowly"));
            }
            tracing::warn!(volume = id, "the volume hangs, unstaging by force: {}", error.report());
            by_force(driver, id, staging, deadline).await
        }
        other => other,
    }
}

async fn plain(driver: &Driver, id: &str, staging: &Path, deadline: Instant) -> Result<()> {
    driver.host.unmount(staging, deadline).await?;
    if let Some(view) = driver.mapped(id, deadline).await?
        && let Ok(device) = driver.device(&view, deadline).await
        && let Some(other) = other_staging(driver, &device, staging).await?
    {
        tracing::info!(volume = id, "the volume stays mapped for {}", other.path.display());
        return Ok(());
    }
    driver.unmap(id, deadline).await
}

async fn by_force(driver: &Driver, id: &str, staging: &Path, deadline: Instant) -> Result<()> {
    let done = driver.unmap_by_force(id, deadline).await?;
    driver.host.detach(staging, deadline).await?;
    driver.host.lock(&mapping_name(id), true, deadline).await?;
    tracing::warn!(volume = id, "{done}");
    Ok(())
}
