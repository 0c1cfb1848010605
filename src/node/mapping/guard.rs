//! The guard of a mapping: the right to change it, which one task has at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::{OwnedMutexGuard, watch};

use super::Mapping;
use super::force_progress::name;
use super::guarded::Guarded;
use crate::planner::Action;

/// The right to change a mapping. Its fields end in the order in which they stand here.
pub struct Guard {
    /// Before the lock is free: whoever finds it taken from here on waits for another call.
    background: Option<BackgroundEntry>,
    guarded: OwnedMutexGuard<Guarded>,
    /// After the lock is free: what happened until then is not missed.
    mapping: WakeOnDrop,
}

/// Has a mapping looked at where something happened while somebody had its guard.
struct WakeOnDrop(Arc<Mapping>);

/// Counts one that looks after a mapping by itself.
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

/// Takes back that a call waits, however it ends.
pub(super) struct CallWaiting<'a>(pub(super) &'a AtomicBool);

impl Drop for CallWaiting<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

/// Counts a forced unmap that wants the guard.
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
        Self { background: None, guarded, mapping: WakeOnDrop(Arc::clone(mapping)) }
    }

    /// Marks that the supervisor entered by itself, so that calls wait for it.
    pub(super) fn set_background(&mut self, background: BackgroundEntry) {
        self.background = Some(background);
    }

    /// Whether the supervisor looks after the mapping by itself, and nobody waits for it.
    pub fn is_background(&self) -> bool {
        self.background.is_some()
    }

    /// Whose.
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping.0
    }

    pub(crate) fn note(&mut self, note: String) {
        if let Some(progress) = &mut self.teardown.force {
            progress.note = note;
        }
    }

    pub(crate) fn unproven(&mut self, why: String) {
        tracing::warn!(mapping = self.mapping().name, "silence of the volume is not proved: {why}");
        if let Some(progress) = &mut self.teardown.force {
            progress.unproven = Some(why);
        }
    }

    /// A step begins; told in the report of a forced unmap.
    pub(crate) fn step_begins(&mut self, action: Action) {
        if let Some(progress) = &mut self.teardown.force {
            progress.begin(name(action));
        }
    }

    /// It has been done.
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
            // A full queue: the next sweep finds it.
            let _ = self.0.work_queue.try_send(self.0.name.clone());
        }
    }
}
