//! A kernel without a kernel: the nbd driver's behaviour on ordinary sockets, with scripted and
//! seeded misbehaviour. Not in release builds: compiled for tests and with the feature `fault`.
//!
//! Comes in: the calls of [`Kernel`], and from tests: faults, holders, foreign devices, requests.
//! Goes out: what the driver would do. It keeps the kernel's ends of the sockets and speaks NBD on
//! them ([`SimKernel::read`] and the like), so a real worker can serve it. It outlives its handles'
//! owners: a supervisor that "crashed" and a new one share it by cloning.
//!
//! What may never happen here: behaviour that the driver does not have. In particular
//! - RECONFIGURE replaces dead connections only, and drops other sockets in silence;
//! - DISCONNECT sends NBD_CMD_DISC, blocking, then shuts down; while the device is held it stays
//!   configured (sysfs `pid`), because openers hold the configuration;
//! - LINK_DEAD is not sent for a connection that ends by a disconnect.

mod block;
mod device;
mod freeze;
mod io;
mod script;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::{
    ConnectSpec, Device, DeviceIndex, DevicePaths, Disconnected, EVENT_QUEUE, Holder, Identity,
    Kernel, KernelEvent, UnmountScope,
};
pub use block::{Completion, Io, PeerStep, Ticket};
use cleat_core::error::{Error, ErrorKind, Result};
use device::{Config, Connection, PEER_CLOSED, SimDevice};
pub use script::{Call, Fault, Script};
use script::{Random, failure, timed_out};

/// A simulated kernel. Clones are handles on the same kernel.
#[derive(Clone)]
pub struct SimKernel(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    /// Anything in `state` changed.
    changed: Condvar,
    /// Wakes the thread that watches the connections.
    wake: Arc<EventFd>,
}

struct State {
    script: Script,
    random: Random,
    module: bool,
    permission: bool,
    events_lost: bool,
    watched: bool,
    stuck: usize,
    devices: BTreeMap<DeviceIndex, SimDevice>,
    faults: Vec<(Call, Fault)>,
    subscribers: Vec<Sender<KernelEvent>>,
    /// Devices that somebody else disconnected, by their backend identifier.
    vanished: BTreeSet<String>,
    replaced: BTreeMap<String, u64>,
    /// Configurations that there have been.
    instances: u64,
    peer_step: Option<PeerStep>,
    hook: Option<Hook>,
    freeze_hook: Option<Hook>,
    requests: Vec<block::Request>,
    completions: Vec<Completion>,
    tickets: Ticket,
    /// Raised with everything that happens to a request.
    progress: u64,
}

/// Is told of every device that is connected.
pub type Hook = Arc<dyn Fn(&Identity) + Send + Sync>;

/// The test's side.
impl SimKernel {
    /// A kernel of that character, with its module loaded and every permission given.
    pub fn new(script: Script) -> Self {
        let devices = (0..script.devices).map(|index| (index, SimDevice::default())).collect();
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .expect("a test process has a descriptor left");
        let state = State {
            random: Random::new(script.seed),
            script,
            module: true,
            permission: true,
            events_lost: false,
            watched: false,
            stuck: 0,
            devices,
            faults: Vec::new(),
            subscribers: Vec::new(),
            vanished: BTreeSet::new(),
            replaced: BTreeMap::new(),
            instances: 0,
            peer_step: None,
            hook: None,
            freeze_hook: None,
            requests: Vec::new(),
            completions: Vec::new(),
            tickets: 0,
            progress: 0,
        };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        Self(Arc::new(Shared { state, changed, wake: Arc::new(wake) }))
    }

    /// Has `hook` told of every device that is connected from now on.
    pub fn on_connect(&self, hook: Hook) {
        self.state().hook = Some(hook);
    }

    /// Makes the next `call` misbehave. Faults on the same call queue up.
    pub fn inject(&self, call: Call, fault: Fault) {
        self.state().faults.push((call, fault));
    }

    /// Sets how many calls in a thousand misbehave at random from now on.
    pub fn set_fault_rate(&self, per_mille: u32) {
        self.state().script.faults_per_mille = per_mille;
    }

