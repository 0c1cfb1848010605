//! Frozen file systems of a simulated kernel. Each mount of a device is one file system.

use std::path::PathBuf;
use std::time::Instant;

use super::script::timed_out;
use super::{Call, DeviceIndex, Holder, Identity, SimKernel, State};
use cleat_core::error::{Error, Result};

/// A frozen file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Frozen {
    path: PathBuf,
    /// The identity of the device, if `Kernel::freeze` froze the file system; `None`: another program did.
    by: Option<Identity>,
}

/// Methods for tests.
impl SimKernel {
    /// Returns the file systems that [`crate::Kernel::freeze`] froze, with their devices and identities.
    pub fn frozen(&self) -> Vec<(DeviceIndex, Identity, PathBuf)> {
        let state = self.state();
        let all =
            state.devices.iter().flat_map(|(at, device)| device.frozen.iter().map(|f| (*at, f)));
        all.filter_map(|(at, f)| Some((at, f.by.clone()?, f.path.clone()))).collect()
    }

    /// Returns the file systems on the device that another program has frozen.
    pub fn frozen_by_others(&self, index: DeviceIndex) -> Vec<PathBuf> {
        let state = self.state();
        let all = state.devices.get(&index).map(|device| device.frozen.as_slice());
        let others = all.unwrap_or_default().iter().filter(|frozen| frozen.by.is_none());
        others.map(|frozen| frozen.path.clone()).collect()
    }

    /// Returns whether a write to the device, as it was configured for `identity`, ends, with or without an
    /// error.
    pub fn answers(&self, index: DeviceIndex, identity: &Identity) -> bool {
        self.state().answers(index, identity)
    }

    /// Thaws all file systems, as a reboot does.
    pub fn clear_frozen(&self) {
        self.state().devices.values_mut().for_each(|device| device.frozen.clear());
    }

    /// Freezes the file system that is mounted at `path` as another program would.
    pub fn freeze_by_other(&self, index: DeviceIndex, path: impl Into<PathBuf>) {
        let frozen = Frozen { path: path.into(), by: None };
        self.state().devices.entry(index).or_default().frozen.push(frozen);
    }

    /// Calls `hook` for every device whose file systems were frozen.
    pub fn on_freeze(&self, hook: super::Hook) {
        self.state().freeze_hook = Some(hook);
    }
}

impl SimKernel {
    pub(super) fn freeze_all(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        deadline: Instant,
    ) -> Result<Vec<String>> {
        let (mut state, fault) = self.enter(Call::Freeze, Some(deadline))?;
        state.config(index, identity)?;
        drop(state);
        // Freezing writes dirty data first.
        self.flush_device(index, deadline)
            .map_err(|error| Error::from_io("the simulated kernel did not finish Freeze", error))?;
        let mut state = self.state();
        let hook = state.freeze_hook.clone();
        let device = state.devices.entry(index).or_default();
        let mounts = device.holders.iter().filter_map(|holder| match holder {
            Holder::Mount { path, .. } => Some(path.clone()),
            _ => None,
        });
        let (before, fresh): (Vec<_>, Vec<_>) =
            mounts.partition(|path| device.frozen.iter().any(|frozen| frozen.path == *path));
        let by = Some(identity.clone());
        device.frozen.extend(fresh.into_iter().map(|path| Frozen { path, by: by.clone() }));
        let frozen = self.leave(state, Call::Freeze, fault);
        hook.iter().for_each(|hook| hook(identity));
        frozen.map(|()| before.iter().map(|path| path.display().to_string()).collect())
    }

    pub(super) fn thaw_all(
        &self,
        index: DeviceIndex,
        identity: &Identity,
        spared: &[String],
        deadline: Instant,
    ) -> Result<()> {
        let (mut state, fault) = self.enter(Call::Thaw, Some(deadline))?;
        if !state.answers(index, identity) {
            return Err(timed_out(Call::Thaw));
        }
        let device = state.devices.entry(index).or_default();
        device.frozen.retain(|frozen| {
            let others = frozen.by.as_ref().is_some_and(|by| by != identity);
            others || spared.contains(&frozen.path.display().to_string())
        });
        self.leave(state, Call::Thaw, fault)
    }
}

impl State {
    /// Implements [`SimKernel::answers`] for a locked state.
    fn answers(&self, index: DeviceIndex, identity: &Identity) -> bool {
        let config = self.devices.get(&index).and_then(|device| device.config.as_ref());
        config.is_none_or(|config| {
            config.backend.as_deref() != Some(identity.as_str())
                || config.disconnected
                || config.connections.iter().any(|connection| connection.is_alive())
        })
    }
}
