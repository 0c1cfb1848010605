//! What a test does to a simulated kernel, and what it may ask.

use super::device::Config;
use super::{Call, Device, DeviceIndex, Fault, Holder, Hook, Identity, KernelEvent, SimKernel};

/// The test's side.
impl SimKernel {
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
