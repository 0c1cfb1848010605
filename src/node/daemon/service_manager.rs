//! Notifications to the service manager.

use crate::executor::Executor;
use crate::planner::State;

/// Returns the status line: the number of mappings, and of failed ones.
pub(crate) fn status(executor: &Executor) -> String {
    let views = executor.register().all();
    let failed = views.iter().filter(|v| matches!(v.view().state, State::Failed(_))).count();
    match failed {
        0 => format!("{} mappings", views.len()),
        _ => format!("{} mappings, {failed} failed", views.len()),
    }
}

/// Sends notifications to the service manager. Does nothing if the daemon runs without one.
pub(crate) fn notify(states: &[sd_notify::NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!("cannot notify the service manager: {error}");
    }
}
