//! Who may write to an image: a pure function of what its metadata and the cluster say.
//!
//! A claim counts until it is released, whether its client still holds the lock or not: a lock can be
//! broken by hand, and a client that was forgotten by the OSDs can come back to life. So who has a
//! claim is cut off before anybody else writes; and is cut off only by who is entitled to it or was
//! told to. A client without a claim is another tool's: alive, it is never pushed aside untold; unless it
//! has announced its claim, and so said who it is: then it is judged as if it had made it.

use super::record::{Claim, Client};
use cleat_backend::claimant::{Claimant, is_telling};

/// The client that holds the image's lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Holder {
    pub(crate) address: String,
    /// It watches the image, as far as the OSDs know.
    pub(crate) alive: bool,
}

/// When the question is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Occasion {
    /// The volume is being opened.
    Opening,
    /// The one before has let go, in order, for the one that asks: there is nobody to be cut off.
    HandOver,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Decision {
    /// Cut these clients off, in this order, perhaps none; break the lock if anybody holds it; take it.
    Take(Vec<String>),
    /// It is claimed by somebody else.
    Claimed(Client),
    /// A client holds the lock that made no claim.
    Held(String),
    /// Somebody else has claimed it since this mapping did: what its device's users know is history.
    Superseded(Client),
}

/// What is to be seen of an image.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Sight {
    /// The newest claim.
    pub(crate) claim: Option<Claim>,
    /// The claim that somebody was about to make when it set out to take the lock.
    pub(crate) announced: Option<Claim>,
    /// Who holds the lock.
    pub(crate) holder: Option<Holder>,
}

/// `own` is the address of the client that asks.
pub(crate) fn decide(
    sight: &Sight,
    claimant: &Claimant,
    own: &str,
    occasion: Occasion,
) -> Decision {
    let (claim, holder) = (sight.claim.as_ref(), sight.holder.as_ref());
    let last = claim.map(|claim| &claim.client);
    let resumes = claimant.resumes || occasion == Occasion::HandOver;
    if let Some(client) = last.filter(|last| resumes && last.mapping_id != claimant.mapping_id) {
        return Decision::Superseded(client.clone());
    }
    let told = claimant.take_over && occasion == Occasion::Opening;
    let holds = |client: &Client| {
        holder.is_some_and(|holder| holder.alive && holder.address == client.address)
    };
    // Between the release of the claim and that of the lock something may still be under way; one that
    // has died there has nothing left but the lock.
    let standing = claim.filter(|claim| !claim.released || holds(&claim.client));
    let standing = standing.map(|claim| &claim.client).filter(|client| client.address != own);
    let mut cut = Vec::new();
    if let Some(client) = standing {
        let succeeds = occasion == Occasion::Opening && may_succeed(client, claimant);
        if !(told || succeeds) {
            return Decision::Claimed(client.clone());
        }
        cut.push(client.address.clone());
    }
    if let Some(Holder { address, alive }) = holder
        && address != own
        && standing.is_none_or(|client| client.address != *address)
    {
        let announced = sight.announced.as_ref().map(|claim| &claim.client);
        let announced = announced.filter(|client| client.address == *address);
        // It died, or stands still, between the lock and its claim.
        let succeeds = occasion == Occasion::Opening
            && announced.is_some_and(|client| may_succeed(client, claimant));
        if *alive && !told && !succeeds {
            let held = || Decision::Held(address.clone());
            return announced.map_or_else(held, |client| Decision::Claimed(client.clone()));
        }
        cut.push(address.clone());
    }
    Decision::Take(cut)
}

/// Whether the end of `client` is proved, so that nobody loses what it would want to keep.
fn may_succeed(client: &Client, claimant: &Claimant) -> bool {
    if client.boot_id.is_empty() || claimant.boot_id.is_empty() {
        return false;
    }
    if client.boot_id != claimant.boot_id {
        // The node has been restarted.
        return is_same_node(client, &claimant.node, &claimant.machine);
    }
    let same_mapping = client.mapping_id == claimant.mapping_id && !client.mapping_id.is_empty();
    same_mapping
        || client.process.is_some_and(|process| process.has_ended(claimant.process.as_ref()))
}

