//! The client of the API server, from a kubeconfig file or the service account of the pod.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cleat_core::error::{Error, ErrorKind, Result};
use hyper::body::Incoming;
use hyper::{Method, Request, Response};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kube::Client;
use kube::client::retry::RetryPolicy;
use kube::client::{Body, ClientBuilder, ConfigExt};
use kube::config::{KubeConfigOptions, Kubeconfig};
use tower::retry::RetryLayer;
use tower::util::{BoxService, MapFutureLayer, MapRequestLayer};
use tower::{BoxError, ServiceBuilder};

use crate::api::CALL_TIMEOUT;
use crate::metrics::Metrics;

/// How long a connection may be silent before the kernel probes it, and the time between two probes. An idle watch sends
/// nothing, so that only a probe shows that the connection is dead.
const PROBE_AFTER: Duration = Duration::from_secs(10);
const PROBE_INTERVAL: Duration = Duration::from_secs(5);

/// The number of probes without an answer after which the kernel closes a connection.
const PROBES: u32 = 3;

/// How long the kernel waits for the acknowledgement of what was sent before it closes a connection.
const UNACKNOWLEDGED_TIMEOUT: Duration = Duration::from_secs(15);

/// How long a request waits for the beginning of its answer. The API server begins the answer to a watch at once.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);

/// The service of the client: sends a request, and returns the answer.
type Requests = BoxService<Request<Body>, Response<Incoming>, BoxError>;

/// Makes the client of the API server. Without `kubeconfig`, uses that of the environment or the service account of
/// the pod. Does not connect.
///
/// # Errors
/// Returns `InvalidArgument` if the file cannot be read, or if there is neither a file nor a service account.
pub(crate) async fn connect(kubeconfig: Option<&Path>) -> Result<Client> {
    connect_as(kubeconfig, None).await
}

/// As [`connect`], with a context of the kubeconfig.
///
/// # Errors
/// As [`connect`]; also if there is no such context.
pub(crate) async fn connect_as(kubeconfig: Option<&Path>, context: Option<&str>) -> Result<Client> {
    Ok(builder(&settings(kubeconfig, context).await?)?.build())
}

/// As [`connect`], with a client whose requests are counted.
///
/// # Errors
/// As [`connect`].
pub(crate) async fn connect_counted(
    kubeconfig: Option<&Path>,
    metrics: Arc<Metrics>,
) -> Result<Client> {
    let builder = builder(&settings(kubeconfig, None).await?)?;
    let count = MapRequestLayer::new(move |request: Request<Body>| {
        metrics.request(verb(&request));
        request
    });
    Ok(builder.with_layer(&count).build())
}

/// Makes a client as kube does, whose connections end when the API server is not there any more.
fn builder(settings: &kube::Config) -> Result<ClientBuilder<Requests>> {
    if settings.proxy_url.is_some() {
        let message = "cannot reach the API server by a proxy: this is not supported";
        return Err(Error::new(ErrorKind::InvalidArgument, message).with_repair(
            "remove proxy-url from the kubeconfig, or unset the variable HTTPS_PROXY",
        ));
    }
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_connect_timeout(Some(CALL_TIMEOUT));
    tcp.set_keepalive(Some(PROBE_AFTER));
    tcp.set_keepalive_interval(Some(PROBE_INTERVAL));
    tcp.set_keepalive_retries(Some(PROBES));
    tcp.set_tcp_user_timeout(Some(UNACKNOWLEDGED_TIMEOUT));
    let failed = |error| no_client(&error);
    let tls = settings.rustls_https_connector_with_connector(tcp).map_err(failed)?;
    let requests: legacy::Client<_, Body> =
        legacy::Client::builder(TokioExecutor::new()).build(tls);
    let retry = settings.default_retry.then(|| RetryLayer::new(RetryPolicy::server_retry()));
    let service = ServiceBuilder::new()
        .layer(BoxService::layer())
        .layer(settings.base_uri_layer())
        .option_layer(retry)
        .option_layer(settings.auth_layer().map_err(failed)?)
        .layer(settings.extra_headers_layer().map_err(failed)?)
        .layer(MapFutureLayer::new(within_time))
        .service(requests);
    Ok(ClientBuilder::new(service, settings.default_namespace.clone()))
}

