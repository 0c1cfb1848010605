//! The metrics endpoint for Prometheus, and the liveness endpoint for kubelet, over HTTP. Clients that accept the OpenMetrics text format get it;
//! others, such as curl, get Prometheus' older text format.
//!
//! - In: `GET /metrics` or `GET /healthz` on a unix socket or a TCP port.
//! - Out: one text per scrape, made from the views of mappings, the statistics pages and the counts of
//!   calls. A volume that was unmapped is not in the next text.
//!
//! What may never happen here: a request to a worker, which would delay the data path; a wait for a guard;
//! a long-lived connection. Everything that a client controls is limited: the number of connections, the
//! size of a request's head, and the time.
//!
//! `scrape` collects the values, `families` names and formats them, `calls` counts calls of the control API, `listener`
//! binds the TCP port.

pub(crate) mod calls;
mod families;
mod listener;
mod scrape;

use std::convert::Infallible;
use std::future::Future;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::config::{Listen, MetricsConfig};
use crate::executor::Executor;
use calls::Calls;
use cleat_core::error::{Error, Result};
use scrape::Scrape;

/// The maximum number of scrapes in progress; more wait in the socket's queue.
const MAX_CONNECTIONS: usize = 16;

/// The maximum size of a request's head, in bytes.
const MAX_HEAD: usize = 16 * 1024;

/// The timeout for a request's head to arrive.
const HEAD_TIMEOUT: Duration = Duration::from_secs(2);

/// The timeout of a whole connection. A slower client gets an incomplete answer.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(30);

/// The timeout for connecting to the CSI socket. kubelet gives a probe 1 s by default.
const CSI_TIMEOUT: Duration = Duration::from_millis(800);

/// The content type of the text that prometheus-client writes.
const OPENMETRICS: HeaderValue =
    HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");

/// The content type of Prometheus' older text format, which all clients read.
const CLASSIC: HeaderValue = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");

/// An endpoint that is bound and not served yet.
pub(crate) struct Endpoint {
    listener: Listener,
    /// The path of the unix socket, which is removed at the end.
    socket: Option<PathBuf>,
}

enum Listener {
    Off,
    Unix(UnixListener),
    Tcp(TcpListener),
}

/// The sources of the values of a scrape.
pub(crate) struct Source {
    /// The mappings and the kernel calls.
    pub executor: Arc<Executor>,
    /// The counts of the control API's calls.
    pub calls: Arc<Calls>,
    /// When the daemon started, in seconds since the epoch.
    pub started_at_s: u64,
    /// The socket of the CSI services, if they are enabled.
    pub csi_socket: Option<PathBuf>,
}

impl Endpoint {
    /// Binds the configured address. A unix socket is created in `runtime_dir`.
    ///
    /// # Errors
    /// Returns an error if the address is in use or the socket cannot be created.
    pub(crate) async fn bind(config: &MetricsConfig, runtime_dir: &Path) -> Result<Self> {
        let (listener, socket) = match &config.listen {
            Listen::Off => (Listener::Off, None),
            Listen::Unix => {
                let path = runtime_dir.join("metrics.sock");
                let listener = crate::control_socket::listen(&path).await?;
                let mode = std::fs::Permissions::from_mode(config.socket_mode);
                std::fs::set_permissions(&path, mode).map_err(|error| {
                    Error::from_io(format!("cannot set the mode of {}", path.display()), error)
                })?;
                (Listener::Unix(listener), Some(path))
            }
            Listen::Tcp(address) => {
                let listener = listener::listen(*address).await.map_err(|error| {
                    Error::from_io(format!("cannot serve metrics on {address}"), error)
                        .with_repair("choose another metrics.listen, or \"off\"")
                })?;
                (Listener::Tcp(listener), None)
            }
        };
        Ok(Self { listener, socket })
    }

    /// Serves until the task is aborted.
    pub(crate) async fn serve(self, source: Source) {
        let source = Arc::new(source);
        let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        // Removes the socket when the task ends.
        let _socket = Unlink(self.socket);
        match &self.listener {
            Listener::Off => {}
            Listener::Unix(listener) => {
                accept(&source, &connections, async || Ok(listener.accept().await?.0)).await;
            }
            Listener::Tcp(listener) => {
                accept(&source, &connections, async || Ok(listener.accept().await?.0)).await;
            }
        }
    }