    /// Makes every misbehaviour end, that to come included.
    pub fn clear_faults(&self) {
        let mut state = self.state();
        state.faults.clear();
        state.script.faults_per_mille = 0;
    }

    /// Loads or unloads the module.
    pub fn set_module(&self, loaded: bool) {
        self.state().module = loaded;
    }

    /// Gives or takes CAP_SYS_ADMIN.
    pub fn set_permission(&self, permission: bool) {
        self.state().permission = permission;
    }

    /// How many calls that were given up have not returned.
    pub fn set_stuck(&self, calls: usize) {
        self.state().stuck = calls;
    }

    /// Whether events are lost from now on.
    pub fn lose_events(&self, lost: bool) {
        self.state().events_lost = lost;
    }

    /// Sets who uses the device. When the last one leaves a disconnected device, it becomes free.
    pub fn set_holders(&self, index: DeviceIndex, holders: Vec<Holder>) {
        let mut state = self.state();
        let device = state.devices.entry(index).or_default();
        device.holders = holders;
        device.release();
        drop(state);
        self.0.changed.notify_all();
    }

    /// Has somebody else disconnect the device: its configuration is gone at once.
    pub fn vanish(&self, index: DeviceIndex) {
        self.state().vanish(index);
        self.touched();
    }

    /// Whether somebody else has disconnected the device of `identity`.
    pub fn has_vanished(&self, identity: &Identity) -> bool {
        self.state().vanished.contains(identity.as_str())
    }

    /// How many dead connections of the device of `identity` were replaced.
    pub fn replaced(&self, identity: &Identity) -> u64 {
        self.state().replaced.get(identity.as_str()).copied().unwrap_or(0)
    }

    /// Connects a device for somebody else, with that backend identifier.
    pub fn add_foreign(&self, index: DeviceIndex, size: u64, backend: Option<&str>) {
        let mut state = self.state();
        let config = Config::foreign(size, backend.map(str::to_owned), state.next_instance());
        state.devices.entry(index).or_default().config = Some(config);
        drop(state);
        self.touched();
    }

    /// The kernel gives up the device's connections (its request timeout, say).
    pub fn kill_connections(&self, index: DeviceIndex) {
        let mut state = self.state();
        let now = (state.script.now)();
        if let Some(config) = state.devices.get_mut(&index).and_then(|d| d.config.as_mut()) {
            config.shut_down();
            config.mark_dead(now);
            state.emit(KernelEvent::LinkDead(index));
        }
        drop(state);
        self.touched();
    }

    /// Whether a device is disconnected, and configured only for those who hold it.
    pub fn is_disconnected(&self, index: DeviceIndex) -> bool {
        let state = self.state();
        let config = state.devices.get(&index).and_then(|device| device.config.as_ref());
        config.is_some_and(|config| config.disconnected)
    }

    /// Every device, whatever goes wrong.
    pub fn show(&self) -> Vec<Device> {
        self.state().devices.iter().map(|(index, device)| device.show(*index)).collect()
    }

    /// Notices connections whose peer is gone, as the kernel does by itself.
    pub fn check_connections(&self) {
        self.state().check_connections();
        self.0.changed.notify_all();
    }

    /// Connections of the device that are alive now.
    pub fn live_connections(&self, index: DeviceIndex) -> usize {
        let mut state = self.state();
        state.check_connections();
        let config = state.devices.get(&index).and_then(|device| device.config.as_ref());
        config.map_or(0, |config| {
            config.connections.iter().filter(|connection| connection.is_alive()).count()
        })
    }
}

