//! What supervisor and worker say to each other, over a SOCK_SEQPACKET unix socket: one JSON message
//! a packet (at most [`MAX_PACKET`] bytes), descriptors beside it as SCM_RIGHTS.
//!
//! The worker owns its sockets, so that they outlive the supervisor. It inherits one end of the
//! channel as the descriptor [`CHANNEL_FD`]; a supervisor that comes later connects to the worker's
//! `control_socket`. The newest connection is the one in charge.
//!
//! Old and new builds speak to each other: fields are only added, with defaults, and unknown ones are
//! ignored; a command that a worker does not know it refuses by name; what a newer worker says by
//! itself an older supervisor passes over. So no command is ever answered by an event that is younger
//! than it.

use serde::{Deserialize, Serialize};

use cleat_backend::HandoverState;
use cleat_core::policy::Policy;

/// The newest version that this build speaks. Raised when a message changes its meaning. Both sides
/// say theirs in the first message; see `version`.
pub const PROTOCOL_VERSION: u32 = 1;

/// The oldest version that this build speaks.
pub const OLDEST_PROTOCOL: u32 = 1;

/// The descriptor under which a worker inherits its end of the channel.
pub const CHANNEL_FD: i32 = 3;

/// The longest message, in bytes.
pub const MAX_PACKET: usize = 64 * 1024;

pub use cleat_sys::seqpacket::MAX_DESCRIPTORS;

/// To the worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum ToWorker {
    /// The first message on an inherited channel. Descriptors: one listening SOCK_SEQPACKET socket
    /// (the control socket, for supervisors to come), one memory file for the statistics page.
    /// For a successor: then, what its predecessor's `HandoverPrepared` carried.
    /// Answered by `Ready` or `Failed`.
    Start(Box<Start>),
    /// The first message on an inherited channel to a worker without a volume, for a device that no worker
    /// will serve again. The worker answers every request with an I/O error and accepts `Serve`, `Ping` and
    /// `Stop`. It has no control socket, and it ends when the channel ends. Descriptor: one memory file for
    /// the statistics page. Answered by `Ready` or `Failed`.
    Refuse(Box<Refuse>),
    /// The first message on a connection to the control socket. Answered by `Ready`, with the
    /// statistics page as descriptor.
    Adopt {
        version: u32,
        #[serde(default)]
        oldest: u32,
        #[serde(default)]
        build: String,
        mapping_id: String,
    },
    /// Serve these kernel connections. Descriptors: one connected stream socket each.
    /// Answered by `Serving`.
    Serve,
    /// Close every connection after its running requests and exit. Answered by the end of the
    /// channel.
    Stop,
    /// Ask for the backend's size again. Answered by `Size`.
    RefreshSize,
    /// Change the size at the backend; make it smaller only with `shrink`. Answered by `Size`.
    Resize {
        size: u64,
        #[serde(default)]
        shrink: bool,
    },
    /// Follow another policy from now on, what waits already included. Answered by `Done`.
    SetPolicy(Policy),
    /// Replace the injected faults. Answered by `Done`.
    #[cfg(feature = "fault")]
    SetFault { plan: String },
    /// Answered by `Done`: the worker's control thread is alive.
    Ping,
    // --- planned hand-over, see `handover`
    /// Give what a successor opens the volume with, and serve on. Answered by `HandoverPrepared`.
    PrepareHandover,
    /// Bring every connection to rest within the limit and offer the sockets to the worker of
    /// `generation`. Answered by `HandoverOffered`, or `Failed` with everything as it was. Without another
    /// word for a second, the worker takes them back and serves on.
    OfferHandover { generation: u64, limit_ms: u32 },
    /// Serve these kernel connections, which the predecessor has brought to rest. Descriptors and
    /// fields as in its `HandoverOffered`. Answered by `Serving`, or `Failed` with nothing touched.
    TakeOver {
        unread: Vec<u32>,
        #[serde(default)]
        state: HandoverState,
    },
    /// There is no successor after all: serve on. Answered by `Done`; or by the end of the channel,
    /// when the successor was faster.
    CancelHandover,
    // --- forced unmap
    /// With `fail`: answer every request, running ones and those to come, with an I/O error, and
    /// start nothing more at the backend. Answered by `IoFails`. Without: serve again; `Done`.
    FailIo { fail: bool },
    // --- snapshots
    /// What `SnapshotPending` has reported: the volume is quiesced (0), or an errno why it is not, which makes the
    /// snapshot fail. Answered by `Done`; `Failed` with `NotFound` when that one waits no more.
    Quiesced { snapshot: u64, errno: i32 },
}

