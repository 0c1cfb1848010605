//! The labels of volumes. All labels of a volume are one object, so that a change takes effect as a whole:
//!
//! ```text
//! label/VOLUME/NUMBER    JSON; the highest NUMBER counts, and a change creates the next one
//! ```
//!
//! VOLUME is the identity of the volume. The labels of a new volume are therefore stored before the volume exists, so
//! none exists without its labels. Of two clients that change the labels at the same time, one finds that the next
//! NUMBER, or a higher one, exists, and changes the newer labels.

use std::time::Instant;

use cleat_backend::store::{Labels, MAX_LABELS, changed_labels, label_differences};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_object::name::VolumeId;
use cleat_object::store::{Store, StoreError};
use cleat_object::volume::Failure;

use crate::errors::{failed, no_answer, wait};
use crate::executor::block_until;
use crate::timeouts::{CALL_TIMEOUT, after};

/// The maximum length of an object with labels in bytes: each byte of a label can be escaped in JSON.
const MAX_BYTES: u64 = 8 * MAX_LABELS as u64;

/// How often a change is attempted when other clients change the labels at the same time.
const MAX_ROUNDS: u32 = 8;

/// The labels of a volume.
pub(crate) struct VolumeLabels<'a> {
    pub(crate) store: &'a dyn Store,
    /// The volume's name, for messages.
    pub(crate) shown: &'a str,
    pub(crate) volume: VolumeId,
}

impl VolumeLabels<'_> {
    /// Reads the labels.
    ///
    /// # Errors
    /// Returns `Internal` if they are not valid, and otherwise the error of the store.
    pub(crate) fn read(&self) -> Result<Labels> {
        self.newest(after(CALL_TIMEOUT)).map(|(labels, _)| labels)
    }

    /// Returns an error if an existing volume has other labels than a new one that is `wanted`.
    ///
    /// # Errors
    /// Returns `AlreadyExists` with the differences, and otherwise fails as [`VolumeLabels::read`] does.
    pub(crate) fn check(&self, wanted: &Labels) -> Result<()> {
        if wanted.is_empty() {
            return Ok(());
        }
        let differences = label_differences(&self.read()?, wanted);
        if differences.is_empty() {
            return Ok(());
        }
        let message = format!("{} exists with {}", self.shown, differences.join("; "));
        Err(Error::new(ErrorKind::AlreadyExists, message)
            .with_repair("use another name, or remove the volume"))
    }

    /// Changes the labels. Returns whether anything has changed.
    ///
    /// # Errors
    /// Returns `InvalidArgument` for too many labels, `Aborted` if other clients change them at the same time, and
    /// otherwise fails as [`VolumeLabels::read`] does.
    pub(crate) fn set(&self, changes: &Labels) -> Result<bool> {
        let deadline = after(CALL_TIMEOUT);
        for round in 0..MAX_ROUNDS {
            let (is, numbers) = self.newest(deadline)?;
            let labels = changed_labels(&is, changes)?;
            if labels == is {
                // An earlier round may have changed them without an answer.
                return Ok(round > 0);
            }
            let number = numbers.last().map_or(0, |newest| newest + 1);
            let bytes = serde_json::to_vec(&labels).map_err(|error| {
                let message = "internal: cannot print labels";
                Error::new(ErrorKind::Internal, message).with_source(error)
            })?;
            let name = self.object(number);
            match block_until(deadline, self.store.create(&name, &bytes)) {
                Some(Ok(())) => {
                    let now = wait(self.shown, deadline, self.numbers())?;
                    // Later changes may have deleted an earlier object of this name.
                    if now.last() == Some(&number) {
                        numbers.iter().for_each(|number| self.delete(*number, deadline));
                        return Ok(true);
                    }
                }
                Some(Err(StoreError::Exists | StoreError::Unclear(_))) => {}
                Some(Err(error)) => return Err(failed(self.shown, Failure::Store { name, error })),
                None => return Err(no_answer(self.shown)),
            }
        }
        let message = format!("other clients change the labels of {} at the same time", self.shown);
        Err(Error::new(ErrorKind::Aborted, message).with_repair("repeat the command"))
    }

    /// Returns the newest labels, and the numbers of all objects with labels in their order.
    fn newest(&self, deadline: Instant) -> Result<(Labels, Vec<u64>)> {
        let found = wait(self.shown, deadline, self.newest_object())?;
        let Some((numbers, bytes)) = found else { return Ok((Labels::new(), Vec::new())) };
        let labels = serde_json::from_slice(&bytes).map_err(|error| {
            let message = format!("the labels of {} are not valid JSON", self.shown);
            let object = self.object(*numbers.last().unwrap_or(&0));
            Error::new(ErrorKind::Internal, message)
                .with_repair(format!("look at the object {object} of the volume"))
                .with_source(error)
        })?;
        Ok((labels, numbers))
    }

    async fn newest_object(&self) -> std::result::Result<Option<(Vec<u64>, Vec<u8>)>, Failure> {
        loop {
            let numbers = self.numbers().await?;
            let Some(newest) = numbers.last() else { return Ok(None) };
            let name = self.object(*newest);
            match self.store.read(&name, 0..MAX_BYTES).await {
                Ok(bytes) => return Ok(Some((numbers, bytes))),
                // A later change has deleted it.
                Err(StoreError::NotFound) => {}
                Err(error) => return Err(Failure::Store { name, error }),
            }
        }
    }

    async fn numbers(&self) -> std::result::Result<Vec<u64>, Failure> {
        let prefix = format!("label/{}/", self.volume);
        let (mut numbers, mut last) = (Vec::new(), String::new());
        loop {
            let names = self.store.list(&prefix, &last).await;
            let names = names.map_err(|error| Failure::Store { name: prefix.clone(), error })?;
            let Some(name) = names.last() else { return Ok(numbers) };
            last.clone_from(name);
            let digits = names.iter().filter_map(|name| name.strip_prefix(&prefix));
            let digits = digits.filter(|digits| digits.len() == 16);
            numbers.extend(digits.filter_map(|digits| u64::from_str_radix(digits, 16).ok()));
        }
    }

    fn object(&self, number: u64) -> String {
        format!("label/{}/{number:016x}", self.volume)
    }

    /// Deletes earlier labels. What stays is deleted by a later change.
    fn delete(&self, number: u64, deadline: Instant) {
        let _ = block_until(deadline, self.store.delete(&self.object(number)));
    }
}

