//! Flushes of devices, at most one at a time for each device.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::bounded_call::BoundedCalls;
use cleat_core::error::{Error, ErrorKind, Result};

/// Flushes that may be stuck, one a device: each waits for a backend of its own.
const STUCK_FLUSHES: usize = 64;

/// Flushes under way: one a device, as one that hangs tells all that another would.
#[derive(Debug)]
pub(super) struct Flushes {
    pub(super) threads: BoundedCalls,
    nodes: Arc<Mutex<BTreeSet<PathBuf>>>,
}

impl Default for Flushes {
    fn default() -> Self {
        Self { threads: BoundedCalls::new(STUCK_FLUSHES), nodes: Arc::default() }
    }
}

impl Flushes {
    pub(super) fn run(
        &self,
        node: &Path,
        deadline: Instant,
        call: impl FnOnce() -> std::io::Result<()> + Send + 'static,
    ) -> Result<()> {
        let what = format!("flush {}", node.display());
        let hangs = |error: Error| {
            error.with_repair("its backend does not answer: see `cleat stats` and the daemon's log")
        };
        let begun = lock(&self.nodes).insert(node.to_owned());
        if !begun {
            let message = format!("cannot {what}: an earlier flush of it is still under way");
            return Err(hangs(Error::new(ErrorKind::TimedOut, message)));
        }
        let entry = Entry { nodes: Arc::clone(&self.nodes), node: node.to_owned() };
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

/// A node among those that are being flushed.
struct Entry {
    nodes: Arc<Mutex<BTreeSet<PathBuf>>>,
    node: PathBuf,
}

impl Drop for Entry {
    fn drop(&mut self) {
        lock(&self.nodes).remove(&self.node);
    }
}

/// The lock, whoever panicked with it: what it protects is whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn one_flush_that_hangs_stops_no_other_and_is_not_piled_upon() {
        let flushes = Flushes::default();
        let (release, released) = crossbeam_channel::bounded::<()>(0);
        let soon = Instant::now() + Duration::from_millis(20);
        let hanging = move || released.recv().map_err(std::io::Error::other);
        let node = |name: &str| PathBuf::from(name);
        let error = flushes.run(&node("/dev/nbd0"), soon, hanging).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert!(error.repair().is_some());
        let later = Instant::now() + Duration::from_secs(10);
        let again = flushes.run(&node("/dev/nbd0"), later, || Ok(())).unwrap_err();
        assert!(again.message().contains("still under way"), "{again}");
        assert_eq!(flushes.threads.stuck(), 1);
        flushes.run(&node("/dev/nbd1"), later, || Ok(())).unwrap();
        release.send(()).unwrap();
        while flushes.run(&node("/dev/nbd0"), later, || Ok(())).is_err() {
            std::thread::yield_now();
        }
    }
}