/// Limits the time until the answer to a request begins.
async fn within_time<T, E: Into<BoxError>>(
    request: impl Future<Output = std::result::Result<T, E>>,
) -> std::result::Result<T, BoxError> {
    match tokio::time::timeout(HEAD_TIMEOUT, request).await {
        Ok(answer) => answer.map_err(Into::into),
        Err(_) => Err("the API server did not answer in time".into()),
    }
}

fn no_client(error: &kube::Error) -> Error {
    invalid("cannot make the client of the API server", error)
}

/// Returns the verb of a request, as the API server's audit log has it; a list is a `get`.
fn verb(request: &Request<Body>) -> &'static str {
    let is_watch = || {
        let query = request.uri().query().unwrap_or_default();
        query.split('&').any(|part| part == "watch=true")
    };
    match *request.method() {
        Method::GET if is_watch() => "watch",
        Method::GET => "get",
        Method::POST => "create",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        _ => "other",
    }
}

async fn settings(kubeconfig: Option<&Path>, context: Option<&str>) -> Result<kube::Config> {
    let read =
        match (kubeconfig, context) {
            (Some(path), _) => {
                let what = format!("cannot read the kubeconfig {}", path.display());
                Some(Kubeconfig::read_from(path).map_err(|error| invalid(&what, &error))?)
            }
            (None, Some(_)) => Some(Kubeconfig::read().map_err(|error| {
                invalid("cannot read the kubeconfig of the environment", &error)
            })?),
            (None, None) => None,
        };
    match read {
        Some(read) => {
            let what = "cannot use the kubeconfig";
            let context = context.map(str::to_owned);
            let options = KubeConfigOptions { context, ..KubeConfigOptions::default() };
            kube::Config::from_custom_kubeconfig(read, &options)
                .await
                .map_err(|error| invalid(what, &error))
        }
        None => kube::Config::infer().await.map_err(|error| {
            invalid("cannot find the API server", &error)
                .with_repair("name a kubeconfig file, or run in a pod with a service account")
        }),
    }
}

/// Returns the error on one line. The errors of the client include the text of their causes.
fn invalid(what: &str, error: &dyn std::error::Error) -> Error {
    let text = error.to_string();
    let words: Vec<&str> = text.split_whitespace().collect();
    Error::new(ErrorKind::InvalidArgument, format!("{what}: {}", words.join(" ")))
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;

    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_request_whose_answer_does_not_begin_fails() {
        let silent = std::future::pending::<std::result::Result<(), BoxError>>();
        let error = within_time(silent).await.unwrap_err();
        assert_eq!(error.to_string(), "the API server did not answer in time");
        assert!(within_time(async { Ok::<_, BoxError>(()) }).await.is_ok());
    }

    #[tokio::test]
    async fn the_kernel_probes_a_connection_on_which_nothing_is_sent() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let settings = kube::Config::new(format!("http://127.0.0.1:{port}").parse().unwrap());
        let client = builder(&settings).unwrap().build();
        let accepted = tokio::task::spawn_blocking(move || {
            let mut connection = listener.accept().unwrap().0;
            connection.read_exact(&mut [0; 4]).unwrap();
            connection
        });
        let asking = tokio::spawn(async move { client.apiserver_version().await });
        let _connection = accepted.await.unwrap();
        // The column `tr` is 02 while only a probe is due. Until the request is acknowledged, it is another one.
        let deadline = Instant::now() + CALL_TIMEOUT;
        while timer_of(port) != "02" {
            assert!(Instant::now() < deadline, "the kernel does not probe the connection");
            tokio::task::yield_now().await;
        }
        asking.abort();
    }

    /// Returns the kind of the kernel's timer of the connection to a port of this machine.
    fn timer_of(port: u16) -> String {
        let connections = std::fs::read_to_string("/proc/net/tcp").unwrap();
        let to = format!("0100007F:{port:04X}");
        let mut all = connections.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let known = all.find(|columns| columns.get(2) == Some(&to.as_str()));
        known.map(|columns| columns[5][..2].to_owned()).unwrap_or_default()
    }

    #[test]
    fn a_watch_is_told_from_a_read() {
        let request = |method: &str, uri: &str| {
            let builder = Request::builder().method(method).uri(uri);
            verb(&builder.body(Body::empty()).unwrap())
        };
        assert_eq!(request("GET", "/api/v1/nodes?&watch=true&resourceVersion=1"), "watch");
        assert_eq!(request("GET", "/api/v1/nodes?limit=500"), "get");
        assert_eq!(request("PUT", "/api/v1/nodes/a"), "update");
    }
}