impl Kernel for SimKernel {
    fn connect(&self, spec: ConnectSpec) -> Result<DeviceIndex> {
        let (mut state, fault) = self.enter(Call::Connect, None)?;
        if spec.sockets.is_empty() || spec.size == 0 {
            let message = "a device needs at least one socket and one byte";
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        let index = state.free_index()?;
        let symlink_at = match fault {
            Some(Fault::NoSymlink) => None,
            _ => Some((state.script.now)() + state.script.symlink_delay),
        };
        let (identity, hook) = (spec.identity.clone(), state.hook.clone());
        let config = Config::new(spec, symlink_at, state.next_instance());
        state.devices.entry(index).or_default().config = Some(config);
        state.emit(KernelEvent::Changed(index));
        hook.iter().for_each(|hook| hook(&identity));
        if fault == Some(Fault::Vanish) {
            state.vanish(index);
        }
        self.leave(state, Call::Connect, fault).map(|()| index)
    }

    fn reconfigure(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        sockets: Vec<OwnedFd>,
    ) -> Result<()> {
        let (mut state, fault) = self.enter(Call::Reconfigure, None)?;
        let config = state.config(index, identity)?;
        if fault != Some(Fault::DropSockets) {
            let replaced = config.replace_dead(sockets);
            *state.replaced.entry(identity.as_str().to_owned()).or_default() += replaced;
        }
        self.leave(state, Call::Reconfigure, fault)
    }

    fn resize(&self, index: DeviceIndex, identity: &Identity, size: u64) -> Result<()> {
        let (mut state, fault) = self.enter(Call::Resize, None)?;
        state.config(index, identity)?.size = size;
        state.emit(KernelEvent::Changed(index));
        self.leave(state, Call::Resize, fault)
    }

    fn disconnect(&self, index: DeviceIndex, identity: &Identity, deadline: Instant) -> Result<()> {
        self.cut_off(Call::Disconnect, index, identity, deadline)?;
        self.wait(Call::Disconnect, deadline, |state| match state.config(index, identity) {
            Ok(_) => Err("a holder keeps it configured"),
            Err(_) => Ok(()),
        })
    }

    fn unmount(&self, index: DeviceIndex, which: UnmountScope, deadline: Instant) -> Result<()> {
        let (mut state, _) = self.enter(Call::Unmount, Some(deadline))?;
        if state.devices.get(&index).is_some_and(|device| !device.frozen.is_empty()) {
            return Err(timed_out(Call::Unmount));
        }
        if let Some(device) = state.devices.get_mut(&index) {
            device.holders.retain(|holder| match (holder, which) {
                (Holder::Mount { .. }, UnmountScope::All) => false,
                (Holder::Mount { namespace_pid, .. }, UnmountScope::Own) => namespace_pid.is_some(),
                _ => true,
            });
            device.release();
        }
        drop(state);
        self.touched();
        Ok(())
    }

    fn freeze(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        deadline: Instant,
    ) -> Result<Vec<String>> {
        self.freeze_all(index, identity, deadline)
    }

    fn thaw(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        spared: &[String],
        deadline: Instant,
    ) -> Result<()> {
        self.thaw_all(index, identity, spared, deadline)
    }

    fn force_disconnect(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        deadline: Instant,
    ) -> Result<Disconnected> {
        self.cut_off(Call::ForceDisconnect, index, identity, deadline)?;
        let held = self.state().config(index, identity).is_ok();
        Ok(if held { Disconnected::Held } else { Disconnected::Free })
    }

    fn devices(&self) -> Result<Vec<Device>> {
        let (state, _) = self.enter(Call::Devices, None)?;
        drop(state);
        Ok(self.show())
    }

    fn holders(&self, index: DeviceIndex) -> Result<Vec<Holder>> {
        let (state, _) = self.enter(Call::Holders, None)?;
        Ok(state.devices.get(&index).map(|device| device.holders.clone()).unwrap_or_default())
    }

    fn wait_ready(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        size: u64,
        deadline: Instant,
    ) -> Result<DevicePaths> {
        drop(self.enter(Call::WaitReady, Some(deadline))?);
        self.wait(Call::WaitReady, deadline, |state| {
            let now = (state.script.now)();
            let config = match state.config(index, identity) {
                Ok(config) => config,
                Err(error) => return Ok(Err(error)),
            };
            if config.size != size {
                return Err("its size is another");
            }
            let ready = config.symlink_at.is_some_and(|at| at <= now);
            if ready { Ok(Ok(())) } else { Err("udev made no symlink") }
        })??;
        let symlink = PathBuf::from(format!("/dev/disk/by-id/cleat-{}", identity.name()));
        Ok(DevicePaths { node: PathBuf::from(format!("/dev/nbd{index}")), symlink })
    }

    fn flush(&self, index: DeviceIndex, deadline: Instant) -> Result<()> {
        drop(self.enter(Call::Flush, Some(deadline))?);
        let message = || format!("cannot flush /dev/nbd{index}");
        self.flush_device(index, deadline).map_err(|error| Error::from_io(message(), error))
    }

    fn events(&self) -> Result<Receiver<KernelEvent>> {
        let (mut state, _) = self.enter(Call::Events, None)?;
        let (sender, receiver) = crossbeam_channel::bounded(EVENT_QUEUE);
        state.subscribers.push(sender);
        if state.script.watch_connections && !std::mem::replace(&mut state.watched, true) {
            let (shared, wake) = (Arc::downgrade(&self.0), Arc::clone(&self.0.wake));
            std::thread::spawn(move || watch_connections(&shared, &wake));
        }
        Ok(receiver)
    }

    fn stuck(&self) -> usize {
        self.state().stuck
    }
}

impl SimKernel {
    /// DISCONNECT: says goodbye on every connection, which blocks, and shuts them down.
    fn cut_off(
        &self,
        call: Call,
        index: DeviceIndex,
        identity: &Identity,
        deadline: Instant,
    ) -> Result<()> {
        let (mut state, fault) = self.enter(call, Some(deadline))?;
        let Ok(config) = state.config(index, identity) else { return Ok(()) };
        let connections = config.connections.clone();
        let skip_waits = state.script.skip_waits;
        drop(state);
        let until = if skip_waits { Instant::now() } else { deadline };
        if !connections.iter().all(|connection| io::send_disconnect(connection, until)) {
            return Err(timed_out(call));
        }
        let mut state = self.state();
        if let Ok(config) = state.config(index, identity) {
            config.disconnected = true;
            config.shut_down();
            state.devices.entry(index).or_default().release();
            state.emit(KernelEvent::Changed(index));
        }
        self.leave(state, call, fault)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0.state)
    }

