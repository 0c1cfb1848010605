//! The driver: what all calls share.

use std::path::PathBuf;
use std::sync::Arc;

use cleat_backend::Registry;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::policy::Change;
use cleat_kernel::{Holder, UnmountScope};
use cleat_node::csi_config::CsiConfig;
use cleat_node::executor::{Executor, MapSpec};
use cleat_node::mapping::{Mapping, View};
use cleat_node::planner::State;
use cleat_sys::descriptor::DeviceNumber;
use tokio::time::Instant;

use crate::attributes::Attributes;
use crate::busy::Busy;
use crate::controller::Controller;
use crate::grants::Grants;
use crate::health::{HUNG_AFTER, oldest_request};
use crate::host::{Host, ThisHost, Unlocked};
use crate::source::{leads_to_same, uri_of};
use crate::volume_id::{PREFIX, mapping_name};

/// The CSI driver of one node. Clones share everything.
#[derive(Clone)]
pub struct Driver {
    pub(crate) config: Arc<CsiConfig>,
    pub(crate) node: String,
    pub(crate) executor: Arc<Executor>,
    pub(crate) host: Arc<dyn Host>,
    pub(crate) busy: Busy,
    /// The grants, if volumes need them.
    pub(crate) grants: Option<Arc<dyn Grants>>,
    /// The Controller service, if this process has it.
    pub(crate) controller: Option<Controller>,
    /// The maximum number of mappings of the daemon.
    limit: usize,
}

impl Driver {
    /// Creates the driver of the node `node`, whose daemon has `executor` and maps at most `limit` volumes.
    pub fn new(config: CsiConfig, node: String, executor: Arc<Executor>, limit: usize) -> Self {
        let (config, host) = (Arc::new(config), Arc::new(ThisHost));
        let (busy, grants, controller) = (Busy::default(), None, None);
        Self { config, node, executor, host, busy, grants, controller, limit }
    }

    /// Uses `host` for all operations on filesystems and mounts. For tests.
    #[must_use]
    pub fn with_host(self, host: Arc<dyn Host>) -> Self {
        Self { host, ..self }
    }

    /// Requires grants for volumes that several nodes reach.
    #[must_use]
    pub fn with_grants(self, grants: Arc<dyn Grants>) -> Self {
        Self { grants: Some(grants), ..self }
    }

    /// Adds the Controller service, for the volumes of the backends in `registry`.
    #[must_use]
    pub fn with_controller(self, registry: Registry) -> Self {
        let (config, node) = (Arc::clone(&self.config), self.node.clone());
        let controller = Controller::new(config, node, registry, Arc::new(self.clone()));
        Self { controller: Some(controller), ..self }
    }

    /// Returns the number of volumes that this node can have at the same time: devices that others have
    /// mapped are not available.
    pub(crate) fn attach_limit(&self) -> usize {
        let mappings = self.executor.register().all();
        let foreign = mappings.iter().filter(|mapping| !mapping.name.starts_with(PREFIX)).count();
        self.limit.saturating_sub(foreign)
    }

    /// Returns this driver's mappings.
    pub(crate) fn csi_mappings(&self) -> Vec<Arc<Mapping>> {
        let mappings = self.executor.register().all().into_iter();
        mappings.filter(|mapping| mapping.name.starts_with(PREFIX)).collect()
    }

    /// Maps the volume `id`. An existing mapping keeps the generation of its grant, its outage policy and its
    /// limits, which may have been changed since (ControllerModifyVolume, `cleat set`), and its URI if only the
    /// file of clusters has been changed.
    pub(crate) async fn map(
        &self,
        id: &str,
        attributes: &Attributes,
        spec: &MapSpec,
        deadline: Instant,
    ) -> Result<View> {
        let existing = self.executor.register().get(&spec.name);
        let Some(record) = existing.map(|mapping| mapping.view().record) else {
            return self.executor.map(spec, deadline).await;
        };
        let uri = if leads_to_same(id, attributes, &record.uri, &spec.uri) {
            record.uri
        } else {
            spec.uri.clone()
        };
        let spec = MapSpec { uri, policy: Change::default(), grant: record.grant, ..spec.clone() };
        self.executor.map(&spec, deadline).await
    }

    /// Returns the URI of a volume whose id the driver has made, also if it is not mapped, with a Ceph client that the
    /// node has. Blocks as reading the file of clusters does.
    ///
    /// # Errors
    /// Returns `NotFound` for an id or a cluster that this node does not know.
    pub fn storage_uri(&self, id: &str) -> Result<String> {
        uri_of(&self.config, &self.node, id)
    }

