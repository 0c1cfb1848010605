//! What went wrong with a mapping's workers: how they ended, and whether their backend let them start.
//! For the reader, and to tell a worker that cannot live from one whose backend is out of reach: the
//! first is given up in the end, the second is waited for as long as the policy says.

use std::collections::VecDeque;
use std::time::{Instant, SystemTime};

use cleat_core::error::{Error, ErrorKind};
use cleat_core::policy::OnOutage;

/// Ends that are remembered.
const KEPT: usize = 3;

/// Of one mapping.
#[derive(Debug, Default)]
pub struct WorkerFailures {
    /// Oldest first.
    ends: VecDeque<End>,
    refusal: Option<Refusal>,
    /// The last attempt to start a worker ended with `refusal`.
    fresh: bool,
}

#[derive(Debug)]
struct End {
    pid: u32,
    how: String,
    at: SystemTime,
}

/// A backend that does not let a worker start.
#[derive(Debug, Clone)]
pub struct Refusal {
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
pub struct NotStarted {
    /// For the caller.
    pub error: Error,
    /// Which process.
    pub pid: u32,
    /// How it ended, if it did so by itself and without a word.
    pub died: Option<String>,
}

impl WorkerFailures {
    /// A worker's process has ended, and nobody had asked it to.
    pub fn ended(&mut self, pid: u32, how: String) {
        if self.ends.len() == KEPT {
            self.ends.pop_front();
        }
        self.ends.push_back(End { pid, how, at: SystemTime::now() });
    }

    /// A worker could not be started.
    pub fn not_started(&mut self, failed: NotStarted) -> Error {
        let NotStarted { error, pid, died } = failed;
        self.fresh = false;
        if let Some(how) = died {
            self.ended(pid, how.clone());
            let message = format!("{}: it {how}", error.message());
            return Error::new(error.kind(), message)
                .with_repair("see the daemon's log for its last words");
        }
        // `InUse`: most likely its predecessor's claim, which a request that hangs keeps alive.
        let passes = [ErrorKind::Unavailable, ErrorKind::TimedOut, ErrorKind::InUse];
        if passes.contains(&error.kind()) {
            let refusal = self.refusal.get_or_insert_with(|| Refusal {
                since: SystemTime::now(),
                began: Instant::now(),
                reason: String::new(),
                attempts: 0,
            });
            refusal.attempts = refusal.attempts.saturating_add(1);
            refusal.reason = error.report();
            self.fresh = true;
        } else {
            self.refusal = None;
        }
        error
    }

    /// A worker has been started.
    pub fn started(&mut self) {
        self.refusal = None;
        self.fresh = false;
    }

    /// The backend's refusal, while there is no worker for it.
    pub fn refusal(&self) -> Option<&Refusal> {
        self.refusal.as_ref()
    }

    /// After an attempt that failed: whether the backend is to be waited for, and how often it has
    /// refused. Otherwise the failure counts.
    pub fn outwait(&mut self, policy: OnOutage) -> Option<u32> {
        let refusal = self.refusal.as_ref().filter(|_| std::mem::take(&mut self.fresh))?;
        let patient = policy.max_queue_time().is_none_or(|limit| refusal.began.elapsed() < limit);
        patient.then_some(refusal.attempts)
    }

    /// How the last worker ended.
    pub fn last_end(&self) -> Option<String> {
        self.ends.back().map(End::to_string)
    }

    /// How the last workers ended, newest first.
    pub fn history(&self) -> String {
        let ends: Vec<String> = self.ends.iter().rev().map(End::to_string).collect();
        let refusal = self.refusal.iter().map(|refusal| refusal.reason.clone());
        refusal.chain(ends).collect::<Vec<_>>().join("; ")
    }
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let at = humantime::format_rfc3339_seconds(self.at);
        write!(f, "worker {} {} at {at}", self.pid, self.how)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn failed(kind: ErrorKind, died: Option<&str>) -> NotStarted {
        let error = Error::new(kind, "the worker could not start");
        NotStarted { error, pid: 7, died: died.map(str::to_owned) }
    }

    #[test]
    fn a_backend_out_of_reach_is_waited_for_and_a_crash_is_not() {
        let mut worker_failures = WorkerFailures::default();
        for attempt in 1..50 {
            let error = worker_failures.not_started(failed(ErrorKind::Unavailable, None));
            assert_eq!(error.kind(), ErrorKind::Unavailable);
            assert_eq!(worker_failures.outwait(OnOutage::Queue), Some(attempt));
            assert_eq!(worker_failures.outwait(OnOutage::Queue), None, "asked once an attempt");
        }
        worker_failures.not_started(failed(ErrorKind::InUse, None));
        assert_eq!(worker_failures.outwait(OnOutage::Fail), None);
        worker_failures.not_started(failed(ErrorKind::TimedOut, None));
        assert_eq!(worker_failures.outwait(OnOutage::QueueFor(Duration::from_nanos(1))), None);
        worker_failures.not_started(failed(ErrorKind::TimedOut, None));
        assert!(worker_failures.outwait(OnOutage::QueueFor(Duration::from_secs(60))).is_some());
        let died = failed(ErrorKind::Unavailable, Some("was killed by SIGSEGV"));
        assert!(worker_failures.not_started(died).message().contains("SIGSEGV"));
        assert_eq!(worker_failures.outwait(OnOutage::Queue), None);
        worker_failures.not_started(failed(ErrorKind::NotFound, None));
        assert_eq!(worker_failures.outwait(OnOutage::Queue), None);
        assert!(worker_failures.refusal().is_none(), "it answers, though not as one would wish");
    }

    #[test]
    fn the_last_ends_are_told_newest_first() {
        let mut worker_failures = WorkerFailures::default();
        assert_eq!((worker_failures.history().as_str(), worker_failures.last_end()), ("", None));
        for pid in 1..9 {
            worker_failures.ended(pid, "exited with code 1".to_owned());
        }
        let told = worker_failures.history();
        assert!(told.starts_with("worker 8 exited with code 1 at 2"), "{told}");
        assert_eq!(told.matches("worker").count(), KEPT);
    }
}
