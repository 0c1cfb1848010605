//! Counts the steps of a call, and kills the supervisor at one of them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::world::World;

/// The moment of a step at which the supervisor is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    /// Before the step has an effect.
    Before,
    /// After its effect, before the supervisor learns of it.
    After,
    /// While a program or the kernel executes it: its effect comes later, when the next supervisor runs.
    During,
}

/// A step at which the supervisor is killed: its number, from 0, and the moment.
pub(crate) type Kill = (usize, Moment);

/// The steps of one call. Clones share the count.
#[derive(Debug, Clone, Default)]
pub(crate) struct Steps(Arc<Mutex<Counted>>);

#[derive(Debug, Default)]
struct Counted {
    counts: bool,
    names: Vec<String>,
    kill: Option<Kill>,
    /// Whether the supervisor was killed.
    is_done: bool,
}

impl Steps {
    /// Kills the supervisor at `kill`; never with `None`.
    pub(crate) fn new(kill: Option<Kill>) -> Self {
        Self(Arc::new(Mutex::new(Counted { kill, ..Counted::default() })))
    }

    /// Counts the steps from now on, or no longer.
    pub(crate) fn count(&self, counts: bool) {
        self.counted().counts = counts;
    }

    /// Returns the steps that were counted.
    pub(crate) fn names(&self) -> Vec<String> {
        self.counted().names.clone()
    }

    /// Returns whether the supervisor was killed.
    pub(crate) fn has_killed(&self) -> bool {
        self.counted().is_done
    }

    /// Passes a step. Returns the moment at which the supervisor must be killed, if it is one of `moments`.
    pub(crate) fn pass(&self, name: &str, moments: &[Moment]) -> Option<Moment> {
        let mut counted = self.counted();
        if !counted.counts {
            return None;
        }
        counted.names.push(name.to_owned());
        let here = counted.names.len() - 1;
        let moment = counted.kill.filter(|(step, _)| *step == here).map(|(_, moment)| moment);
        let moment = moment.filter(|moment| moments.contains(moment));
        counted.is_done |= moment.is_some();
        moment
    }

    fn counted(&self) -> MutexGuard<'_, Counted> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Kills the supervisor of a world (SIGKILL). Never returns to the supervisor.
pub(crate) async fn kill(world: &World) {
    // Other tasks of the same supervisor may reach a step before it ends.
    if !world.has_crashed() {
        world.crash();
    }
    std::future::pending().await
}
