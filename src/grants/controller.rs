//! The controller's decisions about one volume: a pure function from what was observed to the next step.
//!
//! Each step is one conditional write or one operation at the storage. After a step, and after a conflict,
//! the controller observes again. A step may therefore be interrupted anywhere, repeated, and continued by
//! another controller: whatever a later step needs is in the grant or in the record. In particular, fencing
//! has no result that must be remembered: the record is read back, and it is the proof.
//!
//! The order for a holder: revoke, fence if it is silent, free, grant the next. Each is a write of its own.

use std::collections::BTreeMap;

use crate::limits::{MAX_CLIENT, MAX_HOLDERS, MAX_MESSAGE, MAX_PODS, text};
use crate::object::{
    Condition, FenceEntry, Generation, GrantSpec, Holder, Mode, Reason, Signal, StoredGrant, Time,
    Truth, Version, VolumeGrant,
};
use crate::policy::{FencingReason, NodeState, Policy};
use crate::record::{Claim, FencePlan, Record, Seal, Target};
use crate::rules::{Rule, applies, condition_of};

/// What the controller has observed. All parts must have been listed at least once: a part that is not known
/// yet would count as empty.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// The grant of the volume; `None` if the object does not exist.
    pub grant: Option<&'a StoredGrant>,
    /// The requests for the volume, oldest first. The list must not be older than the grant: a grant whose request
    /// is not in the list yet would be revoked. That is safe, and costs the pod its volume.
    pub requests: &'a [Request],
    /// The nodes that exist.
    pub nodes: &'a BTreeMap<String, NodeState>,
    /// The record at the storage, if it was read after this version of the grant was observed. An older record
    /// must not be passed: a claim could have been made between the two.
    pub record: Option<&'a Record>,
    /// Whether the storage has answered that the volume does not exist, and nothing requests it. The record is the
    /// default one then. A storage or a pool that cannot be reached is not an answer.
    pub is_gone: bool,
}

/// A request for a volume: a VolumeAttachment, or an entry of the own attach/detach loop. It decides nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The node that is to have the volume.
    pub node: String,
    /// How it is to use the volume.
    pub mode: Mode,
    /// The pods that need it.
    pub pod_uids: Vec<String>,
}

/// The next step of the controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Nothing to do until something changes or the time passes. With the holders that it waits for.
    Wait(Vec<Waiting>),
    /// Read the record of the volume and decide again.
    ReadRecord,
    /// Create the grant with its finalizer. Fails if it exists.
    Create(GrantSpec),
    /// Replace the spec.
    WriteSpec {
        /// The version that the write requires.
        version: Option<Version>,
        /// The new spec.
        spec: GrantSpec,
        /// What changes, for the event.
        change: Change,
    },
    /// Replace the fences in the status.
    WriteFences {
        /// The version that the write requires.
        version: Option<Version>,
        /// The new fences.
        fences: Vec<FenceEntry>,
    },
    /// Remove a node from the status: its entry and its fences.
    Forget {
        /// The version that the write requires.
        version: Option<Version>,
        /// The node, which nothing needs to know of.
        node: String,
    },
    /// Fence a holder at the storage ([`Record::plan_fence`], [`Record::seal`]), and read the record again.
    Fence(Target, FencingReason),
    /// End the fencing of a client whose end is proved ([`Record::unfence`]), and read the record again.
    Unfence(String),
    /// Remove the finalizer of the grant, which is being deleted and has no holder.
    RemoveFinalizer(Option<Version>),
}

impl Step {
    /// Returns what is done after the step, for tests and logs.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Wait(_) | Self::ReadRecord => "observed",
            Self::Create(_) => "created",
            Self::WriteSpec { change: Change::Granted(..), .. } => "granted",
            Self::WriteSpec { change: Change::Revoked(..), .. } => "revoked",
            Self::WriteSpec { change: Change::Freed(..), .. } => "freed",
            Self::WriteSpec { change: Change::Adopted(..), .. } => "adopted",
            Self::WriteFences { .. } => "fences written",
            Self::Forget { .. } => "forgotten",
            Self::Fence(..) => "fenced",
            Self::Unfence(_) => "unfenced",
            Self::RemoveFinalizer(_) => "removed",
        }
    }
}

