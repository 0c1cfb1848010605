//! One page of the extent map in memory: which range of the volume lies where.
//!
//! Entries are in the order of their ranges and do not overlap; what no entry covers reads as zeroes. Every
//! change reports the bytes of each log object that it makes superfluous, so that the accounting of live bytes
//! follows from the map alone.

use std::ops::Range;

use crate::codec::Entry;
use crate::name::Position;

/// A place in a log object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// The volume of the object: 0 is this one, 1 its parent, and so on.
    pub ancestor: u8,
    /// The log object.
    pub object: Position,
    /// The position in the object, header included, if all extents were stored as they are.
    pub at: u32,
}

/// Bytes of a log object that the map no longer refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Freed {
    /// The volume of the object.
    pub ancestor: u8,
    /// The log object.
    pub object: Position,
    /// Their number.
    pub bytes: u32,
}

/// A change of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Replacement {
    /// The entry is in place of what its range had before.
    Entry(Entry),
    /// The range reads as zeroes.
    Zeroes(Range<u32>),
}

/// The entries of a page.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Page {
    entries: Vec<Entry>,
    /// The changes since they were taken.
    replacements: Vec<Replacement>,
}

impl Page {
    /// Makes a page of entries that the codec has checked: in order and without overlaps.
    pub fn new(entries: Vec<Entry>) -> Self {
        debug_assert!(entries.is_sorted_by(|a, b| range(a).end <= b.offset));
        Self { entries, replacements: Vec::new() }
    }

    /// Returns the entries in the order of their ranges.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The memory of the entries in bytes, with the room for more.
    pub fn bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Entry>()
    }

    /// Takes the changes since the last call.
    pub fn take_replacements(&mut self) -> Vec<Replacement> {
        std::mem::take(&mut self.replacements)
    }

    /// Makes changes again that were taken from a page with the same entries.
    pub fn repeat(&mut self, replacements: &[Replacement]) {
        for replacement in replacements {
            match replacement {
                Replacement::Entry(entry) => self.write(*entry, |_| ()),
                Replacement::Zeroes(range) => self.zero(range.clone(), |_| ()),
            }
        }
        self.replacements = Vec::new();
    }

    /// Whether the range reads as zeroes.
    pub fn is_zero(&self, range: &Range<u32>) -> bool {
        self.overlapping(range).is_empty()
    }

    /// Puts `entry` in place of what its range had before.
    pub fn write(&mut self, entry: Entry, freed: impl FnMut(Freed)) {
        self.replace(range(&entry), Some(entry), freed);
    }

    /// Makes the range read as zeroes.
    pub fn zero(&mut self, range: Range<u32>, freed: impl FnMut(Freed)) {
        self.replace(range, None, freed);
    }

    /// Puts `entry`, a copy of the data at `from`, in place of those parts of its range that still lie at
    /// `from`. Returns the number of bytes that were moved; the others have been overwritten since the
    /// data was copied.
    pub fn relocate(&mut self, entry: Entry, from: Place, mut freed: impl FnMut(Freed)) -> u32 {
        let whole = range(&entry);
        let is_there = |found: &Entry, at: u32| {
            let place = Place { at: from.at + (at - whole.start), ..from };
            place_of(found, at) == place
        };
        let parts: Vec<Range<u32>> = self
            .pieces(whole.clone())
            .filter(|(part, found)| found.is_some_and(|found| is_there(found, part.start)))
            .map(|(part, _)| part)
            .collect();
        let mut moved = 0;
        for part in parts {
            moved += part.end - part.start;
            self.replace(part.clone(), Some(cut(&entry, part)), &mut freed);
        }
        moved
    }

    /// Splits `range` into pieces that one entry covers, or none.
    pub fn pieces(&self, range: Range<u32>) -> impl Iterator<Item = (Range<u32>, Option<&Entry>)> {
        let mut at = range.start;
        let mut next = self.first_behind(range.start);
        std::iter::from_fn(move || {
            if at >= range.end {
                return None;
            }
            let entry = self.entries.get(next).filter(|entry| entry.offset < range.end);
            let begin = at;
            let found = match entry {
                Some(entry) if entry.offset > at => {
                    at = entry.offset;
                    None
                }
                Some(entry) => {
                    at = range.end.min(entry.offset + entry.length);
                    next += 1;
                    Some(entry)
                }
                None => {
                    at = range.end;
                    None
                }
            };
            Some((begin..at, found))
        })
    }

    /// Reads what a lookup of `start` most probably needs. Returns something that depends on it, so that the processor loads it.
    pub fn load_entries(&self, start: u32) -> u32 {
        let guess = self.guess(start);
        let length = |index: usize| self.entries.get(index).map_or(0, |entry| entry.length);
        length(guess) ^ length(guess.wrapping_sub(1))
    }

    fn replace(&mut self, with: Range<u32>, entry: Option<Entry>, mut freed: impl FnMut(Freed)) {
        if with.is_empty() {
            return;
        }
        self.replacements.push(entry.map_or(Replacement::Zeroes(with.clone()), Replacement::Entry));
        let old = self.overlapping(&with);
        for found in &self.entries[old.clone()] {
            let (ancestor, object) = (found.ancestor, found.object);
            let end = with.end.min(found.offset + found.length);
            freed(Freed { ancestor, object, bytes: end - with.start.max(found.offset) });
        }
        let first = self.entries[old.clone()].first();
        let left = first.map(|found| cut(found, found.offset..with.start.max(found.offset)));
        let last = self.entries[old.clone()].last();
        let right = last.map(|found| {
            let end = found.offset + found.length;
            cut(found, with.end.min(end)..end)
        });
        let rests = [left, entry, right].into_iter().flatten().filter(|part| part.length > 0);
        self.make_room();
        self.entries.splice(old, rests);
        if self.entries.len() < self.entries.capacity() / 2 {
            self.entries.shrink_to(with_spare(self.entries.len()));
        }
    }

    /// Makes room for two more entries. A vector would double its capacity, but many pages are changed once only.
    fn make_room(&mut self) {
        let needed = self.entries.len() + 2;
        if self.entries.capacity() < needed {
            self.entries.reserve_exact(with_spare(needed) - self.entries.len());
        }
    }

    /// The indices of the entries that overlap `range`.
    fn overlapping(&self, range: &Range<u32>) -> Range<usize> {
        let first = self.first_behind(range.start);
        let end = self.entries.partition_point(|entry| entry.offset < range.end);
        first..end.max(first)
    }

    /// The index of the first entry that ends behind `start`.
    fn first_behind(&self, start: u32) -> usize {
        let is_before = |entry: &Entry| entry.offset + entry.length <= start;
        // In most pages, extents of one length follow each other without gaps. Steps from one place in the memory to another
        // one would take longer than the rest of a lookup.
        let guess = self.guess(start);
        let is_behind = self.entries.get(guess).is_some_and(|entry| !is_before(entry));
        if is_behind && self.entries[..guess].last().is_none_or(is_before) {
            return guess;
        }
        self.entries.partition_point(is_before)
    }

    /// The index of the entry at `start` if all have the same length.
    fn guess(&self, start: u32) -> usize {
        let end = self.entries.last().map_or(1, |last| u64::from(last.offset + last.length));
        let guess = u64::from(start) * self.entries.len() as u64 / end;
        usize::try_from(guess).unwrap_or(usize::MAX)
    }
}

