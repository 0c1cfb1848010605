//! Pages of a file on their way to a socket, in a pipe.
//!
//! splice(2) puts references to pages of the page cache into a pipe, and from there into the buffer of a socket. No
//! byte is copied until the peer receives. So the peer gets what a page contains then, also what was written to it
//! meanwhile.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::unistd::{pipe2, read};

use crate::buffer::ALIGNMENT;

mod raw {
    // SIOCOUTQ (asm-generic/ioctls.h) is TIOCOUTQ.
    nix::ioctl_read_bad!(siocoutq, libc::TIOCOUTQ, libc::c_int);
}

/// The capacity of a pipe in bytes. It is the most that the kernel grants to a user without privileges
/// (fs.pipe-max-size).
const CAPACITY: usize = 1 << 20;

/// A pipe that holds references to pages. Neither end blocks.
#[derive(Debug)]
pub struct PagePipe {
    output: OwnedFd,
    input: OwnedFd,
    /// The number of pages that fit.
    pages: usize,
    len: usize,
}

impl PagePipe {
    /// Makes an empty pipe for up to 1 MiB, or for less if the system does not allow it.
    ///
    /// # Errors
    /// Returns the errors of pipe2(2), for example `EMFILE`.
    pub fn new() -> io::Result<Self> {
        let (output, input) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
        let wanted = libc::c_int::try_from(CAPACITY).expect("1 MiB fits an int");
        // EPERM if the pipes of the user take too much (fs.pipe-user-pages-soft).
        let _ = fcntl(&input, FcntlArg::F_SETPIPE_SZ(wanted));
        let capacity = fcntl(&input, FcntlArg::F_GETPIPE_SZ)?;
        let pages = usize::try_from(capacity).unwrap_or(0) / ALIGNMENT;
        Ok(Self { output, input, pages, len: 0 })
    }

    /// Returns whether the range of a file fits. Each page that the range touches takes a place.
    pub fn fits(&self, offset: u64, len: usize) -> bool {
        let begins = offset % ALIGNMENT as u64;
        (begins + len as u64).div_ceil(ALIGNMENT as u64) <= self.pages as u64
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

    /// Records that `bytes` bytes have been put into the pipe.
    pub fn filled(&mut self, bytes: usize) {
        self.len += bytes;
    }

    /// Moves up to `limit` bytes to a stream socket, and returns how many. Blocks if the buffer of the socket has less
    /// room and the socket blocks.
    ///
    /// # Errors
    /// Returns the errors of splice(2), for example `EPIPE`.
    pub fn send(&mut self, socket: impl AsFd, limit: usize) -> io::Result<usize> {
        let (from, to) = (self.output.as_raw_fd(), socket.as_fd().as_raw_fd());
        let (none, limit) = (std::ptr::null_mut(), limit.min(self.len));
        // SAFETY: both descriptors are open during the call, and the null pointers stand for no offset.
        let moved = unsafe { libc::splice(from, none, to, none, limit, 0) };
        let moved = usize::try_from(moved).map_err(|_| io::Error::last_os_error())?;
        self.len -= moved;
        Ok(moved)
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
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::buffer::Buffer;
    use crate::ring::{Ring, Token};

    /// Puts a range of `file` into the pipe of a buffer.
    fn fill(ring: &mut Ring, file: &std::fs::File, offset: u64, len: usize) -> (i32, Buffer) {
        let slot = ring.register(file.as_fd()).unwrap();
        let mut buffer = Buffer::zeroed(len);
        buffer.attach_pipe(PagePipe::new().unwrap());
        ring.splice(slot, buffer, 0, offset, Token(7)).unwrap();
        ring.submit_and_wait().unwrap();
        let completion = ring.next().unwrap();
        (completion.result, completion.buffer.unwrap())
    }

    #[test]
    fn pages_go_from_a_file_to_a_socket() {
        let content: Vec<u8> = (0..1_u32 << 18).flat_map(u32::to_le_bytes).collect();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&content).unwrap();
        let mut ring = Ring::new(8).unwrap();
        let (offset, len) = (4096 + 512, 300_000);
        let (result, mut buffer) = fill(&mut ring, &file, offset, len);
        assert_eq!(usize::try_from(result), Ok(len));
        let pipe = buffer.pipe_mut().unwrap();
        pipe.filled(len);
        let (socket, mut peer) = UnixStream::pair().unwrap();
        let mut received = vec![0; len];
        assert_eq!(unread_by_peer(&socket).unwrap(), 0);
        for part in received.chunks_mut(60_000) {
            assert_eq!(pipe.send(&socket, part.len()).unwrap(), part.len());
            assert!(unread_by_peer(&socket).unwrap() >= part.len());
            peer.read_exact(part).unwrap();
        }
        assert!(pipe.is_empty());
        let at = usize::try_from(offset).unwrap();
        assert!(received == content[at..at + len]);
    }

    #[test]
    fn a_pipe_is_empty_after_a_drain() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[1; 200_000]).unwrap();
        let mut ring = Ring::new(8).unwrap();
        // It ends with the file.
        let (result, mut buffer) = fill(&mut ring, &file, 8192, 300_000);
        assert_eq!(result, 200_000 - 8192);
        let pipe = buffer.pipe_mut().unwrap();
        pipe.filled(200_000 - 8192);
        pipe.drain().unwrap();
        assert!(pipe.is_empty());
        let nothing = read(&pipe.output, &mut [0; 1]);
        assert_eq!(nothing, Err(nix::Error::EAGAIN));
    }

    #[test]
    fn a_range_needs_a_place_for_each_page_that_it_touches() {
        let pipe = PagePipe::new().unwrap();
        let whole = pipe.pages * ALIGNMENT;
        assert!(whole >= 16 * ALIGNMENT, "{whole}");
        assert!(pipe.fits(8192, whole) && !pipe.fits(8192, whole + 1));
        assert!(!pipe.fits(512, whole) && pipe.fits(512, whole - 512));
    }
}
