//! Block devices of the kernel: the nbd driver over generic netlink, udev, sysfs and mounts, behind one
//! trait.
//!
//! Input: what a device should be. Output: what it is. Every call of [`Kernel`] may block, up to the
//! deadline if it has one, so callers run the calls on separate threads. This crate never
//! decides which device to use, keep or remove: that is the planner's task (`cleat-node`). It names no
//! backend.
//!
//! [`real`] is the kernel of this machine. The module `sim` (feature `sim`) is a simulated kernel with
//! scripted failures, for tests; the same lifecycle tests run on both.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests wait in real time"))]

mod bounded_call;
pub mod cgroup;
mod events;
mod exclusive;
mod freeze;
mod identity;
mod kernel_users;
mod mount_table;
mod mountinfo;
mod namespaces;
mod netlink;
pub mod real;
mod shared_scan;
pub mod shutdown;
#[cfg(any(test, feature = "sim"))]
pub mod sim;
pub mod swap;
mod sysfs;
pub mod udev;
mod unmount;
mod usage;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use cleat_core::error::{Error, ErrorKind, Result};
pub use exclusive::ExclusiveOpen;
pub use identity::Identity;
pub use mount_table::{MountEntry, Propagation, parse_mount_table, topmost};
pub use mountinfo::{Mount, parse_mountinfo};

/// The number N of `/dev/nbdN`.
pub type DeviceIndex = u32;

/// The properties of a device that [`Kernel::connect`] sets up.
#[derive(Debug)]
pub struct ConnectSpec {
    /// The kernel's ends of the connections: connected AF_UNIX or TCP stream sockets, one for each
    /// connection.
    pub sockets: Vec<OwnedFd>,
    /// The size in bytes.
    pub size: u64,
    /// The logical block size in bytes: 512, 1024, 2048 or 4096.
    pub block_size: u32,
    /// NBD transmission flags (`cleat_nbd::wire::flag`), with the values that a handshake would give.
    pub transmission_flags: u16,
    /// The backend identifier, shown by sysfs as `backend`. RECONFIGURE must give the same one.
    pub identity: Identity,
    /// How long new requests wait after the last connection died, before they fail.
    pub dead_connection_timeout: Duration,
    /// How long a request may take before the driver drops its socket (NBD_ATTR_TIMEOUT). Zero
    /// leaves the driver's check every 30 s, which does not give up sockets of a single connection.
    pub request_timeout: Duration,
    /// The value for `/sys/block/nbdN/queue/io_timeout`, written before the first request: the time
    /// after which the driver checks an unanswered request. `None` keeps the kernel's 30 s.
    pub replay_delay: Option<Duration>,
}

/// An nbd device as sysfs shows it at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// The number N of `/dev/nbdN`.
    pub index: DeviceIndex,
    /// Whether the device is configured (sysfs `pid` exists). A configured device may have no live
    /// socket.
    pub connected: bool,
    /// The process that configured the device, as the kernel recorded it.
    pub pid: Option<u32>,
    /// The backend identifier. Other programs set other identifiers.
    pub backend: Option<String>,
    /// The size in bytes.
    pub size: u64,
    /// The logical block size in bytes.
    pub block_size: u32,
    /// The number of reads and writes that have been sent and not answered. The kernel does not count flushes.
    pub in_flight: u64,
}

impl Device {
    /// Returns the identity, if cleat configured the device.
    pub fn identity(&self) -> Option<Identity> {
        self.backend.as_deref().and_then(Identity::parse)
    }
}

/// A user of a device, which keeps the device from being free.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Holder {
    /// A mount at `path`, in the mount namespace of the process `namespace_pid` (`None`: in the mount
    /// namespace of this process). A mount that several namespaces have at the same path is listed
    /// once, as this process's own if it is one of them.
    Mount { path: PathBuf, filesystem: String, namespace_pid: Option<u32> },
    /// A process that has the device node open, or uses a file system on it that is no longer mounted.
    Process { pid: u32, command: String },
    /// A block device on top of the device (`dm-0`, `loop3`), or swap (`swap`). `mapper` is set for a device of
    /// the device mapper. The mounts of the device on top are holders of their own.
    Device { name: String, mapper: Option<Mapper> },
    /// A user inside the kernel without a mount, an open file or a device on top: another member of a file
    /// system on several devices, an external log, an exported target. `what` describes it.
    Kernel { what: String },
}

