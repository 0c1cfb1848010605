//! Serves the driver on its socket.

use std::path::Path;
use std::time::Duration;

use cleat_core::error::Result;
use cleat_node::control_socket::{PeerCheck, listen};
use cleat_node::executor::Pending;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::service::interceptor::InterceptedService;

use crate::driver::Driver;
use crate::paths::make_directory;
use crate::registration::Registrar;
use crate::services::Services;

/// How long after a failure the socket is created again.
const RETRY: Duration = Duration::from_secs(5);

impl Driver {
    /// Serves CSI, and registers with kubelet if the configuration says so, until the task is aborted. If the
    /// socket cannot be made, tries again: the devices of this node work without CSI.
    pub fn serve(self) -> Pending<'static, ()> {
        Box::pin(self.serve_always())
    }

    async fn serve_always(self) {
        let socket = self.config.socket();
        loop {
            match bind(&socket).await {
                Ok(listener) => {
                    tracing::info!(socket = %socket.display(), driver = self.config.driver, "serving CSI");
                    tokio::select! {
                        () = self.serve_on(listener) => {}
                        () = self.register() => {}
                    }
                }
                Err(error) => {
                    let hint = error.repair().unwrap_or("check csi.kubelet_dir and csi.socket");
                    tracing::error!("cannot serve CSI: {}; {hint}", error.report());
                }
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    /// Registers with kubelet if the configuration says so. Never returns.
    async fn register(&self) {
        if self.config.register {
            let registrar = Registrar::new(self.config.driver.clone(), self.config.socket());
            registrar.run(self.config.registration_socket()).await;
        }
        std::future::pending().await
    }

    async fn serve_on(&self, listener: UnixListener) {
        let services = InterceptedService::new(Services::of(self), PeerCheck);
        let served = tonic::transport::Server::builder()
            .concurrency_limit_per_connection(256)
            .max_concurrent_streams(256)
            .http2_max_header_list_size(16 * 1024)
            .serve_with_incoming(services, UnixListenerStream::new(listener));
        if let Err(error) = served.await {
            tracing::error!("CSI failed: {error}");
        }
    }
}

async fn bind(socket: &Path) -> Result<UnixListener> {
    if let Some(parent) = socket.parent() {
        make_directory(parent)?;
    }
    listen(socket).await
}
