//! The services of the driver's socket. Each call goes to the service that its path names.

use std::convert::Infallible;

use cleat_csi_api::addons::fence::fence_controller_server::{self as fence, FenceControllerServer};
use cleat_csi_api::addons::identity::identity_server as addons_identity;
use cleat_csi_api::addons::reclaimspace::{
    reclaim_space_controller_server as reclaim_controller,
    reclaim_space_node_server as reclaim_node,
};
use cleat_csi_api::csi::v1::controller_server::{self, ControllerServer};
use cleat_csi_api::csi::v1::group_controller_server::{self, GroupControllerServer};
use cleat_csi_api::csi::v1::identity_server;
use cleat_csi_api::csi::v1::identity_server::IdentityServer;
use cleat_csi_api::csi::v1::node_server::{self, NodeServer};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::codegen::{BoxFuture, Context, Poll, Service};

use crate::addons::Addons;
use crate::controller::ControllerService;
use crate::driver::Driver;
use crate::identity::IdentityService;
use crate::network_fence::NetworkFence;
use crate::node::NodeService;

/// The maximum size of a request, in bytes. The maps of a request have at most 4 KiB each.
const MAX_MESSAGE: usize = 256 * 1024;

/// The services of one driver.
#[derive(Clone)]
pub(crate) struct Services {
    identity: IdentityServer<IdentityService>,
    node: NodeServer<NodeService>,
    controller: Option<ControllerServer<ControllerService>>,
    group_controller: Option<GroupControllerServer<ControllerService>>,
    addons_identity: addons_identity::IdentityServer<Addons>,
    reclaim_node: reclaim_node::ReclaimSpaceNodeServer<Addons>,
    reclaim_controller: reclaim_controller::ReclaimSpaceControllerServer<Addons>,
    network_fence: FenceControllerServer<NetworkFence>,
}

impl Services {
    /// Creates the services of a driver. The Controller and GroupController services exist only if the driver has
    /// them.
    pub(crate) fn of(driver: &Driver) -> Self {
        let identity = IdentityServer::new(IdentityService { driver: driver.clone() });
        let node = NodeService { driver: driver.clone() };
        let addons = Addons { node: node.clone() };
        let node = NodeServer::new(node);
        let controller = driver.controller.clone().map(|controller| {
            let server = ControllerServer::new(ControllerService(controller));
            server.max_decoding_message_size(MAX_MESSAGE)
        });
        let group_controller = driver.controller.clone().map(|controller| {
            let server = GroupControllerServer::new(ControllerService(controller));
            server.max_decoding_message_size(MAX_MESSAGE)
        });
        Self {
            identity: identity.max_decoding_message_size(MAX_MESSAGE),
            node: node.max_decoding_message_size(MAX_MESSAGE),
            controller,
            group_controller,
            addons_identity: addons_identity::IdentityServer::new(addons.clone())
                .max_decoding_message_size(MAX_MESSAGE),
            reclaim_node: reclaim_node::ReclaimSpaceNodeServer::new(addons.clone())
                .max_decoding_message_size(MAX_MESSAGE),
            reclaim_controller: reclaim_controller::ReclaimSpaceControllerServer::new(addons)
                .max_decoding_message_size(MAX_MESSAGE),
            network_fence: FenceControllerServer::new(NetworkFence::of(driver))
                .max_decoding_message_size(MAX_MESSAGE),
        }
    }
}

impl Service<Request<Body>> for Services {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    /// The generated services are always ready.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let service = request.uri().path().split('/').nth(1).unwrap_or_default();
        match service {
            identity_server::SERVICE_NAME => return self.identity.call(request),
            node_server::SERVICE_NAME => return self.node.call(request),
            addons_identity::SERVICE_NAME => return self.addons_identity.call(request),
            reclaim_node::SERVICE_NAME => return self.reclaim_node.call(request),
            reclaim_controller::SERVICE_NAME => return self.reclaim_controller.call(request),
            fence::SERVICE_NAME => return self.network_fence.call(request),
            _ => {}
        }
        match (service, &mut self.controller, &mut self.group_controller) {
            (controller_server::SERVICE_NAME, Some(controller), _) => controller.call(request),
            (group_controller_server::SERVICE_NAME, _, Some(groups)) => groups.call(request),
            _ => {
                let message = format!("this driver does not have the service {service}");
                Box::pin(async move { Ok(Status::unimplemented(message).into_http()) })
            }
        }
    }
}