/// What the device mapper calls one of its devices (`/sys/block/dm-N/dm`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapper {
    /// The name of the node in `/dev/mapper`.
    pub name: String,
    /// The UUID. Its prefix shows who made the device: `LVM-`, `CRYPT-`.
    pub uuid: String,
}

/// The mounts that [`Kernel::unmount`] removes.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum UnmountScope {
    /// The mounts in every mount namespace.
    #[default]
    All,
    /// The mounts in the supervisor's own mount namespace.
    Own,
    /// No mount.
    None,
}

/// The state of a device after [`Kernel::force_disconnect`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disconnected {
    /// The device is no longer configured, and may be connected again.
    Free,
    /// Every request fails. The device stays configured until its last holder closes it.
    Held,
}

/// An event that the kernel reports by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelEvent {
    /// A connection of the device died (NBD_CMD_LINK_DEAD). The kernel does not report which one.
    LinkDead(DeviceIndex),
    /// The device changed, appeared or vanished (udev).
    Changed(DeviceIndex),
}

/// The operations on nbd devices that cleat needs from a kernel. `real::RealKernel` and
/// `sim::SimKernel` implement it.
pub trait Kernel: Send + Sync {
    /// Connects a device of the kernel's choice and returns its number. The udev properties of the
    /// identity are in place before the device appears. Blocks for at most 30 s.
    ///
    /// # Errors
    /// Returns `Unsupported` without the nbd module; `PermissionDenied` without CAP_SYS_ADMIN; `NoSpace` if
    /// no device is left; `TimedOut`. After an error no device stays connected.
    fn connect(&self, spec: ConnectSpec) -> Result<DeviceIndex>;

    /// Gives dead connections of a device new sockets. The kernel drops the sockets without an error
    /// when no connection is dead, so the caller must check its own ends. Blocks for at most 10 s.
    ///
    /// # Errors
    /// Returns `NotFound` if the device is not connected or has another identity, and `TimedOut` at the
    /// deadline.
    fn reconfigure(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        sockets: Vec<OwnedFd>,
    ) -> Result<()>;

    /// Sets a new size, in bytes. Blocks for at most 10 s.
    ///
    /// # Errors
    /// Returns the errors of [`Kernel::reconfigure`].
    fn resize(&self, index: DeviceIndex, identity: &Identity, size: u64) -> Result<()>;

    /// Disconnects a device. Returns when the device is free (sysfs `pid` is gone) and its udev
    /// properties are removed. A device that is not connected, or has another identity by now, is
    /// success.
    ///
    /// # Errors
    /// Returns `TimedOut` at the deadline; the kernel may still carry out the command later.
    fn disconnect(&self, index: DeviceIndex, identity: &Identity, deadline: Instant) -> Result<()>;

    /// Opens a device exclusively (O_EXCL), which claims the device and its partitions. No other program and
    /// no part of the kernel can claim one of them until the value is dropped. Returns the users that have
    /// claimed one of them as the inner error; [`Kernel::holders`] does not show all of these.
    ///
    /// May read the partition table, and then blocks until the device answers.
    ///
    /// # Errors
    /// Returns `NotFound` if the device is not connected as `identity`, and the errors of opening it.
    fn open_exclusively(
        &self,
        index: DeviceIndex,
        identity: &Identity,
    ) -> Result<Result<ExclusiveOpen, Vec<Holder>>>;

    /// Disconnects a device as [`Kernel::disconnect`] does, and closes `open` as soon as the kernel has
    /// carried out the command: an open device stays configured.
    ///
    /// # Errors
    /// Returns the errors of [`Kernel::disconnect`].
    fn disconnect_exclusively(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        open: ExclusiveOpen,
        deadline: Instant,
    ) -> Result<()>;

    /// Unmounts the device and its partitions lazily, in the namespaces of `which`, together with what
    /// is mounted below them. Processes keep the files that they have open; new opens find the mount
    /// gone. Returns when the mounts are gone and their dirty data is written, or has failed.
    ///
    /// # Errors
    /// Returns `TimedOut` at the deadline; the unmount continues in the background. A mount that cannot be
    /// removed is no error: [`Kernel::holders`] lists it.
    fn unmount(&self, index: DeviceIndex, which: UnmountScope, deadline: Instant) -> Result<()>;

    /// Freezes the file systems that are mounted from the device or its partitions, in every mount
    /// namespace: their dirty data is written, and writers wait until the file systems are thawed.
    /// Returns the file systems that another program had frozen before. After an error none of them
    /// stays frozen.
    ///
    /// # Errors
    /// Returns `NotFound` if the device is not connected as `identity`; `Unsupported` if a file system cannot
    /// be frozen, or is on another block device on top of this one; `TimedOut` at the deadline.
    fn freeze(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        deadline: Instant,
    ) -> Result<Vec<String>>;

