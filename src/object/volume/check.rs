//! The check of a volume: whether everything that its map refers to exists and is intact. It changes nothing.

use std::collections::BTreeMap;
use std::ops::Range;

use super::Volume;
use super::access::Failure;
use super::fetch::READS_IN_FLIGHT;
use super::shared::Shared;
use super::tasks::{Part, all};
use crate::codec::{Damage, Entry, LogObject};
use crate::name::{Name, Position};

/// How much a check reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// The pages of the map, and of each log object the header and the last byte that the map refers to.
    Objects,
    /// All data, which is compared with its checksums.
    Data,
}

/// A range of the volume that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Defect {
    /// The range in bytes.
    pub range: Range<u64>,
    /// Why: an object is lost or damaged.
    pub failure: Failure,
}

/// A log object of the volume itself whose space is accounted wrongly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WrongUsage {
    /// The log object.
    pub object: Position,
    /// The bytes of it that the map refers to.
    pub live: u64,
    /// The same according to the accounting, which decides when the object is deleted.
    pub accounted: u64,
}

/// A check of one content. Needs about 100 bytes of memory for each log object.
#[derive(Debug)]
pub struct Check {
    depth: Depth,
    /// The log objects that were read, by generation and position, each up to which byte.
    objects: BTreeMap<(u8, Position), u64>,
    /// The bytes that the map refers to in each log object of the volume itself.
    live: BTreeMap<Position, u64>,
}

/// Entries of a page that need the same read.
struct Group {
    /// The entry whose extent ends last.
    entry: Entry,
    /// The first byte of the page.
    base: u64,
    ranges: Vec<Range<u64>>,
}

impl Check {
    /// Begins a check.
    pub fn new(depth: Depth) -> Self {
        Self { depth, objects: BTreeMap::new(), live: BTreeMap::new() }
    }

    /// The number of log objects that were read.
    pub fn objects(&self) -> usize {
        self.objects.len()
    }

    /// Checks the page `number` of the map, of [`Volume::map_pages`], with its data. Returns the ranges that cannot be
    /// read.
    ///
    /// # Errors
    /// Returns an error if the store fails.
    pub async fn page(&mut self, volume: &Volume, number: u64) -> Result<Vec<Defect>, Failure> {
        let shared = &volume.0;
        let base = number * shared.page_bytes;
        let entries = shared.with_map(|state| {
            Ok(state.map.leaf(number)?.map_or(Vec::new(), |page| page.entries().to_vec()))
        });
        let entries = match entries.await {
            Err(failure) if is_defect(&failure) => {
                let range = base..shared.size().min(base + shared.page_bytes);
                return Ok(vec![Defect { range, failure }]);
            }
            other => other?,
        };
        self.entries(volume, base, entries).await
    }

