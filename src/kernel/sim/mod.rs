//! A simulated kernel for tests: the behaviour of the nbd driver on ordinary sockets, with scripted and
//! random faults. Compiled for tests and with the feature `sim`, never into a release.
//!
//! Input: the calls of [`Kernel`](crate::Kernel), and from tests: faults, holders, devices of other programs,
//! requests. Output: what the driver would do. The simulation owns the kernel's ends of the sockets and
//! speaks NBD on them ([`SimKernel::read`] and others), so a real worker can serve it. Clones share one
//! kernel, so a test can replace a supervisor that crashed.
//!
//! The simulation must not have behaviour that the driver does not have. In particular:
//! - RECONFIGURE replaces dead connections only, and drops other sockets without an error;
//! - DISCONNECT sends NBD_CMD_DISC, which may block, then shuts the sockets down. While the device is held it
//!   stays configured (sysfs `pid`), because openers hold the configuration;
//! - only an exclusive open shows some users inside the kernel;
//! - LINK_DEAD is not sent for a connection that ends by a DISCONNECT.

mod block;
mod calls;
mod control;
mod device;
mod exclusive;
mod freeze;
mod io;
mod replies;
mod script;
mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crossbeam_channel::Sender;
use nix::sys::eventfd::{EfdFlags, EventFd};

pub use self::block::{Completion, Io, PeerStep, Ticket};
use self::device::{Config, SimDevice};
pub use self::script::{Call, Fault, Script};
use super::{Device, DeviceIndex, Holder, Identity, KernelEvent};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::random::Random;

/// A simulated kernel. Clones are handles of the same kernel.
#[derive(Clone)]
pub struct SimKernel(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    /// Notified when anything in `state` changed.
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
    /// The backend identifiers of the devices that another program disconnected.
    vanished: BTreeSet<String>,
    /// The number of connections that were replaced, by backend identifier.
    replaced: BTreeMap<String, u64>,
    /// The number of configurations that were made so far.
    instances: u64,
    peer_step: Option<PeerStep>,
    connect_hook: Option<Hook>,
    freeze_hook: Option<Hook>,
    requests: Vec<block::Request>,
    completions: Vec<Completion>,
    tickets: Ticket,
    /// Counts the changes of requests.
    progress: u64,
}

/// A function of the test that the kernel calls with the identity of a device.
pub type Hook = Arc<dyn Fn(&Identity) + Send + Sync>;

impl SimKernel {
    /// Makes a kernel with the properties of `script`, the module loaded, and all permissions.
    pub fn new(script: Script) -> Self {
        let devices = (0..script.devices).map(|index| (index, SimDevice::default())).collect();
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .expect("a test process has a descriptor left");
        let state = State {
            random: Random::seeded(script.seed),
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
            connect_hook: None,
            freeze_hook: None,
            requests: Vec::new(),
            completions: Vec::new(),
            tickets: 0,
            progress: 0,
        };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        Self(Arc::new(Shared { state, changed, wake: Arc::new(wake) }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0.state)
    }
}

impl State {
    fn take_fault(&mut self, call: Call) -> Option<Fault> {
        if let Some(at) = self.faults.iter().position(|(on, _)| *on == call) {
            return Some(self.faults.remove(at).1);
        }
        script::random_fault(&self.random, call, self.script.faults_per_mille)
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

    /// Returns the configuration of a device, if it is connected as `identity`.
    fn config(&mut self, index: DeviceIndex, identity: &Identity) -> Result<&mut Config> {
        let config = self.devices.get_mut(&index).and_then(|device| device.config.as_mut());
        config
            .filter(|config| config.backend.as_deref() == Some(identity.as_str()))
            .ok_or_else(|| crate::not_ours(index, identity))
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
        // A full queue loses the event, as a full netlink socket does.
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
            block_size: self.config.as_ref().map_or(512, |config| config.block_size),
            in_flight: self.config.as_ref().map_or(0, |config| {
                config.connections.iter().map(|connection| connection.replies.in_flight()).sum()
            }),
        }
    }

    /// Removes the configuration of a device that is disconnected and not held.
    fn release(&mut self) {
        let held = !self.holders.is_empty() || self.exclusive || !self.kernel_users.is_empty();
        if !held && self.config.as_ref().is_some_and(|c| c.disconnected) {
            self.config = None;
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let _ = self.wake.write(1);
    }
}

/// Takes the lock. Every change under it is complete, so the state is valid after a panic, too.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
