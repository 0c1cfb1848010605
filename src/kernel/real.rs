//! The kernel that this machine runs.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};

use super::bounded_call::BoundedCalls;
use super::events::Hub;
use super::freeze::Freezes;
use super::mounts::{Proc, Usage};
use super::netlink::{self, Netlink};
use super::shared_scan::SharedScan;
use super::sysfs::Sysfs;
use super::udev::{Missing, Names};
use super::unmount::unmount;
use super::{
    ConnectSpec, Device, DeviceIndex, DevicePaths, Disconnected, EVENT_QUEUE, Holder, Identity,
    Kernel, KernelEvent, UnmountScope, module_missing, not_ours,
};
use cleat_core::error::{Error, ErrorKind, Result};

/// Bound on netlink commands that are given no deadline.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);
/// Bound on loading the module.
const MODPROBE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a device may lack its symlink before the kernel is asked to announce it again. udev may
/// look before the kernel has made `backend`: CONNECT announces the size first (nbd_genl_connect).
const ANNOUNCE_AFTER: Duration = Duration::from_millis(200);
/// Events are hints; without one, things are looked at again after this, doubling.
const LOOK_AGAIN_MIN: Duration = Duration::from_millis(2);
const LOOK_AGAIN_MAX: Duration = Duration::from_millis(500);
/// Events that wait for one who waits for a device: the first is enough.
const HINT_QUEUE: usize = 32;
/// Netlink commands that may be stuck: they share one lock, so more would only wait behind these.
const STUCK_COMMANDS: usize = 8;
/// Flushes that may be stuck, one a device: each waits for a backend of its own.
const STUCK_FLUSHES: usize = 64;
/// Unmounts that may be stuck, one a device and namespace: each waits for a backend of its own.
const STUCK_UNMOUNTS: usize = 64;
/// How long those who only look at a device may take to close it.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long udev may take to remove a symlink before it is removed here.
const UNLINK_TIMEOUT: Duration = Duration::from_secs(1);

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

/// Flushes under way: one a device, as one that hangs tells all that another would.
#[derive(Debug)]
struct Flushes {
    threads: BoundedCalls,
    nodes: Arc<Mutex<BTreeSet<PathBuf>>>,
}

impl Default for Flushes {
    fn default() -> Self {
        Self { threads: BoundedCalls::new(STUCK_FLUSHES), nodes: Arc::default() }
    }
}

impl Flushes {
    fn run(
        &self,
        node: &Path,
        deadline: Instant,
        call: impl FnOnce() -> std::io::Result<()> + Send + 'static,
    ) -> Result<()> {
        let what = format!("flush {}", node.display());
        let hangs = |error: Error| {
            error.with_repair("its backend does not answer: see `cleat stats` and the daemon's log")
        };
        let begun = lock(&self.nodes).insert(node.to_owned());
        if !begun {
            let message = format!("cannot {what}: an earlier flush of it is still under way");
            return Err(hangs(Error::new(ErrorKind::TimedOut, message)));
        }
        let entry = Entry { nodes: Arc::clone(&self.nodes), node: node.to_owned() };
        let call = move || {
            let _entry = entry;
            call()
        };
        let flushed =
            self.threads.run(&what, deadline, call, drop).map_err(|error| match error.kind() {
                ErrorKind::TimedOut => hangs(error),
                _ => error,
            })?;
        flushed.map_err(|error| Error::from_io(format!("cannot {what}"), error))
    }
}

/// A node among those that are being flushed.
struct Entry {
    nodes: Arc<Mutex<BTreeSet<PathBuf>>>,
    node: PathBuf,
}

impl Drop for Entry {
    fn drop(&mut self) {
        lock(&self.nodes).remove(&self.node);
    }
}

/// The lock, whoever panicked with it: what it protects is whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why a device is not ready yet.
enum NotReady {
    Size(u64),
    Name(Missing),
}

impl RealKernel {
    /// Tells whether a device is connected as that identity, on any thread.
    fn meant(&self, identity: Identity) -> impl Fn(DeviceIndex) -> Result<bool> + Send + use<> {
        let sysfs = self.sysfs.clone();
        move |index| Ok(sysfs.connected_device(index, &identity)?.is_some())
    }

    fn subscribe(&self, queue: usize) -> Result<Receiver<KernelEvent>> {
        let mut hub = lock(&self.hub);
        if let Some(hub) = hub.as_ref() {
            return Ok(hub.subscribe(queue));
        }
        Ok(hub.insert(Hub::start()?).subscribe(queue))
    }

    /// Events to wait with, where some will come: a subscription ends with the next event.
    fn hints(&self) -> Option<Receiver<KernelEvent>> {
        super::udev::udevd_runs().then(|| self.subscribe(HINT_QUEUE).ok()).flatten()
    }

    /// Removes the names that a supervisor before us left behind, without a device.
    fn clear_leftovers(&self) -> Result<()> {
        let devices = self.sysfs.devices()?;
        let alive: Vec<_> = devices.iter().filter_map(Device::identity).collect();
        for identity in self.names.published() {
            if alive.contains(&identity) {
                continue;
            }
            self.names.withdraw(&identity);
            if alive.iter().any(|other| other.name() == identity.name()) {
                continue;
            }
            devices.iter().for_each(|device| self.names.remove_link(device.index, &identity));
        }
        Ok(())
    }

    /// Has udev take back the names of a device that is disconnected and held: it would keep them for
    /// as long as the holder pleases, and from a new device of that name.
    fn disown(&self, index: DeviceIndex, identity: &Identity) {
        self.names.withdraw(identity);
        self.sysfs.announce(index);
        self.sysfs.announce_partitions(index);
    }

