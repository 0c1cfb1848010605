//! Decides whether a client may claim a volume: a pure function of the newest claim.
//!
//! A claim stands until its client has released it. The client of a claim that stands is fenced only by a mapping
//! that is entitled to replace it, or on an explicit `--take-over`. A wrong decision cannot damage the volume: the
//! earlier client is fenced before the later one writes. It can only stop a client that should have continued.

use std::fmt;

use cleat_backend::claimant::{Claimant, is_same_node};
use cleat_grants::record::Refusal;

use super::record::{Client, Seen};

/// The purpose of a claim attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Opening the volume, or ending its log.
    Open,
    /// A single change of a command, or the removal of the volume.
    Change,
    /// A handover: the previous process has released its claim for this client, so no client may be fenced.
    Handover,
}

/// The result of [`decide`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Decision {
    /// The client may claim the volume.
    Take,
    /// This other client has a claim that stands.
    Claimed(Client),
    /// A client has a claim that this build does not know.
    Unknown,
    /// The record of the grants does not admit the generation of the claimant's grant.
    Refused(Refusal),
    /// The mapping must not resume its device: data that its users have read may be outdated.
    Lost(Lost),
}

/// Why a mapping must not resume its device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Lost {
    /// The generation of its grant was fenced.
    Refused(Refusal),
    /// This client of another mapping has claimed the volume since.
    Claimed(Client),
    /// The claim of the mapping is missing, or a later one that this build does not know exists.
    NoClaim,
}

/// Prints the reason as the end of a sentence about the volume.
impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(refusal) => write!(f, "{refusal}"),
            Self::Claimed(client) => write!(f, "it was claimed by {}", client.describe()),
            Self::NoClaim => f.write_str("its claim is missing"),
        }
    }
}

/// Decides whether `claimant` may claim the volume.
pub(crate) fn decide(seen: &Seen, claimant: &Claimant, purpose: Purpose) -> Decision {
    let is_handover = purpose == Purpose::Handover;
    let refusal = seen.refusal(claimant);
    if claimant.resumes || is_handover {
        match &seen.owner {
            None => return Decision::Lost(Lost::NoClaim),
            Some(owner) if owner.client.mapping_id != claimant.mapping_id => {
                let claimed = || Lost::Claimed(owner.client.clone());
                let sealed = refusal.filter(|why| *why == Refusal::Sealed);
                return Decision::Lost(sealed.map_or_else(claimed, Lost::Refused));
            }
            Some(_) => {}
        }
    }
    if let Some(refusal) = refusal.filter(|_| !is_handover && !claimant.take_over) {
        return Decision::Refused(refusal);
    }
    if !seen.is_held() || claimant.take_over && !is_handover {
        return Decision::Take;
    }
    match &seen.owner {
        None => Decision::Unknown,
        Some(owner) if !is_handover && may_replace(&owner.client, claimant, purpose) => {
            Decision::Take
        }
        Some(owner) => Decision::Claimed(owner.client.clone()),
    }
}

/// Returns whether `claimant` is entitled to replace `client`. It is if the node of `client` was restarted. In the
/// same boot it is if `client` is of the same mapping (the supervisor has proved the end of the previous process)
/// or if the process of `client` has ended.
///
/// For a change, only processes without a supervisor are replaced. The next process of a mapping continues with the writes
/// that only its tail file has, and could not if a command had claimed the volume. And the calls of one process, which all
/// have its identity, may run at the same time.
fn may_replace(client: &Client, claimant: &Claimant, purpose: Purpose) -> bool {
    if client.boot_id.is_empty() || claimant.boot_id.is_empty() {
        return false;
    }
    if client.boot_id != claimant.boot_id {
        let here = (&*claimant.node, &*claimant.machine);
        return is_same_node((&client.node, &client.machine), here);
    }
    if purpose == Purpose::Change {
        return Claimant::is_alone(&client.mapping_id) && client.has_ended(claimant);
    }
    let same_mapping = client.mapping_id == claimant.mapping_id && !client.mapping_id.is_empty();
    same_mapping || client.has_ended(claimant)
}

#[cfg(test)]
mod tests {
    use cleat_backend::claimant::ProcessMark;
    use cleat_grants::object::{Generation, Mode};
    use cleat_grants::record::Target;

    use super::*;
    use crate::claim::record::{Owner, Use};

    fn claimant(node: &str, boot: &str, mapping: &str) -> Claimant {
        Claimant {
            node: node.into(),
            boot_id: boot.into(),
            mapping_id: mapping.into(),
            process: ProcessMark::own(),
            ..Claimant::default()
        }
    }

    const NEW: Seen = Seen { epoch: 0, owner: None, is_released: false };

    fn claimed(by: &Claimant, usage: Use) -> Seen {
        let owner = Owner::after(&NEW, by, usage, 7);
        let owner = Owner::read(&owner.text().unwrap()).expect("it was written by this build");
        Seen { epoch: owner.client.epoch, owner: Some(owner), is_released: false }
    }

