//! Confirmed slots become part of the map, and the map becomes durable in checkpoints.

use std::sync::Arc;

use super::access::Failure;
use super::pages::PageWriter;
use super::shared::{Patience, Shared, State};
use super::table::split;
use super::tasks::{Ahead, Part};
use super::usage::Chunk;
use crate::codec::{
    Checkpoint, Entry, Index, Leaf, MAX_CHILDREN, MAX_USAGE_PAGES, PageId, Record, Usage,
};
use crate::name::{Name, Position};
use crate::rules::{Rule, applies};

/// The number of pages that are read at the same time.
const PAGES_IN_FLIGHT: usize = 16;

/// The pages of the index that are in memory, with the pages below, until they are put. They are about as long as a full
/// object with pages.
const INDICES_AT_ONCE: usize = 64;

/// The number of changed map pages from which on a checkpoint is due. No slot is applied while it is written, and most of
/// the pages may have to be read first.
pub(super) const MAX_CHANGED_PAGES: usize = 8192;

/// A page of the index, and the map pages below, which a checkpoint has written.
struct WrittenIndex {
    number: u64,
    /// `None`: the range reads as zeroes.
    id: Option<PageId>,
    /// All map pages below it.
    pages: Vec<Option<PageId>>,
    /// The map pages that were written.
    leaves: Vec<u64>,
    /// What these are in place of.
    old: Vec<PageId>,
}

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
        let mut pages = PageWriter::new(self);
        let indices = self.lock().map.dirty_indices();
        let mut written = Vec::new();
        for index in indices {
            written.push(self.write_index(index, &mut pages).await?);
            if written.len() == INDICES_AT_ONCE {
                pages.finish().await?;
                self.replace_indices(std::mem::take(&mut written), at);
            }
        }
        {
            let mut state = self.lock();
            let State { usage, snapshots, .. } = &mut *state;
            let dead = usage.superfluous(|slot, dead| snapshots.keep_slot(slot, dead, at));
            usage.remove(&dead);
            state.garbage.supersede(dead.into_iter().map(Name::Slot));
        }
        let usage = self.write_usage(&mut pages).await?;
        pages.finish().await?;
        self.replace_indices(written, at);
        let root = {
            let mut state = self.lock();
            for (chunk, id) in usage {
                let old = state.usage.replace(chunk, id);
                state.supersede_pages(old, at);
            }
            Checkpoint {
                identity: self.access.identity(at.epoch, at.slot),
                nonce: self.access.nonce,
                size: state.applied_size,
                next_page: state.checkpoints.next_page,
                index: state.map.root().to_vec(),
                usage: state.usage.pages().map(|(_, id)| Some(id)).collect(),
                snapshots: state.snapshots.table(at),
            }
        };
        if root.usage.len() > MAX_USAGE_PAGES {
            // No opener could read the checkpoint.
            return Err(Failure::Unsupported("data in too many objects"));
        }
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
    async fn write_index(
        &self,
        number: u64,
        writer: &mut PageWriter<'_>,
    ) -> Result<WrittenIndex, Failure> {
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
        let mut rest = leaves.iter();
        // The next map pages are read while one is written.
        let mut reads = Ahead::default();
        loop {
            while reads.len() < PAGES_IN_FLIGHT
                && let Some(leaf) = rest.next()
            {
                reads.push(Box::pin(self.entries(*leaf)));
            }
            let Some(read) = reads.next().await else { break };
            let (range, entries) = read?;
            let encode = |identity, nonce| Leaf { identity, nonce, range, entries }.encode();
            let id = writer.add(encode).await?;
            old.extend(pages[split(range).1].replace(id));
        }
        drop(reads);
        let id = match pages.iter().any(Option::is_some) {
            true => {
                let first = number * MAX_CHILDREN as u64;
                let pages = pages.clone();
                let encode = |identity, nonce| Index { identity, nonce, first, pages }.encode();
                Some(writer.add(encode).await?)
            }
            false => None,
        };
        Ok(WrittenIndex { number, id, pages, leaves, old })
    }

    /// Returns the entries of a map page, with its number.
    fn entries(&self, leaf: u64) -> Part<'_, Result<(u64, Vec<Entry>), Failure>> {
        Box::pin(async move {
            let entries = self.with_map_for(Patience::Background, |state| {
                Ok(state.map.leaf(leaf)?.map_or(Vec::new(), |page| page.entries().to_vec()))
            });
            Ok((leaf, entries.await?))
        })
    }

    /// Makes pages of the index a part of the map, after they and the map pages below were put.
    fn replace_indices(&self, written: Vec<WrittenIndex>, at: Position) {
        for WrittenIndex { number, id, pages, leaves, mut old } in written {
            let mut state = self.lock();
            let place = usize::try_from(number).unwrap_or(usize::MAX);
            old.extend(state.map.root().get(place).copied().flatten());
            state.map.replace(number, id, pages, &leaves);
            state.supersede_pages(old, at);
        }
    }

    /// Writes the changed pages of the usage. Returns where they are; `None`: a page has no objects.
    async fn write_usage(
        &self,
        writer: &mut PageWriter<'_>,
    ) -> Result<Vec<(Chunk, Option<PageId>)>, Failure> {
        let dirty = self.lock().usage.dirty();
        let mut written = Vec::new();
        for (chunk, objects) in dirty {
            let (epoch, is_empty) = (chunk.0, objects.is_empty());
            let encode = |identity, nonce| Usage { identity, nonce, epoch, objects }.encode();
            let id = if is_empty { None } else { Some(writer.add(encode).await?) };
            written.push((chunk, id));
        }
        Ok(written)
    }
}
