//! The client of the API server, from a kubeconfig file or the service account of the pod.

use std::path::Path;
use std::sync::Arc;

use cleat_core::error::{Error, ErrorKind, Result};
use hyper::{Method, Request};
use kube::Client;
use kube::client::{Body, ClientBuilder};
use kube::config::{KubeConfigOptions, Kubeconfig};
use tower::util::MapRequestLayer;

use crate::api::CALL_TIMEOUT;
use crate::metrics::Metrics;

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
    Client::try_from(settings(kubeconfig, context).await?).map_err(|error| no_client(&error))
}

/// As [`connect`], with a client whose requests are counted.
///
/// # Errors
/// As [`connect`].
pub(crate) async fn connect_counted(
    kubeconfig: Option<&Path>,
    metrics: Arc<Metrics>,
) -> Result<Client> {
    let builder = ClientBuilder::try_from(settings(kubeconfig, None).await?);
    let count = MapRequestLayer::new(move |request: Request<Body>| {
        metrics.request(verb(&request));
        request
    });
    Ok(builder.map_err(|error| no_client(&error))?.with_layer(&count).build())
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
    let mut settings = match read {
        Some(read) => {
            let what = "cannot use the kubeconfig";
            let context = context.map(str::to_owned);
            let options = KubeConfigOptions { context, ..KubeConfigOptions::default() };
            kube::Config::from_custom_kubeconfig(read, &options)
                .await
                .map_err(|error| invalid(what, &error))?
        }
        None => kube::Config::infer().await.map_err(|error| {
            invalid("cannot find the API server", &error)
                .with_repair("name a kubeconfig file, or run in a pod with a service account")
        })?,
    };
    settings.connect_timeout = Some(CALL_TIMEOUT);
    Ok(settings)
}

/// Returns the error on one line. The errors of the client include the text of their causes.
fn invalid(what: &str, error: &dyn std::error::Error) -> Error {
    let text = error.to_string();
    let words: Vec<&str> = text.split_whitespace().collect();
    Error::new(ErrorKind::InvalidArgument, format!("{what}: {}", words.join(" ")))
}

#[cfg(test)]
mod tests {
    use super::*;

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
