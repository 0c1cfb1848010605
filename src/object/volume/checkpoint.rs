//! Confirmed slots become part of the map, and the map becomes durable in checkpoints.

use std::sync::Arc;

use super::access::{Failure, Put};
use super::shared::{Patience, Shared, State};
use super::table::split;
use super::tasks::{Part, all};
use super::usage::Chunk;
use crate::codec::{Checkpoint, Index, Leaf, MAX_CHILDREN, PageId, Record, Usage, Used};
use crate::name::{Name, Position};
use crate::rules::{Rule, applies};

/// The number of pages that are written at the same time.
const PAGES_IN_FLIGHT: usize = 16;

/// The number of changed map pages from which on a checkpoint is due. No slot is applied while it is written, and most of
/// the pages may have to be read first.
const MAX_CHANGED_PAGES: usize = 8192;

/// What the state asks for.
enum Step {
    Apply { number: u64, header_bytes: u32, records: Arc<[Record]> },
    Checkpoint(Position),
}

impl Shared {
    /// Applies confirmed slots in their order, and writes checkpoints between them.
    pub(super) async fn apply(&self) -> Failure {
        loop {
            if let Err(failure) = self.apply_next().await {
                self.fail(&failure);
                return failure;
            }
        }
    }

    async fn apply_next(&self) -> Result<(), Failure> {
        let step = self.wait(|state| self.step(state)).await?;
        self.take(step).await?;
        self.lock().ended();
        Ok(())
    }

    async fn take(&self, step: Step) -> Result<(), Failure> {
        match step {
            Step::Checkpoint(at) => self.checkpoint(at).await,
            Step::Apply { number, header_bytes, records } => {
                let at = self.position(number);
                self.apply_slot(at, header_bytes, &records, Patience::Background).await?;
                let mut state = self.lock();
                state.tail.applied();
                let mut is_new = false;
                for record in records.iter() {
                    if let Record::Base(at) = record {
                        let is_any_left = state.garbage.permit(*at);
                        state.checkpoints.base = state.checkpoints.base.max(Some(*at));
                        let is_any_freed = state.snapshots.confirm(*at);
                        state.checkpoints.has_orphans |= is_any_left || is_any_freed;
                        state.limit_collection();
                    } else {
                        is_new = true;
                    }
                }
                state.checkpoints.new_slots += u64::from(is_new);
                state.changed();
                Ok(())
            }
        }
    }

    fn step(&self, state: &mut State) -> Option<Step> {
        if state.pause.is_wanted {
            return None;
        }
        let step = self.next_step(state);
        state.pause.running += usize::from(step.is_some());
        step
    }

    fn next_step(&self, state: &mut State) -> Option<Step> {
        let (first, confirmed) = (state.tail.first, state.tail.confirmed);
        let is_due = state.checkpoints.wanted
            || state.checkpoints.new_slots >= self.config.checkpoint_slots
            || state.map.changed_pages() >= MAX_CHANGED_PAGES
            || state.map.dirty_bytes() > self.config.map_bytes / 2;
        if state.checkpoints.new_slots > 0 && is_due {
            return Some(Step::Checkpoint(self.position(first - 1)));
        }
        let slot = state.tail.slot(first).filter(|_| first < confirmed)?;
        let (header_bytes, records) = (slot.header_bytes, Arc::clone(&slot.records));
        Some(Step::Apply { number: first, header_bytes, records })
    }

    /// Writes the changed pages and a checkpoint that covers the log up to `at`. No slot is applied meanwhile.
    async fn checkpoint(&self, at: Position) -> Result<(), Failure> {
        {
            let mut state = self.lock();
            (state.checkpoints.wanted, state.checkpoints.new_slots) = (false, 0);
            state.snapshots.begin_checkpoint();
        }
        let indices = self.lock().map.dirty_indices();
        for index in indices {
            self.write_index(index, at).await?;
        }
        {
            let mut state = self.lock();
            let State { usage, snapshots, .. } = &mut *state;
            let dead = usage.superfluous(|slot, dead| snapshots.keep_slot(slot, dead, at));
            usage.remove(&dead);
            state.garbage.supersede(dead.into_iter().map(Name::Slot));
        }
        self.write_usage(at).await?;
        let root = {
            let state = self.lock();
            Checkpoint {
                identity: self.access.identity(at.epoch, at.slot),
                nonce: self.access.nonce,
                size: state.applied_size,
                next_page: state.checkpoints.next_page,
                index: state.map.root().to_vec(),
                usage: state.usage.pages().map(Some).collect(),
                snapshots: state.snapshots.table(at),
            }
        };
        self.put(Name::Checkpoint(at), &root.encode()).await?;
        let mut state = self.lock();
        let old = state.checkpoints.newest.replace(at).map(Name::Checkpoint);
        state.supersede(old, at);
        state.garbage.close(at);
        state.checkpoints.count += 1;
        if !applies(Rule::Base) {
            state.garbage.permit(at);
        }
        state.tail.append_base(at);
        state.snapshots.end_checkpoint(at, root.next_page);
        state.tail.flush_wanted = true;
        state.changed();
        Ok(())
    }

