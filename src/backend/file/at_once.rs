//! Short writes, and long reads of the page cache, on the thread of the connection.
//!
//! Some file systems cannot say whether a buffered write would block, so io_uring gives each of them to a thread of the
//! kernel. For a short write to the page cache, the two wake-ups take several times as long as the write. But a write may
//! block, for example because too many pages are dirty, and the other requests of its connection wait then. So after a slow
//! write the next ones go through the ring. So do those of a client that sends many at the same time: threads of the kernel
//! carry them out on other processors.
//!
//! io_uring gives every read into a pipe to a thread of the kernel, too, because splice(2) cannot say whether it would block. It
//! blocks only where the page cache lacks pages, or has some that are still being read; what the page cache has is asked before.

use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleat_core::clock::{Clock, SystemClock};
use cleat_core::request::{Op, Request};
use cleat_sys::page_cache::{has_pages, is_cached};
use cleat_sys::page_pipe::PagePipe;
use nix::sys::uio::pwrite;

use super::super::index;
use super::file_system::{EXT4, OVERLAYFS, TMPFS};

/// The maximum length of a write at once, in bytes.
const MAX_LENGTH: u64 = 64 << 10;

/// An operation that takes as long as this is slow. The copy of the longest write takes 20 µs, and to find the pages of the
/// longest read as much.
const SLOW: Duration = Duration::from_micros(500);

/// The operations that go through the ring after a slow one.
const PAUSE: u32 = 256;

/// A write that begins so soon after the end of the last one was there already: no client answers as fast.
const GAP: Duration = Duration::from_micros(3);

/// The writes at once that were there already, one after the other.
const MAX_RUN: u32 = 3;

/// File systems without RWF_NOWAIT for buffered writes. overlayfs does not pass it on to the file system below.
const FILE_SYSTEMS: [i64; 3] = [EXT4, TMPFS, OVERLAYFS];

/// Returns whether short writes to a file are made at once. `file_system` is the magic number of its file system, which is local.
pub(super) fn pays(file_system: i64, direct: bool) -> bool {
    FILE_SYSTEMS.contains(&file_system) && !direct
}

/// The writes at once of one connection.
pub(super) struct WritesAtOnce {
    file: Arc<File>,
    pause: Pause,
    /// The end of the last write, and the writes before the next one that were there already.
    ended: Option<Instant>,
    run: u32,
}

impl WritesAtOnce {
    pub(super) fn new(file: Arc<File>) -> Self {
        Self { file, pause: Pause::default(), ended: None, run: 0 }
    }

    /// Writes `bytes` if the request is a short write, if few others wait, and if the last one was not slow. Returns the
    /// number of bytes that were written, or the negative errno, as the ring does.
    pub(super) fn write(&mut self, request: &Request, bytes: &[u8]) -> Option<i32> {
        if request.op != Op::Write || request.length > MAX_LENGTH {
            return None;
        }
        if self.pause.applies() {
            return None;
        }
        let began = SystemClock.now();
        if !self.follows(began) {
            return None;
        }
        let written = pwrite(&self.file, bytes, i64::try_from(request.offset).ok()?);
        self.took(began, SystemClock.now());
        Some(match written {
            Ok(count) => i32::try_from(count).ok()?,
            Err(errno) => -(errno as i32),
        })
    }

    /// Counts a write that is about to begin. Returns false if too many were there already.
    fn follows(&mut self, began: Instant) -> bool {
        let was_there =
            self.ended.is_some_and(|ended| began.saturating_duration_since(ended) < GAP);
        self.run = if was_there { self.run + 1 } else { 0 };
        self.run <= MAX_RUN
    }

    fn took(&mut self, began: Instant, ended: Instant) {
        self.ended = Some(ended);
        self.pause.took(began, ended);
    }
}

/// The reads into pipes at once of one connection.
pub(super) struct PagesAtOnce {
    file: Arc<File>,
    /// The file is on tmpfs, whose pages never wait for a disk.
    in_memory: bool,
    pause: Pause,
}

impl PagesAtOnce {
    pub(super) fn new(file: Arc<File>, in_memory: bool) -> Self {
        Self { file, in_memory, pause: Pause::default() }
    }

