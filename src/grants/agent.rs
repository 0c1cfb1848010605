//! The decisions of a node's agent about one volume: a pure function from the grant, what the node observes
//! and the time to the next step.
//!
//! The agent maps a volume only with a grant, publishes what it observes, and ends a mapping only if its
//! generation was revoked or the storage refuses it. Without the API server everything that is mapped stays
//! mapped, a dead worker is replaced, and nothing new is mapped.
//!
//! After a restart the caller passes no permit, and [`OwnClaim::Lost`] for each volume that its journal names and
//! that is not mapped, and lists the grants before it
//! calls [`next_step`] for a volume that is not mapped. The decisions repeat what is missing.

mod entries;

use crate::object::{
    Generation, Holder, NodeEntry, Signal, StoredGrant, Time, Truth, Version, VolumeGrant,
};
use crate::record::Refusal;
use crate::rules::{Rule, applies, condition_of};

/// What the agent of a node has observed of one volume.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// The name of the node.
    pub node: &'a str,
    /// The hash of its machine id; empty if it is not known.
    pub machine: &'a str,
    /// The grant.
    pub grants: Grants<'a>,
    /// What is on the node.
    pub local: &'a Local,
    /// The permit to claim, from the agent's last intent.
    pub permit: Option<&'a Permit>,
    /// How long the agent tries to end a revoked mapping before it uses force, in seconds. `None`: it waits until
    /// the users of the mapping have ended, or until the mapping is fenced.
    pub force_after_s: Option<u64>,
}

/// What the agent has read from the API server.
#[derive(Debug, Clone, Copy)]
pub enum Grants<'a> {
    /// The agent has not listed the grants since it has started.
    NotListed,
    /// The last known state. It may be old.
    Listed {
        /// The grant; `None` if it does not exist.
        grant: Option<&'a StoredGrant>,
        /// Whether the API server can be reached. If it cannot, nothing is published.
        is_reachable: bool,
    },
}

/// What the agent observes on its node. Every field is observed: none follows from what was requested.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Local {
    /// Whether kubelet wants the volume on this node.
    pub wanted: bool,
    /// The mapping; `None` if there is no mount, no opener, no device and no worker, and everything written
    /// was flushed or has failed.
    pub mapping: Option<Mapping>,
    /// The claim of this node in the record.
    pub claim: OwnClaim,
    /// The last claim that the storage refused, until the caller wants it tried again.
    pub refusal: Option<(Generation, Refusal)>,
}

/// A mapping on the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// The generation with which it was claimed; [`Generation`] 0 if it was claimed without a grant.
    pub generation: Generation,
    /// The client of the storage.
    pub client: String,
    /// The path of the device.
    pub device_path: String,
    /// The state.
    pub state: MappingState,
    /// Since when the agent tries to end it; `None` if it does not.
    pub ending_since: Option<Time>,
}

/// The state of a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MappingState {
    /// The worker starts: it claims the volume and connects the device.
    Starting,
    /// The volume is claimed, the device and its link exist, and a read was answered.
    Usable,
    /// The worker has died, and the device waits for the next one.
    WorkerDead,
    /// The storage refuses the client.
    CutOff,
}

/// The claim of the node in the record, as far as the agent knows it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum OwnClaim {
    /// The record was not read since the agent has started, and the agent's journal does not name the volume.
    #[default]
    Unread,
    /// The record was not read since the agent has started, and its journal names a mapping that does not exist
    /// any more, for example after a reboot. The journal must keep it until the claim is released: no grant
    /// may name this node after a restored backup.
    Lost,
    /// An operation at the storage has not answered, so that the record must be read.
    Uncertain,
    /// The record has no claim of this node.
    None,
    /// The record has a claim of this node with this client.
    Held(String),
}

