//! Calls of the API server: each has a deadline, and an error names what has failed.

use std::future::Future;
use std::time::{Duration, UNIX_EPOCH};

use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_grants::object::Time;
use k8s_openapi::jiff::Timestamp;

/// The timeout of a call.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(15);

/// Waits for a call of the API server. `what` says what cannot be done if it fails.
///
/// # Errors
/// Returns `Aborted` for a write that conflicts with another one, `AlreadyExists`, `NotFound` and
/// `PermissionDenied` as the API server answers, `TimedOut` after [`CALL_TIMEOUT`], `Unavailable` if it cannot
/// be reached, and `Internal` if its answer cannot be read.
pub(crate) async fn call<T>(
    what: impl FnOnce() -> String,
    request: impl Future<Output = kube::Result<T>>,
) -> Result<T> {
    match tokio::time::timeout(CALL_TIMEOUT, request).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(error)) => Err(failed(what(), error)),
        Err(_) => {
            let message = format!("{}: the API server did not answer in time", what());
            Err(Error::new(ErrorKind::TimedOut, message))
        }
    }
}

/// Converts an error of the client.
pub(crate) fn failed(what: String, error: kube::Error) -> Error {
    match error {
        kube::Error::Api(status) => {
            let kind = kind_of(status.code, &status.reason);
            let error = Error::new(kind, format!("{what}: {}", status.message));
            match kind {
                ErrorKind::PermissionDenied => {
                    error.with_repair("check the rights of the controller's service account")
                }
                _ => error,
            }
        }
        // The API server has answered.
        kube::Error::SerdeError(_) => Error::new(ErrorKind::Internal, what).with_source(error),
        error => Error::new(ErrorKind::Unavailable, what).with_source(error),
    }
}

fn kind_of(code: u16, reason: &str) -> ErrorKind {
    match code {
        400 | 422 => ErrorKind::InvalidArgument,
        401 | 403 => ErrorKind::PermissionDenied,
        404 => ErrorKind::NotFound,
        409 if reason == "AlreadyExists" => ErrorKind::AlreadyExists,
        409 => ErrorKind::Aborted,
        504 => ErrorKind::TimedOut,
        429 | 500.. => ErrorKind::Unavailable,
        _ => ErrorKind::Internal,
    }
}

/// Returns whether a write failed because the object has changed, or exists, or does not exist any more: it must
/// be read again.
pub(crate) fn is_conflict(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Aborted | ErrorKind::AlreadyExists | ErrorKind::NotFound)
}

/// Returns the message of an error for the status of an object. It ends with the repair.
pub(crate) fn message(error: &Error) -> String {
    match error.repair() {
        Some(repair) => format!("{}; to repair: {repair}", error.report()),
        None => error.report(),
    }
}

/// Returns the gRPC code of an error, as the CSI driver answers it.
pub(crate) fn grpc_code(kind: ErrorKind) -> i32 {
    match kind {
        ErrorKind::InvalidArgument => 3,
        ErrorKind::TimedOut => 4,
        ErrorKind::NotFound => 5,
        ErrorKind::AlreadyExists => 6,
        ErrorKind::PermissionDenied => 7,
        ErrorKind::NoSpace => 8,
        ErrorKind::InUse | ErrorKind::Unsupported | ErrorKind::Fenced | ErrorKind::Replaced => 9,
        ErrorKind::Aborted => 10,
        ErrorKind::Internal => 13,
        ErrorKind::Unavailable => 14,
    }
}

/// Returns the present time.
pub(crate) fn now() -> Time {
    Time(SystemClock.unix_s())
}

/// Returns the present time in the form of the API.
pub(crate) fn timestamp() -> Timestamp {
    let since = SystemClock.wall().duration_since(UNIX_EPOCH).unwrap_or_default();
    let micros = i64::try_from(since.as_micros()).unwrap_or(i64::MAX);
    Timestamp::from_microsecond(micros).unwrap_or(Timestamp::UNIX_EPOCH)
}

/// Converts a time of the API.
pub(crate) fn seconds(time: Timestamp) -> Time {
    Time(u64::try_from(time.as_second()).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_that_cannot_be_read_is_no_outage() {
        let error = serde_json::from_str::<u8>("x").unwrap_err();
        let failed = failed("cannot read".to_owned(), kube::Error::SerdeError(error));
        assert_eq!(failed.kind(), ErrorKind::Internal);
    }

    #[test]
    fn a_conflict_is_told_from_an_existing_object() {
        assert_eq!(kind_of(409, "Conflict"), ErrorKind::Aborted);
        assert_eq!(kind_of(409, "AlreadyExists"), ErrorKind::AlreadyExists);
        assert_eq!(kind_of(503, ""), ErrorKind::Unavailable);
        assert!(is_conflict(&Error::new(ErrorKind::NotFound, "")));
    }
}
