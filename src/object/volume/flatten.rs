//! Flattening of a clone: the data that it reads from its ancestors becomes its own.
//!
//! A copy is a write of what a range has. It is appended only where neither the tail nor the map has anything newer
//! when it is appended, so it needs no record of its own, and the volume has the same content before and after it, at
//! every place of the log. What refers to an ancestor becomes less and never more, but for a roll-back, and no other
//! request runs during that. So after one pass over the map, every checkpoint that covers the copies refers to no
//! ancestor.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::access::Failure;
use super::check::is_defect;
use super::flattening::{Flattening, Phase};
use super::recovery::read_checkpoint;
use super::repair::Progress;
use super::shared::{Shared, State};
use super::table::Missing;
use super::tasks::{Part, all};
use crate::codec::{Extent, Index, Leaf, MAX_EXTENT_BYTES, PageId};
use crate::name::{Position, SnapshotId};
use crate::rules::{Rule, applies};

/// The part of the volume that one step looks at, in bytes; at least one page of the map.
const STEP_BYTES: u64 = 16 << 20;

/// The pages of the map that are copied at the same time, and the ranges of each.
const PAGES_AT_ONCE: usize = 4;
const RANGES_AT_ONCE: usize = 4;

/// The pages of a checkpoint that are read at the same time.
const READS_AT_ONCE: usize = 16;

/// The snapshots that an error names.
const MAX_NAMES: usize = 4;

/// Work that is not done under the lock.
#[derive(Debug, Clone, Copy)]
enum Step {
    Begin,
    Copy(u64),
    Prove(Position),
}

impl Shared {
    pub(super) fn start_flatten(&self) {
        let mut state = self.lock();
        if self.access.parent().is_none() {
            state.flatten = Phase::Done;
        } else if matches!(state.flatten, Phase::Idle | Phase::Failed(_)) {
            state.flatten = Phase::Begin;
        }
        state.changed();
    }

    pub(super) fn stop_flatten(&self) {
        let mut state = self.lock();
        if state.flatten != Phase::Done {
            state.flatten = Phase::Idle;
        }
        state.changed();
    }

    pub(super) fn flattening(&self) -> Flattening {
        self.flattening_in(&self.lock())
    }

    fn flattening_in(&self, state: &State) -> Flattening {
        let total = self.size();
        match &state.flatten {
            Phase::Idle => Flattening::Idle,
            Phase::Begin => Flattening::Running { done: 0, total },
            Phase::Copy(page) => {
                Flattening::Running { done: total.min(page * self.page_bytes), total }
            }
            Phase::Settle | Phase::Cover(_) | Phase::Prove(_) => {
                Flattening::Running { done: total, total }
            }
            Phase::Done => Flattening::Done,
            Phase::Failed(failure) => Flattening::Failed(failure.clone()),
        }
    }

    pub(super) async fn follow_flatten(&self, progress: Progress<'_>) -> Result<(), Failure> {
        self.start_flatten();
        let mut last = None;
        loop {
            let now = self
                .wait(|state| {
                    Some(self.flattening_in(state)).filter(|now| last.as_ref() != Some(now))
                })
                .await?;
            match &now {
                Flattening::Running { done, total } if progress(*done, *total).is_break() => {
                    self.stop_flatten();
                }
                Flattening::Running { .. } => {}
                Flattening::Done => return Ok(()),
                Flattening::Failed(failure) => return Err(failure.clone()),
                Flattening::Idle => return Err(Failure::Invalid("the flattening was stopped")),
            }
            last = Some(now);
        }
    }

    /// Flattens when that is wanted, until the volume fails. An error of the store only delays it.
    pub(super) async fn flatten(&self) -> Failure {
        let mut failures = 0;
        loop {
            let step = match self.wait(|state| self.flatten_step(state)).await {
                Ok(step) => step,
                Err(failure) => return failure,
            };
            match self.take_flatten_step(step).await {
                Ok(()) => failures = 0,
                Err(Failure::Fenced) => return Failure::Fenced,
                Err(Failure::Store { .. }) => {
                    failures += 1;
                    self.access.back_off(failures).await;
                }
                Err(failure) => self.go_on(step, Phase::Failed(failure)),
            }
        }
    }

    fn flatten_step(&self, state: &mut State) -> Option<Step> {
        if state.pause.is_wanted {
            return None;
        }
        if state.flatten == Phase::Settle && self.admits(state, 0) {
            state.tail.resize(self.size());
            state.flatten = Phase::Cover(state.tail.next());
            (state.tail.flush_wanted, state.checkpoints.wanted) = (true, true);
            state.changed();
        }
        if let Phase::Cover(slot) = state.flatten {
            let covered = state.checkpoints.base.filter(|base| *base >= self.position(slot));
            match covered.or((!applies(Rule::OwnBase)).then_some(self.position(slot))) {
                Some(base) => state.flatten = Phase::Prove(base),
                None => self.want_cover(state, slot),
            }
        }
        match state.flatten.clone() {
            Phase::Begin => Some(Step::Begin),
            Phase::Copy(page) if self.has_room_for_copies(state) => {
                state.pause.running += 1;
                Some(Step::Copy(page))
            }
            Phase::Prove(base) => Some(Step::Prove(base)),
            _ => None,
        }
    }

