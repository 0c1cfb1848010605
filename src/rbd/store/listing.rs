//! The images of a pool, one after the other where more than their names is asked for.

use librbd::ImageSpec;

use super::{RbdStore, Target, answer, pool_problem, within};
use crate::timeouts::PATIENCE;
use cleat_backend::store::{Entry, Failure, Listing, Page};
use cleat_core::error::{Error, ErrorKind, Result};

impl RbdStore {
    /// A part of the images. What is wrong with one does not keep the others.
    pub(crate) fn listing(&self, page: &Page) -> Result<Listing> {
        let mut images = self.images()?;
        images.sort_by(|a, b| a.name.cmp(&b.name));
        let behind = |name: &str| page.after.as_deref().is_none_or(|after| name > after);
        let mut rest = images.into_iter().filter(|image| behind(&image.name));
        let mut volumes: Vec<Entry> =
            rest.by_ref().take(page.limit).map(|image| self.entry(image)).collect::<Result<_>>()?;
        let last = volumes.last().map(|entry| entry.name.clone());
        let next = last.filter(|_| rest.next().is_some());
        if page.details {
            for entry in &mut volumes {
                self.look_at(entry)?;
            }
            self.look_again(&mut volumes)?;
        }
        Ok(Listing { volumes, next })
    }

    fn images(&self) -> Result<Vec<ImageSpec>> {
        let store = self.clone();
        within(PATIENCE, &answer(self.spec.pool()), move || {
            store.pool.list().map_err(|error| pool_problem(error, store.spec.client()))
        })
    }

    fn entry(&self, image: ImageSpec) -> Result<Entry> {
        Ok(Entry {
            uri: self.uri().volume(&image.name, None)?.to_string(),
            name: image.name,
            id: Some(image.id),
            ..Entry::default()
        })
    }

    fn look_at(&self, entry: &mut Entry) -> Result<()> {
        match self.call(&entry.name, None, Target::details) {
            Ok(Some(details)) => {
                details.put_into(entry);
                entry.error = None;
            }
            Ok(None) => entry.error = Some(Failure::from(&self.torn(&entry.name))),
            Err(error) if is_of_all(error.kind()) => return Err(error),
            Err(error) => entry.error = Some(Failure::from(&error)),
        }
        Ok(())
    }

    /// What is listed and cannot be found was removed since, is about to be made, or is there in part.
    fn look_again(&self, volumes: &mut Vec<Entry>) -> Result<()> {
        let missing = |entry: &Entry| {
            entry.error.as_ref().is_some_and(|error| error.kind == ErrorKind::NotFound)
        };
        if !volumes.iter().any(missing) {
            return Ok(());
        }
        let now = self.images()?;
        let listed = |entry: &Entry| now.iter().any(|image| Some(&image.id) == entry.id.as_ref());
        volumes.retain(|entry| !missing(entry) || listed(entry));
        for entry in volumes.iter_mut().filter(|entry| missing(entry)) {
            self.look_at(entry)?;
        }
        Ok(())
    }

    fn torn(&self, name: &str) -> Error {
        let message = "its header is missing, or the image that it was cloned from";
        let error = Error::new(ErrorKind::NotFound, message);
        match self.target(name, None) {
            Ok(target) => error.with_repair(format!(
                "where it was made or removed in part only, take the rest away: {}",
                target.command("remove --now", &target.name)
            )),
            Err(_) => error,
        }
    }
}

/// What goes wrong with one image then goes wrong with each, and may take its time.
fn is_of_all(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::TimedOut | ErrorKind::Unavailable | ErrorKind::Fenced)
}
