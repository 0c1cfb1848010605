//! The trash of a pool, which keeps removed images for a while.

use std::time::Duration;

use librbd::{Open, Progress};

use super::{RbdStore, Target, pool_error};
use crate::errors;
use crate::timeouts::Tracker;
use cleat_backend::store::{Purged, Removed, Trashed};
use cleat_backend::uri::invalid;
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};

impl Target {
    /// Moves the image to the trash, which keeps it for `keep`.
    pub(crate) fn move_to_trash(&self, keep: Duration) -> Result<Removed> {
        let failed = |error| self.failed(error);
        let missing = Removed { changed: false, trash: None };
        let Some(image) = self.find(Open::ReadOnly)? else { return Ok(missing) };
        self.check_removable(&image)?;
        let id = image.id().map_err(failed)?;
        drop(image);
        match self.pool.trash(&self.spec.image, keep.as_secs()) {
            Ok(()) => {}
            // Another client has removed it in the meantime.
            Err(error) if error.errno() == Some(libc::ENOENT) => return Ok(missing),
            Err(error) => return Err(self.failed(error)),
        }
        let trashed = self.pool.trashed().map_err(failed)?;
        let trash = trashed.into_iter().find(|entry| entry.id == id).map(entry);
        Ok(Removed { changed: true, trash })
    }
}

impl RbdStore {
    /// Lists the trash, oldest entry first.
    pub(crate) fn trashed(&self) -> Result<Vec<Trashed>> {
        let mut trashed: Vec<Trashed> = self
            .pool
            .trashed()
            .map_err(|error| pool_error(error, self.spec.client()))?
            .into_iter()
            .map(entry)
            .collect();
        trashed.sort_by(|a, b| (a.removed_at_s, &a.id).cmp(&(b.removed_at_s, &b.id)));
        Ok(trashed)
    }

    /// Restores the image with the former name `name` from the trash, as `target`. Returns whether anything
    /// was changed.
    pub(super) fn restore_entry(
        &self,
        name: &str,
        id: Option<&str>,
        target: &Target,
    ) -> Result<bool> {
        let mut found = self.trashed()?;
        found.retain(|entry| entry.name == name && id.is_none_or(|id| entry.id == id));
        let [entry] = &found[..] else {
            return self.no_single_entry(name, id, &found, target);
        };
        match self.pool.trash_restore(&entry.id, &target.spec.image) {
            Ok(()) => Ok(true),
            Err(error) if error.errno() == Some(libc::EEXIST) => {
                let message = format!("another image with the name {} exists", target.name);
                Err(Error::new(ErrorKind::AlreadyExists, message)
                    .with_repair("restore it under another name with --name")
                    .with_source(error))
            }
            Err(error) => Err(target.failed(error)),
        }
    }

    fn no_single_entry(
        &self,
        name: &str,
        id: Option<&str>,
        found: &[Trashed],
        target: &Target,
    ) -> Result<bool> {
        if !found.is_empty() {
            let ids: Vec<&str> = found.iter().map(|entry| &*entry.id).collect();
            let message =
                format!("the trash has several images with the name {name}: {}", ids.join(", "));
            return Err(invalid(message).with_repair(format!(
                "select one with --id; for the times of their removal: cleat volume trash list '{}'",
                self.uri()
            )));
        }
        // An earlier call may have restored the image. With an id, it must be this very image.
        let existing = target.find(Open::ReadOnly)?;
        let restored = match (&existing, id) {
            (None, _) => false,
            (Some(_), None) => true,
            (Some(image), Some(id)) => image.id().map_err(|error| target.failed(error))? == id,
        };
        if restored {
            return Ok(false);
        }
        let what = id.map(|id| format!(" with the id {id}")).unwrap_or_default();
        let message = format!("there is no {name}{what} in the trash of {}", self.pool_path());
        Err(Error::new(ErrorKind::NotFound, message)
            .with_repair(format!("list the trash: cleat volume trash list '{}'", self.uri())))
    }