    /// Puts the range of a read into `pipe`, if the page cache has it, and if the last one was not slow. Returns the number of
    /// bytes, or the negative errno, as the ring does.
    pub(super) fn splice(&mut self, request: &Request, pipe: &PagePipe) -> Option<i32> {
        if self.pause.applies() || !self.is_cached(request) {
            return None;
        }
        let began = SystemClock.now();
        let moved = pipe.fill(&self.file, request.offset, index(request.length));
        self.pause.took(began, SystemClock.now());
        Some(match moved {
            Ok(moved) => i32::try_from(moved).ok()?,
            Err(error) => -error.raw_os_error().unwrap_or(libc::EIO),
        })
    }

    fn is_cached(&self, request: &Request) -> bool {
        let Request { offset, length, .. } = *request;
        if self.in_memory {
            has_pages(&self.file, offset, length)
        } else {
            is_cached(&self.file, offset, length)
        }
    }
}

/// The number of the next operations that go through the ring, because one was slow.
#[derive(Default)]
struct Pause(u32);

impl Pause {
    /// Counts an operation. Returns whether it goes through the ring.
    fn applies(&mut self) -> bool {
        let applies = self.0 > 0;
        self.0 = self.0.saturating_sub(1);
        applies
    }

    /// Begins a pause if an operation was slow.
    fn took(&mut self, began: Instant, ended: Instant) {
        if ended.saturating_duration_since(began) >= SLOW {
            self.0 = PAUSE;
        }
    }
}

#[cfg(test)]
mod tests {
    use cleat_core::request::Flags;

    use super::*;

    #[test]
    fn only_short_writes_are_made_at_once_and_none_for_a_time_after_a_slow_one() {
        let mut at_once = WritesAtOnce::new(Arc::new(tempfile::tempfile().unwrap()));
        let request = |op, length| Request { op, flags: Flags::default(), offset: 0, length };
        let (bytes, long) = (vec![1; 65536], vec![1; 65537]);
        assert_eq!(at_once.write(&request(Op::Read, 65536), &bytes), None);
        assert_eq!(at_once.write(&request(Op::Write, 65537), &long), None);
        let write = request(Op::Write, 65536);
        assert_eq!(at_once.write(&write, &bytes), Some(65536));
        let now = SystemClock.now();
        at_once.took(now, now + SLOW);
        for _ in 0..PAUSE {
            assert_eq!(at_once.write(&write, &bytes), None);
        }
        at_once.ended = None;
        assert_eq!(at_once.write(&write, &bytes), Some(65536));
    }

    #[test]
    fn no_read_is_made_at_once_for_a_time_after_a_slow_one() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        pwrite(&file, &vec![1; 65536], 0).unwrap();
        let is_known = is_cached(&file, 0, 65536);
        let (pipe, mut at_once) =
            (PagePipe::new(1 << 20).unwrap(), PagesAtOnce::new(Arc::new(file), false));
        let read =
            |offset| Request { op: Op::Read, flags: Flags::default(), offset, length: 65536 };
        let result = is_known.then_some(65536);
        assert_eq!(at_once.splice(&read(0), &pipe), result);
        assert_eq!(at_once.splice(&read(65536), &pipe), None, "the page cache has nothing of it");
        let now = SystemClock.now();
        at_once.pause.took(now, now + SLOW);
        for _ in 0..PAUSE {
            assert_eq!(at_once.splice(&read(0), &pipe), None);
        }
        assert_eq!(at_once.splice(&read(0), &pipe), result);
    }

    #[test]
    fn writes_that_wait_for_others_are_made_at_once_only_if_they_are_few() {
        let mut at_once = WritesAtOnce::new(Arc::new(tempfile::tempfile().unwrap()));
        let mut now = SystemClock.now();
        for _ in 0..2 {
            now += GAP;
            for _ in 0..=MAX_RUN {
                assert!(at_once.follows(now));
                at_once.took(now, now);
            }
            assert!(!at_once.follows(now));
            assert!(!at_once.follows(now + GAP / 2));
        }
    }
}
