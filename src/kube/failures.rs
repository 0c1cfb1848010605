//! The last failure of the decision about each volume, for calls and attachments that wait for it.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cleat_core::error::{Error, ErrorKind};

use crate::api::message;

/// The failures, by the name of the grant. A success removes an entry, so there are at most as many as grants that
/// are tried again.
#[derive(Debug, Default)]
pub(crate) struct Failures(Mutex<BTreeMap<String, (ErrorKind, String)>>);

impl Failures {
    pub(crate) fn put(&self, grant: &str, error: &Error) {
        self.lock().insert(grant.to_owned(), (error.kind(), message(error)));
    }

    pub(crate) fn remove(&self, grant: &str) {
        self.lock().remove(grant);
    }

    pub(crate) fn get(&self, grant: &str) -> Option<Error> {
        self.lock().get(grant).map(|(kind, text)| Error::new(*kind, text.clone()))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, (ErrorKind, String)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
