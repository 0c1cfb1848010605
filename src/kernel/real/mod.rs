//! The kernel of this machine.

mod flush;
mod module;
mod names;
mod wait;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;

use self::flush::Flushes;
use self::wait::{NotReady, not_ready, still_configured};
use super::bounded_call::BoundedCalls;
use super::events::Hub;
use super::freeze::Freezes;
use super::netlink::{self, Netlink};
use super::shared_scan::SharedScan;
use super::sysfs::{Disk, Sysfs};
use super::udev::{Missing, Names};
use super::unmount::unmount;
use super::usage::{Proc, Usage};
use super::{
    ConnectSpec, Device, DeviceIndex, DevicePaths, Disconnected, EVENT_QUEUE, ExclusiveOpen,
    Holder, Identity, Kernel, KernelEvent, UnmountScope, exclusive, not_ours,
};
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_sys::process::keep_only;

/// The time limit of netlink commands that have no deadline.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);
/// The time limit of a connect. It is longer than that of other commands: the kernel executes the commands of
/// all threads one at a time (genl_mutex in net/netlink/genetlink.c), and each connect freezes the queue of its
/// device several times.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a device may lack its symlink before the kernel is asked for another uevent. udevd may handle
/// the first one before `backend` exists in sysfs: CONNECT sets the size first (nbd_genl_connect).
const ANNOUNCE_AFTER: Duration = Duration::from_millis(200);
/// The number of events that are kept for a call that waits for a device; the first one is enough.
const WAIT_QUEUE: usize = 32;
/// The maximum number of netlink commands that may be stuck. They share one lock, so more would only wait
/// behind these.
const STUCK_COMMANDS: usize = 8;
/// The maximum number of unmounts that may be stuck, one for each device and namespace: each waits for its own
/// backend.
const STUCK_UNMOUNTS: usize = 64;
/// The maximum number of reads, and of writes to sysfs, that may be stuck: each waits for its own backend.
const STUCK_PROBES: usize = 64;
/// How long a new device may take to set its queue, before the mapping continues without.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(2);
/// The size of the largest block of a device, in bytes.
const MAX_BLOCK: usize = 4096;
/// How long short-lived openers of a device, such as udev probes, may take to close it.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// The nbd driver of the running kernel, with udev, sysfs and /proc.
#[derive(Debug)]
pub struct RealKernel {
    sysfs: Sysfs,
    device_scan: SharedScan<Vec<Device>>,
    proc: Proc,
    usage_scan: SharedScan<Usage>,
    names: Names,
    /// Threads for calls into the driver. Flushes and unmounts have their own, so that backends that do
    /// not answer never block commands.
    threads: BoundedCalls,
    flushes: Flushes,
    unmounts: BoundedCalls,
    probes: BoundedCalls,
    freezes: Freezes,
    netlink: Netlink,
    hub: Mutex<Option<Hub>>,
    loads_module: bool,
}

impl RealKernel {
    /// Makes the interface to the kernel. There must be one supervisor on the machine. udev properties are
    /// written below `run_directory`. If that is not [`super::udev::RUN_DIRECTORY`], which
    /// `systemd/60-cleat.rules` names, this process makes the symlinks.
    pub fn new(run_directory: &Path) -> Self {
        let threads = BoundedCalls::new(STUCK_COMMANDS);
        let names = Names { dev: PathBuf::from("/dev"), run: run_directory.to_owned() };
        if names.makes_symlinks() {
            tracing::info!("no udevd with the rule of cleat: cleat makes the symlinks");
        }
        let kernel = Self {
            sysfs: Sysfs(PathBuf::from("/sys")),
            device_scan: SharedScan::default(),
            proc: Proc(PathBuf::from("/proc")),
            usage_scan: SharedScan::default(),
            names,
            netlink: Netlink::new(threads.clone()),
            threads,
            flushes: Flushes::default(),
            unmounts: BoundedCalls::new(STUCK_UNMOUNTS),
            probes: BoundedCalls::new(STUCK_PROBES),
            freezes: Freezes::default(),
            hub: Mutex::new(None),
            loads_module: true,
        };
        if let Err(error) = kernel.clear_leftovers() {
            tracing::warn!(
                error = error.report(),
                "cannot remove the names of devices that are gone"
            );
        }
        kernel
    }

    /// Sets whether a missing driver is loaded. The default is true.
    #[must_use]
    pub fn loading_module(mut self, loads_module: bool) -> Self {
        self.loads_module = loads_module;
        self
    }