    /// Asks for a checkpoint once the slot is applied. A checkpoint may have been in progress before.
    fn want_cover(&self, state: &mut State, slot: u64) {
        let is_due = state.tail.first > slot && state.checkpoints.new_slots > 0;
        if is_due
            && state.checkpoints.newest < Some(self.position(slot))
            && !state.checkpoints.wanted
        {
            state.checkpoints.wanted = true;
            state.changed();
        }
    }

    /// Whether half of the tail is free. The rest is for the requests.
    fn has_room_for_copies(&self, state: &mut State) -> bool {
        let tail = &mut state.tail;
        let is_free = tail.bytes() <= self.config.tail_bytes / 2
            && tail.slots.len() <= self.config.tail_slots / 2;
        if !is_free && tail.open_records() > 0 && !tail.flush_wanted {
            tail.flush_wanted = true;
            state.changed();
        }
        is_free
    }

    async fn take_flatten_step(&self, step: Step) -> Result<(), Failure> {
        match step {
            Step::Begin => {
                let (needing, _) = self.inheriting_snapshots(None).await?;
                self.go_on(
                    step,
                    match needing.is_empty() {
                        true => Phase::Copy(0),
                        false => Phase::Failed(Failure::NeedParent(needing)),
                    },
                );
            }
            Step::Copy(first) => {
                let end = self.step_end(first);
                let copied = self.copy_pages(first..end).await;
                self.lock().ended();
                if copied? {
                    let is_last = end >= self.size().div_ceil(self.page_bytes);
                    self.go_on(step, if is_last { Phase::Settle } else { Phase::Copy(end) });
                }
            }
            Step::Prove(base) => {
                let (needing, is_deletion_open) = self.inheriting_snapshots(Some(base)).await?;
                self.go_on(
                    step,
                    match (needing.is_empty(), is_deletion_open) {
                        (false, _) => Phase::Failed(Failure::NeedParent(needing)),
                        // The next checkpoint covers the deletions.
                        (true, true) => Phase::Settle,
                        (true, false) => Phase::Done,
                    },
                );
            }
        }
        Ok(())
    }

    /// Sets what follows a step, unless the flattening was stopped meanwhile.
    fn go_on(&self, step: Step, next: Phase) {
        let mut state = self.lock();
        let is_current = match step {
            Step::Begin => state.flatten == Phase::Begin,
            Step::Copy(page) => state.flatten == Phase::Copy(page),
            Step::Prove(base) => state.flatten == Phase::Prove(base),
        };
        if is_current {
            state.flatten = next;
            state.changed();
        }
    }

    fn step_end(&self, first: u64) -> u64 {
        let pages = (STEP_BYTES / self.page_bytes).max(1);
        self.size().div_ceil(self.page_bytes).min(first + pages)
    }

    /// Copies what pages of the map refer to in ancestors. Returns false if it was interrupted by a pause.
    async fn copy_pages(&self, pages: Range<u64>) -> Result<bool, Failure> {
        let parts = pages
            .map(|number| -> Part<'_, Result<bool, Failure>> { Box::pin(self.copy_page(number)) });
        Ok(all(parts, PAGES_AT_ONCE).await?.into_iter().all(|is_copied| is_copied))
    }

    async fn copy_page(&self, number: u64) -> Result<bool, Failure> {
        let begin = number * self.page_bytes;
        let page = begin..self.size().min(begin + self.page_bytes);
        let ranges = self.with_map(|state| self.inherited(state, number, page.clone())).await?;
        let parts = ranges.into_iter().map(|range| -> Part<'_, Result<bool, Failure>> {
            Box::pin(self.copy_range(number, range))
        });
        Ok(all(parts, RANGES_AT_ONCE).await?.into_iter().all(|is_copied| is_copied))
    }

    /// Copies a range of a page.
    async fn copy_range(&self, number: u64, range: Range<u64>) -> Result<bool, Failure> {
        let length = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let mut data = vec![0; length];
        self.read_parts(range.start, &mut data).await?;
        let mut at = range.start;
        for part in data.chunks(MAX_EXTENT_BYTES as usize) {
            let bytes = part.len();
            let is_admitted = |state: &mut State| match state.pause.is_wanted {
                true => Some(false),
                false => self.admits(state, bytes).then_some(true),
            };
            if !self.wait(is_admitted).await? {
                return Ok(false);
            }
            let end = at + bytes as u64;
            self.with_map(|state| self.append_copies(state, number, at..end, part)).await?;
            at = end;
        }
        Ok(true)
    }

