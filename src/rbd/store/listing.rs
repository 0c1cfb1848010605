//! Lists the images of a pool. For details, each image is opened, one after the other.

use librbd::ImageSpec;

use super::{RbdStore, Target, answer, pool_error, with_timeout};
use crate::timeouts::CALL_TIMEOUT;
use cleat_backend::store::{Entry, Failure, Listing, Page};
use cleat_core::error::{Error, ErrorKind, Result};

impl RbdStore {
    /// Lists a page of the images. An error of one image is reported in its entry.
    pub(crate) fn listing(&self, page: &Page) -> Result<Listing> {
        let mut images = self.images()?;
        images.sort_by(|a, b| a.name.cmp(&b.name));
        let follows = |name: &str| page.after.as_deref().is_none_or(|after| name > after);
        let mut rest = images.into_iter().filter(|image| follows(&image.name));
        let mut volumes: Vec<Entry> =
            rest.by_ref().take(page.limit).map(|image| self.entry(image)).collect::<Result<_>>()?;
        let last = volumes.last().map(|entry| entry.name.clone());
        let next = last.filter(|_| rest.next().is_some());
        if page.details {
            for entry in &mut volumes {
                self.add_details(entry)?;
            }
            self.retry_missing(&mut volumes)?;
        }
        Ok(Listing { volumes, next })
    }

    fn images(&self) -> Result<Vec<ImageSpec>> {
        let store = self.clone();
        with_timeout(CALL_TIMEOUT, &answer(self.spec.pool()), move || {
            store.pool.list().map_err(|error| pool_error(error, store.spec.client()))
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

    fn add_details(&self, entry: &mut Entry) -> Result<()> {
        match self.call(&entry.name, None, Target::details) {
            Ok(Some(details)) => {
                details.put_into(entry);
                entry.error = None;
            }
            Ok(None) => entry.error = Some(Failure::from(&self.incomplete(&entry.name))),
            Err(error) if affects_all(error.kind()) => return Err(error),
            Err(error) => entry.error = Some(Failure::from(&error)),
        }
        Ok(())
    }

    /// Checks the images that were listed but not found again: they were removed, were being created, or
    /// exist in part.
    fn retry_missing(&self, volumes: &mut Vec<Entry>) -> Result<()> {
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
            self.add_details(entry)?;
        }
        Ok(())
    }

    fn incomplete(&self, name: &str) -> Error {
        let message = "its header or its parent is missing";
        let error = Error::new(ErrorKind::NotFound, message);
        match self.target(name, None) {
            Ok(target) => error.with_repair(format!(
                "if it was created or removed only in part, remove the rest: {}",
                target.command("remove --now", &target.name)
            )),
            Err(_) => error,
        }
    }
}

/// Returns whether an error affects all images of the pool. The listing then fails, because each further
/// image would wait for the same timeout.
fn affects_all(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::TimedOut | ErrorKind::Unavailable | ErrorKind::Fenced)
}
