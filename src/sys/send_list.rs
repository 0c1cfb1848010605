//! A list of pieces of a stream that one operation sends: short pieces are copied into the list, long ones
//! stay in their buffers.

use std::ptr::null_mut;

use super::buffer::Buffer;

/// The maximum length of a short piece, in bytes. The list reserves this space for each piece.
pub const SMALL: usize = 32;

/// A list of pieces. Filling and emptying it does not allocate memory.
#[derive(Debug)]
pub struct SendList {
    small: Vec<u8>,
    buffers: Vec<Buffer>,
    vectors: Vec<libc::iovec>,
    /// The number of vectors that have been sent completely.
    first: usize,
    unsent: usize,
    message: libc::msghdr,
}

// SAFETY: the pointers in `vectors` and `message` point to heap memory that this value owns.
unsafe impl Send for SendList {}

impl SendList {
    /// Makes a list for up to `pieces` pieces, at most 1024 (IOV_MAX).
    ///
    /// # Panics
    /// Panics if `pieces` is 0 or above 1024.
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

    /// Returns whether the list contains no piece.
    pub fn is_empty(&self) -> bool {
        self.vectors.is_empty()
    }

    /// Returns whether another piece fits.
    pub fn has_room(&self) -> bool {
        self.vectors.len() < self.vectors.capacity()
            && self.small.capacity() - self.small.len() >= SMALL
    }

    /// Returns the number of bytes that have not been sent yet.
    pub fn unsent(&self) -> usize {
        self.unsent
    }

    /// Adds a copy of `bytes`.
    ///
    /// # Panics
    /// Panics if there is no room ([`SendList::has_room`]), or for more than [`SMALL`] bytes.
    pub fn push_small(&mut self, bytes: &[u8]) {
        assert!(self.has_room() && bytes.len() <= SMALL);
        let at = self.small.len();
        // The capacity suffices, as just checked, so the bytes never move.
        self.small.extend_from_slice(bytes);
        let start = self.small[at..].as_ptr().cast_mut();
        self.unsent += bytes.len();
        // A short piece directly after another extends its vector.
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
    /// Panics if there is no room ([`SendList::has_room`]).
    pub fn push_buffer(&mut self, buffer: Buffer) {
        assert!(self.has_room());
        let wire = buffer.wire();
        self.unsent += wire.len();
        let start = wire.as_ptr().cast_mut().cast();
        self.vectors.push(libc::iovec { iov_base: start, iov_len: wire.len() });
        self.buffers.push(buffer);
    }

    /// Records that the next `bytes` bytes have been sent.
    ///
    /// # Panics
    /// Panics if fewer bytes are unsent.
    pub fn advance(&mut self, mut bytes: usize) {
        assert!(bytes <= self.unsent, "{bytes} bytes of {} unsent", self.unsent);
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

    /// Empties the list and returns its buffers.
    pub fn take_buffers(&mut self) -> impl Iterator<Item = Buffer> + '_ {
        self.small.clear();
        self.vectors.clear();
        (self.first, self.unsent) = (0, 0);
        self.buffers.drain(..)
    }

    /// Returns the unsent pieces as a message for the kernel. The ring owns the list while the kernel reads
    /// it.
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
    fn short_pieces_share_a_vector_and_the_list_fills_up() {
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
    fn a_push_to_a_full_list_panics() {
        let mut list = SendList::new(1);
        list.push_buffer(Buffer::zeroed(1));
        list.push_buffer(Buffer::zeroed(1));
    }
}
