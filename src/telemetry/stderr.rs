//! stderr for logs, without waiting for who reads it: a pipe that nobody empties costs lines, which
//! are counted, and never time.

use std::io::{self, Write};
use std::os::fd::AsFd;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// What a pipe takes without waiting once it says that it can be written to (pipe(7), PIPE_BUF).
const PIECE: usize = 4096;

/// The process's stderr, shared with other processes: so it cannot be made non-blocking, but is
/// asked first. Where several write in the same moment the last may have to wait all the same, for
/// as long as the reader takes for a piece.
pub(super) struct Stderr;

/// A line, all of it or its first pieces.
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
            // Nobody reads it any more.
            Ok(0) | Err(_) => return super::drop_line(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn a_pipe_that_nobody_reads_costs_lines_and_no_time() {
        let (mut reader, writer) = io::pipe().unwrap();
        let before = super::super::dropped_lines();
        let line = [b'x'; 1000];
        for _ in 0..200 {
            write_to(&writer, &line);
        }
        // 64 KiB is what a pipe holds.
        let dropped = super::super::dropped_lines() - before;
        assert!(dropped >= 130, "{dropped}");
        let mut taken = vec![0; 65_536];
        let taken = reader.read(&mut taken).unwrap();
        assert!(taken >= 60_000 && taken % 1000 == 0, "{taken}");
        // It goes on where there is room again, with lines of any length.
        write_to(&writer, &[b'y'; 10_000]);
        drop(writer);
        let mut rest = Vec::new();
        reader.read_to_end(&mut rest).unwrap();
        assert_eq!(rest.iter().filter(|byte| **byte == b'y').count(), 10_000);
    }
}
