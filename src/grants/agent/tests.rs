//! Tests of the agent's decisions, one step at a time. The simulation tests them together.

use super::*;
use crate::object::{FenceEntry, Mode, Reason};
use crate::record::Claim;

const NOW: Time = Time(1_000_000);

/// Node a, which is granted generation 3.
struct Fixture {
    stored: StoredGrant,
    local: Local,
    permit: Option<Permit>,
    is_reachable: bool,
    force_after_s: Option<u64>,
}

impl Fixture {
    fn new(wanted: bool) -> Self {
        let version = Version("7".to_owned());
        let mut stored = StoredGrant { version, ..StoredGrant::default() };
        stored.grant.spec.holders.push(Holder {
            node: "a".to_owned(),
            mode: Mode::ReadWrite,
            generation: Generation(3),
            revoked: false,
            since: NOW,
            pod_uids: Vec::new(),
        });
        let local = Local { wanted, claim: OwnClaim::None, ..Local::default() };
        Self { stored, local, permit: None, is_reachable: true, force_after_s: None }
    }

    fn mapped() -> Self {
        let mut fixture = Self::new(true);
        fixture.local.claim = OwnClaim::Held("a-1".to_owned());
        fixture.local.mapping = Some(Mapping {
            generation: Generation(3),
            client: "a-1".to_owned(),
            device_path: "/dev/nbd0".to_owned(),
            state: MappingState::Usable,
            ending_since: None,
        });
        fixture
    }

    fn step_with(&self, grants: Grants<'_>) -> Step {
        let (local, permit) = (&self.local, self.permit.as_ref());
        let force_after_s = self.force_after_s;
        next_step(&View { node: "a", machine: "m1", grants, local, permit, force_after_s }, NOW)
    }

    fn step(&self) -> Step {
        let (grant, is_reachable) = (Some(&self.stored), self.is_reachable);
        self.step_with(Grants::Listed { grant, is_reachable })
    }

    /// The next step is a write: performs it, and returns the intent.
    fn publish(&mut self) -> Option<Generation> {
        match self.step() {
            Step::Publish { version, entry, intent } => {
                assert_eq!(version.as_ref(), Some(&self.stored.version));
                self.stored.grant.status.nodes = vec![entry];
                intent
            }
            other => panic!("{other:?}"),
        }
    }

    fn mapping(&mut self) -> &mut Mapping {
        self.local.mapping.as_mut().unwrap()
    }

    /// Adds the fence of a generation of the node.
    fn fence(&mut self, generation: u64) {
        self.stored.grant.status.fences.push(FenceEntry {
            node: "a".to_owned(),
            generation: Generation(generation),
            client: Some("a-1".to_owned()),
            proof: String::new(),
            time: NOW,
        });
    }

    fn says(&self, signal: Signal, truth: Truth) -> bool {
        let entry = self.stored.grant.entry("a");
        entry.is_some_and(|entry| entry.is(signal, truth, Generation(3)))
    }
}

#[test]
fn a_claim_needs_an_intent_that_the_api_server_has_accepted() {
    let mut fixture = Fixture::new(true);
    assert_eq!(fixture.publish(), Some(Generation(3)));
    assert!(fixture.says(Signal::SafeToDetach, Truth::False));
    let grant = &mut fixture.stored.grant;
    assert_eq!(grant.entry("a").unwrap().machine.as_deref(), Some("m1"));
    fixture.permit = Permit::from_answer(grant, "a", Generation(3));
    assert!(fixture.permit.is_some());
    grant.spec.holders[0].revoked = true;
    assert_eq!(Permit::from_answer(grant, "a", Generation(3)), None);
    grant.spec.holders[0].revoked = false;
    assert_eq!(Permit::from_answer(grant, "a", Generation(2)), None);
    assert_eq!(fixture.step(), Step::Claim(Generation(3)));
    // Each intent changes the object.
    fixture.permit = None;
    fixture.publish();
    assert_eq!(fixture.stored.grant.entry("a").unwrap().intents, 2);
}

#[test]
fn without_the_api_server_nothing_new_is_mapped_and_what_is_mapped_stays() {
    let mut fixture = Fixture::new(true);
    fixture.is_reachable = false;
    assert_eq!(fixture.step(), Step::Wait);
    assert_eq!(fixture.step_with(Grants::NotListed), Step::Wait);
    let mut fixture = Fixture::mapped();
    let absent = Grants::Listed { grant: None, is_reachable: true };
    assert_eq!(fixture.step_with(absent), Step::Wait);
    assert_eq!(fixture.step_with(Grants::NotListed), Step::Wait);
    fixture.mapping().state = MappingState::WorkerDead;
    assert_eq!(fixture.step_with(absent), Step::Reclaim(Generation(3)));
    assert_eq!(fixture.step_with(Grants::NotListed), Step::Reclaim(Generation(3)));
}

