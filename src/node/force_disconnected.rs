//! The devices that were disconnected by force and still have holders.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use cleat_kernel::{DeviceIndex, Identity};

/// Devices that this supervisor disconnected by force and that still have holders. They are told
/// from those that serve for as long as this supervisor runs.
#[derive(Debug, Default)]
pub(crate) struct ForceDisconnected(Mutex<BTreeSet<(DeviceIndex, Identity)>>);

impl ForceDisconnected {
    /// Adds a device.
    pub(crate) fn insert(&self, index: DeviceIndex, identity: &Identity) {
        const KEPT: usize = 1024;
        let mut devices = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if devices.len() < KEPT {
            devices.insert((index, identity.clone()));
        }
    }

    /// Returns whether this supervisor disconnected the device by force.
    pub(crate) fn contains(&self, index: DeviceIndex, identity: &Identity) -> bool {
        let devices = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        devices.contains(&(index, identity.clone()))
    }
}
