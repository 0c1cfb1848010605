//! How much of each log object the map refers to.

use std::collections::{BTreeMap, BTreeSet};

use crate::codec::{MAX_CHILDREN, PageId, Usage, Used};
use crate::map::Freed;
use crate::name::Position;

/// An object that is smaller counts as this, because each object costs a request and a place in the usage.
const SMALL_BYTES: usize = 64 << 10;

/// A page of the usage: the epoch of its objects, and their slots divided by `MAX_CHILDREN`.
pub(super) type Chunk = (u64, u64);

/// The bytes of a log object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Object {
    /// The length of the data.
    pub(super) bytes: u32,
    /// The bytes of it that the map refers to.
    pub(super) live: u32,
}

/// The log objects of the volume. Uses about 50 bytes of memory for each.
pub(super) struct Table {
    objects: BTreeMap<Position, Object>,
    pages: BTreeMap<Chunk, PageId>,
    dirty: BTreeSet<Chunk>,
    weight: u64,
    live: u64,
    small: u32,
}

impl Table {
    /// Makes an empty table. `object_bytes` is the length of a full object.
    pub(super) fn new(object_bytes: usize) -> Self {
        Self {
            objects: BTreeMap::new(),
            pages: BTreeMap::new(),
            dirty: BTreeSet::new(),
            weight: 0,
            live: 0,
            small: u32::try_from(object_bytes.min(SMALL_BYTES)).unwrap_or(u32::MAX),
        }
    }

    fn weight_of(&self, object: Object) -> u64 {
        object.bytes.max(self.small).into()
    }

    /// Takes a page that a checkpoint names.
    pub(super) fn load(&mut self, id: PageId, page: &Usage) {
        for used in &page.objects {
            let at = Position { epoch: page.epoch, slot: used.slot };
            self.pages.insert(chunk(at), id);
            let object = Object { bytes: used.bytes, live: used.live };
            self.weight += self.weight_of(object);
            self.live += u64::from(object.live);
            self.objects.insert(at, object);
        }
    }

    /// Adds an object to whose data the map does not refer yet.
    pub(super) fn add(&mut self, at: Position, bytes: u32) {
        let object = Object { bytes, live: 0 };
        self.weight += self.weight_of(object);
        self.objects.insert(at, object);
        self.dirty.insert(chunk(at));
    }

    /// Counts bytes of an object to which the map refers now.
    pub(super) fn gain(&mut self, at: Position, bytes: u32) {
        if let Some(object) = self.objects.get_mut(&at) {
            object.live += bytes;
            self.live += u64::from(bytes);
            self.dirty.insert(chunk(at));
        }
    }

    /// Counts bytes to which the map no longer refers.
    pub(super) fn lose(&mut self, freed: Freed) {
        if let Some(object) = self.objects.get_mut(&freed.object) {
            object.live = object.live.saturating_sub(freed.bytes);
            self.live = self.live.saturating_sub(freed.bytes.into());
            self.dirty.insert(chunk(freed.object));
        }
    }

    pub(super) fn contains(&self, at: Position) -> bool {
        self.objects.contains_key(&at)
    }

    /// The number of objects.
    pub(super) fn len(&self) -> usize {
        self.objects.len()
    }

    /// The bytes that the map refers to.
    pub(super) fn live(&self) -> u64 {
        self.live
    }

    /// The space of all objects in bytes; small ones count more than they are long.
    pub(super) fn weight(&self) -> u64 {
        self.weight
    }

    /// All objects.
    #[cfg(test)]
    pub(super) fn objects(&self) -> impl Iterator<Item = (Position, Object)> {
        self.objects.iter().map(|(at, object)| (*at, *object))
    }

    /// The objects below `end` to whose data the map does not refer.
    pub(super) fn dead(&self, end: Position) -> Vec<Position> {
        self.objects
            .range(..end)
            .filter(|(_, object)| object.live == 0)
            .map(|(at, _)| *at)
            .collect()
    }

    /// The objects below `end` that are worth relocating, the emptiest first, with about `live` bytes together.
    /// None if the copies, `capacity` bytes in each new object, would take more than 3/4 of their space.
    pub(super) fn victims(
        &self,
        end: Position,
        live: u64,
        capacity: u64,
        skip: &BTreeSet<Position>,
    ) -> Vec<Position> {
        let is_known = |at: &Position| skip.contains(at);
        let mut found: Vec<(u64, Position, u64, u64)> = self
            .objects
            .range(..end)
            .filter(|(at, object)| object.live > 0 && !is_known(at))
            .map(|(at, object)| {
                let (live, weight) = (u64::from(object.live), self.weight_of(*object));
                (live * 1000 / weight, *at, live, weight)
            })
            .filter(|(share, ..)| *share <= 750)
            .collect();
        found.sort_unstable();
        let (mut copied, mut freed, mut victims) = (0, 0, Vec::new());
        for (_, at, bytes, weight) in found {
            if copied >= live {
                break;
            }
            copied += bytes;
            freed += weight;
            victims.push(at);
        }
        let needed = copied.max(copied.div_ceil(capacity) * u64::from(self.small));
        match needed <= freed / 4 * 3 {
            true => victims,
            false => Vec::new(),
        }
    }

    /// Removes objects.
    pub(super) fn remove(&mut self, positions: &[Position]) {
        for at in positions {
            if let Some(object) = self.objects.remove(at) {
                self.weight -= self.weight_of(object);
                self.live -= u64::from(object.live);
                self.dirty.insert(chunk(*at));
            }
        }
    }

    /// Returns the pages that have changed, with their objects.
    pub(super) fn dirty(&self) -> Vec<(Chunk, Vec<Used>)> {
        let page = |(epoch, number): Chunk| {
            let slot = number * MAX_CHILDREN as u64;
            let end = Position { epoch, slot: slot + MAX_CHILDREN as u64 };
            let objects = self.objects.range(Position { epoch, slot }..end);
            let used = objects.map(|(at, object)| Used {
                slot: at.slot,
                bytes: object.bytes,
                live: object.live,
                dead_since: None,
            });
            ((epoch, number), used.collect())
        };
        self.dirty.iter().map(|chunk| page(*chunk)).collect()
    }

    /// Replaces a page after it was written. Returns the old one.
    pub(super) fn replace(&mut self, chunk: Chunk, id: Option<PageId>) -> Option<PageId> {
        self.dirty.remove(&chunk);
        match id {
            Some(id) => self.pages.insert(chunk, id),
            None => self.pages.remove(&chunk),
        }
    }

    /// The pages of the usage.
    pub(super) fn pages(&self) -> impl Iterator<Item = PageId> {
        self.pages.values().copied()
    }
}

fn chunk(at: Position) -> Chunk {
    (at.epoch, at.slot / MAX_CHILDREN as u64)
}
