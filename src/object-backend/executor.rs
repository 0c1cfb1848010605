//! The thread of an open volume: it polls the futures of the engine and of the requests.
//!
//! A future that is woken is polled again by the same thread, so the engine runs without contention. There is no
//! timer and no I/O here: both are operations of the store.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, JoinHandle, Thread};
use std::time::Instant;

use cleat_core::clock::{Clock, SystemClock};

/// A future that runs on the thread.
type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Identifies a future of an executor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct TaskId(u64);

/// The thread. Dropping it ends the thread; futures that have not ended are dropped.
pub(crate) struct Executor {
    inner: Arc<Inner>,
    thread: Option<JoinHandle<()>>,
}

/// Starts futures from any thread.
#[derive(Clone)]
pub(crate) struct Spawner(Arc<Inner>);

struct Inner {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    tasks: HashMap<TaskId, Entry>,
    ready: VecDeque<TaskId>,
    next: u64,
    is_stopped: bool,
}

struct Entry {
    /// `None` while it is polled.
    future: Option<Task>,
    wake: Arc<WakeTask>,
}

struct WakeTask {
    id: TaskId,
    inner: Arc<Inner>,
    /// It is in the queue of futures to poll.
    is_ready: AtomicBool,
}

impl Executor {
    /// Starts the thread.
    ///
    /// # Errors
    /// Returns the operating system's error.
    pub(crate) fn start(name: &str) -> io::Result<Self> {
        let inner = Arc::new(Inner { state: Mutex::default(), changed: Condvar::new() });
        let running = Arc::clone(&inner);
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || running.run())?;
        Ok(Self { inner, thread: Some(thread) })
    }

    pub(crate) fn spawner(&self) -> Spawner {
        Spawner(Arc::clone(&self.inner))
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        self.inner.lock().is_stopped = true;
        self.inner.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // An error means that the thread has panicked, and so has ended.
            let _ = thread.join();
        }
    }
}

impl Spawner {
    /// Runs `future` until it ends. Never blocks.
    pub(crate) fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) -> TaskId {
        let mut state = self.0.lock();
        state.next += 1;
        let id = TaskId(state.next);
        let is_ready = AtomicBool::new(true);
        let wake = Arc::new(WakeTask { id, inner: Arc::clone(&self.0), is_ready });
        state.tasks.insert(id, Entry { future: Some(Box::pin(future)), wake });
        state.ready.push_back(id);
        self.0.changed.notify_one();
        id
    }

    /// Drops a future, as soon as it is not being polled.
    pub(crate) fn cancel(&self, id: TaskId) {
        let entry = self.0.lock().tasks.remove(&id);
        drop(entry);
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        while let Some((id, mut future, wake)) = self.next() {
            wake.is_ready.store(false, Ordering::Release);
            let waker = Waker::from(wake);
            if future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
                self.lock().tasks.remove(&id);
                continue;
            }
            let mut state = self.lock();
            // A future that was cancelled meanwhile is dropped after the lock.
            let left = match state.tasks.get_mut(&id) {
                Some(entry) => {
                    entry.future = Some(future);
                    None
                }
                None => Some(future),
            };
            drop(state);
            drop(left);
        }
        let left = std::mem::take(&mut self.lock().tasks);
        drop(left);
    }

    /// Waits for a future that can be polled; `None` when the thread must end.
    fn next(&self) -> Option<(TaskId, Task, Arc<WakeTask>)> {
        let mut state = self.lock();
        loop {
            if state.is_stopped {
                return None;
            }
            let Some(id) = state.ready.pop_front() else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let entry = state.tasks.get_mut(&id);
            let found =
                entry.and_then(|entry| Some((entry.future.take()?, Arc::clone(&entry.wake))));
            if let Some((future, wake)) = found {
                return Some((id, future, wake));
            }
        }
    }
}

impl Wake for WakeTask {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.is_ready.swap(true, Ordering::AcqRel) {
            self.inner.lock().ready.push_back(self.id);
            self.inner.changed.notify_one();
        }
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a future on the calling thread, which blocks, at most until `deadline`. Returns `None` if the future has
/// not ended then; it is dropped.
pub(crate) fn block_until<T>(deadline: Instant, future: impl Future<Output = T>) -> Option<T> {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(result) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return Some(result);
        }
        let left = deadline.saturating_duration_since(SystemClock.now());
        if left.is_zero() {
            return None;
        }
        thread::park_timeout(left);
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    /// A future that ends when the other end is called, from any thread.
    fn gate() -> (Task, impl FnOnce()) {
        let state = Arc::new(Mutex::new((false, None::<Waker>)));
        let opened = Arc::clone(&state);
        let wait = poll_fn(move |context| {
            let mut state = state.lock().unwrap();
            state.1 = Some(context.waker().clone());
            if state.0 { Poll::Ready(()) } else { Poll::Pending }
        });
        let open = move || {
            let mut state = opened.lock().unwrap();
            state.0 = true;
            state.1.take().into_iter().for_each(Waker::wake);
        };
        (Box::pin(wait), open)
    }

    #[test]
    fn futures_wait_without_blocking_each_other_and_end_when_they_are_woken() {
        let executor = Executor::start("test").unwrap();
        let (done, ended) = mpsc::channel();
        let mut gates = Vec::new();
        for number in 0..100 {
            let (wait, open) = gate();
            let done = done.clone();
            executor.spawner().spawn(async move {
                wait.await;
                done.send(number).unwrap();
            });
            gates.push(open);
        }
        for (number, open) in gates.into_iter().enumerate().rev() {
            assert!(ended.try_recv().is_err());
            open();
            assert_eq!(ended.recv_timeout(Duration::from_secs(10)), Ok(number));
        }
    }

    #[test]
    fn a_cancelled_future_is_dropped_and_so_are_all_when_the_thread_ends() {
        let executor = Executor::start("test").unwrap();
        let (first, second) = (Arc::new(()), Arc::new(()));
        let wait = |held: Arc<()>| async move {
            std::future::pending::<()>().await;
            drop(held);
        };
        let id = executor.spawner().spawn(wait(Arc::clone(&first)));
        executor.spawner().spawn(wait(Arc::clone(&second)));
        executor.spawner().cancel(id);
        drop(executor);
        assert_eq!((Arc::strong_count(&first), Arc::strong_count(&second)), (1, 1));
    }

    #[test]
    fn a_wait_ends_at_its_deadline() {
        let soon = SystemClock.now() + Duration::from_millis(5);
        assert_eq!(block_until(soon, std::future::pending::<()>()), None);
        assert_eq!(block_until(soon, async { 7 }), Some(7));
    }
}