    /// Appends those parts of a range, whose data was read, that still refer to an ancestor.
    fn append_copies(
        &self,
        state: &mut State,
        number: u64,
        range: Range<u64>,
        data: &[u8],
    ) -> Result<(), Missing> {
        let parts = match applies(Rule::Copy) {
            true => self.inherited(state, number, range.clone())?,
            false => vec![range.clone()],
        };
        for part in parts {
            let [begin, end] = [part.start, part.end]
                .map(|at| usize::try_from(at - range.start).unwrap_or(usize::MAX));
            let copy = &data[begin..end];
            state.tail.write(&Extent::of(part.start, copy), copy);
        }
        if state.tail.open_bytes() >= self.config.object_bytes {
            state.changed();
        }
        Ok(())
    }

    /// The parts of a range within a page that the volume reads from an ancestor.
    fn inherited(
        &self,
        state: &mut State,
        number: u64,
        range: Range<u64>,
    ) -> Result<Vec<Range<u64>>, Missing> {
        let base = number * self.page_bytes;
        let State { map, tail, .. } = state;
        let Some(page) = map.leaf(number)? else { return Ok(Vec::new()) };
        let mut found: Vec<Range<u64>> = Vec::new();
        for (part, in_tail) in tail.cover_of(range) {
            if in_tail.is_some() {
                continue;
            }
            let [first, last] =
                [part.start, part.end].map(|at| u32::try_from(at - base).unwrap_or(u32::MAX));
            for (piece, entry) in page.pieces(first..last) {
                if entry.is_none_or(|entry| entry.ancestor == 0) {
                    continue;
                }
                let [begin, end] = [piece.start, piece.end].map(|at| base + u64::from(at));
                match found.last_mut() {
                    Some(last) if last.end == begin => last.end = end,
                    _ => found.push(begin..end),
                }
            }
        }
        Ok(found)
    }

    /// Returns the names of the snapshots that start from a checkpoint that refers to an ancestor, or from none; and
    /// whether there are such snapshots whose deletion no checkpoint covers. Those that start from `own`, or from a later
    /// checkpoint, refer to none.
    async fn inheriting_snapshots(
        &self,
        own: Option<Position>,
    ) -> Result<(Vec<String>, bool), Failure> {
        if !applies(Rule::OwnSnapshots) {
            return Ok((Vec::new(), false));
        }
        let known: Vec<(SnapshotId, String, Option<Position>, bool)> = {
            let state = self.lock();
            let known = state.snapshots.known();
            known.map(|(s, exists)| (s.id, s.name.clone(), s.history.base, exists)).collect()
        };
        let (mut bases, mut clean) = (BTreeMap::new(), BTreeSet::new());
        let (mut names, mut is_deletion_open) = (Vec::new(), false);
        for (id, name, base, exists) in known {
            if own.is_some() && base >= own {
                continue;
            }
            let inherits = match (bases.get(&base), base) {
                (Some(inherits), _) => *inherits,
                (None, None) => true,
                (None, Some(at)) => match self.refers_to_ancestor(at, &mut clean).await {
                    // Its deletion is covered now.
                    Err(failure)
                        if is_defect(&failure) && self.lock().snapshots.find_any(id).is_none() =>
                    {
                        continue;
                    }
                    other => other?,
                },
            };
            bases.insert(base, inherits);
            match exists {
                true if inherits && names.len() == MAX_NAMES => {}
                true if inherits => names.push(name),
                false if inherits => is_deletion_open = true,
                _ => {}
            }
        }
        Ok((names, is_deletion_open))
    }

    /// Whether a checkpoint that a snapshot keeps refers to an ancestor. `clean` has the pages of the index that were
    /// looked at before.
    async fn refers_to_ancestor(
        &self,
        base: Position,
        clean: &mut BTreeSet<PageId>,
    ) -> Result<bool, Failure> {
        let checkpoint = read_checkpoint(&self.access, base).await?;
        for id in checkpoint.index.into_iter().flatten() {
            if clean.contains(&id) {
                continue;
            }
            if id.ancestor != 0 || self.index_refers_to_ancestor(id).await? {
                return Ok(true);
            }
            clean.insert(id);
        }
        Ok(false)
    }

    async fn index_refers_to_ancestor(&self, id: PageId) -> Result<bool, Failure> {
        let index = self.access.page(id, Index::decode).await?;
        let leaves = index.ok_or(Failure::Lost(id.object()))?.pages;
        if leaves.iter().flatten().any(|leaf| leaf.ancestor != 0) {
            return Ok(true);
        }
        let parts = leaves.into_iter().flatten().map(|leaf| -> Part<'_, Result<bool, Failure>> {
            Box::pin(self.leaf_refers_to_ancestor(leaf))
        });
        Ok(all(parts, READS_AT_ONCE).await?.into_iter().any(|refers| refers))
    }

    async fn leaf_refers_to_ancestor(&self, id: PageId) -> Result<bool, Failure> {
        let leaf = self.access.page(id, Leaf::decode).await?;
        let entries = leaf.ok_or(Failure::Lost(id.object()))?.entries;
        Ok(entries.iter().any(|entry| entry.ancestor != 0))
    }
}
