//! The replies of one connection. Several threads have a request in flight there: one of them receives, for
//! itself and for the others.

use std::collections::HashMap;
use std::io;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Instant;

use cleat_core::clock::{Clock, SystemClock};

use super::lock;

/// NBD protocol, "simple reply message".
const REPLY_MAGIC: u32 = 0x6744_6698;
pub(super) const REPLY_BYTES: usize = 16;

/// The error number of a reply, and its data.
type Reply = (u32, Vec<u8>);

#[derive(Debug, Default)]
pub(super) struct Replies {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The requests in flight by cookie: the number of bytes that a successful reply has, or the reply.
    requests: HashMap<u64, Result<Reply, usize>>,
    /// A thread receives a reply.
    receiving: bool,
    /// The stream has failed in or between replies. No reply can be received any more.
    broken: bool,
}

impl Replies {
    /// Adds a request whose successful reply has `length` bytes of data.
    pub(super) fn expect(&self, cookie: u64, length: usize) {
        lock(&self.state).requests.insert(cookie, Err(length));
    }

    pub(super) fn forget(&self, cookie: u64) {
        lock(&self.state).requests.remove(&cookie);
    }

    /// Returns the number of requests that wait for their reply.
    pub(super) fn in_flight(&self) -> u64 {
        let state = lock(&self.state);
        state.requests.values().filter(|reply| reply.is_err()).count() as u64
    }

    /// Waits for the reply to the request `cookie`. `readable` waits until the socket has data, and
    /// `receive` fills a buffer from it.
    ///
    /// # Errors
    /// Returns `TimedOut` at the deadline, the errors of `readable` and `receive`, and `InvalidData` after a
    /// reply to no request in flight.
    pub(super) fn wait(
        &self,
        cookie: u64,
        deadline: Instant,
        readable: impl Fn() -> io::Result<()>,
        receive: impl Fn(&mut [u8]) -> io::Result<()>,
    ) -> io::Result<Reply> {
        let mut state = lock(&self.state);
        loop {
            if let Some(Ok(reply)) = state.requests.get_mut(&cookie) {
                return Ok(std::mem::take(reply));
            }
            if state.broken {
                return Err(io::ErrorKind::ConnectionReset.into());
            }
            if state.receiving {
                let left = deadline.saturating_duration_since(SystemClock.now());
                if left.is_zero() {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                let waited = self.changed.wait_timeout(state, left);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            state.receiving = true;
            drop(state);
            // A wait that fails has consumed nothing: the other requests go on.
            let received = readable().map(|()| self.receive_one(&receive));
            state = lock(&self.state);
            state.receiving = false;
            state.broken |= matches!(received, Ok(Err(_)));
            self.changed.notify_all();
            received??;
        }
    }

    fn receive_one(&self, receive: impl Fn(&mut [u8]) -> io::Result<()>) -> io::Result<()> {
        let mut header = [0; REPLY_BYTES];
        receive(&mut header)?;
        let (cookie, error) = parse_reply(&header).ok_or(io::ErrorKind::InvalidData)?;
        let Some(Err(length)) = lock(&self.state).requests.get(&cookie).cloned() else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        let mut data = vec![0; if error == 0 { length } else { 0 }];
        receive(&mut data)?;
        lock(&self.state).requests.insert(cookie, Ok((error, data)));
        Ok(())
    }
}

/// Parses a reply: its cookie and error number; `None` if the magic number is wrong.
pub(super) fn parse_reply(reply: &[u8; REPLY_BYTES]) -> Option<(u64, u32)> {
    let word =
        |at: usize| u32::from_be_bytes([reply[at], reply[at + 1], reply[at + 2], reply[at + 3]]);
    let cookie = u64::from(word(8)) << 32 | u64::from(word(12));
    (word(0) == REPLY_MAGIC).then_some((cookie, word(4)))
}
