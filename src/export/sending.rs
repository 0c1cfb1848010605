//! The sending half of a connection: replies gather while one send is in flight, then leave together.
//!
//! Invariants: one send at a time, so a short one is continued before anything else is sent. Every reply
//! after the negotiation is made here, in the form that the negotiation has agreed.

use std::io;

use cleat_core::request::{IoError, Op, Request};
use cleat_core::volume::Extent;
use cleat_nbd::structured;
use cleat_nbd::wire::simple_reply;
use cleat_sys::buffer::Buffer;
use cleat_sys::send_list::SendList;
use cleat_sys::shared::SharedPart;

use super::buffer_pool::BufferPool;
use super::link::{Link, SEND};
use super::pages::Pages;

/// What [`Sending::flush`] has done.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Flushed {
    /// A send was started on the ring.
    pub(super) in_ring: bool,
    /// A reply has left whose payload was in a pipe.
    pub(super) pages: bool,
}

/// See the file's comment.
#[derive(Debug)]
pub(super) struct Sending {
    filling: Box<SendList>,
    /// The other list, while it is neither with the ring nor waiting to go on.
    spare: Option<Box<SendList>>,
    /// A list whose send ended short.
    rest: Option<Box<SendList>>,
    /// Replies in `filling`.
    queued: usize,
    /// Replies that go without a copy.
    pages: Pages,
    /// The list goes before the next of `pages`: both take turns.
    list_is_next: bool,
    /// The peer is gone: nothing is sent any more.
    broken: bool,
    /// Replies to reads are structured; the protocol allows all others to be simple in either case.
    structured: bool,
}

impl Sending {
    /// Makes room for `depth` replies that gather, and as many in flight.
    pub(super) fn new(depth: usize) -> Self {
        let list = || Box::new(SendList::new(depth));
        Self {
            filling: list(),
            spare: Some(list()),
            rest: None,
            queued: 0,
            pages: Pages::default(),
            list_is_next: false,
            broken: false,
            structured: false,
        }
    }

    /// Sets the form of replies to reads.
    pub(super) fn set_structured(&mut self, structured: bool) {
        self.structured = structured;
    }

    /// Queues the reply to a request; `request` is `None` for an unknown command. The buffer of a
    /// successful read leaves with it; any other buffer goes back to `pool`.
    pub(super) fn reply(
        &mut self,
        cookie: u64,
        request: Option<&Request>,
        result: Result<(), IoError>,
        buffer: Option<Buffer>,
        pool: &mut BufferPool,
    ) {
        let is_read = request.is_some_and(|request| request.op == Op::Read);
        match (buffer, request, result) {
            (Some(buffer), Some(request), Ok(())) if is_read => {
                self.reply_to_read(cookie, request, buffer, pool);
            }
            (buffer, _, Err(error)) if is_read && self.structured => {
                self.push(&structured::error(cookie, error));
                pool.give_all(buffer);
            }
            (buffer, _, result) => {
                self.push(&simple_reply(cookie, result));
                pool.give_all(buffer);
            }
        }
    }

    /// Queues the reply to a successful read whose data is in `part`.
    pub(super) fn reply_from_memory(&mut self, cookie: u64, request: &Request, part: SharedPart) {
        assert_eq!(part.len() as u64, request.length, "a read is answered in full");
        if self.broken {
            return;
        }
        if self.structured {
            let header = structured::read_header(cookie, request.offset, short(part.len()));
            self.filling.push_shared(&header, part);
        } else {
            self.filling.push_shared(&simple_reply(cookie, Ok(())), part);
        }
        self.queued += 1;
    }

    fn reply_to_read(
        &mut self,
        cookie: u64,
        request: &Request,
        mut buffer: Buffer,
        pool: &mut BufferPool,
    ) {
        assert_eq!(buffer.len() as u64, request.length, "a read is answered in full");
        if self.structured {
            let length = short(buffer.len());
            buffer.set_header(&structured::read_header(cookie, request.offset, length));
        } else {
            buffer.set_header(&simple_reply(cookie, Ok(())));
        }
        self.push_buffer(buffer, pool);
    }

