//! What the executor observes of a mapping before each plan.

use cleat_kernel::{DeviceIndex, Holder};

/// What is, as far as this mapping is concerned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Observed {
    /// Connected devices that carry the mapping's identity.
    pub devices: Vec<SeenDevice>,
    /// Its worker.
    pub worker: SeenWorker,
    /// The worker that it is to succeed; `Gone` when there is none.
    pub predecessor: SeenWorker,
    /// With a predecessor: whether the worker has taken over from it; `None` when nobody can tell.
    pub taken: Option<bool>,
    /// Who holds the devices. Looked for whenever the intent is to unmap, as looking takes long.
    pub holders: Vec<Holder>,
    /// Whether the device's paths have been seen since the supervisor started.
    pub announced: bool,
    /// Repairs that did not last, in a row.
    pub failures: u32,
    /// How the last of them ended, for the reader.
    pub history: String,
    /// No worker has served the device for as long as I/O may wait.
    pub overdue: bool,
    /// In place of a worker, somebody answers each request with an error.
    pub refusing: bool,
    /// A growth of the device could not be carried out a moment ago.
    pub growth_waits: bool,
    /// What a snapshot asks for, and what was done for it.
    pub quiet: SeenQuiesce,
    /// The kernel has not ended an attempt to connect a device, which nobody waits for any more.
    pub connecting: bool,
}

/// A device with our identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SeenDevice {
    /// N of `/dev/nbdN`.
    pub index: DeviceIndex,
    /// In bytes.
    pub size: u64,
}

/// A mapping's worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SeenWorker {
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
pub struct SeenQuiesce {
    /// A snapshot that waits for an answer.
    pub snapshot: Option<u64>,
    /// What was made quiet is still to be.
    pub lasts: bool,
    /// A thaw could not be carried out a moment ago.
    pub thaw_waits: bool,
}
