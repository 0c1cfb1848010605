//! The durable record of a mapping: what the journal stores.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use cleat_backend::VolumeIdentity;
use cleat_core::policy::Policy;
use cleat_kernel::{DeviceIndex, Identity, UnmountScope};

/// The durable state of a mapping, which the journal stores. Later builds may add fields, with defaults,
/// and unknown fields are ignored: records of older and newer builds of the same version can be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The version of the format: [`Record::VERSION`].
    pub version: u32,
    /// The id of the mapping in lower-case hexadecimal. It is unique.
    pub mapping_id: String,
    /// The name of the mapping, which is unique on the node.
    pub name: String,
    /// The URI of the volume.
    pub uri: String,
    /// The generation of the grant with which every worker of the mapping claims the volume; 0 without a grant.
    #[serde(default)]
    pub grant: u64,
    /// The options of the map request, with defaults filled in.
    pub options: Options,
    /// What the user wants of the mapping.
    pub intent: Intent,
    /// The generation of the worker. It is incremented before a new worker receives a command.
    pub generation: u64,
    /// Is incremented with each write. It tells which is newer, a record or its copy in the runtime directory.
    #[serde(default)]
    pub revision: u64,
    /// The newest worker. It is recorded before it receives a command, so that it can always be found.
    pub worker: Option<WorkerId>,
    /// During a handover, the worker that `worker` is to replace, and which still serves.
    pub predecessor: Option<WorkerId>,
    /// The properties of the device, which are recorded before it is connected.
    pub volume: Option<DeviceProperties>,
    /// Whether `map` has succeeded. From then on a missing device is a failure.
    pub established: bool,
    /// Whether another client has become the owner of the volume. No worker of this mapping opens it
    /// again.
    pub fenced: bool,
    /// Whether a sync of the volume has failed. Acknowledged writes may be lost, and every worker of this
    /// mapping fails each FLUSH and each write with FUA.
    #[serde(default)]
    pub sync_failed: bool,
    /// What a worker found in place of the volume, as text for people. No worker of this mapping opens the
    /// volume again.
    pub replaced: Option<String>,
    /// The device that is quiesced for a snapshot. It is recorded before the device is quiesced, and
    /// removed after that has ended.
    pub quiesced: Option<Quiesced>,
    /// When the mapping was created, in seconds since the Unix epoch.
    pub created_at_s: u64,
    /// The id of the kernel's boot. Devices do not survive a boot.
    pub boot_id: String,
}

impl Record {
    /// The version that this build writes. It is incremented when a field changes its meaning.
    pub const VERSION: u32 = 1;

    /// Returns the identity that the mapping's device carries in the kernel.
    pub fn identity(&self) -> Identity {
        Identity::new(&self.mapping_id, &self.name)
    }
}

/// The options of a mapping.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Options {
    /// Whether the device refuses writes.
    pub read_only: bool,
    /// The number of connections between the kernel and the worker, at least 1.
    pub connections: u32,
    /// The block size in bytes; 0 for the minimum of the backend.
    pub block_size: u32,
    /// How long I/O waits for a worker before it fails, in seconds.
    pub dead_connection_timeout_s: u32,
    /// The delay in milliseconds after which the kernel repeats the requests of a dead worker; 0 for the
    /// kernel's default of 30 s.
    pub replay_delay_ms: u32,
    /// The behaviour in an outage of the backend, and the rate limits. It can be changed while the
    /// mapping works.
    #[serde(deserialize_with = "Policy::understood")]
    pub policy: Policy,
    /// Whether the device is quiesced while a snapshot of the volume is made.
    pub quiesce: bool,
}

/// What the user wants of a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Intent {
    /// The device works.
    Mapped,
    /// The mapping is removed.
    Unmapped,
    /// The mapping is removed, even if the device has holders or a component does not answer.
    Forced(UnmountScope),
}

/// Identifies a worker process. A later process with the same number has another start time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WorkerId {
    /// The number of the process.
    pub pid: u32,
    /// The start time, in clock ticks since boot (field 22 of /proc/pid/stat).
    pub started_ticks: u64,
}

/// The properties of a device and its volume, as the worker reported them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceProperties {
    /// The identity of the volume. The device is never connected to another volume. `None` in records of
    /// builds that did not determine it, until the next worker has opened the volume.
    pub identity: Option<VolumeIdentity>,
    /// The size in bytes.
    pub size: u64,
    /// The block size of the device in bytes.
    pub block_size: u32,
    /// The NBD transmission flags.
    pub transmission_flags: u16,
    /// Whether the content is still there after the worker has ended.
    pub outlives_worker: bool,
}

/// NBD_FLAG_READ_ONLY: the device refuses writes. Volumes that cannot be written (snapshots) have it even
/// if the map request does not ask for it.
pub const READ_ONLY: u16 = 1 << 1;

impl DeviceProperties {
    /// Returns whether the device refuses writes.
    pub fn is_read_only(&self) -> bool {
        self.transmission_flags & READ_ONLY != 0
    }
}

/// The record of a device that is quiesced or about to be quiesced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quiesced {
    /// N of `/dev/nbdN`.
    pub device: DeviceIndex,
    /// When the quiescing began, in milliseconds since the Unix epoch.
    pub since_unix_ms: u64,
    /// The hook that quiesces the device and ends that; `None` if its file systems are frozen instead.
    pub hook: Option<PathBuf>,
    /// The file systems that another process had frozen before.
    pub already_frozen: Vec<String>,
}
