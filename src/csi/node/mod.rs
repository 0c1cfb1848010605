//! The Node service: checks each request, makes its volume busy, and runs the call as a task of its own, so that
//! a caller that disconnects does not leave a half-finished call.

mod encryption;
mod expand;
pub(crate) mod key;
mod publish;
mod stage;
mod staging;
mod stats;

use std::future::Future;
use std::sync::Arc;

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_csi_api::csi::v1 as csi;
use csi::node_server::Node;
use csi::node_service_capability::rpc::Type as Rpc;
use tokio::time::{Instant, timeout_at};
use tonic::{Request, Response, Status};

use crate::attach::Usage;
use crate::attributes::Attributes;
use crate::capability::{Access, Capability};
use crate::driver::Driver;
use crate::secrets::Secrets;
use crate::volume_id::mapping_name;
use crate::{deadline, health, paths, status, volume_id};

/// How long after its deadline a call may take to return its own error.
const ANSWER_MARGIN: std::time::Duration = std::time::Duration::from_millis(300);

/// The calls that this driver announces.
const RPCS: [Rpc; 7] = [
    Rpc::StageUnstageVolume,
    Rpc::GetVolumeStats,
    Rpc::ExpandVolume,
    Rpc::SingleNodeMultiWriter,
    Rpc::VolumeMountGroup,
    Rpc::GetVolumeHealth,
    Rpc::GetStorageHealth,
];

/// A volume, and how the caller wants to use it.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    pub(crate) id: String,
    pub(crate) attributes: Attributes,
    pub(crate) capability: Capability,
    pub(crate) secrets: Arc<Secrets>,
}

impl Wanted {
    fn new(
        id: &str,
        attributes: Attributes,
        mut capability: Capability,
        secrets: Arc<Secrets>,
    ) -> Self {
        capability.read_only |= attributes.read_only;
        Self { id: id.to_owned(), attributes, capability, secrets }
    }

    /// Returns the volume as its grant permits to use it: the mode of the grant is that of its PersistentVolume, and
    /// kubelet may name only one of several access modes.
    ///
    /// # Errors
    /// Returns `InUse` if the grant does not permit what the caller wants.
    fn granted(&self, usage: Option<Usage>) -> Result<Self> {
        let mut granted = self.clone();
        let capability = &mut granted.capability;
        match usage {
            None => {}
            Some(Usage::Reader) => (capability.read_only, capability.shared) = (true, false),
            Some(Usage::SharedWriter)
                if capability.access == Access::Block && !capability.read_only =>
            {
                capability.shared = true;
            }
            Some(Usage::Writer) if !capability.shared => {}
            Some(usage) => {
                let message = format!(
                    "volume {} is granted to this node as {usage:?}, which the capability of the call does not match",
                    self.id
                );
                let repair = "delete the pods of the volume on this node; give the PersistentVolume one access mode";
                return Err(Error::new(ErrorKind::InUse, message).with_repair(repair));
            }
        }
        Ok(granted)
    }
}

/// The Node service of a driver.
#[derive(Clone)]
pub(crate) struct NodeService {
    pub(crate) driver: Driver,
}

impl Driver {
    /// Returns the Node service, for calls without a socket.
    pub fn node_service(&self) -> impl Node + use<> {
        NodeService { driver: self.clone() }
    }
}

impl NodeService {
    /// Runs `call` with its volume busy. Returns the error of the deadline if it does not end.
    pub(crate) async fn exclusive<T, F>(
        &self,
        name: &'static str,
        id: &str,
        deadline: Instant,
        call: impl FnOnce(Driver) -> F,
    ) -> Result<Response<T>, Status>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let claimed = self.driver.busy.claim(id, name).map_err(|error| status::of(&error))?;
        let call = call(self.driver.clone());
        let task = tokio::spawn(async move {
            let _claimed = claimed;
            call.await
        });
        let result = match timeout_at(deadline + ANSWER_MARGIN, task).await {
            Ok(Ok(result)) => result,
            Ok(Err(error)) => {
                Err(Error::new(ErrorKind::Internal, "internal: the call panicked")
                    .with_source(error))
            }
            Err(_) => {
                let message = format!("{name} for volume {id} continues in the background");
                Err(Error::new(ErrorKind::TimedOut, message).with_repair("repeat the call"))
            }
        };
        match result {
            Ok(answer) => Ok(Response::new(answer)),
            Err(error) => {
                tracing::warn!(volume = id, node = self.driver.node, "{name}: {}", error.report());
                Err(status::of(&error))
            }
        }
    }
}