    /// Begins a call: what is missing, what is scripted, what died meanwhile.
    fn enter(
        &self,
        call: Call,
        deadline: Option<Instant>,
    ) -> Result<(MutexGuard<'_, State>, Option<Fault>)> {
        let mut state = self.state();
        let reads_only = matches!(call, Call::Devices | Call::Holders);
        if !state.module && !reads_only {
            return Err(super::module_missing());
        }
        if !state.permission && !reads_only {
            return Err(super::permission_missing());
        }
        let fault = state.take_fault(call);
        tracing::trace!(?call, ?fault, "kernel");
        match fault {
            Some(Fault::Fail(kind)) => return Err(failure(call, kind)),
            Some(Fault::Hang) => {
                let deadline =
                    deadline.unwrap_or_else(|| Instant::now() + state.script.command_timeout);
                drop(state);
                return Err(self
                    .wait(call, deadline, |_| Err::<(), _>("it hangs"))
                    .err()
                    .unwrap_or_else(|| timed_out(call)));
            }
            Some(Fault::Slow(time)) => {
                drop(state);
                std::thread::sleep(time);
                state = self.state();
            }
            _ => {}
        }
        state.check_connections();
        Ok((state, fault))
    }

    /// Ends a call that was carried out.
    fn leave(&self, state: MutexGuard<'_, State>, call: Call, fault: Option<Fault>) -> Result<()> {
        drop(state);
        self.touched();
        if fault == Some(Fault::LateEffect) { Err(timed_out(call)) } else { Ok(()) }
    }

    fn touched(&self) {
        self.0.changed.notify_all();
        // EAGAIN: enough wakes are pending.
        let _ = self.0.wake.write(1);
    }

