//! The kernel that this machine runs.

mod flush;
mod module;
mod names;
mod wait;

use std::fs::File;
use std::os::fd::OwnedFd;
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
use super::sysfs::Sysfs;
use super::udev::{Missing, Names};
use super::unmount::unmount;
use super::usage::{Proc, Usage};
use super::{
    ConnectSpec, Device, DeviceIndex, DevicePaths, Disconnected, EVENT_QUEUE, Holder, Identity,
    Kernel, KernelEvent, UnmountScope, not_ours,
};
use cleat_core::error::{Error, ErrorKind, Result};

/// Bound on netlink commands that are given no deadline.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a device may lack its symlink before the kernel is asked to announce it again. udev may
/// look before the kernel has made `backend`: CONNECT announces the size first (nbd_genl_connect).
const ANNOUNCE_AFTER: Duration = Duration::from_millis(200);
/// Events that wait for one who waits for a device: the first is enough.
const HINT_QUEUE: usize = 32;
/// Netlink commands that may be stuck: they share one lock, so more would only wait behind these.
const STUCK_COMMANDS: usize = 8;
/// Unmounts that may be stuck, one a device and namespace: each waits for a backend of its own.
const STUCK_UNMOUNTS: usize = 64;
/// How long those who only look at a device may take to close it.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// The nbd driver of the running kernel, with udev, sysfs and /proc.
#[derive(Debug)]
pub struct RealKernel {
    sysfs: Sysfs,
    seen: SharedScan<Vec<Device>>,
    proc: Proc,
    usage: SharedScan<Usage>,
    names: Names,
    /// For what belongs to the driver as a whole; flushes have their own, so that backends that hang
    /// never stop commands.
    threads: BoundedCalls,
    flushes: Flushes,
    unmounts: BoundedCalls,
    freezes: Freezes,
    netlink: Netlink,
    hub: Mutex<Option<Hub>>,
    loads_module: bool,
}

impl RealKernel {
    /// The kernel, for the only supervisor of this machine; udev properties go under `run_directory`
    /// (see `systemd/60-cleat.rules`, which names [`super::udev::RUN_DIRECTORY`]; with another one the
    /// symlinks are made here).
    pub fn new(run_directory: &Path) -> Self {
        let threads = BoundedCalls::new(STUCK_COMMANDS);
        let names = Names { dev: PathBuf::from("/dev"), run: run_directory.to_owned() };
        if names.links_are_ours() {
            tracing::info!("no udevd with our rule: symlinks are made by cleat itself");
        }
        let kernel = Self {
            sysfs: Sysfs(PathBuf::from("/sys")),
            seen: SharedScan::default(),
            proc: Proc(PathBuf::from("/proc")),
            usage: SharedScan::default(),
            names,
            netlink: Netlink::new(threads.clone()),
            threads,
            flushes: Flushes::default(),
            unmounts: BoundedCalls::new(STUCK_UNMOUNTS),
            freezes: Freezes::default(),
            hub: Mutex::new(None),
            loads_module: true,
        };
        if let Err(error) = kernel.clear_leftovers() {
            tracing::warn!(error = error.report(), "leftover device names stay");
        }
        kernel
    }

    /// Whether the driver is loaded where it is missing; it is, unless told otherwise.
    #[must_use]
    pub fn loading_module(mut self, loads_module: bool) -> Self {
        self.loads_module = loads_module;
        self
    }

    /// The driver's own list: each device's index and whether it is configured.
    ///
    /// # Errors
    /// As [`Kernel::connect`].
    pub fn status(&self) -> Result<Vec<(DeviceIndex, bool)>> {
        self.netlink.status(Instant::now() + COMMAND_TIMEOUT)
    }
}

/// Whether the nbd driver answers. Loads nothing.
///
/// # Errors
/// `Unsupported` when it is not loaded; `TimedOut` when a stuck command blocks it.
pub fn probe(deadline: Instant) -> Result<()> {
    BoundedCalls::new(1).run("answer for nbd", deadline, netlink::probe, |_| ())?
}

impl Kernel for RealKernel {
    fn connect(&self, spec: ConnectSpec) -> Result<DeviceIndex> {
        self.load_module()?;
        let identity = spec.identity.clone();
        let replay_delay = spec.replay_delay;
        self.names.publish(&identity)?;
        let deadline = Instant::now() + COMMAND_TIMEOUT;
        let (netlink, meant) = (self.netlink.clone(), self.meant(identity.clone()));
        let late = move |index| {
            tracing::warn!(index, "a CONNECT came too late: disconnecting it");
            let deadline = Instant::now() + COMMAND_TIMEOUT;
            if let Err(error) = netlink.disconnect(index, deadline, move || meant(index)) {
                tracing::error!(index, error = error.report(), "it stays connected");
            }
        };
        let index = self.netlink.connect(spec, deadline, late).inspect_err(|_| {
            self.names.withdraw(&identity);
        })?;
        // As early as can be: a request keeps the deadline that it was started with.
        let prepared = replay_delay
            .map_or(Ok(()), |delay| self.sysfs.set_replay_delay(index, delay))
            .and_then(|()| match self.names.links_are_ours() {
                true => self.names.make_link(index, &identity),
                false => Ok(()),
            });
        if let Err(error) = prepared {
            let undone = self.disconnect(index, &identity, Instant::now() + COMMAND_TIMEOUT);
            if let Err(undone) = undone {
                tracing::error!(index, error = undone.report(), "a device is left behind");
            }
            return Err(error);
        }
        Ok(index)
    }

