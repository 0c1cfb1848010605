//! The repair of a volume. FORMAT.md says what is repaired, and why that is safe.
//!
//! A repair looks at the volume first and changes nothing. Then it opens the volume as a writer does, with what it has
//! found in place of what is lost, and writes a checkpoint. So it is complete when the base record of this checkpoint is
//! confirmed, and before that the volume is as it was. Only then it deletes what nothing refers to, as the collector does.

mod examine;
mod older;

use std::ops::{ControlFlow, Range};

use super::access::Failure;
use super::check::is_defect;
use super::opening::{self, Gap, Kept};
use super::place::Place;
use super::shared::Shared;
use super::sweep::Reach;
use super::table::split;
use super::tasks::{Part, race};
use super::usage::Object;
use super::{Config, Defect, Volume, WrongUsage};
use crate::codec::{Entry, History};
use crate::name::{Name, Position};
use examine::Examination;

/// Receives how many pages of the map were checked, and how many there are. The repair stops if it returns `Break`.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64) -> ControlFlow<()>;

/// The maximum number of names of objects that are returned.
const MAX_NAMES: usize = 1000;

/// Something that a repair puts right.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Repair {
    /// The volume could not be opened. Its map is rebuilt from an older checkpoint and the log.
    Checkpoint {
        /// Why it could not be opened.
        failure: Failure,
        /// What it is rebuilt from.
        from: Rebuilt,
    },
    /// A range of the volume could not be read, because a page of the map is lost or damaged. The page is rebuilt from an
    /// older checkpoint and the log.
    Page {
        /// The range in bytes.
        range: Range<u64>,
        /// Why it could not be read.
        failure: Failure,
        /// What it is rebuilt from.
        from: Rebuilt,
    },
    /// A page of the accounting is lost or damaged. It is counted again.
    UsagePage(Failure),
    /// The space of a log object was accounted wrongly. It is counted again.
    Usage(WrongUsage),
}

/// What a map is rebuilt from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rebuilt {
    /// The checkpoint; `None`: the empty volume, or the parent's snapshot for a clone.
    pub base: Option<Position>,
    /// The slots of the log above it.
    pub slots: u64,
}

/// Something that a repair does not touch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// What is wrong.
    pub failure: Failure,
    /// Why it is not repaired.
    pub reason: String,
}

/// What a repair has found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Findings {
    /// What it puts right.
    pub repairs: Vec<Repair>,
    /// The objects that nothing refers to, which it deletes; at most 1000 of them.
    pub leftovers: Vec<Name>,
    /// Their number.
    pub leftover_count: u64,
    /// What it does not touch.
    pub refusals: Vec<Refusal>,
    /// The ranges that stay unreadable, each with the name of the snapshot; `None`: of the volume itself.
    pub defects: Vec<(Option<String>, Defect)>,
    /// The number of objects with data that were read.
    pub objects: usize,
    /// The number of snapshots that were checked.
    pub snapshots: usize,
}

impl Findings {
    /// Whether there is something to repair.
    pub fn has_work(&self) -> bool {
        !self.repairs.is_empty() || self.leftover_count > 0
    }

    fn refuse(&mut self, failure: Failure, reason: impl Into<String>) {
        self.refusals.push(Refusal { failure, reason: reason.into() });
    }

    fn leave(&mut self, name: Name) {
        self.leftover_count += 1;
        if self.leftovers.len() < MAX_NAMES {
            self.leftovers.push(name);
        }
    }
}

/// The volume as it will be, and what must be written for that.
struct Work {
    volume: Volume,
    /// The history that the open record gets.
    history: History,
    /// Pages of the map that take the place of those that cannot be read.
    pages: Vec<(u64, Vec<Entry>)>,
    /// The right values of the accounting.
    usage: Vec<(Position, Object)>,
    /// Whether the objects that nothing refers to are deleted.
    sweeps: bool,
}

