//! The trash of a pool, where removed images wait.

use std::time::Duration;

use librbd::{Open, Progress};

use super::{RbdStore, Target, pool_problem};
use crate::timeouts::Course;
use crate::{claim, errors};
use cleat_backend::store::{Purged, Removed, Trashed};
use cleat_backend::uri::invalid;
use cleat_core::error::{Error, ErrorKind, Result};

impl Target {
    /// Puts the image into the trash.
    pub(crate) fn discard(&self, keep: Duration) -> Result<Removed> {
        let failed = |error| self.failed(error);
        let missing = Removed { changed: false, trash: None };
        let Some(image) = self.find(Open::ReadOnly)? else { return Ok(missing) };
        self.check_removable(&image)?;
        let id = image.id().map_err(failed)?;
        drop(image);
        match self.pool.trash(&self.spec.image, keep.as_secs()) {
            Ok(()) => {}
            // Somebody else was faster.
            Err(error) if error.errno() == Some(libc::ENOENT) => return Ok(missing),
            Err(error) => return Err(self.failed(error)),
        }
        let trashed = self.pool.trashed().map_err(failed)?;
        let trash = trashed.into_iter().find(|entry| entry.id == id).map(entry);
        Ok(Removed { changed: true, trash })
    }
}

impl RbdStore {
    /// What lies in the trash, oldest first.
    pub(crate) fn trashed(&self) -> Result<Vec<Trashed>> {
        let mut trashed: Vec<Trashed> = self
            .pool
            .trashed()
            .map_err(|error| pool_problem(error, self.spec.client()))?
            .into_iter()
            .map(entry)
            .collect();
        trashed.sort_by(|a, b| (a.removed_at_s, &a.id).cmp(&(b.removed_at_s, &b.id)));
        Ok(trashed)
    }

    /// Takes the image that was called `name` out of the trash, as `target`.
    pub(super) fn restore_entry(
        &self,
        name: &str,
        id: Option<&str>,
        target: &Target,
    ) -> Result<bool> {
        let mut found = self.trashed()?;
        found.retain(|entry| entry.name == name && id.is_none_or(|id| entry.id == id));
        let [entry] = &found[..] else {
            return self.not_one(name, id, &found, target);
        };
        match self.pool.trash_restore(&entry.id, &target.spec.image) {
            Ok(()) => Ok(true),
            Err(error) if error.errno() == Some(libc::EEXIST) => {
                let message = format!("there is another {} by now", target.name);
                Err(Error::new(ErrorKind::AlreadyExists, message)
                    .with_repair("give it another name with --name")
                    .with_source(error))
            }
            Err(error) => Err(target.failed(error)),
        }
    }

    fn not_one(
        &self,
        name: &str,
        id: Option<&str>,
        found: &[Trashed],
        target: &Target,
    ) -> Result<bool> {
        if !found.is_empty() {
            let ids: Vec<&str> = found.iter().map(|entry| &*entry.id).collect();
            let message = format!("the trash has several {name}: {}", ids.join(", "));
            return Err(invalid(message).with_repair(format!(
                "say which one, with --id; when they were removed: cleat volume trash list '{}'",
                self.uri()
            )));
        }
        // Repeated, perhaps; but an id says that it was to be just this one.
        let existing = target.find(Open::ReadOnly)?;
        let there = match (&existing, id) {
            (None, _) => false,
            (Some(_), None) => true,
            (Some(image), Some(id)) => image.id().map_err(|error| target.failed(error))? == id,
        };
        if there {
            return Ok(false);
        }
        let what = id.map(|id| format!(" with the id {id}")).unwrap_or_default();
        let message = format!("there is no {name}{what} in the trash of {}", self.place());
        Err(Error::new(ErrorKind::NotFound, message)
            .with_repair(format!("see what there is: cleat volume trash list '{}'", self.uri())))
    }

    pub(crate) fn purge_entries(
        &self,
        ids: &[String],
        force: bool,
        course: &Course,
    ) -> Result<Purged> {
        let mut wanted = self.trashed()?;
        if let Some(id) = ids.iter().find(|id| wanted.iter().all(|entry| entry.id != **id)) {
            let message =
                format!("there is nothing with the id {id} in the trash of {}", self.place());
            return Err(Error::new(ErrorKind::NotFound, message).with_repair(format!(
                "see what there is: cleat volume trash list '{}'",
                self.uri()
            )));
        }
        wanted.retain(|entry| ids.is_empty() || ids.contains(&entry.id));
        let count = wanted.len() as u64;
        let mut purged = Purged { removed: Vec::new(), failed: Vec::new(), waiting: Vec::new() };
        for (entry, before) in wanted.into_iter().zip(0_u64..) {
            if waits(&entry) && !force {
                purged.waiting.push(entry);
                continue;
            }
            // Each is a step of as many parts as it has objects.
            let mut progress = |done: u64, total: u64| {
                let done = before.saturating_mul(total).saturating_add(done);
                course.tell(done, total.saturating_mul(count))
            };
            match self.purge_one(&entry, force, &mut progress) {
                Ok(()) => purged.removed.push(entry),
                Err(error) if error.kind() == ErrorKind::Aborted && course.stopped() => {
                    let message = format!(
                        "ended as it was told to, after {} of {count}; {} ({}) is still in the \
                         trash, with a part of its data gone",
                        purged.removed.len(),
                        entry.id,
                        entry.name
                    );
                    return Err(Error::new(ErrorKind::Aborted, message)
                        .with_repair("repeat the command: it goes on from there"));
                }
                Err(error) => purged.failed.push((entry, error)),
            }
        }
        Ok(purged)
    }

    /// What is in use or under a claim is kept, as it would have been from being put there.
    fn purge_one(&self, entry: &Trashed, force: bool, progress: Progress<'_>) -> Result<()> {
        let target = Target {
            id: Some(entry.id.clone()),
            name: format!("{}/{} in the trash", self.place(), entry.name),
            ..self.target(&entry.id, None)?
        };
        // What was removed in part only cannot be opened.
        if let Some(image) = target.find(Open::ReadOnly)? {
            target.check_unused(&image).map_err(|error| match error.kind() {
                ErrorKind::InUse | ErrorKind::TimedOut => error,
                _ => error.with_repair(format!(
                    "when nobody uses it: rbd trash rm {}/{}",
                    self.place(),
                    entry.id
                )),
            })?;
        }
        match self.pool.trash_remove(&entry.id, force, progress) {
            // Somebody else has done it.
            Err(error) if error.errno() == Some(libc::ENOENT) => Ok(()),
            other => other.map_err(|error| self.cannot_purge(error)),
        }
    }

    /// `pool[/namespace]`
    pub(crate) fn place(&self) -> String {
        let space = self.spec.namespace().map(|name| format!("/{name}")).unwrap_or_default();
        format!("{}{space}", self.spec.pool())
    }

    fn cannot_purge(&self, error: librbd::Error) -> Error {
        let kind = errors::kind(&error);
        let message = match error.errno() {
            Some(libc::ENOTEMPTY) => "it has snapshots",
            Some(libc::EBUSY) => "it is in use",
            _ => "the cluster does not remove it",
        };
        Error::new(kind, message).with_source(error)
    }
}

/// Whether its time has not come.
fn waits(entry: &Trashed) -> bool {
    let now = claim::now();
    u64::try_from(entry.kept_until_s).is_ok_and(|until| until > now)
}

fn entry(found: librbd::Trashed) -> Trashed {
    Trashed {
        id: found.id,
        name: found.name,
        removed_at_s: found.since,
        kept_until_s: found.kept_until,
    }
}
