//! What the controller needs of the storage of a volume: the record that says who can write, and the means to
//! cut a client off. The composition implements it for each backend.

use std::fmt::Debug;
use std::sync::Arc;

use cleat_core::error::Result;

pub use cleat_grants::storage::Fencing;

/// The storages of the driver's volumes.
pub trait Storage: Debug + Send + Sync {
    /// Returns how the volume `handle`, a CSI volume handle, is attached. It does not access the volume.
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
