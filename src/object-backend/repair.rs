//! The repair of volumes, for commands. The engine decides what is safe; this claims the volume for it as a client that
//! serves the volume does, so it is fenced and refused in the same way.

use std::ops::ControlFlow;

use cleat_backend::store::{
    CheckStore, Checked, DamagedRange, Defect, Progress, Refused, Repair, Repaired, Unreferenced,
};
use cleat_core::clock::SystemClock;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_object::name::Name;
use cleat_object::volume::{self as engine, Config, Failure, Findings, Place, Rebuilt};

use crate::claim::Attempt;
use crate::claim::decision::{Lost, Purpose};
use crate::claim::record::Use;
use crate::defects::{add, extend};
use crate::errors::{failed, no_answer};
use crate::executor::block_until;
use crate::manage::ObjectStore;
use crate::timeouts::{CALL_TIMEOUT, REPAIR_TIMEOUT, after};

/// Repairs a volume that no client serves, or says what a repair would do.
///
/// # Errors
/// Returns `InUse` if a client serves the volume, `Aborted` if `progress` stopped the repair, and otherwise the failure
/// of the store.
pub(crate) fn repair(
    store: &ObjectStore,
    name: &str,
    dry_run: bool,
    progress: Progress<'_>,
) -> Result<Repaired> {
    let (volume, place) = store.existing(name)?;
    let shown = volume.shown();
    place.check_key().map_err(|failure| failed(&shown, failure))?;
    let (claimant, purpose, usage) = (&store.claimant, Purpose::Change, Use::Serve);
    let (place, name_shown, clock) = (&place, &*shown, &SystemClock);
    let attempt = Attempt { place, name: name_shown, claimant, purpose, usage, only: None, clock };
    let admitted = block_until(after(CALL_TIMEOUT), attempt.check());
    let admitted = admitted.unwrap_or_else(|| Err(no_answer(&shown))).map_err(in_use)?;
    admitted.map_err(|why| lost(&shown, &why))?;
    let planned = Run { shown: &shown, progress: &mut *progress, is_stopped: false }.plan(place)?;
    if dry_run || !planned.has_work() {
        return Ok(Repaired { dry_run, ..described(planned) });
    }
    let epoch = block_until(after(CALL_TIMEOUT), attempt.acquire());
    let epoch = epoch.unwrap_or_else(|| Err(no_answer(&shown))).map_err(in_use)?;
    let epoch = epoch.map_err(|why| lost(&shown, &why))?;
    let done =
        Run { shown: &shown, progress: &mut *progress, is_stopped: false }.carry_out(place, epoch);
    // Also after a failure: nothing is in progress then.
    let released = block_until(after(CALL_TIMEOUT), place.release(epoch));
    let done = described(done?);
    match released {
        Some(released) => released.map_err(|failure| failed(&shown, failure))?,
        None => return Err(no_answer(&shown)),
    }
    // What the volume has now counts, not what the repair believes.
    let checked = match done.refused.is_empty() {
        true => store.check(name, None, false, progress)?,
        false => done.checked,
    };
    Ok(Repaired { checked, ..done })
}

/// Returns the objects that nothing refers to, of a volume that no client writes to; `None` if a repair would do more than
/// deleting them.
///
/// # Errors
/// Returns `Aborted` if `progress` stopped the search, and otherwise the failure of the store.
pub(crate) fn unreferenced(
    shown: &str,
    place: &Place,
    progress: Progress<'_>,
) -> Result<Option<Unreferenced>> {
    let found = Run { shown, progress, is_stopped: false }.plan(place)?;
    let names = found.leftovers.iter().map(Name::to_string).collect();
    let all = Unreferenced { objects: found.leftover_count, names };
    Ok((found.repairs.is_empty() && found.refusals.is_empty()).then_some(all))
}

/// A repair takes a volume from nobody.
fn in_use(error: Error) -> Error {
    match error.kind() {
        ErrorKind::InUse => error.with_repair(
            "end its use there; if that client has ended or is lost: cleat fence add, then repeat the command",
        ),
        _ => error,
    }
}

