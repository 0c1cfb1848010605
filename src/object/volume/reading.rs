//! Reads: the tail of the log, then what was read ahead, then the cache and the store.

use std::collections::BTreeMap;

use super::access::Failure;
use super::ahead::Loaded;
use super::content::Content;
use super::fetch::{Need, OF_REQUEST, READS_IN_FLIGHT};
use super::shared::{Shared, State};
use super::stored::Stored;
use super::table::Missing;
use super::tasks::{Part, all};
use crate::cache::{Key, Step};
use crate::codec::Entry;

/// How often a read looks the range up again because its object was deleted.
const MAX_LOOKUPS: u32 = 16;

/// The bytes of a request that are read at the same time.
const SPAN_BYTES: usize = 4 << 20;

/// Parts of extents in the order of their positions in the buffer.
type Places = Vec<Place>;

/// A part of an extent that a request needs.
#[derive(Debug)]
struct Place {
    /// The position in the buffer.
    at: usize,
    entry: Entry,
    /// The first byte of the entry's page.
    base: u64,
}

/// A range that was looked up: what of it the cache may have.
#[derive(Debug)]
pub struct Found {
    offset: u64,
    length: u64,
    places: Vec<(Place, Key)>,
}

/// A part of an extent, and where its bytes go.
struct Piece<'a> {
    entry: Entry,
    base: u64,
    target: &'a mut [u8],
}

/// An extent with the parts that a request needs.
struct Wanted<'a>(Vec<Piece<'a>>);

impl Need for Wanted<'_> {
    fn entry(&self) -> &Entry {
        &self.0[0].entry
    }

    fn base(&self) -> u64 {
        self.0[0].base
    }

    fn take(self, content: Content) {
        for Piece { entry, target, .. } in self.0 {
            target.copy_from_slice(&content[entry.skip as usize..][..entry.length as usize]);
        }
    }
}

