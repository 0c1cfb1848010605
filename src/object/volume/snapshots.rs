//! The snapshots of an open volume: what they are, and what they need of the log and of the pages.
//!
//! A snapshot needs the checkpoint from which its history starts, the pages of that checkpoint, the slots above it,
//! and the data that its map refers to. A checkpoint makes superfluous only what none of the snapshots needs that
//! precede it or that were appended before it began; those that are appended after it start from it or from a later
//! one, because none is appended while a checkpoint is in progress.

use std::collections::VecDeque;

use crate::codec::{Checkpoint, MAX_CUTS, Snapshot};
use crate::name::{Name, Position, SnapshotId};
use crate::rules::{Rule, applies};

/// A checkpoint from which a snapshot can start.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Start {
    /// The checkpoint; `None` for the empty volume.
    pub(super) base: Option<Position>,
    /// The number of the first page that its writer had not used.
    pub(super) next_page: u64,
}

struct Known {
    snapshot: Snapshot,
    /// The slot of the record that has deleted it.
    deleted: Option<Position>,
}

/// The snapshots that exist, with every record that was appended to the log, and those that a replay may still need.
#[derive(Default)]
pub(super) struct Snapshots {
    known: Vec<Known>,
    /// The number of the next snapshot of this epoch, and of the next attempt to delete one.
    next: u64,
    attempts: u64,
    /// The newest checkpoint that a confirmed record of the log names.
    confirmed: Start,
    /// The later ones, whose records are not confirmed.
    named: VecDeque<Start>,
    /// The ends of the earlier epochs above the checkpoint from which the volume was opened.
    cuts: Vec<Position>,
    /// The slot of the newest roll-back.
    rolled_back: Option<Position>,
    /// A checkpoint is in progress.
    is_covering: bool,
}

impl Snapshots {
    /// Takes the table of the checkpoint from which the volume was opened.
    pub(super) fn load(&mut self, base: Option<Position>, checkpoint: Checkpoint) {
        let known = |snapshot| Known { snapshot, deleted: None };
        self.known = checkpoint.snapshots.into_iter().map(known).collect();
        self.confirmed = Start { base, next_page: checkpoint.next_page };
    }

    /// Takes the ends of the earlier epochs above the checkpoint from which the volume was opened.
    pub(super) fn follow(&mut self, cuts: Vec<Position>) {
        self.cuts = cuts;
    }

    /// The snapshots that exist, in the order of their creation.
    pub(super) fn existing(&self) -> impl Iterator<Item = &Snapshot> {
        self.known.iter().filter(|known| known.deleted.is_none()).map(|known| &known.snapshot)
    }

    /// A snapshot that exists.
    pub(super) fn find(&self, id: SnapshotId) -> Option<&Snapshot> {
        self.existing().find(|snapshot| snapshot.id == id)
    }

    /// A snapshot that exists, or whose deletion no confirmed checkpoint covers.
    pub(super) fn find_any(&self, id: SnapshotId) -> Option<&Snapshot> {
        self.known.iter().map(|known| &known.snapshot).find(|snapshot| snapshot.id == id)
    }

    /// Whether a snapshot can be taken now. Its history must not pass a roll-back, because another snapshot would be
    /// needed for that.
    pub(super) fn can_take(&self) -> bool {
        let is_after = !applies(Rule::AfterRollBack) || self.rolled_back <= self.start().base;
        !self.is_covering && is_after && self.cuts.len() < MAX_CUTS
    }

    /// Whether a checkpoint must be written before a snapshot can be taken, and is not in progress.
    pub(super) fn wants_checkpoint(&self) -> bool {
        !self.is_covering && !self.can_take()
    }

    /// The identity of the next snapshot, and from where its history starts.
    pub(super) fn next(&mut self, epoch: u64) -> (SnapshotId, Start, &[Position]) {
        let number = self.next;
        self.next += 1;
        let start = if applies(Rule::SnapshotBase) { self.start() } else { self.confirmed };
        let is_own = start.base.is_some_and(|base| base.epoch == epoch);
        let cuts = if is_own { &[] } else { self.cuts.as_slice() };
        (SnapshotId { epoch, number }, start, cuts)
    }

    /// The number of the next attempt to delete a snapshot.
    pub(super) fn next_attempt(&mut self) -> u64 {
        self.attempts += 1;
        self.attempts
    }

    /// The newest checkpoint that a record of the log names.
    fn start(&self) -> Start {
        self.named.back().copied().unwrap_or(self.confirmed)
    }

    /// The newest checkpoint that a confirmed record of the log names.
    pub(super) fn confirmed(&self) -> Start {
        self.confirmed
    }

    /// A record that creates a snapshot was appended, or is applied.
    pub(super) fn add(&mut self, snapshot: Snapshot) {
        if self.find_any(snapshot.id).is_none() {
            self.known.push(Known { snapshot, deleted: None });
        }
    }

    /// A record in slot `at` that deletes a snapshot was appended, or is applied.
    pub(super) fn delete(&mut self, id: SnapshotId, at: Position) {
        let found = self.known.iter_mut().find(|known| known.snapshot.id == id);
        found.into_iter().for_each(|known| known.deleted = Some(at));
    }

