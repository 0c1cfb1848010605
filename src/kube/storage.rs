//! What the controller needs of the storage of a volume: the record that says who can write, and the means to
//! cut a client off. The composition implements it for each backend.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Instant;

use cleat_core::error::Result;
use cleat_grants::record::{Record, Target};

/// The storages of the driver's volumes.
pub trait Storage: Debug + Send + Sync {
    /// Returns how the volume `handle`, a CSI volume handle, is attached. It does no I/O.
    ///
    /// # Errors
    /// Returns an error that names the volume if the controller cannot attach it, for example because its storage
    /// cannot cut off a client: the volume is then refused, not granted.
    fn find(&self, handle: &str) -> Result<Backing>;
}

/// How a volume is attached.
#[derive(Debug, Clone)]
pub enum Backing {
    /// The volume exists on one node only, so that no other node can use it: it is attached there without a grant.
    Local {
        /// The node id, as in CSINode.
        node_id: String,
    },
    /// Several nodes reach the volume: a grant decides which may use it.
    Granted(Arc<dyn Fencing>),
}

/// The record of one volume at its storage. The calls block, at most until `deadline`.
pub trait Fencing: Debug + Send + Sync {
    /// Reads the record. A volume that was never claimed has the default record.
    ///
    /// # Errors
    /// Returns an error if the storage does not answer or the volume does not exist.
    fn record(&self, deadline: Instant) -> Result<Record>;

    /// Carries out [`Record::plan_fence`]: cuts off the recorded client and seals the generation. Does nothing if
    /// the plan says so. The caller reads the record afterwards, which is the proof.
    ///
    /// # Errors
    /// Returns an error if the storage does not answer, or if the record has changed meanwhile.
    fn fence(&self, target: &Target, deadline: Instant) -> Result<()>;

    /// Lets the client connect again, and carries out [`Record::unfence`].
    ///
    /// # Errors
    /// Returns an error if the storage does not answer, or if the record has changed meanwhile.
    fn unfence(&self, client: &str, deadline: Instant) -> Result<()>;
}
