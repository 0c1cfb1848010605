//! Decides whether a client may claim an image: a pure function of the image's metadata, its lock and its
//! watchers.
//!
//! A claim is active until it is released, whether or not its client still holds the lock: an
//! administrator can break a lock, and a client whose watch the OSDs have dropped can resume. So the
//! client of an active claim is fenced before any other client writes. It is fenced only by a mapping
//! that is entitled to replace it, or on an explicit `--take-over`.
//!
//! A lock holder without a claim belongs to another tool. While it is alive, it is fenced only on
//! `--take-over`. If it has announced a claim, it is treated as if it had written the claim. A lock that an
//! administrator made (`rbd lock add`) is broken only on `--take-over`: its client has always ended.
//!
//! A mapping that resumes its device has users that rely on what they have read. Tools without claims (krbd,
//! qemu, `rbd`) leave no trace but the lock, so the mapping resumes only if the lock is still that of its own
//! claim. Two states without it are explained by the mapping itself: the claim is released, and an
//! announcement shows that a later process of the mapping was breaking the lock when it ended.

use std::fmt;

use super::record::{Claim, Client};
use cleat_backend::claimant::{Claimant, is_same_node};
use cleat_grants::record::Refusal;

/// The client that holds the image's lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Holder {
    pub(crate) address: String,
    /// Whether it watches the image. The OSDs drop the watch of a dead client after about 30 s.
    pub(crate) alive: bool,
    /// The cookie of a lock that an administrator made (`rbd lock add`); `None` for the lock of librbd or krbd.
    pub(crate) made_by_hand: Option<String>,
}

/// The purpose of a claim attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Opening the volume.
    Open,
    /// A handover: the previous process has released its claim for this client, so no client may be
    /// fenced.
    Handover,
}

/// The result of [`decide`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Decision {
    /// The client may claim the image. It must first fence the clients at these addresses in this order
    /// (there may be none), and break the lock if one of them holds it.
    Take(Vec<String>),
    /// This other client has an active claim.
    Claimed(Client),
    /// The client at this address holds the lock and has no claim.
    Held(String),
    /// The record does not admit the generation of the grant.
    Refused(Refusal),
    /// An administrator has locked the image with this cookie.
    LockedByHand(String),
    /// The mapping must not resume its device: data that its users have read may be outdated.
    Lost(Lost),
}

/// The state of a client that is fenced, which determines how long it stays on the blocklist.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Liveness {
    /// Its process has provably ended, or its node was restarted.
    Ended,
    /// It may resume at any time.
    MayLive,
}

/// Why a mapping must not resume its device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Lost {
    /// The generation of its grant was fenced.
    Refused(Refusal),
    /// This client of another mapping has claimed the image since.
    Claimed(Client),
    /// The claim of the mapping was removed.
    NoClaim,
    /// The claim of the mapping is active, and its lock is gone.
    NoLock,
    /// The client at this address has acquired the lock since.
    OtherLock(String),
}

/// Prints the reason as the end of a sentence about the image.
impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(refusal) => write!(f, "{refusal}"),
            Self::Claimed(client) => write!(f, "it was claimed by {}", client.describe()),
            Self::NoClaim => f.write_str("its claim was removed"),
            Self::NoLock => f.write_str("its lock was broken"),
            Self::OtherLock(address) => {
                write!(f, "the client at {address}, which has made no claim, has locked it")
            }
        }
    }
}

/// The state of an image that a decision is based on.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Observation {
    /// The newest claim.
    pub(crate) claim: Option<Claim>,
    /// The claim that a client announced before it tried to acquire the lock.
    pub(crate) announced: Option<Claim>,
    /// The holder of the lock.
    pub(crate) holder: Option<Holder>,
    /// The addresses of the clients that watch the image.
    pub(crate) watching: Vec<String>,
}

