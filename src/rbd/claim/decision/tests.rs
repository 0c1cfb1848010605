//! The decision about a claim, for states of an image by hand and for any states.

use proptest::prelude::*;

use super::*;
use cleat_backend::claimant::ProcessMark;

const OWN: &str = "10.0.0.9:0/9";

fn claimant(node: &str, boot: &str, mapping: &str) -> Claimant {
    Claimant {
        node: node.into(),
        boot_id: boot.into(),
        mapping_id: mapping.into(),
        process: ProcessMark::own(),
        ..Claimant::default()
    }
}

fn claim(of: &Claimant, address: &str) -> Claim {
    Claim::after(None, "id".into(), of, address.into(), 0, &[])
}

fn holder(address: &str, alive: bool) -> Holder {
    Holder { address: address.into(), alive, made_by_hand: None }
}

fn seen(claim: Option<&Claim>, holder: Option<&Holder>) -> Observation {
    let watching = holder.iter().filter(|holder| holder.alive);
    let watching = watching.map(|holder| holder.address.clone()).collect();
    let (claim, holder) = (claim.cloned(), holder.cloned());
    Observation { claim, announced: None, holder, watching }
}

fn opening(claim: Option<&Claim>, holder: Option<&Holder>, claimant: &Claimant) -> Decision {
    decide(&seen(claim, holder), claimant, OWN, Purpose::Open)
}

fn take(addresses: &[&str]) -> Decision {
    Decision::Take(addresses.iter().map(|&address| address.into()).collect())
}

#[test]
fn a_successor_fences_its_predecessor_and_another_mapping_is_rejected() {
    let old = claimant("n", "b", "m");
    let claim = claim(&old, "A/1");
    let alive = holder("A/1", true);
    for held in [Some(&alive), Some(&holder("A/1", false)), None] {
        assert_eq!(opening(Some(&claim), held, &old), take(&["A/1"]), "the same mapping");
        let rebooted = claimant("n", "c", "x");
        let expected = match held {
            Some(held) if held.alive => Decision::Claimed(claim.client.clone()),
            _ => take(&["A/1"]),
        };
        assert_eq!(opening(Some(&claim), held, &rebooted), expected, "a node of the same name");
        for other in [claimant("o", "c", "m"), claimant("n", "b", "x"), claimant("", "", "")] {
            let decision = opening(Some(&claim), held, &other);
            assert_eq!(decision, Decision::Claimed(claim.client.clone()), "{other:?}");
            let forced = Claimant { take_over: true, ..other };
            assert_eq!(opening(Some(&claim), held, &forced), take(&["A/1"]));
        }
    }
}

#[test]
fn generic_and_empty_names_of_nodes_and_boots_prove_nothing() {
    let generic = ["localhost", "", "(none)"].map(|name| (name, "b", "c"));
    for (name, old, new) in generic.into_iter().chain([("n", "", "c"), ("n", "b", "")]) {
        let claim = claim(&claimant(name, old, "m"), "A/1");
        let decision = opening(Some(&claim), None, &claimant(name, new, "x"));
        assert!(matches!(decision, Decision::Claimed(_)), "{name} {old} {new}");
    }
    let anonymous = Claimant::default();
    let decision = opening(Some(&claim(&anonymous, "A/1")), None, &anonymous);
    assert!(matches!(decision, Decision::Claimed(_)));
}

#[test]
fn the_end_of_a_process_of_this_boot_permits_a_takeover() {
    let ended = ProcessMark { pid: u32::MAX, ..ProcessMark::own().unwrap() };
    let old = Claimant { process: Some(ended), ..claimant("n", "b", "m") };
    let claim = claim(&old, "A/1");
    assert_eq!(opening(Some(&claim), None, &claimant("n", "b", "x")), take(&["A/1"]));
    let decision = opening(Some(&claim), None, &claimant("o", "c", "x"));
    assert!(matches!(decision, Decision::Claimed(_)), "a process of another machine");
}

