//! The node's own entry in the status: what it says before a claim, and what it says about an observation.

use super::{Mapping, MappingState, Permit, View};
use crate::limits::{MAX_CLIENT, MAX_DEVICE_PATH, MAX_MESSAGE, text};
use crate::object::{
    Condition, Generation, Holder, NodeEntry, Reason, Signal, Time, Truth, VolumeGrant,
};
use crate::record::Refusal;
use crate::rules::{Rule, applies};

/// Returns the entry of a node that is about to claim `generation`: SafeToDetach is false. Part of rule 2.
/// Implements [`Rule::IntentChangesTheObject`] by the number of intents.
pub(super) fn intent(
    grant: &VolumeGrant,
    view: &View<'_>,
    generation: Generation,
    now: Time,
) -> NodeEntry {
    let mut entry = base(grant, view.node);
    entry.machine = machine(view);
    entry.generation = generation;
    if applies(Rule::IntentChangesTheObject) {
        entry.intents = entry.intents.saturating_add(1);
    }
    (entry.client, entry.device_path) = (None, None);
    let claiming = |kind| condition(kind, Truth::False, Reason::Claiming, generation, now);
    entry.set(claiming(Signal::SafeToMount));
    entry.set(claiming(Signal::SafeToDetach));
    entry
}

/// Returns the entry that the observations require; `None` if the published entry agrees, or if the grant
/// does not concern the node.
pub(super) fn observed(grant: &VolumeGrant, view: &View<'_>, now: Time) -> Option<NodeEntry> {
    let published = base(grant, view.node);
    let mut entry = published.clone();
    describe_fence(grant, view, &mut entry, now);
    if let Some(holder) = grant.holder(view.node) {
        describe_grant(view, holder, &mut entry, now);
    }
    // An entry is not written for the machine alone.
    (entry != published).then(|| NodeEntry { machine: machine(view), ..entry })
}

fn machine(view: &View<'_>) -> Option<String> {
    Some(view.machine).filter(|machine| !machine.is_empty()).map(str::to_owned)
}

/// Reports that nothing is left of a fenced generation. Part of rule 11. The entry has one such report, so the controller
/// has removed the fence of a lower generation before the next one is reported.
fn describe_fence(grant: &VolumeGrant, view: &View<'_>, entry: &mut NodeEntry, now: Time) {
    let fences = grant.fences_of(view.node).map(|fence| fence.generation);
    let Some(generation) = fences.min() else { return };
    if entry.is(Signal::Cleaned, Truth::True, generation) {
        return;
    }
    let is_left = |mapping: &Mapping| mapping.generation <= generation;
    if view.local.mapping.as_ref().is_some_and(is_left) {
        return;
    }
    entry.set(Condition {
        message: "nothing is left on the node of the mapping that was fenced".to_owned(),
        ..condition(Signal::Cleaned, Truth::True, Reason::Cleaned, generation, now)
    });
    if entry.generation <= generation {
        (entry.client, entry.device_path) = (None, None);
        let lost = condition(Signal::SafeToMount, Truth::False, Reason::Fenced, generation, now);
        entry.set(lost);
    }
}

/// Describes what the node observes of its grant.
fn describe_grant(view: &View<'_>, holder: &Holder, entry: &mut NodeEntry, now: Time) {
    let generation = holder.generation;
    let set = |entry: &mut NodeEntry, kind, truth, reason, message: String| {
        let message = text(&message, MAX_MESSAGE);
        entry.set(Condition { message, ..condition(kind, truth, reason, generation, now) });
    };
    let mapping = view.local.mapping.as_ref().filter(|known| known.generation == generation);
    if let Some(usable) = view.local.usable().filter(|known| known.generation == generation) {
        entry.generation = generation;
        entry.client = Some(text(&usable.client, MAX_CLIENT));
        entry.device_path = Some(text(&usable.device_path, MAX_DEVICE_PATH));
        set(entry, Signal::SafeToMount, Truth::True, Reason::Mapped, String::new());
    }
    if view.local.is_safe_to_detach() {
        describe_released(view, holder, entry, now);
    } else if let Some(mapping) = mapping {
        // SafeToDetach can be true here after a restored backup: a signal of an earlier use.
        let is_usable = mapping.state == MappingState::Usable;
        if is_usable || entry.is(Signal::SafeToDetach, Truth::True, generation) {
            set(entry, Signal::SafeToDetach, Truth::False, Reason::Mapped, String::new());
        }
    } else if entry.is(Signal::SafeToMount, Truth::True, generation) {
        set(entry, Signal::SafeToMount, Truth::False, Reason::Lost, String::new());
    }
    let other = view.local.mapping.as_ref().filter(|known| known.generation != generation);
    if let Some(other) = other.filter(|_| applies(Rule::RefusalIsReported)) {
        // Rule 10: the mapping stays, and the controller names its generation in the grant.
        let message = format!("the volume is mapped with generation {}", other.generation);
        set(entry, Signal::SafeToMount, Truth::False, Reason::OtherGeneration, message);
    }
    let refusal = view.local.refusal.as_ref().filter(|(refused, _)| *refused == generation);
    if let Some((_, refusal)) = refusal.filter(|_| applies(Rule::RefusalIsReported)) {
        // Rule 10: the controller reads the reason and moves the grant past the record.
        set(entry, Signal::SafeToMount, Truth::False, reason(refusal), refusal.to_string());
    }
}

/// Reports SafeToDetach for the node's generation. It is written only where it says something: the generation
/// is revoked, or the node has published that it uses the volume.
fn describe_released(view: &View<'_>, holder: &Holder, entry: &mut NodeEntry, now: Time) {
    let generation = holder.generation;
    let is_intended = view.permit.is_some_and(|permit: &Permit| permit.generation == generation);
    let is_used = entry.is(Signal::SafeToDetach, Truth::False, generation)
        || entry.is(Signal::SafeToMount, Truth::True, generation);
    let will_claim = !holder.revoked && view.local.wanted && is_intended;
    let is_said = entry.is(Signal::SafeToDetach, Truth::True, generation);
    if will_claim || is_said || !(holder.revoked || is_used) {
        return;
    }
    entry.generation = generation;
    (entry.client, entry.device_path) = (None, None);
    let released = |kind, truth| condition(kind, truth, Reason::Released, generation, now);
    entry.set(released(Signal::SafeToMount, Truth::False));
    entry.set(released(Signal::SafeToDetach, Truth::True));
}

fn reason(refusal: &Refusal) -> Reason {
    match refusal {
        Refusal::Superseded(_) | Refusal::NotClaimed => Reason::Superseded,
        Refusal::Sealed => Reason::Fenced,
        Refusal::ClaimedElsewhere(_) => Reason::ClaimedElsewhere,
    }
}

fn base(grant: &VolumeGrant, node: &str) -> NodeEntry {
    let named = || NodeEntry { node: node.to_owned(), ..NodeEntry::default() };
    grant.entry(node).cloned().unwrap_or_else(named)
}

fn condition(
    kind: Signal,
    status: Truth,
    reason: Reason,
    generation: Generation,
    now: Time,
) -> Condition {
    let message = String::new();
    Condition { kind, status, reason, message, generation, last_transition_time: now }
}