    /// Returns the driver's own list: each device's index and whether it is configured. Blocks for at most
    /// 10 s.
    ///
    /// # Errors
    /// Returns the errors of [`Kernel::connect`].
    pub fn status(&self) -> Result<Vec<(DeviceIndex, bool)>> {
        self.netlink.status(SystemClock.now() + COMMAND_TIMEOUT)
    }
}

/// Reads the first block of a device past the page cache.
fn read_first_block(node: &Path) -> std::io::Result<()> {
    let device = File::options().read(true).custom_flags(libc::O_DIRECT).open(node)?;
    // O_DIRECT needs an aligned buffer.
    let mut buffer = vec![0; 2 * MAX_BLOCK];
    let start = buffer.as_ptr().align_offset(MAX_BLOCK);
    device.read_exact_at(&mut buffer[start..start + MAX_BLOCK], 0)
}

/// Checks that the nbd driver answers. Does not load it. Blocks until `deadline` at most.
///
/// # Errors
/// Returns `Unsupported` if it is not loaded; `TimedOut` if a stuck command blocks it.
pub fn probe(deadline: Instant) -> Result<()> {
    BoundedCalls::new(1).run("answer for nbd", deadline, netlink::probe, |_| ())?
}

impl Kernel for RealKernel {
    fn connect(&self, spec: ConnectSpec) -> Result<DeviceIndex> {
        self.load_module()?;
        let identity = spec.identity.clone();
        let replay_delay = spec.replay_delay;
        self.names.publish(&identity)?;
        let deadline = SystemClock.now() + CONNECT_TIMEOUT;
        let (netlink, meant) = (self.netlink.clone(), self.is_connected_as(identity.clone()));
        let late = move |index| {
            tracing::warn!(index, "a device was connected after the deadline: disconnecting it");
            let deadline = SystemClock.now() + COMMAND_TIMEOUT;
            if let Err(error) = netlink.disconnect(index, deadline, move || meant(index)) {
                tracing::error!(
                    index,
                    error = error.report(),
                    "cannot disconnect a device that was connected too late"
                );
            }
        };
        let index = self.netlink.connect(spec, deadline, late).inspect_err(|_| {
            self.names.withdraw(&identity);
        })?;
        // As early as possible: a request keeps the timeout that it was started with.
        let prepared = replay_delay
            .map_or(Ok(()), |delay| self.sysfs.set_replay_delay(index, delay))
            .and_then(|()| match self.names.makes_symlinks() {
                true => self.names.make_symlink(index, &identity),
                false => Ok(()),
            });
        if let Err(error) = prepared {
            let undone = self.disconnect(index, &identity, SystemClock.now() + COMMAND_TIMEOUT);
            if let Err(undone) = undone {
                tracing::error!(
                    index,
                    error = undone.report(),
                    "cannot disconnect a device whose setup failed"
                );
            }
            return Err(error);
        }
        self.set_queue(index, identity);
        Ok(index)
    }

    fn reconfigure(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        sockets: Vec<OwnedFd>,
    ) -> Result<()> {
        self.sysfs.connected_device(index, identity)?.ok_or_else(|| not_ours(index, identity))?;
        let deadline = SystemClock.now() + COMMAND_TIMEOUT;
        self.netlink.reconfigure(index, identity, sockets, None, deadline)
    }

    fn resize(&self, index: DeviceIndex, identity: &Identity, size: u64) -> Result<()> {
        self.sysfs.connected_device(index, identity)?.ok_or_else(|| not_ours(index, identity))?;
        let deadline = SystemClock.now() + COMMAND_TIMEOUT;
        self.netlink.reconfigure(index, identity, Vec::new(), Some(size), deadline)
    }

    fn disconnect(&self, index: DeviceIndex, identity: &Identity, deadline: Instant) -> Result<()> {
        if self.sysfs.connected_device(index, identity)?.is_some() {
            let meant = self.is_connected_as(identity.clone());
            match self.netlink.disconnect(index, deadline, move || meant(index)) {
                // The device was disconnected in the meantime.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                result => result?,
            }
            // The kernel sends no event after the end of `pid` (nbd_config_put sends it before).
            let gone = self.wait(deadline, None, || {
                let device = self.sysfs.connected_device(index, identity)?;
                Ok(device.is_none().then_some(()))
            })?;
            gone.ok_or_else(|| still_configured(index))?;
        }
        self.withdraw(index, identity, deadline)
    }

