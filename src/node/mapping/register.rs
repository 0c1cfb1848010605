//! The register of all mappings of this supervisor.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use super::{Guard, Mapping, lock};
use cleat_core::error::{Error, ErrorKind, Result};

/// All mappings, by name.
#[derive(Default)]
pub struct Register(Mutex<BTreeMap<String, Arc<Mapping>>>);

impl Register {
    /// Returns the mapping with this name. If there is none, inserts the one that `make` returns, and returns
    /// its guard, too.
    ///
    /// # Errors
    /// Returns `NoSpace` if there are `limit` mappings already.
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
            let message = format!("the daemon has {limit} mappings, which is its limit");
            return Err(Error::new(ErrorKind::NoSpace, message)
                .with_repair("unmap some, or raise limits.mappings in the configuration"));
        }
        let mapping = Arc::new(make());
        // No other task can see the mapping yet, so the guard is free.
        let guard = mapping.try_lock()?;
        mappings.insert(name.to_owned(), Arc::clone(&mapping));
        Ok((mapping, Some(guard)))
    }

    /// Returns the mapping with this name.
    pub fn get(&self, name: &str) -> Option<Arc<Mapping>> {
        lock(&self.0).get(name).cloned()
    }

    /// Returns all mappings, sorted by name.
    pub fn all(&self) -> Vec<Arc<Mapping>> {
        lock(&self.0).values().cloned().collect()
    }

    /// Returns the ids of all mappings.
    pub fn ids(&self) -> BTreeSet<String> {
        lock(&self.0).values().map(|mapping| mapping.mapping_id.clone()).collect()
    }

    /// Removes `mapping`, if the register still has it under its name.
    pub fn remove(&self, mapping: &Arc<Mapping>) {
        let mut mappings = lock(&self.0);
        if mappings.get(&mapping.name).is_some_and(|found| Arc::ptr_eq(found, mapping)) {
            mappings.remove(&mapping.name);
        }
    }
}
