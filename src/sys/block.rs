//! Properties of files and block devices that need an ioctl or `statx`, and the freeze of a file system.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use rustix::fs::{AtFlags, StatxFlags, statx};

mod raw {
    use nix::{ioctl_read, ioctl_read_bad, ioctl_readwrite};

    // From linux/fs.h. The number of BLKGETSIZE64 is defined with size_t; the value is always a u64.
    ioctl_read!(blkgetsize64, 0x12, 114, usize);
    ioctl_read_bad!(blksszget, 0x1268, libc::c_int);
    ioctl_read_bad!(blkpbszget, 0x127b, libc::c_uint);
    ioctl_readwrite!(fifreeze, b'X', 119, libc::c_int);
    ioctl_readwrite!(fithaw, b'X', 120, libc::c_int);
    ioctl_readwrite!(fiemap, b'f', 11, Fiemap);

    /// `struct fiemap` of linux/fiemap.h, without extents.
    #[derive(Default)]
    #[repr(C)]
    pub(super) struct Fiemap {
        pub(super) start: u64,
        pub(super) length: u64,
        pub(super) flags: u32,
        pub(super) mapped_extents: u32,
        pub(super) extent_count: u32,
        pub(super) reserved: u32,
    }
}

/// Returns the size of a block device, in bytes (BLKGETSIZE64).
///
/// # Errors
/// Returns `ENOTTY` if it is not a block device.
pub fn device_size(device: impl AsFd) -> io::Result<u64> {
    let mut size = 0_u64;
    // SAFETY: the kernel stores 8 bytes, and `size` has 8 bytes, whatever the pointer is called.
    unsafe { raw::blkgetsize64(device.as_fd().as_raw_fd(), (&raw mut size).cast())? };
    Ok(size)
}

/// Returns the size in bytes of the block device with the number `device` (`st_rdev`), without opening it. Reads
/// `/sys`, and does not block.
///
/// # Errors
/// Returns the errors of reading `/sys`: `NotFound` without such a device.
pub fn size_of_number(device: u64) -> io::Result<u64> {
    /// The unit of the attribute, for every device (Documentation/ABI/stable/sysfs-block).
    const SECTOR_BYTES: u64 = 512;
    let (major, minor) = (libc::major(device), libc::minor(device));
    let text = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/size"))?;
    let sectors: u64 = text.trim().parse().map_err(io::Error::other)?;
    Ok(sectors.saturating_mul(SECTOR_BYTES))
}

/// Returns the logical block size of a block device: the unit of direct access (BLKSSZGET).
///
/// # Errors
/// Returns the errors of [`device_size`].
pub fn logical_block_size(device: impl AsFd) -> io::Result<u32> {
    let mut size = 0;
    // SAFETY: the kernel stores one c_int in `size`.
    unsafe { raw::blksszget(device.as_fd().as_raw_fd(), &raw mut size)? };
    u32::try_from(size).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Returns the physical block size of a block device: the unit with the best performance (BLKPBSZGET).
///
/// # Errors
/// Returns the errors of [`device_size`].
pub fn physical_block_size(device: impl AsFd) -> io::Result<u32> {
    let mut size = 0;
    // SAFETY: the kernel stores one c_uint in `size`.
    unsafe { raw::blkpbszget(device.as_fd().as_raw_fd(), &raw mut size)? };
    Ok(size)
}

/// Returns whether the file system of `file` can say where on a disk the file is (FIEMAP). On overlayfs, the file system that
/// has the file answers (`ovl_fiemap`). tmpfs, FUSE and NFS cannot say it.
pub fn is_on_disk(file: impl AsFd) -> bool {
    let mut first_byte = raw::Fiemap { length: 1, ..raw::Fiemap::default() };
    // SAFETY: the kernel stores the number of extents in the struct, and no extents, because it has room for none.
    unsafe { raw::fiemap(file.as_fd().as_raw_fd(), &raw mut first_byte) }.is_ok()
}

/// Freezes the file system of `file` (FIFREEZE). The kernel writes dirty data to the device; later writes
/// to the file system block until [`thaw`]. Blocks until the device has taken the data.
///
/// # Errors
/// Returns `EBUSY` if the file system is frozen already, `EOPNOTSUPP` if it does not support freezing,
/// `EPERM` without CAP_SYS_ADMIN.
pub fn freeze(file: impl AsFd) -> io::Result<()> {
    // SAFETY: the kernel does not use the argument (ioctl_fsfreeze).
    unsafe { raw::fifreeze(file.as_fd().as_raw_fd(), std::ptr::null_mut())? };
    Ok(())
}

/// Thaws the file system of `file` (FITHAW), also when another process froze it. Blocks while
/// the device does not answer.
///
/// # Errors
/// Returns `EINVAL` if the file system is not frozen, `EPERM` without CAP_SYS_ADMIN.
pub fn thaw(file: impl AsFd) -> io::Result<()> {
    // SAFETY: the kernel does not use the argument (ioctl_fsthaw).
    unsafe { raw::fithaw(file.as_fd().as_raw_fd(), std::ptr::null_mut())? };
    Ok(())
}

/// The alignment that direct I/O on a file requires, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirectAlignment {
    /// The alignment of the memory.
    pub memory: u32,
    /// The alignment of offsets and lengths.
    pub offset: u32,
}

/// Returns the alignment that direct I/O on `file` requires, as its file system reports it (STATX_DIOALIGN,
/// Linux 6.1). `None` when the file system does not report it; zeroes when it does not support direct I/O.
///
/// # Errors
/// Returns the errors of `statx`.
pub fn direct_alignment(file: impl AsFd) -> io::Result<Option<DirectAlignment>> {
    let found = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)?;
    let known = StatxFlags::from_bits_retain(found.stx_mask).contains(StatxFlags::DIOALIGN);
    Ok(known.then_some(DirectAlignment {
        memory: found.stx_dio_mem_align,
        offset: found.stx_dio_offset_align,
    }))
}
