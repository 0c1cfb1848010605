//! The messages between supervisor and worker over a SOCK_SEQPACKET unix socket: one JSON message in each
//! packet of at most [`MAX_PACKET`] bytes, with descriptors as SCM_RIGHTS.
//!
//! The worker owns its sockets, so that they outlive the supervisor. It inherits one end of the channel as
//! the descriptor [`CHANNEL_FD`]. A later supervisor connects to the worker's control socket and sends
//! `Adopt`. The connection that was adopted last is in charge.
//!
//! Supervisor and worker may be of different builds. Both send their versions in the first message (see
//! `version`); without a common version the first message fails with an error that names both builds. Within
//! a version, fields are only added, unknown fields are ignored, a worker refuses an unknown command by name,
//! and a supervisor ignores an unknown event. So the answer to a command is never an event that is newer than
//! the command.

use serde::{Deserialize, Serialize};

use cleat_backend::{HandoverState, VolumeIdentity};
use cleat_core::policy::Policy;

/// The newest version of the protocol that this build supports. It is raised when a message changes its
/// meaning.
pub const PROTOCOL_VERSION: u32 = 1;

/// The oldest version of the protocol that this build supports.
pub const OLDEST_PROTOCOL: u32 = 1;

/// The descriptor under which a worker inherits its end of the channel.
pub const CHANNEL_FD: i32 = 3;

/// The maximum number of connections of one device.
pub const MAX_CONNECTIONS: u32 = 16;

/// The maximum length of a message in bytes.
pub const MAX_PACKET: usize = 64 * 1024;

pub use cleat_sys::seqpacket::MAX_DESCRIPTORS;

/// The versions of the protocol that one side supports. `version` compares them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProtocolVersions {
    /// The newest version.
    #[serde(rename = "version")]
    pub newest: u32,
    /// The oldest version.
    pub oldest: u32,
    /// The name of the build.
    pub build: String,
}

/// A command of the supervisor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum ToWorker {
    /// The first message on an inherited channel. Descriptors: a listening SOCK_SEQPACKET socket (the control
    /// socket, for later supervisors) and a memory file for the statistics page; then the tail file, if
    /// `tail_bytes` is not 0; then the files of the cache, `cache_files` of them; then the files of `credentials`; for a successor, then the descriptors of its
    /// predecessor's `HandoverPrepared`. Answered by `Ready` or `Failed`.
    Start(Box<Start>),
    /// The first message on an inherited channel to a worker without a volume, for a device that no worker
    /// will serve again. The worker answers every request with an I/O error and accepts `Serve`, `Ping` and
    /// `Stop`. It has no control socket, and it ends when the channel ends. Descriptor: a memory file for the
    /// statistics page. Answered by `Ready` or `Failed`.
    Refuse(Box<Refuse>),
    /// The first message on a connection to the control socket. Answered by `Ready`, with the statistics page
    /// as descriptor, or by `Failed`.
    Adopt {
        /// The newest version that the supervisor supports.
        version: u32,
        /// The oldest version that the supervisor supports.
        oldest: u32,
        /// The supervisor's build.
        build: String,
        /// The mapping whose worker the supervisor expects.
        mapping_id: String,
        /// Whether the supervisor passes the tail file of the mapping to the next worker.
        #[serde(default)]
        keeps_tail: bool,
    },
    /// Serve these kernel connections. Descriptors: one connected stream socket for each. Answered by
    /// `Serving`.
    Serve,
    /// Close every connection after its running requests, close the volume, and exit. Answered by `Closed` if the
    /// volume was closed, and by the end of the channel.
    Stop,
    /// Read the volume's size from the backend. Answered by `Size`.
    RefreshSize,
    /// Change the volume's size at the backend. Answered by `Size`.
    Resize {
        /// The new size in bytes.
        size: u64,
        /// Whether the new size may be smaller than the present one.
        shrink: bool,
    },
    /// Apply another policy, also to requests that wait already. Answered by `Done`.
    SetPolicy(Policy),
    /// Use the present content of the volume's credential files from now on. Descriptors: the files of
    /// `credentials`. Answered by `Done`, or by `Failed` with `Unsupported` if only a new worker can use it.
    RenewCredentials {
        /// The paths of the files.
        credentials: Vec<String>,
    },
    /// Replace the injected faults. Answered by `Done`.
    #[cfg(feature = "fault")]
    SetFault {
        /// The fault plan.
        plan: String,
    },
    /// Check that the worker's control thread runs. Answered by `Done`. A worker whose backend requests it then reads
    /// the size of the volume, and reports a change by `SizeChanged`.
    Ping,
    // --- planned handover, see `handover`
    /// Return what a successor opens the volume with, and continue to serve. Answered by `HandoverPrepared`.
    PrepareHandover,
    /// Pause every connection and offer the sockets to a successor. Answered by `HandoverOffered`, or by
    /// `Failed` with everything as before. Without another message within a second, the worker withdraws the
    /// offer and continues to serve.
    OfferHandover {
        /// The successor's generation.
        generation: u64,
        /// How long pausing may take, in milliseconds.
        limit_ms: u32,
    },
    /// Serve these kernel connections, which the predecessor has paused. Descriptors and fields as in its
    /// `HandoverOffered`. Answered by `Serving`, or by `Failed` with the connections untouched.
    TakeOver {
        /// The number of unread bytes of each connection.
        unread: Vec<u32>,
        /// The state of the volume.
        state: HandoverState,
    },
    /// Continue to serve: there is no successor. Answered by `Done`, or by the end of the channel if the
    /// successor has already taken the connections.
    CancelHandover,
    // --- forced unmap
    /// With `fail`: answer every request, running ones included, with an I/O error, and start nothing more at
    /// the backend; answered by `IoFails`. Without: serve again; answered by `Done`.
    FailIo {
        /// Whether requests fail.
        fail: bool,
    },
    // --- snapshots
    /// Whether the volume is quiesced for the snapshot that `SnapshotPending` has reported. Answered by
    /// `Done`, or by `Failed` with `NotFound` if that snapshot does not wait any more.
    Quiesced {
        /// The number of the snapshot.
        snapshot: u64,
        /// 0, or the errno with which the snapshot fails.
        errno: i32,
    },
}

