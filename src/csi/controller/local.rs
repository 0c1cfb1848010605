//! The volumes that this process has mapped on its own node.

use cleat_core::error::Result;
use cleat_core::policy;
use cleat_csi_api::csi::v1::volume_health::VolumeHealthEntry;
use tokio::time::Instant;

use crate::driver::Driver;
use crate::health;
use crate::volume_id::mapping_name;

/// Access to the mappings of this process.
#[tonic::async_trait]
pub(crate) trait Local: Send + Sync {
    /// Returns what is wrong with a volume on this node; `None` if it is not mapped here. Never blocks.
    fn health(&self, id: &str) -> Option<Vec<VolumeHealthEntry>>;

    /// Returns the number of volumes that this node can have at the same time. Never blocks.
    fn attach_limit(&self) -> usize;

    /// Changes the outage policy and the rate limits of a volume. Returns whether it is mapped here.
    async fn set_policy(&self, id: &str, change: policy::Change, deadline: Instant)
    -> Result<bool>;
}

#[tonic::async_trait]
impl Local for Driver {
    fn health(&self, id: &str) -> Option<Vec<VolumeHealthEntry>> {
        let mapping = self.executor.register().get(&mapping_name(id))?;
        Some(health::of_mapping(&mapping))
    }

    fn attach_limit(&self) -> usize {
        Self::attach_limit(self)
    }

    async fn set_policy(
        &self,
        id: &str,
        change: policy::Change,
        deadline: Instant,
    ) -> Result<bool> {
        if self.mapped(id, deadline).await?.is_none() {
            return Ok(false);
        }
        self.executor.set_policy(&mapping_name(id), change, deadline).await.map(|_| true)
    }
}
