//! Claims: a record in the image's metadata that says which client may write to the image. A client
//! writes its claim while it holds the image's exclusive lock, and before it writes anything else.
//!
//! The lock is acquired explicitly and kept. By default librbd acquires it with the first write and
//! passes it on when another client requests it, so that two writers alternate. The lock alone does not
//! stop a client that once held it, because requests to the OSDs do not carry the lock. A takeover
//! therefore has these steps:
//!
//! 1. Have the cluster blocklist the address that the claim names, and wait for that OSD map. The client
//!    that watches the image now may be a different one. The entry is short-lived if the client has ended.
//! 2. Announce the new claim under a second metadata key.
//! 3. Break the lock.
//! 4. Acquire the lock.
//! 5. Write the new claim with the next generation, if the claim has not changed since the decision. The OSD checks
//!    this, and that the client holds the lock, in the same step.
//!
//! A crash between two steps leaves a state in which the next client can start again: either a claim whose
//! client is blocklisted once more, or a lock whose holder is identified by its announcement. Without the
//! announcement, a lock holder without a claim would be treated as another tool's client, and the
//! takeover would have to wait until the OSDs drop the dead client's watch. And a mapping with a device
//! could not distinguish a lock that its own last process had broken from one that someone else broke: it
//! would not resume. The announcement comes after the blocklisting, since it entitles the next process of
//! the mapping to fence the clients that it names.
//!
//! Once this client has the lock, every OSD that it has contacted refuses the previous client. Any other
//! OSD may still execute requests of the previous client that were in flight, until the first request of
//! this client brings it the new map. Data that this client has read once therefore does not change.

pub(crate) mod beside;
pub(crate) mod decision;
pub(crate) mod header;
pub(crate) mod record;
pub(crate) mod seal;

use std::time::Duration;

use librbd::{Cluster, Image, LockState};

use crate::errors::image_error;
use cleat_backend::claimant::Claimant;
use cleat_core::clock::Clock;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_grants::record::Refusal;
use decision::{Decision, Liveness, Lost, Purpose, decide, liveness};
use header::{Header, ImageHeader};
use record::{Claim, Client};

/// How long a client that may live stays on the blocklist unless the option says otherwise, in seconds: five
/// years. A client that resumes after that could write again.
pub(crate) const BLOCKLIST_S: u32 = 5 * 365 * 24 * 3600;

/// How long a client that has ended stays on the blocklist at most, in seconds. Only requests that it sent before
/// may still arrive. Crashes are frequent, and every OSD and every client gets the whole list with each map.
const ENDED_BLOCKLIST_S: u64 = 3600;

/// An entry that ends within this is one of a client that has ended, in seconds: more than the time for such a client and a
/// difference of clocks.
pub(crate) const SOON_S: i64 = 6 * 3600;

/// The shortest time for a client that may live, in seconds, so that its entry is told from that of an ended one.
const MIN_BLOCKLIST_S: u64 = 24 * 3600;

/// The option of Ceph for this duration. librbd uses it, too, when it breaks the lock of a client that it
/// considers dead. That does not happen here, because the lock is checked just before. In 16.2 it would
/// fail with EINVAL.
pub(crate) const BLOCKLIST_OPTION: &str = "rbd_blocklist_expire_seconds";

/// How often a claim is attempted when other clients change the claim at the same time.
const MAX_ROUNDS: u32 = 3;

/// An attempt to claim an image.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ClaimAttempt<'a, H> {
    pub(crate) header: &'a H,
    /// The image's name, for messages.
    pub(crate) name: &'a str,
    pub(crate) claimant: &'a Claimant,
    pub(crate) purpose: Purpose,
    /// The addresses of the clients that may be fenced. `None` permits every client that has to be
    /// fenced.
    pub(crate) only: Option<&'a [String]>,
    pub(crate) clock: &'a dyn Clock,
}