    /// Checks entries of the page that begins at `base`, with their data.
    pub(super) async fn entries(
        &mut self,
        volume: &Volume,
        base: u64,
        entries: Vec<Entry>,
    ) -> Result<Vec<Defect>, Failure> {
        let shared = &volume.0;
        for entry in entries.iter().filter(|entry| entry.ancestor == 0) {
            *self.live.entry(entry.object).or_default() += u64::from(entry.length);
        }
        let groups = self.groups(base, entries);
        let reads = groups.into_iter().map(|group| -> Part<'_, _> {
            let known = self.objects.get(&key(&group.entry)).copied();
            Box::pin(check_group(shared, self.depth, group, known))
        });
        let checked = all(reads, READS_IN_FLIGHT).await?;
        let mut defects = Vec::new();
        for (group, failure) in checked {
            match failure {
                None => {
                    let end = self.objects.entry(key(&group.entry)).or_default();
                    *end = end_of(shared, &group.entry)?.max(*end);
                }
                Some(failure) => defects.extend(
                    group
                        .ranges
                        .into_iter()
                        .map(|range| Defect { range, failure: failure.clone() }),
                ),
            }
        }
        defects.sort_by_key(|defect| defect.range.start);
        Ok(defects)
    }

    /// The log objects of the volume itself to which the map refers, with the number of bytes.
    pub(super) fn live(&self) -> &BTreeMap<Position, u64> {
        &self.live
    }

    /// Compares the accounting of the volume with its map. Valid if all pages were checked, in this state of the volume,
    /// and none of them has a defect.
    pub fn wrong_usage(&self, volume: &Volume) -> Vec<WrongUsage> {
        let state = volume.0.lock();
        let accounted: BTreeMap<Position, u64> =
            state.usage.objects().map(|(at, object)| (at, object.live.into())).collect();
        let positions = accounted.keys().chain(self.live.keys());
        let positions: std::collections::BTreeSet<Position> = positions.copied().collect();
        let compared = positions.into_iter().map(|object| WrongUsage {
            object,
            live: self.live.get(&object).copied().unwrap_or_default(),
            accounted: accounted.get(&object).copied().unwrap_or_default(),
        });
        compared.filter(|usage| usage.live != usage.accounted).collect()
    }

    /// Groups entries by what is read for them.
    fn groups(&self, base: u64, entries: Vec<Entry>) -> Vec<Group> {
        let mut groups: BTreeMap<(u8, Position, u32), Group> = BTreeMap::new();
        for entry in entries {
            let extent = if self.depth == Depth::Data { entry.stored_at } else { 0 };
            let key = (entry.ancestor, entry.object, extent);
            let group = groups.entry(key).or_insert(Group { entry, base, ranges: Vec::new() });
            let begin = base + u64::from(entry.offset);
            group.ranges.push(begin..begin + u64::from(entry.length));
            // The extents of an object do not overlap, so this is also the order of their ends.
            if entry.stored_at > group.entry.stored_at {
                group.entry = entry;
            }
        }
        groups.into_values().collect()
    }
}

/// Reads what a group needs. Returns the group with the defect that was found.
async fn check_group(
    shared: &Shared,
    depth: Depth,
    group: Group,
    known: Option<u64>,
) -> Result<(Group, Option<Failure>), Failure> {
    let checked = match depth {
        Depth::Data => shared.read_extent(&group.entry, group.base).await.map(drop),
        Depth::Objects => check_object(shared, &group.entry, known).await,
    };
    match checked {
        Ok(()) => Ok((group, None)),
        Err(failure) if is_defect(&failure) => Ok((group, Some(failure))),
        Err(failure) => Err(failure),
    }
}

/// Checks the header of an object that is not known yet, and that the object reaches up to the end of the extent.
async fn check_object(shared: &Shared, entry: &Entry, known: Option<u64>) -> Result<(), Failure> {
    let (name, end) = (Name::Slot(entry.object), end_of(shared, entry)?);
    let access = shared.access.of(entry.ancestor)?;
    if known.is_none() {
        let identity = access.identity(entry.object.epoch, entry.object.slot);
        let header = access.decode(name, |bytes| LogObject::decode(identity, bytes)).await?;
        header.ok_or(Failure::Lost(name))?;
    }
    if known.is_some_and(|known| known >= end) {
        return Ok(());
    }
    let last = access.read(name, end - 1..end).await?.ok_or(Failure::Lost(name))?;
    match last.len() {
        1 => Ok(()),
        _ => {
            let damage = Damage::Short(usize::try_from(end).unwrap_or(usize::MAX));
            Err(Failure::Damaged { name, range: Some(end - 1..end), damage })
        }
    }
}

fn key(entry: &Entry) -> (u8, Position) {
    (entry.ancestor, entry.object)
}

/// The end of the entry's extent in its object.
fn end_of(shared: &Shared, entry: &Entry) -> Result<u64, Failure> {
    Ok(shared.access.of(entry.ancestor)?.packing.stored(entry).end)
}

/// Whether an object is lost or damaged.
pub(super) fn is_defect(failure: &Failure) -> bool {
    matches!(failure, Failure::Lost(_) | Failure::Damaged { .. })
}

impl Volume {
    /// The number of pages of the map.
    pub fn map_pages(&self) -> u64 {
        self.0.size().div_ceil(self.0.page_bytes)
    }

    /// The range of the volume that a page of the map covers, in bytes.
    pub fn page_bytes(&self) -> u64 {
        self.0.page_bytes
    }
}
