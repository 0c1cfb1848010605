//! The connections to supervisors: the one in charge, and new ones that have not sent `Adopt` yet.
//!
//! Invariants: at most one supervisor is in charge, the one that was adopted last; at most [`MAX_PENDING`]
//! connections wait for their first message, and the oldest is closed for another one.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags};

use crate::channel::{Channel, Incoming};
use crate::protocol::FromWorker;
use cleat_core::error::{Error, Result};

/// Connections to the control socket that have not sent `Adopt` yet.
const MAX_PENDING: usize = 4;

/// How long the worker waits after it could not accept a connection.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

/// The connections to supervisors. See the file's comment.
pub(super) struct Supervisors {
    listener: UnixListener,
    /// The user of the supervisor that has started this worker, which is that of every later one.
    user: Option<u32>,
    current: Option<Channel>,
    pending: Vec<Channel>,
}

/// Which of the connections are readable.
#[derive(Debug, Default)]
pub(super) struct Readable {
    pub(super) listener: bool,
    pub(super) current: bool,
    /// In descending order, so that each can be removed.
    pub(super) pending: Vec<usize>,
}

impl Supervisors {
    /// Makes the connections of a worker that nothing has adopted yet. Later supervisors connect to
    /// `listener`.
    pub(super) fn new(listener: UnixListener) -> Self {
        Self { listener, user: None, current: None, pending: Vec::new() }
    }

    /// Puts the supervisor behind `channel` in charge.
    pub(super) fn put_in_charge(&mut self, channel: Channel) {
        self.user = self.user.or_else(|| channel.peer_user().ok());
        self.current = Some(channel);
    }

    /// Whether a supervisor is in charge.
    pub(super) fn has_current(&self) -> bool {
        self.current.is_some()
    }

    /// Drops the channel to the supervisor in charge.
    pub(super) fn drop_current(&mut self) {
        self.current = None;
    }

    /// Takes the channel to the supervisor in charge.
    pub(super) fn take_current(&mut self) -> Option<Channel> {
        self.current.take()
    }

    /// Receives the next message of the supervisor in charge; `None` without one.
    pub(super) fn receive(&self) -> Option<Result<Incoming>> {
        self.current.as_ref().map(Channel::receive)
    }

    /// Removes a connection that has not sent `Adopt` yet.
    pub(super) fn take_pending(&mut self, index: usize) -> Channel {
        self.pending.remove(index)
    }

    /// Accepts a connection. If that fails, blocks for 50 ms: without a descriptor left, for example, the
    /// listener stays readable, and the loop must not spin.
    pub(super) fn accept(&mut self) {
        // Another worker has another user, so it cannot take this one over, whatever path it reaches.
        let user = self.user.unwrap_or_else(|| nix::unistd::geteuid().as_raw());
        match Channel::accept(&self.listener, user) {
            Ok(Some(channel)) => {
                if self.pending.len() == MAX_PENDING {
                    self.pending.remove(0);
                }
                self.pending.push(channel);
            }
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(error = %error.report(), "a connection could not be accepted");
                #[allow(clippy::disallowed_methods, reason = "a pause that nothing decides by")]
                std::thread::sleep(ACCEPT_RETRY_DELAY);
            }
        }
    }

    /// Adds every connection to the descriptors to poll.
    pub(super) fn add_to<'a>(&'a self, set: &mut Vec<PollFd<'a>>) {
        set.push(PollFd::new(self.listener.as_fd(), PollFlags::POLLIN));
        let channels = self.current.iter().chain(&self.pending);
        set.extend(channels.map(|channel| PollFd::new(channel.as_fd(), PollFlags::POLLIN)));
    }

    /// Reads from the results of a poll, in the order of [`Supervisors::add_to`], which connections are
    /// readable.
    pub(super) fn readable(&self, mut woken: impl Iterator<Item = bool>) -> Readable {
        let listener = woken.next().unwrap_or(false);
        let current = self.has_current() && woken.next().unwrap_or(false);
        let pending: Vec<bool> = woken.collect();
        let pending = (0..pending.len()).rev().filter(|index| pending[*index]).collect();
        Readable { listener, current, pending }
    }

    /// Sends a message with descriptors to the supervisor in charge, if there is one.
    ///
    /// # Errors
    /// `Unavailable` if the supervisor is gone, or receives nothing for 5 s.
    pub(super) fn send(&self, message: &FromWorker, descriptors: &[OwnedFd]) -> Result<()> {
        let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        self.current.as_ref().map_or(Ok(()), |channel| channel.send(message, &borrowed))
    }

    /// Reports to the supervisor in charge, if there is one, that its last command failed.
    ///
    /// # Errors
    /// As [`Supervisors::send`].
    pub(super) fn send_failure(&self, error: &Error) -> Result<()> {
        self.current.as_ref().map_or(Ok(()), |channel| channel.send_failure(error))
    }
}
