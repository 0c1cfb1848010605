//! What the agent needs of its node.

use std::fmt::Debug;
use std::future::Future;
use std::pin::Pin;

use cleat_core::error::{Error, Result};
use cleat_grants::agent::MappingState;
use cleat_grants::object::{Generation, Mode};
use cleat_grants::record::Record;

/// The answer of a node to a call.
pub type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + Send + 'a>>;

/// What a node has of one volume at this moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Observed {
    /// Whether the mapping is to stay: no request to unmap it has come.
    pub wanted: bool,
    /// The mapping; `None` if no mount, no opener, no device and no worker is left.
    pub mapping: Option<ObservedMapping>,
    /// There may be a mapping that the supervisor cannot manage, because it cannot read its record.
    pub is_unknown: bool,
}

/// A mapping of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedMapping {
    /// The generation with which its workers claim.
    pub generation: Generation,
    /// How they use the volume.
    pub mode: Mode,
    /// The path of the device; empty before it is connected.
    pub device_path: String,
    /// The state. `Usable` says that the device and its link exist; the agent checks the claim and reads.
    pub state: MappingState,
    /// A number that changes with each worker, because each is another client of the storage.
    pub worker: u64,
}

/// The volumes of a node. A volume is named by its CSI volume handle. Every call that waits has a deadline of its own.
pub trait NodeVolumes: Debug + Send + Sync {
    /// Returns what the node has of a volume. Does not wait.
    fn observe(&self, handle: &str) -> Observed;

    /// Returns the volumes that [`NodeVolumes::remember`] has stored, also before a reboot.
    fn remembered(&self) -> Answer<'_, Vec<String>>;

    /// Stores durably that the node may claim a volume, before it does.
    fn remember<'a>(&'a self, handle: &'a str) -> Answer<'a, ()>;

    /// Removes what [`NodeVolumes::remember`] has stored. Success if there is nothing.
    fn forget<'a>(&'a self, handle: &'a str) -> Answer<'a, ()>;

    /// Reads from the device of a volume.
    fn probe<'a>(&'a self, handle: &'a str) -> Answer<'a, ()>;

    /// Reads the record of a volume at its storage.
    fn record<'a>(&'a self, handle: &'a str) -> Answer<'a, Record>;

    /// Releases the claim of an ended client of this node, after it was cut off
    /// (`cleat_grants::storage::Fencing::release`).
    fn release<'a>(&'a self, handle: &'a str, client: &'a str) -> Answer<'a, ()>;

    /// Unmaps a volume if nothing but mounts of the node itself uses it.
    ///
    /// # Errors
    /// Returns `InUse` with the users if there are others, and `Aborted` while a call for the volume is in progress.
    fn finish<'a>(&'a self, handle: &'a str) -> Answer<'a, ()>;

    /// Unmaps a volume whatever uses it, and proves that its worker has ended.
    fn force<'a>(&'a self, handle: &'a str) -> Answer<'a, ()>;

    /// Shows what is wrong with the agent; `None` if nothing is.
    fn report(&self, problem: Option<Error>);
}
