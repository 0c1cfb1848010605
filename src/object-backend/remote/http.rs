//! HTTP for the crate `object_store`, with hyper and rustls: with a limit for what is read, and with answers that are no
//! success as typed errors.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use async_trait::async_trait;
use futures::TryFutureExt;
use futures::channel::oneshot;
use http::Uri;
use http_body_util::{BodyExt, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector as TcpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody,
    HttpResponse, HttpResponseBody, HttpService,
};
use object_store::{ClientOptions, RetryConfig};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;

use cleat_backend::connector::Connector;
use cleat_backend::uri::invalid;
use cleat_core::error::{Error, ErrorKind, Result};

use super::rejection::Rejection;

/// The timeout of a connect, without TLS.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a connection may be idle. Stores close them after some minutes.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// The maximum number of connections that wait for their next call.
const MAX_IDLE: usize = 32;

/// The maximum length of the body of an answer, in bytes: that of an object, with a margin.
const MAX_ANSWER: usize = 40 << 20;

/// The maximum length of the text of an error, in bytes.
const MAX_ERROR: usize = 64 << 10;

/// The maximum length of an answer with keys, in bytes.
const MAX_KEYS_ANSWER: usize = 64 << 10;

/// Makes the clients of `object_store`.
#[derive(Debug, Clone)]
pub(super) struct Http {
    https: HttpsConnector<Dial>,
    max_idle: usize,
    max_answer: usize,
}

impl Http {
    /// Makes clients that trust the certificates in `roots`, a file in PEM format. `connector` makes their connections
    /// if this process is confined.
    ///
    /// # Errors
    /// Returns `InvalidArgument` if the file has no certificates.
    pub(super) fn new(roots: &[u8], connector: Option<Arc<Connector>>) -> Result<Self> {
        let mut store = RootCertStore::empty();
        let certificates = CertificateDer::pem_slice_iter(roots).filter_map(Result::ok);
        let (_, refused) = store.add_parsable_certificates(certificates);
        if store.is_empty() && !roots.is_empty() {
            let message = format!(
                "the file of trusted certificates has none that can be used, and {refused} others"
            );
            return Err(invalid(message).with_repair(
                "name a file in PEM format: ca_file=/etc/ssl/certs/ca-certificates.crt",
            ));
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| Error::new(ErrorKind::Internal, "no TLS").with_source(error))?
            .with_root_certificates(store)
            .with_no_client_auth();
        let dial = connector.map_or_else(Dial::here, Dial::Elsewhere);
        let builder = HttpsConnectorBuilder::new().with_tls_config(config);
        let https = builder.https_or_http().enable_http1().wrap_connector(dial);
        Ok(Self { https, max_idle: MAX_IDLE, max_answer: MAX_ANSWER })
    }

    /// Returns clients for services that give keys: they keep no connection, because each call has a runtime of its own,
    /// and read only short answers.
    pub(super) fn for_keys(self) -> Self {
        Self { max_idle: 0, max_answer: MAX_KEYS_ANSWER, ..self }
    }
}

/// The engine repeats: it has to know which puts may still be executed.
pub(super) fn no_retry() -> RetryConfig {
    RetryConfig { max_retries: 0, retry_timeout: Duration::ZERO, ..RetryConfig::default() }
}

impl HttpConnector for Http {
    fn connect(&self, _options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = Client::builder(TokioExecutor::new())
            .pool_idle_timeout(IDLE_TIMEOUT)
            .pool_timer(TokioTimer::new())
            .pool_max_idle_per_host(self.max_idle)
            .build(self.https.clone());
        Ok(HttpClient::new(Service { client, max_answer: self.max_answer }))
    }
}

/// Makes connections.
#[derive(Debug, Clone)]
enum Dial {
    /// This process makes them.
    Here(TcpConnector),
    /// Another process makes them, always to the store.
    Elsewhere(Arc<Connector>),
}

impl Dial {
    fn here() -> Self {
        let mut tcp = TcpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
        Self::Here(tcp)
    }
}

impl tower::Service<Uri> for Dial {
    type Response = TokioIo<TcpStream>;
    type Error = Box<dyn std::error::Error + Send + Sync>;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        match self {
            Self::Here(tcp) => tcp.poll_ready(cx).map_err(Into::into),
            Self::Elsewhere(_) => Poll::Ready(Ok(())),
        }
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        match self {
            Self::Here(tcp) => Box::pin(tcp.call(uri).map_err(Into::into)),
            Self::Elsewhere(connector) => {
                let (sender, passed) = oneshot::channel();
                // An error means that nobody waits any more.
                connector.connect(move |stream| drop(sender.send(stream)));
                Box::pin(async { Ok(TokioIo::new(TcpStream::from_std(passed.await??)?)) })
            }
        }
    }
}

/// A client with its connections.
#[derive(Debug)]
struct Service {
    client: Client<HttpsConnector<Dial>, HttpRequestBody>,
    max_answer: usize,
}

#[async_trait]
impl HttpService for Service {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let answer = self.client.request(request).await;
        let answer = answer.map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))?;
        let (head, body) = answer.into_parts();
        if !head.status.is_success() {
            let body = Limited::new(body, MAX_ERROR).collect().await;
            let text = body.map(|body| body.to_bytes()).unwrap_or_default();
            let rejection = Rejection::new(head.status.as_u16(), &text);
            return Err(HttpError::new(HttpErrorKind::Unknown, rejection));
        }
        let body = Limited::new(body, self.max_answer);
        let body = body.map_err(|error| HttpError::new_boxed(HttpErrorKind::Decode, error));
        Ok(HttpResponse::from_parts(head, HttpResponseBody::new(body)))
    }
}
