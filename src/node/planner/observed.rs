//! What the executor observes of a mapping before each plan.

use cleat_kernel::{DeviceIndex, Holder};

/// What is, as far as this mapping is concerned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Observed {
    /// Connected devices that carry the mapping's identity.
    pub devices: Vec<ObservedDevice>,
    /// Its worker.
    pub worker: ObservedWorker,
    /// The worker that it is to succeed; `Gone` when there is none.
    pub predecessor: ObservedWorker,
    /// With a predecessor: whether the worker has taken over from it; `None` when nobody can tell.
    pub handed_over: Option<bool>,
    /// Who holds the devices. Looked for whenever the intent is to unmap, as looking takes long.
    pub holders: Vec<Holder>,
    /// Whether the device's paths have been seen since the supervisor started.
    pub paths_known: bool,
    /// Repairs that did not last, in a row.
    pub failures: u32,
    /// How the last of them ended, for the reader.
    pub history: String,
    /// No worker has served the device for as long as I/O may wait.
    pub unserved_too_long: bool,
    /// In place of a worker, somebody answers each request with an error.
    pub refusing: bool,
    /// A growth of the device could not be carried out a moment ago.
    pub resize_deferred: bool,
    /// What a snapshot asks for, and what was done for it.
    pub quiesced: ObservedQuiesce,
    /// The kernel has not ended an attempt to connect a device, which nobody waits for any more.
    pub connecting: bool,
}

/// A device with our identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ObservedDevice {
    /// N of `/dev/nbdN`.
    pub index: DeviceIndex,
    /// In bytes.
    pub size: u64,
}

/// A mapping's worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ObservedWorker {
    /// No process of this mapping exists: none was started, or its end is proved.
    Gone,
    /// It answers.
    Alive {
        /// Kernel connections that it serves.
        connections: u32,
        /// Of the volume, in bytes.
        size: u64,
    },
    /// Its process exists and does not answer, or not in our language.
    Unreachable {
        /// Of the process.
        pid: u32,
        /// Why, for the reader.
        reason: String,
    },
    /// The volume belongs to somebody else now; the worker fails every request.
    Fenced,
}

/// What a look at a mapping shows of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ObservedQuiesce {
    /// A snapshot that waits for an answer.
    pub snapshot: Option<u64>,
    /// What was made quiet is still to be.
    pub in_progress: bool,
    /// A thaw could not be carried out a moment ago.
    pub retry_later: bool,
}
