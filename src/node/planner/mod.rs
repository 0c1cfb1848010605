//! The planner: a pure function from the desired and the observed state of a mapping to the next
//! actions. It does no I/O, reads no clock and keeps no memory.
//!
//! The actions of a plan run in order until one fails. Then the mapping is observed and planned
//! again. Each action is therefore safe to repeat, and a plan may be interrupted anywhere.
//!
//! Rules, which property tests check:
//! - the planner touches only devices that carry the identity of the mapping;
//! - it starts a worker only when no earlier worker can still write (the end of its process is proved);
//! - it does not disconnect a device that has holders, or before a flush if its users may have written data
//!   that a worker can make durable;
//! - it reports content that ended with its worker as lost, and never replaces it by zeroes.
//!
//! A forced unmap is the exception to the third rule, because its user asks for it: it ends only when
//! the mapping is gone. See `force_unmap` for the order of its steps.
//!
//! `upgrade` begins a handover; no plan does. Plans end it, wherever it was interrupted: one of the two
//! workers of the mapping serves, and the handover word says which.
//!
//! A later extension, a claim that is fenced, becomes one more [`ObservedWorker`].

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

/// The next actions for a mapping, and the state that users see until they have ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The state while the actions run. Without actions, it is the final state.
    pub state: State,
    /// The actions, in the order in which they run.
    pub actions: Vec<Action>,
}

impl Plan {
    fn without_actions(state: State) -> Self {
        Self { state, actions: Vec::new() }
    }

    fn fail(failure: Failure) -> Self {
        Self::without_actions(State::Failed(failure))
    }
}

/// The number of consecutive failed repairs after which the planner gives up a mapping.
pub const MAX_FAILURES: u32 = 10;

/// Plans the next actions for a mapping.
pub fn plan(record: &Record, observed: &Observed) -> Plan {
    let mut plan = plan_for_intent(record, observed);
    if observed.sync_failed && !record.sync_failed && record.intent == Intent::Mapped {
        // First, because a worker that starts is given what the record says.
        plan.actions.insert(0, Action::RecordSyncFailed);
    }
    quiesce::add_quiesce_actions(plan, record, observed)
}

fn plan_for_intent(record: &Record, observed: &Observed) -> Plan {
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
