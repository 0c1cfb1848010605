//! Volumes whose key is derived from a passphrase whenever a worker opens them. That takes seconds of
//! the processors, minutes where they are busy, and up to a gigabyte or more of memory: longer limits
//! for these volumes alone, and few of them at a time.

use std::time::Duration;

use tokio::sync::SemaphorePermit;
use tokio::time::{Instant, timeout_at};

use crate::context::Context;
use crate::mapping::Guard;
use crate::status::publish;
use crate::worker_failures::StartFailure;
use cleat_backend::Registry;
use cleat_core::error::{Error, ErrorKind, Result};

/// Volumes that are unlocked at the same time: each for itself would be no faster, and the memory that
/// they take is not bounded by anything else.
pub(crate) const MAX_CONCURRENT: usize = 2;

/// Returns what is added to the limits of opening the volume `uri`, for example because its key is
/// derived from a passphrase.
pub(crate) fn extra_open_time(registry: Registry, uri: &str) -> Duration {
    registry.volume(uri).map_or(Duration::ZERO, |uri| uri.spec().extra_open_time())
}

/// Returns the volume `uri` without its content key, which is enough to claim it.
pub(crate) fn without_content_key(registry: Registry, uri: &str) -> String {
    let volume = registry.volume(uri);
    volume.map_or_else(|_| uri.to_owned(), |uri| uri.without_content_key().to_string())
}

/// The right to have a worker unlock its volume, where there is something to be unlocked; that it is
/// under way shows in the mapping's status until it is mapped.
///
/// # Errors
/// `TimedOut`, as an outage, when others are being unlocked until the deadline.
pub(crate) async fn unlock_permit<'a>(
    cx: &'a Context,
    guard: &mut Guard,
    deadline: Instant,
) -> Result<Option<SemaphorePermit<'a>>> {
    if extra_open_time(cx.registry, &guard.record.uri).is_zero() {
        return Ok(None);
    }
    publish(cx, guard.mapping(), |view| {
        "a new worker unlocks the volume, which takes seconds of the processor's time"
            .clone_into(&mut view.message);
    });
    let Ok(turn) = timeout_at(deadline, cx.unlocks.acquire()).await else {
        let message = "other encrypted volumes were being unlocked until the deadline";
        let error = Error::new(ErrorKind::TimedOut, message);
        let failed = StartFailure { error, pid: 0, died: None };
        return Err(guard.health.worker_failures.start_failed(cx.clock.as_ref(), failed));
    };
    let closed = |_| Error::new(ErrorKind::Unavailable, "the daemon is shutting down");
    turn.map(Some).map_err(closed)
}

#[cfg(test)]
mod tests {
    use super::*;

    const REGISTRY: Registry = Registry::new(&[cleat_backend::mem::BACKEND, cleat_rbd::BACKEND]);

    #[test]
    fn only_what_has_a_key_is_waited_for() {
        let encrypted = "rbd:p/i?id=x&encryption=luks2&passphrase_file=/k";
        assert!(extra_open_time(REGISTRY, encrypted) > Duration::from_secs(60));
        for plain in ["rbd:p/i", "mem:1G", "nonsense"] {
            assert_eq!(extra_open_time(REGISTRY, plain), Duration::ZERO, "{plain}");
            assert_eq!(without_content_key(REGISTRY, plain), plain);
        }
        assert_eq!(without_content_key(REGISTRY, encrypted), "rbd:p/i?id=x");
    }
}