/// A change of the spec.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A node gets a grant.
    Granted(String, Generation),
    /// A node must end its use.
    Revoked(String, Generation, RevocationReason),
    /// A holder is removed, because it is proved that it does not use the volume.
    Freed(String, Generation),
    /// A claim at the storage that no grant names gets a holder entry.
    Adopted(String, Generation),
}

/// The reason of a revocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RevocationReason {
    /// The volume is not requested for the node any more, or in another mode.
    NotRequested,
    /// The storage refuses the generation. The node can get a new one afterwards.
    Superseded,
    /// The node is lost.
    NodeLost,
    /// The grant is being deleted.
    Deleting,
}

/// A holder for which the controller waits, or a request that cannot be granted yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiting {
    /// The node.
    pub node: String,
    /// What has to happen.
    pub until: Until,
}

/// What the controller waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// The node releases the volume. It is fenced after the release timeout if the policy permits it.
    Released,
    /// The node releases the volume, or Kubernetes or an administrator decides that the node is lost: the
    /// node may be silent, which proves nothing.
    ReleasedOrLost,
    /// Another holder is gone.
    OtherHolders,
    /// The node reports that it has cleaned up after it was fenced.
    Cleaned,
    /// The node exists and is in service.
    InService,
}

/// Returned where a decision needs the record.
struct NeedsRecord;

type Decision<T> = Result<T, NeedsRecord>;

/// Decides the next step for a volume.
pub fn decide(view: &View<'_>, policy: &Policy, now: Time) -> Step {
    let step = match view.grant {
        Some(stored) => {
            let grant = &stored.grant;
            VolumeFacts { view, stored, grant, policy, now }.step()
        }
        None => create(view, now),
    };
    step.unwrap_or(Step::ReadRecord)
}

/// Creates the grant when the volume is first requested, with the holder in it.
fn create(view: &View<'_>, now: Time) -> Decision<Step> {
    let Some(first) = view.requests.iter().find(|request| in_service(view, &request.node)) else {
        let until = Until::InService;
        let waiting = view.requests.iter().map(|r| Waiting { node: r.node.clone(), until });
        return Ok(Step::Wait(waiting.collect()));
    };
    let record = view.record.ok_or(NeedsRecord)?;
    let mut spec = GrantSpec::default();
    let is_fenced = |seal: &Seal| seal.node == first.node && seal.client.is_some();
    match record.claims.first() {
        Some(claim) => adopt(&mut spec, claim, record, now),
        // The object was lost. The fence is written again before the node gets a grant.
        None if record.seals.iter().any(is_fenced) => spec.generation = record.generation,
        None => grant_next(&mut spec, first, record, now),
    }
    Ok(Step::Create(spec))
}

/// Returns the step that gives a claim a holder which no grant names and no request brings up: its node is then asked to
/// release the volume, as after a detach. `None` if there is no such claim, or the record was not read.
///
/// A claim without a generation was made without a grant. One of a node that does not exist here may be of another
/// cluster. Nothing proves that they are left over, so they stay.
pub fn adopt_unrequested(view: &View<'_>, now: Time) -> Option<Step> {
    let is_idle = |stored: &StoredGrant| stored.grant.spec.holders.is_empty() && !stored.deleting;
    if !view.requests.is_empty() || !view.grant.is_none_or(is_idle) {
        return None;
    }
    let record = view.record?;
    let is_left = |claim: &&Claim| {
        claim.generation != Generation::default() && view.nodes.contains_key(&claim.node)
    };
    let claim = record.claims.iter().find(is_left)?;
    let mut spec = view.grant.map(|stored| stored.grant.spec.clone()).unwrap_or_default();
    adopt(&mut spec, claim, record, now);
    let change = Change::Adopted(claim.node.clone(), claim.generation);
    Some(match view.grant {
        Some(stored) => Step::WriteSpec { version: condition_of(stored), spec, change },
        None => Step::Create(spec),
    })
}

fn in_service(view: &View<'_>, node: &str) -> bool {
    view.nodes.get(node).is_some_and(|node| !node.out_of_service && !node.lost)
}

/// One volume with a grant, and everything that decisions about it depend on.
struct VolumeFacts<'a> {
    view: &'a View<'a>,
    stored: &'a StoredGrant,
    grant: &'a VolumeGrant,
    policy: &'a Policy,
    now: Time,
}

