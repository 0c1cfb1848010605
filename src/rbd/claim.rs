//! Who may write: the holder of the image's exclusive lock, who has written its claim before anything
//! else.
//!
//! The lock is taken and kept, not left to librbd's way of taking it with the first write and handing
//! it over when another client asks, under which two writers alternate. The lock alone keeps nobody
//! out who had it once: requests to the OSDs do not carry it. So whoever takes over first has the
//! cluster blocklist the address that the claim names (not what watches the image now, which may be
//! somebody else), and waits for that map; then it breaks the lock, announces its claim, acquires the
//! lock, looks whether the claim is still the one that was judged, and writes its own, one generation
//! on. A crash anywhere in between leaves what the next one begins with: a claim whose client is cut off
//! once more, or the lock of a client that is known by its announcement. Without that a holder that has
//! made no claim would be another tool's, and its dead client be waited for until the OSDs forget it.
//!
//! From the moment that the lock is ours, an OSD that we have spoken to refuses the loser; one that
//! has heard nothing may still take what was under way, until our first request brings it the map. So
//! what has once been read stays as it was.

pub(crate) mod decision;
pub(crate) mod header;
pub(crate) mod record;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use librbd::{Cluster, Image};

use crate::errors::later;
use cleat_backend::claimant::Claimant;
use cleat_core::error::{Error, ErrorKind, Result};
use decision::{Decision, Holder, Occasion, decide};
use header::{Header, ImageHeader};
use record::{Claim, Client};

/// How long a client stays cut off, unless the option says otherwise: as good as for ever. A client
/// that comes back after that would write.
pub(crate) const CUT_OFF_S: u32 = 5 * 365 * 24 * 3600;

/// The option, which librbd obeys, too, when it breaks the lock of a client that it takes for dead: it
/// never comes to that where we have looked at the lock just before, and in 16.2 fails with EINVAL then.
pub(crate) const CUT_OFF_OPTION: &str = "rbd_blocklist_expire_seconds";

/// Rivals that may come and go while we claim.
const MAX_ROUNDS: u32 = 3;

/// An image that is being claimed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Contest<'a, H> {
    pub(crate) header: &'a H,
    /// Of the image, for people.
    pub(crate) name: &'a str,
    pub(crate) claimant: &'a Claimant,
    pub(crate) occasion: Occasion,
    /// The clients that may be cut off; `None`: whoever has to be.
    pub(crate) only: Option<&'a [String]>,
}

impl<H: Header> Contest<'_, H> {
    /// Makes the image ours until it is released. `Ok(None)`: somebody else has had it since the
    /// mapping's last process, so that it must not be written to.
    pub(crate) fn acquire(&self) -> Result<Option<Claim>> {
        let Self { header, name, claimant, .. } = self;
        let id = header.id()?;
        let own = header.own_address()?;
        for _ in 0..MAX_ROUNDS {
            let sight = header.look()?;
            let cut = match decide(&sight, claimant, &own, self.occasion) {
                Decision::Take(cut) => cut,
                Decision::Claimed(client) => return Err(claimed(name, &client)),
                Decision::Held(address) => return Err(held(name, &address)),
                Decision::Superseded(client) => {
                    tracing::error!(image = name, "claimed by {}", client.describe());
                    return Ok(None);
                }
            };
            if let Some(other) = cut.iter().find(|cut| !self.may_cut_off(cut)) {
                return Err(held(name, other));
            }
            self.cut_off(&cut, sight.holder.as_ref())?;
            let last = sight.claim;
            let next = Claim::after(last.as_ref(), id.clone(), claimant, own.clone(), now(), &cut);
            // Nobody has the lock, or one that was faster and is alive: what another one announced is
            // not needed any more.
            header.announce(&next)?;
            if let Some(owner) = header.lock()? {
                return Err(self.outrun(&owner, last));
            }
            #[cfg(feature = "fault")]
            cleat_backend::crash_point("locked, not claimed");
            match self.write(last.as_ref(), &next) {
                Ok(true) => return Ok(Some(next)),
                Ok(false) => header.unlock()?,
                Err(error) => {
                    // The image may stay open, and its lock be needed by others.
                    if let Err(error) = header.unlock() {
                        let error = error.report();
                        tracing::warn!(image = name, %error, "the lock is not given back");
                    }
                    return Err(error);
                }
            }
        }
        let message = format!("others claim {name} at the same time");
        Err(Error::new(ErrorKind::Aborted, message).with_repair("try again"))
    }

    /// No request of theirs reaches an OSD that serves one of ours from here on.
    fn cut_off(&self, clients: &[String], holder: Option<&Holder>) -> Result<()> {
        for address in clients {
            tracing::warn!(image = self.name, client = address, "being cut off");
            self.header.cut_off(address)?;
        }
        match holder.filter(|holder| clients.contains(&holder.address)) {
            Some(holder) => self.header.break_lock(&holder.address),
            None => Ok(()),
        }
    }

    /// The error where somebody was faster.
    fn outrun(&self, owner: &str, last: Option<Claim>) -> Error {
        let known = last.filter(|last| last.client.address == owner);
        known.map_or_else(|| held(self.name, owner), |claim| claimed(self.name, &claim.client))
    }

    /// Under the lock: writes the claim, unless the last one is no longer what it was.
    fn write(&self, last: Option<&Claim>, next: &Claim) -> Result<bool> {
        if self.header.claim()?.as_ref() != last {
            return Ok(false);
        }
        self.header.write(next)?;
        Ok(true)
    }

    fn may_cut_off(&self, client: &String) -> bool {
        self.only.is_none_or(|only| only.contains(client))
    }
}

