//! Pages of a file on their way to a socket, in a pipe.
//!
//! splice(2) puts references to pages of the page cache into a pipe, and from there into the buffer of a socket. No
//! byte is copied until the peer receives. So the peer gets what a page contains then, also what was written to it
//! meanwhile.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::unistd::{SysconfVar, pipe2, read, sysconf};

mod raw {
    // SIOCOUTQ (asm-generic/ioctls.h) is TIOCOUTQ.
    nix::ioctl_read_bad!(siocoutq, libc::TIOCOUTQ, libc::c_int);
}

/// A pipe that holds references to pages. Neither end blocks.
#[derive(Debug)]
pub struct PagePipe {
    output: OwnedFd,
    input: OwnedFd,
    /// The number of pages that fit.
    pages: u64,
    len: usize,
}

impl PagePipe {
    /// Makes an empty pipe for `capacity` bytes, or for less if the system does not allow it.
    ///
    /// # Errors
    /// Returns the errors of pipe2(2), for example `EMFILE`.
    pub fn new(capacity: usize) -> io::Result<Self> {
        let (output, input) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
        let wanted = libc::c_int::try_from(capacity).map_err(|_| io::ErrorKind::InvalidInput)?;
        // EPERM if the pipes of the user take too much (fs.pipe-user-pages-soft).
        let _ = fcntl(&input, FcntlArg::F_SETPIPE_SZ(wanted));
        let capacity = fcntl(&input, FcntlArg::F_GETPIPE_SZ)?;
        let pages = u64::try_from(capacity).unwrap_or(0) / page_size();
        Ok(Self { output, input, pages, len: 0 })
    }

    /// Returns whether the range of a file fits. Each page that the range touches takes a place.
    pub fn fits(&self, offset: u64, len: usize) -> bool {
        let page = page_size();
        (offset % page + len as u64).div_ceil(page) <= self.pages
    }

    /// Returns the number of bytes that the pipe holds.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the pipe holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The end that the ring fills.
    pub(crate) fn input(&self) -> BorrowedFd<'_> {
        self.input.as_fd()
    }

    /// Puts up to `limit` bytes of a file at `offset` into the pipe, and returns how many. They are not recorded with
    /// [`PagePipe::filled`]. Blocks while pages are read from the disk, but not if the pipe is full.
    ///
    /// # Errors
    /// Returns the errors of splice(2), for example `EAGAIN` if the pipe is full.
    pub fn fill(&self, file: impl AsFd, offset: u64, limit: usize) -> io::Result<usize> {
        let (from, to) = (file.as_fd().as_raw_fd(), self.input.as_raw_fd());
        let mut offset = i64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        let (at, none, flags) = (&raw mut offset, std::ptr::null_mut(), libc::SPLICE_F_NONBLOCK);
        // SAFETY: both descriptors and the offset exist during the call, and the null pointer stands for no offset.
        let moved = unsafe { libc::splice(from, at, to, none, limit, flags) };
        usize::try_from(moved).map_err(|_| io::Error::last_os_error())
    }

    /// Records that `bytes` bytes have been put into the pipe.
    pub fn filled(&mut self, bytes: usize) {
        self.len += bytes;
    }

    /// Moves up to `limit` bytes to a stream socket, and returns how many. Blocks if the buffer of the socket has less
    /// room and the socket blocks.
    ///
    /// # Errors
    /// Returns the errors of splice(2), for example `EPIPE`, and `WriteZero` if it moves nothing.
    pub fn send(&mut self, socket: impl AsFd, limit: usize) -> io::Result<usize> {
        let (from, to) = (self.output.as_raw_fd(), socket.as_fd().as_raw_fd());
        let (none, limit) = (std::ptr::null_mut(), limit.min(self.len));
        // SAFETY: both descriptors are open during the call, and the null pointers stand for no offset.
        let moved = unsafe { libc::splice(from, none, to, none, limit, 0) };
        match usize::try_from(moved).map_err(|_| io::Error::last_os_error())? {
            // The caller would repeat it for ever.
            0 if limit > 0 => Err(io::ErrorKind::WriteZero.into()),
            moved => {
                self.len -= moved;
                Ok(moved)
            }
        }
    }

    /// Empties the pipe.
    ///
    /// # Errors
    /// Returns the errors of read(2): the pipe must not be used again then.
    pub fn drain(&mut self) -> io::Result<()> {
        let mut bytes = [0; 4096];
        while self.len > 0 {
            match read(&self.output, &mut bytes)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => self.len = self.len.saturating_sub(count),
            }
        }
        Ok(())
    }
}

/// Returns the size of a page in bytes. The C library knows it without a system call.
pub(crate) fn page_size() -> u64 {
    sysconf(SysconfVar::PAGE_SIZE).ok().flatten().map_or(4096, i64::cast_unsigned)
}

/// Returns how many bytes of the buffer of a unix socket are in use, with the overhead of the kernel (SIOCOUTQ).
///
/// # Errors
/// Returns the errors of ioctl(2).
pub fn unread_by_peer(socket: impl AsFd) -> io::Result<usize> {
    let mut bytes = 0;
    // SAFETY: the kernel stores one c_int in `bytes`.
    unsafe { raw::siocoutq(socket.as_fd().as_raw_fd(), &raw mut bytes)? };
    usize::try_from(bytes).map_err(|_| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_needs_a_place_for_each_page_that_it_touches() {
        let pipe = PagePipe::new(1 << 20).unwrap();
        let whole = usize::try_from(pipe.pages * page_size()).unwrap();
        assert!(whole >= 64 << 10, "{whole}");
        assert!(pipe.fits(2 * page_size(), whole) && !pipe.fits(2 * page_size(), whole + 1));
        assert!(!pipe.fits(512, whole) && pipe.fits(512, whole - 512));
    }
}
