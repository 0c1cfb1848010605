//! The operations on mappings as one object: what the control API and tests call.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{broadcast, mpsc};
use tokio::time::Instant;
use tonic::Status;

use crate::context::Context;
use crate::kernel_calls::Load;
use crate::mapping::{Change, Forced, Mapping, Register, View};
use crate::{devices, find, holders, operations, unlock};
use cleat_api::v1 as api;
use cleat_core::error::Result;
use cleat_core::policy;
use cleat_kernel::{Device, DeviceIndex, Holder, Identity, UnmountScope};

pub use crate::context::Halt;
pub use crate::operations::map::MapSpec;
pub use crate::operations::resize::NewSize;

/// Runs the operations that users ask for. Every call is bounded by its deadline.
pub struct Executor {
    context: Arc<Context>,
}

impl Executor {
    /// Makes the executor of a supervisor.
    pub(crate) fn new(context: Arc<Context>) -> Self {
        Self { context }
    }

    /// The parts that operations share.
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Returns how much longer than other volumes `uri` may take to open.
    pub(crate) fn extra_open_time(&self, uri: &str) -> Duration {
        unlock::extra_open_time(self.context.registry, uri)
    }

    /// Maps a volume, or returns the mapping that exists already.
    ///
    /// # Errors
    /// Of any kind. Then nothing is left behind, or the error says what is.
    pub async fn map(&self, spec: &MapSpec, deadline: Instant) -> Result<View> {
        operations::map::map(&self.context, spec, deadline).await
    }

    /// Takes a mapping down and returns whether it existed.
    ///
    /// # Errors
    /// `InUse`, with the holders; then the mapping stays as it is.
    pub async fn unmap(&self, target: &str, deadline: Instant) -> Result<bool> {
        operations::unmap::unmap(&self.context, target, deadline).await
    }

    /// Takes a mapping, or a device without a record, down by force. Returns `None` if `target` does
    /// not exist.
    ///
    /// # Errors
    /// `TimedOut` when `deadline` passes before all is done. The message says what was done, and the
    /// supervisor continues in the background.
    pub async fn force_unmap(
        &self,
        target: &str,
        unmount: UnmountScope,
        deadline: Instant,
    ) -> Result<Option<Forced>> {
        operations::force_unmap::force_unmap(&self.context, target, unmount, deadline).await
    }

    /// Changes the size of a volume and of its device.
    ///
    /// # Errors
    /// `InvalidArgument` for a size that would shrink the device without being asked to; `InUse` for
    /// shrinking a device that has holders; `Unavailable` while the backend does not answer.
    pub async fn resize(&self, target: &str, wanted: NewSize, deadline: Instant) -> Result<View> {
        operations::resize::resize(&self.context, target, wanted, deadline).await
    }

    /// Changes the outage policy and the limits of a mapping. The change is recorded even if no
    /// worker runs; the next worker gets it.
    ///
    /// # Errors
    /// `InvalidArgument` when nothing is to be changed; errors of the journal and of the worker.
    pub async fn set_policy(
        &self,
        target: &str,
        change: policy::Change,
        deadline: Instant,
    ) -> Result<View> {
        operations::set_options::set_policy(&self.context, target, change, deadline).await
    }

    /// Replaces the faults that a `fault:` volume injects.
    ///
    /// # Errors
    /// `Unsupported` for any other volume.
    #[cfg(feature = "fault")]
    pub async fn set_fault(&self, target: &str, plan: &str, deadline: Instant) -> Result<()> {
        operations::set_options::set_fault(&self.context, target, plan, deadline).await
    }

    /// Upgrades the daemon and its workers, and reports each part as it is done. It ends after the
    /// mapping at hand when the receiver is dropped. `limit` bounds the upgrade of each worker.
    ///
    /// # Errors
    /// `NotFound` for a target that is not mapped; then nothing has been done.
    pub async fn upgrade(
        &self,
        request: api::UpgradeRequest,
        limit: Duration,
    ) -> Result<mpsc::Receiver<Result<api::UpgradeEvent, Status>>> {
        operations::upgrade::upgrade(&self.context, request, limit).await
    }

    /// Finds the mapping that a name, a URI or a device path means.
    ///
    /// # Errors
    /// `NotFound`, also for a device without a record, which can only be unmapped.
    pub async fn get(&self, target: &str, deadline: Instant) -> Result<Arc<Mapping>> {
        find::get(&self.context, target, deadline).await
    }

    /// Returns the holders of a device.
    ///
    /// # Errors
    /// When the kernel cannot be asked.
    pub async fn holders(&self, index: DeviceIndex, deadline: Instant) -> Result<Vec<Holder>> {
        holders::holders_of(&self.context, index, deadline).await
    }

    /// Returns the devices that carry an identity of cleat and have no record.
    ///
    /// # Errors
    /// When the kernel cannot be asked.
    pub async fn orphans(&self, deadline: Instant) -> Result<Vec<(Device, Identity)>> {
        devices::orphans(&self.context, deadline).await
    }

    /// Returns whether this supervisor disconnected a device by force, so that it only waits for its
    /// holders.
    pub(crate) fn is_severed(&self, index: DeviceIndex, identity: &Identity) -> bool {
        self.context.force_disconnected.contains(index, identity)
    }

    /// Every mapping.
    pub fn register(&self) -> &Register {
        &self.context.register
    }

    /// What an operator should know of how the daemon began.
    pub fn findings(&self) -> Vec<String> {
        self.context.findings()
    }

    /// The calls to the kernel that are under way.
    pub(crate) fn kernel_load(&self) -> Load {
        self.context.kernel.load()
    }

    /// Receives every change of a mapping from now on.
    pub fn watch(&self) -> broadcast::Receiver<Change> {
        self.context.changes.subscribe()
    }
}