    /// Takes the names away. A device without its properties loses the symlink at its next event.
    fn withdraw(&self, index: DeviceIndex, identity: &Identity, deadline: Instant) -> Result<()> {
        let devices = self.devices()?;
        // The device itself may be left, disconnected and held; or be another mapping's by now.
        let others = devices.iter().filter_map(|device| Some((device.index, device.identity()?)));
        let others = others.filter(|(at, of)| *at != index || of != identity);
        let others: Vec<_> = others.map(|(_, identity)| identity).collect();
        if others.contains(identity) {
            return Ok(());
        }
        self.names.withdraw(identity);
        // Another mapping of that name has the symlink now.
        if others.iter().any(|other| other.name() == identity.name()) {
            return Ok(());
        }
        if !self.names.links_are_ours() && self.names.link_leads_to(index, identity) {
            if super::udev::udevd_idle() {
                self.sysfs.announce(index);
            }
            let deadline = deadline.min(Instant::now() + UNLINK_TIMEOUT);
            let hints = self.hints();
            self.wait(deadline, hints.as_ref().map(|hints| (hints, index)), || {
                Ok((!self.names.link_leads_to(index, identity)).then_some(()))
            })?;
        }
        self.names.remove_link(index, identity);
        Ok(())
    }

    /// Looks until there is something, an error, or the deadline (`None`): at every hint about the
    /// device, and again after a while, because hints may be lost.
    fn wait<T>(
        &self,
        deadline: Instant,
        hints: Option<(&Receiver<KernelEvent>, DeviceIndex)>,
        mut look: impl FnMut() -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        let mut pause = LOOK_AGAIN_MIN;
        loop {
            if let Some(found) = look()? {
                return Ok(Some(found));
            }
            let now = Instant::now();
            if now >= deadline {
                return Ok(None);
            }
            let until = deadline.min(now + pause);
            match hints {
                Some((hints, index)) => await_hint(hints, index, until),
                None => std::thread::sleep(until - now),
            }
            pause = (pause * 2).min(LOOK_AGAIN_MAX);
        }
    }

    /// Loads the driver where it is not there.
    fn load_module(&self) -> Result<()> {
        // Exists for a driver that is built in, too, because nbd has parameters.
        let loaded = self.sysfs.0.join("module/nbd");
        if loaded.exists() {
            return Ok(());
        }
        if !self.loads_module {
            return Err(module_missing());
        }
        let program = std::fs::read_to_string(self.proc.0.join("sys/kernel/modprobe"));
        let program = program.map(|program| program.trim().to_owned()).unwrap_or_default();
        let program = if program.is_empty() { "/sbin/modprobe".to_owned() } else { program };
        let call = move || Command::new(program).arg("nbd").env_clear().output();
        let deadline = Instant::now() + MODPROBE_TIMEOUT;
        let output = self.threads.run("load the module nbd", deadline, call, drop)?;
        match output {
            _ if loaded.exists() => Ok(()),
            Ok(output) => {
                let said = String::from_utf8_lossy(&output.stderr);
                Err(module_missing().with_source(said.trim().chars().take(500).collect::<String>()))
            }
            Err(error) => Err(module_missing().with_source(error)),
        }
    }
}

/// Waits for an event of the device, or until then.
fn await_hint(hints: &Receiver<KernelEvent>, index: DeviceIndex, until: Instant) {
    loop {
        match hints.recv_deadline(until) {
            Ok(KernelEvent::Changed(changed)) if changed == index => return,
            Ok(_) => {}
            Err(RecvTimeoutError::Timeout) => return,
            Err(RecvTimeoutError::Disconnected) => {
                return std::thread::sleep(until.saturating_duration_since(Instant::now()));
            }
        }
    }
}

fn not_ready(
    index: DeviceIndex,
    size: u64,
    paths: &DevicePaths,
    missing: Option<NotReady>,
) -> Error {
    let (what, hint) = match missing {
        Some(NotReady::Size(found)) => {
            let what = format!("/dev/nbd{index} has {found} bytes instead of {size}");
            (what, "the kernel has not taken the new size over; see `dmesg`")
        }
        Some(NotReady::Name(missing)) => missing.explain(paths),
        None => (format!("/dev/nbd{index} has no device number"), "see `dmesg`"),
    };
    Error::new(ErrorKind::TimedOut, format!("the device is not ready in time: {what}"))
        .with_repair(hint)
}

fn still_configured(index: DeviceIndex) -> Error {
    let message =
        format!("/dev/nbd{index} is disconnected, but somebody keeps it open, so it is not free");
    Error::new(ErrorKind::TimedOut, message)
        .with_repair(format!("end what holds it: see `fuser -v /dev/nbd{index}`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_flush_that_hangs_stops_no_other_and_is_not_piled_upon() {
        let flushes = Flushes::default();
        let (release, released) = crossbeam_channel::bounded::<()>(0);
        let soon = Instant::now() + Duration::from_millis(20);
        let hanging = move || released.recv().map_err(std::io::Error::other);
        let node = |name: &str| PathBuf::from(name);
        let error = flushes.run(&node("/dev/nbd0"), soon, hanging).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert!(error.repair().is_some());
        let later = Instant::now() + Duration::from_secs(10);
        let again = flushes.run(&node("/dev/nbd0"), later, || Ok(())).unwrap_err();
        assert!(again.message().contains("still under way"), "{again}");
        assert_eq!(flushes.threads.stuck(), 1);
        flushes.run(&node("/dev/nbd1"), later, || Ok(())).unwrap();
        release.send(()).unwrap();
        while flushes.run(&node("/dev/nbd0"), later, || Ok(())).is_err() {
            std::thread::yield_now();
        }
    }
}
