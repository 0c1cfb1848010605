//! The record at the storage, which alone stops a writer: who has claimed the volume, under which
//! generation, and which generations are sealed.
//!
//! The functions are pure: they say whether a claim or a fence is admitted, and return the record to write.
//! The storage's adapter writes it under the volume's lock, only if the record has not changed since it was
//! read. Where a client has to be cut off first, the adapter does so before it writes.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::object::{Generation, Mode};
use crate::rules::{Rule, applies};

/// The maximum number of seals below [`Record::lowest`] that the record keeps. They are only needed as proof.
const MAX_OLD_SEALS: usize = 16;

/// The same, with the seals that name a client which is cut off. They show which nodes have not cleaned up: nodes
/// that never return leave them.
const MAX_SEALS: usize = 64;

/// The record of a volume. The default is the record of a volume that was never claimed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The highest generation that has claimed the volume or was sealed.
    pub generation: Generation,
    /// The lowest generation that may still claim.
    pub lowest: Generation,
    /// The claims that were not released, by generation. More than one only in a mode that permits it.
    #[serde(default)]
    pub claims: Vec<Claim>,
    /// The generations that were fenced, oldest first.
    #[serde(default)]
    pub seals: Vec<Seal>,
}

/// A claim that was not released.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// The node of the client.
    pub node: String,
    /// The generation of the grant with which it has claimed.
    pub generation: Generation,
    /// The client, as the storage identifies it. Each process is another client.
    pub client: String,
    /// How it uses the volume.
    pub mode: Mode,
}

/// A generation that was fenced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seal {
    /// The generation.
    pub generation: Generation,
    /// The node that was fenced.
    pub node: String,
    /// The client that is cut off; none if the node had not claimed, or if the client has ended.
    pub client: Option<String>,
    /// The hash of the machine id of the client's node; none if it is not known. Several machines may have the name
    /// of the node one after the other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
}

/// Permission to write a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Admission {
    /// The clients of the same node that must be cut off before the record is written: rule 4,
    /// [`Rule::PredecessorIsCutOff`].
    pub cut: Vec<String>,
    /// The record to write.
    pub record: Record,
}

/// The reason why the storage refuses a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// The record is ahead of the generation.
    Superseded(Generation),
    /// The generation is sealed.
    Sealed,
    /// A client of another node holds the volume in an incompatible mode.
    ClaimedElsewhere(Claim),
    /// The claim that is to be continued is not in the record any more.
    NotClaimed,
}

impl Refusal {
    /// Returns whether the same claim is refused for good, so that the node needs a new generation.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Superseded(_) | Self::Sealed)
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Superseded(generation) => {
                write!(f, "the storage is at generation {generation} already")
            }
            Self::Sealed => write!(f, "the generation was fenced at the storage"),
            Self::ClaimedElsewhere(claim) => {
                let Claim { node, generation, client, .. } = claim;
                write!(f, "node {node} holds it (generation {generation}, client {client})")
            }
            Self::NotClaimed => write!(f, "the claim is not recorded any more"),
        }
    }
}

/// A holder to fence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// The node.
    pub node: String,
    /// The generation of its grant.
    pub generation: Generation,
    /// The mode of its grant.
    pub mode: Mode,
}

/// What fencing a holder has to do at the storage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FencePlan {
    /// Nothing: the generation cannot write any more. The text is the proof.
    Done(String),
    /// Cut off the recorded client, if there is one; then write the record of [`Record::seal`], if the record
    /// has not changed.
    Cut(Option<String>),
    /// Nothing: another node has the claim, and cutting it off was not decided.
    Foreign(Claim),
}

impl Record {
    /// Decides about the claim of `client`, a client of `node`, for `generation`. Implements rules 3 and 4:
    /// [`Rule::ClaimCarriesGeneration`], [`Rule::NoTakeoverAcrossNodes`], [`Rule::PredecessorIsCutOff`].
    ///
    /// # Errors
    /// Returns the reason why the claim is refused.
    pub fn admit_claim(&self, claim: Claim) -> Result<Admission, Refusal> {
        self.refusal(&claim.node, claim.generation, claim.mode).map_or(Ok(()), Err)?;
        let cuts = applies(Rule::PredecessorIsCutOff);
        let own = |known: &&Claim| known.node == claim.node && known.client != claim.client;
        let own = self.claims.iter().filter(|known| cuts && own(known));
        let cut = own.map(|known| known.client.clone()).collect();
        let mut record = self.clone();
        record.claims.retain(|known| known.node != claim.node);
        record.generation = record.generation.max(claim.generation);
        if claim.mode == Mode::ReadWrite {
            record.lowest = record.lowest.max(claim.generation);
        }
        record.claims.push(claim);
        record.claims.sort_by_key(|claim| claim.generation);
        Ok(Admission { cut, record })
    }

