//! The plan while a mapping has two workers: the end of a handover.

use super::mapped::unreachable_worker;
use super::{Action, Intent, Observed, ObservedWorker, Plan, Record, State};

/// Two workers: the end of a hand-over, forwards or backwards. A new one that did not take over is
/// ended even when the old one is gone: it has the volume open through the old one's description, so
/// that only the next one's claim proves the old one's last writes to be over.
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
        // Nobody can tell, and all of it goes in any case.
        (None, _, _) => vec![Action::StopWorker, Action::RestorePredecessor],
    };
    let state = match record.intent {
        Intent::Mapped => State::Recovering,
        Intent::Unmapped | Intent::Forced(_) => State::Unmapping,
    };
    if matches!(record.intent, Intent::Forced(_)) {
        // As in every plan of it: the wish is recorded before anything is done.
        actions.insert(0, Action::RecordUnmapping);
    }
    Plan { state, actions }
}
