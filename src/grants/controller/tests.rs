//! Tests of the controller's decisions, one step at a time. The simulation tests them together.

use super::*;
use crate::object::{Condition, NodeEntry};

const NOW: Time = Time(1_000_000);

/// A world in which node a is granted generation 3, and nodes a and b exist.
struct Fixture {
    stored: StoredGrant,
    requests: Vec<Request>,
    nodes: BTreeMap<String, NodeState>,
    record: Option<Record>,
    policy: Policy,
}

impl Fixture {
    fn new(requested: &[&str]) -> Self {
        let version = Version("7".to_owned());
        let mut stored = StoredGrant { version, ..StoredGrant::default() };
        stored.grant.spec.generation = Generation(3);
        stored.grant.spec.holders.push(holder("a", 3));
        let nodes = ["a", "b"].map(|name| (name.to_owned(), NodeState::default()));
        Self {
            stored,
            requests: requested.iter().map(|node| request(node)).collect(),
            nodes: nodes.into(),
            record: None,
            policy: Policy::default(),
        }
    }

    fn step(&self) -> Step {
        let Self { stored, requests, nodes, record, policy } = self;
        decide(&View { grant: Some(stored), requests, nodes, record: record.as_ref() }, policy, NOW)
    }

    fn holder(&mut self) -> &mut Holder {
        &mut self.stored.grant.spec.holders[0]
    }

    fn node(&mut self, name: &str) -> &mut NodeState {
        self.nodes.get_mut(name).unwrap()
    }

    fn report(&mut self, kind: Signal, status: Truth, reason: Reason, generation: u64) {
        let entries = &mut self.stored.grant.status.nodes;
        if entries.is_empty() {
            entries.push(NodeEntry { node: "a".to_owned(), ..NodeEntry::default() });
        }
        entries[0].set(Condition {
            kind,
            status,
            reason,
            message: String::new(),
            generation: Generation(generation),
            last_transition_time: NOW,
        });
    }

    fn claimed(&mut self, node: &str, generation: u64) {
        let (node, generation) = (node.to_owned(), Generation(generation));
        let claim = Claim { client: format!("{node}-1"), node, generation, mode: Mode::ReadWrite };
        self.record = Some(Record::default().admit_claim(claim).unwrap().record);
    }

    /// The next step is a write of the spec: performs it.
    fn write_spec(&mut self) -> Change {
        match self.step() {
            Step::WriteSpec { version, spec, change } => {
                assert_eq!(version.as_ref(), Some(&self.stored.version));
                self.stored.grant.spec = spec;
                change
            }
            other => panic!("{other:?}"),
        }
    }
}

fn holder(node: &str, generation: u64) -> Holder {
    Holder {
        node: node.to_owned(),
        mode: Mode::ReadWrite,
        generation: Generation(generation),
        revoked: false,
        since: Time(0),
        pod_uids: Vec::new(),
    }
}

fn request(node: &str) -> Request {
    Request { node: node.to_owned(), mode: Mode::ReadWrite, pod_uids: Vec::new() }
}

fn waits(node: &str, until: Until) -> Step {
    Step::Wait(vec![Waiting { node: node.to_owned(), until }])
}

#[test]
fn the_first_grant_is_created_above_the_record() {
    let fixture = Fixture::new(&["b"]);
    let record = Record { generation: Generation(8), ..Record::default() };
    let view =
        |record| View { grant: None, requests: &fixture.requests, nodes: &fixture.nodes, record };
    assert_eq!(decide(&view(None), &fixture.policy, NOW), Step::ReadRecord);
    let Step::Create(spec) = decide(&view(Some(&record)), &fixture.policy, NOW) else { panic!() };
    assert_eq!((spec.generation, spec.holders[0].generation), (Generation(9), Generation(9)));
    assert_eq!(spec.holders[0].node, "b");
}

#[test]
fn nothing_is_written_while_nothing_changes() {
    assert_eq!(Fixture::new(&["a"]).step(), Step::Wait(Vec::new()));
    // A second node waits until the first one is gone.
    let fixture = Fixture::new(&["a", "b"]);
    assert_eq!(fixture.step(), waits("b", Until::OtherHolders));
}

