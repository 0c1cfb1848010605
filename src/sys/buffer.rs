//! Page-aligned buffers that the kernel may read and write while a request is in flight.
//!
//! A buffer has one owner at any time: the code that fills it, the ring, or a backend. The space
//! directly before the payload holds a header, so that a reply is one contiguous piece.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::num::NonZeroUsize;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use stable_deref_trait::StableDeref;

use crate::page_pipe::PagePipe;

/// Alignment of every payload, in bytes: enough for direct I/O on any block device.
pub const ALIGNMENT: usize = 4096;

/// The space before the payload, in bytes. It is one alignment unit, so that the payload stays aligned.
pub const HEADROOM: usize = ALIGNMENT;

/// From this capacity on, a buffer has its own pages, which return to the system as soon as it is freed.
/// (An allocator would retain them for some time.)
const OWN_PAGES: usize = 128 << 10;

/// A payload of fixed capacity with space for a header before it. A buffer may have a pipe, which then can hold the
/// payload in place of the memory.
#[derive(Debug)]
pub struct Buffer {
    base: NonNull<u8>,
    capacity: usize,
    header_len: usize,
    len: usize,
    pipe: Option<PagePipe>,
}

// SAFETY: this value alone owns the memory, and nothing about it is tied to a thread.
unsafe impl Send for Buffer {}

/// The payload.
impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.payload()
    }
}

/// The payload, mutable.
impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.payload_mut()
    }
}

// SAFETY: the payload is part of an allocation that this value alone owns, and whose address does not
// change when the value moves; all of it is initialised.
unsafe impl StableDeref for Buffer {}

impl Buffer {
    /// Makes a buffer with a payload of `len` zero bytes. Aborts the process when memory is exhausted, like
    /// `Vec`.
    pub fn zeroed(len: usize) -> Self {
        let capacity = len.next_multiple_of(ALIGNMENT).max(ALIGNMENT);
        let layout = Self::layout(capacity);
        let base = if capacity < OWN_PAGES { allocate(layout) } else { map_pages(layout) };
        let Some(base) = base else { handle_alloc_error(layout) };
        Self { base, capacity, header_len: 0, len, pipe: None }
    }

