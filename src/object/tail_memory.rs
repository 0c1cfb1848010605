//! The tail memory: a copy of the records that are not confirmed in the store, in memory that outlives the process.
//!
//! A write whose records are in the tail memory may be acknowledged: if the process ends, the next opener of the
//! same mapping finds them here and appends them to its own epoch. The memory is a ring of records:
//!
//! ```text
//! 0      identity: magic, version, the volume, the owner
//! 64     state, twice: the one with the greater count holds
//! 4096   records: a block of 64 bytes, then the data, up to a multiple of 64 bytes
//! ```
//!
//! Each block has a CRC32C, and each record the next sequence number, so a record that was written in part ends the
//! list as a missing one does. The rules by which an opener uses the records are in FORMAT.md, 24 to 26.
//!
//! What a dead process has left here is checked like any other input: no length is used before it was compared with
//! its limit.

mod block;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use crate::codec::MAX_EXTENT_BYTES;
use crate::name::VolumeId;
use crate::rules::{Rule, applies};
use block::{BLOCK, Block, State};

/// Memory that outlives the process, and that no other process uses at the same time.
pub trait Memory: Send + Sync {
    /// Returns the length in bytes. It never changes.
    fn size(&self) -> u64;

    /// Reads bytes. What was never written reads as zeroes.
    ///
    /// # Errors
    /// Returns the error of the operating system.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;

    /// Writes both parts, one behind the other. If the process ends meanwhile, the first bytes may be written and the
    /// others not; 64 bytes at a multiple of 64 are written as a whole.
    ///
    /// # Errors
    /// Returns the error of the operating system, for example that there is no memory left.
    fn write_at(&self, offset: u64, parts: [&[u8]; 2]) -> io::Result<()>;
}

/// The position of the first record in the memory.
const RECORDS_AT: u64 = 4096;

/// The minimum size in bytes: the longest record fits several times.
pub const MIN_BYTES: u64 = if cfg!(test) { 16 << 10 } else { 1 << 20 };

/// What a record does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    Write = 1,
    Trim = 2,
    WriteZeroes = 3,
    Resize = 4,
    /// Nothing: the ring continues at its beginning.
    Skip = 5,
}

/// A record without its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) change: Change,
    /// The slot of the log that has the record, once it is in the store.
    pub(crate) epoch: u64,
    pub(crate) slot: u64,
    /// The first byte of the range in the volume.
    pub(crate) offset: u64,
    /// The length of the range, or the new size of the volume, in bytes.
    pub(crate) length: u64,
    /// The CRC32C of the data of a write.
    pub(crate) checksum: u32,
}

/// A record that a process has left.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Found {
    pub(crate) entry: Entry,
    at: u64,
    sequence: u64,
}

/// Why the records of the memory cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unusable {
    /// Another client has opened the volume since; this many bytes of acknowledged writes were not in the store.
    Stale(u64),
    /// The memory has other content than this build writes.
    Damaged(&'static str),
}

/// The records of one slot.
#[derive(Debug, Clone, Copy)]
struct Slot {
    number: u64,
    /// The end of its records, and the sequence number of the next one.
    end: u64,
    sequence: u64,
    bytes: u64,
}

/// The tail memory of an open volume.
pub(crate) struct TailMemory {
    memory: Arc<dyn Memory>,
    /// The bytes of the ring.
    capacity: u64,
    state: State,
    /// The end of the last record, and the sequence number of the next one. Positions only rise; the place in the
    /// ring is the remainder.
    end: u64,
    sequence: u64,
    slots: VecDeque<Slot>,
    /// A record is missing. Nothing is appended until everything is confirmed.
    is_interrupted: bool,
}

