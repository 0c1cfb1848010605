//! Memory that connection threads or processes share, in memory files (memfd_create(2)).
//!
//! Another thread or process may write to it at any time, so this module never makes a reference to plain
//! bytes: small values are atomics, and `memcpy` of the C library copies bytes in and out. The size is
//! sealed: if a process could shrink the file, an access beyond its end would raise SIGBUS.

use std::hint::black_box;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use nix::fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::sys::stat::fstat;
use nix::unistd::ftruncate;

/// The mapping of a whole memory file of fixed size, readable and writable.
#[derive(Debug)]
pub struct SharedMemory {
    file: OwnedFd,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping lives as long as the value and is not tied to a thread; every access is
// atomic, or a copy that tolerates concurrent writers.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Makes a memory file of `len` zero bytes and maps it. A page takes memory from its first use on.
    /// `name` appears only in `/proc/*/maps`.
    ///
    /// # Errors
    /// Returns `EINVAL` for a length of zero or beyond the address space; otherwise the errors of the kernel.
    pub fn create(name: &str, len: u64) -> io::Result<Self> {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let file = memfd_create(name, flags)?;
        let length = libc::off_t::try_from(len).map_err(|_| invalid())?;
        ftruncate(&file, length)?;
        fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW))?;
        Self::map(file, len)
    }

    /// Maps a memory file from another process. It must be exactly `len` bytes long and sealed against
    /// shrinking.
    ///
    /// # Errors
    /// Returns `EINVAL` if it is not; otherwise the errors of the kernel.
    pub fn from_fd(file: OwnedFd, len: u64) -> io::Result<Self> {
        // Fails with EINVAL when it is not a memory file.
        let seals = SealFlag::from_bits_retain(fcntl(&file, FcntlArg::F_GET_SEALS)?);
        if !seals.contains(SealFlag::F_SEAL_SHRINK) {
            return Err(invalid());
        }
        if u64::try_from(fstat(&file)?.st_size) != Ok(len) {
            return Err(invalid());
        }
        Self::map(file, len)
    }

    /// Maps a memory file of any length from another process. It must be sealed against shrinking.
    ///
    /// # Errors
    /// Returns the errors of [`SharedMemory::from_fd`].
    pub fn whole(file: OwnedFd) -> io::Result<Self> {
        let len = u64::try_from(fstat(&file)?.st_size).map_err(|_| invalid())?;
        Self::from_fd(file, len)
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the length is zero; it never is.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the memory file, to be sent to another process.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Returns the memory as 64-bit words, without a remainder of less than 8 bytes.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is page-aligned, `len` bytes long, initialised by the kernel, and
        // lives as long as `self`; concurrent access through other atomics is allowed.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast(), self.len / 8) }
    }

    /// Copies `target.len()` bytes at `offset` to `target`. Where another writer is active, the result may
    /// mix old and new bytes.
    ///
    /// # Panics
    /// Panics if the range is not inside the memory.
    pub fn read_at(&self, offset: u64, target: &mut [u8]) {
        let source = self.range(offset, target.len() as u64);
        // SAFETY: `range` has checked `target.len()` bytes from `source`, which belong to the
        // mapping and so cannot overlap an exclusive slice of plain memory.
        unsafe { foreign_copy(target.as_mut_ptr(), source, target.len()) };
    }

    /// Copies `source` to the memory at `offset`.
    ///
    /// # Panics
    /// Panics if the range is not inside the memory.
    pub fn write_at(&self, offset: u64, source: &[u8]) {
        let target = self.range(offset, source.len() as u64);
        // SAFETY: as in `read_at`, with the sides exchanged.
        unsafe { foreign_copy(target, source.as_ptr(), source.len()) };
    }

    /// Fills a range with zeroes. Its pages stay allocated.
    ///
    /// # Panics
    /// Panics if the range is not inside the memory.
    pub fn fill_zero(&self, offset: u64, len: u64) {
        let target = self.range(offset, len);
        type Fill = unsafe extern "C" fn(*mut libc::c_void, i32, usize) -> *mut libc::c_void;
        let fill: Fill = black_box(libc::memset);
        let len = usize::try_from(len).expect("the range is inside the mapping");
        // SAFETY: `range` has checked the bytes; see `foreign_copy` for concurrent writers.
        unsafe { fill(target.cast(), 0, len) };
    }

    /// Makes a range read as zeroes, and returns its whole pages to the system.
    ///
    /// # Errors
    /// Returns the errors of `fallocate`; each byte of the range is then either unchanged or zero.
    ///
    /// # Panics
    /// Panics if the range is not inside the memory.
    pub fn punch_hole(&self, offset: u64, len: u64) -> io::Result<()> {
        self.range(offset, len);
        if len == 0 {
            return Ok(());
        }
        let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        // Both values fit, because they lie inside a mapping.
        fallocate(&self.file, mode, offset.cast_signed(), len.cast_signed())?;
        Ok(())
    }

    fn map(file: OwnedFd, len: u64) -> io::Result<Self> {
        let len = usize::try_from(len).map_err(|_| invalid())?;
        let length = NonZeroUsize::new(len).ok_or_else(invalid)?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let base =
            unsafe { mmap(None, length, protection, MapFlags::MAP_SHARED, &file, 0) }?.cast();
        Ok(Self { file, base, len })
    }

    /// Checks that `offset..offset + len` is inside the memory, and returns the address of its start.
    fn range(&self, offset: u64, len: u64) -> *mut u8 {
        let end = offset.checked_add(len);
        assert!(
            end.is_some_and(|end| end <= self.len as u64),
            "{len} bytes at {offset} in a memory of {} bytes",
            self.len
        );
        let offset = usize::try_from(offset).expect("the range is inside the mapping");
        // SAFETY: offset <= len of the mapping, just checked, so the result is inside it or one
        // past its end.
        unsafe { self.base.as_ptr().add(offset) }
    }
}

