//! The part of a mapping that can be read at any time, without its guard.

use std::path::PathBuf;

use crate::planner::{DeviceProperties, ObservedDevice, Record, State};
use cleat_core::error::ErrorKind;
use cleat_core::space::SpaceUse;
use cleat_kernel::{DeviceIndex, DevicePaths, Holder};

/// The state of a mapping that can be read at any time.
#[derive(Debug, Clone, PartialEq)]
pub struct View {
    /// The record: the desired state.
    pub record: Record,
    /// The state of the mapping.
    pub state: State,
    /// Details of the state, for example the last failure of a repair in progress.
    pub message: String,
    /// The device of the mapping.
    pub device: Option<ObservedDevice>,
    /// The paths of the device.
    pub paths: Option<DevicePaths>,
    /// The process number of the worker; 0 without a worker.
    pub worker_pid: u32,
    /// The build of the worker.
    pub worker_build: String,
    /// The holders of the device, as far as they were looked up.
    pub holders: Vec<Holder>,
    /// The outage of the backend, if it cannot be reached.
    pub outage: Option<OutageView>,
    /// The data of acknowledged writes that is not durable yet, in bytes.
    pub unsaved_bytes: u64,
    /// What the volume has put to its store and takes there.
    pub space: SpaceUse,
    /// How the last worker ended that was not stopped by the supervisor.
    pub last_exit: Option<String>,
}

impl View {
    /// Returns the path of the device's node, as far as it is known.
    pub fn node(&self) -> Option<PathBuf> {
        let known = self.paths.as_ref().map(|paths| paths.node.clone());
        known.or_else(|| self.device.map(|device| node_of(device.index)))
    }

    /// Returns whether the device refuses writes, by request or because the volume cannot be written (a
    /// snapshot).
    pub fn is_read_only(&self) -> bool {
        let by_volume = self.record.volume.as_ref().is_some_and(DeviceProperties::is_read_only);
        self.record.options.read_only || by_volume
    }

    /// Returns whether the mapping must not use its volume any more: another client owns it, or another
    /// volume has taken its place.
    pub fn is_fenced(&self) -> bool {
        matches!(&self.state, State::Failed(failure)
            if matches!(failure.kind, ErrorKind::Fenced | ErrorKind::Replaced))
    }

    /// Returns whether another volume has taken the place of the mapping's volume.
    pub fn is_replaced(&self) -> bool {
        matches!(&self.state, State::Failed(failure) if failure.kind == ErrorKind::Replaced)
    }
}

/// An outage of a mapping's backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutageView {
    /// When the outage was noticed, in milliseconds since the Unix epoch.
    pub since_unix_ms: u64,
    /// The cause, as far as it is known.
    pub reason: Option<String>,
    /// The number of requests that wait in the worker.
    pub queued: u64,
}

/// Returns the path of a device's node, `/dev/nbdN`.
pub fn node_of(index: DeviceIndex) -> PathBuf {
    PathBuf::from(format!("/dev/nbd{index}"))
}

/// A change of a mapping's view, or its removal.
#[derive(Debug, Clone)]
pub struct Change {
    /// The new view, or the last one of a mapping that was removed.
    pub view: View,
    /// Whether the mapping was removed.
    pub removed: bool,
}
