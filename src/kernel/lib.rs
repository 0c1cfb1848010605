//! The kernel's side of a mapping, behind one trait: nbd over generic netlink, udev, sysfs, mounts.
//!
//! Comes in: what a device should be. Goes out: what is. Every call may block, up to the deadline
//! it is given where it takes one; callers run them off their event loops. What may never happen
//! here: a decision. Which device to take, keep or drop is `control::mapping`'s to say; no backend
//! is known by name.
//!
//! `sim` is the same behaviour without a kernel, with scripted misbehaviour; one lifecycle suite
//! runs on both.

mod bounded_call;
pub mod cgroup;
mod events;
mod freeze;
mod identity;
mod mountinfo;
mod namespaces;
mod netlink;
pub mod real;
mod shared_scan;
#[cfg(any(test, feature = "sim"))]
pub mod sim;
mod sysfs;
pub mod udev;
mod unmount;
mod usage;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use cleat_core::error::{Error, ErrorKind, Result};
pub use identity::Identity;
pub use mountinfo::{Mount, parse_mountinfo};

/// The number in `/dev/nbdN`.
pub type DeviceIndex = u32;

/// What CONNECT sets up.
#[derive(Debug)]
pub struct ConnectSpec {
    /// The kernel's ends, connected AF_UNIX or TCP stream sockets; one per connection.
    pub sockets: Vec<OwnedFd>,
    /// In bytes.
    pub size: u64,
    /// 512, 1024, 2048 or 4096.
    pub block_size: u32,
    /// NBD transmission flags (`data::nbd::wire`), as the handshake would have given them.
    pub transmission_flags: u16,
    /// Goes into sysfs `backend`; RECONFIGURE must give the same. See [`Identity`].
    pub identity: Identity,
    /// How long new requests wait once every connection is dead, before they fail.
    pub dead_connection_timeout: Duration,
    /// NBD_ATTR_TIMEOUT: how long a request may take before its socket is given up. Zero: the
    /// kernel's 30 s tick, see DESIGN and `facts` of the driver.
    pub request_timeout: Duration,
    /// `/sys/block/nbdN/queue/io_timeout`, set before the first request where given.
    pub replay_delay: Option<Duration>,
}

/// An nbd device as sysfs shows it now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// N of `/dev/nbdN`.
    pub index: DeviceIndex,
    /// Whether it is configured (sysfs `pid` exists). Does not say that a socket is alive.
    pub connected: bool,
    /// The process that configured it, as the kernel remembers it.
    pub pid: Option<u32>,
    /// The backend identifier, ours or anybody's.
    pub backend: Option<String>,
    /// In bytes.
    pub size: u64,
}

impl Device {
    /// The identity, if the device is one of ours.
    pub fn identity(&self) -> Option<Identity> {
        self.backend.as_deref().and_then(Identity::parse)
    }
}

/// Who uses a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Holder {
    /// Mounted at `path`, in the mount namespace of `namespace_pid` (`None`: our own). One that
    /// several namespaces have at the same path is told once, as our own where we have it.
    Mount { path: PathBuf, filesystem: String, namespace_pid: Option<u32> },
    /// Open in a process (the device node itself).
    Process { pid: u32, command: String },
    /// A block device on top of it (`dm-0`, `loop3`), or swap (`swap`).
    Device { name: String },
}

/// Which mounts of a device are taken away when it is unmapped by force.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum UnmountScope {
    /// Those in every mount namespace.
    #[default]
    All,
    /// Those in the supervisor's own mount namespace.
    Own,
    /// None.
    None,
}

/// What became of a device that was severed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disconnected {
    /// Nothing is configured any more.
    Free,
    /// Every request of it fails; its configuration stays until whoever holds it lets go.
    Held,
}

/// Something that the kernel told by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelEvent {
    /// A connection of the device died (NBD_CMD_LINK_DEAD); which one, the kernel does not say.
    LinkDead(DeviceIndex),
    /// The device changed, appeared or vanished (udev).
    Changed(DeviceIndex),
}

/// The kernel. Implemented by `real` and `sim`.
pub trait Kernel: Send + Sync {
    /// Connects a device of the kernel's choice and returns its number. The identity's udev
    /// properties are in place before the device appears.
    ///
    /// # Errors
    /// `Unsupported` without the nbd module (with the repair), `PermissionDenied` without
    /// CAP_SYS_ADMIN; on any error nothing is left connected.
    fn connect(&self, spec: ConnectSpec) -> Result<DeviceIndex>;

    /// Gives dead connections new sockets. The kernel drops sockets silently when no connection is
    /// dead: the caller verifies through its own ends.
    ///
    /// # Errors
    /// `NotFound` when the device is not connected or has another identity.
    fn reconfigure(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        sockets: Vec<OwnedFd>,
    ) -> Result<()>;

    /// Sets a new size, in bytes.
    ///
    /// # Errors
    /// As `reconfigure`.
    fn resize(&self, index: DeviceIndex, identity: &Identity, size: u64) -> Result<()>;