impl VolumeFacts<'_> {
    fn step(&self) -> Decision<Step> {
        for holder in self.grant.spec.holders.iter().filter(|holder| holder.revoked) {
            if self.is_free(holder)? {
                return Ok(self.free(holder));
            }
        }
        for holder in &self.grant.spec.holders {
            if let Some(step) = self.mend_refused(holder)? {
                return Ok(step);
            }
            if let Some(reason) = self.revocation(holder).filter(|_| !holder.revoked) {
                return Ok(self.revoke(holder, reason));
            }
        }
        for holder in &self.grant.spec.holders {
            if let Some(step) = self.fence(holder)? {
                return Ok(step);
            }
        }
        if let Some(step) = self.clean_up()? {
            return Ok(step);
        }
        if let Some(step) = self.forget() {
            return Ok(step);
        }
        if self.stored.deleting {
            let is_free = self.grant.spec.holders.is_empty();
            let finalizer = || Step::RemoveFinalizer(condition_of(self.stored));
            return Ok(if is_free { finalizer() } else { Step::Wait(self.waiting()) });
        }
        self.grant()
    }

    /// Returns whether a revoked holder is free. Implements [`Rule::SilenceIsNotProof`]: only Fenced, or
    /// SafeToDetach of this generation, frees it. Implements [`Rule::RecordConfirmsTheSignal`]: SafeToDetach
    /// does not count while the record has a claim of this generation.
    fn is_free(&self, holder: &Holder) -> Decision<bool> {
        let Holder { node, generation, .. } = holder;
        if self.grant.fence(node, *generation).is_some() {
            return Ok(true);
        }
        if self.grant.is_true(node, Signal::SafeToDetach, *generation) {
            let confirms = applies(Rule::RecordConfirmsTheSignal);
            return Ok(!confirms || !has_claim(self.record()?, holder));
        }
        if self.is_gone(holder)? {
            return Ok(true);
        }
        let is_silent = || self.has_had_time(holder);
        if !applies(Rule::SilenceIsNotProof) {
            return Ok(is_silent());
        }
        let is_gone = || self.fencing_reason(holder) == Some(FencingReason::LeaseStale);
        Ok(!applies(Rule::ClockProvesNothing) && is_silent() && is_gone())
    }

    /// Returns whether the volume of a lost node does not exist any more, so that nothing can be fenced. If it comes
    /// back, for example from the trash, its record comes back too, and refuses every other node until the claims in it
    /// are adopted and fenced.
    fn is_gone(&self, holder: &Holder) -> Decision<bool> {
        let is_lost = self.has_had_time(holder) && self.fencing_reason(holder).is_some();
        Ok(is_lost && self.record().map(|_| self.view.is_gone)?)
    }

    /// Returns whether the release timeout is over. A lost node gets none: it has been silent for longer, and does not hear
    /// that the volume is revoked.
    fn has_had_time(&self, holder: &Holder) -> bool {
        let is_lost = self.view.nodes.get(&holder.node).is_some_and(|node| node.lost);
        is_lost || holder.since.is_older_than(self.policy.release_timeout_s, self.now)
    }

    /// Removes a holder that is free. Part of rule 7.
    fn free(&self, holder: &Holder) -> Step {
        let mut spec = self.grant.spec.clone();
        spec.holders.retain(|known| known != holder);
        self.write(spec, Change::Freed(holder.node.clone(), holder.generation))
    }

    /// Reacts to a node that cannot claim with its generation. Implements rule 10: a claim that no grant names
    /// is adopted, and a generation that the storage refuses for good is revoked, so that the next one is
    /// above the record.
    fn mend_refused(&self, holder: &Holder) -> Decision<Option<Step>> {
        let Holder { node, generation, mode, .. } = holder;
        let entry = self.grant.entry(node).and_then(|entry| entry.condition(Signal::SafeToMount));
        let Some(known) = entry.filter(|known| {
            known.status == Truth::False && known.generation == *generation && is_refusal(known)
        }) else {
            return Ok(None);
        };
        let record = self.record()?;
        let own = record.claim_of(node).filter(|claim| claim.generation != *generation);
        let own = own.filter(|_| known.reason == Reason::OtherGeneration);
        if let Some(claim) = own.or_else(|| self.foreign(record)) {
            return Ok(Some(self.adopt(claim, record)));
        }
        let refusal = record.refusal(node, *generation, *mode);
        let is_final = refusal.is_some_and(|refusal| refusal.is_final()) && !holder.revoked;
        Ok(is_final.then(|| self.revoke(holder, RevocationReason::Superseded)))
    }

    fn revocation(&self, holder: &Holder) -> Option<RevocationReason> {
        if self.stored.deleting {
            return Some(RevocationReason::Deleting);
        }
        if self.view.nodes.get(&holder.node).is_some_and(|node| node.lost) {
            return Some(RevocationReason::NodeLost);
        }
        (!self.is_requested(holder)).then_some(RevocationReason::NotRequested)
    }

    fn is_requested(&self, holder: &Holder) -> bool {
        let asks = |request: &Request| request.node == holder.node && request.mode == holder.mode;
        self.view.requests.iter().any(asks)
    }

    /// Revokes a holder. A revocation is recorded before anything is fenced: part of rule 7.
    fn revoke(&self, holder: &Holder, reason: RevocationReason) -> Step {
        let mut spec = self.grant.spec.clone();
        let revoked = spec.holders.iter_mut().filter(|known| *known == holder);
        for known in revoked {
            (known.revoked, known.since) = (true, self.now);
        }
        self.write(spec, Change::Revoked(holder.node.clone(), holder.generation, reason))
    }

    /// Fences a holder that does not release the volume: cuts off its client and seals the generation at the
    /// storage, reads the record back, and writes Fenced with the proof. Implements rule 7,
    /// [`Rule::RevokeBeforeFence`]. A node that only is silent is not fenced: the policy must permit it.
    fn fence(&self, holder: &Holder) -> Decision<Option<Step>> {
        let may_fence = holder.revoked || !applies(Rule::RevokeBeforeFence);
        let has_had_time = self.has_had_time(holder);
        let reason = self.fencing_reason(holder).filter(|_| may_fence && has_had_time);
        let Some(reason) = reason else { return Ok(None) };
        let record = self.record()?;
        let target = target(holder);
        if let Some(proof) = record.proof_of(&target) {
            return Ok(Some(self.write_fenced(&target, proof, record)));
        }
        let foreign = matches!(record.plan_fence(&target), FencePlan::Foreign(_));
        let foreign = foreign.then(|| self.foreign(record)).flatten();
        match foreign {
            Some(claim) => Ok(Some(self.adopt(claim, record))),
            // The other claim has a holder of its own, which comes first.
            None if matches!(record.plan_fence(&target), FencePlan::Foreign(_)) => Ok(None),
            None => Ok(Some(Step::Fence(target, reason))),
        }
    }

    fn fencing_reason(&self, holder: &Holder) -> Option<FencingReason> {
        let node = self.view.nodes.get(&holder.node);
        self.policy.fencing_reason(node, self.is_requested(holder), self.now)
    }

    fn write_fenced(&self, target: &Target, proof: String, record: &Record) -> Step {
        let Target { node, generation, .. } = target.clone();
        let client = record.seal_of(generation).and_then(|seal| seal.client.as_deref());
        // The record is of a node. What has to be done at the storage is read from there again.
        let client = client.map(|client| text(client, MAX_CLIENT));
        let proof = text(&proof, MAX_MESSAGE);
        let mut fences = self.grant.status.fences.clone();
        fences.push(FenceEntry { node, generation, client, proof, time: self.now });
        Step::WriteFences { version: condition_of(self.stored), fences }
    }

    /// Ends the fencing of a client whose node reports that it has cleaned up, and then removes the fence. A client of
    /// another machine that had the node's name stays cut off: the node knows nothing of it. Part of rule 11.
    fn clean_up(&self) -> Decision<Option<Step>> {
        let is_clean = |fence: &&FenceEntry| {
            let is_freed =
                !self.grant.spec.holders.iter().any(|holder| {
                    holder.node == fence.node && holder.generation == fence.generation
                });
            is_freed && self.grant.is_true(&fence.node, Signal::Cleaned, fence.generation)
        };
        let Some(fence) = self.grant.status.fences.iter().find(is_clean) else { return Ok(None) };
        let seal = self.record()?.seal_of(fence.generation);
        let seal = seal.filter(|seal| !self.is_of_other_machine(seal));
        if let Some(client) = seal.and_then(|seal| seal.client.clone()) {
            return Ok(Some(Step::Unfence(client)));
        }
        let mut fences = self.grant.status.fences.clone();
        fences.retain(|known| known != fence);
        Ok(Some(Step::WriteFences { version: condition_of(self.stored), fences }))
    }

    /// Returns whether the client of a seal was on another machine than the one that has the name of its node now.
    fn is_of_other_machine(&self, seal: &Seal) -> bool {
        let entry = self.grant.entry(&seal.node);
        let machines = seal.machine.as_ref().zip(entry.and_then(|entry| entry.machine.as_ref()));
        applies(Rule::OnlyTheMachineIsClean) && machines.is_some_and(|(sealed, now)| sealed != now)
    }

    /// Removes a node from the status if one of its lists has more than [`Policy::max_nodes`] entries: the object has a
    /// maximum size. No later step needs what it says about the node.
    ///
    /// A node that was deleted may never clean up. It holds nothing, its clients stay cut off, and its generations stay
    /// closed in the record. A node that returns gets its fence again before it gets a grant, from the record. If the
    /// record does not name its client any more, the node still does not claim while a mapping is left.
    ///
    /// The entry of a node that exists says something about a generation that the node holds, or that was fenced. It is
    /// removed if there is none: the node writes it anew when it gets a grant.
    fn forget(&self) -> Option<Step> {
        let (status, max) = (&self.grant.status, self.policy.max_nodes);
        let is_unused = |node: &str| {
            let is_requested = self.view.requests.iter().any(|request| request.node == node);
            !is_requested && self.grant.holder(node).is_none()
        };
        let is_deleted = |node: &&String| is_unused(node) && !self.view.nodes.contains_key(*node);
        let is_idle = |node: &&String| is_unused(node) && self.grant.fences_of(node).count() == 0;
        let mut fenced = status.fences.iter().map(|fence| &fence.node);
        let fenced = fenced.find(is_deleted).filter(|_| status.fences.len() > max);
        let known = || status.nodes.iter().map(|entry| &entry.node);
        let known = || known().find(is_deleted).or_else(|| known().find(is_idle));
        let node = fenced.or_else(|| known().filter(|_| status.nodes.len() > max))?.clone();
        Some(Step::Forget { version: condition_of(self.stored), node })
    }

    /// Grants the volume to the oldest request that can have it. Implements rule 11,
    /// [`Rule::CleanedBeforeGrant`]: not to a node that was fenced and has not cleaned up.
    fn grant(&self) -> Decision<Step> {
        let waiting = self.waiting();
        let blocked = |node: &str| waiting.iter().any(|known| known.node == node);
        let holds = |request: &&Request| self.grant.holder(&request.node).is_none();
        let next = self.view.requests.iter().filter(holds).find(|r| !blocked(&r.node));
        let Some(request) = next else { return Ok(Step::Wait(waiting)) };
        let record = self.record()?;
        if let Some(foreign) = self.foreign(record) {
            return Ok(self.adopt(foreign, record));
        }
        if let Some(step) = self.restore_fence(request, record) {
            return Ok(step);
        }
        let mut spec = self.grant.spec.clone();
        grant_next(&mut spec, request, record, self.now);
        let generation = spec.generation;
        Ok(self.write(spec, Change::Granted(request.node.clone(), generation)))
    }

    /// Writes a fence again that the record has and the object does not, because a backup was restored: the
    /// client of the node is still cut off. Part of rule 11.
    fn restore_fence(&self, request: &Request, record: &Record) -> Option<Step> {
        let is_lost = |seal: &&Seal| {
            let is_listed = self.grant.fence(&seal.node, seal.generation).is_some();
            let is_cut_off = seal.client.is_some() && !self.is_of_other_machine(seal);
            seal.node == request.node && is_cut_off && !is_listed
        };
        let applies = applies(Rule::CleanedBeforeGrant);
        let seal = record.seals.iter().filter(|_| applies).find(is_lost)?;
        let Request { node, mode, .. } = request.clone();
        let target = Target { node, generation: seal.generation, mode };
        let proof = record.proof_of(&target)?;
        Some(self.write_fenced(&target, proof, record))
    }

    /// Returns what the volume waits for: holders that were revoked, and requests that cannot be granted.
    fn waiting(&self) -> Vec<Waiting> {
        let holders = self.grant.spec.holders.iter().filter(|holder| holder.revoked);
        let holders = holders.map(|holder| {
            let may_fence = self.fencing_reason(holder).is_some();
            let until = if may_fence { Until::Released } else { Until::ReleasedOrLost };
            Waiting { node: holder.node.clone(), until }
        });
        let open = self.view.requests.iter().filter(|r| self.grant.holder(&r.node).is_none());
        let open = open.filter_map(|request| {
            let until = self.obstacle(request)?;
            Some(Waiting { node: request.node.clone(), until })
        });
        holders.chain(open).collect()
    }

    fn obstacle(&self, request: &Request) -> Option<Until> {
        let holders = &self.grant.spec.holders;
        let is_rival = |holder: &Holder| !holder.mode.is_compatible(request.mode);
        let is_unclean = |fence: &FenceEntry| {
            !self.grant.is_true(&fence.node, Signal::Cleaned, fence.generation)
        };
        let cleaned = applies(Rule::CleanedBeforeGrant);
        if !in_service(self.view, &request.node) {
            return Some(Until::InService);
        }
        if cleaned && self.grant.fences_of(&request.node).any(is_unclean) {
            return Some(Until::Cleaned);
        }
        let is_full = holders.len() >= MAX_HOLDERS;
        (is_full || holders.iter().any(is_rival)).then_some(Until::OtherHolders)
    }

    /// Returns a claim in the record that no grant names. A claim of a generation before the node's current
    /// one is not foreign: the node cuts it off when it claims.
    fn foreign<'r>(&self, record: &'r Record) -> Option<&'r Claim> {
        if !applies(Rule::ForeignClaimIsAdopted) {
            return None;
        }
        record.claims.iter().find(|claim| {
            let holder = self.grant.holder(&claim.node);
            holder.is_none_or(|holder| holder.generation < claim.generation)
        })
    }

    /// Gives a claim that no grant names a holder entry. Implements rule 10, [`Rule::ForeignClaimIsAdopted`].
    fn adopt(&self, claim: &Claim, record: &Record) -> Step {
        let mut spec = self.grant.spec.clone();
        adopt(&mut spec, claim, record, self.now);
        self.write(spec, Change::Adopted(claim.node.clone(), claim.generation))
    }

    fn record(&self) -> Decision<&Record> {
        self.view.record.ok_or(NeedsRecord)
    }

    fn write(&self, spec: GrantSpec, change: Change) -> Step {
        Step::WriteSpec { version: condition_of(self.stored), spec, change }
    }
}

