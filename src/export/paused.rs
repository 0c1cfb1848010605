//! A connection that has stopped between two requests, so that its socket can go to another process.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cleat_core::error::{Error, ErrorKind, Result};

/// A paused connection: no request runs, and every reply has been sent.
#[derive(Debug)]
pub struct PausedConnection {
    /// A descriptor of its socket.
    pub socket: OwnedFd,
    /// Bytes that were received and not parsed. The process that continues begins with them.
    pub unread: Vec<u8>,
}

/// A slot in which a connection's thread publishes that it is paused, and for which another thread waits.
///
/// Invariant: a published value belongs to the present pause, and is taken once.
#[derive(Debug, Default)]
pub(super) struct PauseSlot {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Running,
    Paused(io::Result<PausedConnection>),
    /// The connection was paused, and the published value was taken.
    Taken,
    Ended,
}

impl PauseSlot {
    /// Publishes what `paused` returns, once per pause, if `still_wanted` returns `true`.
    pub(super) fn publish(
        &self,
        still_wanted: impl FnOnce() -> bool,
        paused: impl FnOnce() -> io::Result<PausedConnection>,
    ) {
        let mut state = self.lock();
        if matches!(*state, State::Running) && still_wanted() {
            *state = State::Paused(paused());
            self.changed.notify_all();
        }
    }

    /// Drops the published value and calls `resume`, which ends the pause, in one step.
    pub(super) fn clear(&self, resume: impl FnOnce()) {
        let mut state = self.lock();
        if !matches!(*state, State::Ended) {
            *state = State::Running;
        }
        resume();
    }

    /// Publishes that the connection has ended.
    pub(super) fn end(&self) {
        *self.lock() = State::Ended;
        self.changed.notify_all();
    }

    /// Waits until the connection is paused, at most for `limit`, and takes the published value.
    ///
    /// # Errors
    /// `TimedOut` when its requests do not end in time; `Aborted` when the connection has ended; the error
    /// of dup(2) when its descriptor could not be copied.
    pub(super) fn wait(&self, limit: Duration) -> Result<PausedConnection> {
        let running = |state: &mut State| matches!(state, State::Running);
        let waited = self.changed.wait_timeout_while(self.lock(), limit, running);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        match std::mem::replace(&mut *state, State::Taken) {
            State::Paused(paused) => {
                paused.map_err(|error| Error::from_io("cannot copy a connection's socket", error))
            }
            State::Running => {
                *state = State::Running;
                let message = "cannot pause a connection: its requests did not end in time";
                Err(Error::new(ErrorKind::TimedOut, message)
                    .with_repair("hand the volume over when its backend answers again"))
            }
            other => {
                *state = other;
                Err(Error::new(ErrorKind::Aborted, "cannot pause a connection: it has ended"))
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
