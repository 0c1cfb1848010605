//! Wakes a thread that waits with `poll` or on a ring.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use nix::sys::eventfd::{EfdFlags, EventFd};

/// Wakes a thread from any other thread, by an eventfd that the thread polls. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Waker(Arc<EventFd>);

impl Waker {
    /// Makes a waker.
    ///
    /// # Errors
    /// Returns `EMFILE` or `ENFILE` if no descriptor is left.
    pub fn new() -> std::io::Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(Self(Arc::new(EventFd::from_flags(flags)?)))
    }

    /// Makes [`Waker::descriptor`] readable. Never blocks.
    pub fn wake(&self) {
        // The write fails only after 2^64 - 1 wake-ups that were not taken.
        let _ = self.0.write(1);
    }

    /// Returns the descriptor to poll for reading.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Takes all pending wake-ups, so that the descriptor is no longer readable. Never blocks.
    pub fn take(&self) {
        // The read fails with EAGAIN if there were none.
        let _ = self.0.read();
    }
}
