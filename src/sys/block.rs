//! What only an ioctl or `statx` tells about a file or a block device.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use rustix::fs::{AtFlags, StatxFlags, statx};

mod raw {
    use nix::{ioctl_read, ioctl_read_bad, ioctl_readwrite};

    // linux/fs.h. BLKGETSIZE64's number was made with size_t; the value is a u64 everywhere.
    ioctl_read!(blkgetsize64, 0x12, 114, usize);
    ioctl_read_bad!(blksszget, 0x1268, libc::c_int);
    ioctl_read_bad!(blkpbszget, 0x127b, libc::c_uint);
    ioctl_readwrite!(fifreeze, b'X', 119, libc::c_int);
    ioctl_readwrite!(fithaw, b'X', 120, libc::c_int);
}

/// The size of a block device, in bytes (BLKGETSIZE64).
///
/// # Errors
/// `ENOTTY` when it is not a block device.
pub fn device_size(device: impl AsFd) -> io::Result<u64> {
    let mut size = 0_u64;
    // SAFETY: the kernel stores 8 bytes, and `size` has 8 bytes, whatever the pointer is called.
    unsafe { raw::blkgetsize64(device.as_fd().as_raw_fd(), (&raw mut size).cast())? };
    Ok(size)
}

/// The logical block size of a block device: the unit of direct access (BLKSSZGET).
///
/// # Errors
/// As [`device_size`].
pub fn logical_block_size(device: impl AsFd) -> io::Result<u32> {
    let mut size = 0;
    // SAFETY: the kernel stores one c_int in `size`.
    unsafe { raw::blksszget(device.as_fd().as_raw_fd(), &raw mut size)? };
    u32::try_from(size).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// The physical block size of a block device: the unit it serves best (BLKPBSZGET).
///
/// # Errors
/// As [`device_size`].
pub fn physical_block_size(device: impl AsFd) -> io::Result<u32> {
    let mut size = 0;
    // SAFETY: the kernel stores one c_uint in `size`.
    unsafe { raw::blkpbszget(device.as_fd().as_raw_fd(), &raw mut size)? };
    Ok(size)
}

/// Freezes the file system that `file` lies on (FIFREEZE): what is dirty is written, and whoever writes
/// then waits for [`thaw`]. Waits for the device.
///
/// # Errors
/// `EBUSY` when it is frozen already, `EOPNOTSUPP` when it cannot be, `EPERM` without CAP_SYS_ADMIN.
pub fn freeze(file: impl AsFd) -> io::Result<()> {
    // SAFETY: the kernel does not use the argument (ioctl_fsfreeze).
    unsafe { raw::fifreeze(file.as_fd().as_raw_fd(), std::ptr::null_mut())? };
    Ok(())
}

/// Undoes [`freeze`] (FITHAW), whoever called it. Waits for the device.
///
/// # Errors
/// `EINVAL` when it is not frozen, `EPERM` without CAP_SYS_ADMIN.
pub fn thaw(file: impl AsFd) -> io::Result<()> {
    // SAFETY: the kernel does not use the argument (ioctl_fsthaw).
    unsafe { raw::fithaw(file.as_fd().as_raw_fd(), std::ptr::null_mut())? };
    Ok(())
}

/// What direct I/O demands of an open file, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirectAlignment {
    /// Of the memory.
    pub memory: u32,
    /// Of offsets and lengths.
    pub offset: u32,
}

/// What direct I/O on `file` demands, as the file system says (STATX_DIOALIGN, Linux 6.1). `None`
/// where it does not say; zeroes where direct I/O is not possible.
///
/// # Errors
/// What `statx` gives.
pub fn direct_alignment(file: impl AsFd) -> io::Result<Option<DirectAlignment>> {
    let found = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)?;
    let known = StatxFlags::from_bits_retain(found.stx_mask).contains(StatxFlags::DIOALIGN);
    Ok(known.then_some(DirectAlignment {
        memory: found.stx_dio_mem_align,
        offset: found.stx_dio_offset_align,
    }))
}
