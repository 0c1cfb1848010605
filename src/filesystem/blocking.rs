//! Short reads that may block, on threads of their own, with a deadline.
//!
//! The threads are not those of the runtime's pool: the runtime waits for its threads when it ends, and a
//! thread whose device does not answer would delay that without a limit.

use std::path::Path;

use cleat_core::error::{Error, ErrorKind, Result};
use tokio::sync::{Semaphore, oneshot};
use tokio::time::{Instant, timeout_at};

/// The maximum number of threads at the same time. Threads whose device does not answer count too.
const THREADS_MAX: usize = 128;

static THREADS: Semaphore = Semaphore::const_new(THREADS_MAX);

/// Runs `call` on a thread of its own and returns its result. After the deadline, or when the returned future
/// is dropped, the thread continues until the call returns. `what` describes the call: a verb and its object.
///
/// # Errors
/// Returns `TimedOut` at the deadline, also if 128 earlier calls still block then; `NoSpace` if
/// the kernel refuses a thread; otherwise the error of `call`.
pub async fn bounded<T: Send + 'static>(
    what: &str,
    subject: &Path,
    deadline: Instant,
    call: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let permit = timeout_at(deadline, THREADS.acquire()).await;
    // The semaphore is never closed.
    let Ok(Ok(permit)) = permit else { return Err(timed_out(what, subject, "waits for a thread")) };
    let (sender, receiver) = oneshot::channel();
    std::thread::Builder::new()
        .name("filesystem".to_owned())
        .spawn(move || {
            let _permit = permit;
            // The caller may have left.
            let _ = sender.send(call());
        })
        .map_err(|error| {
            let message = format!("cannot start a thread to {what} {}", subject.display());
            Error::new(ErrorKind::NoSpace, message).with_source(error)
        })?;
    match timeout_at(deadline, receiver).await {
        Ok(Ok(result)) => result,
        Ok(Err(_)) => {
            let message = format!("internal: the thread to {what} {} panicked", subject.display());
            Err(Error::new(ErrorKind::Internal, message))
        }
        Err(_) => Err(timed_out(what, subject, "the storage does not answer")),
    }
}

fn timed_out(what: &str, subject: &Path, why: &str) -> Error {
    let message = format!("could not {what} {} before the deadline: {why}", subject.display());
    Error::new(ErrorKind::TimedOut, message)
        .with_repair("check the storage of the volume, for example with cleat list, then retry")
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn a_call_that_blocks_is_left_at_the_deadline() {
        let (release, released) = channel::<()>();
        let deadline = Instant::now() + Duration::from_millis(50);
        let call = move || Ok(released.recv().is_ok());
        let error = bounded("read", Path::new("/dev/nbd0"), deadline, call).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert!(error.message().contains("read /dev/nbd0"), "{error}");
        drop(release);
        let later = Instant::now() + Duration::from_secs(60);
        assert_eq!(bounded("add", Path::new("/"), later, || Ok(2)).await.unwrap(), 2);
    }

    #[tokio::test]
    async fn a_panic_is_an_error() {
        let later = Instant::now() + Duration::from_secs(60);
        let call = || -> Result<()> { panic!("on purpose") };
        let error = bounded("read", Path::new("/dev/nbd0"), later, call).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Internal);
    }
}
