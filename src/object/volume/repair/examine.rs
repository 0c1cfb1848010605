//! The look at a volume before a repair. It changes nothing but memory.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use super::super::access::Failure;
use super::super::check::{Check, is_defect};
use super::super::opening::{Before, Kept, Opened};
use super::super::recovery::{log_object, replay_all, replay_damaged, slots};
use super::super::shared::Shared;
use super::super::sweep::{Pages, SWEPT_AT_ONCE};
use super::super::usage::Object;
use super::older::{Older, Step};
use super::{Findings, Place, Progress, Rebuilt, Repair, Work};
use crate::codec::{Entry, History, MAX_CUTS, Record, Snapshot};
use crate::name::{Name, Position};
use crate::volume::{Config, Defect, Depth, Volume};

/// The map pages that are rebuilt at most, because their entries are in memory until they are written.
const MAX_PAGES: usize = 4 << 10;

/// The look at a volume.
pub(super) struct Examination<'a> {
    place: &'a Place,
    config: Config,
    epoch: u64,
    progress: Progress<'a>,
    done: u64,
    total: u64,
    findings: Findings,
}

/// A content of the volume that was checked.
struct Checked {
    volume: Volume,
    history: History,
    check: Check,
    /// The pages of the map that cannot be read, by their number.
    lost: BTreeMap<u64, Defect>,
    /// The ranges whose data cannot be read.
    defects: Vec<Defect>,
}

impl<'a> Examination<'a> {
    pub(super) fn new(
        place: &'a Place,
        config: Config,
        epoch: u64,
        progress: Progress<'a>,
    ) -> Self {
        let findings = Findings::default();
        Self { place, config, epoch, progress, done: 0, total: 0, findings }
    }

    /// Examines the volume. `before` is its end, which is fixed.
    pub(super) async fn volume(
        mut self,
        before: Before,
    ) -> Result<(Findings, Option<Work>), Failure> {
        let Before { history, newest } = before;
        let Some(end) = newest else { return Ok((self.findings, None)) };
        let (access, opened) = (self.place.access().clone(), self.opened(&history));
        let description = self.place.description();
        let work =
            match replay_damaged(access, self.config.clone(), description, opened, None).await {
                Ok((shared, lost)) => self.opened_volume(shared, history, lost, end).await?,
                Err(failure) if is_defect(&failure) => {
                    self.closed_volume(failure, &history, end).await?
                }
                Err(failure) => return Err(failure),
            };
        Ok((self.findings, work))
    }

    fn opened(&self, history: &History) -> Opened {
        let (history, kept) = (history.clone(), Kept::default());
        Opened { epoch: self.epoch, history, kept, tail_memory: None }
    }

    /// Examines a volume that can be opened, but for the pages of its accounting in `lost_usage`.
    async fn opened_volume(
        &mut self,
        shared: Shared,
        history: History,
        lost_usage: Vec<Failure>,
        end: Position,
    ) -> Result<Option<Work>, Failure> {
        let mut found = self.check(Volume(Arc::new(shared)), history).await?;
        self.note_defects(&found.defects);
        let mut pages = Vec::new();
        if !found.lost.is_empty() {
            match self.rebuild(end, found.history.base, Some(&found)).await? {
                Ok(rebuilt) => pages = self.take_pages(&mut found, &rebuilt).await?,
                Err(reason) => {
                    for failure in lost_usage {
                        self.findings
                            .refuse(failure, "the map from which it is counted is incomplete");
                    }
                    self.refuse_pages(found.lost.into_values(), &reason);
                    return Ok(None);
                }
            }
        }
        self.complete(found, pages, lost_usage).await
    }

