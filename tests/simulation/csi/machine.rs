//! What a supervisor leaves on its machine: mounts, files, the content of volumes, and programs that still run.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_csi::host::{DeviceNumber, Kind, MountInfo};
use cleat_kernel::sim::SimKernel;
use cleat_kernel::{Holder, Kernel as _};

use crate::clock;

/// The major number of nbd devices.
const NBD: u32 = 43;

/// The number of a device that is no nbd device, below a stale mount.
pub(crate) const FOREIGN: u32 = 9999;

/// The major number of devices of the device mapper.
const MAPPER: u32 = 253;

/// The difference between the number of a decrypted device and that of the device below it.
const DECRYPTED: u32 = 1000;

/// The machine, without the kernel's nbd devices.
pub(crate) struct Machine {
    kernel: SimKernel,
    /// In the order in which they were made.
    pub(crate) mounts: Vec<Mount>,
    pub(crate) paths: BTreeMap<PathBuf, Path>,
    /// The content of each volume, by the name of its mapping. What an encrypted one contains has a name of its own
    /// ([`decrypted`]).
    pub(crate) volumes: BTreeMap<String, Stored>,
    /// The decrypted devices.
    pub(crate) unlocked: Vec<Decrypted>,
    work: Vec<Work>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Path {
    Directory,
    File,
}

/// The content of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stored {
    Empty,
    /// A filesystem with its size in bytes; `data` and `group` stand for what its users have written.
    Filesystem {
        kind: Kind,
        size: u64,
        data: u32,
        group: u32,
    },
    /// Data without a filesystem.
    Data,
    /// An encrypted device.
    Encrypted,
}

/// A device that shows the content of an encrypted one.
#[derive(Debug, Clone)]
pub(crate) struct Decrypted {
    /// The name of the device, which is that of the mapping.
    pub(crate) name: String,
    /// The device below it.
    pub(crate) below: u32,
    /// The size in bytes.
    pub(crate) size: u64,
}

/// Returns the name of what an encrypted volume contains.
pub(crate) fn decrypted(volume: &str) -> String {
    format!("{volume}, decrypted")
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mount {
    pub(crate) path: PathBuf,
    /// The device, N of /dev/nbdN or of /dev/dm-N.
    pub(crate) index: u32,
    pub(crate) shown: Shown,
    pub(crate) read_only: bool,
}

/// What a mount shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shown {
    Filesystem(Kind),
    /// The node of the device.
    Node,
}

/// A program that uses a device until it ends.
struct Work {
    index: u32,
    name: String,
    ends: Instant,
    effect: Box<dyn FnOnce(&mut Machine) + Send>,
}

impl Mount {
    /// Returns the entry of the mount table.
    pub(crate) fn info(&self) -> MountInfo {
        let (device, filesystem) = match self.shown {
            Shown::Filesystem(kind) => (Machine::number(self.index), kind.name()),
            Shown::Node => (DeviceNumber { major: 0, minor: 5 }, "devtmpfs"),
        };
        MountInfo {
            path: self.path.clone(),
            device: Some(device),
            filesystem: filesystem.to_owned(),
            read_only: self.read_only,
            super_read_only: false,
        }
    }
}

impl Machine {
    pub(crate) fn new(kernel: SimKernel) -> Self {
        let (mounts, paths, volumes) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
        Self { kernel, mounts, paths, volumes, unlocked: Vec::new(), work: Vec::new() }
    }

    pub(crate) fn number(index: u32) -> DeviceNumber {
        let major = if index >= DECRYPTED && index != FOREIGN { MAPPER } else { NBD };
        DeviceNumber { major, minor: index }
    }

    /// Returns the number of the decrypted device above a device.
    pub(crate) fn above(index: u32) -> u32 {
        index + DECRYPTED
    }

    /// Returns the decrypted device with this number.
    fn decrypted_at(&self, index: u32) -> Option<&Decrypted> {
        self.unlocked.iter().find(|device| Self::above(device.below) == index)
    }

    /// Returns the topmost mount at a path.
    pub(crate) fn mount_at(&self, path: &std::path::Path) -> Option<&Mount> {
        self.mounts.iter().rfind(|mount| mount.path == path)
    }

    pub(crate) fn push(&mut self, mount: Mount) {
        self.mounts.push(mount);
        self.show_holders();
    }

    /// Removes the topmost mount at a path.
    pub(crate) fn pop(&mut self, path: &std::path::Path) {
        let topmost = self.mounts.iter().rposition(|mount| mount.path == path);
        topmost.into_iter().for_each(|at| drop(self.mounts.remove(at)));
        self.show_holders();
    }