    pub(crate) fn purge_entries(
        &self,
        ids: &[String],
        force: bool,
        tracker: &Tracker,
    ) -> Result<Purged> {
        let mut wanted = self.trashed()?;
        if let Some(id) = ids.iter().find(|id| wanted.iter().all(|entry| entry.id != **id)) {
            let message =
                format!("there is no image with the id {id} in the trash of {}", self.pool_path());
            return Err(Error::new(ErrorKind::NotFound, message)
                .with_repair(format!("list the trash: cleat volume trash list '{}'", self.uri())));
        }
        wanted.retain(|entry| ids.is_empty() || ids.contains(&entry.id));
        let count = wanted.len() as u64;
        let mut purged = Purged { removed: Vec::new(), failed: Vec::new(), waiting: Vec::new() };
        for (entry, before) in wanted.into_iter().zip(0_u64..) {
            if is_kept(&entry, &SystemClock) && !force {
                purged.waiting.push(entry);
                continue;
            }
            // The removal of one image reports its objects as parts; this converts them to the whole.
            let mut progress = |done: u64, total: u64| {
                let done = before.saturating_mul(total).saturating_add(done);
                tracker.report(done, total.saturating_mul(count))
            };
            match self.purge_one(&entry, force, &mut progress) {
                Ok(()) => purged.removed.push(entry),
                Err(error) if error.kind() == ErrorKind::Aborted && tracker.stopped() => {
                    let message = format!(
                        "stopped after {} of {count} images; {} ({}) is still in the trash, with a part \
                         of its data removed",
                        purged.removed.len(),
                        entry.id,
                        entry.name
                    );
                    return Err(Error::new(ErrorKind::Aborted, message)
                        .with_repair("repeat the command to continue"));
                }
                Err(error) => purged.failed.push((entry, error)),
            }
        }
        Ok(purged)
    }

    /// Removes one entry. An image that is in use or has an active claim is kept.
    fn purge_one(&self, entry: &Trashed, force: bool, progress: Progress<'_>) -> Result<()> {
        let target = Target {
            id: Some(entry.id.clone()),
            name: format!("{}/{} in the trash", self.pool_path(), entry.name),
            ..self.target(&entry.id, None)?
        };
        // An image that was partly removed cannot be opened.
        if let Some(image) = target.find(Open::ReadOnly)? {
            target.check_unused(&image).map_err(|error| match error.kind() {
                ErrorKind::InUse | ErrorKind::TimedOut => error,
                _ => error.with_repair(format!(
                    "if no client uses it: rbd trash rm {}/{}",
                    self.pool_path(),
                    entry.id
                )),
            })?;
        }
        match self.pool.trash_remove(&entry.id, force, progress) {
            // Another client has removed it in the meantime.
            Err(error) if error.errno() == Some(libc::ENOENT) => Ok(()),
            other => other.map_err(|error| self.cannot_purge(error)),
        }
    }

    /// Returns `pool[/namespace]`, for messages and commands.
    pub(crate) fn pool_path(&self) -> String {
        let space = self.spec.namespace().map(|name| format!("/{name}")).unwrap_or_default();
        format!("{}{space}", self.spec.pool())
    }

    fn cannot_purge(&self, error: librbd::Error) -> Error {
        let kind = errors::kind(&error);
        let message = match error.errno() {
            Some(libc::ENOTEMPTY) => "it has snapshots",
            Some(libc::EBUSY) => "it is in use",
            _ => "the cluster refuses the removal",
        };
        Error::new(kind, message).with_source(error)
    }
}

/// Returns whether the time until which the trash keeps the entry has not passed.
fn is_kept(entry: &Trashed, clock: &dyn Clock) -> bool {
    u64::try_from(entry.kept_until_s).is_ok_and(|until| until > clock.unix_s())
}

fn entry(found: librbd::Trashed) -> Trashed {
    Trashed {
        id: found.id,
        name: found.name,
        removed_at_s: found.since,
        kept_until_s: found.kept_until,
    }
}