impl Place {
    /// Looks for what [`Place::repair`] would do, and changes nothing. The result is right if no client writes to the
    /// volume meanwhile.
    ///
    /// # Errors
    /// Returns an error if the store fails, if the key file is missing, or if `progress` stopped the operation.
    pub async fn plan_repair(
        &self,
        config: Config,
        progress: Progress<'_>,
    ) -> Result<Findings, Failure> {
        let epoch = opening::newest_epoch(self.access()).await? + 1;
        let (findings, _) = self.examine(epoch, Gap::Leave, config, progress).await?;
        Ok(findings)
    }

    /// Repairs what is safe, in an epoch that this opener has claimed. Returns what was done, and what was not. An
    /// interrupted repair is continued by another one.
    ///
    /// # Errors
    /// As [`Place::plan_repair`]; also [`Failure::Fenced`] if another opener has claimed a later epoch.
    pub async fn repair(
        &self,
        epoch: u64,
        config: Config,
        progress: Progress<'_>,
    ) -> Result<Findings, Failure> {
        let (findings, work) = self.examine(epoch, Gap::Seal, config, progress).await?;
        if let Some(work) = work.filter(|_| findings.has_work()) {
            opening::create_first(self.access(), epoch, &work.history).await?;
            work.carry_out().await?;
        }
        Ok(findings)
    }

    async fn examine(
        &self,
        epoch: u64,
        gap: Gap,
        mut config: Config,
        progress: Progress<'_>,
    ) -> Result<(Findings, Option<Work>), Failure> {
        config.clamp();
        self.check_key()?;
        let mut kept = Kept::default();
        match opening::end_damaged(self.access(), epoch, gap, &mut kept).await {
            Ok(before) => Examination::new(self, config, epoch, progress).volume(before).await,
            Err(failure) if is_defect(&failure) => {
                let mut findings = Findings::default();
                findings.refuse(
                    failure,
                    "a part of the log is missing, and nothing proves what it was: without it, the volume would lack \
                     writes",
                );
                Ok((findings, None))
            }
            Err(failure) => Err(failure),
        }
    }
}

impl Work {
    /// Writes everything in a checkpoint, and deletes what it makes superfluous. The open record is in the store.
    async fn carry_out(self) -> Result<(), Failure> {
        let shared = &*self.volume.0;
        shared.begin_epoch();
        for (number, entries) in self.pages {
            // The page of the index may be intact and only not in memory.
            let index = split(number).0;
            let found = shared.with_map(|state| state.map.index(index).map(drop)).await;
            let index_is_lost = match found {
                Ok(()) => false,
                Err(failure) if is_defect(&failure) => true,
                Err(failure) => return Err(failure),
            };
            shared.lock().map.restore(number, entries, index_is_lost);
        }
        {
            let mut state = shared.lock();
            let now = shared.position(0);
            for (at, object) in self.usage {
                state.usage.correct(at, object, now);
            }
            (state.checkpoints.wanted, state.checkpoints.new_slots) = (true, 1);
        }
        let mut parts: Vec<Part<'_, Result<(), Failure>>> = Vec::new();
        for _ in 0..shared.config.puts_in_flight {
            parts.push(Box::pin(async { Err(shared.upload().await) }));
        }
        parts.push(Box::pin(async { Err(shared.apply().await) }));
        parts.push(Box::pin(shared.complete(self.sweeps)));
        race(parts).await
    }
}

impl Shared {
    /// Waits until the checkpoint is the base of all later openers, and deletes what it does not need.
    async fn complete(&self, sweeps: bool) -> Result<(), Failure> {
        self.wait(|state| state.checkpoints.base).await?;
        loop {
            // The lock must not be held while the store deletes.
            let next = self.lock().garbage.permitted.pop_front();
            let Some(name) = next else { break };
            self.access.delete(name).await?;
        }
        if sweeps {
            self.sweep(Reach::Earlier).await?;
        }
        Ok(())
    }
}
