//! The journal with its two directories, as the supervisor uses them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use crate::config::Config;
use crate::journal::{Disk, Journal};
use crate::mapping::Orders;
use crate::record_directory::RecordDirectory;
use cleat_core::error::Result;

/// The journal, and what is known about its two directories.
pub(crate) struct Records {
    /// The journal.
    pub(crate) journal: Arc<Journal>,
    /// The writes to the state directory.
    pub(crate) state_directory: RecordDirectory,
    /// The writes to the runtime directory, which has the copies.
    pub(crate) copies: RecordDirectory,
    /// The records that are marked as removed.
    pub(crate) removals: Removals,
}

impl Records {
    /// Opens the journal. Blocks.
    ///
    /// # Errors
    /// As [`Journal::open`].
    pub(crate) fn open(config: &Config, disk: Arc<dyn Disk>) -> Result<Self> {
        let journal = Arc::new(Journal::open(&config.state_dir, &config.runtime_dir, disk)?);
        let state = RecordDirectory::new(config.state_dir.clone(), "a call that blocks: a record");
        let copies = journal.copies().to_owned();
        let copies = RecordDirectory::new(copies, "a call that blocks: a copy of a record");
        Ok(Self { journal, state_directory: state, copies, removals: Removals::default() })
    }

    /// Adds records that no mapping has and that cannot be removed now. The sweep removes them.
    pub(crate) fn add_removals(&self, mapping_ids: BTreeSet<String>) {
        for mapping_id in mapping_ids {
            self.removals.insert(mapping_id, Orders::default());
        }
    }
}

/// The records that are marked as removed and still in the state directory.
#[derive(Default)]
pub(crate) struct Removals(Mutex<BTreeMap<String, Orders>>);

impl Removals {
    /// Adds a record. Its removal waits for the writes that hold `orders`.
    pub(crate) fn insert(&self, mapping_id: String, orders: Orders) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(mapping_id, orders);
    }

    /// Returns all records with the orders of their writes.
    pub(crate) fn all(&self) -> BTreeMap<String, Orders> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Removes a record from this list.
    pub(crate) fn remove(&self, mapping_id: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(mapping_id);
    }
}
