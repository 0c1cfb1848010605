//! Limits for encrypted volumes. Each worker that opens one derives the key from a passphrase. That takes
//! seconds of processor time, minutes on a busy machine, and a gigabyte of memory or more. Therefore these
//! volumes have longer timeouts, and only few are opened at the same time.

use std::time::Duration;

use tokio::sync::SemaphorePermit;
use tokio::time::{Instant, timeout_at};

use crate::context::Context;
use crate::mapping::Guard;
use crate::status::publish;
use crate::worker_failures::StartFailure;
use cleat_backend::Registry;
use cleat_core::error::{Error, ErrorKind, Result};

/// The maximum number of volumes that are unlocked at the same time. More would not be faster, and nothing
/// else limits the memory that they take.
pub(crate) const MAX_CONCURRENT: usize = 2;

/// Returns the time that is added to the timeouts of opening the volume `uri`, for example because its key
/// is derived from a passphrase.
pub(crate) fn extra_open_time(registry: Registry, uri: &str) -> Duration {
    registry.volume(uri).map_or(Duration::ZERO, |uri| uri.spec().extra_open_time())
}

/// Returns the volume `uri` without its content key, which is enough to claim it.
pub(crate) fn without_content_key(registry: Registry, uri: &str) -> String {
    let volume = registry.volume(uri);
    volume.map_or_else(|_| uri.to_owned(), |uri| uri.without_content_key().to_string())
}

/// Waits for the permit to unlock the volume of a mapping; returns `None` if it is not encrypted. The
/// message of the mapping shows that the volume is being unlocked.
///
/// # Errors
/// Returns `TimedOut`, and counts it as an outage, if other volumes are being unlocked until `deadline`.
pub(crate) async fn unlock_permit<'a>(
    cx: &'a Context,
    guard: &mut Guard,
    deadline: Instant,
) -> Result<Option<SemaphorePermit<'a>>> {
    if extra_open_time(cx.registry, &guard.record.uri).is_zero() {
        return Ok(None);
    }
    publish(cx, guard.mapping(), |view| {
        "a new worker is unlocking the volume, which takes seconds of processor time"
            .clone_into(&mut view.message);
    });
    let Ok(permit) = timeout_at(deadline, cx.unlocks.acquire()).await else {
        let message = "other encrypted volumes were being unlocked until the deadline";
        let error = Error::new(ErrorKind::TimedOut, message);
        let failed = StartFailure { error, pid: 0, died: None };
        return Err(guard.health.worker_failures.start_failed(cx.clock.as_ref(), failed));
    };
    let closed = |_| Error::new(ErrorKind::Unavailable, "the daemon is shutting down");
    permit.map(Some).map_err(closed)
}

#[cfg(test)]
mod tests {
    use super::*;

    const REGISTRY: Registry = Registry::new(&[cleat_backend::mem::BACKEND, cleat_rbd::BACKEND]);

    #[test]
    fn only_encrypted_volumes_have_extra_open_time() {
        let encrypted = "rbd:p/i?id=x&encryption=luks2&passphrase_file=/k";
        assert!(extra_open_time(REGISTRY, encrypted) > Duration::from_secs(60));
        for plain in ["rbd:p/i", "mem:1G", "nonsense"] {
            assert_eq!(extra_open_time(REGISTRY, plain), Duration::ZERO, "{plain}");
            assert_eq!(without_content_key(REGISTRY, plain), plain);
        }
        assert_eq!(without_content_key(REGISTRY, encrypted), "rbd:p/i?id=x");
    }
}
