//! The Identity service.

use cleat_csi_api::csi::v1 as csi;
use csi::identity_server::Identity;
use csi::plugin_capability::{self as capability, service, volume_expansion};
use tonic::{Request, Response, Status};

use crate::driver::Driver;

/// The Identity service of a driver.
#[derive(Clone)]
pub(crate) struct IdentityService {
    pub(crate) driver: Driver,
}

#[tonic::async_trait]
impl Identity for IdentityService {
    async fn get_plugin_info(
        &self,
        _: Request<csi::GetPluginInfoRequest>,
    ) -> Result<Response<csi::GetPluginInfoResponse>, Status> {
        Ok(Response::new(csi::GetPluginInfoResponse {
            name: self.driver.config.driver.clone(),
            vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
            manifest: [("node".to_owned(), self.driver.node.clone())].into(),
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<csi::GetPluginCapabilitiesRequest>,
    ) -> Result<Response<csi::GetPluginCapabilitiesResponse>, Status> {
        let controller = self.driver.controller.is_some().then(|| {
            of(capability::Type::Service(capability::Service {
                r#type: service::Type::ControllerService.into(),
            }))
        });
        let groups = match &self.driver.controller {
            Some(controller) if controller.has_group_snapshots().await => {
                Some(service::Type::GroupControllerService)
            }
            _ => None,
        };
        let groups = groups.map(|group| {
            of(capability::Type::Service(capability::Service { r#type: group.into() }))
        });
        let capabilities = [
            of(capability::Type::Service(capability::Service {
                r#type: service::Type::VolumeAccessibilityConstraints.into(),
            })),
            of(capability::Type::Service(capability::Service {
                r#type: service::Type::SnapshotAccessibilityConstraints.into(),
            })),
            of(capability::Type::VolumeExpansion(capability::VolumeExpansion {
                r#type: volume_expansion::Type::Online.into(),
            })),
        ];
        let capabilities = controller.into_iter().chain(groups).chain(capabilities).collect();
        Ok(Response::new(csi::GetPluginCapabilitiesResponse { capabilities }))
    }

    /// The driver serves only after the supervisor has recovered its mappings, so it is always ready.
    async fn probe(
        &self,
        _: Request<csi::ProbeRequest>,
    ) -> Result<Response<csi::ProbeResponse>, Status> {
        Ok(Response::new(csi::ProbeResponse { ready: Some(true) }))
    }
}

fn of(kind: capability::Type) -> csi::PluginCapability {
    csi::PluginCapability { r#type: Some(kind) }
}
