//! Where a worker's log goes. Set up before the confinement, since it may open a socket.

use crate::telemetry::{Format, Log};

/// Starts logging as the supervisor chose, see [`Log`]; its stderr is ours.
pub(super) fn init(choice: &str) {
    let plain = || Log { format: Format::Human, filter: "info".to_owned() };
    let log = choice.parse().unwrap_or_else(|_| plain());
    // A second logger in one process is the only other failure, and then there is one already.
    if log.init().is_err() {
        let _ = plain().init();
    }
}
