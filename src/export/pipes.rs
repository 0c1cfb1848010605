//! The pipes of a connection, for the pages of long reads.

use cleat_sys::page_pipe::PagePipe;

/// The length of a read from which on it may go through a pipe, in bytes. Less is copied faster.
pub(super) const PIPED_FROM: usize = 32 << 10;

/// The capacity of a short pipe in bytes, which is that of a new pipe.
const SHORT: usize = 64 << 10;

/// The capacity of a long pipe in bytes. It is the most that the kernel grants to a user without privileges
/// (fs.pipe-max-size).
const LONG: usize = 1 << 20;

/// The maximum number of short pipes, and of long ones. The kernel grants 64 long pipes to a user
/// (fs.pipe-user-pages-soft). Each pipe takes two descriptors: 16 connections fit the usual limit of 1024.
const SHORT_PIPES: usize = 20;
const LONG_PIPES: usize = 8;

/// Pipes that are not in use, all empty. They are made when they are needed first.
#[derive(Debug)]
pub(super) struct Pipes {
    short: Kind,
    long: Kind,
}

/// Pipes of one capacity.
#[derive(Debug)]
struct Kind {
    capacity: usize,
    unused: Vec<PagePipe>,
    /// The number of pipes that may still be made.
    unmade: usize,
}

impl Pipes {
    /// Makes no pipe yet.
    pub(super) fn new() -> Self {
        let kind = |capacity, unmade| Kind { capacity, unused: Vec::new(), unmade };
        Self { short: kind(SHORT, SHORT_PIPES), long: kind(LONG, LONG_PIPES) }
    }

    /// Returns a pipe for a buffer of `capacity` bytes; `None` if all are in use. The read needs one copy more then.
    pub(super) fn take(&mut self, capacity: usize) -> Option<PagePipe> {
        let kind = self.kind(capacity);
        if let Some(pipe) = kind.unused.pop() {
            return Some(pipe);
        }
        kind.unmade = kind.unmade.checked_sub(1)?;
        PagePipe::new(kind.capacity).ok()
    }

    /// Takes the pipe of a buffer of `capacity` bytes back.
    pub(super) fn give(&mut self, mut pipe: PagePipe, capacity: usize) {
        let kind = self.kind(capacity);
        match pipe.drain() {
            Ok(()) => kind.unused.push(pipe),
            Err(_) => kind.unmade += 1,
        }
    }

    /// Closes the pipes that are not in use.
    pub(super) fn trim(&mut self) {
        for kind in [&mut self.short, &mut self.long] {
            kind.unmade += kind.unused.drain(..).count();
        }
    }

    fn kind(&mut self, capacity: usize) -> &mut Kind {
        if capacity <= SHORT { &mut self.short } else { &mut self.long }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pipes_are_made_as_needed_and_come_back() {
        let mut pipes = Pipes::new();
        let long: Vec<_> = std::iter::from_fn(|| pipes.take(SHORT + 1)).collect();
        assert_eq!(long.len(), LONG_PIPES);
        assert!(pipes.take(SHORT).unwrap().fits(0, SHORT));
        for pipe in long {
            pipes.give(pipe, SHORT + 1);
        }
        assert_eq!(pipes.long.unused.len(), LONG_PIPES);
        pipes.trim();
        assert_eq!((pipes.long.unused.len(), pipes.long.unmade), (0, LONG_PIPES));
    }
}
