//! The interface between the calls of external-attacher (`calls`) and the composition, which serves them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use cleat_core::error::Result;
use cleat_grants::object::Mode;
use tokio::time::Instant;

/// The answer to a call.
pub type CallAnswer<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + Send + 'a>>;

/// Serves the calls.
pub trait CallServer: Debug + Send + Sync {
    /// Serves until the future is dropped, which happens when this process is not the leader any more.
    fn serve(&self, calls: Arc<dyn Calls>) -> Pin<Box<dyn Future<Output = ()> + Send>>;
}

/// The calls, which the leader answers.
pub trait Calls: Debug + Send + Sync {
    /// Waits until the node may use the volume, and returns the publish context. A volume that the node may use
    /// already is success.
    ///
    /// # Errors
    /// Returns `NotFound` for a node or a volume that does not exist, `InUse` if another node holds the volume,
    /// `Fenced` if the node was fenced and has not cleaned up, `AlreadyExists` if the node has requested the volume in
    /// another mode, `Aborted` if the decision is not made until `deadline`, `Unavailable` if this process is not the
    /// leader any more, and the error of the storage.
    fn publish<'a>(
        &'a self,
        call: &'a Publish,
        deadline: Instant,
    ) -> CallAnswer<'a, BTreeMap<String, String>>;

    /// Waits until the node, or each node without `node_id`, cannot use the volume any more: it has released it or
    /// was fenced. A node that has no grant is success, also if another node has one.
    ///
    /// # Errors
    /// Returns `Aborted` if the node has the volume at `deadline`, `Unavailable` if this process is not the leader any
    /// more, and the error of the storage.
    fn unpublish<'a>(
        &'a self,
        volume: &'a str,
        node_id: Option<&'a str>,
        deadline: Instant,
    ) -> CallAnswer<'a, ()>;

    /// Returns the volumes that nodes may use, with the CSI ids of these nodes. Does not block.
    ///
    /// # Errors
    /// Returns `Unavailable` if this process is not the leader any more.
    fn published(&self) -> Result<BTreeMap<String, BTreeSet<String>>>;
}

/// The arguments of ControllerPublish.
#[derive(Debug, Clone)]
pub struct Publish {
    /// The CSI volume handle.
    pub volume: String,
    /// The CSI node id.
    pub node_id: String,
    /// How the node is to use the volume.
    pub mode: Mode,
}
