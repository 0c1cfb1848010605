//! What the supervisor knows about the durable record of a mapping.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::lock;

/// Where the newest revision of a record is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Place {
    /// In the state directory.
    #[default]
    StateDirectory,
    /// Only in the runtime directory. Contains the cause and its repair.
    Copy(String),
    /// Only in the memory of this supervisor. Contains the cause and its repair.
    Memory(String),
}

/// The locks that the writes of a mapping hold, also after their calls were cancelled.
#[derive(Debug, Clone, Default)]
pub struct Orders {
    /// Held while the record in the state directory changes.
    pub(crate) record: Arc<tokio::sync::Mutex<()>>,
    /// Held while the files in the runtime directory change.
    pub(crate) copy: Arc<tokio::sync::Mutex<()>>,
}

/// The durable record of a mapping. Everything but the order of the writes changes only under the guard.
#[derive(Debug, Default)]
pub struct Recorded {
    /// Keep the writes in their order.
    pub(crate) orders: Orders,
    revision: AtomicU64,
    place: Mutex<Place>,
    may_have_copy: AtomicBool,
    /// The number of consecutive writes that failed although an action needed them.
    failures: AtomicU32,
    /// Whether such a write has failed since the last [`Recorded::take_failure`].
    has_failed: AtomicBool,
}

impl Recorded {
    /// Creates the state of a record that was read or is not written yet.
    pub(super) fn new(revision: u64) -> Self {
        Self { revision: AtomicU64::new(revision), ..Self::default() }
    }

    /// Returns the revision of the next write. It is never used again, whether the write succeeds or not: a
    /// write that timed out may still take effect.
    pub(crate) fn next_revision(&self) -> u64 {
        self.revision.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Returns where the newest revision is.
    pub(crate) fn place(&self) -> Place {
        lock(&self.place).clone()
    }

    /// Returns whether the state directory lacks the newest revision.
    pub(crate) fn is_behind(&self) -> bool {
        *lock(&self.place) != Place::StateDirectory
    }

    /// Sets where the newest revision is. In the state directory or in a copy, it is durable.
    pub(crate) fn set_place(&self, place: Place) {
        if !matches!(place, Place::Memory(_)) {
            self.failures.store(0, Ordering::SeqCst);
        }
        *lock(&self.place) = place;
    }

    /// Returns whether the runtime directory may contain a copy.
    pub(crate) fn may_have_copy(&self) -> bool {
        self.may_have_copy.load(Ordering::SeqCst)
    }

    /// Sets whether the runtime directory may contain a copy.
    pub(crate) fn set_may_have_copy(&self, may_have_copy: bool) {
        self.may_have_copy.store(may_have_copy, Ordering::SeqCst);
    }

    /// Counts a write that failed although an action needed it.
    pub(crate) fn fail(&self) {
        self.failures.fetch_add(1, Ordering::SeqCst);
        self.has_failed.store(true, Ordering::SeqCst);
    }

    /// Returns the number of consecutive failures if there was one since the last call.
    pub(crate) fn take_failure(&self) -> Option<u32> {
        let has_failed = self.has_failed.swap(false, Ordering::SeqCst);
        has_failed.then(|| self.failures.load(Ordering::SeqCst))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_is_reported_once_and_counted_until_one_succeeds() {
        let recorded = Recorded::new(7);
        assert_eq!((recorded.next_revision(), recorded.next_revision()), (8, 9));
        assert_eq!(recorded.take_failure(), None);
        recorded.fail();
        recorded.set_place(Place::Memory("full".into()));
        assert!(recorded.is_behind());
        assert_eq!((recorded.take_failure(), recorded.take_failure()), (Some(1), None));
        recorded.fail();
        assert_eq!(recorded.take_failure(), Some(2));
        recorded.set_place(Place::Copy("full".into()));
        recorded.fail();
        assert_eq!(recorded.take_failure(), Some(1));
        recorded.set_place(Place::StateDirectory);
        assert!(!recorded.is_behind());
    }
}
