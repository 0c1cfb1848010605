//! A directory that records are written to: the state directory, or the runtime directory with the copies.
//!
//! A disk that hangs blocks each thread that writes to it, for hours perhaps. The threads of each directory
//! are therefore limited, no further write starts while one hangs, and every write has a timeout.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

use crate::blocking::spawn;
use cleat_core::error::{Error, ErrorKind, Result};

/// The maximum number of writes to one directory in progress, those that hang included.
pub(crate) const MAX_WRITES: usize = 8;

/// A write that takes longer than this hangs.
const HUNG_AFTER: Duration = Duration::from_secs(2);

/// A directory that records are written to.
pub(crate) struct RecordDirectory {
    path: PathBuf,
    /// Describes the writes in traces.
    what: &'static str,
    slots: Arc<Semaphore>,
    running: Arc<Running>,
    problem: Mutex<Option<Problem>>,
}

/// Why a directory does not take records, and what its owner can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Problem {
    /// The error of the last write.
    pub(crate) message: String,
    /// What the owner can do.
    pub(crate) repair: String,
}

/// When the writes in progress began.
#[derive(Default)]
struct Running(Mutex<(u64, BTreeMap<u64, Instant>)>);

/// A write in progress. It ends when this is dropped.
struct Write {
    running: Arc<Running>,
    number: u64,
}

impl RecordDirectory {
    /// Creates the handle of the directory `path`. `what` describes the writes in traces.
    pub(crate) fn new(path: PathBuf, what: &'static str) -> Self {
        Self {
            path,
            what,
            slots: Arc::new(Semaphore::new(MAX_WRITES)),
            running: Arc::default(),
            problem: Mutex::default(),
        }
    }

    /// Returns the error of the last write, if it failed.
    pub(crate) fn problem(&self) -> Option<Problem> {
        lock(&self.problem).clone()
    }

    /// Waits until no write is in progress, hung ones included. Returns false if `deadline` passes before.
    pub(crate) async fn wait_until_idle(&self, deadline: Instant) -> bool {
        // New writes wait behind this.
        let idle = self.slots.acquire_many(u32::try_from(MAX_WRITES).unwrap_or(u32::MAX));
        timeout_at(deadline, idle).await.is_ok()
    }

    /// Runs `write`, which needs space, on a thread, with a flag that is set after the timeout. The thread
    /// holds `order`, so that the disk gets the writes of a mapping in their order. `write` continues when
    /// this call is cancelled or times out.
    ///
    /// # Errors
    /// Returns the error of `write`, and `TimedOut` if it does not end within `limit`. Returns `TimedOut` at
    /// once while an earlier write hangs.
    pub(crate) async fn write(
        &self,
        order: &Arc<tokio::sync::Mutex<()>>,
        limit: Duration,
        write: impl FnOnce(&AtomicBool) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        self.run(order, limit, true, write).await
    }

    /// Runs `remove` as [`RecordDirectory::write`] does. Its success does not prove that the directory takes
    /// records: a full one allows removals.
    ///
    /// # Errors
    /// As [`RecordDirectory::write`].
    pub(crate) async fn remove(
        &self,
        order: &Arc<tokio::sync::Mutex<()>>,
        limit: Duration,
        remove: impl FnOnce() -> Result<()> + Send + 'static,
    ) -> Result<()> {
        self.run(order, limit, false, |_| remove()).await
    }

    async fn run(
        &self,
        order: &Arc<tokio::sync::Mutex<()>>,
        limit: Duration,
        needs_space: bool,
        write: impl FnOnce(&AtomicBool) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let result = self.attempt(order, limit, write).await;
        let before = match &result {
            Ok(()) if !needs_space => return result,
            Ok(()) => lock(&self.problem).take(),
            Err(error) => lock(&self.problem).replace(Problem {
                message: error.report(),
                repair: error.repair().unwrap_or_default().to_owned(),
            }),
        };
        let path = self.path.display();
        match (before, &result) {
            (Some(_), Ok(())) => tracing::info!(%path, "the directory takes records again"),
            (None, Err(error)) => {
                tracing::error!(%path, "the directory takes no records: {}", error.report());
            }
            _ => {}
        }
        result
    }

    async fn attempt(
        &self,
        order: &Arc<tokio::sync::Mutex<()>>,
        limit: Duration,
        write: impl FnOnce(&AtomicBool) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        if self.running.hangs() {
            return Err(self.hung());
        }
        let deadline = Instant::now() + limit;
        let permits = async {
            let order = Arc::clone(order).lock_owned().await;
            // The semaphore is never closed.
            (order, Arc::clone(&self.slots).acquire_owned().await)
        };
        let Ok(permits) = timeout_at(deadline, permits).await else { return Err(self.hung()) };
        let cancelled = Arc::new(AtomicBool::new(false));
        let (is_cancelled, running) = (Arc::clone(&cancelled), Write::begin(&self.running));
        let thread = spawn(self.what, move || {
            let _held = (permits, running);
            write(&is_cancelled)
        });
        match timeout_at(deadline, thread).await {
            Ok(Ok(result)) => result,
            Ok(Err(panic)) => {
                let message = "internal: writing a journal record panicked";
                Err(Error::new(ErrorKind::Internal, message).with_source(panic))
            }
            Err(_) => {
                cancelled.store(true, Ordering::SeqCst);
                Err(self.hung())
            }
        }
    }

