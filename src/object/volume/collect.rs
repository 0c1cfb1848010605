//! The collector: it relocates what is left of sparse objects, and deletes what nothing needs.
//!
//! A relocation is a record of the log like any other. Deletions follow when the base record of a checkpoint
//! that does not need the object is confirmed. `sweep` finds the rest.
//!
//! Copies are limited by a budget, unless the space has grown so much that it matters more than the requests beside the
//! copies.

use std::collections::BTreeSet;

use super::access::Failure;
use super::check::is_defect;
use super::request::SECTOR_BYTES;
use super::shared::{Shared, State};
use super::sweep::Reach;
use crate::codec::{Entry, LogObject, MAX_EXTENT_BYTES, Source};
use crate::map::place_of;
use crate::name::{Name, Position};

/// Above the limit of the space by this many percent of the needed data, and one object, copies are urgent: they do not
/// wait for the budget.
const URGENT_PERCENT: u64 = 50;

/// Objects that snapshots may need may take this many times the limit of the space. A copy of their data frees nothing
/// before these snapshots are removed, so it adds to the space until then: at most half of what was overwritten.
const OLDER: u64 = 2;

/// What the collector does next.
enum Work {
    Delete(Name),
    Relocate(Vec<Position>),
    Sweep(Reach),
    /// Sweep the tokens of earlier writers.
    Tokens,
}

/// What follows while a copy waits for the budget.
enum Turn {
    Copy,
    Delete(Name),
    Stop,
}

/// What the collector remembers.
#[derive(Default)]
struct Memory {
    /// Objects that were relocated, or could not be read.
    done: BTreeSet<Position>,
    /// The number of checkpoints at which the next sweep is due.
    sweep_at: u64,
    /// The sweep of the tokens of earlier writers was begun, or none of them matters.
    has_swept_tokens: bool,
    /// A sweep of the own epoch has failed because of lost or damaged objects. The next one that is due repeats it.
    is_left: bool,
    /// A search for sparse objects has found none. The next one is due when the space has reached the first
    /// number, or the number of checkpoints is another one: a search looks at all objects.
    fruitless: Option<(u64, u64)>,
    /// The number of checkpoints at which a search among the objects that snapshots may need has found none.
    fruitless_older: Option<u64>,
}

/// A part of an object that the map refers to.
struct Live {
    /// The first byte in the volume.
    offset: u64,
    entry: Entry,
}

impl Shared {
    /// Collects until the volume fails. An error of the store only delays it.
    pub(super) async fn collect(&self) -> Failure {
        let mut memory = Memory { sweep_at: 1, ..Memory::default() };
        let mut failures = 0;
        loop {
            let work = match self.wait(|state| self.next_work(state, &mut memory)).await {
                Ok(work) => work,
                Err(failure) => return failure,
            };
            let done = match work {
                Work::Delete(name) => self.delete(name).await,
                Work::Relocate(victims) => self.relocate_all(&victims, &mut memory).await,
                Work::Sweep(reach) => self.sweep_and_merge(reach, &mut memory).await,
                // If it fails, the next sweep of everything repeats it.
                Work::Tokens => self.sweep_tokens().await,
            };
            self.lock().ended();
            match done {
                Ok(()) => failures = 0,
                Err(Failure::Fenced) => return Failure::Fenced,
                Err(_) => {
                    failures += 1;
                    self.access.back_off(failures).await;
                }
            }
        }
    }

    /// Deletes what nothing refers to, and merges objects with few pages.
    async fn sweep_and_merge(&self, reach: Reach, memory: &mut Memory) -> Result<(), Failure> {
        let swept = self.sweep(reach).await;
        if let (Err(failure), Reach::Own(_)) = (&swept, reach) {
            match is_defect(failure) {
                // Repeated at once, it would keep the collector from everything else.
                true => memory.is_left = true,
                false => self.lock().checkpoints.has_orphans = true,
            }
        }
        swept?;
        self.merge_pages().await
    }

    fn next_work(&self, state: &mut State, memory: &mut Memory) -> Option<Work> {
        if state.pause.is_wanted {
            return None;
        }
        let work = self.work(state, memory);
        state.pause.running += usize::from(work.is_some());
        work
    }

