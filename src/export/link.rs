//! A connection's socket on its ring, and the eventfd that wakes the connection's thread.
//!
//! Invariant: at most one receive, one send, one poll for room and one poll of the eventfd are in flight. The socket is not
//! shut down by this type alone, because it may have gone to another process.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    Shutdown, UnixAddr, getsockname, getsockopt, setsockopt, shutdown, sockopt,
};

use cleat_backend::Waker;
use cleat_sys::ring::{Completion, FileSlot, Ring, Token};

/// A receive from the socket.
pub(super) const RECEIVE: Token = Token(1);
/// A send to the socket.
pub(super) const SEND: Token = Token(2);
/// The poll of the eventfd.
pub(super) const WAKE: Token = Token(3);
/// The timer after which unused buffers are freed.
pub(super) const TRIM: Token = Token(4);
/// The timer that ends a negotiation which takes too long.
pub(super) const DEADLINE: Token = Token(5);
/// A cancellation.
pub(super) const CANCEL: Token = Token(6);
/// The poll of the socket for room.
pub(super) const ROOM: Token = Token(7);

/// How long the connection leaves its socket alone when the system has no memory for it.
const MEMORY_PAUSE: Duration = Duration::from_millis(10);

/// Returns after which time an operation on the socket that has ended with `error` (positive) is to be
/// repeated; `None` for an error that ends the connection. No byte was moved, and none is lost.
pub(super) fn repeat_after(error: i32) -> Option<Duration> {
    match error {
        libc::EINTR | libc::EAGAIN | libc::ECANCELED => Some(Duration::ZERO),
        libc::ENOBUFS | libc::ENOMEM => Some(MEMORY_PAUSE),
        _ => None,
    }
}

/// Ring entries for the connection itself: one for each token above, and a spare one.
const OWN_ENTRIES: u32 = 8;

/// Returns the number of entries of the ring of a connection with `depth` requests: two for each, and its own.
pub(super) fn ring_entries(depth: u32) -> u32 {
    depth * 2 + OWN_ENTRIES
}

/// The requested size of the socket's send buffer, in bytes: a batch of replies should fit one send.
const SEND_BUFFER_LEN: usize = 1 << 20;

/// See the file's comment.
pub(super) struct Link {
    ring: Ring,
    socket: FileSlot,
    wake: FileSlot,
    wake_armed: bool,
    room_armed: bool,
    /// The size of the send buffer of a unix socket in bytes; 0 for another one.
    send_buffer: usize,
    file: Arc<OwnedFd>,
}

impl Link {
    /// Sets up a ring on the calling thread for the connected stream socket `file`, with two entries for
    /// each of `depth` requests.
    ///
    /// # Errors
    /// Returns the error of io_uring_setup(2), for example `EPERM` if it is forbidden.
    pub(super) fn new(file: OwnedFd, waker: &Waker, depth: u32) -> io::Result<Self> {
        allow_waiting(&file)?;
        widen_send_buffer(&file);
        let send_buffer = send_buffer_of_unix(&file);
        let mut ring = Ring::new(ring_entries(depth))?;
        let socket = ring.register(file.as_fd())?;
        let wake = ring.register(waker.descriptor())?;
        let (wake_armed, room_armed, file) = (false, false, Arc::new(file));
        Ok(Self { ring, socket, wake, wake_armed, room_armed, send_buffer, file })
    }

    /// The size of the send buffer of a unix socket in bytes; 0 for another one, whose use is counted differently.
    pub(super) fn send_buffer(&self) -> usize {
        self.send_buffer
    }

    /// Polls the socket for room, unless a poll is in flight. The kernel reports a unix socket of which a quarter is
    /// in use at most (net/unix/af_unix.c, unix_writable).
    pub(super) fn await_room(&mut self) {
        if !self.room_armed {
            self.room_armed = self.ring.poll_writable(self.socket, ROOM);
        }
    }

    /// The ring, for backends and timers.
    pub(super) fn ring(&mut self) -> &mut Ring {
        &mut self.ring
    }

