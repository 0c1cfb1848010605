//! Makes the data of a file durable, with one `fdatasync` at a time for the whole volume.
//!
//! Linux reports a page that it could not write back once for each open file description, to the first sync
//! that checks (`file_check_and_advance_wb_err` in mm/filemap.c), and marks the page clean. A second sync at
//! the same time, on another thread or for another request, then succeeds although data of its request is
//! lost.
//!
//! Invariants:
//! - Only [`Syncer::sync`] syncs the open file description, under a lock. With direct access, writes with
//!   RWF_DSYNC do, too; see `queue`.
//! - A request that waits for a sync gets the result of one that began after the request had come. All
//!   requests that wait when a sync begins get its result.
//! - After a failure every later sync fails without a system call. The failure is kept for the successor
//!   worker (`HandoverState::sync_failed`) and for every worker after it (`OpenOptions::sync_failed`).

use std::fs::File;
use std::io;
#[cfg(feature = "fault")]
use std::sync::atomic::AtomicI32;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;

use crate::{Completer, Outcome, RequestId, Waker};
use cleat_core::error::{Error, Result};
use cleat_core::request::IoError;

/// Enough for a line of the log. Only touched pages use memory.
const STACK_BYTES: usize = 256 << 10;

/// The syncs of an open file. Dropping it ends its thread, unless the thread waits for the storage.
pub(super) struct Syncer {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    file: Arc<File>,
    path: String,
    state: Mutex<State>,
    changed: Condvar,
    /// Held during a sync.
    turn: Mutex<()>,
    failed: AtomicBool,
    /// Wakes the owner of the volume when a sync has failed.
    watcher: OnceLock<Waker>,
    /// The errno with which the next sync fails; 0: none.
    #[cfg(feature = "fault")]
    injected: AtomicI32,
    /// No sync is done, and each one succeeds.
    #[cfg(feature = "fault")]
    drops: AtomicBool,
}

#[derive(Default)]
struct State {
    /// The requests that wait for the next sync. The limits of their connections bound the number.
    waiting: Vec<(Completer, RequestId)>,
    /// A sync runs.
    running: bool,
    /// A write with RWF_DSYNC has failed, which is not logged yet.
    unlogged: Option<i32>,
    ended: bool,
}

impl Syncer {
    pub(super) fn new(file: Arc<File>, path: String) -> Self {
        let shared = Shared {
            file,
            path,
            state: Mutex::default(),
            changed: Condvar::new(),
            turn: Mutex::default(),
            failed: AtomicBool::new(false),
            watcher: OnceLock::new(),
            #[cfg(feature = "fault")]
            injected: AtomicI32::new(0),
            #[cfg(feature = "fault")]
            drops: AtomicBool::new(false),
        };
        Self { shared: Arc::new(shared), thread: Mutex::default() }
    }

    /// Starts the thread at the first call. Threads that are started before the confinement would escape it,
    /// so the opening of the volume does not call this.
    ///
    /// # Errors
    /// Returns an error if no thread can be started.
    pub(super) fn start(&self) -> Result<()> {
        let mut thread = lock(&self.thread);
        if thread.is_none() {
            let shared = Arc::clone(&self.shared);
            let builder = std::thread::Builder::new().name("sync".to_owned());
            let started = builder.stack_size(STACK_BYTES).spawn(move || shared.run());
            let failed = |e| Error::from_io("cannot start the thread for syncs", e);
            *thread = Some(started.map_err(failed)?);
        }
        Ok(())
    }

    /// Completes an operation of the request `id` with the result of the next sync to begin. Does not wait
    /// for the storage.
    ///
    /// # Errors
    /// Returns `Broken` if a sync has failed earlier.
    pub(super) fn request(&self, completer: &Completer, id: RequestId) -> Result<(), IoError> {
        if self.has_failed() {
            return Err(IoError::Broken);
        }
        lock(&self.shared.state).waiting.push((completer.clone(), id));
        self.shared.changed.notify_one();
        Ok(())
    }

    /// Returns the requests of a connection that wait for a sync which has not begun, and forgets them.
    pub(super) fn forget(&self, completer: &Completer) -> Vec<RequestId> {
        let mut state = lock(&self.shared.state);
        let own = state.waiting.extract_if(.., |(other, _)| other.is_same(completer));
        own.map(|(_, id)| id).collect()
    }