impl Observation {
    /// Returns the client whose announcement explains that the client at `address` holds the lock, or held
    /// it: that client itself, or one that has fenced it to acquire the lock.
    fn announcer(&self, address: &str) -> Option<&Client> {
        let announced = self.announced.as_ref()?;
        let fenced = || announced.cut.iter().any(|client| client.address == address);
        (announced.client.address == address || fenced()).then_some(&announced.client)
    }
}

/// Decides whether `claimant`, whose client has the address `own`, may claim the image.
pub(crate) fn decide(
    seen: &Observation,
    claimant: &Claimant,
    own: &str,
    purpose: Purpose,
) -> Decision {
    let (claim, holder) = (seen.claim.as_ref(), seen.holder.as_ref());
    if (claimant.resumes || purpose == Purpose::Handover)
        && let Some(lost) = why_lost(seen, claimant, own)
    {
        return Decision::Lost(lost);
    }
    let forced = claimant.take_over && purpose == Purpose::Open;
    let refusal = claim.and_then(|claim| claim.refusal(claimant));
    if let Some(refusal) = refusal.filter(|_| !forced && purpose == Purpose::Open) {
        return Decision::Refused(refusal);
    }
    let holds = |client: &Client| {
        holder.is_some_and(|holder| holder.alive && holder.address == client.address)
    };
    // A client that has released its claim and still holds the lock may have requests in flight. If it
    // has died, only the lock is left.
    let active = claim.filter(|claim| !claim.released || holds(&claim.client));
    let active = active.map(|claim| &claim.client).filter(|client| client.address != own);
    let mut rivals = Vec::new();
    if let Some(client) = active {
        let entitled = purpose == Purpose::Open && may_replace(client, claimant, seen);
        if !(forced || entitled) {
            return Decision::Claimed(client.clone());
        }
        rivals.push(client.address.clone());
    }
    if let Some(Holder { address, alive, made_by_hand }) = holder
        && address != own
        && active.is_none_or(|client| client.address != *address)
    {
        if let Some(cookie) = made_by_hand.as_ref().filter(|_| !forced) {
            return Decision::LockedByHand(cookie.clone());
        }
        let announcer = seen.announcer(address);
        // The announcer died or is stopped between its announcement and writing its claim.
        let entitled = purpose == Purpose::Open
            && announcer.is_some_and(|client| may_replace(client, claimant, seen));
        if *alive && !forced && !entitled {
            let held = || Decision::Held(address.clone());
            return announcer.map_or_else(held, |client| Decision::Claimed(client.clone()));
        }
        rivals.push(address.clone());
    }
    Decision::Take(rivals)
}

/// Returns why the mapping of `claimant`, which has a device, must not claim the image again; `None` if no
/// other client can have written to the image since the mapping's last claim, as far as the image shows it.
///
/// Not detected: a client without a claim that has locked, written and released the image while the mapping's
/// claim was released (in a handover, for milliseconds), or after a process of the mapping had broken the lock
/// and before it had the lock. If a process died after its announcement, this time begins there, and ends when the
/// next process has the lock.
fn why_lost(seen: &Observation, claimant: &Claimant, own: &str) -> Option<Lost> {
    let Some(claim) = &seen.claim else { return Some(Lost::NoClaim) };
    if claim.client.mapping_id != claimant.mapping_id {
        let refusal = claim.refusal(claimant).filter(|why| *why == Refusal::Sealed);
        let claimed = || Lost::Claimed(claim.client.clone());
        return Some(refusal.map_or_else(claimed, Lost::Refused));
    }
    let of_mapping = |client: &&Client| client.mapping_id == claimant.mapping_id;
    match &seen.holder {
        Some(holder) if holder.made_by_hand.is_none() => {
            let address = &holder.address;
            let is_own = address == own || *address == claim.client.address;
            let is_explained = is_own || seen.announcer(address).filter(of_mapping).is_some();
            (!is_explained).then(|| Lost::OtherLock(address.clone()))
        }
        Some(holder) => Some(Lost::OtherLock(holder.address.clone())),
        None if claim.released => None,
        None => {
            let next = seen.announced.as_ref().map(|claim| &claim.client).filter(of_mapping);
            let follows = next.is_some_and(|next| next.generation > claim.client.generation);
            (!follows).then_some(Lost::NoLock)
        }
    }
}

