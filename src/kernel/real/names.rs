//! Removes the names of devices that are gone: udev properties and symlinks.

use std::time::{Duration, Instant};

use super::RealKernel;
use crate::{Device, DeviceIndex, Identity, Kernel};
use cleat_core::error::Result;

/// How long udev may take to remove a symlink before it is removed here.
const UNLINK_TIMEOUT: Duration = Duration::from_secs(1);

impl RealKernel {
    /// Removes the names that a supervisor before us left behind, without a device.
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
            devices.iter().for_each(|device| self.names.remove_link(device.index, &identity));
        }
        Ok(())
    }

    /// Has udev take back the names of a device that is disconnected and held: it would keep them for
    /// as long as the holder pleases, and from a new device of that name.
    pub(super) fn disown(&self, index: DeviceIndex, identity: &Identity) {
        self.names.withdraw(identity);
        self.sysfs.announce(index);
        self.sysfs.announce_partitions(index);
    }

    /// Takes the names away. A device without its properties loses the symlink at its next event.
    pub(super) fn withdraw(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        deadline: Instant,
    ) -> Result<()> {
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
            if crate::udev::udevd_idle() {
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
}
