//! What the executor observes of a mapping before each plan.

use cleat_kernel::{DeviceIndex, Holder};

/// The observed state of a mapping.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Observed {
    /// The connected devices that carry the mapping's identity.
    pub devices: Vec<ObservedDevice>,
    /// The worker of the mapping.
    pub worker: ObservedWorker,
    /// During a handover, the worker that hands over; otherwise `Gone`.
    pub predecessor: ObservedWorker,
    /// During a handover, whether the new worker has taken over. `None` if this cannot be determined.
    pub handed_over: Option<bool>,
    /// The holders of the devices. They are looked up only if the intent is to unmap, because the
    /// search takes long.
    pub holders: Vec<Holder>,
    /// Whether this supervisor has seen the paths of the device.
    pub paths_known: bool,
    /// The number of consecutive repairs that failed or did not last.
    pub failures: u32,
    /// How the last workers ended, as text for users.
    pub history: String,
    /// Whether no worker has served the device for longer than its I/O may wait.
    pub unserved_too_long: bool,
    /// Whether a worker without a volume answers each request of the device with an error.
    pub refusing: bool,
    /// Whether a resize of the device failed recently and is not to be tried yet.
    pub resize_deferred: bool,
    /// What a snapshot requests, and what was done for it.
    pub quiesced: ObservedQuiesce,
    /// Whether a worker of the mapping has recorded that a sync of the volume failed.
    pub sync_failed: bool,
    /// Whether the kernel still executes an abandoned attempt to connect a device.
    pub connecting: bool,
}

/// A device that carries the mapping's identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ObservedDevice {
    /// N of `/dev/nbdN`.
    pub index: DeviceIndex,
    /// The size in bytes.
    pub size: u64,
}

/// The observed state of a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ObservedWorker {
    /// The mapping has no such process: none was started, or its end is proved.
    Gone,
    /// The worker answers.
    Alive {
        /// The number of kernel connections that it serves.
        connections: u32,
        /// The size of the volume in bytes.
        size: u64,
    },
    /// The process exists, but does not answer, or speaks another version of the protocol.
    Unreachable {
        /// The number of the process.
        pid: u32,
        /// The cause, as text for users.
        reason: String,
    },
    /// Another client owns the volume now. The worker fails every request.
    Fenced,
}

/// The observed state of quiescing a mapping for a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ObservedQuiesce {
    /// The snapshot that waits for an answer.
    pub snapshot: Option<u64>,
    /// Whether the device must stay quiesced.
    pub in_progress: bool,
    /// Whether an attempt to thaw failed recently, and the next one is not due yet.
    pub retry_later: bool,
}
