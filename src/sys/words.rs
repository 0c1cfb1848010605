//! A large table of atomic words that are zero at first.

use std::io;
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};

/// The table. It takes memory from its first use on, in pages of 2 MiB where the kernel has them (in cleat since Linux 6.18, see
/// `memory_limit::use_huge_pages_on_request`): places of such a table are looked up at random, and with pages of 4 KiB, the
/// processor would look for the page each time, too.
#[derive(Debug)]
pub struct Words {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping lives as long as the value and is not tied to a thread; every access is atomic.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    /// Makes a table of `count` words.
    ///
    /// # Errors
    /// Returns `EINVAL` if there are none or more than the address space has, and `ENOMEM` if memory is limited.
    pub fn new(count: usize) -> io::Result<Self> {
        let bytes = count.checked_mul(size_of::<AtomicU64>()).and_then(NonZeroUsize::new);
        let bytes = bytes.ok_or(io::ErrorKind::InvalidInput)?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe { mmap_anonymous(None, bytes, protection, MapFlags::MAP_PRIVATE) }?;
        // SAFETY: the advice changes no content. Without it, or if the kernel has no such pages, the table has short pages.
        let _ = unsafe { madvise(base, bytes.get(), MmapAdvise::MADV_HUGEPAGE) };
        Ok(Self { base: base.cast(), bytes: bytes.get() })
    }

    /// Has the processor load a word into its cache, so that an access soon does not wait for the memory.
    pub fn prefetch(&self, index: usize) {
        crate::prefetch(&self.get()[index]);
    }

    /// Returns the words.
    pub fn get(&self) -> &[AtomicU64] {
        let count = self.bytes / size_of::<AtomicU64>();
        // SAFETY: the mapping is page-aligned, `bytes` long, zeroed by the kernel, and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast(), count) }
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length, and no reference outlives `self`.
        let unmapped = unsafe { munmap(self.base.cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "the arguments are those of the mapping");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn words_are_zero_and_keep_what_is_stored() {
        let words = Words::new(1 << 20).unwrap();
        words.get()[(1 << 20) - 1].store(7, Ordering::Relaxed);
        let loaded = |at: usize| words.get()[at].load(Ordering::Relaxed);
        assert_eq!([loaded(0), loaded((1 << 20) - 1)], [0, 7]);
        assert_eq!(words.get().len(), 1 << 20);
        assert!(Words::new(0).is_err());
        assert!(Words::new(usize::MAX).is_err());
    }
}
