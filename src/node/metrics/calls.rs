//! Counts the calls of the control API by method and code, as a layer around the service.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use tonic::Code;
use tonic::codegen::http::{Request, Response};
use tower::{Layer, Service};

/// The number of calls by method and code.
#[derive(Debug, Default)]
pub(crate) struct Calls(Mutex<BTreeMap<(String, &'static str), u64>>);

/// The maximum number of pairs of method and code. A client may send any method name.
const MAX_COUNTS: usize = 512;

impl Calls {
    /// Returns all counts, sorted by method and code.
    pub(crate) fn counts(&self) -> Vec<((String, &'static str), u64)> {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counts.iter().map(|(key, count)| (key.clone(), *count)).collect()
    }

    fn count(&self, method: &str, code: Code) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A code other than UNIMPLEMENTED means that the method exists.
        let known = code != Code::Unimplemented || counts.len() < MAX_COUNTS / 2;
        let method = if known { method } else { "other" };
        let key = (method.to_owned(), name(code));
        if counts.len() < MAX_COUNTS || counts.contains_key(&key) {
            *counts.entry(key).or_default() += 1;
        }
    }
}

/// The layer that counts calls.
#[derive(Debug, Clone)]
pub(crate) struct CountCalls(pub Arc<Calls>);

impl<S> Layer<S> for CountCalls {
    type Service = CountedService<S>;

    fn layer(&self, inner: S) -> CountedService<S> {
        CountedService { inner, calls: Arc::clone(&self.0) }
    }
}

/// A service whose calls are counted.
#[derive(Debug, Clone)]
pub(crate) struct CountedService<S> {
    inner: S,
    calls: Arc<Calls>,
}

impl<S, B, R> Service<Request<B>> for CountedService<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    S::Future: Send + 'static,
    S::Error: Send,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // The path has the form /cleat.v1.Node/Map.
        let path = request.uri().path();
        let method = path.rsplit('/').next().unwrap_or_default().to_owned();
        let calls = Arc::clone(&self.calls);
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await;
            if let Ok(response) = &answer {
                // Without the header, the code follows the body. Then the call succeeded, or it is a stream
                // that began successfully.
                let status = response.headers().get("grpc-status");
                let code = status.map_or(Code::Ok, |value| Code::from_bytes(value.as_bytes()));
                calls.count(&method, code);
            }
            answer
        })
    }
}

fn name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_methods_use_a_limited_number_of_counts() {
        let calls = Calls::default();
        for n in 0..2000 {
            calls.count(&format!("Method{n}"), Code::Unimplemented);
        }
        calls.count("Map", Code::Ok);
        calls.count("Map", Code::Ok);
        let counts = calls.counts();
        assert!(counts.len() <= MAX_COUNTS);
        assert!(counts.contains(&(("Map".to_owned(), "OK"), 2)));
        assert_eq!(counts.iter().map(|(_, count)| count).sum::<u64>(), 2002);
    }
}
