//! The operations on filesystems and mounts that the driver needs, behind a trait, so that tests can stop
//! the driver between any two of them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_filesystem::{self as filesystem, FormatOptions, MountEntry, MountSpec, bounded};
use cleat_node::executor::MapSpec;
use cleat_sys::descriptor::block_device;
use tokio::time::Instant;

use crate::paths;

pub use cleat_filesystem::{CheckPolicy, Content, Found, Kind, Unlocked, Usage};
pub use cleat_sys::descriptor::DeviceNumber;

/// A mount of this mount namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountInfo {
    /// The mount point, without symbolic links.
    pub path: PathBuf,
    /// The block device; `None` for a filesystem without one.
    pub device: Option<DeviceNumber>,
    /// The type of the filesystem.
    pub filesystem: String,
    /// Whether this mount refuses writes.
    pub read_only: bool,
    /// Whether the filesystem itself refuses writes, also after an error.
    pub super_read_only: bool,
}

/// Returns the block device whose node is at `path`; `None` for anything else. Does not open the device. Blocks as
/// the filesystem does that has `path`; that of /dev does not.
fn device_at(path: &Path) -> Option<DeviceNumber> {
    block_device(path).ok().flatten()
}

impl MountInfo {
    fn of(entry: MountEntry) -> Self {
        let has = |options: &[std::ffi::OsString]| options.iter().any(|option| option == "ro");
        // btrfs has numbers of its own, with the major number 0, and lists the device as source.
        let source = Path::new(&entry.mount.source);
        let device = match entry.mount.number.major {
            0 if source.starts_with("/dev") => device_at(source),
            0 => None,
            _ => Some(entry.mount.number),
        };
        Self {
            read_only: has(&entry.options),
            super_read_only: has(&entry.super_options),
            path: entry.mount.path,
            device,
            filesystem: entry.mount.filesystem,
        }
    }
}

/// Finds out how a volume is mapped.
pub type Find = Box<dyn FnOnce() -> Result<MapSpec> + Send>;

/// Operations on this host. Every call ends at its deadline at the latest. The errors are those of
/// `cleat-filesystem`.
#[tonic::async_trait]
pub trait Host: Send + Sync {
    /// Runs `find`, which reads files of this node and may block, and returns its result. `id` is the volume that it
    /// finds.
    async fn find(&self, id: &str, find: Find, deadline: Instant) -> Result<MapSpec>;

    /// Returns the device number of a node in /dev; `None` if it is no block device. Does not block.
    fn device_number(&self, node: &Path) -> Option<DeviceNumber>;

    /// Returns the topmost mount at `path`; `None` if nothing is mounted there.
    async fn mount_at(&self, path: &Path) -> Result<Option<MountInfo>>;

    /// Returns every mount of this mount namespace.
    async fn mounts(&self) -> Result<Vec<MountInfo>>;

    /// Returns the block device whose node is at `path`; `None` for anything else.
    async fn block_device(&self, path: &Path, deadline: Instant) -> Result<Option<DeviceNumber>>;

    /// Makes a directory, with its parents, if it does not exist.
    async fn make_directory(&self, path: &Path, deadline: Instant) -> Result<()>;

    /// Makes an empty file, with the directories above it, if it does not exist.
    async fn make_file(&self, path: &Path, deadline: Instant) -> Result<()>;

    /// Removes the empty directory or the empty file at `path`. A missing one is success.
    async fn remove(&self, path: &Path, deadline: Instant) -> Result<()>;

    /// Returns what a device contains.
    async fn content(&self, device: &Path, deadline: Instant) -> Result<Content>;

    /// Returns the device of the device mapper with this name; `None` if there is none.
    async fn unlocked(&self, name: &str, deadline: Instant) -> Result<Option<Unlocked>>;

    /// Makes an empty device encrypted.
    async fn encrypt(&self, device: &Path, passphrase: &[u8], deadline: Instant) -> Result<()>;

    /// Makes the content of an encrypted device visible as the device `name` of the device mapper.
    async fn unlock(
        &self,
        device: &Path,
        name: &str,
        passphrase: &[u8],
        read_only: bool,
        deadline: Instant,
    ) -> Result<()>;

    /// Removes the device `name` of the device mapper. With `deferred`, one in use is removed when its last user ends.
    async fn lock(&self, name: &str, deferred: bool, deadline: Instant) -> Result<()>;

