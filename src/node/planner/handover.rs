//! The plan while a mapping has two workers: the end of a handover.

use super::mapped::unreachable_worker;
use super::{Action, Intent, Observed, ObservedWorker, Plan, Record, State};

/// Ends a handover: either the predecessor is stopped, or it becomes the worker again.
///
/// A new worker that did not take over is stopped even if the predecessor has ended. It has the volume
/// open through the predecessor's open file description, so only the claim of the next worker proves
/// that the predecessor's last writes have ended.
pub(crate) fn plan_handover(record: &Record, observed: &Observed) -> Plan {
    let gone = ObservedWorker::Gone;
    let mut actions = match (observed.handed_over, &observed.worker, &observed.predecessor) {
        (Some(true), _, _) => vec![Action::StopPredecessor],
        (_, worker, predecessor) if *worker == gone && *predecessor == gone => {
            vec![Action::StopPredecessor]
        }
        (_, worker, _) if *worker == gone => vec![Action::RestorePredecessor],
        (Some(false), _, predecessor) if *predecessor == gone => vec![Action::StopWorker],
        (Some(false), _, _) => vec![Action::StopWorker, Action::RestorePredecessor],
        (None, ObservedWorker::Unreachable { pid, reason }, _)
            if !matches!(record.intent, Intent::Forced(_)) =>
        {
            return unreachable_worker(record, *pid, reason);
        }
        // Which worker serves cannot be determined, but a forced unmap stops both.
        (None, _, _) => vec![Action::StopWorker, Action::RestorePredecessor],
    };
    let state = match record.intent {
        Intent::Mapped => State::Recovering,
        Intent::Unmapped | Intent::Forced(_) => State::Unmapping,
    };
    if matches!(record.intent, Intent::Forced(_)) {
        // As in every plan of a forced unmap, the intent is recorded before any other action.
        actions.insert(0, Action::RecordUnmapping);
    }
    Plan { state, actions }
}
