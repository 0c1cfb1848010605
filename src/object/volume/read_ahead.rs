//! Read-ahead: what follows a sequential read is read in the background.

use std::collections::BTreeMap;
use std::ops::Range;

use super::access::Failure;
use super::ahead::Loaded;
use super::fetch::{Need, Reads};
use super::shared::{Shared, State};
use super::stored::Stored;
use crate::codec::Entry;

/// The steps that are in progress at the same time.
pub(super) const STEPS: usize = 3;

/// The reads of a step, which mostly has parts of two objects.
const OF_STEP: Reads = Reads { max_bytes: 8 << 20, in_flight: 2 };

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

    fn take(self, data: &[u8]) {
        self.shared.lock().ahead.end(self.shared.access.stored(&self.entry), data);
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
                    let range = state.ahead.next(self.size());
                    state.pause.running += usize::from(range.is_some());
                    range
                }
            };
            let range = match self.wait(next).await {
                Ok(range) => range,
                Err(failure) => return failure,
            };
            let _ = self.load_ahead(range).await;
            self.lock().ended();
        }
    }

    async fn load_ahead(&self, range: Range<u64>) -> Result<(), Failure> {
        let mut extents: BTreeMap<Stored, (Entry, u64)> = BTreeMap::new();
        for (number, part) in self.parts(range) {
            let base = number * self.page_bytes;
            let begin = base + u64::from(part.start);
            let end = base + u64::from(part.end);
            let found = self.with_map(|state| {
                let covered = state.tail.cover_of(begin..end);
                let Some(page) = state.map.leaf(number)? else { return Ok(Vec::new()) };
                let mut found = Vec::new();
                for (range, in_tail) in covered {
                    if in_tail.is_none() {
                        let [first, last] = [range.start, range.end]
                            .map(|at| u32::try_from(at - base).unwrap_or(u32::MAX));
                        found.extend(
                            page.pieces(first..last).filter_map(|(_, entry)| entry.copied()),
                        );
                    }
                }
                Ok(found)
            });
            let found = found.await?.into_iter();
            extents.extend(found.map(|entry| (self.access.stored(&entry), (entry, base))));
        }
        let mut needs = Vec::new();
        for (stored, (entry, base)) in extents {
            if self.lock().ahead.begin(stored) {
                needs.push(Running { shared: self, entry, base });
            }
        }
        self.fetch(needs, OF_STEP).await
    }
}