    /// Thaws the file systems that [`Kernel::freeze`] froze. If an earlier supervisor process froze
    /// them, thaws everything that is mounted from the device, except `spared`, the list that
    /// [`Kernel::freeze`] returned. A file system that is not frozen is success.
    ///
    /// # Errors
    /// Returns `TimedOut` at the deadline, if the backend does not answer; the thaw continues in the
    /// background.
    fn thaw(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        spared: &[String],
        deadline: Instant,
    ) -> Result<()>;

    /// Disconnects a device even if it is held, and removes its names, so that a new device can have
    /// them. Waits up to 1 s for short-lived openers, such as udev probes. A device that is not
    /// connected, or has another identity by now, counts as free.
    ///
    /// # Errors
    /// Returns `TimedOut` at the deadline; the kernel may still carry out the command later.
    fn force_disconnect(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        deadline: Instant,
    ) -> Result<Disconnected>;

    /// Returns every nbd device that exists, connected or not.
    ///
    /// # Errors
    /// Returns an error if sysfs cannot be read.
    fn devices(&self) -> Result<Vec<Device>>;

    /// Returns the users of the device: mounts in every mount namespace that this process can see,
    /// openers, block devices on top of it, swap. The list is a snapshot and may change at any time. It has
    /// users inside the kernel only as far as sysfs and configfs name them.
    ///
    /// # Errors
    /// Returns an error if /proc or sysfs cannot be read, or the machine has more processes, open files or
    /// mounts than the bounds of this crate allow.
    fn holders(&self, index: DeviceIndex) -> Result<Vec<Holder>>;

    /// Waits until the device node and the symlink of `identity` exist and the size is right. Returns
    /// both paths.
    ///
    /// # Errors
    /// Returns `TimedOut`: the message names what is missing, the hint the probable cause (udevd does not
    /// run, the rules are not installed). `NotFound` as soon as the device is no longer connected as
    /// `identity`.
    fn wait_ready(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        size: u64,
        deadline: Instant,
    ) -> Result<DevicePaths>;

    /// Writes the dirty pages of the device to it (`fsync` of the device node).
    ///
    /// # Errors
    /// Returns an error if the device cannot be opened or written; `TimedOut` at the deadline, when the
    /// backend does not answer: the flush continues in the background.
    fn flush(&self, index: DeviceIndex, deadline: Instant) -> Result<()>;

    /// Reads the first block of the device from its server, past the page cache.
    ///
    /// # Errors
    /// Returns an error if the device cannot be opened or read; `TimedOut` at the deadline, when the backend does
    /// not answer: the read continues in the background.
    fn probe(&self, index: DeviceIndex, deadline: Instant) -> Result<()>;

    /// Returns a channel of events, which ends when the receiver is dropped. Events may be lost when a
    /// socket overflows, so a caller must also poll.
    ///
    /// # Errors
    /// Returns an error if the kernel refuses the subscription.
    fn events(&self) -> Result<crossbeam_channel::Receiver<KernelEvent>>;

    /// Returns the number of calls that missed their deadline and have not returned yet.
    fn stuck(&self) -> usize {
        0
    }
}

/// The paths of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DevicePaths {
    /// `/dev/nbdN`.
    pub node: PathBuf,
    /// `/dev/disk/by-id/cleat-<name>`.
    pub symlink: PathBuf,
}

/// The number of events that wait for a slow receiver; further events are lost.
const EVENT_QUEUE: usize = 1024;

fn module_missing() -> Error {
    Error::new(ErrorKind::Unsupported, "the kernel has no nbd driver loaded").with_repair(
        "run `modprobe nbd` (in a container: on the host); if that fails, install a kernel package \
         with the module nbd",
    )
}

fn permission_missing() -> Error {
    let message = "the kernel refuses to configure nbd devices: permission denied";
    Error::new(ErrorKind::PermissionDenied, message).with_repair(
        "run cleat node as root, with CAP_SYS_ADMIN in the initial user namespace (in a container: \
         privileged)",
    )
}

fn not_ours(index: DeviceIndex, identity: &Identity) -> Error {
    let message = format!("/dev/nbd{index} is not connected as {}", identity.as_str());
    Error::new(ErrorKind::NotFound, message)
}