    pub(crate) fn make(&mut self, path: PathBuf, kind: Path) {
        self.paths.insert(path, kind);
    }

    pub(crate) fn remove(&mut self, path: &std::path::Path) {
        self.paths.remove(path);
    }

    /// Stores the content of a volume.
    pub(crate) fn store(&mut self, volume: String, content: Stored) {
        self.volumes.insert(volume, content);
    }

    /// Adds a decrypted device.
    pub(crate) fn unlock(&mut self, device: Decrypted) {
        self.unlocked.push(device);
        self.show_holders();
    }

    /// Removes a decrypted device.
    pub(crate) fn lock(&mut self, name: &str) {
        self.unlocked.retain(|device| device.name != name);
        self.show_holders();
    }

    /// Returns the name of the mapping whose volume is connected to a device.
    pub(crate) fn volume_on(&self, index: u32) -> Result<String> {
        if let Some(device) = self.decrypted_at(index) {
            return self.volume_on(device.below).map(|volume| decrypted(&volume));
        }
        let device = self.kernel.show().into_iter().find(|device| device.index == index);
        let device = device.filter(|device| device.connected);
        let identity = device.and_then(|device| device.identity());
        let name = identity.map(|identity| identity.name().to_owned());
        name.ok_or_else(|| Error::new(ErrorKind::NotFound, "the device is not connected"))
    }

    pub(crate) fn stored(&self, index: u32) -> Result<Stored> {
        let volume = self.volume_on(index)?;
        Ok(self.volumes.get(&volume).copied().unwrap_or(Stored::Empty))
    }

    pub(crate) fn size(&self, index: u32) -> Result<u64> {
        self.volume_on(index)?;
        if let Some(device) = self.decrypted_at(index) {
            return Ok(device.size);
        }
        let device = self.kernel.show().into_iter().find(|device| device.index == index);
        Ok(device.map_or(0, |device| device.size))
    }

    /// Lets a program use a device for some time, at the end of which it has its effect.
    pub(crate) fn work(
        &mut self,
        index: u32,
        name: String,
        time: Duration,
        effect: Box<dyn FnOnce(&mut Self) + Send>,
    ) {
        self.work.push(Work { index, name, ends: clock::now() + time, effect });
        self.show_holders();
    }

    /// Returns the program that uses a device.
    pub(crate) fn worked_on(&self, index: u32) -> Option<String> {
        self.work.iter().find(|work| work.index == index).map(|work| work.name.clone())
    }

    /// Ends the programs whose time is over, and removes the mounts that the kernel has detached.
    pub(crate) fn settle(&mut self) {
        let Self { kernel, mounts, unlocked, .. } = self;
        mounts.retain(|mount| {
            let above = unlocked.iter().find(|device| Self::above(device.below) == mount.index);
            let index = above.map_or(mount.index, |device| device.below);
            let holders = kernel.holders(index).unwrap_or_default();
            let is_it = |holder: &Holder| matches!(holder, Holder::Mount { path, .. } if *path == mount.path);
            index == FOREIGN || mount.shown == Shown::Node || holders.iter().any(is_it)
        });
        let (ended, running): (Vec<Work>, Vec<Work>) =
            std::mem::take(&mut self.work).into_iter().partition(|work| work.ends <= clock::now());
        self.work = running;
        if !ended.is_empty() {
            ended.into_iter().for_each(|work| (work.effect)(self));
            self.show_holders();
        }
    }

    /// Makes the kernel show who uses each device.
    fn show_holders(&self) {
        for device in self.kernel.show() {
            let above = self.unlocked.iter().find(|above| above.below == device.index);
            let is_used = |index| {
                index == device.index || above.is_some() && index == Self::above(device.index)
            };
            let of_device = self.mounts.iter().filter(|mount| is_used(mount.index));
            let mounts = of_device.filter_map(|mount| match mount.shown {
                Shown::Filesystem(kind) => Some(Holder::Mount {
                    path: mount.path.clone(),
                    filesystem: kind.name().to_owned(),
                    namespace_pid: None,
                }),
                Shown::Node => None,
            });
            let name = format!("dm-{}", Self::above(device.index));
            let decrypted = above.map(|_| Holder::Device { name, mapper: None });
            self.kernel.set_holders(device.index, mounts.chain(decrypted).collect());
            let programs = self.work.iter().filter(|work| is_used(work.index));
            let programs = programs.map(|work| work.name.clone()).collect();
            self.kernel.set_kernel_users(device.index, programs);
        }
    }
}
