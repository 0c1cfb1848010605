//! The durable record of a mapping: what the journal stores.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use cleat_core::policy::Policy;
use cleat_kernel::{DeviceIndex, Identity, UnmountScope};

/// The durable state of a mapping, which the journal stores. Later builds may add fields, with defaults,
/// and unknown fields are ignored: records of older and newer builds of the same version can be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// [`Record::VERSION`].
    pub version: u32,
    /// Lower-case hexadecimal, unique.
    pub mapping_id: String,
    /// Unique on the node.
    pub name: String,
    /// The volume.
    pub uri: String,
    /// As asked for, with defaults filled in.
    pub options: Options,
    /// What the user wants.
    pub intent: Intent,
    /// Raised with every new worker, before it is told anything.
    pub generation: u64,
    /// The newest worker; written before it is told anything, so that it can always be found.
    pub worker: Option<WorkerId>,
    /// While `worker` is about to succeed a worker that still serves: that one.
    pub predecessor: Option<WorkerId>,
    /// What the device was made from; written before it is connected.
    pub volume: Option<DeviceProperties>,
    /// Whether `map` has succeeded: from here on a missing device is a fault, not work to do.
    pub established: bool,
    /// Whether somebody else came to own the volume: no worker of this mapping opens it again.
    pub fenced: bool,
    /// Written before anything is made quiet for a snapshot, and taken back after that has ended.
    pub quiesced: Option<Quiesced>,
    /// Seconds since the epoch.
    pub created_at_s: u64,
    /// The kernel's boot: devices do not survive it.
    pub boot_id: String,
}

impl Record {
    /// Raised when a field changes its meaning.
    pub const VERSION: u32 = 1;

    /// What its device carries in the kernel.
    pub fn identity(&self) -> Identity {
        Identity::new(&self.mapping_id, &self.name)
    }
}

/// How a volume is mapped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Options {
    /// Nothing is ever written.
    pub read_only: bool,
    /// Connections to the kernel; at least 1.
    pub connections: u32,
    /// 0: the backend's minimum.
    pub block_size: u32,
    /// How long new I/O waits for a worker before it fails.
    pub dead_connection_timeout_s: u32,
    /// How soon after a repair the kernel repeats what the dead worker left; 0: the kernel's 30 s.
    pub replay_delay_ms: u32,
    /// What happens in an outage of the backend, and how fast the mapping may go. Changed live.
    #[serde(deserialize_with = "Policy::understood")]
    pub policy: Policy,
    /// The device is made quiet when a snapshot of the volume is made.
    pub quiesce: bool,
}

/// What the user wants of a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Intent {
    /// A working device.
    Mapped,
    /// Nothing left.
    Unmapped,
    /// Nothing left, whatever hangs and whoever holds it.
    Forced(UnmountScope),
}

/// A process that cannot be mistaken for a later one of the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WorkerId {
    /// Its number.
    pub pid: u32,
    /// Field 22 of /proc/pid/stat: clock ticks since boot.
    pub started_ticks: u64,
}

/// What a device is made from, as the worker said it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceProperties {
    /// In bytes.
    pub size: u64,
    /// Of the device, in bytes.
    pub block_size: u32,
    /// NBD transmission flags.
    pub transmission_flags: u16,
    /// Whether a new worker finds the content again.
    pub outlives_worker: bool,
}

/// NBD_FLAG_READ_ONLY: a volume that is so by itself (a snapshot) has it without being asked to, and
/// its device refuses writes.
pub const READ_ONLY: u16 = 1 << 1;

impl DeviceProperties {
    /// Whether its device refuses writes.
    pub fn is_read_only(&self) -> bool {
        self.transmission_flags & READ_ONLY != 0
    }
}

/// A device that is quiet, or about to be, as it is recorded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quiesced {
    /// Its number.
    pub device: DeviceIndex,
    /// Milliseconds since the epoch.
    pub since_unix_ms: u64,
    /// What has made it quiet, and ends it; `None`: its file systems are frozen.
    pub hook: Option<PathBuf>,
    /// File systems that somebody else had frozen before.
    pub already_frozen: Vec<String>,
}
