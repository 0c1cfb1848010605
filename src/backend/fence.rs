//! Fencing: which clients may write to a volume according to its storage, and how to cut one off. The
//! command line and controllers use it without the daemon.
//!
//! Fencing never opens the volume as [`VolumeSpec::open`](crate::VolumeSpec::open) does. It needs no
//! content key and reads and writes no data of the volume, only the records of claims and locks; it
//! works while the holder of the volume hangs. Each call has a deadline, so that it fits into the deadline of
//! a forced unmap. What a call has sent to the storage at its deadline can still take effect later, so
//! the caller repeats the call; that is safe.

use std::time::Instant;

use serde::Serialize;

use super::claimant::Claimant;
use cleat_core::error::Result;

/// Access to the clients of a volume whose storage keeps concurrent writers apart.
///
/// Deadlines are monotonic time. Every method returns `TimedOut` if the storage has not answered by its
/// deadline, and the backend's error if the storage refuses the call.
pub trait Fence {
    /// Returns every client that uses the volume, or that had claimed it and is cut off.
    ///
    /// # Errors
    /// See [`Fence`].
    fn clients(&self, deadline: Instant) -> Result<Vec<Client>>;

    /// Returns the clients to fence: the one with `address`, or every client that may write. Changes
    /// nothing. The caller shows the consequences to the user before it continues with [`Fence::fence`].
    ///
    /// # Errors
    /// Returns `NotFound` if there is no such client; see [`Fence`].
    fn targets(&self, address: Option<&str>, deadline: Instant) -> Result<Vec<Target>>;

    /// Cuts `targets` off from the storage. When this returns, none of them can change the volume any more,
    /// their mappings cannot resume, and the volume is not claimed. Only these clients are cut off, never
    /// one that has claimed the volume since. `claimant` takes the volume over for a moment and releases it.
    ///
    /// # Errors
    /// Returns `InUse` if a client that is not in `targets` may write; see [`Fence`].
    fn fence(&self, targets: &[Target], claimant: &Claimant, deadline: Instant) -> Result<()>;

    /// Ends the fencing of the client `address`, if it is proved that the client has ended. The proof may
    /// depend on the node and the process in `here`. Returns whether the client was cut off.
    ///
    /// # Errors
    /// Returns `InUse` with the missing proof; see [`Fence`].
    fn unfence(&self, address: &str, here: &Claimant, deadline: Instant) -> Result<bool>;
}

/// A client to fence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// The client as it was found.
    pub client: Client,
    /// A sentence that says what the user loses when the client is cut off.
    pub consequence: String,
}

/// A client of the storage, and its relation to a volume.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Client {
    /// The address under which the storage knows the client.
    pub address: String,
    /// The node of the client; `None` if no claim of the client is recorded.
    pub node: Option<String>,
    /// The boot id of that node.
    pub boot_id: Option<String>,
    /// The mapping that the client served.
    pub mapping_id: Option<String>,
    /// The generation of its claim; the highest is the newest.
    pub generation: Option<u64>,
    /// The time of the claim, in seconds since the epoch.
    pub since_s: Option<u64>,
    /// The state of the claim.
    pub claim: Option<Standing>,
    /// Whether the client holds the volume's lock.
    pub holds_lock: bool,
    /// Whether the client has the volume open.
    pub watches: bool,
    /// The time until which the client is cut off, in the format of the storage.
    pub cut_off_until: Option<String>,
}

/// The state of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// The claim is in force.
    Held,
    /// The client has released it.
    Released,
    /// Another client has taken the volume over.
    Taken,
}