    fn open_exclusively(
        &self,
        index: DeviceIndex,
        identity: &Identity,
    ) -> Result<Result<ExclusiveOpen, Vec<Holder>>> {
        let check = || {
            let device = self.sysfs.connected_device(index, identity)?;
            device.map(drop).ok_or_else(|| not_ours(index, identity))
        };
        check()?;
        let disk = self.sysfs.disk(index)?;
        let opened = exclusive::open(&self.names.dev, &disk)?;
        // While it is open, its number belongs to no other device.
        check()?;
        Ok(opened.map_err(|claimed| self.claimants(&disk, &claimed)))
    }

    fn disconnect_exclusively(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        open: ExclusiveOpen,
        deadline: Instant,
    ) -> Result<()> {
        let meant = self.is_connected_as(identity.clone());
        match self.netlink.disconnect(index, deadline, move || meant(index)) {
            // The device was disconnected in the meantime.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            result => result?,
        }
        // From here on every request fails.
        drop(open);
        self.disconnect(index, identity, deadline)
    }

    fn unmount(&self, index: DeviceIndex, which: UnmountScope, deadline: Instant) -> Result<()> {
        let disk = self.sysfs.disk(index)?;
        unmount(&self.proc, &self.unmounts, &disk, which, deadline)
    }

    fn freeze(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        deadline: Instant,
    ) -> Result<Vec<String>> {
        self.sysfs.connected_device(index, identity)?.ok_or_else(|| not_ours(index, identity))?;
        let disk = self.sysfs.disk(index)?;
        if let Some(upper) = self.sysfs.stacked(index, &disk)?.first() {
            let message = format!(
                "cannot freeze /dev/nbd{index}: {upper} is on top of it, and its file systems stay writable"
            );
            return Err(Error::new(ErrorKind::Unsupported, message)
                .with_repair("freeze them in a hook: set map.quiesce_hook in cleat.toml"));
        }
        self.freezes.freeze(&self.proc, index, &disk, deadline)
    }

    fn thaw(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        spared: &[String],
        deadline: Instant,
    ) -> Result<()> {
        // If the device has another identity by now, its file systems were not frozen by this mapping.
        let ours =
            |device: &Device| !device.connected || device.identity().as_ref() == Some(identity);
        let device = self.sysfs.device(index)?.filter(ours);
        let disk = device.map(|_| self.sysfs.disk(index)).transpose()?;
        self.freezes.thaw(&self.proc, index, disk.as_ref(), spared, deadline)
    }

    fn force_disconnect(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        deadline: Instant,
    ) -> Result<Disconnected> {
        let meant = self.is_connected_as(identity.clone());
        match self.netlink.disconnect(index, deadline, move || meant(index)) {
            // The device was disconnected in the meantime.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            result => result?,
        }
        let close_deadline = deadline.min(SystemClock.now() + CLOSE_TIMEOUT);
        let gone = self.wait(close_deadline, None, || {
            let device = self.sysfs.connected_device(index, identity)?;
            Ok(device.is_none().then_some(()))
        })?;
        if gone.is_none() {
            self.remove_names_of_held(index, identity);
        }
        self.withdraw(index, identity, deadline)?;
        Ok(if gone.is_some() { Disconnected::Free } else { Disconnected::Held })
    }

    fn devices(&self) -> Result<Vec<Device>> {
        self.device_scan.get(|| self.sysfs.devices()).map(|devices| devices.to_vec())
    }

    fn holders(&self, index: DeviceIndex) -> Result<Vec<Holder>> {
        let disk = self.sysfs.disk(index)?;
        let usage = self.usage_scan.get(|| self.proc.usage())?;
        let stacked = self.sysfs.stacked(index, &disk)?;
        // The order in which they must be removed: the file systems on top come first.
        let mut holders = Vec::new();
        for name in &stacked {
            holders.extend(usage.mounts_on(&self.sysfs.whole_disk(name)));
        }
        let own = usage.holders(&disk)?;
        // A mounted file system is named by its mount.
        let is_mounted = own.iter().any(|holder| matches!(holder, Holder::Mount { .. }));
        holders.extend(own);
        holders.extend(stacked.into_iter().map(|name| {
            let mapper = self.sysfs.mapper(&name);
            Holder::Device { name, mapper }
        }));
        if !is_mounted {
            let users = self.sysfs.kernel_users(&disk);
            holders.extend(users.into_iter().map(|what| Holder::Kernel { what }));
        }
        Ok(holders)
    }

