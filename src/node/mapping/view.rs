//! What everybody may read of a mapping at any time, without its guard.

use std::path::PathBuf;

use crate::planner::{ObservedDevice, Record, State};
use cleat_core::error::ErrorKind;
use cleat_kernel::{DeviceIndex, DevicePaths, Holder};

/// What everybody may see at any time.
#[derive(Debug, Clone, PartialEq)]
pub struct View {
    /// What is wanted.
    pub record: Record,
    /// How it is doing.
    pub state: State,
    /// Why, beyond the state: the last failure of a repair under way, say.
    pub message: String,
    /// Its device.
    pub device: Option<ObservedDevice>,
    /// Where the device is.
    pub paths: Option<DevicePaths>,
    /// 0: none.
    pub worker_pid: u32,
    /// Its build.
    pub worker_build: String,
    /// Who holds it, where somebody has looked.
    pub holders: Vec<Holder>,
    /// The backend cannot be reached.
    pub outage: Option<OutageView>,
    /// How its last worker ended, where one did that was not asked to.
    pub last_exit: Option<String>,
}

impl View {
    /// The device's node, as far as known.
    pub fn node(&self) -> Option<PathBuf> {
        let known = self.paths.as_ref().map(|paths| paths.node.clone());
        known.or_else(|| self.device.map(|device| node_of(device.index)))
    }

    /// Whether nothing can be written: asked for, or the nature of the volume (a snapshot).
    pub fn is_read_only(&self) -> bool {
        let by_itself = self.record.volume.is_some_and(|volume| volume.is_read_only());
        self.record.options.read_only || by_itself
    }

    /// Whether somebody else owns the volume now.
    pub fn is_fenced(&self) -> bool {
        matches!(&self.state, State::Failed(failure) if failure.kind == ErrorKind::Fenced)
    }
}

/// An outage of a mapping's backend, as everybody may see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutageView {
    /// When it was noticed.
    pub since_unix_ms: u64,
    /// Why, as far as known.
    pub reason: Option<String>,
    /// Requests that wait in the worker.
    pub queued: u64,
}

/// `/dev/nbdN`.
pub fn node_of(index: DeviceIndex) -> PathBuf {
    PathBuf::from(format!("/dev/nbd{index}"))
}

/// A mapping as it is now, or that it is no more.
#[derive(Debug, Clone)]
pub struct Change {
    /// As it is, or was.
    pub view: View,
    /// Whether it is gone.
    pub removed: bool,
}