    /// Unmaps a volume that is used by nothing but mounts of its filesystem in this mount namespace.
    ///
    /// # Errors
    /// Returns `InUse` with the other users, and `Aborted` while a call for the volume is in progress.
    pub async fn unmap_if_unused(&self, id: &str, deadline: Instant) -> Result<()> {
        let _busy = self.busy.claim(id, "the end of a revoked volume")?;
        let Some(view) = self.mapped(id, deadline).await? else { return Ok(()) };
        let mut mounts = Vec::new();
        if let Some(device) = view.device {
            for holder in self.executor.holders(device.index, deadline).await? {
                match holder {
                    Holder::Mount { path, namespace_pid: None, .. } => mounts.push(path),
                    // The device with the decrypted content, which the unmap removes.
                    Holder::Device { mapper: Some(mapper), .. }
                        if mapper.name == view.record.name => {}
                    holder => {
                        let message = format!("volume {id} is in use: {holder:?}");
                        return Err(Error::new(ErrorKind::InUse, message)
                            .with_repair("end the pods of the volume on this node"));
                    }
                }
            }
        }
        for path in mounts {
            self.host.unmount(&path, deadline).await?;
        }
        self.unmap(id, deadline).await
    }

    /// Returns whether a volume is mapped, or a call that maps it has not ended.
    pub(crate) fn is_mapped(&self, id: &str) -> bool {
        self.executor.register().get(&mapping_name(id)).is_some()
    }

    /// Returns the mapping of a volume; `None` if it is not mapped.
    pub(crate) async fn mapped(&self, id: &str, deadline: Instant) -> Result<Option<View>> {
        match self.executor.get(&mapping_name(id), deadline).await {
            Ok(mapping) => Ok(Some(mapping.view())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns the device of a mapped volume that its users see.
    pub(crate) async fn device(&self, view: &View, deadline: Instant) -> Result<Device> {
        let mapped = Device::of(&*self.host, view)?;
        let unlocked = self.host.unlocked(&view.record.name, deadline).await?;
        let unlocked = unlocked.filter(|unlocked| unlocked.below == [mapped.number]);
        Ok(unlocked.map_or(mapped, Device::from))
    }

    /// Returns whether no request of a volume can succeed any more: another client owns it, or its mapping
    /// has failed.
    pub(crate) async fn is_lost(&self, id: &str, deadline: Instant) -> Result<bool> {
        let view = self.mapped(id, deadline).await?;
        Ok(view.is_some_and(|view| matches!(view.state, State::Failed(_))))
    }

    /// Returns whether a volume does not answer: its backend is unreachable, or a request has waited for
    /// [`HUNG_AFTER`].
    pub(crate) async fn is_hung(&self, id: &str, deadline: Instant) -> Result<bool> {
        let mapping = match self.executor.get(&mapping_name(id), deadline).await {
            Ok(mapping) => mapping,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error),
        };
        let view = mapping.view();
        Ok(view.outage.is_some()
            || matches!(view.state, State::Failed(_) | State::Recovering)
            || oldest_request(&mapping) >= HUNG_AFTER)
    }

    /// Unmaps a volume whose device has no users. A volume that is not mapped is success.
    pub(crate) async fn unmap(&self, id: &str, deadline: Instant) -> Result<()> {
        self.host.lock(&mapping_name(id), false, deadline).await?;
        self.executor.unmap(&mapping_name(id), deadline).await.map(|_| ())
    }

    /// Unmaps a volume although its backend does not answer, and unmounts it everywhere. Returns what was
    /// done, for the log.
    ///
    /// # Errors
    /// Returns `Unavailable` if it is not proved that the storage executes no request any more.
    pub async fn unmap_by_force(&self, id: &str, deadline: Instant) -> Result<String> {
        let name = mapping_name(id);
        let report = self.executor.force_unmap(&name, UnmountScope::All, deadline).await?;
        let Some(report) = report else { return Ok("it was not mapped".to_owned()) };
        if let Some(unproven) = report.unproven {
            let message = format!("volume {id} was unmapped by force, but {unproven}");
            return Err(Error::new(ErrorKind::Unavailable, message));
        }
        let steps: Vec<&str> = report.steps.iter().map(|step| step.step).collect();
        Ok(format!("unmapped by force: {}", steps.join(", ")))
    }
}

/// The device of a volume: that of its mapping, or the one with the decrypted content.
#[derive(Debug, Clone)]
pub(crate) struct Device {
    pub(crate) node: PathBuf,
    /// The device number, as in the mount table.
    pub(crate) number: DeviceNumber,
    pub(crate) size: u64,
}

impl From<Unlocked> for Device {
    fn from(Unlocked { node, number, size, .. }: Unlocked) -> Self {
        Self { node, number, size }
    }
}

impl Device {
    /// Returns the device of a mapping.
    ///
    /// # Errors
    /// Returns `Unavailable` while it has none.
    pub(crate) fn of(host: &dyn Host, view: &View) -> Result<Self> {
        let missing = || {
            let message = format!("{} has no device", view.record.name);
            Error::new(ErrorKind::Unavailable, message).with_repair("repeat the call")
        };
        let node = view.node().ok_or_else(missing)?;
        let number = host.device_number(&node).ok_or_else(missing)?;
        let size = view.device.map_or(0, |device| device.size);
        Ok(Self { node, number, size })
    }
}