/// A part of a memory file that is sent from where it is. The memory stays mapped while this value exists, and
/// another writer may change it.
#[derive(Debug, Clone)]
pub struct SharedPart {
    memory: Arc<SharedMemory>,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: `start` points into the mapping of `memory`, which is not tied to a thread.
unsafe impl Send for SharedPart {}

impl SharedPart {
    /// Returns the part of `len` bytes at `offset`.
    ///
    /// # Panics
    /// Panics if the range is not inside the memory.
    pub fn new(memory: &Arc<SharedMemory>, offset: u64, len: u64) -> Self {
        let start = NonNull::new(memory.range(offset, len)).expect("a mapping is not at 0");
        let len = usize::try_from(len).expect("the range is inside the mapping");
        Self { memory: Arc::clone(memory), start, len }
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the part has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address of the first byte, and what keeps it mapped.
    pub(super) fn into_parts(self) -> (*mut u8, Arc<SharedMemory>) {
        (self.start.as_ptr(), self.memory)
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: mapped in `map` with this length, and no reference outlives `self`.
        let unmapped = unsafe { munmap(self.base.cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "the arguments are those of the mapping");
    }
}

/// Calls `memcpy` through a pointer that is opaque to the compiler. In foreign code the rules of the
/// machine apply: a copy that races with another writer yields a mix of old and new bytes, nothing worse.
/// The same copy in Rust would be undefined behaviour.
///
/// # Safety
/// `len` bytes must be valid behind both pointers, and the ranges must not overlap.
pub(crate) unsafe fn foreign_copy(target: *mut u8, source: *const u8, len: usize) {
    type Copy =
        unsafe extern "C" fn(*mut libc::c_void, *const libc::c_void, usize) -> *mut libc::c_void;
    let copy: Copy = black_box(libc::memcpy);
    // SAFETY: the caller guarantees what `memcpy` requires.
    unsafe { copy(target.cast(), source.cast(), len) };
}

fn invalid() -> io::Error {
    io::Error::from_raw_os_error(libc::EINVAL)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn two_mappings_of_one_file_see_the_same_bytes() {
        let first = SharedMemory::create("cleat-test", 8192).unwrap();
        let second =
            SharedMemory::from_fd(first.file().try_clone_to_owned().unwrap(), 8192).unwrap();
        first.write_at(4090, b"across a page");
        let mut read = [0; 13];
        second.read_at(4090, &mut read);
        assert_eq!(&read, b"across a page");
        first.words()[3].store(7, Ordering::Relaxed);
        assert_eq!(second.words()[3].load(Ordering::Relaxed), 7);
    }

    #[test]
    fn only_zeroed_and_punched_ranges_read_as_zeroes() {
        let memory = SharedMemory::create("cleat-test", 3 * 4096).unwrap();
        memory.write_at(0, &[1; 3 * 4096]);
        memory.fill_zero(10, 20);
        memory.punch_hole(4000, 5000).unwrap();
        let mut all = vec![0; 3 * 4096];
        memory.read_at(0, &mut all);
        for (at, &byte) in all.iter().enumerate() {
            let zero = (10..30).contains(&at) || (4000..9000).contains(&at);
            assert_eq!(byte, u8::from(!zero), "at {at}");
        }
    }

    #[test]
    fn files_of_another_size_or_without_seal_are_refused() {
        let memory = SharedMemory::create("cleat-test", 4096).unwrap();
        let file = memory.file().try_clone_to_owned().unwrap();
        assert!(SharedMemory::from_fd(file, 8192).is_err());
        let loose = memfd_create("cleat-test", MFdFlags::MFD_ALLOW_SEALING).unwrap();
        ftruncate(&loose, 4096).unwrap();
        assert!(SharedMemory::from_fd(loose, 4096).is_err());
        let disk: OwnedFd = tempfile::tempfile().unwrap().into();
        assert!(SharedMemory::from_fd(disk, 0).is_err());
        assert!(SharedMemory::create("cleat-test", 0).is_err());
    }

    #[test]
    #[should_panic(expected = "in a memory of")]
    fn an_access_beyond_the_end_panics() {
        SharedMemory::create("cleat-test", 4096).unwrap().write_at(u64::MAX - 2, b"12345");
    }
}
