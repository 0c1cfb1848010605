//! Serves the control API.

use std::sync::Arc;

use tokio::net::UnixListener;
use tokio::sync::oneshot;
use tokio_stream::wrappers::UnixListenerStream;

use crate::api::service::{ApiService, MAX_MESSAGE, PeerCheck};
use crate::metrics::calls::{Calls, CountCalls};
use cleat_api::v1::node_server::NodeServer;

/// Serves the control API until `stopped` receives a message.
pub(crate) async fn serve(
    service: ApiService,
    listener: UnixListener,
    calls: Arc<Calls>,
    stopped: oneshot::Receiver<()>,
) {
    #[cfg(feature = "fault")]
    let for_faults = service.clone();
    let service = NodeServer::new(service).max_decoding_message_size(MAX_MESSAGE);
    #[cfg(feature = "fault")]
    let service = crate::api::faults::WithFaults::new(service, for_faults);
    let service = tonic::service::interceptor::InterceptedService::new(service, PeerCheck);
    let served = tonic::transport::Server::builder()
        .concurrency_limit_per_connection(256)
        .max_concurrent_streams(256)
        .http2_max_header_list_size(16 * 1024)
        .layer(CountCalls(calls))
        .serve_with_incoming_shutdown(service, UnixListenerStream::new(listener), async {
            // An error means that the daemon has ended.
            let _ = stopped.await;
        });
    if let Err(error) = served.await {
        tracing::error!("the control API failed: {error}");
    }
}