#[cfg(test)]
mod tests {
    use cleat_object::store::directory::Directory;

    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn concurrent_changes_are_all_made() {
        let directory = tempfile::tempdir().unwrap();
        let store = Directory::open(directory.path(), 1).unwrap();
        let volume = VolumeId([7; 16]);
        let of = VolumeLabels { store: &store, shown: "v", volume };
        std::thread::scope(|scope| {
            for number in 0..4 {
                let (of, key) = (&of, number.to_string());
                scope.spawn(move || while of.set(&labels(&[(&key, "there")])).is_err() {});
            }
        });
        assert_eq!(of.read().unwrap().len(), 4);
        let changes = labels(&[("0", ""), ("1", "here")]);
        assert!(of.set(&changes).unwrap());
        assert!(!of.set(&changes).unwrap());
        let expected = labels(&[("1", "here"), ("2", "there"), ("3", "there")]);
        assert_eq!(of.read().unwrap(), expected);
        let objects = directory.path().join("label").join(volume.to_string());
        assert_eq!(std::fs::read_dir(objects).unwrap().count(), 1, "earlier ones are deleted");
        assert_eq!(of.check(&expected).map_err(|error| error.kind()), Ok(()));
        let differs = of.check(&labels(&[("1", "there")])).unwrap_err();
        assert_eq!(differs.kind(), ErrorKind::AlreadyExists);
        assert!(differs.message().contains("the label 1=\"here\", not \"there\""), "{differs}");
    }

    #[test]
    fn labels_are_checked() {
        let directory = tempfile::tempdir().unwrap();
        let store = Directory::open(directory.path(), 1).unwrap();
        let of = VolumeLabels { store: &store, shown: "v", volume: VolumeId([7; 16]) };
        let long = "x".repeat(MAX_LABELS);
        let error = of.set(&labels(&[("long", &long)])).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        let created = block_until(after(CALL_TIMEOUT), store.create(&of.object(3), b"{"));
        created.unwrap().unwrap();
        let error = of.read().unwrap_err();
        assert!(error.report().contains("not valid JSON"), "{error}");
    }
}