/// Returns where the byte `at` of the page lies. `entry` covers it.
pub fn place_of(entry: &Entry, at: u32) -> Place {
    let at = entry.extent_at + entry.skip + (at - entry.offset);
    Place { ancestor: entry.ancestor, object: entry.object, at }
}

/// The capacity for this number of entries.
fn with_spare(entries: usize) -> usize {
    entries + entries / 8
}

fn range(entry: &Entry) -> Range<u32> {
    entry.offset..entry.offset + entry.length
}

/// The part of `entry` in `range`, which lies inside of it.
fn cut(entry: &Entry, range: Range<u32>) -> Entry {
    let skip = entry.skip + (range.start - entry.offset);
    Entry { offset: range.start, length: range.end - range.start, skip, ..*entry }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// The length of the page in the test.
    const LENGTH: u32 = 48;

    #[derive(Debug, Clone)]
    enum Change {
        Write(Range<u32>),
        Zero(Range<u32>),
        /// Copies the data of the range, makes other changes, and relocates the copies.
        Relocate(Range<u32>, Vec<Change>),
    }

    fn changes() -> impl Strategy<Value = Vec<Change>> {
        let range = (0..LENGTH, 1..20_u32).prop_map(|(at, length)| at..LENGTH.min(at + length));
        let simple = prop_oneof![
            3 => range.clone().prop_map(Change::Write),
            1 => range.clone().prop_map(Change::Zero),
        ];
        let few = proptest::collection::vec(simple.clone(), 0..4);
        let relocate = (range, few).prop_map(|(range, few)| Change::Relocate(range, few));
        proptest::collection::vec(prop_oneof![3 => simple, 1 => relocate], 0..30)
    }

    /// A page, and the same byte by byte: the place of each, and the number of the write that its content has.
    struct Pair {
        page: Page,
        places: Vec<Option<Place>>,
        contents: Vec<u64>,
        copied: BTreeMap<Place, u64>,
        live: BTreeMap<Position, i64>,
        slot: u64,
    }

    impl Pair {
        fn entry(&mut self, range: &Range<u32>) -> Entry {
            self.slot += 1;
            let length = range.end - range.start;
            Entry {
                offset: range.start,
                length,
                ancestor: 0,
                object: Position { epoch: 1, slot: self.slot },
                extent_at: 100,
                extent_length: length,
                stored_at: 100,
                saved: 0,
                checksum: 0,
                skip: 0,
            }
        }

        fn apply(&mut self, change: &Change) {
            match change {
                Change::Write(range) => {
                    let entry = self.entry(range);
                    *self.live.entry(entry.object).or_default() += i64::from(entry.length);
                    self.page.write(entry, |freed| free(&mut self.live, freed));
                    for at in range.clone() {
                        self.places[at as usize] = Some(place_of(&entry, at));
                        self.contents[at as usize] = entry.object.slot * 1000 + u64::from(at);
                        self.copied.insert(place_of(&entry, at), self.contents[at as usize]);
                    }
                }
                Change::Zero(range) => {
                    self.page.zero(range.clone(), |freed| free(&mut self.live, freed));
                    for at in range.clone() {
                        (self.places[at as usize], self.contents[at as usize]) = (None, 0);
                    }
                }
                Change::Relocate(range, meanwhile) => {
                    let pieces: Vec<(Range<u32>, Place)> = self
                        .page
                        .pieces(range.clone())
                        .filter_map(|(part, entry)| {
                            Some((part.clone(), place_of(entry?, part.start)))
                        })
                        .collect();
                    meanwhile.iter().for_each(|change| self.apply(change));
                    for (part, from) in pieces {
                        self.relocate(&part, from);
                    }
                }
            }
        }

        fn relocate(&mut self, part: &Range<u32>, from: Place) {
            let entry = self.entry(part);
            let mut expected = 0;
            for at in part.clone() {
                let old = Place { at: from.at + (at - part.start), ..from };
                self.copied.insert(place_of(&entry, at), self.copied[&old]);
                if self.places[at as usize] == Some(old) {
                    self.places[at as usize] = Some(place_of(&entry, at));
                    expected += 1;
                }
            }
            let moved = self.page.relocate(entry, from, |freed| free(&mut self.live, freed));
            assert_eq!(moved, expected);
            *self.live.entry(entry.object).or_default() += i64::from(moved);
        }

        fn check(&self) {
            let mut end = 0;
            for (part, entry) in self.page.pieces(0..LENGTH) {
                assert_eq!(part.start, end);
                end = part.end;
                for at in part {
                    let place = entry.map(|entry| place_of(entry, at));
                    assert_eq!(place, self.places[at as usize], "byte {at}");
                    let content = place.map_or(0, |place| self.copied[&place]);
                    assert_eq!(content, self.contents[at as usize], "byte {at}");
                }
            }
            assert_eq!(end, LENGTH);
            let mut live = BTreeMap::new();
            for place in self.places.iter().flatten() {
                *live.entry(place.object).or_insert(0) += 1;
            }
            let counted = self.live.iter().filter(|(_, bytes)| **bytes != 0);
            assert!(counted.eq(live.iter()), "{:?} {live:?}", self.live);
            let count = self.page.entries().len();
            let limit = (count + 4) * 2 * size_of::<Entry>();
            assert!(self.page.bytes() <= limit, "{} bytes for {count} entries", self.page.bytes());
            for entry in self.page.entries() {
                assert!(entry.length > 0 && entry.skip + entry.length <= entry.extent_length);
            }
        }

        /// The same changes of another page lead to the same entries.
        fn repeat(&mut self, other: &mut Page) {
            other.repeat(&self.page.take_replacements());
            assert_eq!(self.page, *other);
        }
    }

    fn free(live: &mut BTreeMap<Position, i64>, freed: Freed) {
        *live.get_mut(&freed.object).unwrap() -= i64::from(freed.bytes);
    }

    proptest! {
        #[test]
        fn a_page_is_what_its_bytes_are(changes in changes()) {
            let mut pair = Pair {
                page: Page::default(),
                places: vec![None; LENGTH as usize],
                contents: vec![0; LENGTH as usize],
                copied: BTreeMap::new(),
                live: BTreeMap::new(),
                slot: 0,
            };
            let mut other = Page::default();
            for change in changes {
                pair.apply(&change);
                pair.check();
                pair.repeat(&mut other);
            }
        }
    }
}
