//! The client of the API server, from a kubeconfig file or the service account of the pod.

use std::path::Path;

use cleat_core::error::{Error, ErrorKind, Result};
use kube::Client;
use kube::config::{KubeConfigOptions, Kubeconfig};

use crate::api::CALL_TIMEOUT;

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
    Client::try_from(settings)
        .map_err(|error| invalid("cannot make the client of the API server", &error))
}

/// Returns the error on one line. The errors of the client include the text of their causes.
fn invalid(what: &str, error: &dyn std::error::Error) -> Error {
    let text = error.to_string();
    let words: Vec<&str> = text.split_whitespace().collect();
    Error::new(ErrorKind::InvalidArgument, format!("{what}: {}", words.join(" ")))
}
