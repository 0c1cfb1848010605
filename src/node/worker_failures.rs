//! The failures of a mapping's workers: how they ended, and whether the backend refused their start. They
//! are shown to users, and they distinguish a worker that crashes from one whose backend is unreachable.
//! After several crashes the mapping fails; for the backend it waits as long as the outage policy says.

use std::collections::VecDeque;
use std::time::SystemTime;

use tokio::time::Instant;

use cleat_core::clock::Clock;
use cleat_core::error::{Error, ErrorKind};
use cleat_core::policy::OnOutage;

/// How many ends of workers are kept.
const MAX_EXITS: usize = 3;

/// The failures of one mapping's workers.
#[derive(Debug, Default)]
pub struct WorkerFailures {
    /// Oldest first.
    exits: VecDeque<Exit>,
    backend_failure: Option<BackendFailure>,
    /// The last attempt to start a worker set `backend_failure`, and [`Self::backend_wait_attempts`] has not
    /// been called since.
    is_new: bool,
}

#[derive(Debug)]
struct Exit {
    pid: u32,
    how: String,
    at: SystemTime,
}

/// A backend that refuses the start of workers.
#[derive(Debug, Clone)]
pub struct BackendFailure {
    /// The wall time of the first refused attempt.
    pub since: SystemTime,
    /// The same time for the policy, since the wall clock may be set.
    started: Instant,
    /// The latest reason.
    pub reason: String,
    attempts: u32,
}

/// Why a worker could not be started.
#[derive(Debug)]
pub struct StartFailure {
    /// The error for the caller.
    pub error: Error,
    /// The process number; 0 if there was no process.
    pub pid: u32,
    /// How the process ended, if it ended by itself without reporting an error.
    pub died: Option<String>,
}

impl WorkerFailures {
    /// Records that a worker ended without being stopped.
    pub fn exited(&mut self, clock: &dyn Clock, pid: u32, how: String) {
        if self.exits.len() == MAX_EXITS {
            self.exits.pop_front();
        }
        self.exits.push_back(Exit { pid, how, at: clock.wall() });
    }

    /// Records that a worker could not be started. Returns the error to report.
    pub fn start_failed(&mut self, clock: &dyn Clock, failed: StartFailure) -> Error {
        let StartFailure { error, pid, died } = failed;
        self.is_new = false;
        if let Some(how) = died {
            self.exited(clock, pid, how.clone());
            let message = format!("{}: it {how}", error.message());
            return Error::new(error.kind(), message)
                .with_repair("see its last messages in the daemon's log");
        }
        // `InUse` is most likely the claim of the previous worker, which a hanging request keeps alive.
        let temporary = [ErrorKind::Unavailable, ErrorKind::TimedOut, ErrorKind::InUse];
        if temporary.contains(&error.kind()) {
            let backend_failure = self.backend_failure.get_or_insert_with(|| BackendFailure {
                since: clock.wall(),
                started: Instant::now(),
                reason: String::new(),
                attempts: 0,
            });
            backend_failure.attempts = backend_failure.attempts.saturating_add(1);
            backend_failure.reason = error.report();
            self.is_new = true;
        } else {
            self.backend_failure = None;
        }
        error
    }

    /// Records that a worker was started.
    pub fn started(&mut self) {
        self.backend_failure = None;
        self.is_new = false;
    }

    /// Returns the backend's refusal; `None` since the last successful start.
    pub fn backend_failure(&self) -> Option<&BackendFailure> {
        self.backend_failure.as_ref()
    }

    /// Returns after a failed attempt how often the backend has refused, if the policy says to wait for the
    /// backend. Returns `None` if the attempt counts as a failure. Each attempt is reported once.
    pub fn backend_wait_attempts(&mut self, policy: OnOutage) -> Option<u32> {
        let backend_failure =
            self.backend_failure.as_ref().filter(|_| std::mem::take(&mut self.is_new))?;
        let waits =
            policy.max_queue_time().is_none_or(|limit| backend_failure.started.elapsed() < limit);
        waits.then_some(backend_failure.attempts)
    }

    /// Returns how the last worker ended that was not stopped.
    pub fn last_exit(&self) -> Option<String> {
        self.exits.back().map(Exit::to_string)
    }

    /// Returns the backend's refusal and how the last workers ended, newest first.
    pub fn history(&self) -> String {
        let exits: Vec<String> = self.exits.iter().rev().map(Exit::to_string).collect();
        let backend_failure =
            self.backend_failure.iter().map(|backend_failure| backend_failure.reason.clone());
        backend_failure.chain(exits).collect::<Vec<_>>().join("; ")
    }
}

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let at = humantime::format_rfc3339_seconds(self.at);
        write!(f, "worker {} {} at {at}", self.pid, self.how)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use cleat_core::clock::ManualClock;

    use super::*;

    fn failed(kind: ErrorKind, died: Option<&str>) -> StartFailure {
        let error = Error::new(kind, "the worker could not start");
        StartFailure { error, pid: 7, died: died.map(str::to_owned) }
    }

    #[test]
    fn an_unreachable_backend_is_waited_for_and_a_crash_is_not() {
        let (clock, mut worker_failures) = (ManualClock::new(), WorkerFailures::default());
        for attempt in 1..50 {
            let error = worker_failures.start_failed(&clock, failed(ErrorKind::Unavailable, None));
            assert_eq!(error.kind(), ErrorKind::Unavailable);
            assert_eq!(worker_failures.backend_wait_attempts(OnOutage::Queue), Some(attempt));
            assert_eq!(
                worker_failures.backend_wait_attempts(OnOutage::Queue),
                None,
                "each attempt is reported once"
            );
        }
        worker_failures.start_failed(&clock, failed(ErrorKind::InUse, None));
        assert_eq!(worker_failures.backend_wait_attempts(OnOutage::Fail), None);
        worker_failures.start_failed(&clock, failed(ErrorKind::TimedOut, None));
        assert_eq!(
            worker_failures.backend_wait_attempts(OnOutage::QueueFor(Duration::from_nanos(1))),
            None
        );
        worker_failures.start_failed(&clock, failed(ErrorKind::TimedOut, None));
        assert!(
            worker_failures
                .backend_wait_attempts(OnOutage::QueueFor(Duration::from_secs(60)))
                .is_some()
        );
        let died = failed(ErrorKind::Unavailable, Some("was killed by SIGSEGV"));
        assert!(worker_failures.start_failed(&clock, died).message().contains("SIGSEGV"));
        assert_eq!(worker_failures.backend_wait_attempts(OnOutage::Queue), None);
        worker_failures.start_failed(&clock, failed(ErrorKind::NotFound, None));
        assert_eq!(worker_failures.backend_wait_attempts(OnOutage::Queue), None);
        assert!(
            worker_failures.backend_failure().is_none(),
            "the backend answers: the volume does not exist"
        );
    }

    #[test]
    fn the_last_ends_are_reported_newest_first() {
        let (clock, mut worker_failures) = (ManualClock::new(), WorkerFailures::default());
        assert_eq!((worker_failures.history().as_str(), worker_failures.last_exit()), ("", None));
        for pid in 1..9 {
            worker_failures.exited(&clock, pid, "exited with code 1".to_owned());
        }
        let history = worker_failures.history();
        assert!(
            history.starts_with("worker 8 exited with code 1 at 2030-01-01T00:00:00Z"),
            "{history}"
        );
        assert_eq!(history.matches("worker").count(), MAX_EXITS);
    }
}