    /// Syncs the file. Blocks until the storage has answered, and while another sync runs.
    ///
    /// # Errors
    /// Returns the error of the sync, and EIO if a sync has failed earlier.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.shared.sync()
    }

    /// Returns whether a sync has failed.
    pub(super) fn has_failed(&self) -> bool {
        self.shared.failed.load(Ordering::Acquire)
    }

    /// Records that a sync failed in a process that had the volume open before.
    pub(super) fn set_failed_before(&self) {
        self.shared.failed.store(true, Ordering::Release);
    }

    /// Records that a write with RWF_DSYNC failed. Does not wait.
    pub(super) fn set_failed(&self, errno: i32) {
        if self.shared.set_failed() {
            lock(&self.shared.state).unlogged = Some(errno);
            self.shared.changed.notify_one();
        }
    }

    /// Wakes `waker` when a sync fails.
    pub(super) fn watch(&self, waker: Waker) {
        // The owner of the volume calls this once.
        let _ = self.shared.watcher.set(waker);
    }

    /// Makes the next sync fail with EIO and the ones after it succeed, as the kernel does for a lost page.
    #[cfg(feature = "fault")]
    pub(super) fn inject_failure(&self) {
        self.shared.injected.store(libc::EIO, Ordering::Release);
    }

    /// Sets whether syncs are left out and succeed.
    #[cfg(feature = "fault")]
    pub(super) fn set_drops(&self, drops: bool) {
        self.shared.drops.store(drops, Ordering::Release);
    }

    /// Returns whether an injected fault leaves out the syncs; always false without the feature `fault`.
    pub(super) fn drops(&self) -> bool {
        self.shared.drops()
    }
}

impl Drop for Syncer {
    fn drop(&mut self) {
        let running = {
            let mut state = lock(&self.shared.state);
            state.ended = true;
            state.running
        };
        self.shared.changed.notify_one();
        // The thread has the file open, and with it the claim, until it ends. A sync that runs may wait for
        // the storage for any time, so it is not waited for.
        if let Some(thread) = lock(&self.thread).take().filter(|_| !running) {
            // A panic of the thread is its end, too.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn run(&self) {
        loop {
            let mut state = lock(&self.state);
            while !state.ended && state.waiting.is_empty() && state.unlogged.is_none() {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            if state.ended {
                return;
            }
            let unlogged = state.unlogged.take();
            let group = std::mem::take(&mut state.waiting);
            state.running = !group.is_empty();
            drop(state);
            if let Some(errno) = unlogged {
                self.log(&io::Error::from_raw_os_error(errno));
            }
            if group.is_empty() {
                continue;
            }
            // For any error the data is not durable, and no repetition makes it durable.
            let result = self.sync().map_err(|_| IoError::Broken);
            for (completer, id) in group {
                completer.complete(id, Outcome { result, buffer: None });
            }
            lock(&self.state).running = false;
        }
    }

    fn sync(&self) -> io::Result<()> {
        let _turn = lock(&self.turn);
        if self.failed.load(Ordering::Acquire) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        let synced = self.fdatasync();
        if let Err(error) = &synced
            && self.set_failed()
        {
            self.log(error);
        }
        synced
    }

    #[cfg(feature = "fault")]
    fn drops(&self) -> bool {
        self.drops.load(Ordering::Acquire)
    }

    #[cfg(not(feature = "fault"))]
    fn drops(&self) -> bool {
        false
    }

    fn fdatasync(&self) -> io::Result<()> {
        if self.drops() {
            return Ok(());
        }
        loop {
            #[cfg(feature = "fault")]
            match self.injected.swap(0, Ordering::AcqRel) {
                0 => {}
                errno => return Err(io::Error::from_raw_os_error(errno)),
            }
            match self.file.sync_data() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                done => return done,
            }
        }
    }

    /// Returns whether this is the first failure.
    fn set_failed(&self) -> bool {
        let first = !self.failed.swap(true, Ordering::AcqRel);
        if let Some(watcher) = self.watcher.get().filter(|_| first) {
            watcher.wake();
        }
        first
    }

    fn log(&self, error: &io::Error) {
        tracing::error!(
            path = %self.path, %error,
            "a sync failed: acknowledged writes may be lost; every FLUSH and every write with FUA fails from now on"
        );
    }
}

/// Locks a mutex, also after a panic of another holder: every change under it is complete.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channel;

    fn syncer() -> Syncer {
        let file = Arc::new(tempfile::tempfile().unwrap());
        let syncer = Syncer::new(file, "test".to_owned());
        syncer.start().unwrap();
        syncer
    }

    /// Waits for `count` completions.
    fn results(
        waker: &Waker,
        completions: &crate::Completions,
        count: usize,
    ) -> Vec<Result<(), IoError>> {
        use nix::poll::{PollFd, PollFlags, poll};
        let mut results = Vec::new();
        while results.len() < count {
            let mut set = [PollFd::new(waker.descriptor(), PollFlags::POLLIN)];
            assert!(poll(&mut set, 10_000_u16).unwrap() > 0, "no completion");
            waker.take();
            completions.accept();
            results.extend(std::iter::from_fn(|| completions.next()).map(|(_, done)| done.result));
        }
        results
    }

