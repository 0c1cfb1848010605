//! A planned handover: the connections of a server are paused between two requests, and their sockets go to
//! another process, with the bytes that were received and not parsed.
//!
//! A connection that should pause cancels the receive that waits for more, completes a write whose payload
//! is arriving, and lets everything that runs at the backend end and every reply leave. Then it is paused:
//! its thread keeps the socket and waits, so that resuming costs one wake-up and cannot fail. Only when the
//! socket belongs to the other process does the thread end, without shutting the socket down.
//!
//! In the other process a connection starts paused as well: everything that may fail (thread, ring, the
//! backend's queue) has happened before it is resumed.

use std::time::Duration;

use super::control::Desired;
pub use super::paused::PausedConnection;
use super::server::{ConnectionId, Kind, Server};
use cleat_core::error::Result;

impl Server {
    /// Pauses every connection, or none: when one cannot be paused within `limit`, all are resumed. Blocks
    /// until then.
    ///
    /// # Errors
    /// `TimedOut` when the backend does not end the requests in time; `Aborted` when a connection ends.
    pub fn pause(&self, limit: Duration) -> Result<Vec<PausedConnection>> {
        let clock = self.clock();
        let until = clock.now() + limit;
        let controls = self.controls();
        controls.iter().for_each(|control| control.ask(Desired::Pause));
        let paused = controls
            .iter()
            .map(|control| {
                let left = until.saturating_duration_since(clock.now());
                control.pause_slot().wait(left)
            })
            .collect();
        if Result::is_err(&paused) {
            self.resume();
        }
        paused
    }

    /// Resumes every paused connection.
    pub fn resume(&self) {
        self.controls().iter().for_each(|control| control.resume());
    }

    /// Ends every paused connection without closing its socket, which another process serves. Blocks for at
    /// most 5 seconds.
    ///
    /// # Errors
    /// `TimedOut` when a thread does not end.
    pub fn leave(&self) -> Result<()> {
        const LEAVE_LIMIT: Duration = Duration::from_secs(5);
        self.controls().iter().for_each(|control| control.ask(Desired::Leave));
        self.wait(LEAVE_LIMIT)
    }

    /// Adds a kernel connection that another process has paused. It stays paused until
    /// [`Server::resume`].
    ///
    /// # Errors
    /// As [`Server::add_kernel_connection`]; `InvalidArgument` for more unread bytes than a connection can
    /// hold.
    pub fn add_paused(&self, paused: PausedConnection) -> Result<ConnectionId> {
        self.add(paused.socket, Kind::Kernel, None, Some(paused.unread))
    }
}
