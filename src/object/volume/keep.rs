//! The use of the tail memory: what an earlier process has left in it, and the records of this one.

use std::io;
use std::sync::Arc;

use super::access::{Access, Failure};
use super::shared::{Shared, State};
use crate::codec::Extent;
use crate::name::Position;
use crate::tail_memory::{Change, Entry, Found, Memory, TailMemory, Unusable};

/// Memory that outlives the process, and whose it is.
#[derive(Clone)]
pub struct Keep {
    /// The memory. While the volume is open, nothing else uses it.
    pub memory: Arc<dyn Memory>,
    /// The owner: only openers with the same number use the records of each other.
    pub owner: u64,
}

/// The tail memory of an epoch that is about to be committed.
pub(super) struct Prepared {
    memory: TailMemory,
    /// The records that are not in the store.
    rest: Vec<Found>,
}

impl Keep {
    /// Finds the records that are not in the store. `before` is the end of the newest epoch that was opened, which is
    /// fixed. Must be called before `epoch` is committed.
    pub(super) fn prepare(
        &self,
        access: &Access,
        before: Option<Position>,
        epoch: u64,
    ) -> Result<Prepared, Failure> {
        let memory = Arc::clone(&self.memory);
        let opened = TailMemory::open(memory, access.volume, self.owner).map_err(failed)?;
        let (mut memory, found) = opened.map_err(unusable)?;
        let before = before.map(|cut| (cut.epoch, cut.slot));
        let rest = memory.prepare(found, before, epoch).map_err(failed)?.map_err(unusable)?;
        Ok(Prepared { memory, rest })
    }
}

impl Shared {
    /// Appends the records of earlier processes to the log, and keeps all later ones in the memory.
    pub(super) fn continue_with(&self, prepared: Prepared) -> Result<(), Failure> {
        let Prepared { mut memory, rest } = prepared;
        let mut state = self.lock();
        for found in &rest {
            if state.tail.open_bytes() >= self.config.object_bytes
                || state.tail.open_records() >= self.config.object_records
            {
                state.tail.close();
            }
            let data = memory.data(found).map_err(failed)?;
            memory.move_to(found, self.epoch, state.tail.next()).map_err(failed)?;
            self.repeat(&mut state, &found.entry, &data)?;
        }
        state.tail_memory = Some(memory);
        Ok(())
    }

    fn repeat(&self, state: &mut State, entry: &Entry, data: &[u8]) -> Result<(), Failure> {
        let Entry { change, offset, length, .. } = *entry;
        if !matches!(change, Change::Skip | Change::Resize) {
            self.check_range(offset, length)?;
        }
        match change {
            Change::Write => state.tail.write(&Extent::of(offset, data), data),
            Change::Trim => state.tail.zero(offset, length, true),
            Change::WriteZeroes => state.tail.zero(offset, length, false),
            Change::Resize if length >= self.size() => {
                self.extend(state, length)?;
                state.tail.resize(length);
            }
            Change::Resize => return Err(Failure::Unsupported("become smaller")),
            Change::Skip => {}
        }
        Ok(())
    }
}

impl State {
    /// Copies a record to the tail memory. It must be appended to the tail next.
    pub(super) fn keep(
        &mut self,
        epoch: u64,
        change: Change,
        range: (u64, u64),
        data: &[u8],
        sum: u32,
    ) {
        let slot = self.tail.next();
        let (offset, length) = range;
        if let Some(memory) = &mut self.tail_memory {
            memory.append(&Entry { change, epoch, slot, offset, length, checksum: sum }, data);
        }
    }

    /// A record was appended to the tail that the tail memory cannot have. The records behind it are not kept either,
    /// until all are confirmed.
    pub(super) fn interrupt_kept(&mut self) {
        self.tail_memory.iter_mut().for_each(TailMemory::interrupt);
    }

    /// Removes the records that are confirmed from the tail memory.
    pub(super) fn release_kept(&mut self) -> Result<(), Failure> {
        let confirmed = self.tail.confirmed;
        let is_all = confirmed == self.tail.next() && self.tail.open_records() == 0;
        match &mut self.tail_memory {
            Some(memory) => memory.release(confirmed, is_all).map_err(failed),
            None => Ok(()),
        }
    }

    /// Whether the tail memory has room for a record with this many bytes of data.
    pub(super) fn can_keep(&self, bytes: usize) -> bool {
        self.tail_memory.as_ref().is_none_or(|memory| memory.has_room(bytes))
    }
}

fn failed(error: io::Error) -> Failure {
    Failure::TailMemory(error.to_string())
}

fn unusable(why: Unusable) -> Failure {
    match why {
        Unusable::Stale(bytes) => Failure::Stale { bytes },
        Unusable::Damaged(what) => Failure::TailMemory(format!("its {what} is damaged")),
    }
}