    fn hung(&self) -> Error {
        let path = self.path.display();
        let message = format!(
            "the disk of {path} did not write a journal record in time, and a write still waits"
        );
        Error::new(ErrorKind::TimedOut, message)
            .with_repair(format!("check the disk of {path}: see dmesg and /proc/pressure/io"))
    }
}

impl Running {
    /// Returns whether a write has been in progress for too long.
    fn hangs(&self) -> bool {
        lock(&self.0).1.values().any(|began| began.elapsed() >= HUNG_AFTER)
    }
}

impl Write {
    fn begin(running: &Arc<Running>) -> Self {
        let mut writes = lock(&running.0);
        writes.0 += 1;
        let number = writes.0;
        writes.1.insert(number, Instant::now());
        drop(writes);
        Self { running: Arc::clone(running), number }
    }
}

impl Drop for Write {
    fn drop(&mut self) {
        lock(&self.running.0).1.remove(&self.number);
    }
}

/// Locks a mutex, also after a panic of another holder: every change under it is complete.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const LIMIT: Duration = Duration::from_millis(50);

    fn order() -> Arc<tokio::sync::Mutex<()>> {
        Arc::default()
    }

    /// Many mappings write to a disk that hangs. The writes take only their own threads, all of them fail in
    /// time, and writes are possible again when the disk answers.
    #[tokio::test]
    async fn a_disk_that_hangs_takes_a_limited_number_of_threads() {
        let directory = Arc::new(RecordDirectory::new("/state".into(), "a write"));
        let (started, starts) = mpsc::channel();
        // Dropping `closed` opens the gate.
        let (closed, gate) = mpsc::channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        let mut calls = tokio::task::JoinSet::new();
        for _ in 0..100 {
            let (directory, gate, started) =
                (Arc::clone(&directory), Arc::clone(&gate), started.clone());
            calls.spawn(async move {
                let write = move |_: &AtomicBool| {
                    let _ = started.send(());
                    let _ = gate.lock().unwrap().recv();
                    Ok(())
                };
                directory.write(&order(), LIMIT, write).await
            });
        }
        for result in calls.join_all().await {
            let error = result.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::TimedOut, "{}", error.report());
            assert!(error.message().contains("/state") && error.repair().is_some());
        }
        assert!(directory.problem().is_some());
        // After a while no write is even tried.
        tokio::time::sleep(HUNG_AFTER).await;
        let began = Instant::now();
        let late = directory.write(&order(), HUNG_AFTER, |_| Ok(())).await;
        assert_eq!(late.unwrap_err().kind(), ErrorKind::TimedOut);
        assert!(began.elapsed() < HUNG_AFTER / 2);
        drop(closed);
        let deadline = Instant::now() + Duration::from_secs(10);
        while directory.write(&order(), LIMIT, |_| Ok(())).await.is_err() {
            assert!(Instant::now() < deadline, "the writes have not ended");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(directory.problem(), None);
        drop(started);
        assert_eq!(starts.iter().count(), MAX_WRITES);
    }

    #[tokio::test]
    async fn a_write_is_cancelled_at_its_timeout_and_delays_the_next_one_of_its_mapping() {
        let directory = RecordDirectory::new("/state".into(), "a write");
        let order = order();
        let (closed, gate) = mpsc::channel::<()>();
        let (sender, cancelled) = mpsc::channel();
        let write = move |cancelled: &AtomicBool| {
            let _ = gate.recv();
            let _ = sender.send(cancelled.load(Ordering::SeqCst));
            Ok(())
        };
        directory.write(&order, LIMIT, write).await.unwrap_err();
        directory.write(&order, LIMIT, |_| Ok(())).await.unwrap_err();
        assert!(!directory.wait_until_idle(Instant::now() + LIMIT).await);
        drop(closed);
        assert!(cancelled.recv_timeout(Duration::from_secs(10)).unwrap());
        directory.write(&order, Duration::from_secs(10), |_| Ok(())).await.unwrap();
        assert!(directory.wait_until_idle(Instant::now() + Duration::from_secs(10)).await);
    }

    #[tokio::test]
    async fn the_error_of_a_write_is_the_problem_of_the_directory() {
        let directory = RecordDirectory::new("/state".into(), "a write");
        let full = |_: &AtomicBool| {
            let error = std::io::Error::from_raw_os_error(libc::ENOSPC);
            Err(Error::from_io("cannot write", error).with_repair("free space"))
        };
        directory.write(&order(), LIMIT, full).await.unwrap_err();
        // A full disk allows removals.
        directory.remove(&order(), Duration::from_secs(10), || Ok(())).await.unwrap();
        let Problem { message, repair } = directory.problem().unwrap();
        assert!(message.contains("No space left on device"), "{message}");
        assert_eq!(repair, "free space");
        directory.write(&order(), Duration::from_secs(10), |_| Ok(())).await.unwrap();
        assert_eq!(directory.problem(), None);
    }
}
