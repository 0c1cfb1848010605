//! How a connection pauses and ends.
//!
//! Invariants: a connection is paused only between two requests, with no request in flight and every reply
//! sent; it ends after its running requests, except for an abort; once it is ending, it reads nothing more.

use super::Connection;
use crate::End;
use crate::control::Desired;
use crate::paused::PausedConnection;

impl Connection {
    /// Follows the level that the server has set. Returns how the connection ended once no work is left.
    pub(super) fn finished(&mut self) -> Option<End> {
        match self.control.desired() {
            Desired::Abort => return Some(End::Aborted),
            Desired::Leave if self.is_paused() => return Some(End::HandedOver),
            Desired::Pause if self.is_paused() => self.publish_pause(),
            Desired::Run => self.requests.statistics().begin(),
            _ => {}
        }
        let idle = self.requests.is_idle() && self.block_status.unanswered() == 0;
        self.ending.take_if(|_| idle)
    }

    /// Whether no new request is to be parsed.
    pub(super) fn is_pausing(&self) -> bool {
        matches!(self.control.desired(), Desired::Pause | Desired::Leave)
    }

    /// Whether the stream stands between two requests, nothing runs, every reply has left, and nothing is
    /// being received.
    fn is_paused(&self) -> bool {
        self.receiving.at_boundary()
            && !self.receiving.is_receiving()
            && self.requests.in_flight() == 0
            && self.requests.is_idle()
            && self.ending.is_none()
    }

    fn publish_pause(&self) {
        let paused = || {
            let socket = self.link.file().try_clone()?;
            Ok(PausedConnection { socket, unread: self.receiving.unread().to_vec() })
        };
        self.control.pause_slot().publish(|| self.is_pausing(), paused);
    }

    /// Ends the connection after its running requests, unless it is ending already.
    pub(super) fn end(&mut self, end: End) {
        self.ending.get_or_insert(end);
        self.requests.close();
    }

    /// Ends the connection because the socket can no longer be read or written.
    pub(super) fn end_reading(&mut self, end: End) {
        self.end(end);
        if self.link.peer_has_left(self.requests.has_others()) {
            // The peer may have sent its requests again over another connection; see `retry`.
            self.requests.abandon();
        }
        let buffer = self.receiving.abandon_write();
        self.requests.pool().give_all(buffer);
    }
}