    /// Returns the address of a TCP endpoint. If the configured port is 0, the kernel has chosen one.
    pub(crate) fn address(&self) -> Option<std::net::SocketAddr> {
        match &self.listener {
            Listener::Tcp(listener) => listener.local_addr().ok(),
            Listener::Off | Listener::Unix(_) => None,
        }
    }
}

/// Removes a socket when dropped.
struct Unlink(Option<PathBuf>);

impl Drop for Unlink {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            let _ = std::fs::remove_file(path);
        }
    }
}

async fn accept<S, F>(
    source: &Arc<Source>,
    connections: &Arc<Semaphore>,
    mut next: impl FnMut() -> F,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    F: Future<Output = std::io::Result<S>>,
{
    loop {
        // The semaphore is never closed.
        let Ok(permit) = Arc::clone(connections).acquire_owned().await else { return };
        let stream = match next().await {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!("cannot accept a connection for metrics: {error}");
                // For example, no descriptors are free: the delay avoids a busy loop.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let source = Arc::clone(source);
        tokio::spawn(async move {
            let _permit = permit;
            let service = service_fn(|request| answer(&source, request));
            let served = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_TIMEOUT)
                .max_buf_size(MAX_HEAD)
                .keep_alive(false)
                .serve_connection(TokioIo::new(stream), service);
            match timeout(CONNECTION_TIMEOUT, served).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!("a scrape failed: {error}"),
                Err(_) => tracing::debug!("a scrape timed out"),
            }
        });
    }
}

async fn answer(
    source: &Source,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let path = request.uri().path();
    if !["/metrics", "/healthz"].contains(&path) {
        let text = "not found: the paths are /metrics and /healthz\n";
        return Ok(plain(StatusCode::NOT_FOUND, text));
    }
    if request.method() != Method::GET {
        let mut refused = plain(StatusCode::METHOD_NOT_ALLOWED, "method not allowed: use GET\n");
        refused.headers_mut().insert(ALLOW, HeaderValue::from_static("GET"));
        return Ok(refused);
    }
    Ok(if path == "/healthz" { health(source).await } else { metrics(source, &request).await })
}

fn plain(status: StatusCode, text: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(text.into()));
    *response.status_mut() = status;
    response
}

/// Answers whether the daemon works: this loop runs, and CSI, which it also runs, can be reached if it is enabled. A
/// volume that does not work is not a reason to restart the daemon.
async fn health(source: &Source) -> Response<Full<Bytes>> {
    let Some(socket) = &source.csi_socket else { return plain(StatusCode::OK, "ok\n") };
    let cause = match timeout(CSI_TIMEOUT, UnixStream::connect(socket)).await {
        Ok(Ok(_)) => return plain(StatusCode::OK, "ok\n"),
        Ok(Err(error)) => error.to_string(),
        Err(_) => "it accepts no connection".to_owned(),
    };
    let text = format!("the CSI socket {} does not work: {cause}\n", socket.display());
    plain(StatusCode::SERVICE_UNAVAILABLE, text)
}

async fn metrics(source: &Source, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    let scrape = Scrape::collect(source).await;
    // Formatting thousands of lines takes milliseconds, so it must not run on the event loop.
    let accepted = request.headers().get_all(ACCEPT).iter();
    let mut accepted = accepted.filter_map(|value| value.to_str().ok());
    let modern = accepted.any(|value| value.contains("application/openmetrics-text"));
    let write = move || {
        let text = families::text(scrape)?;
        Ok(if modern { (text, OPENMETRICS) } else { (families::classic(&text), CLASSIC) })
    };
    let text: Result<Result<_, std::fmt::Error>, _> = tokio::task::spawn_blocking(write).await;
    match text {
        Ok(Ok((text, kind))) => {
            let mut response = Response::new(Full::new(Bytes::from(text)));
            response.headers_mut().insert(CONTENT_TYPE, kind);
            response
        }
        Ok(Err(_)) | Err(_) => {
            plain(StatusCode::INTERNAL_SERVER_ERROR, "cannot format the metrics\n")
        }
    }
}