    /// The ring and the socket's slot in it.
    pub(super) fn ring_and_socket(&mut self) -> (&mut Ring, FileSlot) {
        (&mut self.ring, self.socket)
    }

    /// The socket.
    pub(super) fn file(&self) -> &Arc<OwnedFd> {
        &self.file
    }

    /// Polls the eventfd, unless a poll is in flight.
    pub(super) fn poll_wakeups(&mut self) {
        if !self.wake_armed {
            self.wake_armed = self.ring.poll_readable(self.wake, WAKE);
        }
    }

    /// Submits the queued operations, and waits for a completion; with `limit`, not for longer. Makes no system call
    /// if a completion can be taken and nothing is queued.
    ///
    /// # Errors
    /// Returns the error of io_uring_enter(2).
    pub(super) fn submit_and_wait(&mut self, limit: Option<Duration>) -> io::Result<()> {
        if self.ring.has_next() {
            return self.ring.submit();
        }
        match limit {
            Some(limit) => self.ring.submit_and_wait_for(limit),
            None => self.ring.submit_and_wait(),
        }
    }

    /// Returns the next completion, if there is one. Never blocks.
    pub(super) fn next(&mut self) -> Option<Completion> {
        let completion = self.ring.next()?;
        match completion.token {
            WAKE => self.wake_armed = false,
            ROOM => self.room_armed = false,
            _ => {}
        }
        Some(completion)
    }

    /// Returns whether the peer has closed the connection in both directions, as the kernel's driver does
    /// with its socketpairs; with `or_half`, also if it only sends no more. Over TCP, a server cannot tell the two: it gets a
    /// FIN in both cases. Bytes may still be readable then.
    pub(super) fn peer_has_left(&self, or_half: bool) -> bool {
        let half = if or_half { libc::POLLRDHUP } else { 0 };
        let half = PollFlags::from_bits_retain(half);
        let left = PollFlags::POLLHUP | PollFlags::POLLERR;
        let mut set = [PollFd::new(self.file.as_fd(), half)];
        poll(&mut set, PollTimeout::ZERO).is_ok()
            // `nix` does not know POLLRDHUP, and returns `None` for it.
            && set[0].revents().is_none_or(|seen| seen.intersects(left))
    }

    /// Closes the connection in both directions, for every process that has the socket.
    pub(super) fn shut_down(&self) {
        // ENOTCONN when the peer has closed it already.
        let _ = shutdown(self.file.as_raw_fd(), Shutdown::Both);
    }
}

/// The system limits the size (net.core.wmem_max) unless the process has CAP_NET_ADMIN. Short sends are
/// continued in any case, so a failure does not matter.
fn widen_send_buffer(socket: &OwnedFd) {
    let _ = setsockopt(socket, sockopt::SndBufForce, &SEND_BUFFER_LEN)
        .or_else(|_| setsockopt(socket, sockopt::SndBuf, &SEND_BUFFER_LEN));
}

fn send_buffer_of_unix(socket: &OwnedFd) -> usize {
    let is_unix = getsockname::<UnixAddr>(socket.as_raw_fd()).is_ok();
    let size = is_unix.then(|| getsockopt(socket, sockopt::SndBuf).ok()).flatten();
    size.unwrap_or(0)
}

/// io_uring waits for data by itself, but not on a non-blocking file: the loop would spin
/// (io_uring/io_uring.c, REQ_F_NOWAIT).
fn allow_waiting(socket: &OwnedFd) -> io::Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(socket, FcntlArg::F_GETFL)?);
    fcntl(socket, FcntlArg::F_SETFL(flags - OFlag::O_NONBLOCK))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lack_of_memory_does_not_end_a_connection() {
        for (error, pause) in [
            (libc::EINTR, Some(Duration::ZERO)),
            (libc::EAGAIN, Some(Duration::ZERO)),
            (libc::ENOBUFS, Some(MEMORY_PAUSE)),
            (libc::ENOMEM, Some(MEMORY_PAUSE)),
            (libc::ECONNRESET, None),
            (libc::EPIPE, None),
        ] {
            assert_eq!(repeat_after(error), pause, "{error}");
        }
    }
}
