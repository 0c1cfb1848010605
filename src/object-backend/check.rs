//! The check of volumes, for commands. A volume in use is checked as it is at one moment; where its writer has deleted
//! that meanwhile, the check looks again.

use cleat_backend::store::{CheckStore, Checked, DamagedRange, Defect, Progress, Repaired};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_object::codec::Snapshot;
use cleat_object::name::Name;
use cleat_object::volume::{Check, Config, Depth, Failure, Place, Volume};

use crate::defects::add;
use crate::errors::{no_snapshot, wait};
use crate::manage::ObjectStore;
use crate::repair;
use crate::spec::VolumeAt;
use crate::timeouts::{CALL_TIMEOUT, after};

/// How often a page of the map is looked at again.
const MAX_LOOKS: u32 = 3;

/// A check of the contents of a volume.
struct Checker<'a> {
    volume: &'a VolumeAt,
    place: &'a Place,
    depth: Depth,
    found: Checked,
    /// The pages of the map that were checked, and of all contents.
    done: u64,
    total: u64,
}

impl CheckStore for ObjectStore {
    fn check(
        &self,
        name: &str,
        snapshot: Option<&str>,
        data: bool,
        progress: Progress<'_>,
    ) -> Result<Checked> {
        let (volume, place) = self.existing(name)?;
        let shown = volume.shown();
        let view = Self::view(&volume, &place)?;
        let mut contents: Vec<Option<Snapshot>> = view.snapshots().into_iter().map(Some).collect();
        match snapshot {
            None => contents.push(None),
            Some(name) => {
                contents.retain(|content| content.as_ref().is_some_and(|found| found.name == name));
                contents.first().ok_or_else(|| no_snapshot(&shown, name))?;
            }
        }
        let size = |content: &Option<Snapshot>| {
            content.as_ref().map_or(view.size(), |snapshot| snapshot.size)
        };
        let total = contents.iter().map(|content| size(content).div_ceil(view.page_bytes())).sum();
        let depth = if data { Depth::Data } else { Depth::Objects };
        let (volume, place, found) = (&volume, &place, Checked::default());
        let mut checker = Checker { volume, place, depth, found, done: 0, total };
        if !wait(&shown, after(CALL_TIMEOUT), place.is_pinned())? {
            let problem = "the parent has no pin for this clone, so it does not keep the snapshot";
            checker.add(None, None, problem.to_owned());
        }
        for content in &contents {
            checker.content(content.as_ref(), progress)?;
        }
        if snapshot.is_none() {
            checker.look_for_unreferenced(progress)?;
        }
        Ok(checker.found)
    }

    fn repair(&self, name: &str, dry_run: bool, progress: Progress<'_>) -> Result<Repaired> {
        repair::repair(self, name, dry_run, progress)
    }
}

impl Checker<'_> {
    /// Checks the volume, or a snapshot of it.
    fn content(&mut self, snapshot: Option<&Snapshot>, progress: Progress<'_>) -> Result<()> {
        let mut view = self.look(snapshot)?;
        let (mut check, before) = (Check::new(self.depth), self.found.defects.len());
        let (mut number, mut looks, mut is_one_view) = (0, 0, true);
        while number < view.map_pages() && self.found.defects.len() < Checked::MAX_DEFECTS {
            let page = check.page(&view, number);
            let defects = wait(&self.volume.shown(), after(CALL_TIMEOUT), page)?;
            let is_lost = defects.iter().any(|found| matches!(found.failure, Failure::Lost(_)));
            if is_lost && looks < MAX_LOOKS && self.is_in_use()? {
                (view, looks, is_one_view) = (self.look(snapshot)?, looks + 1, false);
                continue;
            }
            for defect in defects {
                let range = DamagedRange {
                    offset: defect.range.start,
                    length: defect.range.end - defect.range.start,
                };
                self.add(snapshot, Some(range), defect.failure.to_string());
            }
            (number, looks, self.done) = (number + 1, 0, self.done + 1);
            if progress(self.done, self.total).is_break() {
                let message = format!("the check of {} was interrupted", self.volume.shown());
                return Err(Error::new(ErrorKind::Aborted, message));
            }
        }
        self.found.objects += check.objects();
        self.found.snapshots += usize::from(snapshot.is_some());
        if snapshot.is_none() && is_one_view && self.found.defects.len() == before {
            for usage in check.wrong_usage(&view) {
                let problem = format!(
                    "{}: the map needs {} bytes of it, and the accounting says {}",
                    Name::Slot(usage.object),
                    usage.live,
                    usage.accounted
                );
                self.add(None, None, problem);
            }
        }
        Ok(())
    }

    /// Looks for objects that nothing refers to, if that can be told: a client that has the volume open puts objects
    /// before something refers to them.
    fn look_for_unreferenced(&mut self, progress: Progress<'_>) -> Result<()> {
        let is_told = self.found.defects.is_empty() && self.place.check_key().is_ok();
        if is_told && !self.is_in_use()? {
            let (done, total) = (self.done, self.total);
            // It reads the map once more, which is shown as the end of the check.
            let progress: Progress<'_> = &mut |_, _| progress(done, total);
            self.found.unreferenced =
                repair::unreferenced(&self.volume.shown(), self.place, progress)?;
        }
        Ok(())
    }

    fn look(&self, snapshot: Option<&Snapshot>) -> Result<Volume> {
        let (shown, deadline, config) =
            (self.volume.shown(), after(CALL_TIMEOUT), Config::default());
        match snapshot {
            Some(snapshot) => wait(&shown, deadline, self.place.view_snapshot(snapshot.id, config)),
            None => wait(&shown, deadline, self.place.view(config)),
        }
    }

    fn is_in_use(&self) -> Result<bool> {
        let newest = crate::claim::newest(self.place);
        Ok(wait(&self.volume.shown(), after(CALL_TIMEOUT), newest)?.is_held())
    }

    fn add(&mut self, snapshot: Option<&Snapshot>, range: Option<DamagedRange>, problem: String) {
        let snapshot = snapshot.map(|snapshot| snapshot.name.clone());
        add(&mut self.found, Defect { snapshot, range, problem });
    }
}