/// Says that `claim` is over, if it is still ours. The lock is as it was.
pub(crate) fn release(image: &Image, claim: &Claim, name: &str) -> Result<()> {
    let failed = |error| later(error, name);
    // Writing to the metadata would take a lock that we have lost.
    if !image.is_lock_owner().map_err(failed)? {
        return Ok(());
    }
    if !of(image, name)?.is_some_and(|now| now.is(claim)) {
        return Ok(());
    }
    ImageHeader { image, name }.write(&claim.released())
}

/// The claim of `image`.
pub(crate) fn of(image: &Image, name: &str) -> Result<Option<Claim>> {
    ImageHeader { image, name }.claim()
}

/// Has the cluster refuse a client, for as long as the configuration says.
pub(crate) fn cut_off(cluster: &Cluster, address: &str) -> Result<()> {
    let configured = cluster.option(CUT_OFF_OPTION).ok().and_then(|text| text.parse().ok());
    let seconds = configured.filter(|seconds| *seconds > 0).unwrap_or(CUT_OFF_S.into());
    cluster.blocklist_add(address, Duration::from_secs(seconds)).map_err(|error| {
        let kind = crate::errors::kind(&error);
        let failed = Error::new(kind, format!("the client {address} cannot be cut off"));
        let failed = failed.with_source(error);
        match kind {
            ErrorKind::TimedOut => failed.with_repair("see that the monitors can be reached"),
            _ => failed,
        }
    })
}

/// Seconds since the epoch.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

pub(crate) fn lockless(name: &str) -> Error {
    let message = format!("{name} has no exclusive lock, so a second writer could not be kept out");
    Error::new(ErrorKind::Unsupported, message).with_repair(format!(
        "rbd feature enable {name} exclusive-lock; or, where whatever uses the volume keeps its \
         writers apart by itself, lock=shared in the volume's options"
    ))
}

fn claimed(name: &str, client: &Client) -> Error {
    let message = format!("{name} is claimed by {}", client.describe());
    Error::new(ErrorKind::InUse, message).with_repair(
        "unmap it there, or map it read-only here; when nobody can say what that one still writes, \
         have it cut off: --take-over",
    )
}

fn held(name: &str, address: &str) -> Error {
    let message =
        format!("{name} is being written by the client at {address}, which has made no claim");
    Error::new(ErrorKind::InUse, message).with_repair(
        "end its use there first (rbd, rbd-nbd, qemu, …), or map it read-only here; the cluster \
         gives a client up that died about 30 s later; to have one cut off that lives: --take-over",
    )
}

#[cfg(test)]
mod tests;