    fn reconfigure(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        sockets: Vec<OwnedFd>,
    ) -> Result<()> {
        self.sysfs.connected_device(index, identity)?.ok_or_else(|| not_ours(index, identity))?;
        let deadline = Instant::now() + COMMAND_TIMEOUT;
        self.netlink.reconfigure(index, identity, sockets, None, deadline)
    }

    fn resize(&self, index: DeviceIndex, identity: &Identity, size: u64) -> Result<()> {
        self.sysfs.connected_device(index, identity)?.ok_or_else(|| not_ours(index, identity))?;
        let deadline = Instant::now() + COMMAND_TIMEOUT;
        self.netlink.reconfigure(index, identity, Vec::new(), Some(size), deadline)
    }

    fn disconnect(&self, index: DeviceIndex, identity: &Identity, deadline: Instant) -> Result<()> {
        if self.sysfs.connected_device(index, identity)?.is_some() {
            let meant = self.meant(identity.clone());
            match self.netlink.disconnect(index, deadline, move || meant(index)) {
                // It went by itself.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                result => result?,
            }
            // No event follows the end of `pid` (nbd_config_put announces the change before it).
            let gone = self.wait(deadline, None, || {
                let device = self.sysfs.connected_device(index, identity)?;
                Ok(device.is_none().then_some(()))
            })?;
            gone.ok_or_else(|| still_configured(index))?;
        }
        self.withdraw(index, identity, deadline)
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
            let message = format!("{upper} lies on /dev/nbd{index}: what it carries is not frozen");
            return Err(Error::new(ErrorKind::Unsupported, message)
                .with_repair("have map.quiesce_hook do it, see cleat.toml"));
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
        // What lies on somebody else's device was not frozen by us.
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
        let meant = self.meant(identity.clone());
        match self.netlink.disconnect(index, deadline, move || meant(index)) {
            // It went by itself.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            result => result?,
        }
        let patience = deadline.min(Instant::now() + CLOSE_TIMEOUT);
        let gone = self.wait(patience, None, || {
            let device = self.sysfs.connected_device(index, identity)?;
            Ok(device.is_none().then_some(()))
        })?;
        if gone.is_none() {
            self.disown(index, identity);
        }
        self.withdraw(index, identity, deadline)?;
        Ok(if gone.is_some() { Disconnected::Free } else { Disconnected::Held })
    }

    fn devices(&self) -> Result<Vec<Device>> {
        self.seen.get(|| self.sysfs.devices()).map(|devices| devices.to_vec())
    }

    fn holders(&self, index: DeviceIndex) -> Result<Vec<Holder>> {
        let disk = self.sysfs.disk(index)?;
        let mut holders = self.usage.get(|| self.proc.usage())?.holders(&disk)?;
        let stacked = self.sysfs.stacked(index, &disk)?;
        holders.extend(stacked.into_iter().map(|name| Holder::Device { name }));
        Ok(holders)
    }

    fn wait_ready(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        size: u64,
        deadline: Instant,
    ) -> Result<DevicePaths> {
        let hints = self.hints();
        let paths = self.names.paths(index, identity);
        let mut announced = Instant::now();
        let mut missing = None;
        let ready = self.wait(deadline, hints.as_ref().map(|hints| (hints, index)), || {
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
            // Never on top of events that udev still has to work on: that would bury a slow one.
            if announced.elapsed() >= ANNOUNCE_AFTER && super::udev::udevd_idle() {
                self.sysfs.announce(index);
                announced = Instant::now();
            }
            Ok(None)
        })?;
        match (ready, missing) {
            (Some(()), _) => Ok(paths),
            (None, missing) => Err(not_ready(index, size, &paths, missing)),
        }
    }

    fn flush(&self, index: DeviceIndex, deadline: Instant) -> Result<()> {
        let node = self.names.node(index);
        // Opened for reading: closing it then makes no udev watch look at the device again.
        self.flushes.run(&node.clone(), deadline, move || File::open(node)?.sync_all())
    }

    fn events(&self) -> Result<Receiver<KernelEvent>> {
        self.load_module()?;
        self.subscribe(EVENT_QUEUE)
    }

    fn stuck(&self) -> usize {
        self.threads.stuck()
            + self.flushes.threads.stuck()
            + self.unmounts.stuck()
            + self.freezes.threads.stuck()
    }
}

impl RealKernel {
    /// Tells whether a device is connected as that identity, on any thread.
    fn meant(&self, identity: Identity) -> impl Fn(DeviceIndex) -> Result<bool> + Send + use<> {
        let sysfs = self.sysfs.clone();
        move |index| Ok(sysfs.connected_device(index, &identity)?.is_some())
    }

    fn subscribe(&self, queue: usize) -> Result<Receiver<KernelEvent>> {
        // The hub is replaced as a whole, so it is intact whatever panicked with the lock.
        let mut hub = self.hub.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(hub) = hub.as_ref() {
            return Ok(hub.subscribe(queue));
        }
        Ok(hub.insert(Hub::start()?).subscribe(queue))
    }

    /// Events to wait with, where some will come: a subscription ends with the next event.
    fn hints(&self) -> Option<Receiver<KernelEvent>> {
        super::udev::udevd_runs().then(|| self.subscribe(HINT_QUEUE).ok()).flatten()
    }
}
