//! The metrics and health endpoints, over HTTP: `/metrics`, `/healthz` (the process works) and `/readyz` (the
//! process is the leader or waits to become it). Everything that a client controls is limited.

use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use cleat_core::error::{Error, Result};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;

use crate::metrics::Metrics;

/// The maximum number of requests in progress; more wait in the socket's queue.
const MAX_CONNECTIONS: usize = 16;

/// The maximum size of a request's head, in bytes.
const MAX_HEAD: usize = 16 * 1024;

/// The timeout for a request's head to arrive.
const HEAD_TIMEOUT: Duration = Duration::from_secs(2);

/// The timeout of a whole connection.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);

const OPENMETRICS: HeaderValue =
    HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");

/// What the process does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// It has not reached the API server yet.
    Starting,
    /// Another process is the leader, or none is yet.
    Standby,
    /// It is the leader, and reads the objects.
    Syncing,
    /// It is the leader.
    Leader,
}

/// An endpoint that is bound.
#[derive(Debug)]
pub(crate) struct Server(TcpListener);

impl Server {
    /// Binds `address`. `[::]` stands for all addresses, also those of IPv4, and also where the kernel has no IPv6.
    ///
    /// # Errors
    /// Returns an error if the address is in use.
    pub(crate) async fn bind(address: SocketAddr) -> Result<Self> {
        Self::bind_with(address, TcpListener::bind).await
    }

    async fn bind_with(
        address: SocketAddr,
        bind: impl AsyncFn(SocketAddr) -> io::Result<TcpListener>,
    ) -> Result<Self> {
        let mut bound = bind(address).await;
        // Where the address is in use, the one of IPv4 alone would be half of what was asked for.
        let is_free = |error: &io::Error| error.kind() != io::ErrorKind::AddrInUse;
        if address.ip() == Ipv6Addr::UNSPECIFIED && bound.as_ref().is_err_and(is_free) {
            bound = bind((Ipv4Addr::UNSPECIFIED, address.port()).into()).await;
        }
        let listener = bound.map_err(|error| {
            Error::from_io(format!("cannot serve metrics and health on {address}"), error)
                .with_repair("choose another --listen")
        })?;
        let bound = listener.local_addr().unwrap_or(address);
        tracing::info!(address = %bound, "serving metrics and health");
        Ok(Self(listener))
    }

    /// Serves until the task is aborted.
    pub(crate) async fn serve(self, metrics: Arc<Metrics>, role: watch::Receiver<Role>) {
        let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        loop {
            // The semaphore is never closed.
            let Ok(permit) = Arc::clone(&connections).acquire_owned().await else { return };
            let stream = match self.0.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!("cannot accept a connection for metrics: {error}");
                    // For example, no descriptors are free: the delay avoids a busy loop.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let (metrics, role) = (Arc::clone(&metrics), role.clone());
            tokio::spawn(async move {
                let _permit = permit;
                let service = service_fn(|request| {
                    let response = answer(&request, &metrics, *role.borrow());
                    async { Ok::<_, Infallible>(response) }
                });
                let served = http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(HEAD_TIMEOUT)
                    .max_buf_size(MAX_HEAD)
                    .keep_alive(false)
                    .serve_connection(TokioIo::new(stream), service);
                match timeout(CONNECTION_TIMEOUT, served).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => tracing::debug!("a request for metrics failed: {error}"),
                    Err(_) => tracing::debug!("a request for metrics timed out"),
                }
            });
        }
    }
}

fn answer(request: &Request<Incoming>, metrics: &Metrics, role: Role) -> Response<Full<Bytes>> {
    let path = request.uri().path();
    if !["/metrics", "/healthz", "/readyz"].contains(&path) {
        let text = "not found: the paths are /metrics, /healthz and /readyz\n";
        return plain(StatusCode::NOT_FOUND, text.to_owned());
    }
    if request.method() != Method::GET {
        let text = "method not allowed: use GET\n".to_owned();
        let mut refused = plain(StatusCode::METHOD_NOT_ALLOWED, text);
        refused.headers_mut().insert(ALLOW, HeaderValue::from_static("GET"));
        return refused;
    }
    match (path, role) {
        ("/metrics", _) => match metrics.text() {
            Ok(text) => {
                let mut response = plain(StatusCode::OK, text);
                response.headers_mut().insert(CONTENT_TYPE, OPENMETRICS);
                response
            }
            Err(error) => plain(StatusCode::INTERNAL_SERVER_ERROR, format!("{}\n", error.report())),
        },
        ("/healthz", _) => plain(StatusCode::OK, "ok\n".to_owned()),
        (_, Role::Leader) => plain(StatusCode::OK, "leader\n".to_owned()),
        (_, Role::Standby) => plain(StatusCode::OK, "standby\n".to_owned()),
        (_, Role::Syncing) => {
            plain(StatusCode::SERVICE_UNAVAILABLE, "leader, reading the objects\n".to_owned())
        }
        (_, Role::Starting) => {
            plain(StatusCode::SERVICE_UNAVAILABLE, "waiting for the API server\n".to_owned())
        }
    }
}

fn plain(status: StatusCode, text: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: &str = "[::]:0";

    #[tokio::test]
    async fn all_addresses_include_those_of_ipv4() {
        let server = Server::bind(ALL.parse().unwrap()).await.unwrap();
        let port = server.0.local_addr().unwrap().port();
        tokio::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
    }

    #[tokio::test]
    async fn without_ipv6_all_addresses_are_those_of_ipv4() {
        let without_ipv6 = async |address: SocketAddr| match address {
            SocketAddr::V4(_) => TcpListener::bind(address).await,
            // EAFNOSUPPORT.
            SocketAddr::V6(_) => Err(io::Error::from_raw_os_error(97)),
        };
        let server = Server::bind_with(ALL.parse().unwrap(), without_ipv6).await.unwrap();
        assert!(server.0.local_addr().unwrap().is_ipv4());
        // One address of IPv6 is meant.
        Server::bind_with("[::1]:0".parse().unwrap(), without_ipv6).await.unwrap_err();
    }
}