    /// Examines a volume that cannot be opened.
    async fn closed_volume(
        &mut self,
        failure: Failure,
        history: &History,
        end: Position,
    ) -> Result<Option<Work>, Failure> {
        match self.rebuild(end, history.base, None).await? {
            Ok(rebuilt) => {
                self.note_defects(&rebuilt.defects);
                let from = source(&rebuilt.history);
                self.findings.repairs.push(Repair::Checkpoint { failure, from });
                self.complete(rebuilt, Vec::new(), Vec::new()).await
            }
            Err(reason) => {
                self.findings.refuse(failure, reason);
                Ok(None)
            }
        }
    }

    /// Reads the whole map, and of each object with data the header and the last byte that is needed.
    async fn check(&mut self, volume: Volume, history: History) -> Result<Checked, Failure> {
        let check = Check::new(Depth::Objects);
        let (lost, defects) = (BTreeMap::new(), Vec::new());
        let mut found = Checked { volume, history, check, lost, defects };
        self.total += found.volume.map_pages();
        for number in 0..found.volume.map_pages() {
            for defect in found.check.page(&found.volume, number).await? {
                match is_page(&defect.failure) {
                    true => drop(found.lost.insert(number, defect)),
                    false => found.defects.push(defect),
                }
            }
            self.step()?;
        }
        self.findings.objects += found.check.objects();
        Ok(found)
    }

    fn step(&mut self) -> Result<(), Failure> {
        self.done += 1;
        match (self.progress)(self.done, self.total).is_break() {
            true => Err(Failure::Invalid("the repair was interrupted")),
            false => Ok(()),
        }
    }

    fn note_defects(&mut self, defects: &[Defect]) {
        self.findings.defects.extend(defects.iter().map(|defect| (None, defect.clone())));
    }

    fn refuse_pages(&mut self, lost: impl Iterator<Item = Defect>, reason: &str) {
        for defect in lost {
            if self.findings.refusals.last().is_none_or(|last| last.failure != defect.failure) {
                self.findings.refuse(defect.failure.clone(), reason);
            }
            self.findings.defects.push((None, defect));
        }
    }

    /// Finds a content that is proved to be that of the volume up to `end`, from another checkpoint than `lost`. Returns
    /// the reason if there is none.
    async fn rebuild(
        &mut self,
        end: Position,
        lost: Option<Position>,
        known: Option<&Checked>,
    ) -> Result<Result<Checked, String>, Failure> {
        if known.is_some_and(|known| known.lost.len() > MAX_PAGES) {
            return Ok(Err(format!("more than {MAX_PAGES} pages of the map cannot be read")));
        }
        let mut last = None;
        let access = self.place.access();
        let mut older = Older::new(access, end);
        loop {
            match older.next().await? {
                Step::Found(history) if history.base == lost => {}
                Step::Found(history) => match self.attempt(history, known).await? {
                    Ok(rebuilt) => return Ok(Ok(rebuilt)),
                    Err(why) => last = Some(why),
                },
                Step::Missing(slot) => {
                    last.get_or_insert(format!(
                        "{slot} does not exist or is damaged, and may have had a part of the history: without it, the \
                         volume could lack writes"
                    ));
                    break;
                }
                Step::Over => break,
            }
        }
        let none = "there is no other checkpoint from which it could be rebuilt";
        Ok(Err(last.unwrap_or_else(|| none.to_owned())))
    }

