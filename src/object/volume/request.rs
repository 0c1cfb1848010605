//! Writes and flushes.

use super::access::Failure;
use super::shared::{Shared, State};
use super::tail::Sending;
use crate::codec::{Extent, MAX_EXTENT_BYTES};
use crate::rules::{Rule, applies};
use crate::tail_memory::Change;

/// Requests are multiples of this, in bytes.
pub(super) const SECTOR_BYTES: u64 = 512;

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
        self.wait(|state| self.admits(state, bytes).then_some(())).await
    }

    /// Whether the tail has room for `bytes` of data. Closes the open batch if they do not fit into it.
    pub(super) fn admits(&self, state: &mut State, bytes: usize) -> bool {
        let has_room = self.has_room_in(state, bytes);
        let tail = &mut state.tail;
        let is_full = tail.open_bytes() + bytes > self.config.object_bytes || !has_room;
        let is_long = tail.open_records() >= self.config.object_records;
        if tail.open_records() > 0 && (is_full || is_long) {
            tail.close();
            state.changed();
        }
        has_room && state.tail.slots.len() < self.config.tail_slots
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
            state.written_bytes += length;
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
}