#[test]
fn a_mapping_is_published_once_and_its_release_once() {
    let mut fixture = Fixture::mapped();
    assert_eq!(fixture.publish(), None);
    assert!(fixture.says(Signal::SafeToMount, Truth::True));
    assert!(fixture.says(Signal::SafeToDetach, Truth::False));
    let entry = fixture.stored.grant.entry("a").unwrap();
    assert_eq!((entry.client.as_deref(), entry.generation), (Some("a-1"), Generation(3)));
    assert_eq!(entry.device_path.as_deref(), Some("/dev/nbd0"));
    assert_eq!(fixture.step(), Step::Wait);
    fixture.local.wanted = false;
    assert_eq!(fixture.step(), Step::Finish);
    fixture.local.mapping = None;
    assert_eq!(fixture.step(), Step::Release("a-1".to_owned()));
    fixture.local.claim = OwnClaim::None;
    fixture.publish();
    assert!(fixture.says(Signal::SafeToDetach, Truth::True));
    assert!(fixture.says(Signal::SafeToMount, Truth::False));
    assert_eq!(fixture.step(), Step::Wait);
}

#[test]
fn a_revoked_mapping_ends_and_by_force_only_if_the_policy_says_so() {
    let mut fixture = Fixture::mapped();
    fixture.stored.grant.spec.holders[0].revoked = true;
    assert_eq!(fixture.step(), Step::Finish);
    fixture.mapping().ending_since = Some(Time(NOW.0 - 4));
    assert_eq!(fixture.step(), Step::Finish);
    fixture.force_after_s = Some(4);
    assert_eq!(fixture.step(), Step::Finish);
    fixture.force_after_s = Some(3);
    assert_eq!(fixture.step(), Step::Force);
    // A revocation of another generation ends nothing.
    fixture.stored.grant.spec.holders[0].generation = Generation(4);
    assert!(matches!(fixture.step(), Step::Publish { intent: None, .. }));
    fixture.mapping().state = MappingState::CutOff;
    assert_eq!(fixture.step(), Step::Force);
}

#[test]
fn a_mapping_that_was_lost_is_reported_before_the_storage_answers() {
    let mut fixture = Fixture::mapped();
    fixture.publish();
    // A reboot.
    fixture.local = Local { claim: OwnClaim::Lost, ..Local::default() };
    fixture.publish();
    let entry = fixture.stored.grant.entry("a").unwrap();
    let condition = entry.condition(Signal::SafeToMount).unwrap();
    assert_eq!((condition.status, condition.reason), (Truth::False, Reason::Lost));
    assert!(!fixture.says(Signal::SafeToDetach, Truth::True));
    assert_eq!(fixture.step(), Step::ReadClaim);
}

#[test]
fn a_refused_claim_is_reported_and_not_repeated() {
    let mut fixture = Fixture::new(true);
    fixture.publish();
    let generation = Generation(3);
    fixture.local.refusal = Some((generation, Refusal::Superseded(Generation(8))));
    fixture.publish();
    let entry = fixture.stored.grant.entry("a").unwrap();
    let condition = entry.condition(Signal::SafeToMount).unwrap();
    assert_eq!(condition.reason, Reason::Superseded);
    assert!(condition.message.contains("generation 8"), "{}", condition.message);
    assert!(fixture.says(Signal::SafeToDetach, Truth::True));
    assert_eq!(fixture.step(), Step::Wait);
}

#[test]
fn a_claim_that_another_node_prevents_keeps_its_permit() {
    let mut fixture = Fixture::new(true);
    fixture.publish();
    fixture.permit = Permit::from_answer(&fixture.stored.grant, "a", Generation(3));
    let (node, client) = ("b".to_owned(), "b-1".to_owned());
    let rival = Claim { node, generation: Generation(2), client, mode: Mode::ReadWrite };
    fixture.local.refusal = Some((Generation(3), Refusal::ClaimedElsewhere(rival)));
    fixture.publish();
    assert!(fixture.says(Signal::SafeToDetach, Truth::False));
    assert_eq!(fixture.step(), Step::Wait);
    fixture.local.refusal = None;
    assert_eq!(fixture.step(), Step::Claim(Generation(3)));
}

#[test]
fn a_fenced_node_reports_when_nothing_is_left() {
    let mut fixture = Fixture::mapped();
    fixture.publish();
    fixture.stored.grant.spec.holders.clear();
    fixture.fence(3);
    assert_eq!(fixture.step(), Step::Force);
    fixture.local.mapping = None;
    fixture.local.claim = OwnClaim::None;
    fixture.publish();
    assert!(fixture.says(Signal::Cleaned, Truth::True));
    assert!(fixture.says(Signal::SafeToMount, Truth::False));
    let entry = fixture.stored.grant.entry("a").unwrap();
    assert_eq!((&entry.client, &entry.device_path), (&None, &None));
    assert_eq!(entry.machine.as_deref(), Some("m1"));
    assert_eq!(fixture.step(), Step::Wait);
}

