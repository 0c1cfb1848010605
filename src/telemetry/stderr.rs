//! Log output on stderr that does not wait for the reader. While a pipe is full, lines are dropped and
//! counted.

use std::io::{self, Write};
use std::os::fd::AsFd;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// The number of bytes that a pipe takes without blocking after poll(2) has reported it writable
/// (pipe(7), PIPE_BUF).
const PIECE: usize = 4096;

/// The process's stderr. Other processes share it, so it must not be made non-blocking; each write polls
/// it first. If several processes write at the same moment, the last one may still block until the reader
/// has taken one piece.
pub(super) struct Stderr;

/// Each call writes one line: all of it, or its first pieces when the reader is slow. It never fails.
impl Write for Stderr {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        write_to(&io::stderr(), line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn write_to(descriptor: &impl AsFd, line: &[u8]) {
    let mut rest = line;
    while !rest.is_empty() {
        let mut set = [PollFd::new(descriptor.as_fd(), PollFlags::POLLOUT)];
        let ready = match poll(&mut set, PollTimeout::ZERO) {
            Ok(_) => set[0].revents().is_some_and(|events| events.contains(PollFlags::POLLOUT)),
            Err(Errno::EINTR) => continue,
            Err(_) => false,
        };
        if !ready {
            return super::drop_line();
        }
        match nix::unistd::write(descriptor, &rest[..rest.len().min(PIECE)]) {
            Ok(written @ 1..) => rest = &rest[written..],
            Err(Errno::EINTR) => {}
            // The reader has closed its end.
            Ok(0) | Err(_) => return super::drop_line(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn writes_to_a_full_pipe_drop_lines_and_do_not_block() {
        let (mut reader, writer) = io::pipe().unwrap();
        let before = super::super::dropped_lines();
        let line = [b'x'; 1000];
        for _ in 0..200 {
            write_to(&writer, &line);
        }
        // A pipe holds 64 KiB.
        let dropped = super::super::dropped_lines() - before;
        assert!(dropped >= 130, "{dropped}");
        let mut taken = vec![0; 65_536];
        let taken = reader.read(&mut taken).unwrap();
        assert!(taken >= 60_000 && taken % 1000 == 0, "{taken}");
        // Once the pipe has room again, lines of any length are written.
        write_to(&writer, &[b'y'; 10_000]);
        drop(writer);
        let mut rest = Vec::new();
        reader.read_to_end(&mut rest).unwrap();
        assert_eq!(rest.iter().filter(|byte| **byte == b'y').count(), 10_000);
    }
}
