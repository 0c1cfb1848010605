//! Timeouts for calls of librbd, which itself waits for an unreachable cluster without a limit. Each call
//! runs on a thread of its own. When the timeout passes, the caller gets an error, and the thread
//! continues in the background until the library returns.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use cleat_backend::store::Progress;
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};

/// The timeout of a call that reports no progress.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// The interval at which progress is passed to the caller.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// How long an operation may continue after it was stopped.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// How long an operation may continue without progress. An operation processes one object after the
/// other, so a pause of this length means that the cluster is unreachable.
const STALL_TIMEOUT: Duration = Duration::from_secs(300);

/// The progress of an operation, and whether the caller has stopped it. The operation's thread and the
/// caller share it.
#[derive(Debug, Default)]
pub(crate) struct Tracker {
    done: AtomicU64,
    total: AtomicU64,
    stop: AtomicBool,
}

impl Tracker {
    /// Records that `done` of `total` parts are finished. Returns `Break` if the operation must stop.
    pub(crate) fn report(&self, done: u64, total: u64) -> ControlFlow<()> {
        self.done.store(done, Ordering::Relaxed);
        self.total.store(total, Ordering::Relaxed);
        if self.stopped() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    /// Returns whether the operation must stop.
    pub(crate) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn progress(&self) -> (u64, u64) {
        (self.done.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed))
    }
}

/// Runs `work` on a thread of its own and waits for its result, at most for `timeout`. The error message
/// says that the cluster did not `what`.
///
/// # Errors
/// Returns `TimedOut` when the timeout passes first, and otherwise the error of `work`.
pub(crate) fn with_timeout<T: Send + 'static>(
    timeout: Duration,
    what: &str,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    match spawn(work)?.recv_timeout(timeout) {
        Ok(result) => result,
        Err(RecvTimeoutError::Disconnected) => Err(panicked()),
        Err(RecvTimeoutError::Timeout) => Err(Error::new(
            ErrorKind::TimedOut,
            format!(
                "the cluster did not {what} within {timeout:?}; the operation may still take effect"
            ),
        )
        .with_repair(
            "check with `ceph status` that the pool's OSDs are up and its placement groups active",
        )),
    }
}

/// The maximum number of calls of one place that run although their time is over: each keeps a thread and a client of the
/// cluster. Calls in time do not count, however many they are.
const MAX_LATE: usize = 16;

/// When the time of each call of [`with_timeout_at`] that runs is over, by place and number.
static RUNNING: Mutex<BTreeMap<String, BTreeMap<u64, Instant>>> = Mutex::new(BTreeMap::new());

/// As [`with_timeout`], for a call that makes a client of its own. `place` says for which pool: the calls of one pool that
/// do not answer are limited.
///
/// # Errors
/// As [`with_timeout`], and `Unavailable` at once if too many calls of the place run although their time is over.
pub(crate) fn with_timeout_at<T: Send + 'static>(
    place: &str,
    timeout: Duration,
    what: &str,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let call = Running::begin(place, SystemClock.now(), timeout)?;
    with_timeout(timeout, what, move || {
        let _call = call;
        work()
    })
}

/// A call that runs. It ends when this is dropped.
#[derive(Debug)]
struct Running {
    place: String,
    number: u64,
}

impl Running {
    fn begin(place: &str, now: Instant, timeout: Duration) -> Result<Self> {
        let mut all = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        let calls = all.entry(place.to_owned()).or_default();
        let late = calls.values().filter(|over| now >= **over).count();
        if late >= MAX_LATE {
            let message = format!("{late} calls to {place} have not ended: no other one is made");
            let repair = "check that the cluster answers (ceph status), then repeat the command";
            return Err(Error::new(ErrorKind::Unavailable, message).with_repair(repair));
        }
        let number = calls.last_key_value().map_or(0, |(last, _)| last + 1);
        calls.insert(number, now + timeout);
        Ok(Self { place: place.to_owned(), number })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut all = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(calls) = all.get_mut(&self.place) {
            calls.remove(&self.number);
            if calls.is_empty() {
                all.remove(&self.place);
            }
        }
    }
}

/// The phrase for [`with_timeout`] of a call whose only result is an answer about `name`.
pub(crate) fn answer(name: &str) -> String {
    format!("answer for {name}")
}

/// Runs `work` on a thread of its own for as long as it makes progress, which is passed to `progress`.
/// When `progress` returns `Break`, the operation is stopped and may continue for `STOP_TIMEOUT`. `what`
/// names the operation in error messages.
///
/// # Errors
/// Returns the error of `work`, `TimedOut` when there is no progress for `STALL_TIMEOUT`, and `Aborted`
/// when the operation does not stop.
pub(crate) fn with_progress<T: Send + 'static>(
    what: &str,
    progress: Progress<'_>,
    work: impl FnOnce(&Tracker) -> Result<T> + Send + 'static,
) -> Result<T> {
    with_clock(&SystemClock, what, progress, work)
}

