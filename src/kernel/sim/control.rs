//! What a test controls and observes on a simulated kernel.

use super::device::{Config, SimDevice};
use super::{Call, Device, DeviceIndex, Fault, Holder, Hook, Identity, KernelEvent, SimKernel};

/// Methods for tests.
impl SimKernel {
    /// Calls `hook` for every device that is connected from now on.
    pub fn on_connect(&self, hook: Hook) {
        self.state().connect_hook = Some(hook);
    }

    /// Injects a fault into the next `call`. Several faults for the same call take effect in their order.
    pub fn inject(&self, call: Call, fault: Fault) {
        self.state().faults.push((call, fault));
    }

    /// Returns how many injected faults no call has had yet.
    pub fn faults_left(&self) -> usize {
        self.state().faults.len()
    }

    /// Sets how many of a thousand calls have a random fault from now on.
    pub fn set_fault_rate(&self, per_mille: u32) {
        self.state().script.faults_per_mille = per_mille;
    }

    /// Removes all injected faults, and ends the random ones.
    pub fn clear_faults(&self) {
        let mut state = self.state();
        state.faults.clear();
        state.script.faults_per_mille = 0;
    }

    /// Loads or unloads the module.
    pub fn set_module(&self, loaded: bool) {
        self.state().module = loaded;
    }

    /// Grants or removes CAP_SYS_ADMIN.
    pub fn set_permission(&self, permission: bool) {
        self.state().permission = permission;
    }

    /// Sets the number of calls that [`Kernel::stuck`](crate::Kernel::stuck) reports.
    pub fn set_stuck(&self, calls: usize) {
        self.state().stuck = calls;
    }

    /// Sets whether events are lost from now on.
    pub fn lose_events(&self, lost: bool) {
        self.state().events_lost = lost;
    }

    /// Sets the holders of the device. A disconnected device without holders becomes free.
    pub fn set_holders(&self, index: DeviceIndex, holders: Vec<Holder>) {
        let mut state = self.state();
        let device = state.devices.entry(index).or_default();
        device.holders = holders;
        device.release();
        drop(state);
        self.0.changed.notify_all();
    }

    /// Disconnects the device as another program would: its configuration is gone at once.
    pub fn vanish(&self, index: DeviceIndex) {
        self.state().vanish(index);
        self.notify();
    }

    /// Returns whether [`SimKernel::vanish`] or a fault has disconnected the device of `identity`.
    pub fn has_vanished(&self, identity: &Identity) -> bool {
        self.state().vanished.contains(identity.as_str())
    }

    /// Returns how many dead connections of the device of `identity` were replaced.
    pub fn replaced(&self, identity: &Identity) -> u64 {
        self.state().replaced.get(identity.as_str()).copied().unwrap_or(0)
    }

    /// Connects a device as another program would, with that backend identifier.
    pub fn add_foreign(&self, index: DeviceIndex, size: u64, backend: Option<&str>) {
        let mut state = self.state();
        let config = Config::foreign(size, backend.map(str::to_owned), state.next_instance());
        state.devices.entry(index).or_default().config = Some(config);
        drop(state);
        self.notify();
    }

    /// Kills the connections of the device, as the kernel does after its request timeout.
    pub fn kill_connections(&self, index: DeviceIndex) {
        let mut state = self.state();
        let now = (state.script.now)();
        if let Some(config) = state.devices.get_mut(&index).and_then(|d| d.config.as_mut()) {
            config.shut_down();
            config.mark_dead(now);
            state.emit(KernelEvent::LinkDead(index));
        }
        drop(state);
        self.notify();
    }

    /// Returns whether a device is disconnected, and stays configured only because it is held.
    pub fn is_disconnected(&self, index: DeviceIndex) -> bool {
        let state = self.state();
        let config = state.devices.get(&index).and_then(|device| device.config.as_ref());
        config.is_some_and(|config| config.disconnected)
    }

    /// Returns every device, without faults.
    pub fn show(&self) -> Vec<Device> {
        let state = self.state();
        let show = |(index, device): (&DeviceIndex, &SimDevice)| {
            let mut shown = device.show(*index);
            shown.in_flight += state.in_flight_by_steps(*index);
            shown
        };
        state.devices.iter().map(show).collect()
    }

    /// Marks connections whose peer has closed as dead, as the kernel does by itself.
    pub fn check_connections(&self) {
        self.state().check_connections();
        self.0.changed.notify_all();
    }

    /// Returns the number of live connections of the device.
    pub fn live_connections(&self, index: DeviceIndex) -> usize {
        let mut state = self.state();
        state.check_connections();
        let config = state.devices.get(&index).and_then(|device| device.config.as_ref());
        config.map_or(0, |config| {
            config.connections.iter().filter(|connection| connection.is_alive()).count()
        })
    }
}
