//! Flushes of devices, at most one at a time for each device.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::bounded_call::BoundedCalls;
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};

/// The maximum number of flushes that may be stuck, one for each device: each waits for its own backend.
const STUCK_FLUSHES: usize = 64;

/// The flushes in progress, at most one for each device: a second one would wait for the same backend.
#[derive(Debug)]
pub(super) struct Flushes {
    pub(super) threads: BoundedCalls,
    running: Arc<Running>,
}

/// The nodes that are being flushed.
#[derive(Debug, Default)]
struct Running {
    nodes: Mutex<BTreeSet<PathBuf>>,
    /// Notified when a flush ends.
    ended: Condvar,
}

impl Default for Flushes {
    fn default() -> Self {
        Self { threads: BoundedCalls::new(STUCK_FLUSHES), running: Arc::default() }
    }
}

impl Flushes {
    /// Runs `call`, which flushes the device node `node`, after an earlier flush of the node has ended: a
    /// flush whose caller has left ends when the device gets a new worker. Blocks until `deadline` at most.
    ///
    /// # Errors
    /// Returns `TimedOut` at the deadline.
    pub(super) fn run(
        &self,
        node: &Path,
        deadline: Instant,
        call: impl FnOnce() -> std::io::Result<()> + Send + 'static,
    ) -> Result<()> {
        let what = format!("flush {}", node.display());
        let hangs = |error: Error| {
            error.with_repair(
                "its backend does not answer: see `cleat stats` and the log of the daemon",
            )
        };
        if !self.running.begin(node, deadline) {
            let message = format!("cannot {what}: an earlier flush is still running");
            return Err(hangs(Error::new(ErrorKind::TimedOut, message)));
        }
        let entry = Entry { running: Arc::clone(&self.running), node: node.to_owned() };
        let call = move || {
            let _entry = entry;
            call()
        };
        let flushed =
            self.threads.run(&what, deadline, call, drop).map_err(|error| match error.kind() {
                ErrorKind::TimedOut => hangs(error),
                _ => error,
            })?;
        flushed.map_err(|error| Error::from_io(format!("cannot {what}"), error))
    }
}

impl Running {
    /// Adds `node` to the set when it is not being flushed any more. Returns false at `deadline`.
    fn begin(&self, node: &Path, deadline: Instant) -> bool {
        let mut nodes = lock(&self.nodes);
        while !nodes.insert(node.to_owned()) {
            let left = deadline.saturating_duration_since(SystemClock.now());
            if left.is_zero() {
                return false;
            }
            let waited = self.ended.wait_timeout(nodes, left);
            nodes = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

/// A node in the set of the nodes that are being flushed, until this value is dropped.
struct Entry {
    running: Arc<Running>,
    node: PathBuf,
}

impl Drop for Entry {
    fn drop(&mut self) {
        lock(&self.running.nodes).remove(&self.node);
        self.running.ended.notify_all();
    }
}

/// Takes the lock. Every change under it is complete, so the set is valid after a panic, too.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_flush_that_hangs_blocks_no_other_device_and_the_next_one_waits_for_it() {
        let flushes = Flushes::default();
        let (release, released) = crossbeam_channel::bounded::<()>(0);
        let deadline = Instant::now() + Duration::from_millis(20);
        let hanging = move || released.recv().map_err(std::io::Error::other);
        let node = |name: &str| PathBuf::from(name);
        let error = flushes.run(&node("/dev/nbd0"), deadline, hanging).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert!(error.repair().is_some());
        let later = Instant::now() + Duration::from_secs(10);
        let soon = Instant::now() + Duration::from_millis(20);
        let again = flushes.run(&node("/dev/nbd0"), soon, || Ok(())).unwrap_err();
        assert!(again.message().contains("still running"), "{again}");
        assert_eq!(flushes.threads.stuck(), 1);
        flushes.run(&node("/dev/nbd1"), later, || Ok(())).unwrap();
        let releasing = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            release.send(()).unwrap();
        });
        flushes.run(&node("/dev/nbd0"), later, || Ok(())).unwrap();
        releasing.join().unwrap();
    }
}