    /// Replays a history, and proves that the result is the content of the volume: everything that its map refers to
    /// exists, its accounting agrees with the map, and it is the same as what is known of the volume.
    async fn attempt(
        &mut self,
        history: History,
        known: Option<&Checked>,
    ) -> Result<Result<Checked, String>, Failure> {
        let from = |why: &str| match history.base {
            Some(base) => format!("it cannot be rebuilt from {}: {why}", Name::Checkpoint(base)),
            None => format!("it cannot be rebuilt from the beginning of the log: {why}"),
        };
        if history.cuts.len() > MAX_CUTS {
            return Ok(Err(from("there are too many take-overs above it")));
        }
        let (access, opened) = (self.place.access().clone(), self.opened(&history));
        let description = self.place.description();
        let shared = match replay_all(access, self.config.clone(), description, opened, None).await
        {
            Ok(shared) => shared,
            Err(failure @ Failure::Unsupported(_)) => return Ok(Err(from(&failure.to_string()))),
            Err(failure) if is_defect(&failure) => return Ok(Err(from(&failure.to_string()))),
            Err(failure) => return Err(failure),
        };
        let rebuilt = self.check(Volume(Arc::new(shared)), history.clone()).await?;
        if let Some(defect) = rebuilt.lost.values().next() {
            return Ok(Err(from(&defect.failure.to_string())));
        }
        // A lost object can be one that was superfluous: the history would be incomplete then.
        let is_lost = |defect: &&Defect| matches!(defect.failure, Failure::Lost(_));
        let mut missing = rebuilt.defects.iter().filter(is_lost);
        if let Some(defect) = missing.find(|defect| known.is_none_or(|known| !known.has(defect))) {
            return Ok(Err(from(&defect.failure.to_string())));
        }
        if !rebuilt.check.wrong_usage(&rebuilt.volume).is_empty() {
            return Ok(Err(from("its accounting differs from its map")));
        }
        if let Some(known) = known
            && !is_same(known, &rebuilt.volume).await?
        {
            return Ok(Err(from("it differs from what can be read of the volume")));
        }
        Ok(Ok(rebuilt))
    }

    /// Takes the pages that cannot be read from a content that was rebuilt.
    async fn take_pages(
        &mut self,
        found: &mut Checked,
        rebuilt: &Checked,
    ) -> Result<Vec<(u64, Vec<Entry>)>, Failure> {
        let mut pages = Vec::new();
        for (number, Defect { range, failure }) in std::mem::take(&mut found.lost) {
            let entries = entries_of(&rebuilt.volume, number).await?;
            let base = number * found.volume.page_bytes();
            let defects = found.check.entries(&found.volume, base, entries.clone()).await?;
            self.note_defects(&defects);
            let from = source(&rebuilt.history);
            self.findings.repairs.push(Repair::Page { range, failure, from });
            pages.push((number, entries));
        }
        Ok(pages)
    }

    /// Examines the accounting, the snapshots and the names of a volume whose map is complete.
    async fn complete(
        &mut self,
        found: Checked,
        pages: Vec<(u64, Vec<Entry>)>,
        lost_usage: Vec<Failure>,
    ) -> Result<Option<Work>, Failure> {
        let Checked { volume, history, check, .. } = found;
        let mut needed = BTreeSet::new();
        let mut all_readable = true;
        for snapshot in volume.snapshots() {
            all_readable &= self.snapshot(&volume, &snapshot, &mut needed).await?;
        }
        let usage = self.usage(&volume, &check, (&needed, &lost_usage)).await?;
        self.findings.repairs.extend(lost_usage.into_iter().map(Repair::UsagePage));
        let named: BTreeSet<Position> = usage.iter().map(|(at, _)| *at).collect();
        let sweeps = all_readable && self.leftovers(&volume, history.base, &named).await?;
        Ok(Some(Work { volume, history, pages, usage, sweeps }))
    }

    /// Examines a snapshot, and adds the log objects that it needs. Returns whether its map can be read.
    async fn snapshot(
        &mut self,
        volume: &Volume,
        snapshot: &Snapshot,
        needed: &mut BTreeSet<Position>,
    ) -> Result<bool, Failure> {
        const REASON: &str = "snapshots are not rebuilt: their records name their checkpoints";
        self.findings.snapshots += 1;
        let view = match volume.0.content_of(snapshot, self.config.clone()).await {
            Ok(view) => Volume(Arc::new(view)),
            Err(failure) if is_defect(&failure) => {
                self.unreadable(snapshot, 0..snapshot.size, &failure, REASON);
                return Ok(false);
            }
            Err(failure) => return Err(failure),
        };
        let found = self.check(view, snapshot.history.clone()).await?;
        for defect in found.lost.values() {
            self.unreadable(snapshot, defect.range.clone(), &defect.failure, REASON);
        }
        for defect in found.defects {
            self.findings.defects.push((Some(snapshot.name.clone()), defect));
        }
        needed.extend(found.check.live().keys().copied());
        // Its map is a replay of these.
        needed.extend(slots(&snapshot.history));
        Ok(found.lost.is_empty())
    }

