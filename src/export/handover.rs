//! A planned hand-over: connections come to rest between two requests, and their sockets go on to
//! another process, with the bytes that were received and not understood yet.
//!
//! A connection that is to pause cancels the receive that waits for more, finishes a write whose
//! payload is arriving, lets what runs at the backend end and every reply leave. Then it is at rest:
//! its thread keeps the socket and waits, so that taking the pause back costs a wake-up and cannot
//! fail. Only when the socket is somebody else's does the thread end, without shutting it down.
//!
//! The other side begins at rest as well: everything that may fail (thread, ring, the backend's
//! queue) has happened before it is told to run.

use std::os::fd::OwnedFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::connection::{CANCEL, Connection, RECEIVE};
use super::control::Desired;
use super::server::{ConnectionId, Kind, Server};
use cleat_core::error::{Error, ErrorKind, Result};

/// A connection at rest.
#[derive(Debug)]
pub struct Rest {
    /// A descriptor of its socket.
    pub socket: OwnedFd,
    /// What was received and not understood yet: the first bytes for whoever goes on.
    pub unread: Vec<u8>,
}

/// Where a connection thread shows that it is at rest.
#[derive(Debug, Default)]
pub(super) struct Berth {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    UnderWay,
    AtRest(std::io::Result<Rest>),
    /// Shown, and taken by whoever asked.
    Taken,
    Ended,
}

impl Berth {
    /// Shows what `rest` gives, once, if `still` holds: what is shown is never older than the pause.
    fn moor(&self, still: impl FnOnce() -> bool, rest: impl FnOnce() -> std::io::Result<Rest>) {
        let mut state = self.lock();
        if matches!(*state, State::UnderWay) && still() {
            *state = State::AtRest(rest());
            self.changed.notify_all();
        }
    }

    /// Forgets what was shown and does `change`, which ends the pause, in one step.
    pub(super) fn clear(&self, change: impl FnOnce()) {
        let mut state = self.lock();
        if !matches!(*state, State::Ended) {
            *state = State::UnderWay;
        }
        change();
    }

    /// The connection is over.
    pub(super) fn end(&self) {
        *self.lock() = State::Ended;
        self.changed.notify_all();
    }

    fn wait(&self, until: Instant) -> Result<Rest> {
        let limit = until.saturating_duration_since(Instant::now());
        let under_way = |state: &mut State| matches!(state, State::UnderWay);
        let waited = self.changed.wait_timeout_while(self.lock(), limit, under_way);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        match std::mem::replace(&mut *state, State::Taken) {
            State::AtRest(rest) => {
                rest.map_err(|error| Error::from_io("cannot copy a connection's socket", error))
            }
            State::UnderWay => {
                *state = State::UnderWay;
                Err(Error::new(
                    ErrorKind::TimedOut,
                    "requests did not end in time: the backend has not finished them",
                )
                .with_repair("hand the volume over when its backend answers again"))
            }
            other => {
                *state = other;
                Err(Error::new(ErrorKind::Aborted, "a connection ended meanwhile"))
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Server {
    /// Brings every connection to rest, or none: after `limit`, or when one cannot, all go on as if
    /// nothing had been asked.
    ///
    /// # Errors
    /// `TimedOut` when the backend holds on to requests; `Aborted` when a connection ends meanwhile.
    pub fn hand_over(&self, limit: Duration) -> Result<Vec<Rest>> {
        let until = Instant::now() + limit;
        let controls = self.controls();
        controls.iter().for_each(|control| control.ask(Desired::Pause));
        let rests = controls.iter().map(|control| control.berth.wait(until)).collect();
        if Result::is_err(&rests) {
            self.resume();
        }
        rests
    }

    /// Has every connection that rests go on.
    pub fn resume(&self) {
        self.controls().iter().for_each(|control| control.resume());
    }

    /// Ends every connection at rest without a word to the peer: its socket is somebody else's.
    ///
    /// # Errors
    /// `TimedOut` when a thread does not end.
    pub fn leave(&self) -> Result<()> {
        const LEAVE_LIMIT: Duration = Duration::from_secs(5);
        self.controls().iter().for_each(|control| control.ask(Desired::Leave));
        self.wait(LEAVE_LIMIT)
    }

    /// A kernel connection that somebody else has brought to rest. It rests until
    /// [`Server::resume`].
    ///
    /// # Errors
    /// As [`Server::add_kernel_connection`]; `InvalidArgument` for more bytes than a connection can
    /// hold.
    pub fn add_at_rest(&self, rest: Rest) -> Result<ConnectionId> {
        self.add(rest.socket, Kind::Kernel, Some(rest.unread))
    }
}

impl Connection {
    /// Whether nothing new is to be begun.
    pub(super) fn is_pausing(&self) -> bool {
        matches!(self.control.desired(), Desired::Pause | Desired::Leave)
    }

    /// Whether the stream stands between two requests, as far as it was understood.
    pub(super) fn at_boundary(&self) -> bool {
        !self.receive_buffer.in_write() && self.held.is_none() && self.parser.at_boundary()
    }

    /// Whether nothing is left to do: nothing runs, all replies have left, nothing is received.
    pub(super) fn is_at_rest(&self) -> bool {
        self.at_boundary()
            && !self.receive_buffer.is_receiving()
            && self.in_flight.len() == 0
            && self.sending.is_idle()
            && self.ending.is_none()
    }

    /// Shows that this connection is at rest.
    pub(super) fn moor(&self) {
        let (control, file) = (&self.control, &self.file);
        let still = || self.is_pausing();
        let rest = || {
            Ok(Rest { socket: file.try_clone()?, unread: self.receive_buffer.unread().to_vec() })
        };
        control.berth.moor(still, rest);
    }

    /// Cancels the receive that waits for a next request. What it got already stays unread.
    pub(super) fn stop_receiving(&mut self) {
        if !self.cancelling && self.receive_buffer.is_receiving() && self.at_boundary() {
            self.cancelling = self.ring.cancel(RECEIVE, CANCEL);
        }
    }

    /// Passes over the rest of a refused write's payload, as far as it has arrived.
    pub(super) fn skip_arrived(&mut self) {
        let bytes = self.parser.skip_in(self.receive_buffer.unread());
        self.receive_buffer.eat(bytes);
    }
}