    /// Makes the device `name` of the device mapper as large as the device below it.
    async fn grow_unlocked(&self, name: &str, deadline: Instant) -> Result<()>;

    /// Makes a filesystem on an empty device.
    async fn format(&self, device: &Path, kind: Kind, deadline: Instant) -> Result<()>;

    /// Checks the filesystem of a device that is not mounted.
    async fn check(
        &self,
        device: &Path,
        kind: Kind,
        policy: CheckPolicy,
        deadline: Instant,
    ) -> Result<()>;

    /// Mounts the filesystem of a device.
    async fn mount(&self, mount: NewMount<'_>, deadline: Instant) -> Result<()>;

    /// Makes the directory `source` visible at `target`.
    async fn bind(
        &self,
        source: &Path,
        target: &Path,
        read_only: bool,
        deadline: Instant,
    ) -> Result<()>;

    /// Makes the node of a device visible at the file `target`.
    async fn bind_device(&self, device: &Path, target: &Path, deadline: Instant) -> Result<()>;

    /// Unmounts everything that is mounted at `path`. Writes the dirty data of the last mount of a filesystem.
    async fn unmount(&self, path: &Path, deadline: Instant) -> Result<()>;

    /// Removes everything that is mounted at `path` without a wait for its filesystem (MNT_DETACH).
    async fn detach(&self, path: &Path, deadline: Instant) -> Result<()>;

    /// Makes the filesystem at `mount_point` as large as its device, if it is smaller.
    async fn grow(
        &self,
        device: &Path,
        mount_point: &Path,
        kind: Kind,
        deadline: Instant,
    ) -> Result<()>;

    /// Gives the files below `mount_point` to a group, unless its root directory belongs to it already. Continues after
    /// the deadline until an unmount of `mount_point`; a repeated call waits for the end.
    async fn apply_group(&self, mount_point: &Path, group: u32, deadline: Instant) -> Result<()>;

    /// Discards the unused blocks of the filesystem at `mount_point`, and returns their number of bytes.
    async fn trim(&self, mount_point: &Path, deadline: Instant) -> Result<u64>;

    /// Returns how full the filesystem at `path` is.
    async fn usage(&self, path: &Path, deadline: Instant) -> Result<Usage>;
}

/// A mount to make.
#[derive(Debug, Clone, Copy)]
pub struct NewMount<'a> {
    /// The node of the device.
    pub device: &'a Path,
    /// The mount point: an existing directory.
    pub target: &'a Path,
    /// The type of the filesystem.
    pub kind: Kind,
    /// The options, without `ro` and `rw`.
    pub options: &'a [String],
    /// Whether the filesystem is mounted read-only.
    pub read_only: bool,
    /// Whether nothing else writes to the device, so that a read-only mount may do without the journal.
    pub may_skip_journal: bool,
}

/// This machine.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ThisHost;

/// How long reading the table of mounts may take.
const TABLE_TIMEOUT: Duration = Duration::from_secs(10);

#[tonic::async_trait]
impl Host for ThisHost {
    async fn find(&self, id: &str, find: Find, deadline: Instant) -> Result<MapSpec> {
        bounded("find", Path::new(id), deadline, find).await
    }

    fn device_number(&self, node: &Path) -> Option<DeviceNumber> {
        device_at(node)
    }

    async fn mount_at(&self, path: &Path) -> Result<Option<MountInfo>> {
        let found = filesystem::find(path, Instant::now() + TABLE_TIMEOUT).await?;
        Ok(found.map(MountInfo::of))
    }

    async fn mounts(&self) -> Result<Vec<MountInfo>> {
        let found = filesystem::mounts(Instant::now() + TABLE_TIMEOUT).await?;
        Ok(found.into_iter().map(MountInfo::of).collect())
    }

    async fn block_device(&self, path: &Path, deadline: Instant) -> Result<Option<DeviceNumber>> {
        let here = path.to_owned();
        let look = move || Ok(device_at(&here));
        bounded("examine", path, deadline, look).await
    }

    async fn make_directory(&self, path: &Path, deadline: Instant) -> Result<()> {
        let here = path.to_owned();
        bounded("make", path, deadline, move || paths::make_directory(&here)).await
    }