    /// A record in slot `at` that rolls the volume back was appended, or is applied.
    pub(super) fn roll_back(&mut self, at: Position) {
        self.rolled_back = self.rolled_back.max(Some(at));
    }

    /// A checkpoint begins. None is in progress.
    pub(super) fn begin_checkpoint(&mut self) {
        self.is_covering = true;
    }

    /// The record that names a checkpoint was appended.
    pub(super) fn end_checkpoint(&mut self, base: Position, next_page: u64) {
        self.is_covering = false;
        self.named.push_back(Start { base: Some(base), next_page });
    }

    /// The record that names a checkpoint is confirmed and applied. Returns whether pages may be superfluous that no
    /// checkpoint has replaced.
    pub(super) fn confirm(&mut self, base: Position) -> bool {
        while self.named.front().is_some_and(|start| start.base <= Some(base)) {
            self.confirmed = self.named.pop_front().unwrap_or_default();
        }
        let before = self.known.len();
        self.known.retain(|known| known.deleted.is_none_or(|at| at > base));
        let is_rolled_back = self.rolled_back.take_if(|at| *at <= base).is_some();
        self.known.len() < before || is_rolled_back
    }

    /// The table for a checkpoint that covers the log up to `at`.
    pub(super) fn table(&self, at: Position) -> Vec<Snapshot> {
        let exists = |known: &&Known| {
            known.snapshot.at.0 <= at && known.deleted.is_none_or(|deleted| deleted > at)
        };
        self.known.iter().filter(exists).map(|known| known.snapshot.clone()).collect()
    }

    /// Whether the volume was rolled back, and no confirmed checkpoint covers that: pages are needed that neither the
    /// map nor a snapshot refers to.
    pub(super) fn is_rolled_back(&self) -> bool {
        self.rolled_back.is_some()
    }

    /// The newest slot that a snapshot needs. All earlier objects that have data of the volume are needed, too.
    pub(super) fn newest(&self) -> Option<Position> {
        self.needing(None).map(|snapshot| snapshot.at.0).max()
    }

    /// Whether a snapshot needs an object that the checkpoint at `at` does not need.
    pub(super) fn keep(&self, name: Name, at: Position) -> bool {
        self.needing(Some(at)).any(|snapshot| match name {
            Name::Page { epoch, number } => {
                snapshot.history.base < Some(at) && may_have_page(snapshot, epoch, number)
            }
            Name::Checkpoint(checkpoint) => snapshot.history.base == Some(checkpoint),
            _ => false,
        })
    }

    /// Whether a snapshot needs a log object to whose data the volume does not refer since slot `dead`.
    pub(super) fn keep_slot(&self, slot: Position, dead: Position, at: Position) -> bool {
        self.needing(Some(at)).any(|snapshot| {
            let taken = snapshot.at.0;
            let from = if applies(Rule::Tail) { snapshot.history.base } else { Some(taken) };
            slot <= taken && Some(dead) > from
        })
    }

    /// Whether a snapshot that `walked` does not contain can have a page.
    pub(super) fn may_need_page(&self, epoch: u64, number: u64, walked: &[SnapshotId]) -> bool {
        let others = self.needing(None).filter(|snapshot| !walked.contains(&snapshot.id));
        others.into_iter().any(|snapshot| may_have_page(snapshot, epoch, number))
    }

    /// Whether a snapshot starts from a checkpoint.
    pub(super) fn need_checkpoint(&self, at: Position) -> bool {
        self.needing(None).any(|snapshot| snapshot.history.base == Some(at))
    }

    /// The snapshots that are not yet deleted for every later writer, with the checkpoints from which they start.
    pub(super) fn starts(&self) -> Vec<(SnapshotId, Option<Position>)> {
        self.needing(None).map(|snapshot| (snapshot.id, snapshot.history.base)).collect()
    }

    /// The snapshots that a replay may still need, with whether they exist.
    pub(super) fn known(&self) -> impl Iterator<Item = (&Snapshot, bool)> {
        self.known.iter().map(|known| (&known.snapshot, known.deleted.is_none()))
    }

    /// The snapshots whose objects are kept; with `covered`, without those whose deletion this slot covers.
    fn needing(&self, covered: Option<Position>) -> impl Iterator<Item = &Snapshot> {
        let is_needed = move |known: &&Known| {
            let is_covered = |deleted| covered.is_some_and(|at| deleted <= at);
            let is_left = match known.deleted {
                Some(_) if !applies(Rule::DeletedSnapshots) => false,
                deleted => !deleted.is_some_and(is_covered),
            };
            let is_early = covered.is_none_or(|at| known.snapshot.at.0 <= at);
            is_left && (is_early || applies(Rule::LaterSnapshots)) && applies(Rule::KeepSnapshots)
        };
        self.known.iter().filter(is_needed).map(|known| &known.snapshot)
    }
}

/// Whether a page existed when the checkpoint was written from which a snapshot starts.
fn may_have_page(snapshot: &Snapshot, epoch: u64, number: u64) -> bool {
    let base = snapshot.history.base.map_or(0, |base| base.epoch);
    (epoch, number) < (base, snapshot.next_page)
}
