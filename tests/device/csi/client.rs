//! A caller of the CSI services.

use std::time::Duration;

use cleat_csi_api::csi::v1 as csi;
use cleat_csi_api::pluginregistration as registration;
use csi::node_client::NodeClient;
use hyper_util::rt::TokioIo;
use tokio::runtime::Runtime;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

use crate::fixture::TIMEOUT;

/// A connection to the driver. Its calls block.
pub(crate) struct Client {
    runtime: Runtime,
    node: NodeClient<Channel>,
}

impl Client {
    /// Connects to the socket `path`, which may appear late.
    pub(crate) fn connect(path: &str) -> Self {
        let runtime = runtime();
        let node = NodeClient::new(runtime.block_on(channel(path)));
        Self { runtime, node }
    }

    pub(crate) fn stage(&self, request: csi::NodeStageVolumeRequest) -> Result<(), Status> {
        self.runtime.block_on(self.node.clone().node_stage_volume(timed(request))).map(drop)
    }

    pub(crate) fn unstage(&self, request: csi::NodeUnstageVolumeRequest) -> Result<(), Status> {
        self.runtime.block_on(self.node.clone().node_unstage_volume(timed(request))).map(drop)
    }

    pub(crate) fn publish(&self, request: csi::NodePublishVolumeRequest) -> Result<(), Status> {
        self.runtime.block_on(self.node.clone().node_publish_volume(timed(request))).map(drop)
    }

    pub(crate) fn unpublish(&self, request: csi::NodeUnpublishVolumeRequest) -> Result<(), Status> {
        self.runtime.block_on(self.node.clone().node_unpublish_volume(timed(request))).map(drop)
    }

    pub(crate) fn stats(&self, id: &str, path: &str) -> Result<Vec<csi::VolumeUsage>, Status> {
        let request = csi::NodeGetVolumeStatsRequest {
            volume_id: id.to_owned(),
            volume_path: path.to_owned(),
            ..Default::default()
        };
        let answer = self.runtime.block_on(self.node.clone().node_get_volume_stats(timed(request)));
        answer.map(|answer| answer.into_inner().usage)
    }

    pub(crate) fn health(&self, id: &str) -> Result<csi::VolumeHealth, Status> {
        let request =
            csi::NodeGetVolumeHealthRequest { volume_id: id.to_owned(), ..Default::default() };
        let answer =
            self.runtime.block_on(self.node.clone().node_get_volume_health(timed(request)));
        answer.map(|answer| answer.into_inner().volume_health.expect("the health of the volume"))
    }

    pub(crate) fn expand(&self, id: &str, path: &str, bytes: i64) -> Result<i64, Status> {
        let request = csi::NodeExpandVolumeRequest {
            volume_id: id.to_owned(),
            volume_path: path.to_owned(),
            capacity_range: Some(csi::CapacityRange { required_bytes: bytes, limit_bytes: 0 }),
            ..Default::default()
        };
        let answer = self.runtime.block_on(self.node.clone().node_expand_volume(timed(request)));
        answer.map(|answer| answer.into_inner().capacity_bytes)
    }

    pub(crate) fn node_id(&self) -> String {
        let answer =
            self.runtime.block_on(self.node.clone().node_get_info(csi::NodeGetInfoRequest {}));
        answer.expect("NodeGetInfo").into_inner().node_id
    }
}

/// Asks a registration socket what it registers, as kubelet does.
pub(crate) fn plugin_info(path: &str) -> registration::PluginInfo {
    let runtime = runtime();
    runtime.block_on(async {
        let mut client =
            registration::registration_client::RegistrationClient::new(channel(path).await);
        client.get_info(registration::InfoRequest {}).await.expect("GetInfo").into_inner()
    })
}

pub(super) fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

pub(super) async fn channel(path: &str) -> Channel {
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    loop {
        let path = path.to_owned();
        let connector = tower::service_fn(move |_| {
            let path = path.clone();
            async move { tokio::net::UnixStream::connect(path).await.map(TokioIo::new) }
        });
        let endpoint = Endpoint::from_static("http://cleat.invalid");
        match endpoint.connect_with_connector(connector).await {
            Ok(channel) => return channel,
            Err(error) => {
                assert!(tokio::time::Instant::now() < deadline, "cannot connect: {error:?}");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// A request with kubelet's timeout.
pub(super) fn timed<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(Duration::from_secs(120));
    request
}