    /// Writes the changed map pages below a page of the index, and this page.
    async fn write_index(&self, number: u64, at: Position) -> Result<(), Failure> {
        let mut pages = self
            .with_map_for(Patience::Background, |state| {
                Ok(state.map.index(number)?.map(<[_]>::to_vec))
            })
            .await?
            .unwrap_or_else(|| vec![None; MAX_CHILDREN]);
        pages.resize(MAX_CHILDREN, None);
        let (leaves, emptied) = {
            let map = &self.lock().map;
            (map.dirty_leaves(number), map.emptied_leaves(number))
        };
        let mut old: Vec<PageId> =
            emptied.into_iter().filter_map(|child| pages[child].take()).collect();
        let puts = leaves.iter().map(|leaf| -> Part<'_, _> {
            Box::pin(async move { Ok((*leaf, self.write_leaf(*leaf).await?)) })
        });
        for (leaf, id) in all(puts, PAGES_IN_FLIGHT).await? {
            old.extend(pages[split(leaf).1].replace(id));
        }
        let id = match pages.iter().any(Option::is_some) {
            true => Some(self.next_page()),
            false => None,
        };
        if let Some(id) = id {
            let identity = self.access.identity(id.epoch, id.number);
            let nonce = self.access.nonce;
            let first = number * MAX_CHILDREN as u64;
            let page = Index { identity, nonce, first, pages: pages.clone() };
            self.put(name(id), &page.encode()).await?;
        }
        let mut state = self.lock();
        let place = usize::try_from(number).unwrap_or(usize::MAX);
        old.extend(state.map.root().get(place).copied().flatten());
        state.map.replace(number, id, pages, &leaves);
        state.supersede(old.into_iter().filter(is_own).map(name), at);
        Ok(())
    }

    /// Writes a map page.
    async fn write_leaf(&self, range: u64) -> Result<PageId, Failure> {
        let entries = self
            .with_map_for(Patience::Background, |state| {
                Ok(state.map.leaf(range)?.map_or(Vec::new(), |page| page.entries().to_vec()))
            })
            .await?;
        let id = self.next_page();
        let identity = self.access.identity(id.epoch, id.number);
        let page = Leaf { identity, nonce: self.access.nonce, range, entries };
        self.put(name(id), &page.encode()).await?;
        Ok(id)
    }

    async fn write_usage(&self, at: Position) -> Result<(), Failure> {
        let dirty = self.lock().usage.dirty();
        let puts = dirty.into_iter().map(|(chunk, objects)| -> Part<'_, _> {
            Box::pin(async move { Ok((chunk, self.write_chunk(chunk, objects).await?)) })
        });
        for (chunk, id) in all(puts, PAGES_IN_FLIGHT).await? {
            let mut state = self.lock();
            let old = state.usage.replace(chunk, id).map(name);
            state.supersede(old, at);
        }
        Ok(())
    }

    async fn write_chunk(
        &self,
        (epoch, _): Chunk,
        objects: Vec<Used>,
    ) -> Result<Option<PageId>, Failure> {
        if objects.is_empty() {
            return Ok(None);
        }
        let id = self.next_page();
        let identity = self.access.identity(id.epoch, id.number);
        let page = Usage { identity, nonce: self.access.nonce, epoch, objects };
        self.put(name(id), &page.encode()).await?;
        Ok(Some(id))
    }

    fn next_page(&self) -> PageId {
        let mut state = self.lock();
        let number = state.checkpoints.next_page;
        state.checkpoints.next_page += 1;
        PageId { ancestor: 0, epoch: self.epoch, number }
    }

    /// Creates a page or checkpoint of this epoch.
    async fn put(&self, name: Name, bytes: &[u8]) -> Result<(), Failure> {
        match self.access.put(name, bytes, u32::MAX).await? {
            Put::Own => Ok(()),
            Put::Foreign => Err(Failure::Fenced),
        }
    }
}

/// Whether a page is one of this volume, and not of a parent.
fn is_own(id: &PageId) -> bool {
    id.ancestor == 0 || !applies(Rule::OwnObjects)
}

fn name(id: PageId) -> Name {
    Name::Page { epoch: id.epoch, number: id.number }
}
