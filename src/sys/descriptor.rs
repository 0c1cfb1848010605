//! Descriptors of foreign types, and facts about files that `std` cannot ask for.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use neli::socket::synchronous::NlSocketHandle;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, statx};

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
    let found = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE)?;
    let is_block = FileType::from_raw_mode(found.stx_mode.into()) == FileType::BlockDevice;
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

/// Takes ownership of a descriptor that the parent process left open for us, and keeps it from
/// children. Works once in a process.
///
/// # Errors
/// EBADF when it is not open; EBUSY when one was taken before.
pub fn inherited_descriptor(number: RawFd) -> io::Result<OwnedFd> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    // SAFETY: the number is only borrowed for this call, and fcntl checks that it is open.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    fcntl(borrowed, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Err(Errno::EBUSY.into());
    }
    // SAFETY: open, as just seen; a descriptor from the parent has no owner in this process, and
    // TAKEN keeps it from getting a second one.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}
