//! The end of the log that the map does not contain yet: the open batch, and the slots that are not applied.
//!
//! Reads find the newest data here first. The tail is bounded; writers wait while it is full.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use crate::codec::{Extent, MAX_EXTENT_BYTES, Record, Source};
use crate::name::Position;

/// The data of an open batch from which on it probably becomes a full object, and the memory for its data then: that of an
/// object with the default length, and of the write that fills it.
const LARGE_BYTES: usize = 512 << 10;
const FULL_BYTES: usize = 9 << 20;

/// How far the put of a slot is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sending {
    Waiting,
    Sent,
    Durable,
}

/// A slot whose content is fixed.
pub(super) struct Closed {
    pub(super) records: Arc<[Record]>,
    /// The data of the records.
    pub(super) data: Arc<Vec<u8>>,
    pub(super) sending: Sending,
    /// A flush waits for it.
    pub(super) for_flush: bool,
    /// The length of the object's header, once the object was encoded.
    pub(super) header_bytes: u32,
}

/// What the tail has for a range of the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Covered {
    end: u64,
    slot: u64,
    /// The place in the data of the slot; `None` reads as zeroes.
    at: Option<usize>,
}

/// The tail of the log. Slots have the numbers of their names.
pub(super) struct Tail {
    records: Vec<Record>,
    data: Vec<u8>,
    pub(super) slots: VecDeque<Closed>,
    /// The number of the first slot in `slots`: the next one to be applied to the map.
    pub(super) first: u64,
    /// The slots below are confirmed.
    pub(super) confirmed: u64,
    /// A flush waits for the open batch.
    pub(super) flush_wanted: bool,
    ranges: BTreeMap<u64, Covered>,
    bytes: usize,
}

impl Tail {
    /// Makes an empty tail whose first slot has the number `first`.
    pub(super) fn new(first: u64) -> Self {
        Self {
            records: Vec::new(),
            data: Vec::new(),
            slots: VecDeque::new(),
            first,
            confirmed: first,
            flush_wanted: false,
            ranges: BTreeMap::new(),
            bytes: 0,
        }
    }

    /// The number of the slot that the open batch will have.
    pub(super) fn next(&self) -> u64 {
        self.first + self.slots.len() as u64
    }

