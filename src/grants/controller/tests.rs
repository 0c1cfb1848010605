//! Tests of the controller's decisions, one step at a time. The simulation tests them together.

mod fences;

use super::*;
use crate::object::{Condition, NodeEntry};

const NOW: Time = Time(1_000_000);

/// A world in which node a is granted generation 3, and nodes a and b exist.
struct Fixture {
    stored: StoredGrant,
    requests: Vec<Request>,
    nodes: BTreeMap<String, NodeState>,
    record: Option<Record>,
    is_gone: bool,
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
            is_gone: false,
            policy: Policy::default(),
        }
    }

    fn step(&self) -> Step {
        let Self { stored, requests, nodes, record, is_gone, policy } = self;
        let (record, is_gone) = (record.as_ref(), *is_gone);
        decide(&View { grant: Some(stored), requests, nodes, record, is_gone }, policy, NOW)
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
    let view = |record| View {
        grant: None,
        requests: &fixture.requests,
        nodes: &fixture.nodes,
        record,
        is_gone: false,
    };
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
    fixture.node("a").silent_s = Some(15);
    fixture.claimed("a", 3);
    let Step::Wait(waiting) = fixture.step() else { panic!() };
    assert_eq!(waiting[0].until, Until::ReleasedOrLost);
    fixture.policy.lease_timeout_s = Some(15);
    assert!(matches!(fixture.step(), Step::Fence(_, FencingReason::LeaseStale)));
}

#[test]
fn remediation_revokes_what_is_still_requested() {
    let mut fixture = Fixture::new(&["a"]);
    assert_eq!(fixture.step(), Step::Wait(Vec::new()));
    fixture.node("a").lost = true;
    let reason = RevocationReason::NodeLost;
    assert_eq!(fixture.write_spec(), Change::Revoked("a".to_owned(), Generation(3), reason));
    // It has been silent for longer than the release timeout.
    fixture.claimed("a", 3);
    assert_eq!(fixture.holder().since, NOW);
    assert!(matches!(fixture.step(), Step::Fence(_, FencingReason::Lost)));
    fixture.node("a").lost = false;
    assert_eq!(fixture.step(), waits("a", Until::ReleasedOrLost));
}