/// The start message of a worker that serves a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// What the supervisor supports.
    #[serde(flatten)]
    pub versions: ProtocolVersions,
    /// The mapping that this worker serves.
    pub mapping_id: String,
    /// The mapping's name, for logs and the process title.
    pub name: String,
    /// The number of the worker among those of the mapping; it rises with every new worker.
    pub generation: u64,
    /// The URI of the volume.
    pub uri: String,
    /// The number of connections of the mapping's device. The worker can serve the old and the new connections
    /// of a device at the same time.
    #[serde(default = "most_connections")]
    pub connections: u32,
    /// Whether the volume is opened such that nothing is ever written.
    pub read_only: bool,
    /// The supervisor's choice of format and filter of the log, see `telemetry`.
    pub log: String,
    /// Whether another worker serves the volume. This one then opens the volume with the files of that one,
    /// and waits for `TakeOver`.
    pub successor: bool,
    /// The outage policy and the rate limits. A policy that only a newer build knows is read as the default.
    #[serde(deserialize_with = "Policy::understood")]
    pub policy: Policy,
    /// The node's name, for the volume's claim.
    pub node: String,
    /// An identifier of the machine, for the volume's claim: it distinguishes nodes of the same name.
    pub machine: String,
    /// The boot id of the node, for the volume's claim.
    pub boot_id: String,
    /// Whether the volume is taken from its present owner.
    pub take_over: bool,
    /// Whether the mapping has a device, see `backend::claimant`.
    pub resumes: bool,
    /// The identity of the volume that the mapping's earlier workers served, see `backend::VolumeIdentity`.
    /// `None` for the first worker. A worker that finds another volume answers `Failed` with `Replaced`.
    pub expected: Option<VolumeIdentity>,
    /// Whether to report snapshots that are about to be made, and to let them wait for `Quiesced`.
    pub quiesce: bool,
    /// Whether a sync failed in an earlier worker of the mapping, see `Image::sync_failed`.
    #[serde(default)]
    pub sync_failed: bool,
    /// The paths of the credential files whose descriptors the message carries. The worker reads each
    /// descriptor once, to its end.
    #[serde(default)]
    pub credentials: Vec<String>,
    /// The generation of the grant with which the volume is claimed; 0 without a grant.
    #[serde(default)]
    pub grant: u64,
    /// The length of the tail file in bytes, see `backend::OpenOptions`; 0 without one.
    #[serde(default)]
    pub tail_bytes: u64,
    /// The number of files of the cache, see `backend::CacheFiles`.
    #[serde(default)]
    pub cache_files: usize,
    /// The maximum length of each of them in bytes.
    #[serde(default = "earlier_cache_file_bytes")]
    pub cache_file_bytes: u64,
    /// Whether the worker only claims the volume and releases the claim when it is stopped, see
    /// `backend::OpenOptions`. A worker of an older build opens the volume for that.
    #[serde(default)]
    pub claim_only: bool,
}

/// Returns the length that files of a cache have for a supervisor that does not say it.
fn earlier_cache_file_bytes() -> u64 {
    32 << 20
}

/// Returns the number of connections for a supervisor that does not name one.
fn most_connections() -> u32 {
    MAX_CONNECTIONS
}

/// The start message of a worker without a volume.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refuse {
    /// What the supervisor supports.
    #[serde(flatten)]
    pub versions: ProtocolVersions,
    /// The mapping whose device the worker serves.
    pub mapping_id: String,
    /// The mapping's name, for logs and the process title.
    pub name: String,
    /// Where logs go, as in [`Start`].
    pub log: String,
}