    /// Decides about the claim of a client that replaces one of the same node and generation, without the API
    /// server. The claim of the predecessor must still be recorded. Implements rule 4.
    ///
    /// # Errors
    /// Returns the reason why the claim is refused.
    pub fn admit_reclaim(&self, claim: Claim) -> Result<Admission, Refusal> {
        let admission = self.admit_claim(claim.clone())?;
        let known = self.claim_of(&claim.node).filter(|known| known.generation == claim.generation);
        known.map(|_| admission).ok_or(Refusal::NotClaimed)
    }

    /// Returns why a claim of `node` for `generation` would be refused; `None` if it would be admitted.
    pub fn refusal(&self, node: &str, generation: Generation, mode: Mode) -> Option<Refusal> {
        let carries = applies(Rule::ClaimCarriesGeneration);
        if carries && applies(Rule::FencingSeals) && self.seal_of(generation).is_some() {
            return Some(Refusal::Sealed);
        }
        let is_behind = mode == Mode::ReadWrite && generation < self.generation;
        if carries && (is_behind || generation < self.lowest) {
            return Some(Refusal::Superseded(self.generation));
        }
        let rival = |claim: &&Claim| claim.node != node && !claim.mode.is_compatible(mode);
        let rival = self.claims.iter().find(rival);
        let rival = rival.filter(|_| applies(Rule::NoTakeoverAcrossNodes));
        rival.map(|claim| Refusal::ClaimedElsewhere(claim.clone()))
    }

    /// Returns the record without the claim of `client`; `None` if that client has no claim. A release that
    /// arrives late releases nothing of a later client.
    pub fn release(&self, client: &str) -> Option<Self> {
        let mut record = self.clone();
        record.claims.retain(|claim| claim.client != client);
        (record.claims.len() < self.claims.len()).then_some(record)
    }

    /// Plans the fencing of `target`. Implements rule 8, [`Rule::StaleFenceIsHarmless`]: a record that is ahead
    /// of the generation stays as it is. Only the client that is recorded for this node and this generation or
    /// an earlier one is cut off.
    pub fn plan_fence(&self, target: &Target) -> FencePlan {
        if !applies(Rule::StaleFenceIsHarmless) {
            return FencePlan::Cut(self.claims.first().map(|claim| claim.client.clone()));
        }
        if let Some(proof) = self.proof_of(target) {
            return FencePlan::Done(proof);
        }
        let own = self.claim_of(&target.node).filter(|own| own.generation <= target.generation);
        if let Some(own) = own {
            return FencePlan::Cut(Some(own.client.clone()));
        }
        // The seal of a generation closes all lower ones, and with them the claim of another node.
        let others = self.claims.iter().find(|claim| !claim.mode.is_compatible(target.mode));
        others.map_or(FencePlan::Cut(None), |claim| FencePlan::Foreign(claim.clone()))
    }

    /// Returns the record in which the generation of `target` is sealed. `cut` is the client that was cut off.
    /// Implements rule 7, [`Rule::FencingSeals`]: no client can claim with a sealed generation, also not a new
    /// client of the same node, which was not cut off.
    #[must_use]
    pub fn seal(&self, target: &Target, cut: Option<String>) -> Self {
        let mut record = self.clone();
        record.claims.retain(|claim| cut.as_ref() != Some(&claim.client));
        record.generation = record.generation.max(target.generation);
        if target.mode == Mode::ReadWrite {
            let open = if applies(Rule::FencingSeals) {
                target.generation.next()
            } else {
                target.generation
            };
            record.lowest = record.lowest.max(open);
        }
        let Target { node, generation, .. } = target.clone();
        record.seals.retain(|seal| seal.generation != generation);
        record.seals.push(Seal { generation, node, client: cut, machine: None });
        let lowest = record.lowest;
        let is_old = |seal: &Seal| seal.generation < lowest;
        drop_oldest(&mut record.seals, MAX_OLD_SEALS, |seal| is_old(seal) && seal.client.is_none());
        drop_oldest(&mut record.seals, MAX_SEALS, is_old);
        record
    }

    /// Returns the record that names `client` as no longer cut off; `None` if no seal names it.
    pub fn unfence(&self, client: &str) -> Option<Self> {
        let mut record = self.clone();
        let named = record.seals.iter_mut().filter(|seal| seal.client.as_deref() == Some(client));
        let named = named.map(|seal| seal.client = None).count();
        (named > 0).then_some(record)
    }