#[test]
fn a_client_of_another_tool_is_fenced_only_if_it_is_dead_or_on_take_over() {
    let own = claimant("n", "b", "m");
    let forced = Claimant { take_over: true, ..own.clone() };
    let (alive, dead) = (holder("T/1", true), holder("T/1", false));
    assert_eq!(opening(None, Some(&alive), &own), Decision::Held("T/1".into()));
    assert_eq!(opening(None, Some(&alive), &forced), take(&["T/1"]));
    assert_eq!(opening(None, Some(&dead), &own), take(&["T/1"]));
    // The mapping's own claim exists: the lock was broken, or its holder died before its claim.
    let claim = claim(&own, "A/1");
    assert_eq!(opening(Some(&claim), Some(&alive), &own), Decision::Held("T/1".into()));
    assert_eq!(opening(Some(&claim), Some(&dead), &own), take(&["A/1", "T/1"]));
    assert_eq!(opening(Some(&claim), Some(&alive), &forced), take(&["A/1", "T/1"]));
}

#[test]
fn a_holder_that_died_before_its_claim_is_identified_by_its_announcement() {
    let me = claimant("n", "b", "m");
    let (alive, gone) = (holder("A/2", true), holder("A/2", false));
    for claim in [None, Some(claim(&me, "A/1").released()), Some(claim(&me, "A/1"))] {
        let before = claim.as_ref().filter(|claim| !claim.released).map(|_| "A/1");
        let cut = |address| take(&before.into_iter().chain([address]).collect::<Vec<_>>());
        let seen = |of: &Claimant, at: &str, holder: &Holder| Observation {
            claim: claim.clone(),
            announced: Some(self::claim(of, at)),
            holder: Some(holder.clone()),
            watching: Vec::new(),
        };
        let ask = |seen: &Observation, who: &Claimant, when| decide(seen, who, OWN, when);
        let own = seen(&me, "A/2", &alive);
        assert_eq!(ask(&own, &me, Purpose::Open), cut("A/2"));
        let rebooted = claimant("n", "c", "x");
        assert_eq!(ask(&own, &rebooted, Purpose::Open), cut("A/2"));
        // A handover fences no client, and needs the claim of the predecessor.
        let decision = ask(&own, &me, Purpose::Handover);
        match claim {
            Some(_) => assert!(matches!(decision, Decision::Claimed(_)), "{decision:?}"),
            None => assert_eq!(decision, Decision::Lost(Lost::NoClaim)),
        }
        // The holder of another mapping's announcement is named while it is alive.
        let other = claimant("o", "c", "x");
        let theirs = seen(&other, "A/2", &alive);
        let Decision::Claimed(client) = ask(&theirs, &me, Purpose::Open) else {
            panic!("{theirs:?}")
        };
        assert_eq!((client.node.as_str(), client.address.as_str()), ("o", "A/2"));
        assert_eq!(ask(&seen(&other, "A/2", &gone), &me, Purpose::Open), cut("A/2"));
        let forced = Claimant { take_over: true, ..me.clone() };
        assert_eq!(ask(&theirs, &forced, Purpose::Open), cut("A/2"));
        // The announcement of another address does not identify the holder.
        let tool = seen(&me, "A/3", &alive);
        assert_eq!(ask(&tool, &me, Purpose::Open), Decision::Held("A/2".into()));
    }
    // An announcement alone holds nothing.
    let early = Observation { announced: Some(claim(&me, "A/2")), ..Observation::default() };
    assert_eq!(decide(&early, &claimant("o", "c", "x"), OWN, Purpose::Open), take(&[]));
}

#[test]
fn two_machines_with_the_same_name_are_two_nodes() {
    let on = |machine: &str, boot: &str| Claimant {
        machine: machine.into(),
        ..claimant("n", boot, boot)
    };
    let refused = |claim: &Claim, claimant: &Claimant| {
        matches!(opening(Some(claim), None, claimant), Decision::Claimed(_))
    };
    for (old, new, same) in
        [("1", "1", true), ("1", "2", false), ("", "2", true), ("1", "", true), ("", "", true)]
    {
        let claim = claim(&on(old, "b"), "A/1");
        assert_eq!(refused(&claim, &on(new, "c")), !same, "{old:?} {new:?}");
    }
    let claim = claim(&on("1", "b"), "A/1");
    assert!(refused(&claim, &Claimant { node: "o".into(), ..on("1", "c") }), "renamed");
}

