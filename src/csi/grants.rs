//! The grants of a cluster: whether this node may map a volume that several nodes reach. The agent of the node
//! (`cleat_kube::agent`) implements them, and the composition joins the two.

use std::fmt::Debug;

use cleat_core::error::Result;
use tokio::time::Instant;

use crate::attach::Usage;

/// Says which volumes this node may map.
#[tonic::async_trait]
pub trait Grants: Debug + Send + Sync {
    /// Waits until this node may map the volume `id`.
    ///
    /// # Errors
    /// Returns an error that names the volume, why it may not be mapped, and what to do.
    async fn admit(&self, id: &str, deadline: Instant) -> Result<Permission>;

    /// Waits until the storage has no claim of this node on the volume `id`, which is not mapped, at most until
    /// `deadline`. Returns whether that is so.
    async fn released(&self, id: &str, deadline: Instant) -> bool;
}

/// The permission to map a volume.
#[derive(Debug, Default)]
pub struct Permission {
    /// The generation with which the volume is claimed; 0 for a volume that needs no grant.
    pub generation: u64,
    /// How the volume may be used; `None` for a volume that needs no grant.
    pub usage: Option<Usage>,
    /// Dropped when the volume is mapped, or the attempt has failed.
    pub kept: Option<Box<dyn Kept>>,
}

/// What a permission keeps until it is dropped.
pub trait Kept: Debug + Send + Sync {}
