//! Histories that end where the present one ends, and start from an older checkpoint. All slots between exist: a replay
//! gives what the lost checkpoint had.

use super::super::access::{Access, Failure, prefix_of};
use super::super::check::is_defect;
use super::super::recovery::read_slot;
use crate::codec::{History, Record, Slot};
use crate::name::{Name, Position};

/// The search for histories, the newest checkpoint first.
pub(super) struct Older<'a> {
    access: &'a Access,
    /// The epoch in which the search is, and its end: the slots below it count.
    at: Position,
    /// The ends of the later epochs.
    later: Vec<Position>,
    /// The slots from this one up to the end exist.
    lowest: u64,
    /// The checkpoints of the epoch that were not tried, in their order.
    checkpoints: Option<Vec<u64>>,
    /// The record that the first slot of the epoch has, if it was read.
    open: Option<History>,
    is_over: bool,
}

/// The result of a step of the search.
pub(super) enum Step {
    /// A history.
    Found(History),
    /// There are no more, because this slot is missing.
    Missing(Name),
    /// There are no more.
    Over,
}

impl<'a> Older<'a> {
    /// Begins a search for histories that end before the slot `end`.
    pub(super) fn new(access: &'a Access, end: Position) -> Self {
        let (later, checkpoints, open) = (Vec::new(), None, None);
        Self { access, at: end, later, lowest: end.slot, checkpoints, open, is_over: false }
    }

    /// Returns the next history.
    ///
    /// # Errors
    /// Returns an error if the store fails.
    pub(super) async fn next(&mut self) -> Result<Step, Failure> {
        while !self.is_over {
            let mut known = match self.checkpoints.take() {
                Some(known) => known,
                None => self.list().await?,
            };
            let next = known.pop();
            self.checkpoints = Some(known);
            let wanted = next.map_or(0, |slot| slot + 1);
            if let Some(missing) = self.scan_down_to(wanted).await? {
                self.is_over = true;
                return Ok(Step::Missing(missing));
            }
            if let Some(slot) = next {
                let base = Position { slot, ..self.at };
                return Ok(Step::Found(History { base: Some(base), cuts: self.cuts(slot + 1) }));
            }
            if let Some(history) = self.go_below() {
                return Ok(Step::Found(history));
            }
        }
        Ok(Step::Over)
    }

    /// Lists the checkpoints of the epoch, in the order of their slots.
    async fn list(&self) -> Result<Vec<u64>, Failure> {
        let names = self.access.list(&prefix_of("ckpt", self.at.epoch), "").await?;
        let slots = names.into_iter().filter_map(|name| match name {
            Name::Checkpoint(at) if at.slot < self.at.slot => Some(at.slot),
            _ => None,
        });
        Ok(slots.collect())
    }

    /// The ends of the epochs above a checkpoint after which the slots of this epoch begin with `first`.
    fn cuts(&self, first: u64) -> Vec<Position> {
        let own = (self.at.slot > first).then_some(self.at);
        own.into_iter().chain(self.later.iter().copied()).collect()
    }

    /// Reads the slots of the epoch, from the lowest that is known, down to `wanted`. Returns the first one that does
    /// not exist or is damaged.
    async fn scan_down_to(&mut self, wanted: u64) -> Result<Option<Name>, Failure> {
        while self.lowest > wanted {
            let at = Position { slot: self.lowest - 1, ..self.at };
            let found = match read_slot(self.access, at).await {
                Err(failure) if is_defect(&failure) => return Ok(Some(Name::Slot(at))),
                found => found?,
            };
            match found {
                Some(Slot::Log(object)) => {
                    self.open = object.records.into_iter().find_map(|record| match record {
                        Record::Open(history) => Some(history),
                        _ => None,
                    });
                }
                // The first slot of the first epoch had nothing but the statement that nothing precedes it.
                None | Some(Slot::Seal(_)) if (at.epoch, at.slot) == (1, 0) => {
                    self.open = Some(History { base: None, cuts: Vec::new() });
                }
                None | Some(Slot::Seal(_)) => return Ok(Some(Name::Slot(at))),
            }
            self.lowest = at.slot;
        }
        Ok(None)
    }

    /// Goes on in the epoch of the checkpoint from which this epoch was opened. Returns the history without a
    /// checkpoint if there is none.
    fn go_below(&mut self) -> Option<History> {
        let Some(open) = self.open.take() else {
            self.is_over = true;
            return None;
        };
        let mut cuts = open.cuts;
        cuts.extend(self.cuts(1));
        let Some(base) = open.base else {
            self.is_over = true;
            return Some(History { base: None, cuts });
        };
        let own = cuts.first().copied().filter(|cut| cut.epoch == base.epoch);
        let end = own.map_or(base.slot + 1, |cut| cut.slot);
        self.later = cuts.split_off(usize::from(own.is_some()));
        self.at = Position { slot: end, ..base };
        (self.lowest, self.checkpoints) = (end, None);
        None
    }
}