impl TailMemory {
    /// Returns the memory, and the records that the process before has left in it.
    ///
    /// # Errors
    /// Returns the error of the memory; the inner one if it belongs to another volume or owner.
    pub(crate) fn open(
        memory: Arc<dyn Memory>,
        volume: VolumeId,
        owner: u64,
    ) -> io::Result<Result<(Self, Vec<Found>), Unusable>> {
        if memory.size() < MIN_BYTES {
            return Ok(Err(Unusable::Damaged("size")));
        }
        let capacity = (memory.size() - RECORDS_AT) / BLOCK as u64 * BLOCK as u64;
        let mut head = [0; 3 * BLOCK];
        memory.read_at(0, &mut head)?;
        let identity = block::identity(volume, owner);
        let new = State { head: 0, sequence: 1, ..State::default() };
        let mut tail = Self {
            memory,
            capacity,
            state: new,
            end: 0,
            sequence: 1,
            slots: VecDeque::new(),
            is_interrupted: false,
        };
        if head == [0; 3 * BLOCK] {
            tail.store()?;
            tail.memory.write_at(0, [&identity.0, &[]])?;
            return Ok(Ok((tail, Vec::new())));
        }
        let [first, one, other] = [0, 1, 2].map(|at| Block::of(&head[at * BLOCK..][..BLOCK]));
        if first.0 != identity.0 && first.0 != [0; BLOCK] {
            return Ok(Err(Unusable::Damaged("identity")));
        }
        let states = [one, other].into_iter().filter_map(|block| State::read(&block));
        let Some(state) = states.max_by_key(|state| state.count) else {
            return Ok(Err(Unusable::Damaged("state")));
        };
        // A process that ended before it had written this has acknowledged nothing.
        tail.memory.write_at(0, [&identity.0, &[]])?;
        (tail.state, tail.end, tail.sequence) = (state, state.head, state.sequence);
        let mut found = Vec::new();
        while let Some(record) = tail.next_record()? {
            found.push(record);
        }
        Ok(Ok((tail, found)))
    }

    /// Prepares the memory for the writer of `epoch`, which is claimed and not committed. `before` is the newest epoch
    /// that was opened, with its cut. Returns the records that are not in the store.
    ///
    /// # Errors
    /// Returns the error of the memory; [`Unusable::Stale`] if records of an earlier history would be lost.
    pub(crate) fn prepare(
        &mut self,
        mut found: Vec<Found>,
        before: Option<(u64, u64)>,
        epoch: u64,
    ) -> io::Result<Result<Vec<Found>, Unusable>> {
        let (newest, cut) = before.unwrap_or((0, 0));
        let is_own = [self.state.opened, self.state.trying].contains(&newest);
        let is_stored = |found: &Found| found.entry.epoch == newest && found.entry.slot < cut;
        let stored = match applies(Rule::TailCut) && is_own {
            true => found.iter().take_while(|found| is_stored(found)).count(),
            false => 0,
        };
        let rest = found.split_off(stored);
        if !is_own && !rest.is_empty() && applies(Rule::TailOwner) {
            let bytes = rest.iter().map(|found| found.entry.bytes()).sum();
            return Ok(Err(Unusable::Stale(bytes)));
        }
        let (head, sequence) =
            rest.first().map_or((self.end, self.sequence), |first| (first.at, first.sequence));
        self.state = State { opened: newest, trying: epoch, head, sequence, ..self.state };
        self.store()?;
        Ok(Ok(rest))
    }

    /// Reads the data of a record.
    ///
    /// # Errors
    /// Returns the error of the memory.
    pub(crate) fn data(&self, found: &Found) -> io::Result<Vec<u8>> {
        let mut data = vec![0; usize::try_from(found.entry.bytes()).unwrap_or(0)];
        self.memory.read_at(self.place(found.at) + BLOCK as u64, &mut data)?;
        Ok(data)
    }

    /// Gives a record the slot in which it will be from now on. Must be called in the order of the records, and before
    /// the slot is sent.
    ///
    /// # Errors
    /// Returns the error of the memory.
    pub(crate) fn move_to(&mut self, found: &Found, epoch: u64, slot: u64) -> io::Result<()> {
        let entry = Entry { epoch, slot, ..found.entry };
        let block = block::record(&entry, found.sequence);
        self.memory.write_at(self.place(found.at), [&block.0, &[]])?;
        self.count(&entry, found.at + entry.space(), found.sequence + 1);
        Ok(())
    }

    /// Whether a record with this many bytes of data has room.
    pub(crate) fn has_room(&self, bytes: usize) -> bool {
        let needed = BLOCK as u64 + padded(bytes as u64);
        // At worst the record begins at the end of the ring, and skips as much as it needs.
        self.is_interrupted || self.end - self.state.head + 2 * needed <= self.capacity
    }

    /// Whether all records that are not confirmed are in the memory.
    pub(crate) fn is_complete(&self) -> bool {
        !self.is_interrupted
    }