/// The next step of the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Nothing to do until something changes or the time passes.
    Wait,
    /// Read this node's claim from the record.
    ReadClaim,
    /// Write the node's own entry. If `intent` is set and the write succeeds, pass the returned object to
    /// [`Permit::from_answer`].
    Publish {
        /// The version that the write requires.
        version: Option<Version>,
        /// The new entry.
        entry: NodeEntry,
        /// The generation that is about to be claimed.
        intent: Option<Generation>,
    },
    /// Start a worker that claims the volume with this generation.
    Claim(Generation),
    /// Replace the dead worker. The new one claims with the same generation, without the API server:
    /// [`Record::admit_reclaim`](crate::record::Record::admit_reclaim).
    Reclaim(Generation),
    /// Unmount if nothing uses the file system, unmap, and prove the end of the worker. Repeated until the
    /// mapping is gone.
    Finish,
    /// End the mapping whatever holds it: its I/O fails.
    Force,
    /// Cut off the client of an ended worker, and release its claim
    /// ([`Record::release`](crate::record::Record::release)).
    Release(String),
}

/// The permit to claim a volume with a generation. The caller keeps it until a claim succeeds or is refused for
/// good, until [`Permit::survives`] is false for an entry that it sends, or until it restarts. Until then the
/// controller cannot free the generation, because SafeToDetach is false, unless it seals the generation at the
/// storage, which then refuses the claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Permit {
    generation: Generation,
}

impl Permit {
    /// Returns the permit that follows from a successful write of an intent. `returned` is the object that the
    /// API server returned for the write, never a cached one. Implements rule 2,
    /// [`Rule::IntentBeforeClaim`].
    pub fn from_answer(returned: &VolumeGrant, node: &str, generation: Generation) -> Option<Self> {
        let holder = returned.holder(node)?;
        let is_granted = holder.generation == generation && !holder.revoked;
        let entry = returned.entry(node)?;
        let is_withdrawn = entry.is(Signal::SafeToDetach, Truth::False, generation);
        (is_granted && is_withdrawn).then_some(Self { generation })
    }

    /// Returns whether the permit stays valid when the node sends `entry`.
    pub fn survives(&self, entry: &NodeEntry) -> bool {
        !entry.is(Signal::SafeToDetach, Truth::True, self.generation)
    }

    /// Returns the generation that may be claimed.
    pub fn generation(&self) -> Generation {
        self.generation
    }
}

impl Local {
    /// Returns whether nothing of this node can write to the volume any more, and its claim is released.
    /// Implements rule 5, [`Rule::SignalsAreObserved`].
    pub fn is_safe_to_detach(&self) -> bool {
        if !applies(Rule::SignalsAreObserved) {
            return !self.wanted;
        }
        self.mapping.is_none() && self.claim == OwnClaim::None
    }

    /// Returns the mapping if it is safe to mount: claimed, mapped, with its link, and a read was answered.
    /// Implements rule 5.
    pub fn usable(&self) -> Option<&Mapping> {
        self.mapping.as_ref().filter(|mapping| mapping.state == MappingState::Usable)
    }
}

/// Decides the next step for a volume.
pub fn next_step(view: &View<'_>, now: Time) -> Step {
    let end = view.local.mapping.as_ref().and_then(|mapping| end(view, mapping, now));
    if !applies(Rule::SignalsAreObserved)
        && let Some(step) = publish_difference(view, now)
    {
        return step;
    }
    if let Some(step) = end {
        return step;
    }
    let step = match &view.local.mapping {
        Some(mapping) if mapping.state == MappingState::WorkerDead => {
            Some(Step::Reclaim(mapping.generation))
        }
        Some(_) => None,
        None => unmapped(view, now),
    };
    step.or_else(|| publish_difference(view, now)).unwrap_or(Step::Wait)
}

/// Returns how a mapping has to end; `None` if it stays. One that is cut off cannot write what is dirty, so that a
/// plain end would fail.
fn end(view: &View<'_>, mapping: &Mapping, now: Time) -> Option<Step> {
    if mapping.state == MappingState::CutOff || is_fenced(view, mapping.generation) {
        return Some(Step::Force);
    }
    let is_revoked = is_revoked(view, mapping.generation);
    if !is_revoked && view.local.wanted {
        return None;
    }
    let timeout = mapping.ending_since.zip(view.force_after_s);
    // One second more, because the difference of two times in whole seconds may be almost a second too long.
    let is_late = timeout
        .is_some_and(|(since, timeout_s)| since.is_older_than(timeout_s.saturating_add(1), now));
    Some(if is_revoked && is_late { Step::Force } else { Step::Finish })
}

