//! The library waits for a cluster that is away as long as it takes. Here its calls are made on threads
//! of their own, which are left to themselves when the caller's patience ends.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use cleat_backend::store::Progress;
use cleat_core::error::{Error, ErrorKind, Result};

/// How long a call without progress may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// How often progress is told.
const TICK: Duration = Duration::from_millis(100);

/// How long an operation that was told to end may go on.
const STOP_PATIENCE: Duration = Duration::from_secs(10);

/// How long one may go on without any progress: of the objects that it works on, one after the other is
/// done, or the cluster is away.
const STALL_PATIENCE: Duration = Duration::from_secs(300);

/// How far an operation has come, and whether it is to go on.
#[derive(Debug, Default)]
pub(crate) struct Course {
    done: AtomicU64,
    total: AtomicU64,
    stop: AtomicBool,
}

impl Course {
    /// Takes down how much of how much is done.
    pub(crate) fn tell(&self, done: u64, total: u64) -> ControlFlow<()> {
        self.done.store(done, Ordering::Relaxed);
        self.total.store(total, Ordering::Relaxed);
        if self.stopped() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    /// Whether it is to end.
    pub(crate) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// Does `work`, which is over within a limit; `what` it does, for the error.
///
/// # Errors
/// `TimedOut` when it is not; what it gives.
pub(crate) fn within<T: Send + 'static>(
    patience: Duration,
    what: &str,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    match begin(work)?.recv_timeout(patience) {
        Ok(result) => result,
        Err(RecvTimeoutError::Disconnected) => Err(panicked()),
        Err(RecvTimeoutError::Timeout) => Err(Error::new(
            ErrorKind::TimedOut,
            format!(
                "the cluster did not {what} within {patience:?}; what was asked for may still take effect"
            ),
        )
        .with_repair("see `ceph status`: are the pool's OSDs up, its placement groups active?")),
    }
}

/// What a cluster that is away does not do, for [`within`].
pub(crate) fn answer(name: &str) -> String {
    format!("answer for {name}")
}

/// Does `work`, which may take as long as it has to while it gets on, but for a while only once
/// `progress` has told it to end.
///
/// # Errors
/// What it gives; `TimedOut` when it does not get on, `Aborted` when it does not hear.
pub(crate) fn followed<T: Send + 'static>(
    what: &str,
    progress: Progress<'_>,
    work: impl FnOnce(&Course) -> Result<T> + Send + 'static,
) -> Result<T> {
    followed_for(STALL_PATIENCE, what, progress, work)
}

fn followed_for<T: Send + 'static>(
    stall_patience: Duration,
    what: &str,
    progress: Progress<'_>,
    work: impl FnOnce(&Course) -> Result<T> + Send + 'static,
) -> Result<T> {
    let course = Arc::new(Course::default());
    let theirs = Arc::clone(&course);
    let ended = begin(move || work(&theirs))?;
    let gone_on = |kind, how: String| {
        let message = format!("{what} {how}; it may still go on");
        let repair = "see that the cluster answers (ceph status), then repeat the command";
        Err(Error::new(kind, message).with_repair(repair))
    };
    let (mut last, mut came_on, mut told) = ((0, 0), Instant::now(), None);
    loop {
        match ended.recv_timeout(TICK) {
            Ok(result) => return result,
            Err(RecvTimeoutError::Disconnected) => return Err(panicked()),
            Err(RecvTimeoutError::Timeout) => {}
        }
        if let Some(told) = told {
            if Instant::elapsed(&told) > STOP_PATIENCE {
                return gone_on(ErrorKind::Aborted, "was told to end and does not".to_owned());
            }
            continue;
        }
        let now = (course.done.load(Ordering::Relaxed), course.total.load(Ordering::Relaxed));
        if now != last {
            (last, came_on) = (now, Instant::now());
        }
        if came_on.elapsed() > stall_patience {
            let how = format!("has made no progress for {stall_patience:?}");
            return gone_on(ErrorKind::TimedOut, how);
        }
        if progress(now.0, now.1).is_break() {
            course.stop.store(true, Ordering::Relaxed);
            told = Some(Instant::now());
        }
    }
}

/// Where nobody waits for it any more, the result is dropped.
fn begin<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<Receiver<Result<T>>> {
    let (sender, ended) = mpsc::channel();
    thread::Builder::new()
        .name("rbd-call".to_owned())
        .spawn(move || _ = sender.send(work()))
        .map_err(|e| Error::from_io("cannot start a thread for the cluster", e))?;
    Ok(ended)
}

fn panicked() -> Error {
    Error::new(ErrorKind::Internal, "the thread that speaks with the cluster panicked")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_told_and_ends_the_work() {
        let mut told = Vec::new();
        let mut progress = |done, total| {
            told.push((done, total));
            if told.len() < 2 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        };
        let ended = followed("it", &mut progress, |course| {
            while course.tell(3, 10).is_continue() {
                thread::sleep(Duration::from_millis(1));
            }
            Ok(course.stopped())
        });
        assert!(ended.expect("it heard"));
        assert_eq!(told, [(3, 10), (3, 10)]);
    }

    #[test]
    fn what_makes_no_progress_is_given_up() {
        let (sender, released) = mpsc::channel::<()>();
        let mut on = |_, _| ControlFlow::Continue(());
        let given_up = followed_for(Duration::from_millis(300), "it", &mut on, move |course| {
            let _ = course.tell(1, 2);
            let _ = released.recv();
            Ok(())
        });
        assert_eq!(given_up.expect_err("it stands still").kind(), ErrorKind::TimedOut);
        drop(sender);
    }

    #[test]
    fn a_panic_is_an_error() {
        let error =
            within(Duration::from_secs(60), "do it", || -> Result<()> { panic!("as expected") })
                .expect_err("it ends");
        assert_eq!(error.kind(), ErrorKind::Internal);
    }
}
