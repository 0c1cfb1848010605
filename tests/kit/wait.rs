//! Waiting for a condition, with a deadline and a message.

use std::time::{Duration, Instant};

/// The time limit of waits that have no limit of their own. It is far longer than any of them takes on
/// a busy machine.
pub const LIMIT: Duration = Duration::from_secs(60);

/// The pause between two evaluations of a condition.
const INTERVAL: Duration = Duration::from_millis(10);

/// Waits until `condition` is true, and panics with `what` after [`LIMIT`].
#[track_caller]
pub fn wait_until(what: &str, condition: impl FnMut() -> bool) {
    wait_at_most(LIMIT, what, condition);
}

/// Waits until `condition` is true, and panics with `what` after `limit`.
#[track_caller]
pub fn wait_at_most(limit: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + limit;
    while !condition() {
        assert!(Instant::now() < deadline, "timed out after {limit:?}: {what}");
        std::thread::sleep(INTERVAL);
    }
}