/// Whether `client` is of the node that is called `node`, of the machine `machine`. A name alone can be
/// that of two machines; where either machine is not known, it has to do.
pub(crate) fn is_same_node(client: &Client, node: &str, machine: &str) -> bool {
    let other_machine =
        !client.machine.is_empty() && !machine.is_empty() && client.machine != machine;
    client.node == node && is_telling(node) && !other_machine
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
        Holder { address: address.into(), alive }
    }

    fn sight(claim: Option<&Claim>, holder: Option<&Holder>) -> Sight {
        Sight { claim: claim.cloned(), announced: None, holder: holder.cloned() }
    }

    fn opening(claim: Option<&Claim>, holder: Option<&Holder>, who: &Claimant) -> Decision {
        decide(&sight(claim, holder), who, OWN, Occasion::Opening)
    }

    fn take(addresses: &[&str]) -> Decision {
        Decision::Take(addresses.iter().map(|&address| address.into()).collect())
    }

    #[test]
    fn a_successor_cuts_its_predecessor_off_and_a_stranger_is_refused() {
        let old = claimant("n", "b", "m");
        let claim = claim(&old, "A/1");
        let alive = holder("A/1", true);
        for held in [Some(&alive), Some(&holder("A/1", false)), None] {
            assert_eq!(opening(Some(&claim), held, &old), take(&["A/1"]), "the same mapping");
            let rebooted = claimant("n", "c", "x");
            assert_eq!(opening(Some(&claim), held, &rebooted), take(&["A/1"]), "the same node");
            for stranger in [claimant("o", "c", "m"), claimant("n", "b", "x"), claimant("", "", "")]
            {
                let decision = opening(Some(&claim), held, &stranger);
                assert_eq!(decision, Decision::Claimed(claim.client.clone()), "{stranger:?}");
                let told = Claimant { take_over: true, ..stranger };
                assert_eq!(opening(Some(&claim), held, &told), take(&["A/1"]));
            }
        }
    }

    #[test]
    fn names_that_many_nodes_have_and_empty_ones_prove_nothing() {
        for name in ["localhost", "", "(none)"] {
            let claim = claim(&claimant(name, "b", "m"), "A/1");
            let decision = opening(Some(&claim), None, &claimant(name, "c", "x"));
            assert!(matches!(decision, Decision::Claimed(_)), "{name}");
        }
        let nobody = Claimant::default();
        let decision = opening(Some(&claim(&nobody, "A/1")), None, &nobody);
        assert!(matches!(decision, Decision::Claimed(_)));
    }

    #[test]
    fn the_end_of_a_process_of_this_boot_is_proof() {
        let ended = ProcessMark { pid: u32::MAX, ..ProcessMark::own().unwrap() };
        let old = Claimant { process: Some(ended), ..claimant("n", "b", "m") };
        let claim = claim(&old, "A/1");
        assert_eq!(opening(Some(&claim), None, &claimant("n", "b", "x")), take(&["A/1"]));
        let decision = opening(Some(&claim), None, &claimant("o", "c", "x"));
        assert!(matches!(decision, Decision::Claimed(_)), "another machine's numbers");
    }

    #[test]
    fn another_tool_is_pushed_aside_only_when_it_is_gone_or_by_order() {
        let me = claimant("n", "b", "m");
        let told = Claimant { take_over: true, ..me.clone() };
        let (alive, gone) = (holder("T/1", true), holder("T/1", false));
        assert_eq!(opening(None, Some(&alive), &me), Decision::Held("T/1".into()));
        assert_eq!(opening(None, Some(&alive), &told), take(&["T/1"]));
        assert_eq!(opening(None, Some(&gone), &me), take(&["T/1"]));
        // Beside an old claim of our own: somebody broke the lock, or died before writing its claim.
        let claim = claim(&me, "A/1");
        assert_eq!(opening(Some(&claim), Some(&alive), &me), Decision::Held("T/1".into()));
        assert_eq!(opening(Some(&claim), Some(&gone), &me), take(&["A/1", "T/1"]));
        assert_eq!(opening(Some(&claim), Some(&alive), &told), take(&["A/1", "T/1"]));
    }

    #[test]
    fn who_died_before_it_could_claim_is_judged_by_what_it_announced() {
        let me = claimant("n", "b", "m");
        let (alive, gone) = (holder("A/2", true), holder("A/2", false));
        for claim in [None, Some(claim(&me, "A/1").released()), Some(claim(&me, "A/1"))] {
            let before = claim.as_ref().filter(|claim| !claim.released).map(|_| "A/1");
            let cut = |address| take(&before.into_iter().chain([address]).collect::<Vec<_>>());
            let seen = |of: &Claimant, at: &str, holder: &Holder| Sight {
                claim: claim.clone(),
                announced: Some(self::claim(of, at)),
                holder: Some(holder.clone()),
            };
            let ask = |sight: &Sight, who: &Claimant, when| decide(sight, who, OWN, when);
            let own = seen(&me, "A/2", &alive);
            assert_eq!(ask(&own, &me, Occasion::Opening), cut("A/2"));
            let rebooted = claimant("n", "c", "x");
            assert_eq!(ask(&own, &rebooted, Occasion::Opening), cut("A/2"));
            // In a hand-over nobody has died.
            let judged = ask(&own, &me, Occasion::HandOver);
            assert!(matches!(judged, Decision::Claimed(_)), "{judged:?}");
            // Somebody else's is in the way, with its name, for as long as it is there.
            let other = claimant("o", "c", "x");
            let theirs = seen(&other, "A/2", &alive);
            let Decision::Claimed(client) = ask(&theirs, &me, Occasion::Opening) else {
                panic!("{theirs:?}")
            };
            assert_eq!((client.node.as_str(), client.address.as_str()), ("o", "A/2"));
            assert_eq!(ask(&seen(&other, "A/2", &gone), &me, Occasion::Opening), cut("A/2"));
            let told = Claimant { take_over: true, ..me.clone() };
            assert_eq!(ask(&theirs, &told, Occasion::Opening), cut("A/2"));
            // What was announced from elsewhere says nothing of whoever holds the lock.
            let tool = seen(&me, "A/3", &alive);
            assert_eq!(ask(&tool, &me, Occasion::Opening), Decision::Held("A/2".into()));
        }
        // Announced, and no more: nothing is held.
        let early = Sight { announced: Some(claim(&me, "A/2")), ..Sight::default() };
        assert_eq!(decide(&early, &claimant("o", "c", "x"), OWN, Occasion::Opening), take(&[]));
    }

    #[test]
    fn two_machines_of_one_name_are_two_nodes() {
        let on = |machine: &str, boot: &str| Claimant {
            machine: machine.into(),
            ..claimant("n", boot, boot)
        };
        let refused = |claim: &Claim, who: &Claimant| {
            matches!(opening(Some(claim), None, who), Decision::Claimed(_))
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
    fn a_device_goes_on_only_where_nobody_else_came_in_between() {
        let me = Claimant { resumes: true, ..claimant("n", "b", "m") };
        let told = Claimant { take_over: true, ..me.clone() };
        let mut other = claim(&claimant("o", "c", "x"), "A/1");
        for released in [false, true] {
            other.released = released;
            for who in [&me, &told] {
                let decision = opening(Some(&other), None, who);
                assert_eq!(decision, Decision::Superseded(other.client.clone()));
            }
        }
        let mut own = claim(&me, "A/1");
        assert_eq!(opening(Some(&own), None, &me), take(&["A/1"]));
        own.released = true;
        assert_eq!(opening(Some(&own), None, &me), take(&[]));
        assert_eq!(opening(None, None, &me), take(&[]));
    }

    #[test]
    fn a_hand_over_cuts_nobody_off() {
        let me = Claimant { take_over: true, ..claimant("n", "b", "m") };
        let mut own = claim(&me, "A/1");
        let ask =
            |claim: &Claim, held| decide(&sight(Some(claim), held), &me, OWN, Occasion::HandOver);
        assert!(matches!(ask(&own, None), Decision::Claimed(_)));
        own.released = true;
        assert_eq!(ask(&own, None), take(&[]));
        let alive = holder("A/1", true);
        assert!(matches!(ask(&own, Some(&alive)), Decision::Claimed(_)), "it is not gone yet");
        let tool = holder("T/1", true);
        assert!(matches!(ask(&own, Some(&tool)), Decision::Held(_)));
        // What was let go of is taken back by the same client.
        let mine = claim(&me, OWN);
        assert_eq!(ask(&mine, None), take(&[]));
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
                let machine = String::new();
                Claimant { node, machine, boot_id, mapping_id, take_over, resumes, process }
            },
        )
    }

    fn any_address() -> impl Strategy<Value = String> {
        prop::sample::select(vec!["A/1", "B/2", OWN]).prop_map(String::from)
    }

    proptest! {
        #[test]
        fn nobody_writes_beside_a_living_client(
            claims in prop::option::of((any_claimant(), any_address(), any::<bool>())),
            announced in prop::option::of((any_claimant(), any_address())),
            holder in prop::option::of((any_address(), any::<bool>())),
            who in any_claimant(),
            hand_over: bool,
        ) {
            let claim = claims.map(|(of, address, released)| {
                let claim = claim(&of, &address);
                if released { claim.released() } else { claim }
            });
            let announced = announced.map(|(of, address)| self::claim(&of, &address));
            let holder = holder.map(|(address, alive)| Holder { address, alive });
            let occasion = if hand_over { Occasion::HandOver } else { Occasion::Opening };
            let sight = Sight { claim, announced, holder };
            let Decision::Take(cut) = decide(&sight, &who, OWN, occasion) else { return Ok(()) };
            let Sight { claim, announced, holder } = sight;
            prop_assert!(!cut.iter().any(|address| address == OWN), "nobody cuts itself off");
            let told = who.take_over && !hand_over;
            if let Some(claim) = &claim {
                let client = &claim.client;
                let standing = !claim.released && client.address != OWN;
                prop_assert!(!standing || cut.contains(&client.address), "a claim stands");
                prop_assert!(!standing || told || may_succeed(client, &who));
                let same = client.mapping_id == who.mapping_id;
                prop_assert!(same || !(who.resumes || hand_over), "a device sees another's writes");
            }
            if let Some(Holder { address, alive }) = &holder && address != OWN {
                prop_assert!(cut.contains(address), "the holder could write on");
                let claimed = claim.as_ref().is_some_and(|claim| claim.client.address == *address);
                let named = announced.as_ref().filter(|claim| claim.client.address == *address);
                let own = named.is_some_and(|claim| may_succeed(&claim.client, &who));
                prop_assert!(told || claimed || own || !alive, "a stranger was pushed aside");
            }
            prop_assert!(cut.is_empty() || !hand_over || holder.is_some_and(|h| !h.alive));
        }
    }
}
