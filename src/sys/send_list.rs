//! Pieces of a stream that leave in one send: short ones copied in, long ones by their buffer.

use std::ptr::null_mut;

use super::buffer::Buffer;

/// The longest short piece, in bytes, and the room that each piece reserves for one.
pub const SMALL: usize = 32;

/// A list of pieces, built once, filled and emptied again without allocating.
#[derive(Debug)]
pub struct SendList {
    small: Vec<u8>,
    buffers: Vec<Buffer>,
    vectors: Vec<libc::iovec>,
    /// Vectors that have left whole.
    first: usize,
    unsent: usize,
    message: libc::msghdr,
}

// SAFETY: the pointers in `vectors` and `message` lead into heap memory that this value owns.
unsafe impl Send for SendList {}

impl SendList {
    /// Room for `pieces`, at most 1024 (IOV_MAX).
    pub fn new(pieces: usize) -> Self {
        assert!((1..=1024).contains(&pieces), "{pieces} pieces");
        Self {
            small: Vec::with_capacity(pieces * SMALL),
            buffers: Vec::with_capacity(pieces),
            vectors: Vec::with_capacity(pieces),
            first: 0,
            unsent: 0,
            // SAFETY: for this plain C structure, all zero is a valid (empty) message.
            message: unsafe { std::mem::zeroed() },
        }
    }

    /// Whether no piece was put in since it was emptied.
    pub fn is_empty(&self) -> bool {
        self.vectors.is_empty()
    }

    /// Whether another piece fits.
    pub fn has_room(&self) -> bool {
        self.vectors.len() < self.vectors.capacity()
            && self.small.capacity() - self.small.len() >= SMALL
    }

    /// Bytes that have not left yet.
    pub fn unsent(&self) -> usize {
        self.unsent
    }

    /// Adds a copy of `bytes`.
    ///
    /// # Panics
    /// Without room ([`SendList::has_room`]), or for more than [`SMALL`] bytes.
    pub fn push_small(&mut self, bytes: &[u8]) {
        assert!(self.has_room() && bytes.len() <= SMALL);
        let at = self.small.len();
        // Within the capacity, as just checked: the bytes never move.
        self.small.extend_from_slice(bytes);
        let start = self.small[at..].as_ptr().cast_mut();
        self.unsent += bytes.len();
        // A short piece right after a short piece goes on where that one ended.
        if let Some(last) = self.vectors.last_mut()
            && last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == start
        {
            last.iov_len += bytes.len();
            return;
        }
        self.vectors.push(libc::iovec { iov_base: start.cast(), iov_len: bytes.len() });
    }

    /// Adds a buffer's header and payload.
    ///
    /// # Panics
    /// Without room ([`SendList::has_room`]).
    pub fn push_buffer(&mut self, buffer: Buffer) {
        assert!(self.has_room());
        let wire = buffer.wire();
        self.unsent += wire.len();
        let start = wire.as_ptr().cast_mut().cast();
        self.vectors.push(libc::iovec { iov_base: start, iov_len: wire.len() });
        self.buffers.push(buffer);
    }

    /// Notes that the next `bytes` have left.
    pub fn advance(&mut self, mut bytes: usize) {
        assert!(bytes <= self.unsent, "{bytes} of {} left", self.unsent);
        self.unsent -= bytes;
        while bytes > 0 {
            let vector = &mut self.vectors[self.first];
            if bytes < vector.iov_len {
                vector.iov_base = vector.iov_base.cast::<u8>().wrapping_add(bytes).cast();
                vector.iov_len -= bytes;
                return;
            }
            bytes -= vector.iov_len;
            self.first += 1;
        }
    }

    /// Empties the list and gives its buffers back.
    pub fn take_buffers(&mut self) -> impl Iterator<Item = Buffer> + '_ {
        self.small.clear();
        self.vectors.clear();
        (self.first, self.unsent) = (0, 0);
        self.buffers.drain(..)
    }

    /// What is left, for the ring, which owns the list while the kernel looks at it.
    pub(super) fn message(&mut self) -> *const libc::msghdr {
        let left = &mut self.vectors[self.first..];
        self.message.msg_iov = if left.is_empty() { null_mut() } else { left.as_mut_ptr() };
        self.message.msg_iovlen = left.len();
        &raw const self.message
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_pieces_merge_and_room_is_counted() {
        let mut list = SendList::new(3);
        list.push_small(b"ab");
        list.push_small(b"cd");
        assert_eq!(list.vectors.len(), 1);
        list.push_buffer(Buffer::zeroed(10));
        list.push_small(b"ef");
        assert_eq!((list.vectors.len(), list.unsent()), (3, 16));
        assert!(!list.has_room());
        list.advance(5);
        assert_eq!((list.first, list.vectors[1].iov_len), (1, 9));
        list.advance(11);
        assert_eq!((list.first, list.unsent()), (3, 0));
        assert_eq!(list.take_buffers().count(), 1);
        assert!(list.is_empty() && list.has_room());
    }

    #[test]
    #[should_panic(expected = "has_room")]
    fn a_full_list_takes_no_more() {
        let mut list = SendList::new(1);
        list.push_buffer(Buffer::zeroed(1));
        list.push_buffer(Buffer::zeroed(1));
    }
}