impl<H: Header> ClaimAttempt<'_, H> {
    /// Claims the image and keeps its lock. The inner error means that another client may have written to
    /// the image since this mapping's last process, so that this mapping must not use it any more.
    ///
    /// # Errors
    /// Returns `InUse` if another client has a claim or the lock, `Aborted` if other clients claim the
    /// image at the same time, and otherwise the cluster's error.
    pub(crate) fn acquire(&self) -> Result<Result<Claim, Lost>> {
        let Self { header, name, claimant, .. } = self;
        let id = header.id()?;
        let own = header.own_address()?;
        for _ in 0..MAX_ROUNDS {
            let seen = header.observe()?;
            let rivals = match self.rivals(decide(&seen, claimant, &own, self.purpose))? {
                Ok(rivals) => rivals,
                Err(lost) => {
                    self.fence_predecessor(seen.claim.as_ref(), &own)?;
                    return Ok(Err(lost));
                }
            };
            for address in &rivals {
                self.fence(address, liveness(&seen, claimant, address))?;
            }
            let (last, now_s) = (seen.claim, self.clock.unix_s());
            let next =
                Claim::after(last.as_ref(), id.clone(), claimant, own.clone(), now_s, &rivals)
                    .with_details(seen.announced.as_ref());
            // This replaces an earlier announcement. If that one identified the holder of the lock, this one
            // names the holder as fenced.
            header.announce(&next)?;
            if let Some(holder) = seen.holder.filter(|holder| rivals.contains(&holder.address))
                && !header.break_lock(&holder.address)?
                && self.lost_lock(last.as_ref(), &holder.address)?
            {
                return Ok(Err(Lost::NoLock));
            }
            if let Some(owner) = header.lock()? {
                return Err(self.lost_race(&owner, last));
            }
            #[cfg(feature = "fault")]
            cleat_backend::crash_point("locked, not claimed");
            match header.swap(last.as_ref(), &next, LockState::Own) {
                Ok(true) => return Ok(Ok(next)),
                Ok(false) => header.unlock()?,
                Err(error) => {
                    // The image may stay open while other clients need its lock.
                    if let Err(error) = header.unlock() {
                        let error = error.report();
                        tracing::warn!(image = name, %error, "cannot release the exclusive lock");
                    }
                    return Err(error);
                }
            }
        }
        let message = format!("other clients claim {name} at the same time");
        Err(Error::new(ErrorKind::Aborted, message).with_repair("repeat the command"))
    }

    /// Returns the clients that a decision has this attempt fence. The inner error means that the mapping has lost the
    /// image.
    ///
    /// # Errors
    /// Returns the error of a decision against the claim, and `InUse` if a client must not be fenced.
    pub(crate) fn rivals(&self, decision: Decision) -> Result<Result<Vec<String>, Lost>> {
        let Self { name, claimant, .. } = self;
        let rivals = match decision {
            Decision::Take(rivals) => rivals,
            Decision::Claimed(client) => return Err(claimed(name, &client)),
            Decision::Held(address) => return Err(held(name, &address)),
            Decision::Refused(refusal) => return Err(refused(name, claimant, &refusal)),
            Decision::LockedByHand(cookie) => return Err(locked_by_hand(name, &cookie)),
            Decision::Lost(lost) => return Ok(Err(lost)),
        };
        match rivals.iter().find(|rival| !self.may_fence(rival)) {
            Some(other) => Err(held(name, other)),
            None => Ok(Ok(rivals)),
        }
    }

    /// Fences the client at `address`. After this, an OSD that has served a request of this client serves none
    /// of the fenced one's.
    pub(crate) fn fence(&self, address: &str, liveness: Liveness) -> Result<()> {
        tracing::warn!(image = self.name, client = address, ?liveness, "fencing a client");
        self.header.fence(address, liveness)
    }

    /// Fences the last process of a mapping that has lost the image. Its end is proved, but requests that it
    /// has sent may still take effect, and a forced unmap relies on an open after which none does.
    fn fence_predecessor(&self, claim: Option<&Claim>, own: &str) -> Result<()> {
        let active = claim.filter(|claim| !claim.released && self.purpose == Purpose::Open);
        let last = active.map(|claim| &claim.client);
        let last = last.filter(|last| last.mapping_id == self.claimant.mapping_id);
        last.filter(|last| last.address != own)
            .map_or(Ok(()), |last| self.fence(&last.address, Liveness::Ended))
    }

    /// Returns whether another client has broken the lock of the mapping's last claim since the decision, at
    /// which the client at `holder` had it. That client gives up the lock only after it has released its claim.
    fn lost_lock(&self, last: Option<&Claim>, holder: &str) -> Result<bool> {
        let own = last.is_some_and(|last| last.client.address == holder && !last.released);
        Ok(own && self.claimant.resumes && self.header.claim()?.as_ref() == last)
    }

    /// Returns the error for a lock that the client at `owner` has acquired in the meantime.
    fn lost_race(&self, owner: &str, last: Option<Claim>) -> Error {
        let known = last.filter(|last| last.client.address == owner);
        known.map_or_else(|| held(self.name, owner), |claim| claimed(self.name, &claim.client))
    }

    fn may_fence(&self, client: &String) -> bool {
        self.only.is_none_or(|only| only.contains(client))
    }
}

