//! A store that remembers why it fails, so that the supervisor can show it.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cleat_object::store::{Pending, Store, StoreError};

/// The store of a volume.
pub(crate) struct Watched {
    store: Arc<dyn Store>,
    reason: Mutex<Option<String>>,
}

impl Watched {
    pub(crate) fn new(store: Arc<dyn Store>) -> Self {
        Self { store, reason: Mutex::default() }
    }

    /// Returns why the last operation has failed; `None` if it has succeeded.
    pub(crate) fn reason(&self) -> Option<String> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Option<String>> {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watch<'a, T: 'a>(
        &'a self,
        operation: Pending<'a, Result<T, StoreError>>,
    ) -> Pending<'a, Result<T, StoreError>> {
        Box::pin(async move {
            let result = operation.await;
            let reason = match &result {
                Ok(_) | Err(StoreError::NotFound | StoreError::Exists) => None,
                Err(error) => Some(error.to_string()),
            };
            let mut last = self.lock();
            if last.is_none() && reason.is_some() {
                tracing::warn!(reason, "the store fails");
            }
            *last = reason;
            result
        })
    }
}

impl Store for Watched {
    fn create<'a>(&'a self, name: &'a str, bytes: &'a [u8]) -> Pending<'a, Result<(), StoreError>> {
        self.watch(self.store.create(name, bytes))
    }

    fn read<'a>(
        &'a self,
        name: &'a str,
        range: Range<u64>,
    ) -> Pending<'a, Result<Vec<u8>, StoreError>> {
        self.watch(self.store.read(name, range))
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: &'a str,
    ) -> Pending<'a, Result<Vec<String>, StoreError>> {
        self.watch(self.store.list(prefix, after))
    }

    fn delete<'a>(&'a self, name: &'a str) -> Pending<'a, Result<(), StoreError>> {
        self.watch(self.store.delete(name))
    }

    fn back_off(&self, attempt: u32) -> Pending<'_, ()> {
        self.store.back_off(attempt)
    }
}
