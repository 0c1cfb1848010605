//! Removes the names of devices that are disconnected: udev properties and symlinks.

use std::time::{Duration, Instant};

use super::RealKernel;
use crate::{Device, DeviceIndex, Identity, Kernel};
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::Result;

/// How long udevd may take to remove a symlink before this process removes it.
const UNLINK_TIMEOUT: Duration = Duration::from_secs(1);

impl RealKernel {
    /// Removes names without a device, which an earlier supervisor left behind.
    ///
    /// # Errors
    /// Returns an error if sysfs cannot be read.
    pub(super) fn clear_leftovers(&self) -> Result<()> {
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
            devices.iter().for_each(|device| self.names.remove_symlink(device.index, &identity));
        }
        Ok(())
    }

    /// Makes udevd remove the names of a device that is disconnected and still held. Otherwise the device
    /// would keep its symlink until its last holder closes it, and a new device of the same mapping could
    /// not have it.
    pub(super) fn remove_names_of_held(&self, index: DeviceIndex, identity: &Identity) {
        self.names.withdraw(identity);
        self.sysfs.announce(index);
        self.sysfs.announce_partitions(index);
    }

    /// Removes the names of a disconnected device. udevd removes the symlink at the next event after the
    /// properties are gone.
    ///
    /// # Errors
    /// Returns an error if sysfs cannot be read.
    pub(super) fn withdraw(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        deadline: Instant,
    ) -> Result<()> {
        let devices = self.devices()?;
        // The device itself may still exist, disconnected and held, or belong to another mapping by now.
        let others = devices.iter().filter_map(|device| Some((device.index, device.identity()?)));
        let others = others.filter(|(at, of)| *at != index || of != identity);
        let others: Vec<_> = others.map(|(_, identity)| identity).collect();
        if others.contains(identity) {
            return Ok(());
        }
        self.names.withdraw(identity);
        // Another mapping of the same name has the symlink now.
        if others.iter().any(|other| other.name() == identity.name()) {
            return Ok(());
        }
        if !self.names.makes_symlinks() && self.names.symlink_leads_to(index, identity) {
            if crate::udev::udevd_idle() {
                self.sysfs.announce(index);
            }
            let deadline = deadline.min(SystemClock.now() + UNLINK_TIMEOUT);
            let events = self.device_events();
            self.wait(deadline, events.as_ref().map(|events| (events, index)), || {
                Ok((!self.names.symlink_leads_to(index, identity)).then_some(()))
            })?;
        }
        self.names.remove_symlink(index, identity);
        Ok(())
    }
}