    fn work(&self, state: &mut State, memory: &mut Memory) -> Option<Work> {
        if let Some(name) = state.garbage.permitted.pop_front() {
            return Some(Work::Delete(name));
        }
        // Snapshots that are taken later have no earlier tokens.
        if !std::mem::replace(&mut memory.has_swept_tokens, true)
            && state.snapshots.existing().next().is_some()
        {
            return Some(Work::Tokens);
        }
        let checkpoints = &mut state.checkpoints;
        let is_due = checkpoints.has_orphans || checkpoints.count >= memory.sweep_at;
        if checkpoints.base.is_some() && is_due && !state.snapshots.is_rolled_back() {
            memory.sweep_at = checkpoints.count + self.config.sweep_checkpoints;
            let has_orphans = std::mem::take(&mut checkpoints.has_orphans);
            let is_left = std::mem::take(&mut memory.is_left);
            let is_own = has_orphans || is_left || !checkpoints.pages.are_known();
            return Some(Work::Sweep(match is_own {
                true => Reach::Own(state.snapshots.confirmed()),
                false => Reach::Earlier,
            }));
        }
        if !state.budget.is_open() && !self.is_urgent(state) {
            return None;
        }
        let victims = self.newer_victims(state, memory);
        victims.or_else(|| self.older_victims(state, memory)).map(Work::Relocate)
    }

    /// Sparse objects that no snapshot needs, if there is too much garbage in such objects.
    fn newer_victims(&self, state: &mut State, memory: &mut Memory) -> Option<Vec<Position>> {
        let (weight, spare) = (state.usage.free().space, self.spare());
        let count = state.checkpoints.count;
        let is_known = |(space, at)| weight < space && count == at;
        if weight <= self.space_limit(state, 0) || memory.fruitless.is_some_and(is_known) {
            return None;
        }
        memory.done.retain(|at| state.usage.contains(*at));
        let end = self.position(state.tail.first);
        let victims = state.usage.victims(end, spare, self.capacity(), &memory.done);
        memory.fruitless = victims.is_empty().then_some((weight + spare / 4, count));
        if victims.is_empty() {
            // What is dead already goes with the next checkpoint.
            let is_any_dead = state.usage.has_dead(end) && state.tail.first > 1;
            if is_any_dead && !state.checkpoints.wanted {
                state.checkpoints.wanted = true;
                state.changed();
            }
            return None;
        }
        Some(victims)
    }

    /// Sparse objects that snapshots may need, if there is too much in them that the volume does not need.
    fn older_victims(&self, state: &State, memory: &mut Memory) -> Option<Vec<Position>> {
        let count = state.checkpoints.count;
        if memory.fruitless_older == Some(count) {
            return None;
        }
        memory.done.retain(|at| state.usage.contains(*at));
        let percent = self.config.max_space_percent.saturating_mul(OLDER);
        let spare = self.spare();
        let victims = state.usage.older_victims(spare, (percent, spare), &memory.done);
        memory.fruitless_older = victims.is_empty().then_some(count);
        (!victims.is_empty()).then_some(victims)
    }

    /// The space of small volumes, for which the limit is too small. In bytes.
    fn spare(&self) -> u64 {
        u64::try_from(self.config.object_bytes).unwrap_or(u64::MAX)
    }

    /// The space of log objects from which the collector relocates data, or if `more` percent of the needed data, and one
    /// object, are added to it. In bytes.
    fn space_limit(&self, state: &State, more: u64) -> u64 {
        let spare = if more > 0 { 2 * self.spare() } else { self.spare() };
        let percent = self.config.max_space_percent.saturating_add(more);
        (state.usage.free().live / 100).saturating_mul(percent).saturating_add(spare)
    }

    /// Whether there is so much superfluous data that copies do not wait for the budget.
    fn is_urgent(&self, state: &State) -> bool {
        state.usage.free().space > self.space_limit(state, URGENT_PERCENT)
    }

    /// Waits until the budget allows a copy of this many bytes, and deletes meanwhile what may be deleted. Returns false
    /// if the volume is paused first.
    async fn may_copy(&self, bytes: u64) -> Result<bool, Failure> {
        loop {
            let turn = self
                .wait(|state| {
                    let is_urgent = self.is_urgent(state);
                    if state.budget.take(bytes, is_urgent) {
                        return Some(Turn::Copy);
                    }
                    if state.pause.is_wanted {
                        return Some(Turn::Stop);
                    }
                    state.garbage.permitted.pop_front().map(Turn::Delete)
                })
                .await?;
            match turn {
                Turn::Copy => return Ok(true),
                Turn::Stop => return Ok(false),
                Turn::Delete(name) => self.delete(name).await?,
            }
        }
    }

    /// Deletes an object that may be deleted.
    async fn delete(&self, name: Name) -> Result<(), Failure> {
        let deleted = self.access.delete(name).await;
        if deleted.is_err() {
            self.lock().garbage.permitted.push_back(name);
        }
        deleted
    }