    fn unreadable(
        &mut self,
        snapshot: &Snapshot,
        range: Range<u64>,
        failure: &Failure,
        reason: &str,
    ) {
        let is_new = |refusal: &super::Refusal| refusal.failure != *failure;
        if self.findings.refusals.last().is_none_or(is_new) {
            self.findings.refuse(failure.clone(), reason);
        }
        let defect = Defect { range, failure: failure.clone() };
        self.findings.defects.push((Some(snapshot.name.clone()), defect));
    }

    /// Returns the right values of what is accounted wrongly. Objects in `needed` must be in the accounting, because a
    /// snapshot needs them, and if a part of it is lost, all that exist.
    async fn usage(
        &mut self,
        volume: &Volume,
        check: &Check,
        (needed, lost): (&BTreeSet<Position>, &[Failure]),
    ) -> Result<Vec<(Position, Object)>, Failure> {
        let shared = &*volume.0;
        let mut live: BTreeMap<Position, u64> = BTreeMap::new();
        let wrong = check.wrong_usage(volume);
        live.extend(wrong.iter().map(|usage| (usage.object, usage.live)));
        let mut missing: BTreeSet<Position> = needed.clone();
        if lost.is_empty() {
            self.findings.repairs.extend(wrong.into_iter().map(Repair::Usage));
        } else {
            let earlier = |name: Name| match name {
                Name::Slot(at) if at.epoch < shared.epoch => Some(at),
                _ => None,
            };
            let names = shared.access.list("log/", "").await?;
            missing.extend(names.into_iter().filter_map(earlier));
        }
        for at in missing {
            if live.contains_key(&at) || shared.lock().usage.contains(at) {
                continue;
            }
            if lost.is_empty() {
                let usage = crate::volume::WrongUsage { object: at, live: 0, accounted: 0 };
                self.findings.repairs.push(Repair::Usage(usage));
            }
            live.insert(at, 0);
        }
        let mut right = Vec::new();
        for (at, live) in live {
            right.extend(self.object(shared, at, live).await?.map(|object| (at, object)));
        }
        Ok(right)
    }

    /// Returns the length and the needed bytes of a log object; `None` if there is nothing to account: no data is needed
    /// and it is no log object.
    async fn object(
        &self,
        shared: &Shared,
        at: Position,
        live: u64,
    ) -> Result<Option<Object>, Failure> {
        let live =
            u32::try_from(live).map_err(|_| Failure::Invalid("an object has too much data"))?;
        let bytes = match log_object(&shared.access, at).await {
            Ok(object) => {
                object.records.iter().filter_map(Record::extent).map(|extent| extent.length).sum()
            }
            // Reads of its data report it.
            Err(failure) if is_defect(&failure) && live > 0 => live,
            Err(failure) if is_defect(&failure) => return Ok(None),
            Err(failure) => return Err(failure),
        };
        Ok(Some(Object { bytes: live.max(bytes), live }))
    }

