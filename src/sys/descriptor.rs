//! Descriptors of types of other crates, and properties of files that `std` does not offer.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use neli::socket::synchronous::NlSocketHandle;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, XattrFlags, fsetxattr, statx};

/// A device number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceNumber {
    /// The major number, which stands for the driver.
    pub major: u32,
    /// The minor number, which stands for the device of that driver.
    pub minor: u32,
}

/// Returns the descriptor of a netlink socket, to poll it.
pub fn of_netlink(socket: &NlSocketHandle) -> BorrowedFd<'_> {
    // SAFETY: the handle owns the descriptor, closes it only when dropped, and stays borrowed for
    // as long as the result lives.
    unsafe { BorrowedFd::borrow_raw(socket.as_raw_fd()) }
}

/// Returns the number of the block device at `path`, symlinks followed; `None` for any other file. Does not
/// contact file servers (AT_STATX_DONT_SYNC), so that a dead one cannot block the caller.
///
/// # Errors
/// Returns the errors of `statx`.
pub fn block_device(path: &Path) -> io::Result<Option<DeviceNumber>> {
    Ok(match backing_device(path)? {
        BackingDevice::Device(number) => Some(number),
        BackingDevice::Filesystem(_) => None,
    })
}

/// Returns the id of the mount that `path` leads to, as in /proc/PID/mountinfo; `None` before Linux 5.8. Does not follow a
/// symlink at its end, mounts nothing, and does not contact file servers.
///
/// # Errors
/// Returns the errors of `statx`.
pub fn mount_id(path: &Path) -> io::Result<Option<u64>> {
    let flags = AtFlags::STATX_DONT_SYNC | AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    let found = statx(CWD, path, flags, StatxFlags::MNT_ID)?;
    let is_told = found.stx_mask & StatxFlags::MNT_ID.bits() != 0;
    Ok(is_told.then_some(found.stx_mnt_id))
}

/// The device that a file is, or the file system that it is stored on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BackingDevice {
    /// The file is this block device.
    Device(DeviceNumber),
    /// The file is stored on a file system with this device number. It is the number of the file system's
    /// block device, or, with major number 0, an anonymous number that identifies no device.
    Filesystem(DeviceNumber),
}

/// Returns the device at `path`, or the file system that the file is stored on. Does not contact file
/// servers, as [`block_device`].
///
/// # Errors
/// Returns the errors of `statx`.
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

/// Sets an extended attribute of a file or directory.
///
/// # Errors
/// Returns the errors of fsetxattr(2).
pub fn set_attribute(file: impl AsFd, name: &str, value: &[u8]) -> io::Result<()> {
    Ok(fsetxattr(file, name, value, XattrFlags::empty())?)
}

/// Takes ownership of a descriptor that this process inherited from its parent, and makes it
/// close-on-exec. Works once per process.
///
/// # Errors
/// Returns `EBADF` if the descriptor is not open; `EBUSY` on a second call.
pub fn inherited_descriptor(number: RawFd) -> io::Result<OwnedFd> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    // SAFETY: the number is only borrowed for this call, and fcntl checks that it is open.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    fcntl(borrowed, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Err(Errno::EBUSY.into());
    }
    // SAFETY: fcntl has just found it open; a descriptor from the parent has no owner in this process,
    // and TAKEN ensures that it gets only one.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}