/// For example after the node was granted the volume again.
#[test]
fn a_fence_of_an_earlier_generation_changes_nothing_of_the_present_mapping() {
    let mut fixture = Fixture::mapped();
    fixture.publish();
    fixture.fence(2);
    fixture.publish();
    let entry = fixture.stored.grant.entry("a").unwrap();
    assert!(entry.is(Signal::Cleaned, Truth::True, Generation(2)));
    assert_eq!((entry.client.as_deref(), entry.generation), (Some("a-1"), Generation(3)));
    assert!(fixture.says(Signal::SafeToMount, Truth::True));
    assert_eq!(fixture.step(), Step::Wait);
}

#[test]
fn fences_are_reported_as_cleaned_from_the_oldest_on() {
    let mut fixture = Fixture::mapped();
    fixture.publish();
    fixture.stored.grant.spec.holders[0].generation = Generation(4);
    fixture.fence(3);
    fixture.fence(2);
    let cleaned = |fixture: &Fixture, generation| {
        let entry = fixture.stored.grant.entry("a").unwrap();
        entry.is(Signal::Cleaned, Truth::True, Generation(generation))
    };
    // The mapping of the later one is left.
    assert_eq!(fixture.step(), Step::Force);
    fixture.local.mapping = None;
    fixture.local.claim = OwnClaim::None;
    fixture.local.wanted = false;
    fixture.publish();
    assert!(cleaned(&fixture, 2));
    fixture.stored.grant.status.fences.retain(|fence| fence.generation != Generation(2));
    fixture.publish();
    assert!(cleaned(&fixture, 3));
}

/// A node reports only what another one may wait for.
#[test]
fn an_unused_grant_is_reported_as_released_once_it_is_revoked() {
    let mut fixture = Fixture::new(false);
    assert_eq!(fixture.step(), Step::Wait);
    fixture.stored.grant.spec.holders[0].revoked = true;
    assert_eq!(fixture.publish(), None);
    assert!(fixture.says(Signal::SafeToDetach, Truth::True));
    assert_eq!(fixture.step(), Step::Wait);
}

/// The permit does not survive this report.
#[test]
fn a_permit_delays_no_release_of_a_volume_that_is_not_wanted_or_granted_any_more() {
    for (is_wanted, is_revoked) in [(false, false), (true, true)] {
        let mut fixture = Fixture::new(true);
        fixture.publish();
        let permit = Permit::from_answer(&fixture.stored.grant, "a", Generation(3)).unwrap();
        fixture.permit = Some(permit.clone());
        assert_eq!(permit.generation(), Generation(3));
        assert!(permit.survives(fixture.stored.grant.entry("a").unwrap()));
        fixture.local.wanted = is_wanted;
        fixture.stored.grant.spec.holders[0].revoked = is_revoked;
        fixture.publish();
        assert!(fixture.says(Signal::SafeToDetach, Truth::True));
        assert!(!permit.survives(fixture.stored.grant.entry("a").unwrap()));
    }
}

/// The records of all volumes of a cluster would be many.
#[test]
fn after_a_start_the_record_is_read_only_if_the_grant_names_the_node() {
    let mut fixture = Fixture::new(false);
    fixture.local.claim = OwnClaim::Unread;
    assert_eq!(fixture.step(), Step::ReadClaim);
    fixture.stored.grant.spec.holders[0].node = "b".to_owned();
    assert_eq!(fixture.step(), Step::Wait);
    fixture.fence(2);
    assert_eq!(fixture.step(), Step::ReadClaim);
}

#[test]
fn a_restored_signal_is_corrected() {
    let mut fixture = Fixture::mapped();
    fixture.publish();
    let entry = &mut fixture.stored.grant.status.nodes[0];
    let condition = entry.conditions.iter_mut().find(|c| c.kind == Signal::SafeToDetach).unwrap();
    condition.status = Truth::True;
    fixture.publish();
    assert!(fixture.says(Signal::SafeToDetach, Truth::False));
}

#[test]
fn a_mapping_of_another_generation_stays_and_is_reported() {
    let mut fixture = Fixture::mapped();
    fixture.mapping().generation = Generation(5);
    fixture.stored.grant.spec.holders[0].revoked = true;
    fixture.publish();
    let entry = fixture.stored.grant.entry("a").unwrap();
    let condition = entry.condition(Signal::SafeToMount).unwrap();
    assert_eq!(condition.reason, Reason::OtherGeneration);
    assert!(condition.message.contains("generation 5"), "{}", condition.message);
    assert_eq!(fixture.step(), Step::Wait);
}