    async fn make_file(&self, path: &Path, deadline: Instant) -> Result<()> {
        let here = path.to_owned();
        bounded("make", path, deadline, move || paths::make_file(&here)).await
    }

    async fn remove(&self, path: &Path, deadline: Instant) -> Result<()> {
        let here = path.to_owned();
        bounded("remove", path, deadline, move || paths::remove(&here)).await
    }

    async fn content(&self, device: &Path, deadline: Instant) -> Result<Content> {
        filesystem::content(device, deadline).await
    }

    async fn unlocked(&self, name: &str, deadline: Instant) -> Result<Option<Unlocked>> {
        filesystem::unlocked(name, deadline).await
    }

    async fn encrypt(&self, device: &Path, passphrase: &[u8], deadline: Instant) -> Result<()> {
        filesystem::encrypt(device, passphrase, deadline).await
    }

    async fn unlock(
        &self,
        device: &Path,
        name: &str,
        passphrase: &[u8],
        read_only: bool,
        deadline: Instant,
    ) -> Result<()> {
        filesystem::unlock(device, name, passphrase, read_only, deadline).await
    }

    async fn lock(&self, name: &str, deferred: bool, deadline: Instant) -> Result<()> {
        filesystem::lock(name, deferred, deadline).await
    }

    async fn grow_unlocked(&self, name: &str, deadline: Instant) -> Result<()> {
        filesystem::grow_unlocked(name, deadline).await
    }

    async fn format(&self, device: &Path, kind: Kind, deadline: Instant) -> Result<()> {
        filesystem::format(device, kind, &FormatOptions::default(), deadline).await.map(drop)
    }

    async fn check(
        &self,
        device: &Path,
        kind: Kind,
        policy: CheckPolicy,
        deadline: Instant,
    ) -> Result<()> {
        filesystem::check(device, kind, policy, deadline).await.map(drop)
    }

    async fn mount(&self, mount: NewMount<'_>, deadline: Instant) -> Result<()> {
        let spec = MountSpec {
            source: mount.device.to_owned(),
            target: mount.target.to_owned(),
            kind: Some(mount.kind),
            options: mount.options.to_vec(),
            read_only: mount.read_only,
            // A clone is staged beside its source.
            duplicate_uuid: true,
            may_skip_journal: mount.may_skip_journal,
        };
        filesystem::mount(&spec, deadline).await.map(drop)
    }

    async fn bind(
        &self,
        source: &Path,
        target: &Path,
        read_only: bool,
        deadline: Instant,
    ) -> Result<()> {
        filesystem::bind(source, target, read_only, deadline).await.map(drop)
    }

    async fn bind_device(&self, device: &Path, target: &Path, deadline: Instant) -> Result<()> {
        filesystem::bind_device(device, target, deadline).await.map(drop)
    }

    async fn unmount(&self, path: &Path, deadline: Instant) -> Result<()> {
        let is_stopped = crate::group::stop(path, deadline).await;
        match filesystem::unmount(path, deadline).await {
            // The caller must learn that the storage does not answer, and may unmap by force then.
            Err(error) if error.kind() == ErrorKind::InUse && !is_stopped => {
                let message = format!(
                    "{} is in use by a change of the group of its files, which does not end",
                    path.display()
                );
                Err(Error::new(ErrorKind::TimedOut, message).with_source(error))
            }
            unmounted => unmounted.map(drop),
        }
    }

    async fn detach(&self, path: &Path, deadline: Instant) -> Result<()> {
        // A detach needs not wait for the end.
        let _ = crate::group::stop(path, deadline).await;
        filesystem::detach(path, deadline).await.map(drop)
    }

    async fn grow(
        &self,
        device: &Path,
        mount_point: &Path,
        kind: Kind,
        deadline: Instant,
    ) -> Result<()> {
        if filesystem::needs_growth(device, kind, deadline).await? {
            filesystem::grow(device, mount_point, kind, deadline).await?;
        }
        Ok(())
    }

    async fn apply_group(&self, mount_point: &Path, group: u32, deadline: Instant) -> Result<()> {
        crate::group::apply(mount_point, group, deadline).await
    }

    async fn trim(&self, mount_point: &Path, deadline: Instant) -> Result<u64> {
        filesystem::trim(mount_point, deadline).await
    }

    async fn usage(&self, path: &Path, deadline: Instant) -> Result<Usage> {
        filesystem::usage(path, deadline).await
    }
}
