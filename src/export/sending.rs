//! The sending half of a connection: replies gather while one send is under way, then leave
//! together. One send at a time, so a short one is simply continued.

use cleat_sys::buffer::Buffer;
use cleat_sys::ring::{FileSlot, Ring, Token};
use cleat_sys::send_list::SendList;

use super::buffer_pool::BufferPool;

/// See the file's comment.
#[derive(Debug)]
pub(super) struct Sending {
    filling: Box<SendList>,
    /// The other list, while it is neither with the ring nor waiting to go on.
    spare: Option<Box<SendList>>,
    /// A list whose send ended short.
    rest: Option<Box<SendList>>,
    queued: usize,
    broken: bool,
}

impl Sending {
    /// Room for `depth` replies to gather, and as many under way.
    pub(super) fn new(depth: usize) -> Self {
        let list = || Box::new(SendList::new(depth));
        Self { filling: list(), spare: Some(list()), rest: None, queued: 0, broken: false }
    }

    /// Replies that wait for the next send.
    pub(super) fn queued(&self) -> usize {
        self.queued
    }

    /// Whether everything has left.
    pub(super) fn is_idle(&self) -> bool {
        self.queued == 0 && self.spare.is_some()
    }

    /// Whether a send ended short and has to go on.
    pub(super) fn has_rest(&self) -> bool {
        self.rest.is_some()
    }

    /// Queues a reply without payload.
    pub(super) fn push(&mut self, header: &[u8]) {
        if !self.broken {
            self.filling.push_small(header);
            self.queued += 1;
        }
    }

    /// Queues a reply with its header in `buffer`.
    pub(super) fn push_buffer(&mut self, buffer: Buffer, pool: &mut BufferPool) {
        if self.broken {
            pool.give(buffer);
        } else {
            self.filling.push_buffer(buffer);
            self.queued += 1;
        }
    }

    /// Lets the ring send what is queued, unless it is at it. Returns whether a send began.
    pub(super) fn flush(&mut self, ring: &mut Ring, socket: FileSlot, token: Token) -> bool {
        if let Some(rest) = self.rest.take() {
            let pushed = ring.send(socket, rest, token);
            self.rest = pushed.err();
            return self.rest.is_none();
        }
        if self.queued == 0 {
            return false;
        }
        let Some(spare) = self.spare.take() else { return false };
        let full = std::mem::replace(&mut self.filling, spare);
        match ring.send(socket, full, token) {
            Ok(()) => self.queued = 0,
            Err(full) => self.spare = Some(std::mem::replace(&mut self.filling, full)),
        }
        self.spare.is_none()
    }

    /// Takes the end of a send: `bytes` have left.
    pub(super) fn sent(
        &mut self,
        mut send_list: Box<SendList>,
        bytes: usize,
        pool: &mut BufferPool,
    ) {
        send_list.advance(bytes);
        if send_list.unsent() > 0 && !self.broken {
            self.rest = Some(send_list);
        } else {
            send_list.take_buffers().for_each(|buffer| pool.give(buffer));
            self.spare = Some(send_list);
        }
    }

    /// Throws away what is queued, and all that will be: the peer is gone.
    pub(super) fn break_off(&mut self, pool: &mut BufferPool) {
        self.broken = true;
        self.queued = 0;
        self.filling.take_buffers().for_each(|buffer| pool.give(buffer));
        if let Some(mut rest) = self.rest.take() {
            rest.take_buffers().for_each(|buffer| pool.give(buffer));
            self.spare = Some(rest);
        }
    }
}
