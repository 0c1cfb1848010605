//! Read-ahead: what follows a sequential read is read in the background.

use std::collections::BTreeMap;
use std::ops::Range;

use super::access::Failure;
use super::ahead::{Loaded, Step};
use super::content::Content;
use super::fetch::{Need, Reads};
use super::shared::{Shared, State};
use super::stored::Stored;
use crate::codec::Entry;

/// The steps that are in progress at the same time.
pub(super) const STEPS: usize = 4;

/// The reads of a step, which mostly has one object.
const OF_STEP: Reads = Reads { max_bytes: 12 << 20, in_flight: 2 };

/// The bytes of an object in the surroundings of a step from which on it is read as a whole. Volumes that were written at
/// random have a little of many objects there.
const LARGE_BYTES: u64 = if cfg!(test) { 1 << 10 } else { 1 << 20 };

/// The extents of an object in the surroundings of a step, in their order in the object.
struct Group {
    extents: BTreeMap<Stored, Found>,
    /// The offset of the first one in the volume.
    first: u64,
    /// The bytes of the extents in the range of the step, or before it.
    inside: u64,
    /// The bytes behind it.
    behind: u64,
}

impl Group {
    fn new(first: u64) -> Self {
        Self { extents: BTreeMap::new(), first, inside: 0, behind: 0 }
    }

    /// Whether this step reads the extent at `at`: those in its range, and instead of these all or none of an object that has
    /// much. The next step reads such an object if most of it is behind the range, and all of it is in the surroundings of
    /// that step, which begin at least as far before it as those of this step end behind it.
    fn is_for(&self, step: &Step, at: u64) -> bool {
        let Step { range, surroundings } = step;
        if self.inside + self.behind < LARGE_BYTES {
            return range.contains(&at);
        }
        let next = range.end.saturating_sub(surroundings.end - range.end);
        self.inside >= self.behind || self.first < next
    }
}

/// An extent in the surroundings of a step.
struct Found {
    entry: Entry,
    /// The first byte of the entry's page.
    base: u64,
    /// The offset of its first part in the volume.
    at: u64,
}

/// The choice of a step. Ends with it.
struct Choice<'a>(&'a Shared);

impl Drop for Choice<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.ahead.begun();
        state.changed();
    }
}

/// An extent that is read ahead. If it is dropped before it has the content, requests no longer wait for it.
struct Running<'a> {
    shared: &'a Shared,
    entry: Entry,
    /// The first byte of the entry's page.
    base: u64,
}

impl Need for Running<'_> {
    fn entry(&self) -> &Entry {
        &self.entry
    }

    fn base(&self) -> u64 {
        self.base
    }

    fn take(self, content: Content) {
        let (stored, content) = (self.shared.access.stored(&self.entry), content.into_kept());
        self.shared.lock().ahead.end(stored, content);
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let stored = self.shared.access.stored(&self.entry);
        let mut state = self.shared.lock();
        if matches!(state.ahead.get(&stored, false), Some(Loaded::Running)) {
            state.ahead.remove(&stored);
        }
        state.changed();
    }
}

impl Shared {
    /// Counts a read, and starts to read ahead if it is sequential.
    pub(super) fn note_read(&self, offset: u64, length: u64) {
        let mut state = self.lock();
        if state.ahead.note(offset, length) {
            state.changed();
        }
    }

    /// Reads ahead until the volume fails. An error ends only a step: requests read the range themselves.
    pub(super) async fn read_ahead(&self) -> Failure {
        loop {
            let next = |state: &mut State| match state.pause.is_wanted {
                true => None,
                false => {
                    let step = state.ahead.next(self.size());
                    state.pause.running += usize::from(step.is_some());
                    step
                }
            };
            let step = match self.wait(next).await {
                Ok(step) => step,
                Err(failure) => return failure,
            };
            let _ = self.load_ahead(step).await;
            self.lock().ended();
        }
    }

    async fn load_ahead(&self, step: Step) -> Result<(), Failure> {
        let choice = Choice(self);
        let mut objects: BTreeMap<_, Group> = BTreeMap::new();
        for (number, part) in self.parts(step.surroundings.clone()) {
            let base = number * self.page_bytes;
            let range = base + u64::from(part.start)..base + u64::from(part.end);
            for (at, entry) in self.extents_behind_the_tail(number, range).await? {
                let stored = self.access.stored(&entry);
                let group = objects.entry(stored.object()).or_insert_with(|| Group::new(at));
                let is_inside = at < step.range.end;
                let bytes = if is_inside { &mut group.inside } else { &mut group.behind };
                *bytes += u64::from(entry.length);
                group.extents.entry(stored).or_insert(Found { entry, base, at });
            }
        }
        let mut needs = Vec::new();
        for group in objects.values() {
            for (stored, found) in &group.extents {
                if group.is_for(&step, found.at) && self.lock().ahead.begin(*stored) {
                    needs.push(Running { shared: self, entry: found.entry, base: found.base });
                }
            }
        }
        drop(choice);
        self.fetch(needs, OF_STEP).await
    }

    /// Returns the entries of a range of the page `number` that are not covered by the tail of the log, with their offsets.
    async fn extents_behind_the_tail(
        &self,
        number: u64,
        range: Range<u64>,
    ) -> Result<Vec<(u64, Entry)>, Failure> {
        let base = number * self.page_bytes;
        self.with_map(|state| {
            let covered = state.tail.cover_of(range.clone());
            let Some(page) = state.map.leaf(number)? else { return Ok(Vec::new()) };
            let mut found = Vec::new();
            for (range, _) in covered.into_iter().filter(|(_, in_tail)| in_tail.is_none()) {
                let [first, last] =
                    [range.start, range.end].map(|at| u32::try_from(at - base).unwrap_or(u32::MAX));
                let pieces = page.pieces(first..last);
                let entries = pieces
                    .filter_map(|(piece, entry)| Some((base + u64::from(piece.start), *entry?)));
                found.extend(entries);
            }
            Ok(found)
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_is_read_by_the_step_that_has_most_of_it() {
        let step = Step { range: 100_000..200_000, surroundings: 50_000..250_000 };
        let group = |first, inside, behind| Group { inside, behind, ..Group::new(first) };
        let most_inside = group(140_000, 60_000, 20_000);
        assert!(most_inside.is_for(&step, 140_000) && most_inside.is_for(&step, 210_000));
        let most_behind = group(170_000, 30_000, 50_000);
        assert!(!most_behind.is_for(&step, 170_000) && !most_behind.is_for(&step, 210_000));
        let out_of_reach = group(140_000, 30_000, 50_000);
        assert!(out_of_reach.is_for(&step, 140_000), "the next step does not see its begin");
        let small = group(60_000, LARGE_BYTES / 4, LARGE_BYTES / 2);
        assert!(small.is_for(&step, 199_999));
        assert!(!small.is_for(&step, 60_000) && !small.is_for(&step, 200_000));
    }
}