    #[test]
    fn a_request_waits_for_a_sync_that_begins_after_it_and_shares_it_with_others() {
        let syncer = syncer();
        let waker = Waker::new().unwrap();
        let (completer, completions) = channel(waker.clone(), 8);
        // A sync that runs.
        let turn = lock(&syncer.shared.turn);
        syncer.request(&completer, 0).unwrap();
        while !lock(&syncer.shared.state).running {
            std::thread::yield_now();
        }
        for id in 1..4 {
            syncer.request(&completer, id).unwrap();
        }
        assert_eq!(lock(&syncer.shared.state).waiting.len(), 3);
        drop(turn);
        assert_eq!(results(&waker, &completions, 4), [Ok(()); 4]);
    }

    #[test]
    fn a_connection_that_ends_takes_only_its_waiting_requests_with_it() {
        let syncer = syncer();
        let wakers = [Waker::new().unwrap(), Waker::new().unwrap()];
        let [(one, _), (two, completions)] = wakers.clone().map(|waker| channel(waker, 8));
        let turn = lock(&syncer.shared.turn);
        syncer.request(&one, 0).unwrap();
        while !lock(&syncer.shared.state).running {
            std::thread::yield_now();
        }
        syncer.request(&one, 1).unwrap();
        syncer.request(&two, 2).unwrap();
        assert_eq!(syncer.forget(&one), [1]);
        drop(turn);
        assert_eq!(results(&wakers[1], &completions, 1), [Ok(())]);
    }

    fn is_woken(waker: &Waker) -> bool {
        use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
        let mut set = [PollFd::new(waker.descriptor(), PollFlags::POLLIN)];
        poll(&mut set, PollTimeout::ZERO).unwrap() > 0
    }

    #[test]
    fn a_failure_of_an_earlier_process_or_of_a_durable_write_counts() {
        let earlier = syncer();
        earlier.sync().unwrap();
        earlier.set_failed_before();
        let written = syncer();
        let watcher = Waker::new().unwrap();
        written.watch(watcher.clone());
        written.set_failed(libc::EIO);
        assert!(is_woken(&watcher), "the owner was not woken");
        watcher.take();
        written.set_failed(libc::EIO);
        assert!(!is_woken(&watcher), "the first failure is reported once");
        for failed in [earlier, written] {
            assert!(failed.has_failed());
            let (completer, _) = channel(Waker::new().unwrap(), 1);
            assert_eq!(failed.request(&completer, 0), Err(IoError::Broken));
            assert_eq!(failed.sync().unwrap_err().raw_os_error(), Some(libc::EIO));
        }
    }

    /// The open file carries the claim of the volume.
    #[test]
    fn the_thread_closes_the_file_at_the_end_and_a_sync_that_hangs_does_not_block() {
        let file = Arc::new(tempfile::tempfile().unwrap());
        let idle = Syncer::new(Arc::clone(&file), "test".to_owned());
        idle.start().unwrap();
        drop(idle);
        assert_eq!(Arc::strong_count(&file), 1);
        let hanging = syncer();
        let (completer, _completions) = channel(Waker::new().unwrap(), 1);
        let shared = Arc::clone(&hanging.shared);
        let turn = lock(&shared.turn);
        hanging.request(&completer, 0).unwrap();
        while !lock(&shared.state).running {
            std::thread::yield_now();
        }
        drop(hanging);
        drop(turn);
    }

    #[cfg(feature = "fault")]
    #[test]
    fn a_volume_that_drops_its_syncs_does_none() {
        let syncer = syncer();
        syncer.inject_failure();
        syncer.set_drops(true);
        assert!(syncer.drops() && syncer.sync().is_ok());
        syncer.set_drops(false);
        assert!(!syncer.drops() && syncer.sync().is_err());
    }

    #[cfg(feature = "fault")]
    #[test]
    fn a_failure_reaches_every_waiting_request_and_all_later_ones() {
        let syncer = syncer();
        let waker = Waker::new().unwrap();
        let (completer, completions) = channel(waker.clone(), 8);
        let watcher = Waker::new().unwrap();
        syncer.watch(watcher.clone());
        let turn = lock(&syncer.shared.turn);
        syncer.request(&completer, 0).unwrap();
        while !lock(&syncer.shared.state).running {
            std::thread::yield_now();
        }
        syncer.request(&completer, 1).unwrap();
        syncer.inject_failure();
        drop(turn);
        assert_eq!(results(&waker, &completions, 2), [Err(IoError::Broken); 2]);
        // The kernel would report success now.
        assert_eq!(syncer.request(&completer, 2), Err(IoError::Broken));
        assert_eq!(syncer.sync().unwrap_err().raw_os_error(), Some(libc::EIO));
        assert!(is_woken(&watcher), "the owner was not woken");
    }
}
