//! The operations on mappings as one object, which the control API and tests call.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{broadcast, mpsc};
use tokio::time::Instant;
use tonic::Status;

use crate::context::Context;
use crate::kernel_calls::KernelLoad;
use crate::mapping::{Change, ForceReport, Mapping, Register, View};
use crate::record_directory::Problem;
use crate::{devices, holders, operations, target, unlock};
use cleat_api::v1 as api;
use cleat_backend::Registry;
use cleat_core::error::{Error, Result};
use cleat_core::policy;
use cleat_kernel::{Device, DeviceIndex, Holder, Identity, Kernel, UnmountScope};

pub use crate::context::Halt;
pub use crate::operations::map::MapSpec;
pub use crate::operations::resize::NewSize;

/// A call in progress. It is boxed, because the compiler generates the code of an `async fn` again in each crate that
/// awaits it.
pub type Pending<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Runs the operations on mappings. Every call is bounded by its deadline.
pub struct Executor {
    context: Arc<Context>,
}

impl Executor {
    /// Creates the executor of a supervisor.
    pub(crate) fn new(context: Arc<Context>) -> Self {
        Self { context }
    }

    /// Returns the state that operations share.
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Returns the name of this node.
    pub fn node_name(&self) -> &str {
        &self.context.settings.node
    }

    /// Returns the backends of this daemon.
    pub fn registry(&self) -> Registry {
        self.context.registry
    }

    /// Returns how much longer than other volumes `uri` may take to open.
    pub(crate) fn extra_open_time(&self, uri: &str) -> Duration {
        unlock::extra_open_time(self.context.registry, uri)
    }

    /// Maps a volume, or returns the existing mapping. Adopts a device of the volume that has the name of `spec`
    /// and no record.
    ///
    /// # Errors
    /// Returns the first error of any step. The steps before it are undone; if that fails, the error
    /// states what is left.
    pub fn map<'a>(&'a self, spec: &'a MapSpec, deadline: Instant) -> Pending<'a, Result<View>> {
        Box::pin(operations::adopt::adopt_or_map(&self.context, spec, deadline))
    }

    /// Unmaps a volume and returns whether it was mapped.
    ///
    /// # Errors
    /// Returns `InUse`, with the holders, if the device has any, and the cause if the device's data cannot be
    /// flushed; the mapping then does not change. After any other error, the supervisor continues the unmap.
    pub fn unmap<'a>(&'a self, target: &'a str, deadline: Instant) -> Pending<'a, Result<bool>> {
        Box::pin(operations::unmap::unmap(&self.context, target, deadline))
    }

