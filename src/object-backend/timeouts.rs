//! Limits of calls that wait for the store.

use std::time::{Duration, Instant};

use cleat_core::clock::{Clock, SystemClock};

/// The timeout of opening a volume, and of other calls that wait for the store.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// The timeout of a repair, which reads the whole map several times. Each call of the store has a timeout of its own.
pub(crate) const REPAIR_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// The timeout of a flattening, which copies the volume. Each call of the store has a timeout of its own.
pub(crate) const FLATTEN_TIMEOUT: Duration = Duration::from_secs(7 * 24 * 3600);

/// The timeout of closing a volume that was served. The supervisor waits for longer.
pub(crate) const CLOSE_TIMEOUT: Duration = Duration::from_secs(25);

/// The same for a volume that was opened and is not served.
pub(crate) const DROP_TIMEOUT: Duration = Duration::from_secs(5);

/// The number of failures for which a store waits about a second.
pub(crate) const SECOND: u32 = 5;

/// Returns the moment `timeout` from now.
pub(crate) fn after(timeout: Duration) -> Instant {
    SystemClock.now() + timeout
}