fn checked<T>(result: Result<T>) -> Result<T, Status> {
    result.map_err(|error| status::of(&error))
}

#[tonic::async_trait]
impl Node for NodeService {
    async fn node_stage_volume(
        &self,
        request: Request<csi::NodeStageVolumeRequest>,
    ) -> Result<Response<csi::NodeStageVolumeResponse>, Status> {
        let deadline = deadline::of(request.metadata());
        let request = request.into_inner();
        let id = checked(volume_id::checked(&request.volume_id))?.to_owned();
        let path = checked(paths::checked("staging target path", &request.staging_target_path))?;
        let capability = checked(Capability::parse(request.volume_capability))?;
        let secrets = Arc::new(checked(Secrets::take(request.secrets))?);
        let (context, published) = (&request.volume_context, &request.publish_context);
        let attributes = checked(Attributes::parse_published(context, published))?;
        let wanted = Wanted::new(&id, attributes, capability, secrets);
        self.exclusive("NodeStageVolume", &id, deadline, |driver| async move {
            stage::stage(&driver, &wanted, &path, deadline).await?;
            Ok(csi::NodeStageVolumeResponse {})
        })
        .await
    }

    async fn node_unstage_volume(
        &self,
        request: Request<csi::NodeUnstageVolumeRequest>,
    ) -> Result<Response<csi::NodeUnstageVolumeResponse>, Status> {
        let deadline = deadline::of(request.metadata());
        let request = request.into_inner();
        let id = checked(volume_id::checked(&request.volume_id))?.to_owned();
        let path = checked(paths::checked("staging target path", &request.staging_target_path))?;
        self.exclusive("NodeUnstageVolume", &id.clone(), deadline, |driver| async move {
            stage::unstage(&driver, &id, &path, deadline).await?;
            Ok(csi::NodeUnstageVolumeResponse {})
        })
        .await
    }

    async fn node_publish_volume(
        &self,
        request: Request<csi::NodePublishVolumeRequest>,
    ) -> Result<Response<csi::NodePublishVolumeResponse>, Status> {
        let deadline = deadline::of(request.metadata());
        let request = request.into_inner();
        let id = checked(volume_id::checked(&request.volume_id))?.to_owned();
        let staging = checked(paths::checked("staging target path", &request.staging_target_path))?;
        let target = checked(paths::checked("target path", &request.target_path))?;
        let capability = checked(Capability::parse(request.volume_capability))?;
        let secrets = Arc::new(checked(Secrets::take(request.secrets))?);
        let (context, published) = (&request.volume_context, &request.publish_context);
        let attributes = checked(Attributes::parse_published(context, published))?;
        let wanted = Wanted::new(&id, attributes, capability, secrets);
        let read_only = request.readonly;
        self.exclusive("NodePublishVolume", &id, deadline, |driver| async move {
            let target = publish::Target { staging: &staging, path: &target, read_only };
            publish::publish(&driver, &wanted, &target, deadline).await?;
            Ok(csi::NodePublishVolumeResponse {})
        })
        .await
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<csi::NodeUnpublishVolumeRequest>,
    ) -> Result<Response<csi::NodeUnpublishVolumeResponse>, Status> {
        let deadline = deadline::of(request.metadata());
        let request = request.into_inner();
        let id = checked(volume_id::checked(&request.volume_id))?.to_owned();
        let target = checked(paths::checked("target path", &request.target_path))?;
        self.exclusive("NodeUnpublishVolume", &id.clone(), deadline, |driver| async move {
            publish::unpublish(&driver, &id, &target, deadline).await?;
            Ok(csi::NodeUnpublishVolumeResponse {})
        })
        .await
    }