    /// Unmaps a mapping, or a device without a record, by force. Returns `None` if `target` does not
    /// exist.
    ///
    /// # Errors
    /// Returns `TimedOut` if `deadline` passes before the end. The message lists the steps that were
    /// done, and the supervisor continues in the background.
    pub fn force_unmap<'a>(
        &'a self,
        target: &'a str,
        unmount: UnmountScope,
        deadline: Instant,
    ) -> Pending<'a, Result<Option<ForceReport>>> {
        Box::pin(operations::force_unmap::force_unmap(&self.context, target, unmount, deadline))
    }

    /// Changes the size of a volume and of its device.
    ///
    /// # Errors
    /// Returns `InvalidArgument` if the size would shrink the device and the caller does not allow it;
    /// `InUse` if a device to be shrunk has holders; `Unavailable` if the backend does not answer.
    pub fn resize<'a>(
        &'a self,
        target: &'a str,
        wanted: NewSize,
        deadline: Instant,
    ) -> Pending<'a, Result<View>> {
        Box::pin(operations::resize::resize(&self.context, target, wanted, deadline))
    }

    /// Changes the outage policy and the rate limits of a mapping. The change is recorded even if no
    /// worker runs, and the next worker applies it.
    ///
    /// # Errors
    /// Returns `InvalidArgument` if `change` is empty, and the errors of the journal and of the worker.
    pub fn set_policy<'a>(
        &'a self,
        target: &'a str,
        change: policy::Change,
        deadline: Instant,
    ) -> Pending<'a, Result<View>> {
        Box::pin(operations::set_options::set_policy(&self.context, target, change, deadline))
    }

    /// Passes the present content of the volume's credential files to the worker.
    ///
    /// # Errors
    /// Returns `Unsupported` if the volume names no credential files, or if only a new worker can use them,
    /// and the errors of opening the files.
    pub fn renew_credentials<'a>(
        &'a self,
        target: &'a str,
        deadline: Instant,
    ) -> Pending<'a, Result<View>> {
        Box::pin(operations::set_options::renew_credentials(&self.context, target, deadline))
    }

    /// Replaces the faults that a `fault:` volume injects.
    ///
    /// # Errors
    /// Returns `Unsupported` if the volume is not a `fault:` volume.
    #[cfg(feature = "fault")]
    pub fn set_fault<'a>(
        &'a self,
        target: &'a str,
        plan: &'a str,
        deadline: Instant,
    ) -> Pending<'a, Result<()>> {
        Box::pin(operations::set_options::set_fault(&self.context, target, plan, deadline))
    }

    /// Upgrades the daemon and its workers, and reports the result for each. If the receiver is dropped,
    /// the upgrade stops after the current mapping. `timeout` applies to the upgrade of each worker.
    ///
    /// # Errors
    /// Returns `NotFound` if a target is not mapped; nothing has been changed then.
    pub fn upgrade<'a>(
        &'a self,
        request: api::UpgradeRequest,
        timeout: Duration,
    ) -> Pending<'a, Result<mpsc::Receiver<Result<api::UpgradeEvent, Status>>>> {
        Box::pin(operations::upgrade::upgrade(&self.context, request, timeout))
    }

    /// Returns the mapping with the name, the URI or the device path `target`.
    ///
    /// # Errors
    /// Returns `NotFound` if there is none, and also for a device without a record, which can only be
    /// unmapped.
    pub fn get<'a>(
        &'a self,
        target: &'a str,
        deadline: Instant,
    ) -> Pending<'a, Result<Arc<Mapping>>> {
        Box::pin(target::get(&self.context, target, deadline))
    }

    /// Returns the holders of a device.
    ///
    /// # Errors
    /// Returns an error if the kernel's state cannot be read until `deadline`.
    pub fn holders<'a>(
        &'a self,
        index: DeviceIndex,
        deadline: Instant,
    ) -> Pending<'a, Result<Vec<Holder>>> {
        Box::pin(holders::holders_of(&self.context, index, deadline))
    }

    /// Reads the first block of a device from its worker, past the page cache.
    ///
    /// # Errors
    /// Returns an error if the device cannot be read until `deadline`.
    pub fn probe<'a>(&'a self, index: DeviceIndex, deadline: Instant) -> Pending<'a, Result<()>> {
        Box::pin(async move {
            let probe = move |kernel: &dyn Kernel, until| kernel.probe(index, until);
            self.context.kernel.wait("read the device", deadline, None, probe).await
        })
    }

    /// Sets what is wrong with a service beside the control API, for `cleat status`; `None` if nothing is.
    pub fn report_service(&self, service: &'static str, problem: Option<Error>) {
        self.context.report_service(service, problem);
    }

    /// Returns what is wrong with services beside the control API.
    pub(crate) fn service_problems(&self) -> Vec<(&'static str, Problem)> {
        self.context.service_problems()
    }

    /// Returns the devices that have an identity of cleat but no record.
    ///
    /// # Errors
    /// Returns an error if the kernel's devices cannot be listed until `deadline`.
    pub fn orphans<'a>(
        &'a self,
        deadline: Instant,
    ) -> Pending<'a, Result<Vec<(Device, Identity)>>> {
        Box::pin(devices::orphans(&self.context, deadline))
    }

    /// Returns whether this supervisor disconnected a device by force. Such a device disappears when its
    /// holders close it.
    pub(crate) fn is_force_disconnected(&self, index: DeviceIndex, identity: &Identity) -> bool {
        self.context.force_disconnected.contains(index, identity)
    }

    /// Returns the register of all mappings.
    pub fn register(&self) -> &Register {
        &self.context.register
    }

    /// Returns whether a mapping with this name may exist whose record this daemon cannot use.
    pub fn may_have_unusable(&self, name: &str) -> bool {
        self.context.unmanaged.may_have(name)
    }

    /// Returns the problems that were found when the daemon started.
    pub fn findings(&self) -> Vec<String> {
        self.context.findings()
    }

    /// Returns why the state directory does not take records; `None` if it does.
    pub(crate) fn state_directory_problem(&self) -> Option<Problem> {
        self.context.records.state_directory.problem()
    }

    /// Returns the number of kernel calls in progress.
    pub(crate) fn kernel_load(&self) -> KernelLoad {
        self.context.kernel.load()
    }

    /// Returns a receiver of every later change of a mapping.
    pub fn watch(&self) -> broadcast::Receiver<Change> {
        self.context.changes.subscribe()
    }
}
