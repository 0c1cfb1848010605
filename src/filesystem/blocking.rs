//! Short reads that may block, on threads of their own, with a deadline.
//!
//! The threads are not those of the runtime's pool: the runtime waits for its threads when it ends, and a
//! thread whose device does not answer would delay that without a limit.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cleat_core::error::{Error, ErrorKind, Result};
use tokio::sync::{Semaphore, oneshot};
use tokio::time::{Instant, timeout_at};

/// The maximum number of threads at the same time. Threads whose device does not answer count too.
const THREADS_MAX: usize = 128;

static THREADS: Semaphore = Semaphore::const_new(THREADS_MAX);

/// The maximum number of threads that callers have left behind in the same call for the same path. Without it, the
/// repeated calls for one volume that hangs would take all threads, and calls for healthy volumes would fail.
const LEFT_MAX: usize = 2;

/// A call and its path. The path alone would be too much: a mount can be looked for where its space cannot be read.
type Key = (String, PathBuf);

/// The number of threads that callers have left behind.
static LEFT: Mutex<BTreeMap<Key, usize>> = Mutex::new(BTreeMap::new());

/// Runs `call` on a thread of its own and returns its result. After the deadline, or when the returned future
/// is dropped, the thread continues until the call returns. `what` describes the call: a verb and its object.
///
/// # Errors
/// Returns `TimedOut` at the deadline, also if 128 earlier calls still block then, and at once if earlier callers have
/// left two threads behind that block in the same call for the same path; `NoSpace` if the kernel refuses a thread;
/// otherwise the error of `call`.
pub async fn bounded<T: Send + 'static>(
    what: &str,
    subject: &Path,
    deadline: Instant,
    call: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let key = (what.to_owned(), subject.to_owned());
    let left_behind = left().get(&key).copied().unwrap_or_default();
    if left_behind >= LEFT_MAX {
        return Err(refused(what, subject, left_behind));
    }
    let permit = timeout_at(deadline, THREADS.acquire()).await;
    // The semaphore is never closed.
    let Ok(Ok(permit)) = permit else { return Err(timed_out(what, subject, "waits for a thread")) };
    let (sender, receiver) = oneshot::channel();
    let progress = Arc::new(Progress { key, state: Mutex::new(State::Awaited) });
    let running = Running(Arc::clone(&progress));
    let _caller = Caller(progress);
    std::thread::Builder::new()
        .name("filesystem".to_owned())
        .spawn(move || {
            let _permit = permit;
            let result = call();
            // The call does not count as left behind when the caller has its result.
            drop(running);
            // The caller may have left.
            let _ = sender.send(result);
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

/// What the caller and the thread of a call know of each other.
struct Progress {
    key: Key,
    state: Mutex<State>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The caller waits for the thread.
    Awaited,
    /// The caller has left, and the thread is counted in [`LEFT`].
    Left,
    /// The call has returned.
    Ended,
}

/// The caller of a call, which leaves when this is dropped.
struct Caller(Arc<Progress>);

/// The thread of a call, which has ended when this is dropped.
struct Running(Arc<Progress>);

impl Progress {
    /// Changes the state, and the number of threads that are left behind.
    fn set(&self, change: impl FnOnce(State) -> State) {
        // No code panics while it holds the lock.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let earlier = *state;
        *state = change(earlier);
        match (earlier, *state) {
            (State::Awaited, State::Left) => *left().entry(self.key.clone()).or_default() += 1,
            (State::Left, State::Ended) => self.forget(),
            _ => {}
        }
    }

    fn forget(&self) {
        let mut left = left();
        if let Some(count) = left.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                left.remove(&self.key);
            }
        }
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.0.set(|state| if state == State::Awaited { State::Left } else { state });
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.set(|_| State::Ended);
    }
}

fn left() -> MutexGuard<'static, BTreeMap<Key, usize>> {
    // No code panics while it holds the lock.
    LEFT.lock().unwrap_or_else(PoisonError::into_inner)
}

fn refused(what: &str, subject: &Path, left_behind: usize) -> Error {
    let subject = subject.display();
    let message = format!(
        "could not {what} {subject}: {left_behind} earlier calls still wait for the storage, which does not answer"
    );
    Error::new(ErrorKind::TimedOut, message).with_repair(
        "check the storage of the volume, for example with cleat list; the call can be repeated when it answers",
    )
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
    async fn a_path_that_hangs_leaves_few_threads_behind() {
        let hung = Path::new("/mnt/that/hangs");
        let mut gates = Vec::new();
        for _ in 0..LEFT_MAX {
            let (release, released) = channel::<()>();
            let soon = Instant::now() + Duration::from_millis(20);
            let call = move || Ok(released.recv().is_ok());
            assert!(bounded("stat", hung, soon, call).await.is_err());
            gates.push(release);
        }
        let later = || Instant::now() + Duration::from_secs(60);
        let begun = Instant::now();
        let refused = bounded("stat", hung, later(), || Ok(1)).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::TimedOut);
        assert!(refused.message().contains("2 earlier calls still wait"), "{refused}");
        assert!(begun.elapsed() < Duration::from_secs(30));
        // Other calls for the path, and the same call for another path, are not affected.
        assert_eq!(bounded("find", hung, later(), || Ok(2)).await.unwrap(), 2);
        assert_eq!(bounded("stat", Path::new("/mnt"), later(), || Ok(3)).await.unwrap(), 3);
        // The path is usable again when one of the calls has returned.
        gates.pop();
        while bounded("stat", hung, later(), || Ok(())).await.is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        drop(gates);
    }

    #[tokio::test]
    async fn calls_that_are_awaited_are_not_limited_by_their_path() {
        let path = Path::new("/proc/self/mountinfo");
        let later = Instant::now() + Duration::from_secs(60);
        let calls: Vec<_> = (0..64)
            .map(|number| tokio::spawn(bounded("read", path, later, move || Ok(number))))
            .collect();
        for (number, call) in calls.into_iter().enumerate() {
            assert_eq!(call.await.unwrap().unwrap(), number);
        }
    }

    #[tokio::test]
    async fn a_panic_is_an_error() {
        let later = Instant::now() + Duration::from_secs(60);
        let call = || -> Result<()> { panic!("on purpose") };
        let error = bounded("read", Path::new("/dev/nbd0"), later, call).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Internal);
    }
}
