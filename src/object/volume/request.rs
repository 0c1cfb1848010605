//! Reads, writes and flushes.

use super::access::Failure;
use super::shared::{Shared, State};
use super::tail::Sending;
use super::tasks::{Part, all};
use crate::codec::{Entry, Extent, MAX_EXTENT_BYTES};
use crate::name::Name;
use crate::rules::{Rule, applies};
use crate::tail_memory::Change;

/// Requests are multiples of this, in bytes.
pub(super) const SECTOR_BYTES: u64 = 512;

/// The reads of objects that one request has in flight.
pub(super) const READS_IN_FLIGHT: usize = 16;

/// How often a read looks the range up again because its object was deleted.
const MAX_LOOKUPS: u32 = 16;

impl Shared {
    pub(super) fn check_range(&self, offset: u64, length: u64) -> Result<(), Failure> {
        if !offset.is_multiple_of(SECTOR_BYTES) || !length.is_multiple_of(SECTOR_BYTES) {
            return Err(Failure::Invalid("the range is not a multiple of 512 bytes"));
        }
        match offset.checked_add(length).is_some_and(|end| end <= self.size()) {
            true => Ok(()),
            false => Err(Failure::Invalid("the range ends behind the volume")),
        }
    }

    /// Waits until the tail has room for `bytes` of data. An empty tail has room for any request.
    pub(super) async fn admit(&self, bytes: usize) -> Result<(), Failure> {
        self.wait(|state| {
            let has_room = self.has_room_in(state, bytes);
            let tail = &mut state.tail;
            let is_full = tail.open_bytes() + bytes > self.config.object_bytes || !has_room;
            let is_long = tail.open_records() >= self.config.object_records;
            if tail.open_records() > 0 && (is_full || is_long) {
                tail.close();
                state.changed();
            }
            (has_room && state.tail.slots.len() < self.config.tail_slots).then_some(())
        })
        .await
    }

    /// Whether a write of this many bytes need not wait.
    pub(super) fn has_room(&self, bytes: usize) -> bool {
        let state = self.lock();
        // Each extent has a block of its own in the tail memory.
        let most = bytes.saturating_add(bytes / 8);
        state.tail.slots.len() < self.config.tail_slots && self.has_room_in(&state, most)
    }

    fn has_room_in(&self, state: &State, bytes: usize) -> bool {
        let used = state.tail.bytes();
        let fits = used == 0 || used.saturating_add(bytes) <= self.config.tail_bytes;
        fits && state.can_keep(bytes)
    }

    pub(super) async fn write(&self, offset: u64, data: &[u8]) -> Result<(), Failure> {
        self.check_range(offset, data.len() as u64)?;
        let (mut offset, mut data) = (offset, data);
        while !data.is_empty() {
            let in_page = self.page_bytes - offset % self.page_bytes;
            let length = in_page.min(MAX_EXTENT_BYTES.into()).min(data.len() as u64);
            let (extent, rest) = data.split_at(usize::try_from(length).unwrap_or(data.len()));
            self.admit(extent.len()).await?;
            let record = Extent::of(offset, extent);
            let mut state = self.lock();
            state.keep(self.epoch, Change::Write, (offset, length), extent, record.checksum);
            state.tail.write(&record, extent);
            if state.tail.open_bytes() >= self.config.object_bytes {
                state.changed();
            }
            (offset, data) = (offset + length, rest);
        }
        Ok(())
    }

    pub(super) async fn zero(
        &self,
        offset: u64,
        length: u64,
        is_trim: bool,
    ) -> Result<(), Failure> {
        self.check_range(offset, length)?;
        if length > 0 {
            self.admit(0).await?;
            let change = if is_trim { Change::Trim } else { Change::WriteZeroes };
            let mut state = self.lock();
            state.keep(self.epoch, change, (offset, length), &[], 0);
            state.tail.zero(offset, length, is_trim);
        }
        Ok(())
    }

    pub(super) async fn grow(&self, size: u64) -> Result<(), Failure> {
        if !size.is_multiple_of(SECTOR_BYTES) {
            return Err(Failure::Invalid("the size is not a multiple of 512 bytes"));
        }
        self.admit(0).await?;
        {
            let mut state = self.lock();
            if size < self.size() {
                return Err(Failure::Invalid("the volume is larger already"));
            }
            // Requests use the new range from here on; their records follow this one.
            self.extend(&mut state, size)?;
            state.keep(self.epoch, Change::Resize, (0, size), &[], 0);
            state.tail.resize(size);
        }
        self.flush().await
    }