    fn refused(seen: &Seen, claimant: &Claimant) -> bool {
        matches!(decide(seen, claimant, Purpose::Open), Decision::Claimed(_))
    }

    #[test]
    fn a_claim_that_stands_is_replaced_only_by_an_entitled_client() {
        let me = claimant("n", "b", "m");
        let seen = claimed(&me, Use::Serve);
        assert_eq!(decide(&seen, &me, Purpose::Open), Decision::Take, "the same mapping");
        let rebooted = claimant("n", "c", "x");
        assert_eq!(decide(&seen, &rebooted, Purpose::Open), Decision::Take, "a restarted node");
        let machine = |id: &str, of: &Claimant| Claimant { machine: id.into(), ..of.clone() };
        let on_one = claimed(&machine("1", &me), Use::Serve);
        assert!(refused(&on_one, &machine("2", &rebooted)), "another machine of the same name");
        for other in [claimant("o", "c", "m"), claimant("n", "b", "x"), Claimant::default()] {
            assert!(refused(&seen, &other), "{other:?}");
            let forced = Claimant { take_over: true, ..other };
            assert_eq!(decide(&seen, &forced, Purpose::Open), Decision::Take);
        }
        let ended = ProcessMark { pid: u32::MAX, ..ProcessMark::own().unwrap() };
        let dead = claimed(&Claimant { process: Some(ended), ..me }, Use::Serve);
        assert_eq!(decide(&dead, &claimant("n", "b", "x"), Purpose::Open), Decision::Take);
        assert!(refused(&dead, &claimant("o", "c", "x")), "a process of another machine");
    }

    #[test]
    fn a_command_replaces_only_an_ended_process_without_a_supervisor() {
        let ended = ProcessMark { pid: u32::MAX, ..ProcessMark::own().unwrap() };
        let by = |mapping: &str| {
            claimed(&Claimant { process: Some(ended), ..claimant("n", "b", mapping) }, Use::Serve)
        };
        let command = claimant("n", "b", "process-7-8");
        let of_command = |seen: &Seen| decide(seen, &command, Purpose::Change);
        let of_mapping = |seen: &Seen| decide(seen, &claimant("n", "b", "x"), Purpose::Open);
        assert!(matches!(of_command(&by("m")), Decision::Claimed(_)), "it has a tail file");
        assert_eq!(of_mapping(&by("m")), Decision::Take);
        assert_eq!(of_command(&by("process-1-2")), Decision::Take);
        let another_call = claimed(&command, Use::Serve);
        assert!(matches!(of_command(&another_call), Decision::Claimed(_)), "it may be running");
        let forced = Claimant { take_over: true, ..command.clone() };
        assert_eq!(decide(&by("m"), &forced, Purpose::Change), Decision::Take);
        let rebooted = Claimant { boot_id: "c".into(), ..command.clone() };
        assert_eq!(decide(&by("m"), &rebooted, Purpose::Change), Decision::Take);
    }

    #[test]
    fn a_generation_that_is_sealed_or_too_old_claims_nothing() {
        let granted = |generation| Claimant { grant: Some(generation), ..claimant("n", "b", "m") };
        let seen = claimed(&granted(3), Use::Serve);
        let record = seen.record();
        let target = |generation: u64| Target {
            node: "n".into(),
            generation: Generation(generation),
            mode: Mode::ReadWrite,
        };
        assert_eq!(record.claim_of("n").unwrap().client, "epoch-1");
        let refused = |seen: &Seen, generation| {
            matches!(decide(seen, &granted(generation), Purpose::Open), Decision::Refused(_))
        };
        assert!(refused(&seen, 2) && refused(&seen, 0) && !refused(&seen, 3));
        let by = claimant("controller", "c", "x");
        let owner = Owner::after(&seen, &by, Use::Fence, 7).sealed(&record.seal(&target(3), None));
        let owner = Owner::read(&owner.text().unwrap()).expect("it was written by this build");
        let mut fence = Seen { epoch: 2, owner: Some(owner), is_released: false };
        // The fence has not ended, so its client may still write.
        assert_eq!(fence.record().proof_of(&target(3)), None);
        assert_eq!(fence.record().claim_of("n").unwrap().client, "epoch-1");
        fence.is_released = true;
        assert!(fence.record().proof_of(&target(3)).is_some());
        assert!(refused(&fence, 3) && refused(&fence, 0) && !refused(&fence, 4));
        let resumes = Claimant { resumes: true, ..granted(3) };
        let lost = decide(&fence, &resumes, Purpose::Open);
        assert_eq!(lost, Decision::Lost(Lost::Refused(Refusal::Sealed)));
        // A command does not use the volume.
        assert_eq!(decide(&fence, &claimant("o", "d", "y"), Purpose::Open), Decision::Take);
        let next = claimed_after(&fence, &granted(4));
        assert!(refused(&next, 3), "the record outlives a claim");
    }