#[test]
fn a_mapping_with_a_device_resumes_only_if_no_other_mapping_has_claimed_the_image() {
    let me = Claimant { resumes: true, ..claimant("n", "b", "m") };
    let forced = Claimant { take_over: true, ..me.clone() };
    let mut other = claim(&claimant("o", "c", "x"), "A/1");
    for released in [false, true] {
        other.released = released;
        for claimant in [&me, &forced] {
            let decision = opening(Some(&other), None, claimant);
            assert_eq!(decision, Decision::Lost(Lost::Claimed(other.client.clone())));
        }
    }
    let mut own = claim(&me, "A/1");
    for alive in [true, false] {
        assert_eq!(opening(Some(&own), Some(&holder("A/1", alive)), &me), take(&["A/1"]));
    }
    own.released = true;
    assert_eq!(opening(Some(&own), None, &me), take(&[]));
}

#[test]
fn a_mapping_with_a_device_does_not_resume_after_a_client_without_a_claim() {
    let me = Claimant { resumes: true, ..claimant("n", "b", "m") };
    let forced = Claimant { take_over: true, ..me.clone() };
    let own = claim(&me, "A/1");
    let lost = |seen: &Observation, expected: &Lost| {
        for claimant in [&me, &forced] {
            let decision = decide(seen, claimant, OWN, Purpose::Open);
            assert_eq!(decision, Decision::Lost(expected.clone()), "{seen:?}");
        }
    };
    lost(&seen(None, None), &Lost::NoClaim);
    lost(&seen(None, Some(&holder("A/1", true))), &Lost::NoClaim);
    lost(&seen(Some(&own), None), &Lost::NoLock);
    for (alive, released) in [(true, false), (false, false), (true, true), (false, true)] {
        let claim = if released { own.released() } else { own.clone() };
        let other = seen(Some(&claim), Some(&holder("T/1", alive)));
        lost(&other, &Lost::OtherLock("T/1".into()));
    }
    let by_hand = Holder { made_by_hand: Some("mine".into()), ..holder("A/1", false) };
    lost(&seen(Some(&own), Some(&by_hand)), &Lost::OtherLock("A/1".into()));
    // A later process of the mapping had fenced the client of the claim, and died when it had broken the
    // lock, or had acquired it.
    let fenced = ["A/1".to_owned()];
    let next = Claim::after(Some(&own), "id".into(), &me, "A/2".into(), 0, &fenced);
    let broken = Observation { announced: Some(next.clone()), ..seen(Some(&own), None) };
    assert_eq!(decide(&broken, &me, OWN, Purpose::Open), take(&["A/1"]));
    let locked = seen(Some(&own), Some(&holder("A/2", true)));
    let locked = Observation { announced: Some(next), ..locked };
    assert_eq!(decide(&locked, &me, OWN, Purpose::Open), take(&["A/1", "A/2"]));
    // The announcement of the present claim explains nothing.
    let before = Observation { announced: Some(own.clone()), ..seen(Some(&own), None) };
    lost(&before, &Lost::NoLock);
}

#[test]
fn a_lock_that_was_made_by_hand_is_broken_only_on_take_over() {
    let me = claimant("n", "b", "m");
    let by_hand = Holder { made_by_hand: Some("backup".into()), ..holder("T/1", false) };
    let released = claim(&me, "A/1").released();
    for claim in [None, Some(&released)] {
        let decision = opening(claim, Some(&by_hand), &me);
        assert_eq!(decision, Decision::LockedByHand("backup".into()));
        let forced = Claimant { take_over: true, ..me.clone() };
        assert_eq!(opening(claim, Some(&by_hand), &forced), take(&["T/1"]));
    }
}

#[test]
fn only_a_client_whose_own_record_shows_its_end_is_on_the_blocklist_for_a_short_time() {
    let (me, other) = (claimant("n", "b", "m"), claimant("o", "c", "x"));
    let forced = |of: &Claimant| Claimant { take_over: true, ..of.clone() };
    let own = claim(&me, "A/1");
    let held = seen(Some(&own), Some(&holder("T/1", false)));
    let ended =
        |seen: &Observation, by: &Claimant, address| liveness(seen, by, address) == Liveness::Ended;
    assert!(ended(&held, &me, "A/1"), "the end of the last process was proved");
    assert!(ended(&held, &forced(&me), "A/1"), "--take-over was not needed");
    assert!(ended(&held, &claimant("n", "c", "x"), "A/1"), "the node was restarted");
    assert!(!ended(&held, &forced(&other), "A/1"), "it was taken over");
    assert!(!ended(&held, &me, "T/1"), "a client without a claim may resume");
    // Its announcement shows who had the lock, but not the end of a client that it was about to fence.
    let fenced = ["T/1".to_owned()];
    let next = Claim::after(None, "id".into(), &me, "A/2".into(), 0, &fenced);
    let broken = Observation { claim: None, announced: Some(next), ..held };
    assert!(ended(&broken, &me, "A/2"));
    assert!(!ended(&broken, &me, "T/1"));
}

