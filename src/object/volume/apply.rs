//! Records become changes of the map.

use std::collections::BTreeSet;
use std::ops::Range;

use super::access::Failure;
use super::shared::{Patience, Shared, State};
use super::table::{Missing, split};
use super::tasks::{Part, all};
use crate::codec::{Entry, Extent, MAX_CHILDREN, Record, Source};
use crate::map::Place;
use crate::name::Position;
use crate::rules::{Rule, applies};

/// The records whose pages are loaded before the first of them is applied.
const RECORDS_AHEAD: usize = 64;

/// The pages that are loaded at the same time.
const PAGES_AHEAD: usize = 16;

/// The memory for a page that is loaded ahead, at least. Without room for several nothing is loaded ahead.
const PAGE_MEMORY_BYTES: usize = 16 << 10;

/// Where an extent is, and where it was before it was relocated.
struct Target {
    /// Its place in the data of the object, and that of its stored bytes.
    data_at: u32,
    stored_at: u32,
    from: Option<Source>,
}

impl Shared {
    /// Applies the records of a slot to the map. `header_bytes` is the position of the data in the object.
    pub(super) async fn apply_slot(
        &self,
        at: Position,
        header_bytes: u32,
        records: &[Record],
        patience: Patience,
    ) -> Result<(), Failure> {
        let (mut data_at, mut stored_at) = (header_bytes, header_bytes);
        let packing = &self.access.packing;
        let bytes: u32 = records.iter().map(data_bytes).sum();
        self.lock().usage.add(at, bytes);
        for (number, record) in records.iter().enumerate() {
            if number.is_multiple_of(RECORDS_AHEAD) {
                let end = records.len().min(number + RECORDS_AHEAD);
                self.load_pages(&records[number..end], patience).await?;
            }
            match record {
                Record::Write(extent) => {
                    self.place(extent, at, Target { data_at, stored_at, from: None }, patience)
                        .await?;
                }
                Record::Move(extent, from) => {
                    let from = Some(*from);
                    self.place(extent, at, Target { data_at, stored_at, from }, patience).await?;
                }
                Record::Trim { offset, length } | Record::WriteZeroes { offset, length } => {
                    let end = (offset + length).min(self.size());
                    self.clear(*offset..end, patience).await?;
                }
                Record::Base(_) | Record::Open(_) => {}
                Record::Snapshot(snapshot) => self.lock().snapshots.add(snapshot.clone()),
                Record::DeleteSnapshot(id) => self.lock().snapshots.delete(*id, at),
                Record::RollBack(id) => self.apply_roll_back(*id, at, patience).await?,
                Record::Resize(size) => self.resized(*size)?,
            }
            data_at += data_bytes(record);
            stored_at += record.extent().map_or(0, |extent| packing.stored_length(extent));
        }
        Ok(())
    }

    /// Loads pages that the records change, several at a time.
    async fn load_pages(&self, records: &[Record], patience: Patience) -> Result<(), Failure> {
        let pages = |record: &Record| match record {
            Record::Write(extent) | Record::Move(extent, _) => {
                Some(self.parts(extent.offset..extent.offset + u64::from(extent.length)))
            }
            _ => None,
        };
        let numbers = records.iter().filter_map(pages).flatten().map(|(number, _)| number);
        self.load_all(numbers.collect::<BTreeSet<_>>().into_iter().collect(), patience).await
    }

