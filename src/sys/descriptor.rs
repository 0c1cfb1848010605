//! Descriptors of foreign types, and facts about files that `std` cannot ask for.

use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use neli::socket::synchronous::NlSocketHandle;

/// A device number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceNumber {
    /// The driver.
    pub major: u32,
    /// The device within it.
    pub minor: u32,
}

/// The descriptor of a netlink socket, to poll it.
pub fn of_netlink(socket: &NlSocketHandle) -> BorrowedFd<'_> {
    // SAFETY: the handle owns the descriptor, closes it only when dropped, and stays borrowed for
    // as long as the result lives.
    unsafe { BorrowedFd::borrow_raw(socket.as_raw_fd()) }
}

/// The number of the block device at `path`, symlinks followed; `None` for any other file. Asks no
/// file server, so that a dead one elsewhere on the machine cannot hang the caller.
///
/// # Errors
/// What `statx` gives.
pub fn block_device(path: &Path) -> io::Result<Option<DeviceNumber>> {
    Ok(match backing_device(path)? {
        BackingDevice::Device(number) => Some(number),
        BackingDevice::Filesystem(_) => None,
    })
}

/// What stands behind an open file or a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BackingDevice {
    /// It is this block device.
    Device(DeviceNumber),
    /// It lies on a filesystem of this number: that of its block device, or with a major number of 0
    /// one that means nothing elsewhere.
    Filesystem(DeviceNumber),
}

/// What stands behind `path`, as [`block_device`] finds it.
///
/// # Errors
/// What `statx` gives.
pub fn backing_device(path: &Path) -> io::Result<BackingDevice> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut found = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: `path` ends with a zero byte, `found` is writable and of the type that is asked for.
    let result = unsafe {
        libc::statx(
            libc::AT_FDCWD,
            path.as_ptr(),
            libc::AT_STATX_DONT_SYNC,
            libc::STATX_TYPE,
            found.as_mut_ptr(),
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `statx` consists of integers, for which the zeroes it began with are valid.
    let found = unsafe { found.assume_init() };
    let is_block = u32::from(found.stx_mode) & libc::S_IFMT == libc::S_IFBLK;
    Ok(match is_block {
        true => BackingDevice::Device(DeviceNumber {
            major: found.stx_rdev_major,
            minor: found.stx_rdev_minor,
        }),
        false => BackingDevice::Filesystem(DeviceNumber {
            major: found.stx_dev_major,
            minor: found.stx_dev_minor,
        }),
    })
}