    fn claimed_after(seen: &Seen, by: &Claimant) -> Seen {
        let owner = Owner::after(seen, by, Use::Serve, 7);
        Seen { epoch: seen.epoch + 1, owner: Some(owner), is_released: false }
    }

    #[test]
    fn generic_and_empty_names_prove_nothing() {
        for name in ["localhost", "", "(none)"] {
            let seen = claimed(&claimant(name, "b", "m"), Use::Serve);
            assert!(refused(&seen, &claimant(name, "c", "x")), "{name}");
        }
        assert!(refused(&claimed(&Claimant::default(), Use::Serve), &Claimant::default()));
    }

    #[test]
    fn a_free_volume_is_taken_by_any_client() {
        let other = claimant("o", "c", "x");
        assert_eq!(decide(&NEW, &other, Purpose::Open), Decision::Take);
        let mut seen = claimed(&claimant("n", "b", "m"), Use::Serve);
        seen.is_released = true;
        assert_eq!(decide(&seen, &other, Purpose::Open), Decision::Take);
        let fenced = claimed(&claimant("n", "b", "m"), Use::Fence);
        assert_eq!(decide(&fenced, &other, Purpose::Open), Decision::Take);
    }

    #[test]
    fn a_mapping_with_a_device_resumes_only_on_its_own_claim() {
        let me = Claimant { resumes: true, ..claimant("n", "b", "m") };
        let forced = Claimant { take_over: true, ..me.clone() };
        for usage in [Use::Serve, Use::Fence] {
            for is_released in [false, true] {
                let other = Seen { is_released, ..claimed(&claimant("o", "c", "x"), usage) };
                for claimant in [&me, &forced] {
                    let decision = decide(&other, claimant, Purpose::Open);
                    assert!(matches!(decision, Decision::Lost(Lost::Claimed(_))), "{decision:?}");
                }
                let own = Seen { is_released, ..claimed(&me, usage) };
                assert_eq!(decide(&own, &me, Purpose::Open), Decision::Take);
            }
        }
        let unknown = Seen { epoch: 3, owner: None, is_released: false };
        assert_eq!(decide(&unknown, &me, Purpose::Open), Decision::Lost(Lost::NoClaim));
        assert_eq!(decide(&NEW, &me, Purpose::Open), Decision::Lost(Lost::NoClaim));
    }

    #[test]
    fn a_handover_needs_the_release_of_the_own_mapping() {
        let me = Claimant { take_over: true, ..claimant("n", "b", "m") };
        let mut own = claimed(&me, Use::Serve);
        assert!(matches!(decide(&own, &me, Purpose::Handover), Decision::Claimed(_)));
        own.is_released = true;
        assert_eq!(decide(&own, &me, Purpose::Handover), Decision::Take);
        let other = claimed(&claimant("o", "c", "x"), Use::Serve);
        assert!(matches!(decide(&other, &me, Purpose::Handover), Decision::Lost(_)));
    }

    #[test]
    fn a_claim_of_another_version_is_unknown_and_only_forced() {
        let text = claimed(&claimant("n", "b", "m"), Use::Serve).owner.unwrap().text().unwrap();
        for wrong in [
            text.replace("\"version\":1", "\"version\":3"),
            text.replace("\"serve\"", "\"other\""),
            text.replace("\"n\"", &format!("{:?}", "n".repeat(300))),
            "{}".to_owned(),
            String::new(),
        ] {
            assert_eq!(Owner::read(&wrong), None, "{wrong}");
        }
        let unknown = Seen { epoch: 3, owner: None, is_released: false };
        let other = claimant("o", "c", "x");
        assert_eq!(decide(&unknown, &other, Purpose::Open), Decision::Unknown);
        let forced = Claimant { take_over: true, ..other };
        assert_eq!(decide(&unknown, &forced, Purpose::Open), Decision::Take);
    }

    #[test]
    fn a_record_names_the_clients_that_were_fenced_and_forgets_old_ones() {
        let mut seen = NEW;
        for number in 0..40 {
            let owner =
                Owner::after(&seen, &claimant("n", "b", &number.to_string()), Use::Serve, 0);
            seen = Seen { epoch: seen.epoch + 1, owner: Some(owner), is_released: false };
        }
        let owner = seen.owner.clone().unwrap();
        assert_eq!(owner.fenced.len(), 16);
        assert_eq!((owner.fenced[0].epoch, &*owner.fenced[0].mapping_id), (39, "38"));
        assert!(owner.text().unwrap().len() < cleat_object::codec::MAX_OWNER_BYTES / 2);
        seen.is_released = true;
        let next = Owner::after(&seen, &claimant("n", "b", "x"), Use::Serve, 0);
        assert_eq!(next.fenced[0].epoch, 39, "the last one was not fenced");
    }
}
