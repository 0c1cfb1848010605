//! The register of all mappings of this supervisor.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use super::{Guard, Mapping, lock};
use cleat_core::error::{Error, ErrorKind, Result};

/// Every mapping, by name.
#[derive(Default)]
pub struct Register(Mutex<BTreeMap<String, Arc<Mapping>>>);

impl Register {
    /// The mapping called `name`, or else the new one that `make` gives, and whether it is new.
    ///
    /// # Errors
    /// `NoSpace` beyond `limit` mappings.
    pub fn find_or_insert(
        &self,
        name: &str,
        limit: usize,
        make: impl FnOnce() -> Mapping,
    ) -> Result<(Arc<Mapping>, Option<Guard>)> {
        let mut mappings = lock(&self.0);
        if let Some(mapping) = mappings.get(name) {
            return Ok((Arc::clone(mapping), None));
        }
        if mappings.len() >= limit {
            let message = format!("{limit} mappings exist, which is the daemon's limit");
            return Err(Error::new(ErrorKind::NoSpace, message)
                .with_repair("unmap some, or raise limits.mappings in the configuration"));
        }
        let mapping = Arc::new(make());
        // Entered before anybody else can see it.
        let guard = mapping.try_lock()?;
        mappings.insert(name.to_owned(), Arc::clone(&mapping));
        Ok((mapping, Some(guard)))
    }

    /// The mapping called `name`.
    pub fn get(&self, name: &str) -> Option<Arc<Mapping>> {
        lock(&self.0).get(name).cloned()
    }

    /// All, in the order of their names.
    pub fn all(&self) -> Vec<Arc<Mapping>> {
        lock(&self.0).values().cloned().collect()
    }

    /// The ids of all.
    pub fn ids(&self) -> BTreeSet<String> {
        lock(&self.0).values().map(|mapping| mapping.mapping_id.clone()).collect()
    }

    /// Forgets `mapping`, if it is still the one of its name.
    pub fn remove(&self, mapping: &Arc<Mapping>) {
        let mut mappings = lock(&self.0);
        if mappings.get(&mapping.name).is_some_and(|found| Arc::ptr_eq(found, mapping)) {
            mappings.remove(&mapping.name);
        }
    }
}
