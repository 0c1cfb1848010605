//! Buffers for payloads, kept for the next request.
//!
//! Invariant: used and kept buffers together take at most `budget` bytes, or one used buffer is alone. An
//! idle connection keeps at most [`IDLE_KEEP`] bytes.
//!
//! Buffers for long reads of a volume that fills pipes have one, as far as there are pipes.

use cleat_sys::buffer::{Buffer, HEADROOM};

use super::pipes::{PIPED_FROM, Pipes};

/// Smallest capacity handed out; the classes double from here.
const SMALLEST: usize = 4096;
/// Capacities 4 KiB to 32 MiB.
const CLASSES: usize = 14;

/// The longest payload that the pool has buffers for, in bytes.
pub(super) const LARGEST: usize = SMALLEST << (CLASSES - 1);

/// Bytes that an idle connection keeps.
const IDLE_KEEP: usize = 256 << 10;

/// The pool of one connection. See the file's comment.
#[derive(Debug)]
pub(super) struct BufferPool {
    free: [Vec<Buffer>; CLASSES],
    /// `None` if the volume does not fill pipes.
    pipes: Option<Pipes>,
    budget: usize,
    used: usize,
    kept: usize,
    taken_count: u64,
    /// `taken_count` when the idle timer was set; `None` while it is not set.
    watched: Option<u64>,
}

impl BufferPool {
    /// A pool whose buffers, used and kept, take at most `budget` bytes; but one is always given,
    /// so that a request of any size can be served alone.
    pub(super) fn new(budget: usize) -> Self {
        Self {
            free: Default::default(),
            pipes: None,
            budget,
            used: 0,
            kept: 0,
            taken_count: 0,
            watched: None,
        }
    }

    /// Gives buffers pipes from now on.
    pub(super) fn allow_pipes(&mut self) {
        self.pipes = Some(Pipes::new());
    }

    /// As [`BufferPool::take`], for the payload of a read.
    pub(super) fn take_for_read(&mut self, len: usize) -> Option<Buffer> {
        let mut buffer = self.take(len)?;
        if len >= PIPED_FROM
            && let Some(pipe) = self.pipes.as_mut().and_then(|pipes| pipes.take(buffer.capacity()))
        {
            buffer.attach_pipe(pipe);
        }
        Some(buffer)
    }

    /// A buffer with a payload of `len` bytes, at most [`LARGEST`], of any content; `None` while
    /// the budget is used up.
    pub(super) fn take(&mut self, len: usize) -> Option<Buffer> {
        let class = class(len);
        let mut buffer = match self.free[class].pop() {
            Some(buffer) => {
                self.kept -= footprint(&buffer);
                buffer
            }
            None => {
                if !self.has_room(len) {
                    return None;
                }
                self.make_room((SMALLEST << class) + HEADROOM);
                Buffer::zeroed(SMALLEST << class)
            }
        };
        self.used += footprint(&buffer);
        self.taken_count += 1;
        buffer.set_len(len);
        Some(buffer)
    }

    /// Whether [`BufferPool::take`] would give a buffer of `len` bytes now.
    pub(super) fn has_room(&self, len: usize) -> bool {
        let class = class(len);
        let bytes = (SMALLEST << class) + HEADROOM;
        self.used == 0 || self.used + bytes <= self.budget || !self.free[class].is_empty()
    }

    /// Takes a buffer back.
    pub(super) fn give(&mut self, mut buffer: Buffer) {
        self.used -= footprint(&buffer);
        if let (Some(pipe), Some(pipes)) = (buffer.take_pipe(), &mut self.pipes) {
            pipes.give(pipe, buffer.capacity());
        }
        buffer.clear_header();
        let class = class(buffer.capacity());
        let fits = self.used + self.kept + footprint(&buffer) <= self.budget;
        if fits && SMALLEST << class == buffer.capacity() {
            self.kept += footprint(&buffer);
            self.free[class].push(buffer);
        }
    }

    /// Takes several buffers back.
    pub(super) fn give_all(&mut self, buffers: impl IntoIterator<Item = Buffer>) {
        buffers.into_iter().for_each(|buffer| self.give(buffer));
    }

