//! Registers the driver with kubelet, without a sidecar.
//!
//! kubelet watches the directory `plugins_registry`. A socket that appears there registers a driver, and one
//! that disappears removes it, after which neither mount nor unmount works. So the socket file stays when the
//! daemon ends, and the next daemon replaces it by a rename, which kubelet sees as a new registration.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use api::registration_server::{Registration, RegistrationServer};
use cleat_core::error::{Error, Result};
use cleat_csi_api::pluginregistration as api;
use tokio::net::UnixListener;
use tokio::sync::Notify;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};

/// The version that kubelet knows (pkg/volume/csi/csi_plugin.go, `validateVersions`).
const VERSION: &str = "1.0.0";

/// How long after a failed registration the socket is created again. kubelet before 1.36 does not retry.
const RETRY: Duration = Duration::from_secs(10);

/// What kubelet gets to know.
#[derive(Debug, Clone)]
pub(crate) struct Registrar {
    pub(crate) driver: String,
    /// The socket of the CSI services.
    pub(crate) endpoint: PathBuf,
    failed: Arc<Notify>,
}

impl Registrar {
    /// Creates the registrar of a driver that serves CSI at `endpoint`.
    pub(crate) fn new(driver: String, endpoint: PathBuf) -> Self {
        Self { driver, endpoint, failed: Arc::default() }
    }

    /// Serves the registration on `socket` until the task is aborted. After a failed registration the socket
    /// is created again.
    pub(crate) async fn run(self, socket: PathBuf) {
        loop {
            match listen(&socket) {
                Ok(listener) => {
                    let server = RegistrationServer::new(self.clone());
                    let served = tonic::transport::Server::builder()
                        .serve_with_incoming(server, UnixListenerStream::new(listener));
                    tokio::select! {
                        result = served => if let Err(error) = result {
                            tracing::warn!("the registration with kubelet failed: {error}");
                        },
                        () = self.failed.notified() => {}
                    }
                }
                Err(error) => {
                    let hint = error.repair().unwrap_or_default();
                    tracing::warn!("cannot register with kubelet: {}; {hint}", error.report());
                }
            }
            tokio::time::sleep(RETRY).await;
        }
    }
}

/// Listens on `path`, in place of the socket of an earlier daemon. kubelet ignores names that begin with a dot
/// (pluginwatcher), so it sees only the finished socket.
fn listen(path: &Path) -> Result<UnixListener> {
    let failed = |error| {
        Error::from_io(format!("cannot listen on {}", path.display()), error).with_repair(
            "csi.kubelet_dir must be kubelet's --root-dir; csi.register = false turns it off",
        )
    };
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let hidden = path.with_file_name(format!(".{name}.new"));
    let _ = std::fs::remove_file(&hidden);
    let listener = UnixListener::bind(&hidden).map_err(failed)?;
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(&hidden, mode).map_err(failed)?;
    std::fs::rename(&hidden, path).map_err(failed)?;
    Ok(listener)
}

#[tonic::async_trait]
impl Registration for Registrar {
    async fn get_info(
        &self,
        _: Request<api::InfoRequest>,
    ) -> Result<Response<api::PluginInfo>, Status> {
        Ok(Response::new(api::PluginInfo {
            r#type: "CSIPlugin".to_owned(),
            name: self.driver.clone(),
            endpoint: self.endpoint.to_string_lossy().into_owned(),
            supported_versions: vec![VERSION.to_owned()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<api::RegistrationStatus>,
    ) -> Result<Response<api::RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        if status.plugin_registered {
            tracing::info!(driver = self.driver, "registered with kubelet");
        } else {
            tracing::warn!(driver = self.driver, "kubelet refused the driver: {}", status.error);
            self.failed.notify_one();
        }
        Ok(Response::new(api::RegistrationStatusResponse {}))
    }
}