    /// Finds the objects that nothing refers to. Returns whether they may be deleted. Objects in `named` will be in the
    /// accounting.
    async fn leftovers(
        &mut self,
        volume: &Volume,
        base: Option<Position>,
        named: &BTreeSet<Position>,
    ) -> Result<bool, Failure> {
        let shared = &*volume.0;
        // The next opener needs more than what the map and the snapshots refer to.
        if shared.lock().snapshots.is_rolled_back() {
            return Ok(true);
        }
        for kind in ["log/", "page/", "ckpt/", "dead/"] {
            let (mut after, mut is_end) = (String::new(), false);
            while !is_end {
                let mut names = Vec::new();
                while names.len() < SWEPT_AT_ONCE && !is_end {
                    let some = shared.access.list_some(kind, &after).await?;
                    some.last().into_iter().for_each(|last| after.clone_from(last));
                    is_end = some.is_empty();
                    let parsed = some.iter().filter_map(|text| Name::parse(text));
                    names.extend(parsed.filter(|name| is_swept(name, shared.epoch)));
                }
                match self.superfluous(shared, names, base, named).await {
                    Ok(()) => {}
                    Err(failure) if is_defect(&failure) => {
                        let reason =
                            "objects that nothing refers to cannot be told from the others";
                        self.findings.refuse(failure, reason);
                        (self.findings.leftovers, self.findings.leftover_count) = (Vec::new(), 0);
                        return Ok(false);
                    }
                    Err(failure) => return Err(failure),
                }
            }
        }
        Ok(true)
    }

    async fn superfluous(
        &mut self,
        shared: &Shared,
        names: Vec<Name>,
        base: Option<Position>,
        named: &BTreeSet<Position>,
    ) -> Result<(), Failure> {
        let page = |name: &Name| match name {
            Name::Page { epoch, number } => Some((*epoch, *number)),
            _ => None,
        };
        let mut pages: Pages = names.iter().filter_map(page).collect();
        let walked = match pages.is_empty() {
            true => Vec::new(),
            false => shared.remove_referenced(&mut pages).await?,
        };
        for name in names {
            let is_base = |name| matches!(name, Name::Checkpoint(at) if Some(at) == base);
            let is_named = |name| matches!(name, Name::Slot(at) if named.contains(&at));
            let is_needed = shared.is_needed(&shared.lock(), name, &pages, &walked);
            if !is_needed && !is_base(name) && !is_named(name) && shared.may_delete(name).await? {
                self.findings.leave(name);
            }
        }
        Ok(())
    }
}

impl Checked {
    /// Whether this defect was found, too.
    fn has(&self, defect: &Defect) -> bool {
        self.defects.contains(defect)
    }
}

/// Whether a sweep of a writer in `epoch` looks at the object.
fn is_swept(name: &Name, epoch: u64) -> bool {
    match name {
        Name::Slot(at) | Name::Checkpoint(at) => at.epoch < epoch,
        Name::Page { epoch: of, .. } => *of < epoch,
        Name::Token { .. } => true,
        _ => false,
    }
}

/// Whether the failure is that of a page of the map.
fn is_page(failure: &Failure) -> bool {
    matches!(
        failure,
        Failure::Lost(Name::Page { .. }) | Failure::Damaged { name: Name::Page { .. }, .. }
    )
}

fn source(history: &History) -> Rebuilt {
    Rebuilt { base: history.base, slots: slots(history).count() as u64 }
}

async fn entries_of(volume: &Volume, number: u64) -> Result<Vec<Entry>, Failure> {
    let page = |page: Option<&crate::map::Page>| page.map_or(Vec::new(), |p| p.entries().to_vec());
    volume.0.with_map(|state| Ok(page(state.map.leaf(number)?))).await
}

/// Whether a content is the same as what can be read of the volume.
async fn is_same(known: &Checked, rebuilt: &Volume) -> Result<bool, Failure> {
    let volume = &known.volume;
    if volume.size() != rebuilt.size() || volume.snapshots() != rebuilt.snapshots() {
        return Ok(false);
    }
    for number in (0..volume.map_pages()).filter(|number| !known.lost.contains_key(number)) {
        if entries_of(volume, number).await? != entries_of(rebuilt, number).await? {
            return Ok(false);
        }
    }
    Ok(true)
}
