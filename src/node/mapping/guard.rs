//! The guard of a mapping: the right to change it, which one task has at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::{OwnedMutexGuard, watch};

use super::Mapping;
use super::force_progress::name;
use super::guarded::Core;
use crate::planner::Action;

/// The right to change a mapping. Its fields end in the order in which they stand here.
pub struct Guard {
    /// Before the lock is free: whoever finds it taken from here on waits for another call.
    keeper: Option<Keeper>,
    core: OwnedMutexGuard<Core>,
    /// After the lock is free: what happened until then is not missed.
    mapping: Leaving,
}

/// Has a mapping looked at where something happened while somebody had its guard.
struct Leaving(Arc<Mapping>);

/// Counts one that looks after a mapping by itself.
pub(super) struct Keeper(Arc<Mapping>);

impl Keeper {
    pub(super) fn new(mapping: &Arc<Mapping>) -> Self {
        mapping.keepers.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(mapping))
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.0.keepers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Takes back that a call waits, however it ends.
pub(super) struct Awaiting<'a>(pub(super) &'a AtomicBool);

impl Drop for Awaiting<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

/// Counts a forced unmap that wants the guard.
pub(super) struct Wanting<'a>(&'a watch::Sender<u32>);

impl<'a> Wanting<'a> {
    pub(super) fn new(wanted: &'a watch::Sender<u32>) -> Self {
        wanted.send_modify(|count| *count += 1);
        Self(wanted)
    }
}

impl Drop for Wanting<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

impl Guard {
    pub(super) fn new(mapping: &Arc<Mapping>, core: OwnedMutexGuard<Core>) -> Self {
        Self { keeper: None, core, mapping: Leaving(Arc::clone(mapping)) }
    }

    /// Marks that the supervisor entered by itself, so that calls wait for it.
    pub(super) fn keep(&mut self, keeper: Keeper) {
        self.keeper = Some(keeper);
    }

    /// Whether the supervisor looks after the mapping by itself, and nobody waits for it.
    pub fn is_kept(&self) -> bool {
        self.keeper.is_some()
    }

    /// Whose.
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping.0
    }

    pub(crate) fn note(&mut self, note: String) {
        if let Some(progress) = &mut self.progress {
            progress.note = note;
        }
    }

    pub(crate) fn unproven(&mut self, why: String) {
        tracing::warn!(mapping = self.mapping().name, "silence of the volume is not proved: {why}");
        if let Some(progress) = &mut self.progress {
            progress.unproven = Some(why);
        }
    }

    /// A step begins; told in the report of a forced unmap.
    pub(crate) fn step_begins(&mut self, action: Action) {
        if let Some(progress) = &mut self.progress {
            progress.begin(name(action));
        }
    }

    /// It has been done.
    pub(crate) fn step_ends(&mut self) {
        if let Some(progress) = &mut self.progress {
            progress.end();
        }
    }
}

impl std::ops::Deref for Guard {
    type Target = Core;
    fn deref(&self) -> &Core {
        &self.core
    }
}

impl std::ops::DerefMut for Guard {
    fn deref_mut(&mut self) -> &mut Core {
        &mut self.core
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        if self.0.again.swap(false, Ordering::SeqCst) {
            // A full queue: the next sweep finds it.
            let _ = self.0.attention.try_send(self.0.name.clone());
        }
    }
}