    /// The data in the tail in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn open_records(&self) -> usize {
        self.records.len()
    }

    pub(super) fn open_bytes(&self) -> usize {
        self.data.len()
    }

    /// Appends a write of at most `MAX_EXTENT_BYTES`.
    pub(super) fn write(&mut self, extent: &Extent, data: &[u8]) {
        debug_assert!(data.len() <= MAX_EXTENT_BYTES as usize);
        let at = self.data.len();
        self.cover(extent.offset..extent.offset + data.len() as u64, Some(at));
        self.append(Record::Write(*extent), data);
    }

    /// Appends a record that makes a range read as zeroes.
    pub(super) fn zero(&mut self, offset: u64, length: u64, is_trim: bool) {
        self.cover(offset..offset + length, None);
        self.append(
            match is_trim {
                true => Record::Trim { offset, length },
                false => Record::WriteZeroes { offset, length },
            },
            &[],
        );
    }

    /// Appends a relocation. Reads find the data at the old place until the record is applied.
    pub(super) fn relocate(&mut self, offset: u64, data: &[u8], from: Source) {
        self.append(Record::Move(Extent::of(offset, data), from), data);
    }

    /// Appends a change of the volume's size.
    pub(super) fn resize(&mut self, size: u64) {
        self.append(Record::Resize(size), &[]);
    }

    /// Appends a record without data.
    pub(super) fn append_base(&mut self, base: Position) {
        self.append(Record::Base(base), &[]);
    }

    /// Appends a record about a snapshot. Returns the number of its slot.
    pub(super) fn append_snapshot(&mut self, record: Record) -> u64 {
        self.append(record, &[]);
        self.next()
    }

    /// Closes the open batch: it is the next slot.
    pub(super) fn close(&mut self) {
        self.slots.push_back(Closed {
            records: std::mem::take(&mut self.records).into(),
            data: Arc::new(std::mem::take(&mut self.data)),
            sending: Sending::Waiting,
            for_flush: std::mem::take(&mut self.flush_wanted),
            header_bytes: 0,
        });
    }

    /// Returns a slot that was closed and not applied.
    pub(super) fn slot(&mut self, number: u64) -> Option<&mut Closed> {
        let at = usize::try_from(number.checked_sub(self.first)?).ok()?;
        self.slots.get_mut(at)
    }

    /// Counts the slots from `confirmed` on that are durable.
    pub(super) fn confirm(&mut self) {
        while self.slot(self.confirmed).is_some_and(|slot| slot.sending == Sending::Durable) {
            self.confirmed += 1;
        }
    }

    /// Removes the first slot, after the map has its records.
    pub(super) fn applied(&mut self) {
        let Some(slot) = self.slots.pop_front() else { return };
        for record in slot.records.iter() {
            let range = match record {
                Record::Write(extent) => extent.offset..extent.offset + u64::from(extent.length),
                Record::Trim { offset, length } | Record::WriteZeroes { offset, length } => {
                    *offset..offset + length
                }
                _ => continue,
            };
            self.uncover(range, self.first);
        }
        self.bytes -= slot.data.len();
        self.first += 1;
    }

    /// Copies what the tail has of the range from `offset` to `buffer`, and returns the rest, in order.
    pub(super) fn read(&self, offset: u64, buffer: &mut [u8]) -> Vec<Range<u64>> {
        let end = offset + buffer.len() as u64;
        let mut rest = Vec::new();
        let mut at = offset;
        for (begin, covered) in self.overlapping(offset..end) {
            let part = offset.max(begin)..end.min(covered.end);
            if part.start > at {
                rest.push(at..part.start);
            }
            at = part.end;
            let target = &mut buffer[index(part.start - offset)..index(part.end - offset)];
            match covered.at {
                Some(place) => {
                    let place = place + index(part.start - begin);
                    target.copy_from_slice(&self.data_of(covered.slot)[place..][..target.len()]);
                }
                None => target.fill(0),
            }
        }
        if at < end {
            rest.push(at..end);
        }
        rest
    }

    /// Splits a range by what the tail has: data, zeroes, or nothing.
    pub(super) fn cover_of(&self, range: Range<u64>) -> Vec<(Range<u64>, Option<bool>)> {
        let mut parts = Vec::new();
        let mut at = range.start;
        for (begin, covered) in self.overlapping(range.clone()) {
            let part = range.start.max(begin)..range.end.min(covered.end);
            if part.start > at {
                parts.push((at..part.start, None));
            }
            at = part.end;
            parts.push((part, Some(covered.at.is_some())));
        }
        if at < range.end {
            parts.push((at..range.end, None));
        }
        parts
    }

    /// Whether the tail has something for a part of the range.
    pub(super) fn covers(&self, range: &Range<u64>) -> bool {
        self.overlapping(range.clone()).next().is_some()
    }

    /// Whether no put of a slot is in progress or due.
    pub(super) fn is_quiet(&self) -> bool {
        !self.flush_wanted && self.slots.iter().all(|slot| slot.sending == Sending::Durable)
    }

    fn append(&mut self, record: Record, data: &[u8]) {
        self.records.push(record);
        let (length, needed) = (self.data.len(), self.data.len() + data.len());
        // A vector that doubles copies all of it, and may end with twice the memory that an object needs.
        if needed > self.data.capacity() && (LARGE_BYTES..FULL_BYTES).contains(&needed) {
            self.data.reserve_exact(FULL_BYTES - length);
        }
        self.data.extend_from_slice(data);
        self.bytes += data.len();
    }

    fn data_of(&self, slot: u64) -> &[u8] {
        match self.slots.get(index(slot - self.first)) {
            Some(closed) => &closed.data,
            None => &self.data,
        }
    }

    fn overlapping(&self, range: Range<u64>) -> impl Iterator<Item = (u64, Covered)> + '_ {
        let before = self.ranges.range(..range.start).next_back();
        let first = before.filter(|(_, covered)| covered.end > range.start);
        let all = first.into_iter().chain(self.ranges.range(range));
        all.map(|(begin, covered)| (*begin, *covered))
    }

    fn cover(&mut self, range: Range<u64>, at: Option<usize>) {
        let old: Vec<_> = self.overlapping(range.clone()).collect();
        for (begin, covered) in old {
            self.ranges.remove(&begin);
            self.keep(begin, covered, &range);
        }
        self.ranges.insert(range.start, Covered { end: range.end, slot: self.next(), at });
    }

    fn uncover(&mut self, range: Range<u64>, slot: u64) {
        let old = self.overlapping(range.clone()).filter(|(_, covered)| covered.slot == slot);
        for (begin, covered) in old.collect::<Vec<_>>() {
            self.ranges.remove(&begin);
            self.keep(begin, covered, &range);
        }
    }

    /// Keeps the parts of what was covered that are outside of `range`.
    fn keep(&mut self, begin: u64, covered: Covered, range: &Range<u64>) {
        if begin < range.start {
            self.ranges.insert(begin, Covered { end: range.start, ..covered });
        }
        if covered.end > range.end {
            let at = covered.at.map(|at| at + index(range.end - begin));
            self.ranges.insert(range.end, Covered { at, ..covered });
        }
    }
}

/// A position in a buffer. Buffers are much shorter than the address space.
fn index(position: u64) -> usize {
    usize::try_from(position).unwrap_or(usize::MAX)
}
