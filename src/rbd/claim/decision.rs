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
//!
//! [`decide`] is about a claim as the only writer, and [`decide_beside`] about a shared claim. Neither is admitted
//! while another node has a claim of the other kind, and readers and writers do not share an image either.

use std::fmt;
use std::ops::ControlFlow;

use super::record::{Claim, Client};
use cleat_backend::claimant::{Claimant, is_same_node};
use cleat_grants::object::Mode;
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
    let refusal = claim.and_then(|claim| claim.refusal(claimant, Mode::ReadWrite));
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
    let shared = claim.iter().flat_map(|claim| claim.active_shared());
    for client in shared.map(|shared| &shared.client).filter(|client| client.address != own) {
        let entitled = purpose == Purpose::Open && may_replace(client, claimant, seen);
        if !(forced || entitled) {
            return Decision::Claimed(client.clone());
        }
        if !rivals.contains(&client.address) {
            rivals.push(client.address.clone());
        }
    }
    match other_holder(seen, claimant, own, purpose, &rivals) {
        ControlFlow::Continue(holder) => rivals.extend(holder),
        ControlFlow::Break(refused) => return refused,
    }
    Decision::Take(rivals)
}

/// Decides whether `claimant`, whose client has the address `own`, may claim the image in `mode` beside other nodes
/// with the same mode. [`Decision::Take`] has the clients to fence: the last one of this node, and dead holders of the
/// lock. A claim of another node is never taken over, also not on `--take-over`: the controller fences it.
pub(crate) fn decide_beside(
    seen: &Observation,
    claimant: &Claimant,
    mode: Mode,
    own: &str,
    purpose: Purpose,
) -> Decision {
    let claim = seen.claim.as_ref();
    let shared = || claim.iter().flat_map(|claim| &claim.shared);
    let resumes = claimant.resumes || purpose == Purpose::Handover;
    if let Some(refusal) = claim.and_then(|claim| claim.refusal(claimant, mode)) {
        return match resumes {
            true => Decision::Lost(Lost::Refused(refusal)),
            false => Decision::Refused(refusal),
        };
    }
    // A single writer has removed the last claim of the mapping, or it was fenced.
    if resumes && !shared().any(|known| known.client.mapping_id == claimant.mapping_id) {
        return Decision::Lost(Lost::NoClaim);
    }
    let alone = claim.filter(|claim| !claim.released).map(|claim| &claim.client);
    let conflicts =
        |other: &Client, theirs: Mode| other.node == claimant.node || !theirs.is_compatible(mode);
    let others = claim.iter().flat_map(|claim| claim.active_shared());
    let others = others.filter(|other| conflicts(&other.client, other.mode));
    let others = alone.into_iter().chain(others.map(|other| &other.client));
    let mut rivals = Vec::new();
    for client in others.filter(|client| client.address != own) {
        if purpose == Purpose::Handover || !may_replace(client, claimant, seen) {
            return Decision::Claimed(client.clone());
        }
        rivals.push(client.address.clone());
    }
    // Writers that share an image pass its lock on. One that has released its claim may still have the lock.
    let is_partner = |holder: &&Holder| {
        let mut writers = shared().filter(|known| known.mode == Mode::SharedReadWrite);
        mode == Mode::SharedReadWrite && writers.any(|known| known.client.address == holder.address)
    };
    if seen.holder.as_ref().filter(is_partner).is_some() {
        return Decision::Take(rivals);
    }
    let claimant = &Claimant { take_over: false, ..claimant.clone() };
    match other_holder(seen, claimant, own, purpose, &rivals) {
        ControlFlow::Continue(holder) => rivals.extend(holder),
        ControlFlow::Break(refused) => return refused,
    }
    Decision::Take(rivals)
}

/// Returns the address of the client that holds the lock if `claimant` may break it; `None` if there is none beside
/// this client and `rivals`. Breaks off with the decision if it may not.
fn other_holder(
    seen: &Observation,
    claimant: &Claimant,
    own: &str,
    purpose: Purpose,
    rivals: &[String],
) -> ControlFlow<Decision, Option<String>> {
    let Some(Holder { address, alive, made_by_hand }) = &seen.holder else {
        return ControlFlow::Continue(None);
    };
    if address == own || rivals.contains(address) {
        return ControlFlow::Continue(None);
    }
    let forced = claimant.take_over && purpose == Purpose::Open;
    if let Some(cookie) = made_by_hand.as_ref().filter(|_| !forced) {
        return ControlFlow::Break(Decision::LockedByHand(cookie.clone()));
    }
    let announcer = seen.announcer(address);
    // The announcer died or is stopped between its announcement and writing its claim.
    let entitled = purpose == Purpose::Open
        && announcer.is_some_and(|client| may_replace(client, claimant, seen));
    if *alive && !forced && !entitled {
        let held = || Decision::Held(address.clone());
        let claimed = |client: &Client| Decision::Claimed(client.clone());
        return ControlFlow::Break(announcer.map_or_else(held, claimed));
    }
    ControlFlow::Continue(Some(address.clone()))
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
        let refusal = claim.refusal(claimant, Mode::ReadWrite);
        let refusal = refusal.filter(|why| *why == Refusal::Sealed);
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
///
/// Readers never watch an image. A reader on another machine with the same name and machine id therefore looks like one
/// whose node was restarted.
pub(crate) fn may_replace(client: &Client, claimant: &Claimant, seen: &Observation) -> bool {
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
    let clients = records.flat_map(|record| record.clients());
    let mut own = clients.filter(|client| client.address == address);
    match own.any(|client| may_replace(client, claimant, seen)) {
        true => Liveness::Ended,
        false => Liveness::MayLive,
    }
}

#[cfg(test)]
mod tests;
