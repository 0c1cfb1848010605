//! Waiting for a condition, with a deadline and a message.

use std::time::{Duration, Instant};

/// The time limit of waits that have no limit of their own. It is far longer than any of them takes on
/// a busy machine.
pub const LIMIT: Duration = Duration::from_secs(120);

/// The first and the longest pause between two evaluations of a condition. It grows with the time that passes.
const PAUSES: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(100)];

/// Waits until `condition` is true, and panics with `what` after [`LIMIT`].
#[track_caller]
pub fn wait_until(what: &str, condition: impl FnMut() -> bool) {
    wait_at_most(LIMIT, what, condition);
}

/// Waits until `condition` is true, and panics with `what` after `limit`.
///
/// An evaluation may start a process, which takes a tenth of a second in a virtual machine. The pause is at
/// least as long as the evaluation, so that what is waited for gets the other half of the processor.
#[track_caller]
pub fn wait_at_most(limit: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + limit;
    let [mut pause, longest] = PAUSES;
    loop {
        let begin = Instant::now();
        if condition() {
            return;
        }
        assert!(Instant::now() < deadline, "timed out after {limit:?}: {what}");
        std::thread::sleep(pause.max(begin.elapsed()));
        pause = (pause * 2).min(longest);
    }
}