fn with_clock<T: Send + 'static>(
    clock: &dyn Clock,
    what: &str,
    progress: Progress<'_>,
    work: impl FnOnce(&Tracker) -> Result<T> + Send + 'static,
) -> Result<T> {
    let tracker = Arc::new(Tracker::default());
    let shared = Arc::clone(&tracker);
    let ended = spawn(move || work(&shared))?;
    let abandoned = |kind, how: String| {
        let message = format!("{what} {how}; it may still continue");
        let repair = "check that the cluster answers (ceph status), then repeat the command";
        Err(Error::new(kind, message).with_repair(repair))
    };
    let (mut last, mut last_progress) = ((0, 0), clock.now());
    let mut stopped_at: Option<Instant> = None;
    loop {
        match ended.recv_timeout(PROGRESS_INTERVAL) {
            Ok(result) => return result,
            Err(RecvTimeoutError::Disconnected) => return Err(panicked()),
            Err(RecvTimeoutError::Timeout) => {}
        }
        if let Some(stopped_at) = stopped_at {
            if clock.elapsed_since(stopped_at) > STOP_TIMEOUT {
                let how = format!("did not stop within {STOP_TIMEOUT:?}");
                return abandoned(ErrorKind::Aborted, how);
            }
            continue;
        }
        let now = tracker.progress();
        if now != last {
            (last, last_progress) = (now, clock.now());
        }
        if clock.elapsed_since(last_progress) > STALL_TIMEOUT {
            let how = format!("has made no progress for {STALL_TIMEOUT:?}");
            return abandoned(ErrorKind::TimedOut, how);
        }
        if progress(now.0, now.1).is_break() {
            tracker.stop.store(true, Ordering::Relaxed);
            stopped_at = Some(clock.now());
        }
    }
}

/// Runs `work` on a new thread, which sends the result to the returned receiver. If the receiver was
/// dropped, the result is discarded.
fn spawn<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<Receiver<Result<T>>> {
    let (sender, ended) = mpsc::channel();
    thread::Builder::new()
        .name("rbd-call".to_owned())
        .spawn(move || _ = sender.send(work()))
        .map_err(|e| Error::from_io("cannot start a thread for a call to the cluster", e))?;
    Ok(ended)
}

fn panicked() -> Error {
    Error::new(ErrorKind::Internal, "the thread of a call to the cluster panicked")
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleat_core::clock::ManualClock;

    #[test]
    fn progress_is_passed_on_and_break_stops_the_work() {
        let mut reports = Vec::new();
        let (stop, stopped) = mpsc::channel::<()>();
        let mut stop = Some(stop);
        let mut progress = |done, total| {
            if done == 0 {
                return ControlFlow::Continue(());
            }
            reports.push((done, total));
            if reports.len() < 2 {
                return ControlFlow::Continue(());
            }
            drop(stop.take());
            ControlFlow::Break(())
        };
        let ended = with_progress("it", &mut progress, move |tracker| {
            assert!(tracker.report(3, 10).is_continue());
            let _ = stopped.recv();
            // The flag is set right after the callback that released this thread.
            while tracker.report(3, 10).is_continue() {
                thread::yield_now();
            }
            Ok(tracker.stopped())
        });
        assert!(ended.expect("the operation stops"));
        assert_eq!(reports, [(3, 10), (3, 10)]);
    }

    #[test]
    fn an_operation_without_progress_is_abandoned() {
        let clock = ManualClock::new();
        let (sender, released) = mpsc::channel::<()>();
        let mut progress = |_, _| {
            clock.advance(STALL_TIMEOUT / 2);
            ControlFlow::Continue(())
        };
        let abandoned = with_clock(&clock, "it", &mut progress, move |tracker| {
            let _ = tracker.report(1, 2);
            let _ = released.recv();
            Ok(())
        });
        assert_eq!(abandoned.expect_err("it makes no progress").kind(), ErrorKind::TimedOut);
        drop(sender);
    }

    #[test]
    fn calls_in_time_are_not_limited() {
        let now = SystemClock.now();
        let begin =
            |_| Running::begin("busy", now, Duration::from_secs(60)).expect("it is in time");
        let running: Vec<Running> = (0..2 * MAX_LATE).map(begin).collect();
        drop(running);
        assert!(!RUNNING.lock().expect("no call panics").contains_key("busy"));
    }

    #[test]
    fn abandoned_calls_of_one_place_are_limited() {
        let (releases, mut ends) = (mpsc::channel::<()>(), Vec::new());
        let released = Arc::new(Mutex::new(releases.1));
        for _ in 0..MAX_LATE {
            let (end, ended) = mpsc::channel::<()>();
            let released = Arc::clone(&released);
            ends.push(ended);
            let hang = move || {
                let _end = end;
                let _ = released.lock().expect("no call panics").recv();
                Ok(())
            };
            let error = with_timeout_at("lost", Duration::ZERO, "answer", hang);
            assert_eq!(error.expect_err("it hangs").kind(), ErrorKind::TimedOut);
        }
        let ask = |place| with_timeout_at(place, Duration::from_secs(60), "answer", || Ok(()));
        let error = ask("lost").expect_err("all of them run");
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.message().contains("16 calls to lost have not ended"), "{error}");
        ask("other").expect("it answers");
        drop(releases.0);
        ends.into_iter().for_each(|ended| _ = ended.recv());
        // A call ends after its work.
        while ask("lost").is_err() {
            thread::yield_now();
        }
    }

    #[test]
    fn a_panic_is_an_error() {
        let error = with_timeout(Duration::from_secs(60), "do it", || -> Result<()> {
            panic!("as expected")
        })
        .expect_err("the work panics");
        assert_eq!(error.kind(), ErrorKind::Internal);
    }
}
