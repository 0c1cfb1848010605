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

/// The log objects of the volume, also those that only snapshots need. Uses about 50 bytes of memory for each.
pub(super) struct Table {
    objects: BTreeMap<Position, Object>,
    /// The objects to whose data the map does not refer, and since which slot.
    dead: BTreeMap<Position, Position>,
    pages: BTreeMap<Chunk, PageId>,
    dirty: BTreeSet<Chunk>,
    /// Snapshots may need the objects up to this slot, so relocating their data frees nothing before these are removed.
    pinned: Option<Position>,
    /// The sums of the objects behind `pinned`, and of all.
    free: Sum,
    all: Sum,
    /// The slot that is being applied.
    now: Position,
    small: u32,
}

/// Space in bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Sum {
    /// Small objects count more than they are long.
    pub(super) space: u64,
    /// The data in the objects.
    pub(super) bytes: u64,
    /// The part of it to which the map refers.
    pub(super) live: u64,
}

/// An object that may be relocated. The emptiest is the first in the order.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    /// The needed data, in thousandths of `weight`.
    per_mille: u64,
    at: Position,
    live: u64,
    weight: u64,
}

impl Table {
    /// Makes an empty table. `object_bytes` is the length of a full object.
    pub(super) fn new(object_bytes: usize) -> Self {
        Self {
            objects: BTreeMap::new(),
            dead: BTreeMap::new(),
            pages: BTreeMap::new(),
            dirty: BTreeSet::new(),
            pinned: None,
            free: Sum::default(),
            all: Sum::default(),
            now: Position { epoch: 0, slot: 0 },
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
            self.insert(at, Object { bytes: used.bytes, live: used.live });
            if used.live == 0 {
                self.dead.insert(at, used.dead_since.unwrap_or(at));
            }
        }
    }

    fn insert(&mut self, at: Position, object: Object) {
        let (space, live) = (self.weight_of(object), u64::from(object.live));
        for sum in self.sums(at) {
            sum.space += space;
            sum.bytes += u64::from(object.bytes);
            sum.live += live;
        }
        self.objects.insert(at, object);
    }

    /// The sums that contain an object.
    fn sums(&mut self, at: Position) -> impl Iterator<Item = &mut Sum> {
        let is_free = self.pinned < Some(at);
        std::iter::once(&mut self.all).chain(is_free.then_some(&mut self.free))
    }

    /// Snapshots need the objects up to this slot that have data of the volume.
    pub(super) fn pin(&mut self, end: Option<Position>) {
        if self.pinned == end {
            return;
        }
        self.pinned = end;
        self.free = Sum::default();
        for (at, object) in &self.objects {
            if end < Some(*at) {
                self.free.space += u64::from(object.bytes.max(self.small));
                self.free.bytes += u64::from(object.bytes);
                self.free.live += u64::from(object.live);
            }
        }
    }

    /// Takes the bytes that the map of another table's volume refers to, which this volume has now, in slot `at`.
    pub(super) fn roll_back(&mut self, other: &Self, at: Position) {
        let mut objects = std::mem::take(&mut self.objects);
        (self.free, self.all) = (Sum::default(), Sum::default());
        let needed = other.objects.iter().filter(|(_, object)| object.live > 0);
        objects.extend(needed.clone().map(|(at, object)| (*at, *object)));
        for (position, mut object) in objects {
            let was_live = object.live > 0;
            object.live = other.objects.get(&position).map_or(0, |object| object.live);
            match object.live {
                0 if !was_live => {}
                0 => drop(self.dead.insert(position, at)),
                _ => drop(self.dead.remove(&position)),
            }
            self.insert(position, object);
            self.dirty.insert(chunk(position));
        }
    }

    /// Adds an object to whose data the map does not refer yet.
    pub(super) fn add(&mut self, at: Position, bytes: u32) {
        self.now = at;
        self.insert(at, Object { bytes, live: 0 });
        self.dead.insert(at, at);
        self.dirty.insert(chunk(at));
    }

    /// Counts bytes of an object to which the map refers now.
    pub(super) fn gain(&mut self, at: Position, bytes: u32) {
        if let Some(object) = self.objects.get_mut(&at) {
            object.live += bytes;
            if object.live > 0 {
                self.dead.remove(&at);
            }
            self.sums(at).for_each(|sum| sum.live += u64::from(bytes));
            self.dirty.insert(chunk(at));
        }
    }

    /// Counts bytes to which the map no longer refers.
    pub(super) fn lose(&mut self, freed: Freed) {
        if freed.ancestor != 0 {
            return;
        }
        if let Some(object) = self.objects.get_mut(&freed.object) {
            object.live = object.live.saturating_sub(freed.bytes);
            if object.live == 0 {
                self.dead.insert(freed.object, self.now);
            }
            let less = |sum: &mut Sum| sum.live = sum.live.saturating_sub(freed.bytes.into());
            self.sums(freed.object).for_each(less);
            self.dirty.insert(chunk(freed.object));
        }
    }

