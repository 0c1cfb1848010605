//! Calls that the kernel may never return from, on separate threads. The caller waits until its
//! deadline and continues; the thread stays behind and is counted, so that a kernel that hangs costs a
//! bounded number of threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crossbeam_channel::{RecvTimeoutError, SendError, bounded};

use cleat_core::error::{Error, ErrorKind, Result};

/// Runs calls on separate threads, with a bound on the threads whose callers have timed out.
#[derive(Debug, Clone)]
pub(super) struct BoundedCalls {
    stuck: Arc<AtomicUsize>,
    most: usize,
}

impl BoundedCalls {
    /// Allows at most `most` threads that were left behind by their callers.
    pub(super) fn new(most: usize) -> Self {
        Self { stuck: Arc::default(), most }
    }

    /// Runs `call` and returns its result. If `call` ends only after the deadline, the same thread gives
    /// its result to `late`. Blocks until `deadline` at most.
    ///
    /// # Errors
    /// Returns `TimedOut` at the deadline; `Unavailable` if too many calls are stuck already.
    pub(super) fn run<T: Send + 'static>(
        &self,
        what: &str,
        deadline: Instant,
        call: impl FnOnce() -> T + Send + 'static,
        late: impl FnOnce(T) + Send + 'static,
    ) -> Result<T> {
        let stuck = self.stuck();
        if stuck >= self.most {
            return Err(Error::new(
                ErrorKind::Unavailable,
                format!("cannot {what}: {stuck} earlier commands are stuck in the kernel"),
            )
            .with_repair(
                "see `dmesg` and `cat /proc/<pid of cleat node>/task/*/stack` for where they \
                 hang; commands work again when one of them has returned",
            ));
        }
        // Without a buffer, a result is either received by the caller or known to be late.
        let (sender, receiver) = bounded(0);
        let counter = Arc::clone(&self.stuck);
        std::thread::Builder::new()
            .name("kernel-command".into())
            .stack_size(256 << 10)
            .spawn(move || {
                let result = call();
                // Fails only after the caller has counted this call as stuck and left.
                let Err(SendError(result)) = sender.send(result) else { return };
                late(result);
                counter.fetch_sub(1, Ordering::Relaxed);
            })
            .map_err(|error| {
                Error::new(ErrorKind::NoSpace, format!("cannot start a thread to {what}"))
                    .with_source(error)
            })?;
        match receiver.recv_deadline(deadline) {
            Ok(result) => Ok(result),
            Err(RecvTimeoutError::Timeout) => {
                self.stuck.fetch_add(1, Ordering::Relaxed);
                Err(Error::new(ErrorKind::TimedOut, format!("the kernel did not {what} in time")))
            }
            Err(RecvTimeoutError::Disconnected) => {
                Err(Error::new(ErrorKind::Internal, format!("the thread to {what} panicked")))
            }
        }
    }

    /// Returns the number of calls that missed their deadline and have not returned.
    pub(super) fn stuck(&self) -> usize {
        self.stuck.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_stuck_call_is_left_behind_and_its_result_cleaned_up() {
        let threads = BoundedCalls::new(8);
        let (release, released) = bounded::<()>(0);
        let (cleaned, cleanup) = bounded(1);
        let deadline = Instant::now() + Duration::from_millis(20);
        let call = move || released.recv().is_ok();
        let late = move |result| cleaned.send(result).unwrap();
        let error = threads.run("wait", deadline, call, late).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert_eq!(threads.stuck(), 1);
        release.send(()).unwrap();
        assert_eq!(cleanup.recv_timeout(Duration::from_secs(10)), Ok(true));
    }

    #[test]
    fn stuck_calls_are_bounded() {
        let threads = BoundedCalls::new(3);
        let (release, released) = bounded::<()>(0);
        for _ in 0..3 {
            let released = released.clone();
            let call = move || released.recv().is_ok();
            assert!(threads.run("wait", Instant::now(), call, |_| ()).is_err());
        }
        let later = Instant::now() + Duration::from_secs(10);
        let refused = threads.run("wait", later, || (), drop).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unavailable);
        drop(release);
        while threads.stuck() > 0 {
            std::thread::yield_now();
        }
        threads.run("wait", later, || (), drop).unwrap();
    }
}
