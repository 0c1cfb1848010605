//! What the page cache has of a file.

use std::os::fd::{AsFd, AsRawFd};

use crate::page_pipe::page_size;

/// The number of cachestat(2) on x86_64 and aarch64, which the C library does not know yet.
pub const SYS_CACHESTAT: libc::c_long = 451;

/// `struct cachestat_range` of <linux/mman.h>.
#[repr(C)]
struct Range {
    offset: u64,
    length: u64,
}

/// `struct cachestat` of <linux/mman.h>.
#[derive(Default)]
#[repr(C)]
struct Counts {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Returns how many pages of a range of a file are in the page cache. `None` before Linux 6.5, and if neither the file is open for
/// writing nor the process may write to it. Pages that are still being read count.
pub(crate) fn cached_pages(file: impl AsFd, offset: u64, length: u64) -> Option<u64> {
    let range = Range { offset, length };
    let mut counts = Counts::default();
    let flags = 0;
    // SAFETY: the kernel reads the range and writes the counts, which have the types that it expects.
    let result = unsafe {
        libc::syscall(
            SYS_CACHESTAT,
            file.as_fd().as_raw_fd(),
            &raw const range,
            &raw mut counts,
            flags,
        )
    };
    (result == 0).then_some(counts.cached)
}

/// Returns whether the page cache has pages for all of a range of a file. Those of tmpfs have their data; on a disk, they may
/// still be being read. False, too, if that is not known: see [`cached_pages`].
pub fn has_pages(file: impl AsFd, offset: u64, length: u64) -> bool {
    let pages = (offset + length).div_ceil(page_size()) - offset / page_size();
    length > 0 && cached_pages(&file, offset, length) == Some(pages)
}

/// Returns whether the page cache has all of a range of a file, so that a read of it does not wait for the disk. False, too, if
/// that is not known. Only of the last page is it known that it is not being read any more: the kernel reads ahead in order.
pub fn is_cached(file: impl AsFd, offset: u64, length: u64) -> bool {
    has_pages(&file, offset, length) && has_data(&file, offset + length - 1)
}

/// Returns whether a byte of a file, which the page cache has, can be read without waiting for the disk. False, too, on a file
/// system that cannot tell.
fn has_data(file: impl AsFd, offset: u64) -> bool {
    let Ok(offset) = libc::off_t::try_from(offset) else { return false };
    let mut byte = 0_u8;
    let part = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    // SAFETY: the kernel stores one byte in `byte`.
    let read = unsafe {
        libc::preadv2(file.as_fd().as_raw_fd(), &raw const part, 1, offset, libc::RWF_NOWAIT)
    };
    read == 1
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;

    use nix::sys::memfd::{MFdFlags, memfd_create};

    use super::*;

    #[test]
    fn written_pages_are_counted_and_holes_are_not() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[1; 3 * 4096]).unwrap();
        file.set_len(1 << 20).unwrap();
        // A kernel before Linux 6.5, or a file of overlayfs, which has no pages of its own.
        if matches!(cached_pages(&file, 0, 4096), None | Some(0)) {
            return;
        }
        assert_eq!(cached_pages(&file, 0, 1 << 20), Some(3));
        assert_eq!(cached_pages(&file, 4096, 4096), Some(1));
        assert!(is_cached(&file, 4095, 2 * 4096 + 1) && !is_cached(&file, 4095, 2 * 4096 + 2));
    }

    #[test]
    fn a_file_in_memory_has_pages_where_it_has_data() {
        let mut file = File::from(memfd_create("volume", MFdFlags::MFD_CLOEXEC).unwrap());
        file.write_all(&[1; 3 * 4096]).unwrap();
        file.set_len(1 << 20).unwrap();
        // A kernel before Linux 6.5.
        if cached_pages(&file, 0, 4096).is_none() {
            return;
        }
        assert!(has_pages(&file, 0, 3 * 4096) && !has_pages(&file, 0, 4 * 4096));
        assert!(!has_pages(&file, 0, 0));
    }
}
