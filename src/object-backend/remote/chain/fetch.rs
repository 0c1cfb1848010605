//! Calls of the services that give temporary keys, by the crate `object_store`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, AwsCredentialProvider};
use object_store::client::{HttpError, HttpErrorKind};
use tokio::runtime::Builder;
use zeroize::Zeroizing;

use cleat_core::error::{Error, ErrorKind};

use super::super::certificates::read_roots;
use super::super::http::{Http, no_retry};
use super::super::keys::Keys;
use super::super::rejection::{Rejection, certificate_error, chain, plain, rejection};
use super::failure::Failure;
use super::sources::Service;

/// The timeout of a service.
const TIMEOUT: Duration = Duration::from_secs(8);

/// The timeout of the metadata service. It is on the same machine, or there is none.
const INSTANCE_TIMEOUT: Duration = Duration::from_secs(4);

/// Makes a client of a service. Sends nothing.
///
/// # Errors
/// Returns the error of the certificates.
pub(super) fn provider(
    service: &Service,
    trusted: Option<PathBuf>,
) -> Result<AwsCredentialProvider, Failure> {
    use AmazonS3ConfigKey as Key;
    let path = |path: &PathBuf| path.to_string_lossy().into_owned();
    let settings = match service {
        Service::WebIdentity { token_file, role, session, endpoint } => vec![
            (Key::WebIdentityTokenFile, path(token_file)),
            (Key::RoleArn, role.clone()),
            (Key::RoleSessionName, session.clone()),
            (Key::StsEndpoint, endpoint.clone()),
        ],
        Service::Task { path } => vec![(Key::ContainerCredentialsRelativeUri, path.clone())],
        Service::Container { url, token_file } => vec![
            (Key::ContainerCredentialsFullUri, url.clone()),
            (Key::ContainerAuthorizationTokenFile, path(token_file)),
        ],
        Service::Instance { endpoint } => vec![(Key::MetadataEndpoint, endpoint.clone())],
    };
    let is_secure = service.address().starts_with("https:");
    let roots = if is_secure { read_roots(trusted) } else { Ok(Vec::new()) };
    let connector = roots.and_then(|roots| Http::new(&roots, None));
    let connector = connector.map_err(|error| failed(service, &error))?.for_keys();
    // The bucket is not used.
    let builder = AmazonS3Builder::new()
        .with_bucket_name("none")
        .with_retry(no_retry())
        .with_http_connector(connector);
    let with = |builder: AmazonS3Builder, (key, value)| builder.with_config(key, value);
    let built = settings.into_iter().fold(builder, with).build();
    let built = built.map_err(|_| {
        because(service, ErrorKind::InvalidArgument, "its settings are malformed", "")
    })?;
    Ok(Arc::clone(built.credentials()))
}

/// Returns keys that are valid for 5 minutes at least, if the service gives such ones. Blocks until the timeout.
///
/// # Errors
/// Returns why there are none, without any part of a secret.
pub(super) fn keys(provider: &AwsCredentialProvider, service: &Service) -> Result<Keys, Failure> {
    // `object_store` reads the file without these checks.
    if let Some(file) = service.token_file() {
        let token = file.open_with_version().and_then(|(opened, _)| file.read(&opened));
        token.map_err(|error| failed(service, &error))?;
    }
    let timeout = match service {
        Service::Instance { .. } => INSTANCE_TIMEOUT,
        _ => TIMEOUT,
    };
    let provider = Arc::clone(provider);
    // The caller may be a thread of a runtime, which cannot wait for another one.
    let calling = std::thread::Builder::new().name("credentials".to_owned()).spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let found = runtime
            .block_on(async { tokio::time::timeout(timeout, provider.get_credential()).await });
        // A plain drop would wait for the resolution of a name.
        runtime.shutdown_background();
        Ok::<_, std::io::Error>(found)
    });
    let ended = calling.map(|thread| {
        thread.join().unwrap_or_else(|_| Err(std::io::Error::other("the thread has panicked")))
    });
    let found = ended
        .and_then(|found| found)
        .map_err(|error| failed(service, &Error::from_io("cannot start a thread", error)))?;
    let Ok(found) = found else {
        let why = format!("it did not answer in {} s", timeout.as_secs());
        return Err(because(service, ErrorKind::TimedOut, &why, ""));
    };
    let found = found.map_err(|error| meaning(service, &error))?;
    Ok(Keys {
        id: found.key_id.clone(),
        secret: Zeroizing::new(found.secret_key.clone()),
        token: found.token.clone().map(Zeroizing::new),
        origin: None,
    })
}

/// Returns what an error of `object_store` means. Its own text may contain a part of an answer, and so of a secret.
fn meaning(service: &Service, error: &object_store::Error) -> Failure {
    if let Some(rejection) = rejection(error) {
        return refused(service, rejection);
    }
    if let Some(untrusted) = chain(error).find_map(certificate_error) {
        let why = format!("its certificate is not trusted: {untrusted}");
        let repair = "name the file of its authority with ca_file= in the URI";
        return because(service, ErrorKind::PermissionDenied, &why, repair);
    }
    let transport = chain(error).find_map(|error| error.downcast_ref::<HttpError>());
    if transport.is_some_and(|error| !matches!(error.kind(), HttpErrorKind::Decode)) {
        let cause = chain(error).last().map(ToString::to_string).unwrap_or_default();
        return because(service, ErrorKind::Unavailable, &plain(&cause), "");
    }
    because(service, ErrorKind::Unavailable, "its answer has no keys", "")
}

/// Returns the failure of an answer that is no success.
fn refused(service: &Service, rejection: &Rejection) -> Failure {
    let Rejection { status, code, message } = rejection;
    let refused = |why: &str, repair: &str| {
        let why = format!("{why} (HTTP {status}, {code}: {message})");
        because(service, ErrorKind::PermissionDenied, &why, repair)
    };
    match (service, *status, code.as_str()) {
        (Service::WebIdentity { token_file, .. }, _, "ExpiredTokenException" | "ExpiredToken") => {
            let why = format!("the token in {} has expired", token_file.display());
            refused(&why, "write a new token to the file; Kubernetes does this by itself")
        }
        (Service::WebIdentity { role, .. }, _, "AccessDenied") => refused(
            &format!("the token does not permit the role {role}"),
            "permit it in the trust policy of the role",
        ),
        (Service::WebIdentity { token_file, .. }, 400..=499, _) => refused(
            &format!("the token in {} is refused", token_file.display()),
            "check the token, and the identity provider of the account",
        ),
        (Service::Instance { .. }, 404, _) => {
            because(service, ErrorKind::NotFound, "the instance has no role", "")
        }
        (Service::Instance { .. }, 401 | 403 | 405, _) => refused("it is turned off", ""),
        (Service::Task { .. } | Service::Container { .. }, 400..=499, _) => {
            refused("the container is refused", "check the role of the container")
        }
        _ => because(service, ErrorKind::Unavailable, &rejection.to_string(), ""),
    }
}

fn failed(service: &Service, error: &Error) -> Failure {
    because(service, error.kind(), &error.report(), error.repair().unwrap_or_default())
}

fn because(service: &Service, kind: ErrorKind, why: &str, repair: &str) -> Failure {
    let (origin, at) = (service.origin(), service.address());
    let repair = match repair {
        "" => "cleat tries again by itself; credentials_file=/PATH in the URI has precedence",
        repair => repair,
    };
    Failure {
        kind,
        message: format!("cannot get the keys from {origin} at {at}: {why}"),
        repair: repair.to_owned(),
        is_default: matches!(service, Service::Instance { .. }),
    }
}