    /// Queues the reply to BLOCK_STATUS; an error is a chunk, too. Without memory for all extents, the reply has
    /// the first one only, and the client asks for the rest.
    pub(super) fn reply_to_block_status(
        &mut self,
        cookie: u64,
        extents: Result<&[Extent], IoError>,
        pool: &mut BufferPool,
    ) {
        let extents = match extents {
            Ok(extents) if !extents.is_empty() => extents,
            other => {
                let error = other.err().unwrap_or(IoError::Broken);
                return self.push(&structured::error(cookie, error));
            }
        };
        match pool.take(structured::status_len(extents.len())) {
            Some(mut buffer) => {
                structured::put_status(buffer.payload_mut(), cookie, extents);
                self.push_buffer(buffer, pool);
            }
            None => {
                let mut bytes = [0; structured::STATUS_HEADER_LEN + structured::EXTENT_LEN];
                structured::put_status(&mut bytes, cookie, &extents[..1]);
                self.push(&bytes);
            }
        }
    }

    /// The number of replies that have not been passed to the socket.
    pub(super) fn queued(&self) -> usize {
        self.queued + self.pages.len()
    }

    /// Whether every reply has left.
    pub(super) fn is_idle(&self) -> bool {
        self.queued() == 0 && self.spare.is_some()
    }

    /// Whether a send has ended short and has to be continued.
    pub(super) fn has_rest(&self) -> bool {
        self.rest.is_some()
    }

    /// Sends what is queued: pages as far as the socket has room, everything else by a send of the ring. Does nothing
    /// while such a send is in flight.
    ///
    /// # Errors
    /// Returns the errors of the socket.
    pub(super) fn flush(&mut self, link: &mut Link, pool: &mut BufferPool) -> io::Result<Flushed> {
        let mut pages = false;
        let is_sending = self.spare.is_none();
        while !is_sending && (self.pages.has_begun() || self.pages_are_next()) {
            if !self.pages.send_first(link, pool)? {
                return Ok(Flushed { in_ring: false, pages });
            }
            pages = true;
            self.list_is_next = true;
        }
        let in_ring = self.flush_list(link);
        self.list_is_next &= !in_ring;
        Ok(Flushed { in_ring, pages })
    }

    fn pages_are_next(&self) -> bool {
        let list_is_next = self.list_is_next && self.queued > 0;
        !list_is_next && !self.pages.is_empty()
    }

    /// Starts a send of the list, unless one is in flight. Returns whether it has started one.
    fn flush_list(&mut self, link: &mut Link) -> bool {
        let (ring, socket) = link.ring_and_socket();
        if let Some(rest) = self.rest.take() {
            self.rest = ring.send(socket, rest, SEND).err();
            return self.rest.is_none();
        }
        if self.queued == 0 {
            return false;
        }
        let Some(spare) = self.spare.take() else { return false };
        let full = std::mem::replace(&mut self.filling, spare);
        match ring.send(socket, full, SEND) {
            Ok(()) => self.queued = 0,
            Err(full) => self.spare = Some(std::mem::replace(&mut self.filling, full)),
        }
        self.spare.is_none()
    }

    /// Takes the end of a send: `bytes` have left.
    pub(super) fn sent(&mut self, mut list: Box<SendList>, bytes: usize, pool: &mut BufferPool) {
        list.advance(bytes);
        if list.unsent() > 0 && !self.broken {
            self.rest = Some(list);
        } else {
            pool.give_all(list.take_buffers());
            self.spare = Some(list);
        }
    }

    /// Drops what is queued, and every later reply: the peer is gone.
    pub(super) fn break_off(&mut self, pool: &mut BufferPool) {
        self.broken = true;
        self.queued = 0;
        self.pages.clear(pool);
        pool.give_all(self.filling.take_buffers());
        if let Some(mut rest) = self.rest.take() {
            pool.give_all(rest.take_buffers());
            self.spare = Some(rest);
        }
    }

    /// Queues a reply without payload.
    fn push(&mut self, header: &[u8]) {
        if !self.broken {
            self.filling.push_small(header);
            self.queued += 1;
        }
    }

    /// Queues a reply with its header in `buffer`.
    fn push_buffer(&mut self, buffer: Buffer, pool: &mut BufferPool) {
        if self.broken {
            pool.give(buffer);
        } else if buffer.is_in_pipe() {
            self.pages.push(buffer);
        } else {
            self.filling.push_buffer(buffer);
            self.queued += 1;
        }
    }
}

fn short(length: usize) -> u32 {
    u32::try_from(length).expect("no payload is above MAX_PAYLOAD")
}
