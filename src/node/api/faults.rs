//! The service that injects faults, `proto/cleat/v1/fault.proto`. It uses the socket of the control API. For
//! tests.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use cleat_api::v1 as api;
use cleat_api::v1::faults_server::{Faults, FaultsServer, SERVICE_NAME};
use tonic::codegen::http::Request as HttpRequest;
use tonic::{Request, Response, Status};
use tower::Service;

use super::service::ApiService;

/// Routes each call to the control API or to the service that injects faults.
#[derive(Clone)]
pub(crate) struct WithFaults<S> {
    node: S,
    faults: FaultsServer<ApiService>,
}

impl<S> WithFaults<S> {
    /// Adds fault injection for `service` to the service `node`.
    pub(crate) fn new(node: S, service: ApiService) -> Self {
        Self { node, faults: FaultsServer::new(service) }
    }
}

impl<S, B> Service<HttpRequest<B>> for WithFaults<S>
where
    S: Service<HttpRequest<B>>,
    S::Future: Send + 'static,
    FaultsServer<ApiService>: Service<HttpRequest<B>, Response = S::Response, Error = S::Error>,
    <FaultsServer<ApiService> as Service<HttpRequest<B>>>::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        // The generated service is always ready.
        self.node.poll_ready(context)
    }

    fn call(&mut self, request: HttpRequest<B>) -> Self::Future {
        let path = request.uri().path().trim_start_matches('/');
        if path.split('/').next() == Some(SERVICE_NAME) {
            Box::pin(self.faults.call(request))
        } else {
            Box::pin(self.node.call(request))
        }
    }
}

#[tonic::async_trait]
impl Faults for ApiService {
    async fn set_fault(
        &self,
        request: Request<api::SetFaultRequest>,
    ) -> Result<Response<api::SetFaultResponse>, Status> {
        let api::SetFaultRequest { target, plan } = request.into_inner();
        self.set_fault(target, plan).await
    }
}