/// Returns whether the grant says that `generation` was fenced on this node.
fn is_fenced(view: &View<'_>, generation: Generation) -> bool {
    let Grants::Listed { grant: Some(stored), .. } = view.grants else { return false };
    stored.grant.fence(view.node, generation).is_some()
}

/// Returns whether `generation` was revoked on this node. Implements rule 9,
/// [`Rule::AbsenceIsNotRevocation`]: a grant that is missing, not listed or about another generation ends
/// nothing.
fn is_revoked(view: &View<'_>, generation: Generation) -> bool {
    let Grants::Listed { grant, .. } = view.grants else { return false };
    let grant = grant.map(|stored| &stored.grant);
    let holder = grant.and_then(|grant| grant.holder(view.node));
    let holder = holder.filter(|holder| holder.generation == generation);
    let is_absent = !applies(Rule::AbsenceIsNotRevocation) && holder.is_none();
    is_absent || holder.is_some_and(|holder| holder.revoked)
}

/// Decides for a volume that is not mapped: claim it, or release what is left of an earlier claim.
fn unmapped(view: &View<'_>, now: Time) -> Option<Step> {
    let local = view.local;
    let holder = granted(view).filter(|_| local.wanted);
    let refusal = local.refusal.as_ref();
    let is_refused =
        |holder: &Holder| refusal.is_some_and(|(generation, _)| *generation == holder.generation);
    if let Some(holder) = holder.filter(|holder| !is_refused(holder)) {
        return claim(view, holder, now);
    }
    match &local.claim {
        OwnClaim::Held(client) => Some(Step::Release(client.clone())),
        // The loss of a mapping is published first: the storage may not answer.
        OwnClaim::Unread | OwnClaim::Lost if is_lost(view) => None,
        OwnClaim::Unread => concerns_node(view).then_some(Step::ReadClaim),
        OwnClaim::Lost | OwnClaim::Uncertain => Some(Step::ReadClaim),
        OwnClaim::None => None,
    }
}

/// Claims with a permit, and asks for one without. Implements rule 2.
fn claim(view: &View<'_>, holder: &Holder, now: Time) -> Option<Step> {
    let generation = holder.generation;
    let has_permit = view.permit.is_some_and(|permit| permit.generation == generation);
    if has_permit || !applies(Rule::IntentBeforeClaim) {
        return Some(Step::Claim(generation));
    }
    let stored = writable(view)?;
    let entry = entries::intent(&stored.grant, view, generation, now);
    Some(Step::Publish { version: condition_of(stored), entry, intent: Some(generation) })
}

/// Returns the unrevoked grant of this node.
fn granted<'a>(view: &View<'a>) -> Option<&'a Holder> {
    let Grants::Listed { grant: Some(stored), .. } = view.grants else { return None };
    stored.grant.holder(view.node).filter(|holder| !holder.revoked)
}

/// Returns the grant if the node can write its entry.
fn writable<'a>(view: &View<'a>) -> Option<&'a StoredGrant> {
    match view.grants {
        Grants::Listed { grant: Some(stored), is_reachable: true } => Some(stored),
        _ => None,
    }
}

/// Returns whether the grant says anything about this node.
fn concerns_node(view: &View<'_>) -> bool {
    let Grants::Listed { grant: Some(stored), .. } = view.grants else { return false };
    let grant = &stored.grant;
    grant.holder(view.node).is_some() || grant.fences_of(view.node).next().is_some()
}

/// Returns whether the node's entry says that the volume is mapped, which it is not.
fn is_lost(view: &View<'_>) -> bool {
    let Some(stored) = writable(view) else { return false };
    let holder = stored.grant.holder(view.node);
    let is_said =
        |holder: &Holder| stored.grant.is_true(view.node, Signal::SafeToMount, holder.generation);
    holder.is_some_and(is_said)
}

/// Publishes the node's entry if it differs from what is observed.
fn publish_difference(view: &View<'_>, now: Time) -> Option<Step> {
    let stored = writable(view)?;
    let entry = entries::observed(&stored.grant, view, now)?;
    Some(Step::Publish { version: condition_of(stored), entry, intent: None })
}

#[cfg(test)]
mod tests;