    /// Sets the bytes of an object, also of one that is not in the table. If the map refers to none of them, it has not
    /// since slot `now`, as far as is known.
    pub(super) fn correct(&mut self, at: Position, object: Object, now: Position) {
        self.remove(&[at]);
        self.insert(at, object);
        if object.live == 0 {
            self.dead.insert(at, now);
        }
        self.dirty.insert(chunk(at));
    }

    pub(super) fn contains(&self, at: Position) -> bool {
        self.objects.contains_key(&at)
    }

    /// The number of objects.
    pub(super) fn len(&self) -> usize {
        self.objects.len()
    }

    /// The space of all objects, and the bytes that the map refers to.
    pub(super) fn all(&self) -> Sum {
        self.all
    }

    /// The same of the objects that are not older than a snapshot.
    pub(super) fn free(&self) -> Sum {
        self.free
    }

    /// All objects.
    pub(super) fn objects(&self) -> impl Iterator<Item = (Position, Object)> {
        self.objects.iter().map(|(at, object)| (*at, *object))
    }

    /// Whether the map does not refer to an object below `end` that no snapshot needs.
    pub(super) fn has_dead(&self, end: Position) -> bool {
        self.dead.range(..end).next_back().is_some_and(|(at, _)| self.pinned < Some(*at))
    }

    /// The objects to whose data the map does not refer, without those of which `keep` says by their position and
    /// the slot since which the map does not refer to them that a snapshot needs them.
    pub(super) fn superfluous(
        &self,
        mut keep: impl FnMut(Position, Position) -> bool,
    ) -> Vec<Position> {
        let dead = self.dead.iter().filter(|(at, since)| !keep(**at, **since));
        dead.map(|(at, _)| *at).collect()
    }

    /// The objects below `end` that no snapshot needs and that are worth relocating, the emptiest first, with about
    /// `live` bytes together. None if the copies, `capacity` bytes in each new object, would take more than 3/4 of their
    /// space.
    pub(super) fn victims(
        &self,
        end: Position,
        live: u64,
        capacity: u64,
        skip: &BTreeSet<Position>,
    ) -> Vec<Position> {
        let newer = self.objects.range(..end).filter(|(at, _)| self.pinned < Some(**at));
        let mut found = self.sparsest_first(newer, skip);
        found.retain(|candidate| candidate.per_mille <= 750);
        let (mut copied, mut freed, mut victims) = (0, 0, Vec::new());
        for Candidate { at, live: bytes, weight, .. } in found {
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

    /// The objects that snapshots may need and that are worth relocating, the emptiest first, with about `live` bytes
    /// together. None if all that have data of the volume take at most `percent` percent of that data, and `spare`.
    /// Their space is free when the last snapshot is removed that is older than the copies.
    pub(super) fn older_victims(
        &self,
        live: u64,
        (percent, spare): (u64, u64),
        skip: &BTreeSet<Position>,
    ) -> Vec<Position> {
        let Some(pinned) = self.pinned else { return Vec::new() };
        let found = self.sparsest_first(self.objects.range(..=pinned), skip);
        let mut space: u64 = found.iter().map(|candidate| candidate.weight).sum();
        let mut needed: u64 = found.iter().map(|candidate| candidate.live).sum();
        let (mut copied, mut victims) = (0, Vec::new());
        for candidate in found {
            let limit = (needed / 100).saturating_mul(percent).saturating_add(spare);
            if copied >= live || space <= limit {
                break;
            }
            copied += candidate.live;
            space -= candidate.weight;
            needed -= candidate.live;
            victims.push(candidate.at);
        }
        victims
    }

    /// Those of `objects` to which the map refers, without those in `skip`.
    fn sparsest_first<'a>(
        &self,
        objects: impl Iterator<Item = (&'a Position, &'a Object)>,
        skip: &BTreeSet<Position>,
    ) -> Vec<Candidate> {
        let sparse = objects.filter(|(at, object)| object.live > 0 && !skip.contains(at));
        let mut found: Vec<Candidate> = sparse
            .map(|(at, object)| {
                let (live, weight) = (u64::from(object.live), self.weight_of(*object));
                Candidate { per_mille: live * 1000 / weight, at: *at, live, weight }
            })
            .collect();
        found.sort_unstable();
        found
    }

    /// Removes objects.
    pub(super) fn remove(&mut self, positions: &[Position]) {
        for at in positions {
            if let Some(object) = self.objects.remove(at) {
                self.dead.remove(at);
                let (space, live) = (self.weight_of(object), u64::from(object.live));
                for sum in self.sums(*at) {
                    sum.space -= space;
                    sum.bytes -= u64::from(object.bytes);
                    sum.live -= live;
                }
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
                dead_since: self.dead.get(at).copied(),
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
    pub(super) fn pages(&self) -> impl Iterator<Item = (Chunk, PageId)> {
        self.pages.iter().map(|(chunk, id)| (*chunk, *id))
    }

    /// Lets the next checkpoint write a page again.
    pub(super) fn rewrite(&mut self, chunk: Chunk) {
        self.dirty.insert(chunk);
    }
}

fn chunk(at: Position) -> Chunk {
    (at.epoch, at.slot / MAX_CHILDREN as u64)
}
