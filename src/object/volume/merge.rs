//! Objects with few pages that are needed: the next checkpoint writes these pages again, together. So the number of objects
//! depends on the pages that are needed, and not on the checkpoints that have written them.

use std::collections::{BTreeMap, BTreeSet};

use super::access::Failure;
use super::checkpoint::MAX_CHANGED_PAGES;
use super::pages::OBJECT_BYTES;
use super::shared::Shared;
use super::usage::Chunk;
use crate::codec::PageId;

/// The pages that are written again after one look at the map, as a number of full objects.
const OBJECTS_AT_ONCE: u64 = 4;

/// The number of these pages. A checkpoint may have to read each of them, and no slot is applied meanwhile.
const PAGES_AT_ONCE: u64 = MAX_CHANGED_PAGES as u64;

/// The needed pages of an object.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Needed {
    bytes: u64,
    pages: u64,
}

/// A page that the volume needs.
#[derive(Debug, Clone, Copy)]
pub(super) enum Use {
    /// Of the usage.
    Usage(Chunk),
    /// Of the index, with its number.
    Index(u64),
    /// Of the map, below the page of the index with this number.
    Leaf(u64),
}

impl Shared {
    /// Visits all pages of the map and of the usage.
    pub(super) async fn visit_pages(
        &self,
        mut visit: impl FnMut(Use, PageId) + Send,
    ) -> Result<(), Failure> {
        let indices = {
            let state = self.lock();
            state.usage.pages().for_each(|(chunk, id)| visit(Use::Usage(chunk), id));
            let root = state.map.root();
            let pages = (0..).zip(root).filter_map(|(number, id)| Some((number, (*id)?)));
            pages.for_each(|(number, id)| visit(Use::Index(number), id));
            root.len() as u64
        };
        for number in 0..indices {
            self.with_map(|state| {
                let children = state.map.index(number)?.unwrap_or_default();
                children.iter().flatten().for_each(|id| visit(Use::Leaf(number), *id));
                Ok(())
            })
            .await?;
        }
        Ok(())
    }

    /// Lets the next checkpoint write the pages of the emptiest objects again, if there are many objects for the pages that
    /// are needed.
    pub(super) async fn merge_pages(&self) -> Result<(), Failure> {
        let mut needed: BTreeMap<(u64, u64), Needed> = BTreeMap::new();
        self.visit_pages(|_, id| {
            // A page that is a whole object has no length, and stays until it changes.
            if id.ancestor == 0 && id.length > 0 {
                let object = needed.entry((id.epoch, id.number)).or_default();
                object.bytes += u64::from(id.length);
                object.pages += 1;
            }
        })
        .await?;
        let full = OBJECT_BYTES.min(self.config.object_bytes) as u64;
        let victims = victims(&needed, full, self.config.spare_page_objects);
        if victims.is_empty() {
            return Ok(());
        }
        let is_victim = |id: PageId| {
            id.ancestor == 0 && id.length > 0 && victims.contains(&(id.epoch, id.number))
        };
        let (mut indices, mut chunks) = (BTreeSet::new(), Vec::new());
        self.visit_pages(|used, id| match used {
            _ if !is_victim(id) => {}
            Use::Usage(chunk) => chunks.push(chunk),
            Use::Index(number) | Use::Leaf(number) => drop(indices.insert(number)),
        })
        .await?;
        chunks.into_iter().for_each(|chunk| self.lock().usage.rewrite(chunk));
        for index in indices {
            self.with_map(|state| state.map.rewrite(index, is_victim)).await?;
        }
        Ok(())
    }
}

/// The emptiest objects, if there are more than `spare` besides twice the number that the needed pages would fill.
fn victims(needed: &BTreeMap<(u64, u64), Needed>, full: u64, spare: usize) -> BTreeSet<(u64, u64)> {
    let total: u64 = needed.values().map(|object| object.bytes).sum();
    let filled = usize::try_from(total / full + 1).unwrap_or(usize::MAX);
    if needed.len() <= filled.saturating_mul(2).saturating_add(spare) {
        return BTreeSet::new();
    }
    let mut objects: Vec<_> = needed.iter().map(|(object, needed)| (*needed, *object)).collect();
    objects.sort_unstable();
    let mut written = Needed::default();
    let few = objects.into_iter().take(needed.len() - filled).take_while(|(needed, _)| {
        written.bytes += needed.bytes;
        written.pages += needed.pages;
        written.bytes <= full.saturating_mul(OBJECTS_AT_ONCE) && written.pages <= PAGES_AT_ONCE
    });
    few.map(|(_, object)| object).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Objects of epoch 1 with these bytes, each with one page.
    fn objects(bytes: &[u64]) -> BTreeMap<(u64, u64), Needed> {
        let needed = bytes.iter().map(|bytes| Needed { bytes: *bytes, pages: 1 });
        (0..).zip(needed).map(|(number, needed)| ((1, number), needed)).collect()
    }

    #[test]
    fn few_objects_stay() {
        assert!(victims(&objects(&[1; 18]), 100, 16).is_empty());
        assert!(victims(&objects(&[100; 500]), 100, 0).is_empty());
    }

    #[test]
    fn the_emptiest_objects_are_merged() {
        let found = victims(&objects(&[10, 90, 5, 100, 20, 80]), 100, 0);
        assert!(found.is_empty(), "six objects, where four would be filled: {found:?}");
        let found = victims(&objects(&[10, 90, 5, 1, 2, 3, 4]), 100, 0);
        assert_eq!(found, [2, 3, 4, 5, 6].map(|number| (1, number)).into());
    }

    #[test]
    fn a_step_writes_a_limited_number_of_pages() {
        let found = victims(&objects(&[60; 100]), 100, 0);
        assert!(found.is_empty(), "they are 60 percent full");
        let found = victims(&objects(&[30; 100]), 100, 0);
        assert_eq!(found.len(), 13, "390 of 400 bytes");
        let mut many = objects(&[30; 100]);
        many.values_mut().for_each(|object| object.pages = 1000);
        assert_eq!(victims(&many, 100, 0).len(), 8, "8000 of 8192 pages");
    }
}
