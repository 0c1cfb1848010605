//! Tests of the ends of fences, and of the number of entries in the status.

use super::*;

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

/// The machine whose client is cut off may stand still, and write when it goes on.
#[test]
fn another_machine_with_the_name_of_a_fenced_node_gets_a_grant_and_the_fenced_client_stays_cut_off()
{
    let mut fixture = Fixture::new(&["a"]);
    fixture.stored.grant.spec.holders.clear();
    fixture.claimed("a", 3);
    let target = Target { node: "a".to_owned(), generation: Generation(3), mode: Mode::ReadWrite };
    let mut sealed = fixture.record.take().unwrap().seal(&target, Some("a-1".to_owned()));
    sealed.seals[0].machine = Some("m1".to_owned());
    fixture.stored.grant.status.fences.push(FenceEntry {
        node: "a".to_owned(),
        generation: Generation(3),
        client: Some("a-1".to_owned()),
        proof: String::new(),
        time: NOW,
    });
    fixture.report(Signal::Cleaned, Truth::True, Reason::Cleaned, 3);
    fixture.record = Some(sealed);
    for same in [None, Some("m1".to_owned())] {
        fixture.stored.grant.status.nodes[0].machine = same;
        assert_eq!(fixture.step(), Step::Unfence("a-1".to_owned()));
    }
    fixture.stored.grant.status.nodes[0].machine = Some("m2".to_owned());
    let Step::WriteFences { fences, .. } = fixture.step() else { panic!("{:?}", fixture.step()) };
    assert_eq!(fences, []);
    fixture.stored.grant.status.fences = fences;
    // The record still names the client. The fence is not written again.
    assert_eq!(fixture.write_spec(), Change::Granted("a".to_owned(), Generation(4)));
}

#[test]
fn deleted_nodes_are_removed_from_the_status_above_a_limit() {
    let mut fixture = Fixture::new(&["a"]);
    let fence = |node: &str, generation| FenceEntry {
        node: node.to_owned(),
        generation: Generation(generation),
        client: Some(format!("{node}-1")),
        proof: String::new(),
        time: NOW,
    };
    let entry = |node: &str| NodeEntry { node: node.to_owned(), ..NodeEntry::default() };
    fixture.policy.max_nodes = 2;
    fixture.stored.grant.status.fences = vec![fence("b", 1), fence("x", 2)];
    fixture.stored.grant.status.nodes = vec![entry("v"), entry("x")];
    assert_eq!(fixture.step(), Step::Wait(Vec::new()));
    fixture.stored.grant.status.fences.extend([fence("y", 2), fence("a", 3)]);
    fixture.stored.grant.status.nodes.extend([entry("w"), entry("a")]);
    for expected in ["x", "y", "v"] {
        let Step::Forget { version, node } = fixture.step() else { panic!() };
        assert_eq!((version.as_ref(), &*node), (Some(&fixture.stored.version), expected));
        fixture.stored.grant.status.forget(&node);
    }
    assert_eq!(fixture.step(), Step::Wait(Vec::new()));
    // Nodes that exist, hold the volume or ask for it stay.
    fixture.policy.max_nodes = 0;
    let forgets = |fixture: &Fixture| matches!(fixture.step(), Step::Forget { .. });
    assert!(forgets(&fixture));
    fixture.stored.grant.status.forget("w");
    assert!(!forgets(&fixture));
    fixture.nodes.clear();
    assert!(forgets(&fixture));
    fixture.requests.push(request("b"));
    assert!(!forgets(&fixture));
}

#[test]
fn idle_entries_of_nodes_that_exist_are_removed_above_a_limit() {
    let mut fixture = Fixture::new(&["a"]);
    let entry = |node: &str| NodeEntry { node: node.to_owned(), ..NodeEntry::default() };
    for name in ["c", "d", "e"] {
        fixture.nodes.insert(name.to_owned(), NodeState::default());
    }
    fixture.stored.grant.status.nodes = ["a", "b", "c", "d", "x", "e"].map(entry).into();
    fixture.stored.grant.status.fences = vec![FenceEntry {
        node: "b".to_owned(),
        generation: Generation(2),
        client: None,
        proof: String::new(),
        time: NOW,
    }];
    fixture.requests.push(request("c"));
    fixture.policy.max_nodes = 6;
    assert_eq!(fixture.step(), waits("c", Until::OtherHolders));
    fixture.policy.max_nodes = 0;
    // One that was deleted comes first. A holder, a node that was fenced and one that asks for the volume stay.
    for expected in ["x", "d", "e"] {
        let Step::Forget { node, .. } = fixture.step() else { panic!("{:?}", fixture.step()) };
        assert_eq!(node, expected);
        fixture.stored.grant.status.forget(&node);
    }
    assert_eq!(fixture.step(), waits("c", Until::OtherHolders));
}

#[test]
fn a_fence_is_as_long_as_the_schema_permits() {
    let mut fixture = Fixture::new(&[]);
    fixture.holder().revoked = true;
    fixture.holder().since = Time(0);
    fixture.node("a").out_of_service = true;
    let target = Target { node: "a".to_owned(), generation: Generation(3), mode: Mode::ReadWrite };
    let client = "<é>".repeat(1000);
    fixture.record = Some(Record::default().seal(&target, Some(client)));
    let Step::WriteFences { fences, .. } = fixture.step() else { panic!("{:?}", fixture.step()) };
    assert_eq!(fences[0].client.as_deref(), Some(&*"?".repeat(MAX_CLIENT)));
    assert_eq!(fences[0].proof.len(), MAX_MESSAGE);
    assert!(fences[0].proof.starts_with("generation 3 is sealed"), "{}", fences[0].proof);
}