    /// Whether more than [`IDLE_KEEP`] bytes are kept and no timer is set: the caller should set one, and
    /// call [`BufferPool::watch_idle`], then [`BufferPool::trim_if_idle`] when it expires.
    pub(super) fn wants_idle_timer(&self) -> bool {
        self.watched.is_none() && self.kept > IDLE_KEEP
    }

    /// Takes note that the idle timer is set.
    pub(super) fn watch_idle(&mut self) {
        self.watched = Some(self.taken_count);
    }

    /// Frees buffers if none was taken since the timer was set.
    pub(super) fn trim_if_idle(&mut self) {
        if self.watched.take() == Some(self.taken_count) {
            self.trim(IDLE_KEEP);
            self.pipes.iter_mut().for_each(Pipes::trim);
        }
    }

    /// Frees what is kept beyond `bytes`, the largest buffers first.
    fn trim(&mut self, bytes: usize) {
        for class in (0..CLASSES).rev() {
            while self.kept > bytes
                && let Some(buffer) = self.free[class].pop()
            {
                self.kept -= footprint(&buffer);
            }
            if self.free[class].is_empty() {
                self.free[class].shrink_to_fit();
            }
        }
    }

    fn make_room(&mut self, bytes: usize) {
        if self.used + self.kept + bytes > self.budget {
            self.trim(self.budget.saturating_sub(self.used + bytes));
        }
    }
}

fn footprint(buffer: &Buffer) -> usize {
    buffer.capacity() + HEADROOM
}

fn class(len: usize) -> usize {
    assert!(len <= LARGEST, "a payload of {len} bytes");
    let pages = len.div_ceil(SMALLEST).max(1);
    pages.next_power_of_two().trailing_zeros() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_come_back_and_are_used_again() {
        let mut pool = BufferPool::new(1 << 20);
        let buffer = pool.take(5000).unwrap();
        assert_eq!((buffer.len(), buffer.capacity()), (5000, 8192));
        let address = buffer.payload_ptr();
        pool.give(buffer);
        assert_eq!(pool.kept, 8192 + HEADROOM);
        assert_eq!(pool.take(6000).unwrap().payload_ptr(), address);
    }

    #[test]
    fn the_budget_holds_for_used_and_kept_together() {
        let mut pool = BufferPool::new(10 * (4096 + HEADROOM));
        let mut used: Vec<_> = std::iter::from_fn(|| pool.take(4096)).collect();
        assert_eq!(used.len(), 10);
        used.drain(..).for_each(|buffer| pool.give(buffer));
        assert_eq!(pool.kept, 10 * (4096 + HEADROOM));
        let large = pool.take(32768).unwrap();
        assert!(pool.used + pool.kept <= pool.budget, "kept buffers made room");
        pool.give(large);
        pool.trim(0);
        assert_eq!((pool.used, pool.kept), (0, 0));
    }

    #[test]
    fn an_idle_pool_is_trimmed_and_a_busy_one_is_not() {
        let mut pool = BufferPool::new(4 << 20);
        let buffers: Vec<_> = (0..2).map(|_| pool.take(1 << 20).unwrap()).collect();
        assert!(!pool.wants_idle_timer());
        pool.give_all(buffers);
        assert!(pool.wants_idle_timer());
        pool.watch_idle();
        assert!(!pool.wants_idle_timer());
        let buffer = pool.take(1 << 20);
        pool.give_all(buffer);
        pool.trim_if_idle();
        assert!(pool.kept > IDLE_KEEP && pool.wants_idle_timer());
        pool.watch_idle();
        pool.trim_if_idle();
        assert!(pool.kept <= IDLE_KEEP);
    }

    #[test]
    fn one_request_of_any_size_is_always_admitted() {
        let mut pool = BufferPool::new(64 << 10);
        let small = pool.take(1).unwrap();
        assert!(pool.take(LARGEST).is_none());
        pool.give(small);
        let alone = pool.take(LARGEST).unwrap();
        assert!(pool.take(1).is_none());
        pool.give(alone);
        assert_eq!(pool.kept, 0, "too large to be kept");
        assert!(pool.take(1).is_some());
    }
}