#[test]
fn a_volume_moves_by_revoke_free_grant() {
    let mut fixture = Fixture::new(&["b"]);
    let reason = RevocationReason::NotRequested;
    assert_eq!(fixture.write_spec(), Change::Revoked("a".to_owned(), Generation(3), reason));
    let Step::Wait(waiting) = fixture.step() else { panic!() };
    assert_eq!(waiting[0].until, Until::ReleasedOrLost);
    fixture.report(Signal::SafeToDetach, Truth::True, Reason::Released, 3);
    assert_eq!(fixture.step(), Step::ReadRecord);
    fixture.record = Some(Record { generation: Generation(3), ..Record::default() });
    assert_eq!(fixture.write_spec(), Change::Freed("a".to_owned(), Generation(3)));
    assert_eq!(fixture.write_spec(), Change::Granted("b".to_owned(), Generation(4)));
    assert_eq!(fixture.step(), Step::Wait(Vec::new()));
}

#[test]
fn a_signal_of_another_generation_frees_nothing() {
    let mut fixture = Fixture::new(&[]);
    fixture.holder().revoked = true;
    fixture.report(Signal::SafeToDetach, Truth::True, Reason::Released, 2);
    assert_eq!(fixture.step(), waits("a", Until::ReleasedOrLost));
}

#[test]
fn a_signal_that_the_record_contradicts_frees_nothing() {
    let mut fixture = Fixture::new(&[]);
    fixture.holder().revoked = true;
    fixture.report(Signal::SafeToDetach, Truth::True, Reason::Released, 3);
    fixture.claimed("a", 3);
    assert_eq!(fixture.step(), waits("a", Until::ReleasedOrLost));
}

#[test]
fn a_silent_node_is_fenced_when_kubernetes_has_decided() {
    let mut fixture = Fixture::new(&["b"]);
    fixture.holder().revoked = true;
    fixture.holder().since = Time(NOW.0 - 4);
    fixture.node("a").out_of_service = true;
    fixture.claimed("a", 3);
    // The node has time to release the volume.
    assert!(matches!(fixture.step(), Step::Wait(_)));
    fixture.holder().since = Time(NOW.0 - 5);
    let Step::Fence(target, reason) = fixture.step() else { panic!("{:?}", fixture.step()) };
    assert_eq!((target.node.as_str(), target.generation), ("a", Generation(3)));
    assert_eq!(reason, FencingReason::OutOfService);
    // A crash here: the next controller fences again, and then reads the proof.
    let record = fixture.record.take().unwrap();
    assert_eq!(fixture.step(), Step::ReadRecord);
    fixture.record = Some(record.seal(&target, Some("a-1".to_owned())));
    let Step::WriteFences { fences, .. } = fixture.step() else { panic!("{:?}", fixture.step()) };
    assert_eq!(fences[0].client.as_deref(), Some("a-1"));
    assert!(fences[0].proof.contains("generation 3 is sealed"), "{}", fences[0].proof);
    fixture.stored.grant.status.fences = fences;
    assert_eq!(fixture.write_spec(), Change::Freed("a".to_owned(), Generation(3)));
    assert_eq!(fixture.write_spec(), Change::Granted("b".to_owned(), Generation(4)));
}

#[test]
fn a_node_that_is_only_silent_is_never_fenced() {
    let mut fixture = Fixture::new(&["b"]);
    fixture.holder().revoked = true;
    fixture.node("a").lease_renewed = Some(Time(0));
    fixture.claimed("a", 3);
    let Step::Wait(waiting) = fixture.step() else { panic!() };
    assert_eq!(waiting[0].until, Until::ReleasedOrLost);
    fixture.policy.lease_timeout_s = Some(15);
    assert!(matches!(fixture.step(), Step::Fence(_, FencingReason::LeaseStale)));
}

#[test]
fn remediation_revokes_what_is_still_requested() {
    let mut fixture = Fixture::new(&["a"]);
    fixture.node("a").lease_renewed = Some(Time(0));
    fixture.policy.lease_timeout_s = Some(15);
    assert_eq!(fixture.step(), Step::Wait(Vec::new()));
    fixture.policy.remediate = true;
    let reason = RevocationReason::NodeLost;
    assert_eq!(fixture.write_spec(), Change::Revoked("a".to_owned(), Generation(3), reason));
}

#[test]
fn a_fenced_node_gets_a_grant_after_it_has_cleaned_up() {
    let mut fixture = Fixture::new(&["a"]);
    fixture.stored.grant.spec.holders.clear();
    fixture.claimed("a", 3);
    let target = Target { node: "a".to_owned(), generation: Generation(3), mode: Mode::ReadWrite };
    let sealed = fixture.record.take().unwrap().seal(&target, Some("a-1".to_owned()));
    fixture.stored.grant.status.fences.push(FenceEntry {
        node: "a".to_owned(),
        generation: Generation(3),
        client: Some("a-1".to_owned()),
        proof: String::new(),
        time: NOW,
    });
    assert_eq!(fixture.step(), waits("a", Until::Cleaned));
    fixture.report(Signal::Cleaned, Truth::True, Reason::Cleaned, 3);
    fixture.record = Some(sealed.clone());
    assert_eq!(fixture.step(), Step::Unfence("a-1".to_owned()));
    fixture.record = sealed.unfence("a-1");
    let Step::WriteFences { fences, .. } = fixture.step() else { panic!("{:?}", fixture.step()) };
    assert_eq!(fences, []);
    fixture.stored.grant.status.fences = fences;
    assert_eq!(fixture.write_spec(), Change::Granted("a".to_owned(), Generation(4)));
}