    /// Disconnects, and returns when the device is free (sysfs `pid` gone) and its udev properties
    /// are withdrawn. A device that is not connected, or no longer has this identity, is success.
    ///
    /// # Errors
    /// `TimedOut` at the deadline; the command may still take effect later.
    fn disconnect(&self, index: DeviceIndex, identity: &Identity, deadline: Instant) -> Result<()>;

    /// Unmounts the device and its partitions lazily, where `which` allows: whoever uses the
    /// filesystems keeps what he has open, and nobody comes in any more. Returns when that is done
    /// and what they had to write is written, or has failed. What is mounted on them goes along.
    ///
    /// # Errors
    /// `TimedOut` at the deadline: it goes on behind the scenes. What cannot be unmounted is no
    /// error; it shows among the holders.
    fn unmount(&self, index: DeviceIndex, which: UnmountScope, deadline: Instant) -> Result<()>;

    /// Freezes the file systems that are mounted from the device, or from its partitions, in every mount
    /// namespace: what is dirty is written, and nobody writes until they are thawed. Returns those that
    /// somebody else had frozen before. On any error, and where it ends too late, none stays frozen.
    ///
    /// # Errors
    /// `NotFound` when the device is not connected as `identity`; `Unsupported` when a file system
    /// cannot be frozen, or lies on another device on top of this one; `TimedOut` at the deadline.
    fn freeze(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        deadline: Instant,
    ) -> Result<Vec<String>>;

    /// Thaws what was frozen; if by another process, everything that is mounted from the device but
    /// `spared`, what [`Kernel::freeze`] returned. What is not frozen is success.
    ///
    /// # Errors
    /// `TimedOut` at the deadline, when the backend hangs: it goes on behind the scenes.
    fn thaw(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        spared: &[String],
        deadline: Instant,
    ) -> Result<()>;

    /// Disconnects, whoever holds the device, and takes its names away, so that a new device can have
    /// them. Waits a moment for those who only look at it to let go. A device that is not connected,
    /// or no longer has this identity, is free.
    ///
    /// # Errors
    /// `TimedOut` at the deadline; the command may still take effect later.
    fn force_disconnect(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        deadline: Instant,
    ) -> Result<Disconnected>;

    /// Every nbd device that exists.
    ///
    /// # Errors
    /// When sysfs cannot be read.
    fn devices(&self) -> Result<Vec<Device>>;

    /// Who uses the device now: mounts in every mount namespace that can be seen, openers, stacked
    /// devices, swap. Advisory: it may change at any time.
    ///
    /// # Errors
    /// When /proc or sysfs cannot be read.
    fn holders(&self, index: DeviceIndex) -> Result<Vec<Holder>>;

    /// Waits until the device node and the symlink of `identity` exist and the size is right.
    /// Returns both paths.
    ///
    /// # Errors
    /// `TimedOut`, saying which of them is missing and what that hints at (udevd not running, rules
    /// not installed); `NotFound` as soon as the device is not connected as `identity` any more.
    fn wait_ready(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        size: u64,
        deadline: Instant,
    ) -> Result<DevicePaths>;

    /// Flushes the device's page cache to it (`fsync` of the node).
    ///
    /// # Errors
    /// When the device cannot be opened or written; `TimedOut` at the deadline, when the backend
    /// hangs: the flush goes on behind the scenes.
    fn flush(&self, index: DeviceIndex, deadline: Instant) -> Result<()>;

    /// Delivers events until the receiver is dropped. Events may be lost (a socket overflow): they
    /// are hints to look, never the only way to learn something.
    ///
    /// # Errors
    /// When the kernel refuses the subscription.
    fn events(&self) -> Result<crossbeam_channel::Receiver<KernelEvent>>;

    /// Calls that were given up and have not returned yet.
    fn stuck(&self) -> usize {
        0
    }
}

/// Where a device is found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DevicePaths {
    /// `/dev/nbdN`.
    pub node: PathBuf,
    /// `/dev/disk/by-id/cleat-<name>`.
    pub symlink: PathBuf,
}

/// Events that wait for a slow reader; more are lost.
const EVENT_QUEUE: usize = 1024;

fn module_missing() -> Error {
    Error::new(ErrorKind::Unsupported, "the kernel has no nbd driver loaded").with_repair(
        "run `modprobe nbd` (in a container: on the host); where that fails, install a kernel \
         package with the module nbd",
    )
}

fn permission_missing() -> Error {
    let message = "the kernel refuses to configure nbd devices";
    Error::new(ErrorKind::PermissionDenied, message).with_repair(
        "run cleat node as root, with CAP_SYS_ADMIN in the initial user namespace (in a container: \
         privileged)",
    )
}

fn not_ours(index: DeviceIndex, identity: &Identity) -> Error {
    let message = format!("/dev/nbd{index} is not connected as {}", identity.as_str());
    Error::new(ErrorKind::NotFound, message)
}
