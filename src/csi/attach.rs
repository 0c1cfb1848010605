//! The Controller service of a process that attaches volumes and does nothing else: ControllerPublishVolume,
//! ControllerUnpublishVolume and ListVolumes for external-attacher. An [`Attacher`] decides, for example the controller
//! of Kubernetes.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::fmt::Debug;
use std::ops::Bound;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_csi_api::csi::v1 as csi;
use cleat_node::control_socket::{PeerCheck, listen_in_pod};
use cleat_node::executor::Pending;
use csi::controller_server::{self, Controller, ControllerServer};
use csi::controller_service_capability::{self as capability, rpc::Type as Rpc};
use csi::identity_server::{self, Identity, IdentityServer};
use csi::plugin_capability as plugin;
use csi::volume_capability::access_mode::Mode;
use tokio::net::UnixListener;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Context, Poll, Service, http};
use tonic::service::interceptor::InterceptedService;
use tonic::{Request, Response, Status};

use crate::busy::Busy;
use crate::capability::Capability;
use crate::{deadline, status, volume_id};

/// The maximum size of a request, in bytes.
const MAX_MESSAGE: usize = 256 * 1024;

/// The maximum length of a node id, in bytes: that of the CSI specification for the field.
const MAX_NODE_ID: usize = 256;

/// How long after its deadline a call may take to return its own error.
const ANSWER_MARGIN: Duration = Duration::from_millis(300);

/// How long after a failure the socket is created again.
const RETRY: Duration = Duration::from_secs(5);

/// The maximum number of entries of a page of ListVolumes.
const MAX_ENTRIES: usize = 1000;

/// The beginning of a token of ListVolumes. The id of the last volume of the page follows.
const TOKEN: &str = "after:";

const RPCS: [Rpc; 5] = [
    Rpc::PublishUnpublishVolume,
    Rpc::PublishReadonly,
    Rpc::SingleNodeMultiWriter,
    Rpc::ListVolumes,
    Rpc::ListVolumesPublishedNodes,
];

/// Decides which node may use a volume.
#[tonic::async_trait]
pub trait Attacher: Debug + Send + Sync {
    /// Waits until the node `node_id` may use the volume, and returns the publish context.
    ///
    /// # Errors
    /// Returns an error with the kind that corresponds to the code of the CSI specification.
    async fn publish(
        &self,
        volume: &str,
        node_id: &str,
        usage: Usage,
        deadline: Instant,
    ) -> Result<BTreeMap<String, String>>;

    /// Waits until it is proved that the node, or every node without `node_id`, does not use the volume any more.
    ///
    /// # Errors
    /// As [`Attacher::publish`].
    async fn unpublish(&self, volume: &str, node_id: Option<&str>, deadline: Instant)
    -> Result<()>;

    /// Returns the volumes that nodes may use, with the ids of these nodes. Does not block.
    ///
    /// # Errors
    /// Returns `Unavailable` if the state is not known.
    fn published(&self) -> Result<Published>;
}

/// The ids of the nodes that may use a volume, by the id of the volume.
pub type Published = BTreeMap<String, BTreeSet<String>>;

/// How a node is to use a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Usage {
    /// It is the only node that writes.
    Writer,
    /// Other nodes write, too.
    SharedWriter,
    /// It only reads.
    Reader,
}

/// Serves `attacher` as the driver `driver` on a socket, until the future is dropped: the socket then refuses
/// connections, those that exist are closed, and calls in progress end at their deadlines. If the socket cannot be
/// made, tries again.
pub fn serve_attacher<'a>(
    socket: &'a Path,
    driver: &'a str,
    attacher: Arc<dyn Attacher>,
) -> Pending<'a, ()> {
    let service = AttachService { driver: driver.to_owned(), attacher, busy: Busy::default() };
    Box::pin(serve(service, socket, driver))
}

