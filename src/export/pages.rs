//! Replies whose payload is in a pipe: they go to the socket without a copy.
//!
//! Invariants: the thread never waits for the socket, because it moves no more than the socket has room for, and a
//! reply that has begun is finished before anything else is sent.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;

use cleat_sys::buffer::Buffer;
use cleat_sys::page_pipe::unread_by_peer;
use nix::sys::socket::{MsgFlags, send};

use super::buffer_pool::BufferPool;
use super::link::Link;

/// The room in the socket from which on the next pages are moved, in bytes; less only for the rest of a reply, or if
/// the buffer of the socket is small.
const MIN_ROOM: usize = 64 << 10;

/// See the file's comment.
#[derive(Debug, Default)]
pub(super) struct Pages {
    waiting: VecDeque<Buffer>,
    /// The number of bytes of the first reply's header that have left; 0 if it has not begun.
    begun: usize,
}

impl Pages {
    /// Adds a reply: the header of `buffer`, and what is in its pipe.
    pub(super) fn push(&mut self, buffer: Buffer) {
        self.waiting.push_back(buffer);
    }

    /// The number of replies that have not left completely.
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether there is no reply.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Whether a reply has left in part.
    pub(super) fn has_begun(&self) -> bool {
        self.begun > 0
    }

    /// Sends the first reply, as far as the socket has room. Returns whether it has left; if not, the link polls for
    /// room.
    ///
    /// # Errors
    /// Returns the errors of the socket. What has left is recorded.
    pub(super) fn send_first(
        &mut self,
        link: &mut Link,
        pool: &mut BufferPool,
    ) -> io::Result<bool> {
        let Some(buffer) = self.waiting.front_mut() else { return Ok(true) };
        while self.begun < buffer.header().len() || buffer.is_in_pipe() {
            let header = &buffer.header()[self.begun..];
            let left = header.len() + buffer.pipe().map_or(0, |pipe| pipe.len());
            let room = room(link)?;
            if room < left.min(MIN_ROOM).min(link.send_buffer() / 4) {
                link.await_room();
                return Ok(false);
            }
            if !header.is_empty() {
                let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
                self.begun += send(link.file().as_raw_fd(), header, flags)?;
            } else if let Some(pipe) = buffer.pipe_mut() {
                pipe.send(&**link.file(), room)?;
            }
        }
        self.begun = 0;
        pool.give_all(self.waiting.pop_front());
        Ok(true)
    }

    /// Drops all replies.
    pub(super) fn clear(&mut self, pool: &mut BufferPool) {
        self.begun = 0;
        pool.give_all(self.waiting.drain(..));
    }
}

/// Returns how many bytes the socket takes without blocking. The kernel counts the structures of the pieces, too: about
/// 1 KiB for each 64 KiB.
fn room(link: &Link) -> io::Result<usize> {
    Ok(link.send_buffer().saturating_sub(unread_by_peer(&**link.file())?) / 8 * 7)
}