/// Returns whether `claimant` is entitled to replace `client`. It is if the node of `client` was restarted.
/// In the same boot it is if `client` is of the same mapping (the supervisor has proved the end of the
/// previous process) or if the process of `client` has ended.
fn may_replace(client: &Client, claimant: &Claimant, seen: &Observation) -> bool {
    if client.boot_id.is_empty() || claimant.boot_id.is_empty() {
        return false;
    }
    if client.boot_id != claimant.boot_id {
        // The node was restarted, or it is another one: machines that start from one image have the same
        // name and may have the same machine id. A client that still watches the image is not proved to have
        // ended with its node.
        let watches = seen.watching.contains(&client.address);
        let here = (&*claimant.node, &*claimant.machine);
        return is_same_node((&client.node, &client.machine), here) && !watches;
    }
    let same_mapping = client.mapping_id == claimant.mapping_id && !client.mapping_id.is_empty();
    same_mapping
        || client.process.is_some_and(|process| process.has_ended(claimant.process.as_ref()))
}

/// Returns whether the client at `address`, which `claimant` is about to fence, has ended. Only what it has
/// recorded about itself can show that. A client that another one was entitled to fence may still live.
pub(crate) fn liveness(seen: &Observation, claimant: &Claimant, address: &str) -> Liveness {
    let records = [&seen.claim, &seen.announced].into_iter().flatten();
    let clients = records.flat_map(|record| std::iter::once(&record.client).chain(&record.cut));
    let mut own = clients.filter(|client| client.address == address);
    match own.any(|client| may_replace(client, claimant, seen)) {
        true => Liveness::Ended,
        false => Liveness::MayLive,
    }
}

#[cfg(test)]
mod tests {
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
        let ended = |seen: &Observation, by: &Claimant, address| {
            liveness(seen, by, address) == Liveness::Ended
        };
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
        let ask =
            |claim: &Claim, held| decide(&seen(Some(claim), held), &me, OWN, Purpose::Handover);
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
                let process = own
                    .map(|own| ProcessMark { pid: if gone { u32::MAX } else { own.pid }, ..own });
                let named = Claimant { node, boot_id, mapping_id, ..Claimant::default() };
                Claimant { take_over, resumes, process, ..named }
            },
        )
    }

    fn any_address() -> impl Strategy<Value = String> {
        prop::sample::select(vec!["A/1", "B/2", OWN]).prop_map(String::from)
    }

    proptest! {
        #[test]
        fn every_client_that_could_still_write_is_fenced(
            claims in prop::option::of((any_claimant(), any_address(), any::<bool>())),
            announced in prop::option::of((any_claimant(), any_address())),
            holder in prop::option::of((any_address(), any::<bool>())),
            claimant in any_claimant(),
            handover: bool,
        ) {
            let claim = claims.map(|(of, address, released)| {
                let claim = claim(&of, &address);
                if released { claim.released() } else { claim }
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
                prop_assert!(!active || forced || may_replace(client, &claimant, &seen));
                let same = client.mapping_id == claimant.mapping_id;
                let resumes = claimant.resumes || handover;
                prop_assert!(same || !resumes, "the device has writes of another mapping");
            }
            prop_assert!(claim.is_some() || !(claimant.resumes || handover), "the claim is missing");
            if let Some(Holder { address, alive, .. }) = &holder && address != OWN {
                prop_assert!(rivals.contains(address), "the lock holder could continue to write");
                let claimed = claim.as_ref().is_some_and(|claim| claim.client.address == *address);
                let named = announced.as_ref().filter(|claim| claim.client.address == *address);
                let own = named.is_some_and(|claim| may_replace(&claim.client, &claimant, &seen));
                prop_assert!(forced || claimed || own || !alive, "another mapping was fenced");
            }
            prop_assert!(rivals.is_empty() || !handover || holder.is_some_and(|h| !h.alive));
        }
    }
}
