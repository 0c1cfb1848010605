//! What went wrong with a mapping's workers: how they ended, and whether their backend let them start.
//! For the reader, and to tell a worker that cannot live from one whose backend is out of reach: the
//! first is given up in the end, the second is waited for as long as the policy says.

use std::collections::VecDeque;
use std::time::SystemTime;

use tokio::time::Instant;

use cleat_core::clock::Clock;
use cleat_core::error::{Error, ErrorKind};
use cleat_core::policy::OnOutage;

/// Ends that are remembered.
const MAX_EXITS: usize = 3;

/// Of one mapping.
#[derive(Debug, Default)]
pub struct WorkerFailures {
    /// Oldest first.
    exits: VecDeque<Exit>,
    backend_failure: Option<BackendFailure>,
    /// The last attempt to start a worker ended with `refusal`.
    fresh: bool,
}

#[derive(Debug)]
struct Exit {
    pid: u32,
    how: String,
    at: SystemTime,
}

/// A backend that does not let a worker start.
#[derive(Debug, Clone)]
pub struct BackendFailure {
    /// Since the first attempt that it refused.
    pub since: SystemTime,
    /// The same for the policy, as the clock of the day may be set.
    began: Instant,
    /// The newest reason.
    pub reason: String,
    attempts: u32,
}

/// Why a worker could not be started.
#[derive(Debug)]
pub struct StartFailure {
    /// For the caller.
    pub error: Error,
    /// Which process.
    pub pid: u32,
    /// How it ended, if it did so by itself and without a word.
    pub died: Option<String>,
}

impl WorkerFailures {
    /// A worker's process has ended, and nobody had asked it to.
    pub fn exited(&mut self, clock: &dyn Clock, pid: u32, how: String) {
        if self.exits.len() == MAX_EXITS {
            self.exits.pop_front();
        }
        self.exits.push_back(Exit { pid, how, at: clock.wall() });
    }

    /// A worker could not be started.
    pub fn start_failed(&mut self, clock: &dyn Clock, failed: StartFailure) -> Error {
        let StartFailure { error, pid, died } = failed;
        self.fresh = false;
        if let Some(how) = died {
            self.exited(clock, pid, how.clone());
            let message = format!("{}: it {how}", error.message());
            return Error::new(error.kind(), message)
                .with_repair("see the daemon's log for its last words");
        }
        // `InUse`: most likely its predecessor's claim, which a request that hangs keeps alive.
        let passes = [ErrorKind::Unavailable, ErrorKind::TimedOut, ErrorKind::InUse];
        if passes.contains(&error.kind()) {
            let backend_failure = self.backend_failure.get_or_insert_with(|| BackendFailure {
                since: clock.wall(),
                began: Instant::now(),
                reason: String::new(),
                attempts: 0,
            });
            backend_failure.attempts = backend_failure.attempts.saturating_add(1);
            backend_failure.reason = error.report();
            self.fresh = true;
        } else {
            self.backend_failure = None;
        }
        error
    }

    /// A worker has been started.
    pub fn started(&mut self) {
        self.backend_failure = None;
        self.fresh = false;
    }

    /// The backend's refusal, while there is no worker for it.
    pub fn backend_failure(&self) -> Option<&BackendFailure> {
        self.backend_failure.as_ref()
    }

    /// After an attempt that failed: whether the backend is to be waited for, and how often it has
    /// refused. Otherwise the failure counts.
    pub fn backend_wait_attempts(&mut self, policy: OnOutage) -> Option<u32> {
        let backend_failure =
            self.backend_failure.as_ref().filter(|_| std::mem::take(&mut self.fresh))?;
        let waits =
            policy.max_queue_time().is_none_or(|limit| backend_failure.began.elapsed() < limit);
        waits.then_some(backend_failure.attempts)
    }

    /// How the last worker ended.
    pub fn last_exit(&self) -> Option<String> {
        self.exits.back().map(Exit::to_string)
    }

    /// How the last workers ended, newest first.
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

    use cleat_core::clock::SystemClock;

    use super::*;

    const CLOCK: SystemClock = SystemClock;

    fn failed(kind: ErrorKind, died: Option<&str>) -> StartFailure {
        let error = Error::new(kind, "the worker could not start");
        StartFailure { error, pid: 7, died: died.map(str::to_owned) }
    }

    #[test]
    fn a_backend_out_of_reach_is_waited_for_and_a_crash_is_not() {
        let mut worker_failures = WorkerFailures::default();
        for attempt in 1..50 {
            let error = worker_failures.start_failed(&CLOCK, failed(ErrorKind::Unavailable, None));
            assert_eq!(error.kind(), ErrorKind::Unavailable);
            assert_eq!(worker_failures.backend_wait_attempts(OnOutage::Queue), Some(attempt));
            assert_eq!(
                worker_failures.backend_wait_attempts(OnOutage::Queue),
                None,
                "asked once an attempt"
            );
        }
        worker_failures.start_failed(&CLOCK, failed(ErrorKind::InUse, None));
        assert_eq!(worker_failures.backend_wait_attempts(OnOutage::Fail), None);
        worker_failures.start_failed(&CLOCK, failed(ErrorKind::TimedOut, None));
        assert_eq!(
            worker_failures.backend_wait_attempts(OnOutage::QueueFor(Duration::from_nanos(1))),
            None
        );
        worker_failures.start_failed(&CLOCK, failed(ErrorKind::TimedOut, None));
        assert!(
            worker_failures
                .backend_wait_attempts(OnOutage::QueueFor(Duration::from_secs(60)))
                .is_some()
        );
        let died = failed(ErrorKind::Unavailable, Some("was killed by SIGSEGV"));
        assert!(worker_failures.start_failed(&CLOCK, died).message().contains("SIGSEGV"));
        assert_eq!(worker_failures.backend_wait_attempts(OnOutage::Queue), None);
        worker_failures.start_failed(&CLOCK, failed(ErrorKind::NotFound, None));
        assert_eq!(worker_failures.backend_wait_attempts(OnOutage::Queue), None);
        assert!(
            worker_failures.backend_failure().is_none(),
            "it answers, though not as one would wish"
        );
    }

    #[test]
    fn the_last_ends_are_told_newest_first() {
        let mut worker_failures = WorkerFailures::default();
        assert_eq!((worker_failures.history().as_str(), worker_failures.last_exit()), ("", None));
        for pid in 1..9 {
            worker_failures.exited(&CLOCK, pid, "exited with code 1".to_owned());
        }
        let told = worker_failures.history();
        assert!(told.starts_with("worker 8 exited with code 1 at 2"), "{told}");
        assert_eq!(told.matches("worker").count(), MAX_EXITS);
    }
}
