//! The guard of a mapping: the right to change it, which one task has at a time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::{OwnedMutexGuard, watch};

use super::Mapping;
use super::force_progress::step_name;
use super::guarded::Guarded;
use crate::planner::Action;
use cleat_kernel::{DeviceIndex, ExclusiveOpen};

/// The right to change a mapping. Its fields are dropped in this order.
pub struct Guard {
    /// Dropped before the lock is released: a call that finds the lock taken must wait only for the
    /// supervisor's own work.
    background: Option<BackgroundEntry>,
    /// The exclusive opens of an unmap. They end with the guard, also if the unmap fails or is cancelled, so
    /// that other programs can use the device again.
    pub(crate) exclusive: BTreeMap<DeviceIndex, ExclusiveOpen>,
    guarded: OwnedMutexGuard<Guarded>,
    /// Dropped after the lock is released, so that events until then are not missed.
    mapping: WakeOnDrop,
}

/// On drop, schedules a reconcile if an event arrived while the guard was held.
struct WakeOnDrop(Arc<Mapping>);

/// Counts a reconcile by the supervisor itself, on no request of a caller.
pub(super) struct BackgroundEntry(Arc<Mapping>);

impl BackgroundEntry {
    pub(super) fn new(mapping: &Arc<Mapping>) -> Self {
        mapping.background_entries.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(mapping))
    }
}

impl Drop for BackgroundEntry {
    fn drop(&mut self) {
        self.0.background_entries.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Clears the flag that a call waits, also if the call is cancelled.
pub(super) struct CallWaiting<'a>(pub(super) &'a AtomicBool);

impl Drop for CallWaiting<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

/// Counts a forced unmap that waits for the guard.
pub(super) struct ForceWaiting<'a>(&'a watch::Sender<u32>);

impl<'a> ForceWaiting<'a> {
    pub(super) fn new(waiting: &'a watch::Sender<u32>) -> Self {
        waiting.send_modify(|count| *count += 1);
        Self(waiting)
    }
}

impl Drop for ForceWaiting<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

impl Guard {
    pub(super) fn new(mapping: &Arc<Mapping>, guarded: OwnedMutexGuard<Guarded>) -> Self {
        let mapping = WakeOnDrop(Arc::clone(mapping));
        Self { background: None, exclusive: BTreeMap::new(), guarded, mapping }
    }

    /// Marks the guard as the supervisor's own, so that calls wait for it.
    pub(super) fn set_background(&mut self, background: BackgroundEntry) {
        self.background = Some(background);
    }

    /// Returns whether the supervisor took the guard by itself, and no caller waits for its work.
    pub fn is_background(&self) -> bool {
        self.background.is_some()
    }

    /// Returns the mapping that the guard belongs to.
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping.0
    }

    /// Sets the note of the running step of a forced unmap.
    pub(crate) fn note(&mut self, note: String) {
        if let Some(progress) = &mut self.teardown.force {
            progress.note = note;
        }
    }

    /// Reports that a forced unmap could not prove that the backend executes no request any more.
    pub(crate) fn set_unproven(&mut self, cause: String) {
        let name = &self.mapping().name;
        tracing::warn!(mapping = name, "cannot prove the end of all writes to the volume: {cause}");
        if let Some(progress) = &mut self.teardown.force {
            progress.unproven = Some(cause);
        }
    }

    /// Records the begin of an action for the report of a forced unmap.
    pub(crate) fn step_begins(&mut self, action: Action) {
        if let Some(progress) = &mut self.teardown.force {
            progress.begin(step_name(action));
        }
    }

    /// Records the end of that action.
    pub(crate) fn step_ends(&mut self) {
        if let Some(progress) = &mut self.teardown.force {
            progress.end();
        }
    }
}

impl std::ops::Deref for Guard {
    type Target = Guarded;
    fn deref(&self) -> &Guarded {
        &self.guarded
    }
}

impl std::ops::DerefMut for Guard {
    fn deref_mut(&mut self) -> &mut Guarded {
        &mut self.guarded
    }
}

impl Drop for WakeOnDrop {
    fn drop(&mut self) {
        if self.0.wake_on_release.swap(false, Ordering::SeqCst) {
            // If the queue is full, the next sweep finds the mapping.
            let _ = self.0.work_queue.try_send(self.0.name.clone());
        }
    }
}