    /// Loads map pages, several at a time, as far as there is memory for them.
    async fn load_all(&self, mut numbers: Vec<u64>, patience: Patience) -> Result<(), Failure> {
        let limit = RECORDS_AHEAD.min(self.config.map_bytes / PAGE_MEMORY_BYTES);
        {
            let mut state = self.lock();
            numbers.retain(|number| state.map.leaf(*number).is_err());
        }
        numbers.truncate(limit);
        // The pages above them first, each once.
        let indices: BTreeSet<u64> = numbers.iter().map(|number| split(*number).0).collect();
        let load = |number: u64, is_index: bool| -> Part<'_, Result<(), Failure>> {
            Box::pin(self.with_map_for(patience, move |state| match is_index {
                true => state.map.index(number).map(drop),
                false => state.map.leaf(number).map(drop),
            }))
        };
        all(indices.into_iter().map(|number| load(number, true)), PAGES_AHEAD).await?;
        all(numbers.into_iter().map(|number| load(number, false)), PAGES_AHEAD).await?;
        Ok(())
    }

    /// Takes the size that a record gives the volume.
    fn resized(&self, size: u64) -> Result<(), Failure> {
        let mut state = self.lock();
        if size < state.applied_size {
            return Err(Failure::Unsupported("become smaller"));
        }
        state.applied_size = size;
        self.extend(&mut state, size)
    }

    /// Splits a range into the parts of map pages: the number of the page, and the range relative to it.
    pub(super) fn parts(&self, range: Range<u64>) -> impl Iterator<Item = (u64, Range<u32>)> {
        let page = self.page_bytes;
        let pages = range.start / page..range.end.div_ceil(page);
        pages.map(move |number| {
            let begin = range.start.max(number * page) - number * page;
            let end = range.end.min((number + 1) * page) - number * page;
            (number, short(begin)..short(end))
        })
    }

    async fn place(
        &self,
        extent: &Extent,
        at: Position,
        Target { data_at, stored_at, from }: Target,
        patience: Patience,
    ) -> Result<(), Failure> {
        let end = extent.offset + u64::from(extent.length);
        if end > self.size() {
            // A roll-back to a smaller snapshot was appended while the collector copied. What it has copied stays where
            // it was.
            if from.is_some() {
                return Ok(());
            }
            return Err(Failure::Unsupported("data behind its end"));
        }
        for (number, part) in self.parts(extent.offset..end) {
            let skip = short(number * self.page_bytes + u64::from(part.start) - extent.offset);
            let entry = Entry {
                offset: part.start,
                length: part.end - part.start,
                ancestor: 0,
                object: at,
                extent_at: data_at,
                extent_length: extent.length,
                stored_at,
                saved: extent.saved,
                checksum: extent.checksum,
                skip,
            };
            let from = from
                .map(|from| Place { ancestor: 0, object: from.object, at: from.at + skip })
                .filter(|_| applies(Rule::Conditional));
            self.with_map_for(patience, |state| put(state, number, entry, from)).await?;
        }
        Ok(())
    }

    /// Makes a range read as zeroes. Pages in it that are empty take no time, so only the data in a range has a cost.
    async fn clear(&self, range: Range<u64>, patience: Patience) -> Result<(), Failure> {
        let page = self.page_bytes;
        let (mut next, end) = (range.start / page, range.end.div_ceil(page));
        while next < end {
            let step = next..end.min((split(next).0 + 1) * MAX_CHILDREN as u64);
            next = step.end;
            let numbers =
                self.with_map_for(patience, |state| state.map.existing(step.clone())).await?;
            for some in numbers.chunks(PAGES_AHEAD) {
                self.load_all(some.to_vec(), patience).await?;
                for number in some {
                    let base = number * page;
                    let [begin, end] = [range.start, range.end].map(|at| at.saturating_sub(base));
                    let part = short(begin)..short(end.min(page));
                    self.with_map_for(patience, |state| zero(state, *number, &part)).await?;
                }
            }
        }
        Ok(())
    }
}

/// Makes a range of a map page read as zeroes. A page that has no data there does not change.
fn zero(state: &mut State, number: u64, part: &Range<u32>) -> Result<(), Missing> {
    let State { map, usage, .. } = state;
    match map.leaf(number)? {
        Some(page) if !page.is_zero(part) => {
            map.change(number, |page| page.zero(part.clone(), |freed| usage.lose(freed)))
        }
        _ => Ok(()),
    }
}

/// Puts an entry into a map page. With `from`, only where the bytes lie at that place.
fn put(state: &mut State, number: u64, entry: Entry, from: Option<Place>) -> Result<(), Missing> {
    let State { map, usage, .. } = state;
    if from.is_some() && map.leaf(number)?.is_none() {
        return Ok(());
    }
    let bytes = map.change(number, |page| match from {
        Some(from) => page.relocate(entry, from, |freed| usage.lose(freed)),
        None => {
            page.write(entry, |freed| usage.lose(freed));
            entry.length
        }
    })?;
    usage.gain(entry.object, bytes);
    Ok(())
}

fn data_bytes(record: &Record) -> u32 {
    record.extent().map_or(0, |extent| extent.length)
}

/// A position within a page or an extent.
fn short(position: u64) -> u32 {
    u32::try_from(position).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::task::{Context, Waker};

    use super::*;
    use crate::store::Store;
    use crate::tests::{Memory, byte_at, create, open, put, with_volume};
    use crate::volume::Config;

    #[test]
    fn a_copy_of_the_collector_behind_a_roll_back_to_a_smaller_size_has_no_effect() {
        let store: Arc<dyn Store> = Arc::new(Memory::default());
        create(&store, 1 << 20);
        let volume = open(&store, 10, Config::default()).unwrap();
        with_volume(&volume, async { put(&volume, 0, 1).await }).unwrap();
        let id = with_volume(&volume, async { volume.take_snapshot("s", 7).await }).unwrap();
        with_volume(&volume, async {
            volume.grow(2 << 20).await?;
            put(&volume, 1 << 20, 3).await
        })
        .unwrap();
        with_volume(&volume, async {
            let mut roll_back = Box::pin(volume.roll_back(id));
            // Up to its first wait: its record is appended, and not applied.
            let polled = roll_back.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            assert!(polled.is_pending());
            let from = Source { object: volume.0.position(0), at: 0 };
            volume.0.lock().tail.relocate(1 << 20, &[3; 512], from);
            roll_back.await
        })
        .unwrap();
        assert_eq!(volume.size(), 1 << 20);
        drop(volume);
        let again = open(&store, 11, Config::default()).unwrap();
        assert_eq!(again.size(), 1 << 20);
        assert_eq!(with_volume(&again, async { byte_at(&again, 0).await }), Ok(1));
    }
}