#[test]
fn a_lost_node_is_free_of_a_volume_that_does_not_exist_any_more() {
    let mut fixture = Fixture::new(&[]);
    fixture.holder().revoked = true;
    (fixture.record, fixture.is_gone) = (Some(Record::default()), true);
    // A node that may be alive reports what is left there.
    assert_eq!(fixture.step(), waits("a", Until::ReleasedOrLost));
    fixture.node("a").out_of_service = true;
    fixture.holder().since = NOW;
    assert_eq!(fixture.step(), waits("a", Until::Released));
    fixture.holder().since = Time(0);
    fixture.record = None;
    assert_eq!(fixture.step(), Step::ReadRecord);
    (fixture.record, fixture.is_gone) = (Some(Record::default()), false);
    assert!(matches!(fixture.step(), Step::Fence(..)));
    fixture.is_gone = true;
    assert_eq!(fixture.write_spec(), Change::Freed("a".to_owned(), Generation(3)));
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
    // The claim of a holder is no reason to wait.
    fixture.claimed("a", 3);
    fixture.record.as_mut().unwrap().claims[0].mode = Mode::SharedReadWrite;
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
    let view = View { grant: None, requests, nodes, record, is_gone: false };
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

/// Reading the record of each volume would be one request to the storage for each of its steps.
#[test]
fn a_node_that_is_about_to_claim_or_was_refused_before_changes_nothing() {
    let mut fixture = Fixture::new(&["a"]);
    fixture.report(Signal::SafeToMount, Truth::False, Reason::Claiming, 3);
    assert_eq!(fixture.step(), Step::Wait(Vec::new()));
    fixture.report(Signal::SafeToMount, Truth::False, Reason::Superseded, 2);
    assert_eq!(fixture.step(), Step::Wait(Vec::new()));
    fixture.report(Signal::SafeToMount, Truth::False, Reason::Superseded, 3);
    assert_eq!(fixture.step(), Step::ReadRecord);
}

#[test]
fn a_refused_holder_is_revoked_once_and_only_if_the_refusal_is_final() {
    let mut fixture = Fixture::new(&["a"]);
    fixture.holder().revoked = true;
    fixture.report(Signal::SafeToMount, Truth::False, Reason::Superseded, 3);
    let (generation, lowest) = (Generation(8), Generation(8));
    fixture.record = Some(Record { generation, lowest, ..Record::default() });
    assert_eq!(fixture.step(), waits("a", Until::ReleasedOrLost));
    // The claim of another holder may be released, so the node tries again.
    let mut fixture = Fixture::new(&["a", "b"]);
    fixture.holder().mode = Mode::SharedReadWrite;
    fixture.requests[0].mode = Mode::SharedReadWrite;
    fixture.stored.grant.spec.holders.push(holder("b", 2));
    fixture.report(Signal::SafeToMount, Truth::False, Reason::ClaimedElsewhere, 3);
    fixture.claimed("b", 2);
    assert_eq!(fixture.step(), Step::Wait(Vec::new()));
}

#[test]
fn a_volume_that_is_requested_in_another_mode_is_revoked() {
    let mut fixture = Fixture::new(&["a"]);
    fixture.requests[0].mode = Mode::ReadOnly;
    let reason = RevocationReason::NotRequested;
    assert_eq!(fixture.write_spec(), Change::Revoked("a".to_owned(), Generation(3), reason));
}

/// The storage would do nothing, and the controller would ask it for ever.
#[test]
fn a_holder_is_not_fenced_while_the_storage_has_the_claim_of_another_one() {
    let mut fixture = Fixture::new(&["a"]);
    fixture.stored.grant.spec.generation = Generation(4);
    fixture.stored.grant.spec.holders.push(Holder { revoked: true, ..holder("b", 4) });
    fixture.node("b").out_of_service = true;
    fixture.claimed("a", 3);
    assert_eq!(fixture.step(), waits("b", Until::Released));
    let foreign = fixture.record.take();
    fixture.record = Some(Record { generation: Generation(3), ..Record::default() });
    assert!(matches!(fixture.step(), Step::Fence(target, _) if target.node == "b"));
    // Without a holder, the claim is adopted first.
    fixture.stored.grant.spec.holders.remove(0);
    fixture.record = foreign;
    assert_eq!(fixture.write_spec(), Change::Adopted("a".to_owned(), Generation(3)));
}

#[test]
fn an_adopted_claim_leaves_the_time_of_earlier_revocations() {
    let mut fixture = Fixture::new(&["a"]);
    *fixture.holder() = Holder { revoked: true, since: Time(7), ..holder("a", 3) };
    fixture.report(Signal::SafeToMount, Truth::False, Reason::ClaimedElsewhere, 3);
    fixture.claimed("b", 8);
    assert_eq!(fixture.write_spec(), Change::Adopted("b".to_owned(), Generation(8)));
    assert_eq!(fixture.holder().since, Time(7), "its release timeout goes on");
}

/// Only its own fence prevents that a node gets the volume.
#[test]
fn the_seal_of_another_node_or_without_a_client_delays_no_grant() {
    let mut fixture = Fixture::new(&["a"]);
    fixture.stored.grant.spec.holders.clear();
    let target = |node: &str| Target {
        node: node.to_owned(),
        generation: Generation(3),
        mode: Mode::ReadWrite,
    };
    let other = Record::default().seal(&target("b"), Some("b-1".to_owned()));
    let unclaimed = Record::default().seal(&target("a"), None);
    for record in [other, unclaimed] {
        fixture.record = Some(record);
        let Step::WriteSpec { change, .. } = fixture.step() else { panic!("{:?}", fixture.step()) };
        assert_eq!(change, Change::Granted("a".to_owned(), Generation(4)));
        let Fixture { requests, nodes, record, policy, .. } = &fixture;
        let view = View { grant: None, requests, nodes, record: record.as_ref(), is_gone: false };
        let Step::Create(spec) = decide(&view, policy, NOW) else { panic!() };
        assert_eq!((spec.holders[0].node.as_str(), spec.generation), ("a", Generation(4)));
    }
}

#[test]
fn each_fence_ends_by_itself() {
    let mut fixture = Fixture::new(&["b"]);
    fixture.stored.grant.spec.holders[0] = holder("b", 4);
    fixture.stored.grant.spec.generation = Generation(4);
    for (node, generation) in [("a", 2), ("a", 3), ("c", 1)] {
        let (node, generation) = (node.to_owned(), Generation(generation));
        let (client, proof) = (None, String::new());
        let fence = FenceEntry { node, generation, client, proof, time: NOW };
        fixture.stored.grant.status.fences.push(fence);
    }
    fixture.report(Signal::Cleaned, Truth::True, Reason::Cleaned, 3);
    fixture.record = Some(Record::default());
    let left = |fixture: &Fixture| match fixture.step() {
        Step::WriteFences { fences, .. } => {
            fences.into_iter().map(|fence| fence.generation.0).collect::<Vec<_>>()
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(left(&fixture), [2, 1]);
    // A later grant of the same node does not keep the fence.
    fixture.stored.grant.spec.holders[0].node = "a".to_owned();
    fixture.requests = vec![request("a")];
    assert_eq!(left(&fixture), [2, 1]);
    // The holder is freed before its fence is removed.
    fixture.stored.grant.spec.holders[0] = Holder { since: NOW, ..holder("a", 3) };
    assert_eq!(fixture.step(), Step::Wait(Vec::new()));
}

#[test]
fn a_shared_volume_has_a_bounded_number_of_holders() {
    let names: Vec<String> = (0..=MAX_HOLDERS).map(|number| format!("n{number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut fixture = Fixture::new(&names);
    fixture.requests.iter_mut().for_each(|request| request.mode = Mode::SharedReadWrite);
    fixture.nodes = names.iter().map(|name| ((*name).to_owned(), NodeState::default())).collect();
    fixture.stored.grant.spec.holders.clear();
    fixture.record = Some(Record::default());
    for name in &names[..MAX_HOLDERS] {
        let Change::Granted(node, _) = fixture.write_spec() else { panic!("{name}") };
        assert_eq!(node, *name);
    }
    assert_eq!(fixture.step(), waits(names[MAX_HOLDERS], Until::OtherHolders));
}

/// The node cuts off its own earlier client when it claims.
#[test]
fn an_earlier_claim_of_the_node_is_adopted_only_if_it_is_mapped() {
    let mut fixture = Fixture::new(&["a"]);
    fixture.claimed("a", 2);
    fixture.report(Signal::SafeToMount, Truth::False, Reason::ClaimedElsewhere, 3);
    assert_eq!(fixture.step(), Step::Wait(Vec::new()));
    fixture.report(Signal::SafeToMount, Truth::False, Reason::OtherGeneration, 3);
    assert_eq!(fixture.write_spec(), Change::Adopted("a".to_owned(), Generation(2)));
}

#[test]
fn only_a_node_that_exists_and_is_in_service_gets_the_volume() {
    let mut fixture = Fixture::new(&["c", "b"]);
    fixture.node("b").out_of_service = true;
    fixture.stored.grant.spec.holders.clear();
    fixture.record = Some(Record::default());
    let until = Until::InService;
    let wait = Step::Wait(["c", "b"].map(|node| Waiting { node: node.to_owned(), until }).into());
    assert_eq!(fixture.step(), wait);
    let Fixture { requests, nodes, record, policy, .. } = &fixture;
    let view = View { grant: None, requests, nodes, record: record.as_ref(), is_gone: false };
    assert_eq!(decide(&view, policy, NOW), wait);
    fixture.node("b").out_of_service = false;
    assert_eq!(fixture.write_spec(), Change::Granted("b".to_owned(), Generation(4)));
}

#[test]
fn a_claim_that_no_grant_names_gets_a_holder_if_its_node_exists() {
    let mut fixture = Fixture::new(&[]);
    fixture.stored.grant.spec.holders.clear();
    let adopted = |fixture: &Fixture, has_grant: bool| {
        let view = View {
            grant: has_grant.then_some(&fixture.stored),
            requests: &fixture.requests,
            nodes: &fixture.nodes,
            record: fixture.record.as_ref(),
            is_gone: false,
        };
        match adopt_unrequested(&view, NOW)? {
            Step::Create(spec) | Step::WriteSpec { spec, .. } => Some(spec),
            other => panic!("{other:?}"),
        }
    };
    fixture.claimed("a", 5);
    for has_grant in [false, true] {
        let spec = adopted(&fixture, has_grant).unwrap();
        assert_eq!((spec.generation, spec.holders[0].generation), (Generation(5), Generation(5)));
    }
    fixture.requests.push(request("b"));
    assert_eq!(adopted(&fixture, true), None);
    fixture.requests.clear();
    // Made without a grant, or perhaps in another cluster.
    for (node, generation) in [("a", 0), ("stranger", 5)] {
        fixture.claimed(node, generation);
        assert_eq!(adopted(&fixture, true), None, "{node}");
    }
}