async fn serve(service: AttachService, socket: &Path, driver: &str) {
    loop {
        match listen_in_pod(socket).await {
            Ok(listener) => {
                tracing::info!(socket = %socket.display(), driver, "serving CSI for external-attacher");
                service.clone().serve_on(listener).await;
            }
            Err(error) => {
                let hint = error.repair().unwrap_or("choose another --csi-socket");
                tracing::error!("cannot serve CSI: {}; {hint}", error.report());
            }
        }
        tokio::time::sleep(RETRY).await;
    }
}

#[derive(Debug, Clone)]
struct AttachService {
    driver: String,
    attacher: Arc<dyn Attacher>,
    /// Calls in progress, by volume and node.
    busy: Busy,
}

impl AttachService {
    async fn serve_on(self, listener: UnixListener) {
        // Dropped with this future. The connections are tasks of their own and must end with it: a client of a
        // process that is not the leader any more must connect again.
        let (_serving, ended) = oneshot::channel::<()>();
        let services = Services {
            identity: IdentityServer::new(self.clone()).max_decoding_message_size(MAX_MESSAGE),
            controller: ControllerServer::new(self).max_decoding_message_size(MAX_MESSAGE),
        };
        let services = InterceptedService::new(services, PeerCheck);
        let served = tonic::transport::Server::builder()
            .concurrency_limit_per_connection(256)
            .max_concurrent_streams(256)
            .http2_max_header_list_size(16 * 1024)
            .serve_with_incoming_shutdown(services, UnixListenerStream::new(listener), async {
                let _ = ended.await;
            });
        match tokio::spawn(served).await {
            Ok(Ok(())) | Err(_) => {}
            Ok(Err(error)) => tracing::error!("CSI failed: {error}"),
        }
    }

    /// Runs `call`, which ends at `deadline`, unless one for this volume and node is in progress.
    async fn exclusive<T>(
        &self,
        name: &'static str,
        volume: &str,
        node: &str,
        deadline: Instant,
        call: impl Future<Output = Result<T>>,
    ) -> Result<Response<T>, Status> {
        let key = format!("{volume} on node {node}");
        let _claimed = self.busy.claim(&key, name).map_err(|error| status::of(&error))?;
        let answer = timeout_at(deadline + ANSWER_MARGIN, call).await.unwrap_or_else(|_| {
            let message = format!("{name} of volume {key}: the API server did not answer in time");
            Err(Error::new(ErrorKind::TimedOut, message).with_repair("repeat the call"))
        });
        answer.map(Response::new).map_err(|error| {
            tracing::warn!(volume, node, "{name}: {}", error.report());
            status::of(&error)
        })
    }
}

/// Both services. Each call goes to the one that its path names.
#[derive(Clone)]
struct Services {
    identity: IdentityServer<AttachService>,
    controller: ControllerServer<AttachService>,
}

impl Service<http::Request<Body>> for Services {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<http::Response<Body>, Infallible>;

    /// The generated services are always ready.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        match request.uri().path().split('/').nth(1).unwrap_or_default() {
            identity_server::SERVICE_NAME => self.identity.call(request),
            controller_server::SERVICE_NAME => self.controller.call(request),
            other => {
                let message = format!("this driver does not have the service {other}");
                Box::pin(async move { Ok(Status::unimplemented(message).into_http()) })
            }
        }
    }
}