/// An event of the worker: the answer to a command, or a report without a command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum FromWorker {
    /// The volume is open, and the worker is confined.
    Ready(Box<Ready>),
    /// The last command failed. If it was the first, the worker exits.
    Failed(Failure),
    /// The connections are being served.
    Serving,
    /// The volume's size.
    Size {
        /// The size in bytes.
        size: u64,
    },
    /// The last command was executed.
    Done,
    // --- planned handover
    /// A successor can open the volume. Descriptors: what it opens the volume with; there may be none.
    HandoverPrepared,
    /// Every connection is paused. Descriptors: if any bytes are unread, a memory file with exactly those
    /// bytes, in the order of the connections; then the sockets of the connections.
    HandoverOffered {
        /// The number of unread bytes of each connection.
        unread: Vec<u32>,
        /// The state of the volume.
        state: HandoverState,
    },
    // --- forced unmap
    /// Every connection has answered all its requests with an error.
    IoFails {
        /// How many requests have not ended at the backend.
        at_backend: u32,
    },
    // --- reports without a command
    /// A report: the kernel has disconnected the device, and the worker is about to exit.
    Disconnected,
    /// A report: the worker has ended its service and closed the volume, which has released the claim. The
    /// worker is about to exit. Without this report, the claim may stand.
    Closed,
    /// A report: another client owns the volume now.
    Fenced,
    /// A report: a sync has failed, see `Image::sync_failed`. A new supervisor gets it again.
    SyncFailed,
    /// A report: an outage of the backend has begun, has ended (`None`), or has another reason. A new
    /// supervisor gets it again while the outage lasts. The number of waiting requests is in the statistics
    /// page.
    Outage {
        /// The present outage.
        outage: Option<Outage>,
    },
    /// A report: a snapshot of the volume waits until the volume is quiesced, or is being made; `None`: it
    /// has ended. A new supervisor gets it again while the snapshot waits.
    SnapshotPending {
        /// The number of the snapshot.
        snapshot: Option<u64>,
    },
    /// A report: the volume has another size at the backend.
    SizeChanged {
        /// The size in bytes.
        size: u64,
    },
    /// An event that only a newer build knows. Never sent.
    #[serde(other)]
    Unknown,
}

/// An outage of the backend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outage {
    /// When it was noticed, in milliseconds since the Unix epoch.
    pub since_unix_ms: u64,
    /// The reason, if the backend knows it.
    pub reason: Option<String>,
}

/// The properties of a worker and of its volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// The newest version that the worker supports.
    pub version: u32,
    /// The oldest version that the worker supports.
    pub oldest: u32,
    /// The worker's build, for the reader.
    pub build: String,
    /// The identity of the worker's executable, see `version::binary_id`.
    pub binary: String,
    /// The mapping, as in the start message.
    pub mapping_id: String,
    /// The generation, as in `Start`; 0 for a worker without a volume.
    pub generation: u64,
    /// The worker's process id.
    pub pid: u32,
    /// The identity of the volume that is open. `None` from workers of builds that do not determine it.
    pub identity: Option<VolumeIdentity>,
    /// The volume's size in bytes.
    pub size: u64,
    /// See `core::volume::BlockSizes`.
    pub minimum_block: u32,
    /// See `core::volume::BlockSizes`.
    pub preferred_block: u32,
    /// The NBD transmission flags that follow from the volume's features.
    pub transmission_flags: u16,
    /// See `core::volume::Features`.
    pub outlives_worker: bool,
    /// The number of kernel connections that are being served.
    pub connections: u32,
    /// What the worker has opened. `None` for a worker without a volume, and from workers of builds that do not
    /// report it.
    #[serde(default)]
    pub opened: Option<Opened>,
}

/// What a worker has opened, as in its `Start`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opened {
    /// The URI of the volume.
    pub uri: String,
    /// Whether nothing is ever written.
    pub read_only: bool,
    /// Whether the worker reports snapshots that are about to be made.
    pub quiesce: bool,
}

/// An [`cleat_core::error::Error`] in a message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The kind of the error.
    pub kind: cleat_core::error::ErrorKind,
    /// The message and its sources.
    pub message: String,
    /// The repair hint, if there is one.
    pub repair: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_core::error::ErrorKind;

    #[test]
    fn unknown_events_and_fields_of_a_newer_worker_are_ignored() {
        let event = r#"{"event":"warmed_up","by":{"degrees":3},"of":[1]}"#;
        assert_eq!(serde_json::from_str::<FromWorker>(event).unwrap(), FromWorker::Unknown);
        let event = r#"{"event":"failed","kind":"rate_limited","message":"m","repair":null,"x":1}"#;
        let FromWorker::Failed(failure) = serde_json::from_str(event).unwrap() else {
            panic!("another event")
        };
        assert_eq!((failure.kind, failure.message.as_str()), (ErrorKind::Internal, "m"));
        assert!(serde_json::from_str::<FromWorker>(r#"{"size":3}"#).is_err());
    }
}