#[test]
fn a_restart_of_the_node_is_not_proved_while_the_client_watches() {
    let old = Claimant { machine: "1".into(), ..claimant("n", "b", "m") };
    let new = Claimant { machine: "1".into(), ..claimant("n", "c", "x") };
    let claim = claim(&old, "A/1");
    let broken = Observation { watching: vec!["A/1".into()], ..seen(Some(&claim), None) };
    let decision = decide(&broken, &new, OWN, Purpose::Open);
    assert_eq!(decision, Decision::Claimed(claim.client.clone()));
    assert_eq!(opening(Some(&claim), None, &new), take(&["A/1"]));
}

#[test]
fn a_handover_fences_no_client() {
    let me = Claimant { take_over: true, ..claimant("n", "b", "m") };
    let mut own = claim(&me, "A/1");
    let ask = |claim: &Claim, held| decide(&seen(Some(claim), held), &me, OWN, Purpose::Handover);
    assert_eq!(ask(&own, None), Decision::Lost(Lost::NoLock));
    let alive = holder("A/1", true);
    assert!(matches!(ask(&own, Some(&alive)), Decision::Claimed(_)));
    own.released = true;
    assert_eq!(ask(&own, None), take(&[]));
    assert!(matches!(ask(&own, Some(&alive)), Decision::Claimed(_)), "it still has the lock");
    let tool = holder("T/1", true);
    assert!(matches!(ask(&own, Some(&tool)), Decision::Lost(Lost::OtherLock(_))));
    // After a failed handover the same client claims the image again.
    let mine = claim(&me, OWN);
    assert_eq!(ask(&mine, Some(&holder(OWN, true))), take(&[]));
}

fn any_text() -> impl Strategy<Value = String> {
    prop::sample::select(vec!["", "n", "o", "localhost", "b", "c", "m"]).prop_map(String::from)
}

fn any_claimant() -> impl Strategy<Value = Claimant> {
    (any_text(), any_text(), any_text(), any::<bool>(), any::<bool>(), any::<bool>()).prop_map(
        |(node, boot_id, mapping_id, take_over, resumes, gone)| {
            let own = ProcessMark::own();
            let process =
                own.map(|own| ProcessMark { pid: if gone { u32::MAX } else { own.pid }, ..own });
            let named = Claimant { node, boot_id, mapping_id, ..Claimant::default() };
            Claimant { take_over, resumes, process, ..named }
        },
    )
}

fn any_address() -> impl Strategy<Value = String> {
    prop::sample::select(vec!["A/1", "B/2", OWN]).prop_map(String::from)
}

/// Returns `claim` as released, with shared claims, some of which are released.
fn beside(claim: &Claim, shared: &[(Claimant, String, bool)]) -> Claim {
    let mut all = claim.released();
    for (of, address, is_released) in shared {
        let next = Claim::next(Some(&all), "id".into(), of, address.clone(), 0, &[]);
        all = next.beside(Mode::SharedReadWrite).unwrap();
        let client = all.client.clone();
        all = if *is_released { all.without(&client).unwrap() } else { all };
    }
    all
}

