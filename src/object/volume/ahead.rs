//! Which reads are sequential, and what was read ahead of them: a memory of a fixed size.
//!
//! The memory has extents by their places in objects, which never change. So a write needs not remove anything from it:
//! the map no longer refers to the old place.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use super::content::Content;
use super::stored::Stored;

/// The sequential reads that are followed at the same time.
const STREAMS: usize = 4;

/// The bytes that are read one after the other before the next ones are read ahead.
const MIN_SEQUENTIAL_BYTES: u64 = if cfg!(test) { 512 } else { 256 << 10 };

/// How far requests of one stream may overtake each other, in bytes.
const SLACK_BYTES: u64 = 1 << 20;

/// The bytes of the first step. Later ones are longer, because a store may need several times as long for eight reads of
/// 1 MiB as for one of 8 MiB: Ceph's radosgw reads the first 4 MiB of an object for each. For the same reason, a step reads
/// an object as a whole if most of it is in its range, and leaves it to the next one otherwise.
const STEP_BYTES: u64 = if cfg!(test) { 8 << 10 } else { 1 << 20 };

/// The length of the longest step, in first steps.
const MAX_STEPS: u64 = 8;

/// What the memory has of an extent.
#[derive(Debug, Clone)]
pub(super) enum Loaded {
    /// It is being read.
    Running,
    /// Its content.
    Ready(Content),
}

/// What is read at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Step {
    /// What this step and earlier ones read.
    pub(super) range: Range<u64>,
    /// The range, with that in which parts of its objects may be. What requests have read already is not in it.
    pub(super) surroundings: Range<u64>,
}

/// Reads that follow each other.
#[derive(Debug, Clone, Copy, Default)]
struct Stream {
    /// The end of the last one.
    end: u64,
    /// The length of all of them.
    length: u64,
    /// The end of what was read ahead.
    ahead: u64,
    /// When it was used last.
    tick: u64,
}

/// The streams, and what was read ahead.
pub(super) struct ReadAhead {
    /// The maximum of [`ReadAhead::bytes`]; 0: nothing is read ahead.
    max_bytes: u64,
    streams: [Stream; STREAMS],
    tick: u64,
    /// Whether a step is being looked up in the map. The next one needs to know what it reads.
    is_choosing: bool,
    extents: BTreeMap<Stored, Loaded>,
    /// The extents in the order in which they were added. Some are gone.
    order: VecDeque<Stored>,
    /// The bytes of the extents that are being read.
    running_bytes: u64,
    /// For each answer of the store that has a part here, by its address: the number of these parts.
    answers: BTreeMap<usize, usize>,
    /// The bytes of these answers. One stays in memory until none of its parts is needed.
    answer_bytes: u64,
}

impl ReadAhead {
    pub(super) fn new(max_bytes: usize) -> Self {
        Self {
            max_bytes: max_bytes as u64,
            streams: [Stream::default(); STREAMS],
            tick: 0,
            is_choosing: false,
            extents: BTreeMap::new(),
            order: VecDeque::new(),
            running_bytes: 0,
            answers: BTreeMap::new(),
            answer_bytes: 0,
        }
    }