/// Adds a holder for a claim. A node has one entry, and holders that cannot exist beside the claim are
/// revoked: the record shows that they have not claimed.
fn adopt(spec: &mut GrantSpec, claim: &Claim, record: &Record, now: Time) {
    spec.holders.retain(|holder| holder.node != claim.node);
    let rivals = spec.holders.iter_mut().filter(|holder| !holder.mode.is_compatible(claim.mode));
    for rival in rivals.filter(|rival| !rival.revoked) {
        (rival.revoked, rival.since) = (true, now);
    }
    let Claim { node, generation, mode, .. } = claim.clone();
    let holder =
        Holder { node, mode, generation, revoked: false, since: now, pod_uids: Vec::new() };
    spec.holders.push(holder);
    spec.generation = spec.generation.max(record.generation);
}

/// Adds a holder with the next generation, which is above everything that the object and the record name.
fn grant_next(spec: &mut GrantSpec, request: &Request, record: &Record, now: Time) {
    let generation = spec.generation.max(record.generation).next();
    let Request { node, mode, mut pod_uids } = request.clone();
    pod_uids.truncate(MAX_PODS);
    spec.holders.push(Holder { node, mode, generation, revoked: false, since: now, pod_uids });
    spec.generation = generation;
}

/// Returns whether a condition says that the node cannot claim with its generation.
fn is_refusal(condition: &Condition) -> bool {
    matches!(
        condition.reason,
        Reason::Superseded | Reason::Fenced | Reason::ClaimedElsewhere | Reason::OtherGeneration
    )
}

fn has_claim(record: &Record, holder: &Holder) -> bool {
    let claim = record.claim_of(&holder.node);
    claim.is_some_and(|claim| claim.generation == holder.generation)
}

fn target(holder: &Holder) -> Target {
    let Holder { node, generation, mode, .. } = holder.clone();
    Target { node, generation, mode }
}

#[cfg(test)]
mod tests;
