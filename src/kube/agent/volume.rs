//! What the agent knows of one volume.

use cleat_grants::agent::{Local, Mapping, MappingState, OwnClaim, Permit};
use cleat_grants::object::{Generation, Mode, Time};
use cleat_grants::record::{Record, Refusal};

use super::node::Observed;

/// A volume of the node.
#[derive(Debug)]
pub(super) struct AgentVolume {
    pub(super) handle: String,
    /// The number of calls that want to map the volume, or do so.
    pub(super) calls: u32,
    /// The claim in the record, as far as it was read.
    pub(super) claim: OwnClaim,
    pub(super) permit: Option<Permit>,
    /// The generation with which a waiting call may claim, and how it may use the volume.
    pub(super) offer: Option<(Generation, Mode)>,
    /// The generation with which a call claims at the moment.
    pub(super) claiming: Option<Generation>,
    /// The generation of the last claim that has failed, until the record says whether it was refused.
    pub(super) failed: Option<Generation>,
    pub(super) refusal: Option<(Generation, Refusal)>,
    /// The client of the mapping, with the number of its worker. Known after a read was answered, too.
    pub(super) client: Option<(u64, String)>,
    /// Whether the volume had a mapping when it was looked at last.
    mapped: bool,
    pub(super) ending_since: Option<Time>,
    /// Whether the node remembers the volume.
    pub(super) remembered: bool,
    /// The last error, which was logged.
    pub(super) problem: Option<String>,
}

impl AgentVolume {
    /// Makes the state of a volume. `remembered` says that an earlier agent may have claimed it.
    pub(super) fn new(handle: &str, remembered: bool) -> Self {
        Self {
            handle: handle.to_owned(),
            calls: 0,
            claim: if remembered { OwnClaim::Lost } else { OwnClaim::Unread },
            permit: None,
            offer: None,
            claiming: None,
            failed: None,
            refusal: None,
            client: None,
            mapped: false,
            ending_since: None,
            remembered,
            problem: None,
        }
    }

    /// Takes what the node has of the volume, and returns what the decision needs.
    pub(super) fn observe(&mut self, observed: &Observed) -> Local {
        let is_mapped = observed.mapping.is_some();
        if is_mapped {
            // The claim has succeeded.
            (self.permit, self.failed) = (None, None);
        } else {
            (self.client, self.ending_since) = (None, None);
        }
        if is_mapped != self.mapped {
            (self.mapped, self.claim) = (is_mapped, OwnClaim::Uncertain);
        }
        self.offer.take_if(|_| self.calls == 0);
        Local {
            wanted: observed.wanted || self.calls > 0,
            mapping: self.mapping(observed),
            claim: self.claim.clone(),
            refusal: self.refusal.clone(),
        }
    }

    fn mapping(&self, observed: &Observed) -> Option<Mapping> {
        let ending_since = self.ending_since;
        let Some(known) = &observed.mapping else {
            return self.claiming.map(|generation| Mapping {
                generation,
                client: String::new(),
                device_path: String::new(),
                state: MappingState::Starting,
                ending_since,
            });
        };
        let client = self.client.as_ref().filter(|(worker, _)| *worker == known.worker);
        let state = match (known.state, client) {
            (MappingState::Usable, None) => MappingState::Starting,
            (state, _) => state,
        };
        let client = client.map(|(_, client)| client.clone()).unwrap_or_default();
        let device_path = known.device_path.clone();
        let generation = known.generation;
        Some(Mapping { generation, client, device_path, state, ending_since })
    }

    /// Takes the record, which was read while the volume was not mapped. `mode` is that of the grant.
    pub(super) fn take_record(&mut self, node: &str, mode: Mode, record: &Record) {
        let own = record.claim_of(node).map(|claim| claim.client.clone());
        self.claim = own.map_or(OwnClaim::None, OwnClaim::Held);
        if let Some(generation) = self.failed.take() {
            let refusal = record.refusal(node, generation, mode);
            self.refusal = refusal.map(|refusal| (generation, refusal));
            if self.refusal.as_ref().is_some_and(|(_, refusal)| refusal.is_final()) {
                self.permit = None;
            }
        }
    }

    /// Notes that the record has to be read again.
    pub(super) fn forget_claim(&mut self) {
        self.claim = OwnClaim::Uncertain;
    }

    /// Returns whether nothing of the node can have a claim any more, as far as it was read.
    pub(super) fn is_released(&self) -> bool {
        self.claiming.is_none() && matches!(self.claim, OwnClaim::None | OwnClaim::Unread)
    }

    /// Returns whether nothing is left to know of the volume.
    pub(super) fn is_idle(&self) -> bool {
        self.calls == 0 && !self.mapped && self.is_released()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::node::ObservedMapping;
    use cleat_grants::record::Claim;

    fn mapped(worker: u64) -> Observed {
        let mapping = ObservedMapping {
            generation: Generation(3),
            mode: Mode::ReadWrite,
            device_path: "/dev/nbd0".to_owned(),
            state: MappingState::Usable,
            worker,
        };
        Observed { wanted: true, mapping: Some(mapping), is_unknown: false }
    }

    #[test]
    fn a_mapping_is_usable_when_its_client_was_read() {
        let mut volume = AgentVolume::new("v", false);
        let state = |volume: &mut AgentVolume, worker| {
            volume.observe(&mapped(worker)).mapping.map(|mapping| mapping.state)
        };
        assert_eq!(state(&mut volume, 1), Some(MappingState::Starting));
        volume.client = Some((1, "a-1".to_owned()));
        assert_eq!(state(&mut volume, 1), Some(MappingState::Usable));
        // The next worker is another client.
        assert_eq!(state(&mut volume, 2), Some(MappingState::Starting));
    }

    #[test]
    fn the_record_is_read_again_when_a_mapping_has_ended() {
        for claim in [OwnClaim::Lost, OwnClaim::None, OwnClaim::Unread] {
            let mut volume = AgentVolume::new("v", false);
            volume.claim = claim.clone();
            volume.observe(&mapped(1));
            let local = volume.observe(&Observed::default());
            assert_eq!(local.claim, OwnClaim::Uncertain, "{claim:?}");
        }
        let mut lost = AgentVolume::new("v", true);
        assert_eq!(lost.observe(&Observed::default()).claim, OwnClaim::Lost);
    }

    #[test]
    fn a_claim_that_failed_is_refused_only_if_the_record_says_so() {
        let mut volume = AgentVolume::new("v", false);
        volume.failed = Some(Generation(3));
        volume.take_record("a", Mode::ReadWrite, &Record::default());
        assert_eq!((volume.claim.clone(), volume.refusal.clone()), (OwnClaim::None, None));
        let claim = Claim {
            node: "b".to_owned(),
            generation: Generation(4),
            client: "b-1".to_owned(),
            mode: Mode::ReadWrite,
        };
        let record = Record::default().admit_claim(claim).unwrap().record;
        volume.failed = Some(Generation(3));
        volume.take_record("a", Mode::ReadWrite, &record);
        let superseded = Refusal::Superseded(Generation(4));
        assert_eq!(volume.refusal, Some((Generation(3), superseded)));
        // Readers do not close earlier generations.
        let reader = Claim { mode: Mode::ReadOnly, ..record.claims[0].clone() };
        let record = Record::default().admit_claim(reader).unwrap().record;
        for (mode, is_refused) in [(Mode::ReadOnly, false), (Mode::SharedReadWrite, true)] {
            volume.failed = Some(Generation(3));
            volume.take_record("a", mode, &record);
            assert_eq!(volume.refusal.is_some(), is_refused, "{mode:?}");
        }
    }
}