/// Marks `claim` as released if it is still the image's claim and this client holds the lock. Does not
/// release the lock. A shared claim needs no lock; no request may be in flight then.
pub(crate) fn release(image: &Image, claim: &Claim, name: &str) -> Result<()> {
    let header = ImageHeader { image, name };
    if claim.is_shared() {
        return beside::leave(&header, name, &claim.client);
    }
    // A client without the lock has lost the image, or is about to release nothing.
    if !image.is_lock_owner().map_err(|error| image_error(error, name))? {
        return Ok(());
    }
    let now = header.claim()?;
    let Some(now) = now.filter(|now| now.is_same(claim)) else { return Ok(()) };
    header.swap(Some(&now), &claim.released(), LockState::Own).map(drop)
}

/// Reads the claim of `image`.
pub(crate) fn of(image: &Image, name: &str) -> Result<Option<Claim>> {
    ImageHeader { image, name }.claim()
}

/// Has the cluster blocklist a client: for the time that the configuration says, or for at most an hour if the
/// client has ended.
///
/// # Errors
/// Returns `InvalidArgument` for an address that stands for several clients, and the cluster's error.
pub(crate) fn fence_client(cluster: &Cluster, address: &str, liveness: Liveness) -> Result<()> {
    if !record::is_address(address) {
        let message = format!("cannot fence {address:?}: it is not the address of one client");
        return Err(Error::new(ErrorKind::InvalidArgument, message));
    }
    let configured = cluster.option(BLOCKLIST_OPTION).ok().and_then(|text| text.parse().ok());
    let seconds: u64 = configured.filter(|seconds| *seconds > 0).unwrap_or(BLOCKLIST_S.into());
    let seconds = match liveness {
        Liveness::Ended => seconds.min(ENDED_BLOCKLIST_S),
        Liveness::MayLive => seconds.max(MIN_BLOCKLIST_S),
    };
    cluster.blocklist_add(address, Duration::from_secs(seconds)).map_err(|error| {
        let kind = crate::errors::kind(&error);
        let failed = Error::new(kind, format!("cannot fence the client {address}"));
        let failed = failed.with_source(error);
        match kind {
            ErrorKind::TimedOut => failed.with_repair("check that the monitors can be reached"),
            _ => failed,
        }
    })
}

pub(crate) fn no_exclusive_lock(name: &str) -> Error {
    let message = format!("{name} has no exclusive lock, so a second writer cannot be prevented");
    Error::new(ErrorKind::Unsupported, message).with_repair(format!(
        "rbd feature enable {name} exclusive-lock; if the applications that use the volume coordinate \
         their writes themselves, add lock=shared to the volume's options instead"
    ))
}

pub(crate) fn claimed(name: &str, client: &Client) -> Error {
    let message = format!("{name} is claimed by {}", client.describe());
    Error::new(ErrorKind::InUse, message).with_repair(
        "unmap it there, or map it read-only here; to fence a client that may still write, use \
         --take-over",
    )
}

/// Returns the error for a claim with a generation that the record does not admit.
pub(crate) fn refused(name: &str, claimant: &Claimant, refusal: &Refusal) -> Error {
    let (what, repair) = match claimant.grant {
        None | Some(0) => (
            "without a grant".to_owned(),
            "it is a volume of Kubernetes: use it in a pod; to take it from the cluster, use --take-over",
        ),
        Some(grant) => {
            (format!("with generation {grant}"), "the controller grants a newer generation")
        }
    };
    let message = format!("cannot claim {name} {what}: {refusal}");
    Error::new(ErrorKind::InUse, message).with_repair(repair)
}

fn held(name: &str, address: &str) -> Error {
    let message =
        format!("{name} is being written by the client at {address}, which has made no claim");
    Error::new(ErrorKind::InUse, message).with_repair(
        "end its use there first (rbd, rbd-nbd, qemu, …), or map it read-only here; the cluster \
         drops a dead client about 30 s later; to fence a live client, use --take-over",
    )
}

fn locked_by_hand(name: &str, cookie: &str) -> Error {
    let message = format!("{name} was locked with the id {cookie:?} (rbd lock add)");
    Error::new(ErrorKind::InUse, message).with_repair(format!(
        "find out why, then: rbd lock ls {name}; rbd lock rm {name} ID LOCKER; or break the lock with \
         --take-over"
    ))
}

#[cfg(test)]
mod tests;