    async fn node_expand_volume(
        &self,
        request: Request<csi::NodeExpandVolumeRequest>,
    ) -> Result<Response<csi::NodeExpandVolumeResponse>, Status> {
        let deadline = deadline::of(request.metadata());
        let request = request.into_inner();
        let id = checked(volume_id::checked(&request.volume_id))?.to_owned();
        let path = checked(paths::of_volume("volume path", &request.volume_path))?;
        let wanted = checked(expand::size(request.capacity_range))?;
        self.exclusive("NodeExpandVolume", &id.clone(), deadline, |driver| async move {
            let capacity_bytes = expand::expand(&driver, &id, &path, wanted, deadline).await?;
            Ok(csi::NodeExpandVolumeResponse { capacity_bytes })
        })
        .await
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<csi::NodeGetVolumeStatsRequest>,
    ) -> Result<Response<csi::NodeGetVolumeStatsResponse>, Status> {
        let deadline = deadline::of(request.metadata());
        let request = request.into_inner();
        let id = checked(volume_id::checked(&request.volume_id))?;
        let path = checked(paths::of_volume("volume path", &request.volume_path))?;
        let usage = checked(stats::usage(&self.driver, id, &path, deadline).await)?;
        Ok(Response::new(csi::NodeGetVolumeStatsResponse { usage }))
    }

    async fn node_get_volume_health(
        &self,
        request: Request<csi::NodeGetVolumeHealthRequest>,
    ) -> Result<Response<csi::NodeGetVolumeHealthResponse>, Status> {
        let deadline = deadline::of(request.metadata());
        let request = request.into_inner();
        let id = checked(volume_id::checked(&request.volume_id))?;
        checked(self.driver.mapped(id, deadline).await)?;
        let mapping = self.driver.executor.register().get(&mapping_name(id));
        let mapping = mapping.ok_or_else(|| status::of(&not_mapped(id)))?;
        let health = csi::VolumeHealth {
            volume_id: id.to_owned(),
            health_statuses: health::of_mapping(&mapping),
        };
        Ok(Response::new(csi::NodeGetVolumeHealthResponse { volume_health: Some(health) }))
    }

    async fn node_get_storage_health(
        &self,
        _: Request<csi::NodeGetStorageHealthRequest>,
    ) -> Result<Response<csi::NodeGetStorageHealthResponse>, Status> {
        let backend_health = health::of_storage(&self.driver.csi_mappings());
        Ok(Response::new(csi::NodeGetStorageHealthResponse { backend_health }))
    }

    async fn node_get_capabilities(
        &self,
        _: Request<csi::NodeGetCapabilitiesRequest>,
    ) -> Result<Response<csi::NodeGetCapabilitiesResponse>, Status> {
        use csi::node_service_capability as capability;
        let announced = RPCS.map(|rpc| csi::NodeServiceCapability {
            r#type: Some(capability::Type::Rpc(capability::Rpc { r#type: rpc.into() })),
        });
        Ok(Response::new(csi::NodeGetCapabilitiesResponse { capabilities: announced.into() }))
    }

    async fn node_get_info(
        &self,
        _: Request<csi::NodeGetInfoRequest>,
    ) -> Result<Response<csi::NodeGetInfoResponse>, Status> {
        let driver = &self.driver;
        let segments = [(driver.config.topology_key(), driver.node.clone())].into();
        Ok(Response::new(csi::NodeGetInfoResponse {
            node_id: driver.node.clone(),
            max_volumes_per_node: i64::try_from(driver.attach_limit()).unwrap_or(i64::MAX),
            accessible_topology: Some(csi::Topology { segments }),
        }))
    }
}

/// The error of a call for a volume that this node does not have.
pub(crate) fn not_mapped(id: &str) -> Error {
    let message = format!("volume {id} is not staged on this node");
    Error::new(ErrorKind::NotFound, message).with_repair("cleat ls lists the volumes of this node")
}