proptest! {
    #[test]
    fn a_shared_claim_fences_its_own_predecessor_only(
        shared in prop::collection::vec((any_claimant(), any_address(), any::<bool>()), 0..4),
        holder in prop::option::of((any_address(), any::<bool>())),
        claimant in any_claimant(),
        handover: bool,
        is_reader: bool,
    ) {
        let claim = beside(&claim(&claimant, "C/9"), &shared);
        let holder = holder.map(|(address, alive)| self::holder(&address, alive));
        let watching = holder.iter().filter(|holder| holder.alive);
        let watching = watching.map(|holder| holder.address.clone()).collect();
        let seen = Observation { claim: Some(claim.clone()), announced: None, holder, watching };
        let purpose = if handover { Purpose::Handover } else { Purpose::Open };
        let mode = if is_reader { Mode::ReadOnly } else { Mode::SharedReadWrite };
        let Decision::Take(rivals) = decide_beside(&seen, &claimant, mode, OWN, purpose) else {
            return Ok(());
        };
        for shared in claim.active_shared().filter(|shared| shared.client.address != OWN) {
            let client = &shared.client;
            let is_conflict = client.node == claimant.node || is_reader;
            let is_fenced = rivals.contains(&client.address);
            let is_entitled = !handover && may_replace(client, &claimant, &seen);
            prop_assert!(!is_conflict || (is_fenced && is_entitled), "{client:?}");
        }
        let is_ended = |address: &String| {
            let known = |client: &&Client| client.address == *address;
            let known = claim.clients().filter(known).any(|c| may_replace(c, &claimant, &seen));
            known || seen.holder.as_ref().is_some_and(|held| held.address == *address && !held.alive)
        };
        prop_assert!(rivals.iter().all(is_ended), "{rivals:?}");
        prop_assert!(!rivals.iter().any(|address| address == OWN), "a client fences itself");
        let known = claim.shared.iter().any(|s| s.client.mapping_id == claimant.mapping_id);
        prop_assert!(known || !(claimant.resumes || handover), "the last claim is missing");
    }

    #[test]
    fn every_client_that_could_still_write_is_fenced(
        claims in prop::option::of((any_claimant(), any_address(), any::<bool>())),
        shared in prop::collection::vec((any_claimant(), any_address(), any::<bool>()), 0..3),
        announced in prop::option::of((any_claimant(), any_address())),
        holder in prop::option::of((any_address(), any::<bool>())),
        claimant in any_claimant(),
        handover: bool,
    ) {
        let claim = claims.map(|(of, address, released)| {
            let claim = claim(&of, &address);
            if released { beside(&claim, &shared) } else { claim }
        });
        let announced = announced.map(|(of, address)| self::claim(&of, &address));
        let holder = holder.map(|(address, alive)| self::holder(&address, alive));
        let purpose = if handover { Purpose::Handover } else { Purpose::Open };
        let watching = holder.iter().filter(|holder| holder.alive);
        let watching = watching.map(|holder| holder.address.clone()).collect();
        let seen = Observation { claim, announced, holder, watching };
        let Decision::Take(rivals) = decide(&seen, &claimant, OWN, purpose) else {
            return Ok(());
        };
        let Observation { claim, announced, holder, .. } = seen.clone();
        prop_assert!(!rivals.iter().any(|address| address == OWN), "a client fences itself");
        let forced = claimant.take_over && !handover;
        if let Some(claim) = &claim {
            let client = &claim.client;
            let active = !claim.released && client.address != OWN;
            prop_assert!(!active || rivals.contains(&client.address), "a claim is active");
            let shared = claim.active_shared().map(|shared| &shared.client.address);
            prop_assert!(shared.into_iter().all(|address| rivals.contains(address) || address == OWN));
            prop_assert!(!active || forced || may_replace(client, &claimant, &seen));
            let same = client.mapping_id == claimant.mapping_id;
            let resumes = claimant.resumes || handover;
            prop_assert!(same || !resumes, "the device has writes of another mapping");
        }
        prop_assert!(claim.is_some() || !(claimant.resumes || handover), "the claim is missing");
        if let Some(Holder { address, alive, .. }) = &holder && address != OWN {
            prop_assert!(rivals.contains(address), "the lock holder could continue to write");
            let is_holder = |client: &Client| client.address == *address;
            let claimed = claim.as_ref().is_some_and(|claim| {
                let mut shared = claim.active_shared();
                is_holder(&claim.client) || shared.any(|shared| is_holder(&shared.client))
            });
            let named = announced.as_ref().filter(|claim| claim.client.address == *address);
            let own = named.is_some_and(|claim| may_replace(&claim.client, &claimant, &seen));
            prop_assert!(forced || claimed || own || !alive, "another mapping was fenced");
        }
        prop_assert!(rivals.is_empty() || !handover || holder.is_some_and(|h| !h.alive));
    }
}