#[tonic::async_trait]
impl Identity for AttachService {
    async fn get_plugin_info(
        &self,
        _: Request<csi::GetPluginInfoRequest>,
    ) -> Result<Response<csi::GetPluginInfoResponse>, Status> {
        Ok(Response::new(csi::GetPluginInfoResponse {
            name: self.driver.clone(),
            vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
            manifest: BTreeMap::new(),
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<csi::GetPluginCapabilitiesRequest>,
    ) -> Result<Response<csi::GetPluginCapabilitiesResponse>, Status> {
        let kind = plugin::Type::Service(plugin::Service {
            r#type: plugin::service::Type::ControllerService.into(),
        });
        let capabilities = vec![csi::PluginCapability { r#type: Some(kind) }];
        Ok(Response::new(csi::GetPluginCapabilitiesResponse { capabilities }))
    }

    async fn probe(
        &self,
        _: Request<csi::ProbeRequest>,
    ) -> Result<Response<csi::ProbeResponse>, Status> {
        Ok(Response::new(csi::ProbeResponse { ready: Some(true) }))
    }
}

/// The calls that it does not have are UNIMPLEMENTED.
#[tonic::async_trait]
impl Controller for AttachService {
    async fn controller_get_capabilities(
        &self,
        _: Request<csi::ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<csi::ControllerGetCapabilitiesResponse>, Status> {
        let announced = RPCS.map(|rpc| csi::ControllerServiceCapability {
            r#type: Some(capability::Type::Rpc(capability::Rpc { r#type: rpc.into() })),
        });
        let capabilities = announced.into();
        Ok(Response::new(csi::ControllerGetCapabilitiesResponse { capabilities }))
    }

    async fn controller_publish_volume(
        &self,
        request: Request<csi::ControllerPublishVolumeRequest>,
    ) -> Result<Response<csi::ControllerPublishVolumeResponse>, Status> {
        let deadline = deadline::of(request.metadata());
        let request = request.into_inner();
        let volume = checked(volume_id::checked(&request.volume_id))?;
        let node = checked(node_id(&request.node_id))?
            .ok_or_else(|| Status::invalid_argument("the request has no node id"))?;
        let usage = checked(usage(request.volume_capability, request.readonly))?;
        let call = async {
            let publish_context = self.attacher.publish(volume, node, usage, deadline).await?;
            Ok(csi::ControllerPublishVolumeResponse { publish_context })
        };
        self.exclusive("ControllerPublishVolume", volume, node, deadline, call).await
    }

    async fn controller_unpublish_volume(
        &self,
        request: Request<csi::ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<csi::ControllerUnpublishVolumeResponse>, Status> {
        let deadline = deadline::of(request.metadata());
        let request = request.into_inner();
        let volume = checked(volume_id::checked(&request.volume_id))?;
        let node = checked(node_id(&request.node_id))?;
        let call = async {
            self.attacher.unpublish(volume, node, deadline).await?;
            Ok(csi::ControllerUnpublishVolumeResponse {})
        };
        let shown = node.unwrap_or_default();
        self.exclusive("ControllerUnpublishVolume", volume, shown, deadline, call).await
    }

    /// Lists the volumes that nodes may use, and no others. external-attacher compares them with the VolumeAttachments.
    async fn list_volumes(
        &self,
        request: Request<csi::ListVolumesRequest>,
    ) -> Result<Response<csi::ListVolumesResponse>, Status> {
        let csi::ListVolumesRequest { max_entries, starting_token } = request.into_inner();
        let published = checked(self.attacher.published())?;
        page(&published, max_entries, &starting_token).map(Response::new)
    }
}

/// Returns a page of ListVolumes. The one after it begins behind its last volume, also if that is gone meanwhile.
fn page(
    published: &Published,
    max_entries: i32,
    token: &str,
) -> Result<csi::ListVolumesResponse, Status> {
    use csi::list_volumes_response::{Entry, VolumeStatus};
    let wanted = usize::try_from(max_entries)
        .map_err(|_| Status::invalid_argument("the maximum number of entries is negative"))?;
    let limit = if wanted == 0 { MAX_ENTRIES } else { wanted.min(MAX_ENTRIES) };
    let start = match token.strip_prefix(TOKEN) {
        Some(last) => Bound::Excluded(last),
        None if token.is_empty() => Bound::Unbounded,
        None => return Err(Status::aborted("the starting token is not one of this list")),
    };
    let mut rest = published.range::<str, _>((start, Bound::Unbounded));
    let entry = |(volume_id, nodes): (&String, &BTreeSet<String>)| Entry {
        volume: Some(csi::Volume { volume_id: volume_id.clone(), ..Default::default() }),
        status: Some(VolumeStatus { published_node_ids: nodes.iter().cloned().collect() }),
    };
    let entries: Vec<Entry> = rest.by_ref().take(limit).map(entry).collect();
    let last = entries.last().and_then(|entry| entry.volume.as_ref());
    let last = last.filter(|_| rest.next().is_some());
    let next_token = last.map(|volume| format!("{TOKEN}{}", volume.volume_id)).unwrap_or_default();
    Ok(csi::ListVolumesResponse { entries, next_token })
}

fn checked<T>(result: Result<T>) -> Result<T, Status> {
    result.map_err(|error| status::of(&error))
}

/// Checks a node id; `None` for an empty one.
fn node_id(id: &str) -> Result<Option<&str>> {
    if id.len() > MAX_NODE_ID || id.chars().any(char::is_control) {
        let message = format!("the node id is longer than {MAX_NODE_ID} bytes, or not plain text");
        return Err(Error::new(ErrorKind::InvalidArgument, message));
    }
    Ok((!id.is_empty()).then_some(id))
}

fn usage(wanted: Option<csi::VolumeCapability>, read_only: bool) -> Result<Usage> {
    let mode = wanted.as_ref().and_then(|wanted| wanted.access_mode).map(|mode| mode.mode());
    let wanted = Capability::parse(wanted)?;
    Ok(match mode {
        _ if read_only || wanted.read_only => Usage::Reader,
        Some(Mode::MultiNodeMultiWriter | Mode::MultiNodeSingleWriter) => Usage::SharedWriter,
        _ => Usage::Writer,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use csi::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};

    #[test]
    fn the_usage_follows_from_the_capability() {
        let of = |mode: Mode, access: AccessType, read_only| {
            let access_mode = Some(AccessMode { mode: mode.into() });
            usage(Some(csi::VolumeCapability { access_mode, access_type: Some(access) }), read_only)
        };
        let mount = || AccessType::Mount(MountVolume::default());
        let block = || AccessType::Block(BlockVolume {});
        assert_eq!(of(Mode::SingleNodeWriter, mount(), false).unwrap(), Usage::Writer);
        assert_eq!(of(Mode::SingleNodeWriter, mount(), true).unwrap(), Usage::Reader);
        assert_eq!(of(Mode::MultiNodeReaderOnly, mount(), false).unwrap(), Usage::Reader);
        assert_eq!(of(Mode::MultiNodeMultiWriter, block(), false).unwrap(), Usage::SharedWriter);
        let error = of(Mode::MultiNodeMultiWriter, mount(), false).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(node_id(&"n".repeat(257)).is_err());
        assert_eq!(node_id("").unwrap(), None);
    }

    #[test]
    fn volumes_are_listed_in_pages() {
        let nodes = BTreeSet::from(["a".to_owned()]);
        let all: Published = (0..2500).map(|n| (format!("v{n:04}"), nodes.clone())).collect();
        for (limit, pages) in [(0, 3), (1, 2500), (2500, 3), (500, 5)] {
            let (mut listed, mut token, mut count) = (Vec::new(), String::new(), 0);
            while count == 0 || !token.is_empty() {
                let page = page(&all, limit, &token).unwrap();
                listed
                    .extend(page.entries.into_iter().map(|entry| entry.volume.unwrap().volume_id));
                (token, count) = (page.next_token, count + 1);
            }
            assert_eq!((count, listed.iter().eq(all.keys())), (pages, true), "pages of {limit}");
        }
        assert_eq!(page(&all, -1, "").unwrap_err().code(), tonic::Code::InvalidArgument);
        assert_eq!(page(&all, 0, "invalid-token").unwrap_err().code(), tonic::Code::Aborted);
        let after_the_end = page(&all, 0, "after:w").unwrap();
        assert!(after_the_end.entries.is_empty() && after_the_end.next_token.is_empty());
    }
}