    /// Waits for `done`, until the deadline; with `Script::skip_waits`, looks once.
    fn wait<T>(
        &self,
        call: Call,
        deadline: Instant,
        mut done: impl FnMut(&mut State) -> Result<T, &'static str>,
    ) -> Result<T> {
        let mut state = self.state();
        loop {
            let missing = match done(&mut state) {
                Ok(value) => return Ok(value),
                Err(missing) => missing,
            };
            let now = Instant::now();
            if now >= deadline || state.script.skip_waits {
                return Err(timed_out(call).with_source(missing));
            }
            // A symlink appears by time alone, so the wait is cut into pieces.
            let piece = (deadline - now).min(Duration::from_millis(5));
            let waited = self.0.changed.wait_timeout(state, piece);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl State {
    fn take_fault(&mut self, call: Call) -> Option<Fault> {
        if let Some(at) = self.faults.iter().position(|(on, _)| *on == call) {
            return Some(self.faults.remove(at).1);
        }
        self.random.fault(call, self.script.faults_per_mille)
    }

    fn free_index(&self) -> Result<DeviceIndex> {
        let free = self.devices.iter().find(|(_, device)| device.config.is_none());
        if let Some((index, _)) = free {
            return Ok(*index);
        }
        let next = self.devices.keys().next_back().map_or(0, |last| last + 1);
        if next >= self.script.devices_max {
            let message = format!("all {next} nbd devices are in use");
            return Err(Error::new(ErrorKind::NoSpace, message));
        }
        Ok(next)
    }

    /// The device's configuration, if it is connected under that identity.
    fn config(&mut self, index: DeviceIndex, identity: &Identity) -> Result<&mut Config> {
        let config = self.devices.get_mut(&index).and_then(|device| device.config.as_mut());
        config
            .filter(|config| config.backend.as_deref() == Some(identity.as_str()))
            .ok_or_else(|| super::not_ours(index, identity))
    }

    fn next_instance(&mut self) -> u64 {
        self.instances += 1;
        self.instances
    }

    fn vanish(&mut self, index: DeviceIndex) {
        if let Some(mut config) = self.devices.get_mut(&index).and_then(|d| d.config.take()) {
            config.shut_down();
            self.vanished.extend(config.backend);
            self.emit(KernelEvent::Changed(index));
        }
    }

    fn check_connections(&mut self) {
        let mut dead = Vec::new();
        let now = (self.script.now)();
        for (index, device) in &mut self.devices {
            let Some(config) = &mut device.config else { continue };
            let died = config.mark_dead(now);
            if !config.disconnected {
                dead.extend(std::iter::repeat_n(*index, died));
            }
        }
        for index in dead {
            self.emit(KernelEvent::LinkDead(index));
        }
    }

    fn emit(&mut self, event: KernelEvent) {
        if self.events_lost {
            return;
        }
        // A full queue loses the event, as a netlink socket does.
        self.subscribers.retain(|subscriber| {
            !matches!(
                subscriber.try_send(event),
                Err(crossbeam_channel::TrySendError::Disconnected(_))
            )
        });
    }
}

impl SimDevice {
    fn show(&self, index: DeviceIndex) -> Device {
        Device {
            index,
            connected: self.config.is_some(),
            pid: self.config.as_ref().map(|config| config.pid),
            backend: self.config.as_ref().and_then(|config| config.backend.clone()),
            size: self.config.as_ref().map_or(0, |config| config.size),
        }
    }

    /// Drops the configuration of a disconnected device that nobody holds.
    fn release(&mut self) {
        if self.holders.is_empty() && self.config.as_ref().is_some_and(|c| c.disconnected) {
            self.config = None;
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let _ = self.wake.write(1);
    }
}

/// Waits for connections to hang up, until the kernel is gone.
fn watch_connections(shared: &Weak<Shared>, wake: &EventFd) {
    loop {
        let Some(kernel) = shared.upgrade().map(SimKernel) else { return };
        kernel.check_connections();
        let connections: Vec<Arc<Connection>> = {
            let state = kernel.state();
            let configs = state.devices.values().filter_map(|device| device.config.as_ref());
            configs.flat_map(|c| c.connections.iter()).filter(|c| c.is_alive()).cloned().collect()
        };
        drop(kernel);
        let mut fds = vec![PollFd::new(wake.as_fd(), PollFlags::POLLIN)];
        fds.extend(connections.iter().map(|c| PollFd::new(c.socket.as_fd(), PEER_CLOSED)));
        // An interrupted wait is looked at as an early end.
        let _ = poll(&mut fds, PollTimeout::NONE);
        drop(fds);
        drop(connections);
        let _ = wake.read();
    }
}

/// The lock, whoever panicked with it: every change under it is complete.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