    /// Returns the proof that no client of `target` can write or claim any more; `None` if one may.
    pub fn proof_of(&self, target: &Target) -> Option<String> {
        let Target { node, generation, .. } = target;
        if self.claim_of(node).is_some_and(|claim| claim.generation == *generation) {
            return None;
        }
        if let Some(seal) = self.seal_of(*generation) {
            let client = seal.client.as_deref().unwrap_or("none");
            return Some(format!("generation {generation} is sealed, client cut off: {client}"));
        }
        let is_ahead = *generation < self.lowest;
        is_ahead.then(|| format!("the storage is at generation {} already", self.generation))
    }

    /// Returns the claim of `node`.
    pub fn claim_of(&self, node: &str) -> Option<&Claim> {
        self.claims.iter().find(|claim| claim.node == node)
    }

    /// Returns the seal of `generation`.
    pub fn seal_of(&self, generation: Generation) -> Option<&Seal> {
        self.seals.iter().find(|seal| seal.generation == generation)
    }
}

/// Drops the oldest of the seals for which `is_old` returns `true`, until at most `most` of them are left.
fn drop_oldest(seals: &mut Vec<Seal>, most: usize, is_old: impl Fn(&Seal) -> bool) {
    let mut surplus = seals.iter().filter(|seal| is_old(seal)).count().saturating_sub(most);
    seals.retain(|seal| {
        let drop = surplus > 0 && is_old(seal);
        surplus -= usize::from(drop);
        !drop
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(node: &str, generation: u64, client: &str) -> Claim {
        let (node, client) = (node.to_owned(), client.to_owned());
        Claim { node, generation: Generation(generation), client, mode: Mode::ReadWrite }
    }

    fn target(node: &str, generation: u64) -> Target {
        let (node, generation) = (node.to_owned(), Generation(generation));
        Target { node, generation, mode: Mode::ReadWrite }
    }

    fn claimed(record: &Record, by: Claim) -> Record {
        record.admit_claim(by).unwrap().record
    }

    #[test]
    fn a_claim_needs_a_generation_that_is_neither_behind_nor_sealed() {
        let record = claimed(&Record::default(), claim("a", 3, "a1"));
        let free = record.release("a1").unwrap();
        let refused = free.admit_claim(claim("b", 2, "b1")).unwrap_err();
        assert_eq!(refused, Refusal::Superseded(Generation(3)));
        let sealed = free.seal(&target("a", 3), None);
        assert_eq!(sealed.admit_claim(claim("a", 3, "a2")).unwrap_err(), Refusal::Sealed);
        assert!(sealed.admit_claim(claim("b", 4, "b1")).is_ok());
        let refused = record.admit_claim(claim("b", 4, "b1")).unwrap_err();
        assert_eq!(refused, Refusal::ClaimedElsewhere(claim("a", 3, "a1")));
    }

    #[test]
    fn a_node_claims_again_after_it_has_cut_off_its_predecessor() {
        let record = claimed(&Record::default(), claim("a", 3, "a1"));
        let again = record.admit_reclaim(claim("a", 3, "a2")).unwrap();
        assert_eq!((again.cut, again.record.claims.len()), (vec!["a1".to_owned()], 1));
        let free = record.release("a1").unwrap();
        let refused = free.admit_reclaim(claim("a", 3, "a2")).unwrap_err();
        assert_eq!(refused, Refusal::NotClaimed);
        // The release of the first client, which arrives late.
        assert_eq!(again.record.release("a1"), None);
    }

    #[test]
    fn a_fence_cuts_the_recorded_client_of_its_generation_only() {
        let record = claimed(&Record::default(), claim("a", 1, "a1"));
        assert_eq!(record.plan_fence(&target("a", 1)), FencePlan::Cut(Some("a1".to_owned())));
        let foreign = FencePlan::Foreign(claim("a", 1, "a1"));
        assert_eq!(record.plan_fence(&target("b", 2)), foreign);
        let later = claimed(&record.release("a1").unwrap(), claim("a", 2, "a2"));
        assert!(matches!(later.plan_fence(&target("a", 1)), FencePlan::Done(_)));
        let sealed = record.seal(&target("a", 1), Some("a1".to_owned()));
        assert!(sealed.claims.is_empty());
        assert!(matches!(sealed.plan_fence(&target("a", 1)), FencePlan::Done(_)));
        let clean = sealed.unfence("a1").unwrap();
        assert_eq!((clean.unfence("a1"), clean.seal_of(Generation(1)).is_some()), (None, true));
    }

    #[test]
    fn shared_holders_are_fenced_one_by_one() {
        let shared = |node: &str, generation, client: &str| Claim {
            mode: Mode::SharedReadWrite,
            ..claim(node, generation, client)
        };
        let record = claimed(&Record::default(), shared("a", 1, "a1"));
        let record = claimed(&record, shared("b", 2, "b1"));
        let refused = record.admit_claim(claim("c", 3, "c1")).unwrap_err();
        assert!(matches!(refused, Refusal::ClaimedElsewhere(_)));
        let target = Target { mode: Mode::SharedReadWrite, ..target("b", 2) };
        assert_eq!(record.plan_fence(&target), FencePlan::Cut(Some("b1".to_owned())));
        let sealed = record.seal(&target, Some("b1".to_owned()));
        assert_eq!(sealed.admit_claim(shared("b", 2, "b2")).unwrap_err(), Refusal::Sealed);
        assert!(sealed.admit_reclaim(shared("a", 1, "a2")).is_ok());
    }

    #[test]
    fn the_record_keeps_a_bounded_number_of_seals() {
        let mut record = Record::default();
        for generation in 1..100 {
            let client = (generation == 5).then(|| "a5".to_owned());
            record = record.seal(&target("a", generation), client);
        }
        // Clients that are cut off stay in the record until they may connect again.
        assert_eq!(record.seals.len(), MAX_OLD_SEALS + 1);
        assert!(record.seals.iter().any(|seal| seal.client.is_some()));
        assert!(record.proof_of(&target("a", 3)).is_some());
        // Nodes that never return leave clients that are cut off. Their generations stay closed without seals.
        for generation in 100..300 {
            let client = Some(format!("a{generation}"));
            record = record.seal(&target("a", generation), client);
        }
        assert_eq!(record.seals.len(), MAX_SEALS);
        assert!(record.seal_of(Generation(299)).is_some());
        for generation in [5, 100] {
            let refused = record.admit_claim(claim("a", generation, "a")).unwrap_err();
            assert_eq!(refused, Refusal::Superseded(Generation(299)));
        }
    }

    #[test]
    fn a_generation_that_is_not_closed_otherwise_keeps_its_seal() {
        let shared = Target { mode: Mode::SharedReadWrite, ..target("b", 100) };
        let mut record = Record::default().seal(&shared, None);
        for generation in 1..100 {
            record = record.seal(&target("a", generation), Some(format!("a{generation}")));
        }
        assert_eq!((record.lowest, record.seals.len()), (Generation(100), MAX_SEALS + 1));
        assert_eq!(record.admit_claim(claim("b", 100, "b")).unwrap_err(), Refusal::Sealed);
    }

    /// The client may still claim.
    #[test]
    fn a_generation_that_is_neither_closed_nor_sealed_is_no_proof() {
        let record = claimed(&Record::default(), claim("a", 3, "a1")).release("a1").unwrap();
        assert_eq!(record.proof_of(&target("a", 3)), None);
        let proof = record.proof_of(&target("a", 2)).unwrap();
        assert!(proof.contains("at generation 3"), "{proof}");
    }

    #[test]
    fn claims_of_shared_holders_do_not_close_earlier_generations() {
        let shared = |node: &str, generation, client: &str| Claim {
            mode: Mode::SharedReadWrite,
            ..claim(node, generation, client)
        };
        let record = claimed(&Record::default(), shared("b", 2, "b1"));
        let admission = record.admit_claim(shared("a", 1, "a1")).unwrap();
        assert!(admission.cut.is_empty(), "the client of another node is cut off");
        let generations: Vec<_> = admission.record.claims.iter().map(|c| c.generation.0).collect();
        assert_eq!((generations, admission.record.generation), (vec![1, 2], Generation(2)));
        // One writer closes them.
        let alone = claimed(&Record::default(), claim("a", 5, "a1")).release("a1").unwrap();
        let refused = alone.admit_claim(shared("b", 4, "b1")).unwrap_err();
        assert_eq!(refused, Refusal::Superseded(Generation(5)));
        assert!(alone.admit_claim(shared("b", 5, "b1")).is_ok());
    }

    #[test]
    fn a_node_that_claims_again_with_the_same_client_cuts_off_nothing() {
        let record = claimed(&Record::default(), claim("a", 3, "a1"));
        let again = record.admit_claim(claim("a", 3, "a1")).unwrap();
        assert_eq!((again.cut, again.record), (vec![], record));
    }

    #[test]
    fn a_refusal_names_its_cause() {
        let generation = Generation(3);
        for (refusal, is_final, text) in [
            (Refusal::Superseded(generation), true, "generation 3"),
            (Refusal::Sealed, true, "fenced"),
            (Refusal::ClaimedElsewhere(claim("b", 2, "b1")), false, "node b"),
            (Refusal::NotClaimed, false, "not recorded"),
        ] {
            assert_eq!(refusal.is_final(), is_final, "{refusal:?}");
            assert!(refusal.to_string().contains(text), "{refusal}");
        }
    }
}
