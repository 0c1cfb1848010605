//! Threads for the operations of a store that block, and a timer for the waits between two attempts.
//!
//! The timer has no clock: it counts sleeps of a fixed length, and runs only while something waits.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::thread;
use std::time::Duration;

use super::Pending;

/// The first wait before a retry, and the longest. The actual waits differ from them by up to a quarter, so that
/// nodes that have failed together do not repeat together.
const BACK_OFF: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(5)];

/// The precision of waits.
const TICK: Duration = Duration::from_millis(10);

type Job = Box<dyn FnOnce() + Send>;

/// Which threads run a job. Each lane has its own, so that jobs of one lane never wait for those of the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    /// Reads: a caller waits.
    Read,
    /// Everything else, for example the puts of a checkpoint.
    Change,
}

/// Threads of a store. They end when it is dropped, after the operations that have started.
pub struct Pool {
    reads: Sender<Job>,
    changes: Sender<Job>,
    timer: Arc<Timer>,
    back_off: BackOff,
}

/// The waits before operations are tried again.
#[derive(Debug)]
pub struct BackOff(AtomicU64);

impl Default for BackOff {
    fn default() -> Self {
        Self(AtomicU64::new(std::process::id().into()))
    }
}

impl BackOff {
    /// Returns how long to wait before the next attempt: 50 ms to 5 s, and up to a quarter more or less. `attempt` is
    /// the number of failures, from 1.
    pub fn next(&self, attempt: u32) -> Duration {
        let [first, longest] = BACK_OFF;
        let time = first.saturating_mul(1 << attempt.saturating_sub(1).min(16)).min(longest);
        // The upper bits of a multiple of the golden ratio are spread evenly.
        let count = self.0.fetch_add(1, Ordering::Relaxed);
        let spread = count.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58;
        let percent = 75 + u32::try_from(spread * 50 / 63).unwrap_or(0);
        time * percent / 100
    }
}

impl Pool {
    /// Starts `readers` threads for reads, `writers` threads for everything else, and a timer. `name` begins the names
    /// of the threads.
    ///
    /// # Errors
    /// Returns the operating system's error if no thread can be started.
    pub fn start(name: &str, readers: usize, writers: usize) -> io::Result<Self> {
        let reads = start_lane(&format!("{name}-read"), readers)?;
        let changes = start_lane(name, writers)?;
        let timer = Arc::new(Timer::default());
        let ticking = Arc::clone(&timer);
        thread::Builder::new().name(format!("{name}-timer")).spawn(move || ticking.run())?;
        Ok(Self { reads, changes, timer, back_off: BackOff::default() })
    }

    /// Runs `job` on one of the threads of the lane. It runs also if the result is dropped.
    pub fn run<'a, T: Send + 'static>(
        &self,
        lane: Lane,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Pending<'a, T> {
        let answer = Arc::new(Answer::default());
        let filled = Arc::clone(&answer);
        // The threads run as long as the sender exists, so the queue takes every job.
        let jobs = match lane {
            Lane::Read => &self.reads,
            Lane::Change => &self.changes,
        };
        let _ = jobs.send(Box::new(move || filled.fill(job())));
        answer.wait()
    }

    /// Waits before an operation is tried again; `attempt` is the number of failures, from 1.
    pub fn back_off(&self, attempt: u32) -> Pending<'static, ()> {
        self.wait(self.back_off.next(attempt))
    }

    /// Waits.
    pub fn wait(&self, time: Duration) -> Pending<'static, ()> {
        let answer = Arc::new(Answer::default());
        self.timer.lock().waits.push((time, Arc::clone(&answer)));
        self.timer.changed.notify_one();
        answer.wait()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.timer.lock().is_closed = true;
        self.timer.changed.notify_one();
    }
}

fn start_lane(name: &str, count: usize) -> io::Result<Sender<Job>> {
    let (jobs, queue) = channel::<Job>();
    let queue = Arc::new(Mutex::new(queue));
    for number in 0..count {
        let queue = Arc::clone(&queue);
        let thread = thread::Builder::new().name(format!("{name}-{number}"));
        thread.spawn(move || work(&queue))?;
    }
    Ok(jobs)
}

/// Runs jobs until the pool is dropped.
fn work(queue: &Mutex<Receiver<Job>>) {
    loop {
        let job = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(job) = job else { return };
        job();
    }
}

/// The result of a job that a future waits for.
struct Answer<T>(Mutex<(Option<T>, Option<Waker>)>);

impl<T> Default for Answer<T> {
    fn default() -> Self {
        Self(Mutex::new((None, None)))
    }
}

impl<T: Send + 'static> Answer<T> {
    fn lock(&self) -> MutexGuard<'_, (Option<T>, Option<Waker>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fill(&self, result: T) {
        let mut answer = self.lock();
        answer.0 = Some(result);
        if let Some(waker) = answer.1.take() {
            waker.wake();
        }
    }

    fn wait<'a>(self: Arc<Self>) -> Pending<'a, T> {
        Box::pin(std::future::poll_fn(move |context| {
            let mut answer = self.lock();
            match answer.0.take() {
                Some(result) => Poll::Ready(result),
                None => {
                    answer.1 = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        }))
    }
}

#[derive(Default)]
struct Timer {
    state: Mutex<Waits>,
    changed: Condvar,
}

#[derive(Default)]
struct Waits {
    /// The time that is left of each wait.
    waits: Vec<(Duration, Arc<Answer<()>>)>,
    is_closed: bool,
}

impl Timer {
    fn lock(&self) -> MutexGuard<'_, Waits> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[allow(clippy::disallowed_methods, reason = "a thread of its own that only counts time")]
    fn run(&self) {
        loop {
            let mut state = self.lock();
            while state.waits.is_empty() && !state.is_closed {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            if state.is_closed {
                return;
            }
            drop(state);
            thread::sleep(TICK);
            self.tick();
        }
    }

    fn tick(&self) {
        let mut state = self.lock();
        let waits = std::mem::take(&mut state.waits);
        for (left, answer) in waits {
            match left.checked_sub(TICK).filter(|left| !left.is_zero()) {
                Some(left) => state.waits.push((left, answer)),
                None => answer.fill(()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_do_not_wait_for_changes() {
        let pool = Pool::start("test", 1, 2).unwrap();
        let (end, ended) = channel::<()>();
        let ended = Arc::new(Mutex::new(ended));
        for _ in 0..20 {
            let ended = Arc::clone(&ended);
            drop(pool.run(Lane::Change, move || {
                let _ = ended.lock().unwrap().recv();
            }));
        }
        // Without a lane of its own, the read would wait until the sender is dropped.
        let (done, result) = channel();
        drop(pool.run(Lane::Read, move || done.send(7)));
        assert_eq!(result.recv_timeout(Duration::from_secs(10)), Ok(7));
        drop(end);
    }
}