/// What a new worker needs to know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// The newest version that the supervisor speaks.
    pub version: u32,
    /// The oldest; 0: only the newest.
    #[serde(default)]
    pub oldest: u32,
    /// The supervisor's build.
    #[serde(default)]
    pub build: String,
    /// The mapping that this worker serves.
    pub mapping_id: String,
    /// The mapping's name, for logs and the process title.
    pub name: String,
    /// Raised with every new worker of the mapping.
    pub generation: u64,
    /// The volume.
    pub uri: String,
    /// Open it so that nothing is ever written.
    pub read_only: bool,
    /// Where logs go: the supervisor's choice, see `telemetry`.
    pub log: String,
    /// Another worker serves the volume; this one opens it with what that one bequeathed, and waits
    /// for `TakeOver`.
    #[serde(default)]
    pub successor: bool,
    /// What happens in an outage, and how fast the volume may go.
    #[serde(default, deserialize_with = "Policy::understood")]
    pub policy: Policy,
    /// The node's name, for the volume's claim.
    #[serde(default)]
    pub node: String,
    /// What tells the node from another one of the same name, likewise.
    #[serde(default)]
    pub machine: String,
    /// The node's boot, likewise.
    #[serde(default)]
    pub boot_id: String,
    /// Take the volume from whoever has it.
    #[serde(default)]
    pub take_over: bool,
    /// The mapping has a device: see `backend::claimant`.
    #[serde(default)]
    pub resumes: bool,
    /// Tell of snapshots that are about to be made of the volume, and keep them waiting for `Quiesced`.
    #[serde(default)]
    pub quiesce: bool,
}

/// What a worker without a volume needs to know.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refuse {
    /// The newest version that the supervisor speaks.
    pub version: u32,
    /// The oldest version that the supervisor speaks.
    pub oldest: u32,
    /// The supervisor's build.
    pub build: String,
    /// The mapping whose device the worker serves.
    pub mapping_id: String,
    /// The mapping's name, for logs and the process title.
    pub name: String,
    /// Where logs go, as in [`Start`].
    pub log: String,
}

/// From the worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum FromWorker {
    /// The volume is open, the worker confined.
    Ready(Ready),
    /// The last command failed; after `Start`, the worker exits.
    Failed(Failure),
    /// The connections are being served.
    Serving,
    /// The volume's size in bytes.
    Size { size: u64 },
    /// The last command was carried out.
    Done,
    // --- planned hand-over
    /// Descriptors: what a successor opens the volume with; perhaps none.
    HandoverPrepared,
    /// Every connection rests. Descriptors: where any bytes are unread, a memory file of exactly
    /// those bytes, one connection's after the other's; then the connections' sockets.
    HandoverOffered {
        /// How many bytes of each connection.
        unread: Vec<u32>,
        #[serde(default)]
        state: HandoverState,
    },
    // --- forced unmap
    /// Every connection has answered all that it had; so many requests have not ended at the backend.
    IoFails { at_backend: u32 },
    // --- by itself
    /// By itself: every kernel connection has ended in order (the device was disconnected), and the
    /// worker is about to exit.
    Disconnected,
    /// By itself: the volume was lost to somebody else.
    Fenced,
    /// By itself: the backend cannot be reached, or why not has changed; `None`: it can again. Told to
    /// every supervisor that adopts the worker meanwhile. How many requests wait is in the statistics.
    Outage {
        /// The one that lasts.
        outage: Option<Outage>,
    },
    /// By itself: a snapshot of the volume waits for it to be quiesced, or is being made; `None`: it is
    /// over. Told to every supervisor that adopts the worker while it waits.
    SnapshotPending {
        /// Its number.
        snapshot: Option<u64>,
    },
    // Resizer.
    /// By itself: the volume has another size at the backend, in bytes.
    SizeChanged { size: u64 },
    /// Of a newer build. Never sent.
    #[serde(other)]
    Unknown,
}

/// An outage of the backend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outage {
    /// When it was noticed, in milliseconds since the epoch.
    pub since_unix_ms: u64,
    /// What the backend knows of it.
    #[serde(default)]
    pub reason: Option<String>,
}

/// What the device needs to know of the volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// The newest version that the worker speaks.
    pub version: u32,
    /// The oldest; 0: only the newest.
    #[serde(default)]
    pub oldest: u32,
    /// The worker's build, for people.
    #[serde(default)]
    pub build: String,
    /// Of its executable, see `version::binary_id`.
    #[serde(default)]
    pub binary: String,
    /// As in `Start`.
    pub mapping_id: String,
    /// As in `Start`.
    pub generation: u64,
    /// Of the worker.
    pub pid: u32,
    /// In bytes.
    pub size: u64,
    /// See `backend::BlockSizes`.
    pub minimum_block: u32,
    /// See `backend::BlockSizes`.
    pub preferred_block: u32,
    /// NBD transmission flags that the volume's features lead to.
    pub transmission_flags: u16,
    /// See `backend::Features`.
    pub outlives_worker: bool,
    /// Kernel connections that are being served.
    pub connections: u32,
}

/// An [`cleat_core::error::Error`] on its way between processes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// See `error::ErrorKind`.
    pub kind: cleat_core::error::ErrorKind,
    /// The message and its sources.
    pub message: String,
    /// What the reader can do about it.
    pub repair: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_core::error::ErrorKind;

    #[test]
    fn what_a_newer_worker_says_is_no_nonsense() {
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
