//! The devices that were disconnected by force and still have holders.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use cleat_kernel::{DeviceIndex, Identity};

/// Devices that this supervisor disconnected by force and that still have holders. The list is not durable:
/// a later supervisor reports such a device as an orphan.
#[derive(Debug, Default)]
pub(crate) struct ForceDisconnected(Mutex<BTreeSet<(DeviceIndex, Identity)>>);

impl ForceDisconnected {
    /// Adds a device. If the list is full, the device is reported as an orphan.
    pub(crate) fn insert(&self, index: DeviceIndex, identity: &Identity) {
        const MAX_DEVICES: usize = 1024;
        let mut devices = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if devices.len() < MAX_DEVICES {
            devices.insert((index, identity.clone()));
        }
    }

    /// Returns whether this supervisor disconnected the device by force.
    pub(crate) fn contains(&self, index: DeviceIndex, identity: &Identity) -> bool {
        let devices = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        devices.contains(&(index, identity.clone()))
    }
}
