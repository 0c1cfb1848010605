//! A list of pieces of a stream that one operation sends: short pieces are copied into the list, long ones
//! stay in their buffers or in shared memory.

use std::ptr::null_mut;
use std::sync::Arc;

use super::buffer::Buffer;
use super::shared::{SharedMemory, SharedPart};

/// The maximum length of a short piece, in bytes. The list reserves this space for each piece.
pub const SMALL: usize = 32;

/// The maximum number of vectors of one operation (IOV_MAX).
const MAX_VECTORS: usize = 1024;

/// A list of pieces. Filling and emptying it does not allocate memory.
#[derive(Debug)]
pub struct SendList {
    small: Vec<u8>,
    buffers: Vec<Buffer>,
    /// The memory of shared pieces; neighbours differ.
    shared: Vec<Arc<SharedMemory>>,
    vectors: Vec<libc::iovec>,
    /// The number of pieces, and its maximum.
    pieces: usize,
    limit: usize,
    /// The number of vectors that have been sent completely.
    first: usize,
    unsent: usize,
    message: libc::msghdr,
}

// SAFETY: the pointers in `vectors` and `message` point to heap memory that this value owns, and to mappings that
// `shared` keeps.
unsafe impl Send for SendList {}

impl SendList {
    /// Makes a list for up to `pieces` pieces, at most 1024. A shared piece and its header are one piece.
    ///
    /// # Panics
    /// Panics if `pieces` is 0 or above 1024.
    pub fn new(pieces: usize) -> Self {
        assert!((1..=1024).contains(&pieces), "{pieces} pieces");
        Self {
            small: Vec::with_capacity(pieces * SMALL),
            buffers: Vec::with_capacity(pieces),
            shared: Vec::with_capacity(pieces),
            vectors: Vec::with_capacity(2 * pieces),
            pieces: 0,
            limit: pieces,
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
        self.pieces < self.limit
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
        self.pieces += 1;
        self.put_small(bytes);
    }

    fn put_small(&mut self, bytes: &[u8]) {
        let at = self.small.len();
        // The capacity suffices for all pieces, so the bytes never move.
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
        self.pieces += 1;
        let wire = buffer.wire();
        self.unsent += wire.len();
        let start = wire.as_ptr().cast_mut().cast();
        self.vectors.push(libc::iovec { iov_base: start, iov_len: wire.len() });
        self.buffers.push(buffer);
    }

    /// Adds a copy of `header`, and `part` after it.
    ///
    /// # Panics
    /// Panics if there is no room ([`SendList::has_room`]), or for a header of more than [`SMALL`] bytes.
    pub fn push_shared(&mut self, header: &[u8], part: SharedPart) {
        self.push_small(header);
        let len = part.len();
        let (start, memory) = part.into_parts();
        self.vectors.push(libc::iovec { iov_base: start.cast(), iov_len: len });
        self.unsent += len;
        if self.shared.last().is_none_or(|last| !Arc::ptr_eq(last, &memory)) {
            self.shared.push(memory);
        }
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
        self.shared.clear();
        self.vectors.clear();
        (self.pieces, self.first, self.unsent) = (0, 0, 0);
        self.buffers.drain(..)
    }

    /// Returns the unsent pieces, as many as one operation can have, as a message for the kernel. The ring owns the
    /// list while the kernel reads it.
    pub(super) fn message(&mut self) -> *const libc::msghdr {
        let left = &mut self.vectors[self.first..];
        self.message.msg_iov = if left.is_empty() { null_mut() } else { left.as_mut_ptr() };
        self.message.msg_iovlen = left.len().min(MAX_VECTORS);
        &raw const self.message
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_pieces_share_a_vector_and_the_list_fills_up() {
        let mut list = SendList::new(4);
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
    fn shared_memory_is_sent_from_its_place_and_kept() {
        let memory = Arc::new(SharedMemory::create("test", 8192).unwrap());
        let mut list = SendList::new(600);
        for index in 0..600 {
            list.push_shared(b"header", SharedPart::new(&memory, index, 100));
        }
        assert!(!list.has_room());
        assert_eq!((list.vectors.len(), list.unsent()), (1200, 600 * 106));
        assert_eq!(list.vectors[2].iov_len, 6, "a header does not extend the part before it");
        assert_eq!(Arc::strong_count(&memory), 2, "one reference for all parts of a memory");
        list.message();
        assert_eq!(list.message.msg_iovlen, MAX_VECTORS);
        list.advance(MAX_VECTORS / 2 * 106);
        list.message();
        assert_eq!(list.message.msg_iovlen, 1200 - MAX_VECTORS);
        assert_eq!(list.take_buffers().count(), 0);
        assert_eq!(Arc::strong_count(&memory), 1);
        assert!(list.has_room());
    }

    #[test]
    #[should_panic(expected = "has_room")]
    fn a_push_to_a_full_list_panics() {
        let mut list = SendList::new(1);
        list.push_buffer(Buffer::zeroed(1));
        list.push_buffer(Buffer::zeroed(1));
    }
}
