//! CSI-Addons, on the socket of the driver: who it is, and giving unused space back to the storage: that of a
//! filesystem on the node (fstrim), and blocks of zeroes at the controller. The operator of CSI-Addons calls it through
//! its sidecar. `network_fence` has its other service.

use addons::identity::capability::{self as kinds, network_fence, reclaim_space, service};
use addons::identity::identity_server::Identity;
use addons::identity::{self, Capability};
use addons::reclaimspace::reclaim_space_controller_server::ReclaimSpaceController;
use addons::reclaimspace::reclaim_space_node_server::ReclaimSpaceNode;
use addons::reclaimspace::{
    ControllerReclaimSpaceRequest, ControllerReclaimSpaceResponse, NodeReclaimSpaceRequest,
    NodeReclaimSpaceResponse,
};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_csi_api::addons;
use cleat_csi_api::csi::v1::volume_capability::AccessType;
use tokio::time::Instant;
use tonic::{Request, Response, Status};

use crate::driver::Driver;
use crate::node::{NodeService, not_mapped};
use crate::{deadline, paths, status, volume_id};

/// The services of CSI-Addons of a driver.
#[derive(Clone)]
pub(crate) struct Addons {
    pub(crate) node: NodeService,
}

#[tonic::async_trait]
impl Identity for Addons {
    async fn get_identity(
        &self,
        _: Request<identity::GetIdentityRequest>,
    ) -> Result<Response<identity::GetIdentityResponse>, Status> {
        let driver = &self.node.driver;
        Ok(Response::new(identity::GetIdentityResponse {
            name: driver.config.driver.clone(),
            vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
            manifest: [("node".to_owned(), driver.node.clone())].into(),
        }))
    }

    /// The operator uses the node only if the leader announces OFFLINE, too.
    async fn get_capabilities(
        &self,
        _: Request<identity::GetCapabilitiesRequest>,
    ) -> Result<Response<identity::GetCapabilitiesResponse>, Status> {
        let of = |r#type| Capability { r#type: Some(r#type) };
        let is =
            |kind: service::Type| of(kinds::Type::Service(kinds::Service { r#type: kind.into() }));
        let reclaims = |kind: reclaim_space::Type| {
            of(kinds::Type::ReclaimSpace(kinds::ReclaimSpace { r#type: kind.into() }))
        };
        let fences = |kind: network_fence::Type| {
            of(kinds::Type::NetworkFence(kinds::NetworkFence { r#type: kind.into() }))
        };
        let mut capabilities = vec![
            is(service::Type::NodeService),
            reclaims(reclaim_space::Type::Online),
            fences(network_fence::Type::GetClientsToFence),
        ];
        if self.node.driver.controller.is_some() {
            capabilities.extend([
                is(service::Type::ControllerService),
                reclaims(reclaim_space::Type::Offline),
                fences(network_fence::Type::NetworkFence),
            ]);
        }
        Ok(Response::new(identity::GetCapabilitiesResponse { capabilities }))
    }

    async fn probe(
        &self,
        _: Request<identity::ProbeRequest>,
    ) -> Result<Response<identity::ProbeResponse>, Status> {
        Ok(Response::new(identity::ProbeResponse { ready: Some(true) }))
    }
}

#[tonic::async_trait]
impl ReclaimSpaceNode for Addons {
    async fn node_reclaim_space(
        &self,
        request: Request<NodeReclaimSpaceRequest>,
    ) -> Result<Response<NodeReclaimSpaceResponse>, Status> {
        let deadline = deadline::of(request.metadata());
        let request = request.into_inner();
        let refused = |error: Error| status::of(&error);
        let id = volume_id::checked(&request.volume_id).map_err(refused)?.to_owned();
        // The operator sends the staging path, and leaves the other one empty.
        let path = match &*request.staging_target_path {
            "" => &request.volume_path,
            staging => staging,
        };
        let path = paths::of_volume("staging target path", path).map_err(refused)?;
        let access = request.volume_capability.and_then(|capability| capability.access_type);
        if matches!(access, Some(AccessType::Block(_))) {
            let message = format!(
                "volume {id} is a block volume: only the programs that use it know which of its blocks are unused, \
                 and can discard them (blkdiscard, fstrim); blocks of zeroes are freed by ControllerReclaimSpace"
            );
            return Err(Status::unimplemented(message));
        }
        self.node
            .exclusive("NodeReclaimSpace", &id.clone(), deadline, |driver| async move {
                reclaim(&driver, &id, &path, deadline).await?;
                Ok(NodeReclaimSpaceResponse::default())
            })
            .await
    }
}

/// Discards the unused blocks of a volume's filesystem.
async fn reclaim(
    driver: &Driver,
    id: &str,
    path: &std::path::Path,
    deadline: Instant,
) -> Result<()> {
    let view = driver.mapped(id, deadline).await?.ok_or_else(|| not_mapped(id))?;
    let device = driver.device(&view, deadline).await?;
    let mount = driver.host.mount_at(path).await?;
    if mount.is_none_or(|mount| mount.device != Some(device.number)) {
        let message = format!("volume {id} has no filesystem at {}", path.display());
        return Err(Error::new(ErrorKind::NotFound, message)
            .with_repair("space of a block volume is reclaimed by the programs that use it"));
    }
    let bytes = driver.host.trim(path, deadline).await?;
    tracing::info!(volume = id, bytes, "discarded the unused blocks of the filesystem");
    Ok(())
}

#[tonic::async_trait]
impl ReclaimSpaceController for Addons {
    /// The operator accepts UNIMPLEMENTED here, and then calls the node.
    async fn controller_reclaim_space(
        &self,
        request: Request<ControllerReclaimSpaceRequest>,
    ) -> Result<Response<ControllerReclaimSpaceResponse>, Status> {
        let deadline = deadline::of(request.metadata());
        let Some(controller) = &self.node.driver.controller else {
            return Err(Status::unimplemented("this process does not have the Controller service"));
        };
        controller.controller_reclaim_space(request.into_inner(), deadline).await
    }
}