    /// The data that relocations put at least into an object.
    fn capacity(&self) -> u64 {
        let half = self.config.object_bytes as u64 / 2;
        let extent = self.page_bytes.min(MAX_EXTENT_BYTES.into()).min(half);
        let records = self.config.object_records as u64 * SECTOR_BYTES;
        (self.config.object_bytes as u64 - extent).min(records).max(1)
    }

    async fn relocate_all(&self, victims: &[Position], memory: &mut Memory) -> Result<(), Failure> {
        for victim in victims {
            match self.relocate(*victim).await {
                // Reads of its data report the object. It stays for a repair.
                Ok(true) | Err(Failure::Damaged { .. } | Failure::Lost(_)) => {}
                // It is a victim again after the pause.
                Ok(false) => break,
                // It is a victim again later.
                Err(failure) => return Err(failure),
            }
            memory.done.insert(*victim);
        }
        let mut state = self.lock();
        state.tail.flush_wanted = state.tail.open_records() > 0;
        state.changed();
        Ok(())
    }

    /// Appends copies of what the map refers to in an object. Returns false if the volume is paused before the budget
    /// allows all of them.
    async fn relocate(&self, victim: Position) -> Result<bool, Failure> {
        let name = Name::Slot(victim);
        let identity = self.access.identity(victim.epoch, victim.slot);
        let decode = |bytes: &[u8]| LogObject::decode(identity, bytes);
        let Some(object) = self.access.decode(name, decode).await? else {
            return Err(self.lost_now(victim).await);
        };
        let header = object.encode().len() as u64;
        let live = self.live_parts(victim, &object).await?;
        let stored = |live: &Live| self.access.packing.stored(&live.entry);
        let Some(begin) = live.iter().map(|live| stored(live).start).min() else { return Ok(true) };
        let end = live.iter().map(|live| stored(live).end).max().unwrap_or(begin);
        let end = end.min(header + self.access.packing.stored_bytes(&object));
        let Some(bytes) = self.access.read(name, begin..end).await? else {
            return Err(self.lost_now(victim).await);
        };
        for part in live {
            let entry = part.entry;
            let [from, to] = [stored(&part).start, stored(&part).end]
                .map(|at| usize::try_from(at - begin).unwrap_or(usize::MAX));
            let extent = bytes.get(from..to).unwrap_or_default();
            let base = part.offset - u64::from(entry.offset);
            let extent = self.access.unpack(&entry, base, extent).await?;
            let data = &extent[entry.skip as usize..][..entry.length as usize];
            let at = place_of(&entry, entry.offset).at;
            let from = Source { object: victim, at };
            if !self.may_copy(data.len() as u64).await? {
                return Ok(false);
            }
            self.admit(data.len()).await?;
            self.lock().tail.relocate(part.offset, data, from);
        }
        Ok(true)
    }

    /// Returns why a victim is missing. It may have been overwritten and deleted meanwhile.
    async fn lost_now(&self, victim: Position) -> Failure {
        match self.lock().usage.contains(victim) {
            true => {}
            false => return Failure::Lost(Name::Slot(victim)),
        }
        self.lost(Name::Slot(victim)).await
    }

    /// Returns the parts of an object that the map refers to.
    async fn live_parts(&self, victim: Position, object: &LogObject) -> Result<Vec<Live>, Failure> {
        let mut live = Vec::new();
        for (_, extent) in object.extents() {
            let range = extent.offset..extent.offset + u64::from(extent.length);
            for (number, part) in self.parts(range) {
                let entries = self
                    .with_map(|state| {
                        let Some(page) = state.map.leaf(number)? else { return Ok(Vec::new()) };
                        let found = page.pieces(part.clone()).filter_map(|(piece, entry)| {
                            let entry = entry
                                .filter(|entry| entry.ancestor == 0 && entry.object == victim)?;
                            let skip = entry.skip + (piece.start - entry.offset);
                            let length = piece.end - piece.start;
                            Some(Entry { offset: piece.start, length, skip, ..*entry })
                        });
                        Ok(found.collect())
                    })
                    .await?;
                let base = number * self.page_bytes;
                live.extend(
                    entries
                        .into_iter()
                        .map(|entry| Live { offset: base + u64::from(entry.offset), entry }),
                );
            }
        }
        // A range that the object has twice was found twice.
        live.sort_by_key(|part| part.offset);
        live.dedup_by_key(|part| part.offset);
        Ok(live)
    }
}
