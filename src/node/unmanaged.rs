//! The records that this supervisor leaves in place because it cannot use them: a newer build wrote them, or
//! they cannot be read now. Nothing of their mappings may be removed without force.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::journal::{RejectedRecord, Rejection};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_kernel::Identity;

/// The records that this supervisor leaves in place.
#[derive(Debug, Default)]
pub(crate) struct Unmanaged(Mutex<BTreeMap<String, Reason>>);

/// Why a record is left in place.
#[derive(Debug)]
enum Reason {
    /// A newer build wrote it. Contains the name of the mapping, if it is known.
    NewerVersion(Option<String>),
    Unreadable,
}

impl Unmanaged {
    /// Adds the mapping of a rejected record, unless the record is damaged.
    pub(crate) fn insert(&self, rejected: &RejectedRecord) {
        let reason = match &rejected.reason {
            Rejection::NewerVersion { name, .. } => Reason::NewerVersion(name.clone()),
            Rejection::Unreadable(_) => Reason::Unreadable,
            Rejection::Invalid(_) => return,
        };
        self.records().insert(rejected.mapping_id.clone(), reason);
    }

    /// Removes a mapping, because its record could be read or does not exist any more.
    pub(crate) fn remove(&self, mapping_id: &str) {
        self.records().remove(mapping_id);
    }

    /// Returns the ids of all mappings.
    pub(crate) fn ids(&self) -> Vec<String> {
        self.records().keys().cloned().collect()
    }

    /// Returns whether the record of a mapping cannot be read now.
    pub(crate) fn is_unreadable(&self, mapping_id: &str) -> bool {
        matches!(self.records().get(mapping_id), Some(Reason::Unreadable))
    }

    /// Returns whether one of the mappings may have this name: the name in a record that cannot be read is not known.
    pub(crate) fn may_have(&self, name: &str) -> bool {
        self.records().values().any(|reason| match reason {
            Reason::NewerVersion(Some(taken)) => taken == name,
            Reason::NewerVersion(None) | Reason::Unreadable => true,
        })
    }

    /// Checks that no mapping of a newer build has the name `name`. With a second mapping of this name, the
    /// newer build would ignore one of the two.
    ///
    /// # Errors
    /// Returns `AlreadyExists` if there is such a mapping.
    pub(crate) fn check_name(&self, name: &str) -> Result<()> {
        let records = self.records();
        let taken = records.iter().find(
            |(_, reason)| matches!(reason, Reason::NewerVersion(Some(taken)) if taken == name),
        );
        let Some((mapping_id, _)) = taken else { return Ok(()) };
        let message =
            format!("{name} is the name of mapping {mapping_id}, whose record a newer build wrote");
        Err(Error::new(ErrorKind::AlreadyExists, message)
            .with_repair("choose another name (--name), or install the newer build again"))
    }

    /// Checks that a device without a usable record belongs to no record that is left in place.
    ///
    /// # Errors
    /// Returns `Unsupported` for a mapping of a newer build, and `Unavailable` if the record cannot be read
    /// now.
    pub(crate) fn check_device(&self, identity: &Identity) -> Result<()> {
        let records = self.records();
        let Some(reason) = records.get(identity.mapping_id()) else { return Ok(()) };
        let name = identity.name();
        let (kind, why, repair) = match reason {
            Reason::NewerVersion(_) => (
                ErrorKind::Unsupported,
                "a newer build wrote its record",
                "install the newer build again".to_owned(),
            ),
            Reason::Unreadable => (
                ErrorKind::Unavailable,
                "its record cannot be read now",
                "cleat status shows the cause".to_owned(),
            ),
        };
        let message = format!("{name} is not managed by this daemon: {why}");
        Err(Error::new(kind, message)
            .with_repair(format!("{repair}; or run: cleat unmap --force {name}")))
    }

    fn records(&self) -> MutexGuard<'_, BTreeMap<String, Reason>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_that_cannot_be_read_may_have_any_name() {
        let unmanaged = Unmanaged::default();
        assert!(!unmanaged.may_have("a"));
        let newer = Reason::NewerVersion(Some("a".to_owned()));
        unmanaged.records().insert("1".to_owned(), newer);
        assert!(unmanaged.may_have("a") && !unmanaged.may_have("b"));
        unmanaged.records().insert("2".to_owned(), Reason::Unreadable);
        assert!(unmanaged.may_have("b"));
    }
}
