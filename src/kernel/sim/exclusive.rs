//! Exclusive opens of a simulated kernel, and the users inside the kernel that only they show.

use super::{DeviceIndex, Holder, Identity, SimKernel};
use crate::ExclusiveOpen;
use cleat_core::error::Result;

impl SimKernel {
    /// Sets descriptions of the users inside the kernel that have claimed the device. `Kernel::holders` does
    /// not show them. For tests.
    pub fn set_kernel_users(&self, index: DeviceIndex, users: Vec<String>) {
        let mut state = self.state();
        let device = state.devices.entry(index).or_default();
        device.kernel_users = users;
        device.release();
        drop(state);
        self.notify();
    }

    /// Opens the device exclusively, as the kernel does.
    pub(super) fn open_device(
        &self,
        index: DeviceIndex,
        identity: &Identity,
    ) -> Result<Result<ExclusiveOpen, Vec<Holder>>> {
        let mut state = self.state();
        state.config(index, identity)?;
        let device = state.devices.entry(index).or_default();
        let mut users = device.kernel_users.clone();
        if device.exclusive {
            users.push(format!("/dev/nbd{index} is open exclusively"));
        }
        if !users.is_empty() {
            return Ok(Err(users.into_iter().map(|what| Holder::Kernel { what }).collect()));
        }
        device.exclusive = true;
        drop(state);
        Ok(Ok(ExclusiveOpen::new(OpenDevice { kernel: self.clone(), index })))
    }
}

/// An exclusive open of a device.
struct OpenDevice {
    kernel: SimKernel,
    index: DeviceIndex,
}

impl Drop for OpenDevice {
    fn drop(&mut self) {
        let mut state = self.kernel.state();
        let device = state.devices.entry(self.index).or_default();
        device.exclusive = false;
        device.release();
        drop(state);
        self.kernel.notify();
    }
}