    fn wait_ready(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        size: u64,
        deadline: Instant,
    ) -> Result<DevicePaths> {
        let events = self.device_events();
        let paths = self.names.paths(index, identity);
        let mut announced = SystemClock.now();
        let mut missing = None;
        let ready = self.wait(deadline, events.as_ref().map(|events| (events, index)), || {
            let device = self.sysfs.connected_device(index, identity)?;
            let device = device.ok_or_else(|| not_ours(index, identity))?;
            let disk = self.sysfs.disk(index)?;
            let Some(number) = disk.numbers.first() else { return Ok(None) };
            missing = if device.size == size {
                self.names.missing(index, identity, *number).map(NotReady::Name)
            } else {
                Some(NotReady::Size(device.size))
            };
            let Some(NotReady::Name(Missing::Symlink | Missing::WrongSymlink(_))) = &missing else {
                return Ok(missing.is_none().then_some(()));
            };
            // Not while udevd has events to process: further events would only slow it down.
            if SystemClock.elapsed_since(announced) >= ANNOUNCE_AFTER && super::udev::udevd_idle() {
                self.sysfs.announce(index);
                announced = SystemClock.now();
            }
            Ok(None)
        })?;
        match (ready, missing) {
            (Some(()), _) => {
                self.wait_for_partitions(index, identity, events.as_ref(), deadline)?;
                Ok(paths)
            }
            (None, missing) => Err(not_ready(index, size, &paths, missing)),
        }
    }

    fn flush(&self, index: DeviceIndex, deadline: Instant) -> Result<()> {
        let node = self.names.node(index);
        // Opened for reading: closing a device that was open for writing makes udevd probe it again.
        self.flushes.run(&node.clone(), deadline, move || {
            keep_only(&[])?;
            File::open(node)?.sync_all()
        })
    }

    fn probe(&self, index: DeviceIndex, deadline: Instant) -> Result<()> {
        let node = self.names.node(index);
        let what = format!("read {}", node.display());
        let read = move || {
            keep_only(&[])?;
            read_first_block(&node)
        };
        let read = self.probes.run(&what, deadline, read, drop)?;
        read.map_err(|error| Error::from_io(format!("cannot {what}"), error))
    }

    fn events(&self) -> Result<Receiver<KernelEvent>> {
        self.load_module()?;
        self.subscribe(EVENT_QUEUE)
    }

    fn stuck(&self) -> usize {
        self.threads.stuck()
            + self.flushes.threads.stuck()
            + self.unmounts.stuck()
            + self.probes.stuck()
            + self.freezes.threads.stuck()
    }
}

impl RealKernel {
    /// Sets the queue of a new device. It works without, only slower, so a failure is logged. On a thread of its
    /// own, because a write waits for requests that began right before it, such as udev's first reads.
    fn set_queue(&self, index: DeviceIndex, identity: Identity) {
        let sysfs = self.sysfs.clone();
        let deadline = SystemClock.now() + QUEUE_TIMEOUT;
        let call = move || sysfs.set_queue(index, &identity, deadline);
        let set = self.probes.run("set the queue of the device", deadline, call, drop);
        if let Err(error) = set.and_then(|set| set) {
            tracing::warn!(
                index,
                error = error.report(),
                "the device keeps the kernel's settings of its queue"
            );
        }
    }

    /// Returns a check, for any thread, that a device is still connected as `identity`.
    fn is_connected_as(
        &self,
        identity: Identity,
    ) -> impl Fn(DeviceIndex) -> Result<bool> + Send + use<> {
        let sysfs = self.sysfs.clone();
        move |index| Ok(sysfs.connected_device(index, &identity)?.is_some())
    }

    /// Describes the users that have claimed the disk or the partitions with the names `claimed`.
    fn claimants(&self, disk: &Disk, claimed: &[String]) -> Vec<Holder> {
        let mut users = self.sysfs.kernel_users(disk);
        if users.is_empty() {
            users.push(format!(
                "{} claimed inside the kernel or by an exclusive open (a member of a btrfs or of a ZFS \
                 pool, an external log or journal, an exported target)",
                claimed.join(", ")
            ));
        }
        users.into_iter().map(|what| Holder::Kernel { what }).collect()
    }

    fn subscribe(&self, queue: usize) -> Result<Receiver<KernelEvent>> {
        // The hub is replaced as a whole, so it is intact whatever panicked with the lock.
        let mut hub = self.hub.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(hub) = hub.as_ref() {
            return Ok(hub.subscribe(queue));
        }
        Ok(hub.insert(Hub::start()?).subscribe(queue))
    }

    /// Subscribes to events for a wait, if udevd runs. The subscription ends at the first event after the
    /// receiver was dropped.
    fn device_events(&self) -> Option<Receiver<KernelEvent>> {
        super::udev::udevd_runs().then(|| self.subscribe(WAIT_QUEUE).ok()).flatten()
    }
}
