//! The metrics endpoint: what the supervisor and its volumes count, for Prometheus, over HTTP: in the
//! OpenMetrics text format for who asks for it, else in Prometheus' own, as for curl.
//!
//! Comes in: `GET /metrics` on a unix socket or a TCP port. Goes out: one text, made anew for each
//! scrape from what everybody may see: views of mappings, statistics pages, counts of calls. A volume
//! that is gone is gone from the next text.
//!
//! What may never happen here: a question to a worker, which would cost the data path; a wait for a
//! guard; a connection that lives long. Everything that a client controls is bounded: connections,
//! the size of a request's head, time.
//!
//! `scene` takes what is shown, `families` names and writes it, `calls` counts the control API.

pub(crate) mod calls;
mod families;
mod scene;

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
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::config::{Listen, MetricsConfig};
use crate::executor::Executor;
use calls::Calls;
use cleat_core::error::{Error, Result};

/// Scrapes at one time; more wait in the socket's queue.
const MAX_CONNECTIONS: usize = 16;

/// The longest head of a request, in bytes.
const MAX_HEAD: usize = 16 * 1024;

/// For a request's head to arrive.
const HEAD_LIMIT: Duration = Duration::from_secs(2);

/// For a connection in all: a reader that is slower than this gets no more.
const CONNECTION_LIMIT: Duration = Duration::from_secs(30);

/// What prometheus-client writes.
const OPENMETRICS: HeaderValue =
    HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");

/// What everybody understands.
const CLASSIC: HeaderValue = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");

/// The endpoint, bound and not served yet.
pub(crate) struct Endpoint {
    listener: Listener,
    /// Removed at the end.
    socket: Option<PathBuf>,
}

enum Listener {
    Off,
    Unix(UnixListener),
    Tcp(TcpListener),
}

/// What a scrape shows beyond the executor's mappings.
pub(crate) struct Source {
    /// Everything about mappings and the kernel.
    pub executor: Arc<Executor>,
    /// Calls of the control API.
    pub calls: Arc<Calls>,
    /// Seconds since the epoch.
    pub started_at_s: u64,
}

impl Endpoint {
    /// Binds what the configuration says; a unix socket goes into `runtime_dir`.
    ///
    /// # Errors
    /// When the address is taken, or the socket cannot be made.
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
                let listener = TcpListener::bind(address).await.map_err(|error| {
                    Error::from_io(format!("cannot serve metrics on {address}"), error)
                        .with_repair("choose another metrics.listen, or \"off\"")
                })?;
                (Listener::Tcp(listener), None)
            }
        };
        Ok(Self { listener, socket })
    }

    /// Serves for ever.
    pub(crate) async fn serve(self, source: Source) {
        let source = Arc::new(source);
        let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        // Dropped with the task: the socket goes with the daemon that made it.
        let _socket = Unlink(self.socket);
        match &self.listener {
            Listener::Off => {}
            Listener::Unix(listener) => {
                accept(&source, &room, async || listener.accept().await.map(|(stream, _)| stream))
                    .await;
            }
            Listener::Tcp(listener) => {
                accept(&source, &room, async || listener.accept().await.map(|(stream, _)| stream))
                    .await;
            }
        }
    }

    /// Where a TCP endpoint listens: with port 0, the kernel has chosen one.
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

async fn accept<S, F>(source: &Arc<Source>, room: &Arc<Semaphore>, mut next: impl FnMut() -> F)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    F: Future<Output = std::io::Result<S>>,
{
    loop {
        // The semaphore is never closed.
        let Ok(permit) = Arc::clone(room).acquire_owned().await else { return };
        let stream = match next().await {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!("a connection for metrics could not be accepted: {error}");
                // Out of descriptors, say: no reason to spin.
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
                .header_read_timeout(HEAD_LIMIT)
                .max_buf_size(MAX_HEAD)
                .keep_alive(false)
                .serve_connection(TokioIo::new(stream), service);
            match timeout(CONNECTION_LIMIT, served).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!("a scrape ended early: {error}"),
                Err(_) => tracing::debug!("a scrape took too long"),
            }
        });
    }
}

async fn answer(
    source: &Source,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let plain = |status, text: &'static str| {
        let mut response = Response::new(Full::new(Bytes::from_static(text.as_bytes())));
        *response.status_mut() = status;
        response
    };
    if request.uri().path() != "/metrics" {
        return Ok(plain(StatusCode::NOT_FOUND, "there is only /metrics\n"));
    }
    if request.method() != Method::GET {
        let mut refused = plain(StatusCode::METHOD_NOT_ALLOWED, "metrics are only read\n");
        refused.headers_mut().insert(ALLOW, HeaderValue::from_static("GET"));
        return Ok(refused);
    }
    let scene = scene::take(source).await;
    // Thousands of lines are milliseconds of work: not on the event loop.
    let accepted = request.headers().get_all(ACCEPT).iter();
    let mut accepted = accepted.filter_map(|value| value.to_str().ok());
    let modern = accepted.any(|value| value.contains("application/openmetrics-text"));
    let write = move || {
        let text = families::text(scene)?;
        Ok(if modern { (text, OPENMETRICS) } else { (families::classic(&text), CLASSIC) })
    };
    let text: Result<Result<_, std::fmt::Error>, _> = tokio::task::spawn_blocking(write).await;
    Ok(match text {
        Ok(Ok((text, kind))) => {
            let mut response = Response::new(Full::new(Bytes::from(text)));
            response.headers_mut().insert(CONTENT_TYPE, kind);
            response
        }
        Ok(Err(_)) | Err(_) => {
            plain(StatusCode::INTERNAL_SERVER_ERROR, "the metrics could not be written\n")
        }
    })
}