    /// The data of the records in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.slots.iter().map(|slot| slot.bytes).sum()
    }

    /// Appends a record. If that fails, the memory is not complete until all records are confirmed.
    pub(crate) fn append(&mut self, entry: &Entry, data: &[u8]) {
        if !self.is_interrupted && self.try_append(entry, data).is_err() {
            self.is_interrupted = true;
        }
    }

    /// Appends nothing more before all records are confirmed.
    pub(crate) fn interrupt(&mut self) {
        self.is_interrupted = true;
    }

    /// Removes the records of the slots below `confirmed`. `is_all`: there are no others.
    ///
    /// # Errors
    /// Returns the error of the memory.
    pub(crate) fn release(&mut self, confirmed: u64, is_all: bool) -> io::Result<()> {
        let mut last = None;
        while self.slots.front().is_some_and(|slot| slot.number < confirmed) {
            last = self.slots.pop_front();
        }
        if let Some(Slot { mut end, sequence, .. }) = last {
            if self.slots.is_empty() {
                // From the beginning again, so that a volume with few writes uses little memory.
                end = end.next_multiple_of(self.capacity);
                self.end = end;
            }
            self.state = State { head: end, sequence, ..self.state };
            self.store()?;
        }
        if is_all {
            self.is_interrupted = false;
        }
        Ok(())
    }

    fn try_append(&mut self, entry: &Entry, data: &[u8]) -> io::Result<()> {
        let left = self.capacity - self.end % self.capacity;
        if left < entry.space() {
            let skip = Entry { change: Change::Skip, length: left, ..*entry };
            self.write(&skip, &[])?;
        }
        self.write(entry, data)
    }

    fn write(&mut self, entry: &Entry, data: &[u8]) -> io::Result<()> {
        let block = block::record(entry, self.sequence);
        self.memory.write_at(self.place(self.end), [&block.0, data])?;
        self.end += entry.space();
        self.sequence += 1;
        self.count(entry, self.end, self.sequence);
        Ok(())
    }

    /// Counts a record to its slot.
    fn count(&mut self, entry: &Entry, end: u64, sequence: u64) {
        match self.slots.back_mut().filter(|slot| slot.number == entry.slot) {
            Some(slot) => {
                (slot.end, slot.sequence) = (end, sequence);
                slot.bytes += entry.bytes();
            }
            None => {
                let (number, bytes) = (entry.slot, entry.bytes());
                self.slots.push_back(Slot { number, end, sequence, bytes });
            }
        }
    }

    /// Reads the record behind the last one; `None` if there is none that is whole.
    fn next_record(&mut self) -> io::Result<Option<Found>> {
        let left = self.capacity - self.end % self.capacity;
        let mut bytes = [0; BLOCK];
        self.memory.read_at(self.place(self.end), &mut bytes)?;
        let Some(entry) = block::read_record(&Block(bytes), self.sequence) else { return Ok(None) };
        let used = self.end - self.state.head;
        if entry.space() > left || used + entry.space() > self.capacity {
            return Ok(None);
        }
        let found = Found { entry, at: self.end, sequence: self.sequence };
        if entry.bytes() > 0 && crc32c::crc32c(&self.data(&found)?) != entry.checksum {
            return Ok(None);
        }
        self.end += entry.space();
        self.sequence += 1;
        Ok(Some(found))
    }

    fn place(&self, position: u64) -> u64 {
        RECORDS_AT + position % self.capacity
    }

    /// Writes the state in the place of the older one.
    fn store(&mut self) -> io::Result<()> {
        self.state.count += 1;
        let at = BLOCK as u64 * (1 + self.state.count % 2);
        self.memory.write_at(at, [&self.state.block().0, &[]])
    }
}

impl Entry {
    /// The length of the data in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        if self.change == Change::Write { self.length } else { 0 }
    }

    /// The space in the ring in bytes.
    fn space(&self) -> u64 {
        match self.change {
            Change::Skip => self.length,
            _ => BLOCK as u64 + padded(self.bytes()),
        }
    }

    /// Whether a writer could have written the entry.
    fn is_valid(&self) -> bool {
        let ends = self.offset.checked_add(self.length).is_some();
        let block = BLOCK as u64;
        ends && match self.change {
            Change::Write => (1..=u64::from(MAX_EXTENT_BYTES)).contains(&self.length),
            Change::Trim | Change::WriteZeroes => self.length > 0,
            Change::Resize => true,
            Change::Skip => self.length >= block && self.length.is_multiple_of(block),
        }
    }
}

fn padded(bytes: u64) -> u64 {
    bytes.next_multiple_of(BLOCK as u64)
}