impl Shared {
    pub(super) async fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), Failure> {
        self.check_range(offset, buffer.len() as u64)?;
        self.note_read(offset, buffer.len() as u64);
        self.read_parts(offset, buffer).await
    }

    /// Reads a range that was checked, and reads nothing ahead.
    pub(super) async fn read_parts(&self, offset: u64, buffer: &mut [u8]) -> Result<(), Failure> {
        let mut offset = offset;
        for part in buffer.chunks_mut(SPAN_BYTES) {
            self.read_span(offset, part).await?;
            offset += part.len() as u64;
        }
        Ok(())
    }

    async fn read_span(&self, offset: u64, buffer: &mut [u8]) -> Result<(), Failure> {
        let mut lookups = 0;
        loop {
            let entries = self.look_up_pages(offset, buffer).await?;
            match self.fill(entries, buffer).await {
                // The collector has relocated the data, or a trim has removed it.
                Err(Failure::Lost(_)) if lookups < MAX_LOOKUPS => lookups += 1,
                Err(Failure::Lost(name)) => return Err(self.lost(name).await),
                other => return other,
            }
        }
    }

    /// Copies what is in the tail to `buffer`, and returns the places of the rest, in order.
    async fn look_up_pages(&self, offset: u64, buffer: &mut [u8]) -> Result<Places, Failure> {
        let mut parts: Vec<Part<'_, Result<Places, Failure>>> = Vec::new();
        let (mut at, mut rest) = (0, buffer);
        while !rest.is_empty() {
            let begin = offset + at as u64;
            let in_page = self.page_bytes - begin % self.page_bytes;
            let length = usize::try_from(in_page).unwrap_or(usize::MAX).min(rest.len());
            let (part, next) = rest.split_at_mut(length);
            parts.push(Box::pin(async move {
                let entries = self.look_up(begin, part).await?;
                Ok(entries.into_iter().map(|place| Place { at: at + place.at, ..place }).collect())
            }));
            (at, rest) = (at + length, next);
        }
        Ok(all(parts, READS_IN_FLIGHT).await?.into_iter().flatten().collect())
    }

    /// The same within one page.
    async fn look_up(&self, offset: u64, buffer: &mut [u8]) -> Result<Places, Failure> {
        self.with_map(|state| self.look_up_in(state, offset, buffer)).await
    }

    fn look_up_in(
        &self,
        state: &mut State,
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<Places, Missing> {
        let number = offset / self.page_bytes;
        let base = number * self.page_bytes;
        let State { map, tail, .. } = state;
        let page = map.leaf(number)?;
        let mut entries = Vec::new();
        for range in tail.read(offset, buffer) {
            let [begin, end] = [range.start, range.end].map(|at| at - offset);
            let [begin, end] = [begin, end].map(|at| usize::try_from(at).unwrap_or(usize::MAX));
            let Some(page) = page else {
                buffer[begin..end].fill(0);
                continue;
            };
            let [first, last] = [range.start, range.end].map(|at| at - base);
            let [first, last] = [first, last].map(|at| u32::try_from(at).unwrap_or(u32::MAX));
            for (piece, entry) in page.pieces(first..last) {
                let (length, at) =
                    (piece.end - piece.start, begin + (piece.start - first) as usize);
                let Some(entry) = entry else {
                    buffer[at..at + length as usize].fill(0);
                    continue;
                };
                let skip = entry.skip + (piece.start - entry.offset);
                let entry = Entry { offset: piece.start, length, skip, ..*entry };
                entries.push(Place { at, entry, base });
            }
        }
        Ok(entries)
    }

    /// Reads what the lookups of these offsets most probably need of the map. Nothing in the loop waits for what was read, so the
    /// processor loads it for many offsets at the same time.
    pub(super) fn load_entries(&self, offsets: impl Iterator<Item = u64>) {
        let mut state = self.lock();
        let loaded = offsets.fold(0, |loaded, offset| {
            let page = state.map.leaf(offset / self.page_bytes).ok().flatten();
            let at = u32::try_from(offset % self.page_bytes).unwrap_or(u32::MAX);
            loaded ^ page.map_or(0, |page| page.load_entries(at))
        });
        std::hint::black_box(loaded);
    }

    /// Looks a range within one page up if the map has it in memory, copies what the tail has of it to `buffer`, and prepares
    /// the copies of the rest from the cache. Returns `None` if more is needed; `buffer` may have changed then.
    pub(super) fn look_up_at_once(&self, offset: u64, buffer: &mut [u8]) -> Option<Found> {
        let length = buffer.len() as u64;
        let is_in_page = offset % self.page_bytes + length <= self.page_bytes;
        if !is_in_page || self.check_range(offset, length).is_err() {
            return None;
        }
        let places = {
            let mut state = self.lock();
            state.check().ok()?;
            let places = self.look_up_in(&mut state, offset, buffer).ok()?;
            let is_ahead = |place: &Place| state.ahead.has(&self.access.stored(&place.entry));
            if state.ahead.bytes() > 0 && places.iter().any(is_ahead) {
                return None;
            }
            places
        };
        let with_key = |place: Place| {
            let access = self.access.of(place.entry.ancestor).ok()?;
            let key = self.access.stored(&place.entry).key(access.cached_volume());
            if access.packing.is_plain() {
                access.prepare(key, place.entry.skip, Step::Place);
            }
            Some((place, key))
        };
        let places: Option<Vec<_>> = places.into_iter().map(with_key).collect();
        Some(Found { offset, length, places: places? })
    }

    /// Continues to prepare the copies, after all reads of a group were looked up.
    pub(super) fn prepare(&self, found: &Found) {
        if self.access.packing.is_plain() {
            let places = found.places.iter();
            places
                .for_each(|(place, key)| self.access.prepare(*key, place.entry.skip, Step::Bytes));
        }
    }

    /// Copies what was looked up from the cache to `buffer`, if the cache has it at once. Returns false if not; `buffer` may
    /// have changed then.
    pub(super) fn copy_at_once(&self, found: &Found, buffer: &mut [u8]) -> bool {
        let is_read = found.places.iter().all(|(place, key)| self.copy_cached(place, *key, buffer));
        if is_read {
            self.note_read(found.offset, found.length);
        }
        is_read
    }

    /// Copies a part of an extent from the cache. Returns false if the cache does not have it at once.
    fn copy_cached(&self, place: &Place, key: Key, buffer: &mut [u8]) -> bool {
        let Place { at, entry, base } = place;
        let Ok(access) = self.access.of(entry.ancestor) else { return false };
        let target = &mut buffer[*at..*at + entry.length as usize];
        if access.packing.is_plain() && access.copy_cached(key, entry.skip, target) {
            return true;
        }
        access.cached_at_once(key, &mut |bytes| {
            let Some(data) = access.unpack_at_once(entry, *base, bytes) else { return false };
            target.copy_from_slice(&data[entry.skip as usize..][..target.len()]);
            true
        })
    }

    /// Reads the parts of extents to their positions in `buffer`.
    async fn fill(&self, entries: Places, buffer: &mut [u8]) -> Result<(), Failure> {
        let mut extents: BTreeMap<Stored, Wanted<'_>> = BTreeMap::new();
        let (mut at, mut rest) = (0, buffer);
        for Place { at: begin, entry, base } in entries {
            let (_, behind) = rest.split_at_mut(begin - at);
            let (target, next) = behind.split_at_mut(entry.length as usize);
            let wanted = extents.entry(self.access.stored(&entry)).or_insert(Wanted(Vec::new()));
            wanted.0.push(Piece { entry, base, target });
            (at, rest) = (begin + entry.length as usize, next);
        }
        let (mut loading, mut others) = (Vec::new(), Vec::new());
        for (stored, wanted) in extents {
            match self.ahead(&stored, wanted.0.last().map(|piece| &piece.entry)) {
                Some(Loaded::Ready(content)) => wanted.take(content),
                Some(Loaded::Running) => loading.push((stored, wanted)),
                None => others.push(wanted),
            }
        }
        self.fetch(others, OF_REQUEST).await?;
        let mut others = Vec::new();
        for (stored, wanted) in loading {
            match self.loaded(&stored).await? {
                Some(content) => wanted.take(content),
                None => others.push(wanted),
            }
        }
        self.fetch(others, OF_REQUEST).await
    }

    /// Returns an extent that was read ahead, or is being read. `last` is the last part of it that a request needs: with
    /// its end, the extent is not kept any longer.
    fn ahead(&self, stored: &Stored, last: Option<&Entry>) -> Option<Loaded> {
        let mut state = self.lock();
        let is_used = last.is_some_and(|last| last.skip + last.length == last.extent_length);
        state.ahead.get(stored, is_used)
    }

    /// Waits until an extent is no longer being read ahead.
    async fn loaded(&self, stored: &Stored) -> Result<Option<Content>, Failure> {
        self.wait(|state| match state.ahead.get(stored, false) {
            Some(Loaded::Running) => None,
            Some(Loaded::Ready(content)) => Some(Some(content)),
            None => Some(None),
        })
        .await
    }
}