    /// The memory in use, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.running_bytes + self.answer_bytes
    }

    /// Counts a read. Returns whether more is to be read ahead.
    pub(super) fn note(&mut self, offset: u64, length: u64) -> bool {
        if self.max_bytes == 0 {
            return false;
        }
        self.tick += 1;
        let near = |stream: &Stream| {
            stream.length > 0
                && offset <= stream.end + SLACK_BYTES
                && offset + length > stream.end.saturating_sub(SLACK_BYTES)
        };
        let found = self.streams.iter().position(|stream| stream.end == offset);
        let found = found.or_else(|| {
            // Requests that are in flight together arrive in any order.
            let followed = |stream: &Stream| stream.length >= MIN_SEQUENTIAL_BYTES && near(stream);
            self.streams.iter().position(followed)
        });
        let oldest = (0..STREAMS).min_by_key(|at| self.streams[*at].tick).unwrap_or(0);
        let stream = &mut self.streams[found.unwrap_or(oldest)];
        if found.is_none() {
            *stream = Stream { end: offset, length: 0, ahead: 0, tick: 0 };
        }
        // A range that is read again is no progress.
        let end = stream.end.max(offset + length);
        stream.length = stream.length.saturating_add(length.min(end - stream.end));
        stream.end = end;
        stream.tick = self.tick;
        stream.ahead = stream.ahead.max(stream.end);
        stream.wants(self.max_bytes)
    }

    /// Returns the next step, in a volume of this size. [`ReadAhead::begun`] ends its choice.
    pub(super) fn next(&mut self, size: u64) -> Option<Step> {
        if self.is_choosing {
            return None;
        }
        let max_bytes = self.max_bytes;
        let wanting = |stream: &&mut Stream| stream.wants(max_bytes) && stream.ahead < size;
        let newest = self.streams.iter_mut().filter(wanting).max_by_key(|stream| stream.tick)?;
        let begin = newest.ahead;
        let step = newest.step();
        newest.ahead = size.min(begin + step);
        self.is_choosing = true;
        let first = newest.end.max(begin.saturating_sub(step / 2));
        let last = size.min(newest.ahead + step / 2);
        Some(Step { range: begin..newest.ahead, surroundings: first..last })
    }

    /// Notes that all extents of the step were added.
    pub(super) fn begun(&mut self) {
        self.is_choosing = false;
    }

    /// Adds an extent that is about to be read. Returns false if it is there already, or if there is no room.
    pub(super) fn begin(&mut self, stored: Stored) -> bool {
        let length = u64::from(stored.data_length);
        while self.bytes() + length > self.max_bytes {
            let Some(oldest) = self.order.pop_front() else { break };
            match self.extents.get(&oldest) {
                Some(Loaded::Running) => {
                    self.order.push_front(oldest);
                    break;
                }
                Some(Loaded::Ready(_)) => self.remove(&oldest),
                None => {}
            }
        }
        if self.bytes() + length > self.max_bytes || self.extents.contains_key(&stored) {
            return false;
        }
        self.running_bytes += length;
        self.extents.insert(stored, Loaded::Running);
        // An extent that was used and is read again is there twice. The number of such entries is bounded here.
        if self.order.len() > 2 * self.extents.len() {
            let extents = &self.extents;
            self.order.retain(|stored| extents.contains_key(stored));
        }
        self.order.push_back(stored);
        true
    }

    /// Notes the content of an extent.
    pub(super) fn end(&mut self, stored: Stored, content: Content) {
        let Some(loaded @ Loaded::Running) = self.extents.get_mut(&stored) else { return };
        let answer = content.answer();
        let parts = self.answers.entry(address(answer)).or_insert_with(|| {
            self.answer_bytes += answer.len() as u64;
            0
        });
        *parts += 1;
        self.running_bytes -= u64::from(stored.data_length);
        *loaded = Loaded::Ready(content);
    }

    pub(super) fn remove(&mut self, stored: &Stored) {
        match self.extents.remove(stored) {
            None => {}
            Some(Loaded::Running) => self.running_bytes -= u64::from(stored.data_length),
            Some(Loaded::Ready(content)) => self.release(content.answer()),
        }
    }

    fn release(&mut self, answer: &Arc<Vec<u8>>) {
        let Some(parts) = self.answers.get_mut(&address(answer)) else { return };
        *parts -= 1;
        if *parts == 0 {
            self.answers.remove(&address(answer));
            self.answer_bytes -= answer.len() as u64;
        }
    }

    /// Whether it has the extent, or it is being read.
    pub(super) fn has(&self, stored: &Stored) -> bool {
        self.extents.contains_key(stored)
    }

    /// Returns an extent, and removes it if it `is_used`.
    pub(super) fn get(&mut self, stored: &Stored, is_used: bool) -> Option<Loaded> {
        let found = self.extents.get(stored)?.clone();
        if is_used && matches!(found, Loaded::Ready(_)) {
            self.remove(stored);
        }
        Some(found)
    }
}

/// The address of an answer that is in memory, which no other one has.
fn address(answer: &Arc<Vec<u8>>) -> usize {
    Arc::as_ptr(answer).addr()
}

impl Stream {
    /// Whether another step is to be read ahead: up to four times of what was read already, and three quarters of the
    /// memory.
    fn wants(&self, max_bytes: u64) -> bool {
        let window = self.length.saturating_mul(4).min(max_bytes / 4 * 3);
        self.length >= MIN_SEQUENTIAL_BYTES && self.ahead + self.step() <= self.end + window
    }

    /// The bytes of the next step.
    fn step(&self) -> u64 {
        (self.length / STEP_BYTES).clamp(1, MAX_STEPS) * STEP_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Entry;
    use crate::name::Position;

    const LENGTH: u32 = 100;

    fn stored(number: u32) -> Stored {
        let entry = Entry {
            offset: 0,
            length: LENGTH,
            ancestor: 0,
            object: Position { epoch: 1, slot: 1 },
            extent_at: number * LENGTH,
            extent_length: LENGTH,
            stored_at: number * LENGTH,
            saved: 0,
            checksum: 0,
            skip: 0,
        };
        Stored::of(&entry, LENGTH)
    }

    #[test]
    fn an_answer_takes_memory_until_its_last_part_is_gone() {
        let mut ahead = ReadAhead::new(1000);
        let extents = [0, 1, 2].map(stored);
        for extent in extents {
            assert!(ahead.begin(extent));
        }
        assert_eq!(ahead.bytes(), 300);
        let answer = Arc::new(vec![7; 500]);
        for extent in [extents[0], extents[1]] {
            ahead.end(extent, Content::part(&answer, 100..200, 500));
        }
        assert_eq!(ahead.bytes(), 600, "the answer, and one that is being read");
        ahead.remove(&extents[2]);
        assert!(matches!(ahead.get(&extents[0], true), Some(Loaded::Ready(_))));
        assert_eq!(ahead.bytes(), 500);
        // What was read for something that was removed meanwhile is not kept.
        ahead.end(extents[2], Content::part(&Arc::new(vec![7; 500]), 0..100, 500));
        assert_eq!(ahead.bytes(), 500);
        // The oldest ones make room, until their answer is gone.
        for number in 10..15 {
            assert!(ahead.begin(stored(number)));
        }
        assert!(ahead.has(&extents[1]));
        assert!(ahead.begin(stored(15)));
        assert!(!ahead.has(&extents[1]));
        assert_eq!(ahead.bytes(), 600);
    }
}