fn lost(shown: &str, why: &Lost) -> Error {
    Error::new(ErrorKind::Aborted, format!("cannot claim {shown}: {why}"))
}

/// A run of the engine.
struct Run<'a> {
    shown: &'a str,
    progress: Progress<'a>,
    is_stopped: bool,
}

impl Run<'_> {
    fn plan(mut self, place: &Place) -> Result<Findings> {
        let found = {
            let mut step = |done, total| self.step(done, total);
            block_until(after(REPAIR_TIMEOUT), place.plan_repair(Config::default(), &mut step))
        };
        self.result(found)
    }

    fn carry_out(mut self, place: &Place, epoch: u64) -> Result<Findings> {
        let found = {
            let mut step = |done, total| self.step(done, total);
            let repaired = place.repair(epoch, Config::default(), &mut step);
            block_until(after(REPAIR_TIMEOUT), repaired)
        };
        self.result(found)
    }

    fn step(&mut self, done: u64, total: u64) -> ControlFlow<()> {
        let step = (self.progress)(done, total);
        self.is_stopped |= step.is_break();
        step
    }

    fn result(&self, found: Option<std::result::Result<Findings, Failure>>) -> Result<Findings> {
        match found {
            Some(Err(Failure::Invalid(_))) if self.is_stopped => {
                let message = format!("the repair of {} was interrupted", self.shown);
                Err(Error::new(ErrorKind::Aborted, message)
                    .with_repair("repeat the command, which continues"))
            }
            Some(found) => found.map_err(|failure| failed(self.shown, failure)),
            None => Err(no_answer(self.shown)),
        }
    }
}

fn described(found: Findings) -> Repaired {
    let (objects, snapshots) = (found.objects, found.snapshots);
    let mut checked = Checked { snapshots, objects, ..Checked::default() };
    for (snapshot, defect) in found.defects {
        let (range, problem) = (Some(damaged(&defect.range)), defect.failure.to_string());
        add(&mut checked, Defect { snapshot, range, problem });
    }
    let mut repairs: Vec<Repair> = Vec::new();
    for repair in found.repairs.into_iter().map(repaired) {
        let is_next = repairs.last_mut().is_some_and(|last| {
            (&last.problem, &last.source) == (&repair.problem, &repair.source)
                && extend(&mut last.range, repair.range)
        });
        if !is_next {
            repairs.push(repair);
        }
    }
    let refused = found
        .refusals
        .into_iter()
        .map(|refusal| Refused { problem: refusal.failure.to_string(), reason: refusal.reason });
    Repaired {
        dry_run: false,
        repairs,
        deleted: found.leftovers.iter().map(Name::to_string).collect(),
        deleted_objects: found.leftover_count,
        refused: refused.collect(),
        checked,
    }
}

fn damaged(range: &std::ops::Range<u64>) -> DamagedRange {
    DamagedRange { offset: range.start, length: range.end - range.start }
}

fn repaired(repair: engine::Repair) -> Repair {
    match repair {
        engine::Repair::Checkpoint { failure, from } => {
            Repair { range: None, problem: failure.to_string(), source: source(&from) }
        }
        engine::Repair::Page { range, failure, from } => Repair {
            range: Some(damaged(&range)),
            problem: failure.to_string(),
            source: source(&from),
        },
        engine::Repair::UsagePage(failure) => {
            Repair { range: None, problem: failure.to_string(), source: "the map".to_owned() }
        }
        engine::Repair::Usage(usage) => {
            let name = Name::Slot(usage.object);
            let problem = match usage.live == usage.accounted {
                true => format!("{name}: a snapshot needs it, and the accounting does not have it"),
                false => format!(
                    "{name}: the map needs {} bytes of it, and the accounting says {}",
                    usage.live, usage.accounted
                ),
            };
            Repair { range: None, problem, source: "the map".to_owned() }
        }
    }
}

fn source(from: &Rebuilt) -> String {
    match from.base {
        Some(base) => format!("{} and {} slots of the log", Name::Checkpoint(base), from.slots),
        None => format!("{} slots of the log, from its beginning", from.slots),
    }
}