    pub(super) async fn flush(&self) -> Result<(), Failure> {
        let end = {
            let mut state = self.lock();
            state.check()?;
            let next = state.tail.next();
            if state.tail.open_records() > 0 {
                state.tail.flush_wanted = true;
                state.changed();
                next + 1
            } else {
                next
            }
        };
        self.wait(|state| {
            let last = state.tail.slot(end - 1);
            let is_durable = last.is_some_and(|slot| slot.sending == Sending::Durable);
            let is_acknowledged = state.tail.confirmed >= end;
            (is_acknowledged || is_durable && !applies(Rule::Contiguous)).then_some(())
        })
        .await
    }

    pub(super) async fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), Failure> {
        self.check_range(offset, buffer.len() as u64)?;
        let (mut offset, mut rest) = (offset, buffer);
        while !rest.is_empty() {
            let in_page = self.page_bytes - offset % self.page_bytes;
            let length = in_page.min(rest.len() as u64);
            let (part, next) = rest.split_at_mut(usize::try_from(length).unwrap_or(usize::MAX));
            self.read_part(offset, part).await?;
            (offset, rest) = (offset + length, next);
        }
        Ok(())
    }

    /// Reads a range of one map page.
    async fn read_part(&self, offset: u64, buffer: &mut [u8]) -> Result<(), Failure> {
        let mut lookups = 0;
        loop {
            let entries = self.look_up(offset, buffer).await?;
            let reads = entries.into_iter().map(|(at, entry)| -> Part<'_, _> {
                Box::pin(async move {
                    let data = self.read_extent(&entry).await;
                    data.map(|data| (at, entry, data))
                })
            });
            match all(reads, READS_IN_FLIGHT).await {
                Ok(found) => {
                    for (at, entry, data) in found {
                        let data = &data[entry.skip as usize..][..entry.length as usize];
                        buffer[at..at + data.len()].copy_from_slice(data);
                    }
                    return Ok(());
                }
                // The collector has relocated the data, or a trim has removed it.
                Err(Failure::Lost(_)) if lookups < MAX_LOOKUPS => lookups += 1,
                Err(Failure::Lost(name)) => return Err(self.lost(name).await),
                Err(failure) => return Err(failure),
            }
        }
    }

    /// Copies what is in the tail to `buffer`, and returns the places of the rest: the position in the buffer,
    /// and the part of an extent.
    async fn look_up(
        &self,
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<Vec<(usize, Entry)>, Failure> {
        let number = offset / self.page_bytes;
        let base = number * self.page_bytes;
        self.with_map(|state| {
            state.map.leaf(number)?;
            let rest = state.tail.read(offset, buffer);
            let page = state.map.leaf(number)?;
            let mut entries = Vec::new();
            for range in rest {
                let [begin, end] = [range.start, range.end].map(|at| at - offset);
                let [begin, end] = [begin, end].map(|at| usize::try_from(at).unwrap_or(usize::MAX));
                buffer[begin..end].fill(0);
                let Some(page) = page else { continue };
                let [first, last] = [range.start, range.end].map(|at| at - base);
                let [first, last] = [first, last].map(|at| u32::try_from(at).unwrap_or(u32::MAX));
                for (piece, entry) in page.pieces(first..last) {
                    let Some(entry) = entry else { continue };
                    let skip = entry.skip + (piece.start - entry.offset);
                    let (length, at) = (piece.end - piece.start, (piece.start - first) as usize);
                    entries
                        .push((begin + at, Entry { offset: piece.start, length, skip, ..*entry }));
                }
            }
            Ok(entries)
        })
        .await
    }

    /// Reads and verifies the extent of an entry.
    pub(super) async fn read_extent(&self, entry: &Entry) -> Result<Vec<u8>, Failure> {
        let name = Name::Slot(entry.object);
        let begin = u64::from(entry.extent_at);
        let range = begin..begin + u64::from(entry.extent_length);
        let access = self.access.of(entry.ancestor)?;
        let Some(bytes) = access.read(name, range).await? else {
            return Err(Failure::Lost(name));
        };
        let extent = Extent { offset: 0, length: entry.extent_length, checksum: entry.checksum };
        extent.verify(&bytes).map_err(|damage| Failure::Damaged { name, damage })?;
        Ok(bytes)
    }
}
