//! The planner: what is wanted and what is seen → what to do next. No I/O, no clock, no memory.
//!
//! A plan's actions are carried out in order until one fails; then the world is looked at again
//! and planned anew. So every action is safe to repeat, and a plan may be cut anywhere.
//!
//! Rules, which the property tests below hold it to:
//! - a device is touched only when it carries the mapping's identity;
//! - a worker is started only when no earlier one can still write (proved: its process has ended);
//! - a device that somebody holds is not disconnected;
//! - a volume whose content died with its worker is reported lost, never replaced by zeroes.
//!
//! An unmap by force is the exception to the third rule, as its user wants: it rests nowhere before
//! the mapping is gone. See `force` for the order of what it does.
//!
//! A planned hand-over is begun by `upgrade`, not by a plan. What is planned is its end, however it
//! was cut short: of two workers of a mapping one serves, and the handover word tells which.
//!
//! A place kept for what comes: a fenced claim is one more [`ObservedWorker`].

mod action;
mod handover;
mod mapped;
mod observed;
mod quiesce;
mod record;
mod state;
mod unmapped;

pub use action::Action;
pub use observed::{Observed, ObservedDevice, ObservedQuiesce, ObservedWorker};
pub use record::{DeviceProperties, Intent, Options, Quiesced, READ_ONLY, Record, WorkerId};
pub use state::{Failure, State};

/// What to do, and what the mapping is called meanwhile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The state while the actions run; the final one when there are none.
    pub state: State,
    /// In order.
    pub actions: Vec<Action>,
}

impl Plan {
    fn rest(state: State) -> Self {
        Self { state, actions: Vec::new() }
    }

    fn fail(failure: Failure) -> Self {
        Self::rest(State::Failed(failure))
    }
}

/// Repairs in a row that may fail before a mapping is given up.
pub const MAX_FAILURES: u32 = 10;

/// Decides.
pub fn plan(record: &Record, observed: &Observed) -> Plan {
    quiesce::complete(decide(record, observed), record, observed)
}

fn decide(record: &Record, observed: &Observed) -> Plan {
    if record.predecessor.is_some() {
        return handover::plan_handover(record, observed);
    }
    match record.intent {
        Intent::Mapped => mapped::plan_mapped(record, observed),
        Intent::Unmapped => unmapped::plan_unmapped(record, observed),
        Intent::Forced(unmount) => unmapped::plan_forced(observed, unmount),
    }
}

#[cfg(test)]
pub(crate) mod tests;