#[test]
fn a_refused_generation_is_moved_past_the_record() {
    let mut fixture = Fixture::new(&["a"]);
    fixture.report(Signal::SafeToMount, Truth::False, Reason::Superseded, 3);
    let (generation, lowest) = (Generation(8), Generation(8));
    fixture.record = Some(Record { generation, lowest, ..Record::default() });
    let reason = RevocationReason::Superseded;
    assert_eq!(fixture.write_spec(), Change::Revoked("a".to_owned(), Generation(3), reason));
    fixture.report(Signal::SafeToDetach, Truth::True, Reason::Released, 3);
    assert_eq!(fixture.write_spec(), Change::Freed("a".to_owned(), Generation(3)));
    assert_eq!(fixture.write_spec(), Change::Granted("a".to_owned(), Generation(9)));
}

#[test]
fn a_claim_that_no_grant_names_is_adopted_and_its_rivals_are_revoked() {
    let mut fixture = Fixture::new(&["a"]);
    fixture.report(Signal::SafeToMount, Truth::False, Reason::ClaimedElsewhere, 3);
    fixture.claimed("b", 8);
    assert_eq!(fixture.write_spec(), Change::Adopted("b".to_owned(), Generation(8)));
    let spec = &fixture.stored.grant.spec;
    assert_eq!((spec.generation, spec.holders[0].revoked), (Generation(8), true));
    assert_eq!((spec.holders[1].node.as_str(), spec.holders[1].revoked), ("b", false));
}

#[test]
fn shared_holders_stay_beside_each_other() {
    let mut fixture = Fixture::new(&["a", "b"]);
    fixture.holder().mode = Mode::SharedReadWrite;
    for request in &mut fixture.requests {
        request.mode = Mode::SharedReadWrite;
    }
    fixture.record = Some(Record::default());
    assert_eq!(fixture.write_spec(), Change::Granted("b".to_owned(), Generation(4)));
    assert_eq!(fixture.step(), Step::Wait(Vec::new()));
}

#[test]
fn a_grant_that_is_deleted_ends_when_its_holders_are_gone() {
    let mut fixture = Fixture::new(&["a"]);
    fixture.stored.deleting = true;
    let reason = RevocationReason::Deleting;
    assert_eq!(fixture.write_spec(), Change::Revoked("a".to_owned(), Generation(3), reason));
    assert!(matches!(fixture.step(), Step::Wait(_)));
    fixture.stored.grant.spec.holders.clear();
    assert!(matches!(fixture.step(), Step::RemoveFinalizer(Some(_))));
}

#[test]
fn a_fence_that_a_restored_backup_has_lost_is_written_again() {
    let mut fixture = Fixture::new(&["a"]);
    fixture.stored.grant.spec.holders.clear();
    fixture.claimed("a", 3);
    let target = Target { node: "a".to_owned(), generation: Generation(3), mode: Mode::ReadWrite };
    let sealed = fixture.record.take().unwrap().seal(&target, Some("a-1".to_owned()));
    fixture.record = Some(sealed.clone());
    let Step::WriteFences { fences, .. } = fixture.step() else { panic!("{:?}", fixture.step()) };
    assert_eq!(fences[0].client.as_deref(), Some("a-1"));
    // The object itself was lost.
    let record = Some(&sealed);
    let (requests, nodes) = (&fixture.requests, &fixture.nodes);
    let view = View { grant: None, requests, nodes, record };
    let Step::Create(spec) = decide(&view, &fixture.policy, NOW) else { panic!() };
    assert_eq!((spec.holders.len(), spec.generation), (0, Generation(3)));
}

#[test]
fn a_mapping_of_another_generation_is_adopted() {
    let mut fixture = Fixture::new(&["a"]);
    fixture.holder().revoked = true;
    fixture.report(Signal::SafeToMount, Truth::False, Reason::OtherGeneration, 3);
    fixture.claimed("a", 5);
    assert_eq!(fixture.write_spec(), Change::Adopted("a".to_owned(), Generation(5)));
    let holders = &fixture.stored.grant.spec.holders;
    assert_eq!((holders.len(), holders[0].revoked), (1, false));
}