    /// Returns the maximum length of the payload, in bytes; a multiple of [`ALIGNMENT`].
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns the payload's length, in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the payload is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Sets the length of the payload. Added bytes hold what was stored there before, or zeroes.
    ///
    /// # Panics
    /// Panics if `len` exceeds the capacity.
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity, "{len} bytes in a buffer of {}", self.capacity);
        self.len = len;
    }

    /// Returns the payload.
    pub fn payload(&self) -> &[u8] {
        // SAFETY: the payload's `len` <= capacity bytes lie inside the allocation and were
        // initialised (to zero at the least) when it was made.
        unsafe { std::slice::from_raw_parts(self.payload_ptr(), self.len) }
    }

    /// Returns the payload, mutable.
    pub fn payload_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `payload`; `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.payload_ptr(), self.len) }
    }

    /// Stores `header` directly before the payload; [`Buffer::wire`] then begins with it.
    ///
    /// # Panics
    /// Panics if the header is longer than [`HEADROOM`].
    pub fn set_header(&mut self, header: &[u8]) {
        assert!(header.len() <= HEADROOM, "a header of {} bytes", header.len());
        self.header_len = header.len();
        let start = HEADROOM - header.len();
        // SAFETY: `start..HEADROOM` lies inside the allocation, is initialised, and `&mut self`
        // makes the access exclusive.
        let room =
            unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().add(start), header.len()) };
        room.copy_from_slice(header);
    }

    /// Returns the header and the payload, as they are sent.
    pub fn wire(&self) -> &[u8] {
        let start = HEADROOM - self.header_len;
        // SAFETY: header and payload are adjacent, initialised and inside the allocation.
        unsafe {
            std::slice::from_raw_parts(self.base.as_ptr().add(start), self.header_len + self.len)
        }
    }

    /// Returns the header.
    pub fn header(&self) -> &[u8] {
        &self.wire()[..self.header_len]
    }

    /// Adds a pipe for the payload.
    pub fn attach_pipe(&mut self, pipe: PagePipe) {
        self.pipe = Some(pipe);
    }

    /// Removes the pipe.
    pub fn take_pipe(&mut self) -> Option<PagePipe> {
        self.pipe.take()
    }

    /// Returns the pipe.
    pub fn pipe(&self) -> Option<&PagePipe> {
        self.pipe.as_ref()
    }

    /// Returns the pipe, mutable.
    pub fn pipe_mut(&mut self) -> Option<&mut PagePipe> {
        self.pipe.as_mut()
    }

    /// Returns whether the pipe holds the payload.
    pub fn is_in_pipe(&self) -> bool {
        self.pipe.as_ref().is_some_and(|pipe| !pipe.is_empty())
    }

    /// Removes the header, before the buffer is used again.
    pub fn clear_header(&mut self) {
        self.header_len = 0;
    }

    /// Returns the address of the payload, valid for `capacity` bytes until the buffer is dropped.
    pub fn payload_ptr(&self) -> *mut u8 {
        // SAFETY: HEADROOM bytes precede the payload in the same allocation.
        unsafe { self.base.as_ptr().add(HEADROOM) }
    }

    fn layout(capacity: usize) -> Layout {
        Layout::from_size_align(HEADROOM + capacity, ALIGNMENT)
            .expect("a payload is always far smaller than isize::MAX")
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let layout = Self::layout(self.capacity);
        if self.capacity < OWN_PAGES {
            // SAFETY: allocated in `zeroed` with the same layout, and freed only here.
            unsafe { dealloc(self.base.as_ptr(), layout) };
        } else {
            // SAFETY: mapped in `zeroed` with the same size, and unmapped only here.
            let unmapped = unsafe { munmap(self.base.cast(), layout.size()) };
            debug_assert!(unmapped.is_ok(), "the arguments are those of the mapping");
        }
    }
}

fn allocate(layout: Layout) -> Option<NonNull<u8>> {
    // SAFETY: the layout's size is at least HEADROOM, so it is not zero.
    NonNull::new(unsafe { alloc_zeroed(layout) })
}

/// Maps new pages, which are zero.
fn map_pages(layout: Layout) -> Option<NonNull<u8>> {
    let size = NonZeroUsize::new(layout.size())?;
    let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let base = unsafe { mmap_anonymous(None, size, protection, MapFlags::MAP_PRIVATE) };
    base.ok().map(NonNull::cast)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_and_payload_are_contiguous() {
        let mut buffer = Buffer::zeroed(5);
        buffer.payload_mut().copy_from_slice(b"world");
        buffer.set_header(b"hello ");
        assert_eq!(buffer.wire(), b"hello world");
        assert_eq!(buffer.payload_ptr() as usize % ALIGNMENT, 0);
        buffer.clear_header();
        assert_eq!(buffer.wire(), b"world");
    }

    #[test]
    fn buffers_with_their_own_pages_are_aligned_and_zero() {
        for len in [OWN_PAGES - ALIGNMENT, OWN_PAGES, OWN_PAGES + 1, 32 << 20] {
            let mut buffer = Buffer::zeroed(len);
            assert_eq!(buffer.payload_ptr() as usize % ALIGNMENT, 0);
            assert!(buffer.payload().iter().all(|&byte| byte == 0));
            buffer.payload_mut()[len - 1] = 1;
            buffer.set_header(b"head");
            assert_eq!(buffer.wire().len(), len + 4);
        }
    }

    #[test]
    #[should_panic(expected = "in a buffer of")]
    fn a_length_beyond_the_capacity_panics() {
        Buffer::zeroed(10).set_len(ALIGNMENT + 1);
    }
}
