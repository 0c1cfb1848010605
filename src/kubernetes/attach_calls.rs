//! ControllerPublish and ControllerUnpublish for external-attacher: joins the calls of the controller
//! (`cleat_kube::Calls`) with the CSI socket.

use std::collections::BTreeMap;
use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;

use cleat_core::error::Result;
use cleat_csi::{Attacher, Published, Usage, serve_attacher};
use cleat_grants::object::Mode;
use cleat_kube::{CallServer, Calls, Publish};
use tokio::time::Instant;

/// The CSI socket of a controller.
#[derive(Debug, Clone)]
pub struct AttachSocket {
    /// The path of the socket. Its directory must belong to the user of this process.
    pub path: PathBuf,
    /// The name of the CSI driver.
    pub driver: String,
}

impl CallServer for AttachSocket {
    fn serve(&self, calls: Arc<dyn Calls>) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let Self { path, driver } = self.clone();
        Box::pin(async move { serve_attacher(&path, &driver, Arc::new(OfLeader(calls))).await })
    }
}

#[derive(Debug)]
struct OfLeader(Arc<dyn Calls>);

#[tonic::async_trait]
impl Attacher for OfLeader {
    async fn publish(
        &self,
        volume: &str,
        node_id: &str,
        usage: Usage,
        deadline: Instant,
    ) -> Result<BTreeMap<String, String>> {
        let mode = match usage {
            Usage::Writer => Mode::ReadWrite,
            Usage::SharedWriter => Mode::SharedReadWrite,
            Usage::Reader => Mode::ReadOnly,
        };
        let call = Publish { volume: volume.to_owned(), node_id: node_id.to_owned(), mode };
        self.0.publish(&call, deadline).await
    }

    async fn unpublish(
        &self,
        volume: &str,
        node_id: Option<&str>,
        deadline: Instant,
    ) -> Result<()> {
        self.0.unpublish(volume, node_id, deadline).await
    }

    fn published(&self) -> Result<Published> {
        self.0.published()
    }
}
