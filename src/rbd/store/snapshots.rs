//! Operations whose target is a snapshot.

use librbd::Open;

use super::Target;
use crate::timeouts::Tracker;
use cleat_core::error::{Error, ErrorKind, Result};

impl Target {
    pub(crate) fn snapshot_create(&self) -> Result<bool> {
        let image = self.open(Open::Write)?;
        match image.snapshot_create(self.snapshot()) {
            Ok(()) => Ok(true),
            Err(error) if error.errno() == Some(libc::EEXIST) => Ok(false),
            Err(error) => Err(self.failed(error)),
        }
    }

    pub(crate) fn snapshot_remove(&self) -> Result<bool> {
        let Some(image) = self.find(Open::Write)? else { return Ok(false) };
        match image.snapshot_remove(self.snapshot()) {
            Ok(()) => Ok(true),
            Err(error) if error.errno() == Some(libc::ENOENT) => Ok(false),
            Err(error) if error.errno() == Some(libc::EBUSY) => {
                // librbd returns the same errno for a snapshot that has clones and for a protected one.
                Err(Error::new(ErrorKind::InUse, format!("{} is protected", self.name))
                    .with_repair(self.command("snapshot unprotect", &self.name))
                    .with_source(error))
            }
            Err(error) => Err(self.failed(error)),
        }
    }

    pub(crate) fn snapshot_rename(&self, to: &str) -> Result<bool> {
        let image = self.open(Open::Write)?;
        let Err(error) = image.snapshot_rename(self.snapshot(), to) else { return Ok(true) };
        let exists = |name: &str| {
            let snapshots = self.snapshots_of(&image)?;
            Ok::<_, Error>(snapshots.iter().any(|s| s.kind == "user" && s.name == name))
        };
        match error.errno() {
            Some(libc::ENOENT) if exists(to)? => Ok(false),
            Some(libc::ENOENT) => Err(self.missing_or(error)),
            Some(libc::EEXIST) if !exists(self.snapshot())? => Ok(false),
            Some(libc::EEXIST) => {
                let message = format!("{} cannot get the name {to}: it exists", self.name);
                Err(Error::new(ErrorKind::AlreadyExists, message).with_source(error))
            }
            _ => Err(self.failed(error)),
        }
    }

    pub(crate) fn snapshot_protect(&self, protect: bool) -> Result<bool> {
        let image = self.open(Open::Write)?;
        match image.snapshot_is_protected(self.snapshot()) {
            Ok(is) if is == protect => return Ok(false),
            Ok(_) => {}
            Err(error) => return Err(self.missing_or(error)),
        }
        match image.snapshot_protect(self.snapshot(), protect) {
            Ok(()) => Ok(true),
            Err(error) if error.errno() == Some(libc::EBUSY) && !protect => Err(self.cloned(error)),
            Err(error) => Err(self.failed(error)),
        }
    }

    pub(crate) fn snapshot_rollback(&self, tracker: &Tracker) -> Result<()> {
        let image = self.open(Open::ReadOnly)?;
        if let Err(error) = image.snapshot_is_protected(self.snapshot()) {
            return Err(self.missing_or(error));
        }
        self.check_unused(&image)?;
        drop(image);
        let image = self.open_exclusively()?;
        let mut progress = |done, total| tracker.report(done, total);
        image.snapshot_rollback(self.snapshot(), &mut progress).map_err(|error| {
            self.stopped_error(error, "a part of the image has the content of the snapshot")
        })
    }

    fn snapshot(&self) -> &str {
        self.spec.snapshot.as_deref().unwrap_or_default()
    }

    fn missing_or(&self, error: librbd::Error) -> Error {
        if error.errno() != Some(libc::ENOENT) {
            return self.failed(error);
        }
        Error::new(ErrorKind::NotFound, format!("there is no snapshot {}", self.name)).with_repair(
            format!(
                "list the snapshots: cleat volume snapshot list '{}'",
                self.uri.replacen(&format!("@{}", self.snapshot()), "", 1)
            ),
        )
    }

    /// Returns the error for a snapshot that must stay protected because it has clones.
    fn cloned(&self, error: librbd::Error) -> Error {
        let at = self.open_at(Some(self.snapshot()), Open::ReadOnly);
        let clones = at.and_then(|image| self.clones(&image));
        let (by, repair) = match clones {
            Ok(Some(clones)) if !clones.is_empty() => {
                let flatten = self.command("flatten", &clones[0]);
                (clones.join(", "), format!("remove its clones, or flatten them: {flatten}"))
            }
            _ => ("clones".to_owned(), "remove its clones, or flatten them".to_owned()),
        };
        Error::new(ErrorKind::InUse, format!("{} is the parent of {by}", self.name))
            .with_repair(repair)
            .with_source(error)
    }
}
