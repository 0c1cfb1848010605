//! Who may write: the holder of the image's exclusive lock, who has written its claim before anything
//! else.
//!
//! The lock is taken and kept, not left to librbd's way of taking it with the first write and handing
//! it over when another client asks, under which two writers alternate. The lock alone keeps nobody
//! out who had it once: requests to the OSDs do not carry it. So whoever takes over first has the
//! cluster blocklist the address that the claim names (not what watches the image now, which may be
//! somebody else), and waits for that map; then it breaks the lock, acquires it, looks whether the
//! claim is still the one that was judged, and writes its own, one generation on. A crash anywhere in
//! between leaves what the next one begins with: a claim whose client is cut off once more.
//!
//! From the moment that the lock is ours, an OSD that we have spoken to refuses the loser; one that
//! has heard nothing may still take what was under way, until our first request brings it the map. So
//! what has once been read stays as it was.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use librbd::{Cluster, Image, RBD_FEATURE_EXCLUSIVE_LOCK};

use super::decision::{Decision, Holder, Occasion, decide};
use super::mirror::check_primary;
use super::problem::later;
use super::record::{Claim, Client, KEY};
use crate::backend::claimant::Claimant;
use crate::error::{Error, ErrorKind, Result};

/// How long a client stays cut off, unless the option says otherwise: as good as for ever. A client
/// that comes back after that would write.
pub(super) const CUT_OFF_S: u32 = 5 * 365 * 24 * 3600;

/// The option, which librbd obeys, too, when it breaks the lock of a client that it takes for dead: it
/// never comes to that where we have looked at the lock just before, and in 16.2 fails with EINVAL then.
pub(super) const CUT_OFF_OPTION: &str = "rbd_blocklist_expire_seconds";

/// Rivals that may come and go while we claim.
const MAX_ROUNDS: u32 = 3;

/// An image that is being claimed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Contest<'a> {
    pub(super) image: &'a Image,
    /// Of the image, for people.
    pub(super) name: &'a str,
    pub(super) claimant: &'a Claimant,
    pub(super) occasion: Occasion,
    /// The clients that may be cut off; `None`: whoever has to be.
    pub(super) only: Option<&'a [String]>,
}

impl Contest<'_> {
    /// Makes the image ours until it is released. `Ok(None)`: somebody else has had it since the
    /// mapping's last process, so that it must not be written to.
    pub(super) fn acquire(&self) -> Result<Option<Claim>> {
        let failed = |error| later(error, self.name);
        if self.image.features().map_err(failed)? & RBD_FEATURE_EXCLUSIVE_LOCK == 0 {
            return Err(lockless(self.name));
        }
        // Before anybody is cut off in vain.
        check_primary(self.image, self.name)?;
        let id = self.image.id().map_err(failed)?;
        let own = self.cluster().addresses().map_err(failed)?;
        for _ in 0..MAX_ROUNDS {
            let last = read(self.image, &id, self.name)?;
            let holder = holder(self.image).map_err(failed)?;
            let decision =
                decide(last.as_ref(), holder.as_ref(), self.claimant, &own, self.occasion);
            let cut = match decision {
                Decision::Take(cut) => cut,
                Decision::Claimed(client) => return Err(claimed(self.name, &client)),
                Decision::Held(address) => return Err(held(self.name, &address)),
                Decision::Superseded(client) => {
                    tracing::error!(image = self.name, "claimed by {}", client.describe());
                    return Ok(None);
                }
            };
            if let Some(other) = cut.iter().find(|cut| !self.may_cut_off(cut)) {
                return Err(held(self.name, other));
            }
            self.cut_off(&cut, holder.as_ref())?;
            self.lock(last.as_ref())?;
            let next =
                Claim::after(last.as_ref(), id.clone(), self.claimant, own.clone(), now(), &cut);
            match self.write(last.as_ref(), &id, &next) {
                Ok(true) => return Ok(Some(next)),
                Ok(false) => self.image.lock_release().map_err(failed)?,
                Err(error) => {
                    // The image may stay open, and its lock be needed by others.
                    if let Err(error) = self.image.lock_release() {
                        tracing::warn!(image = self.name, %error, "the lock is not given back");
                    }
                    return Err(error);
                }
            }
        }
        let message = format!("others claim {} at the same time", self.name);
        Err(Error::new(ErrorKind::Aborted, message).with_repair("try again"))
    }

    /// No request of theirs reaches an OSD that serves one of ours from here on.
    fn cut_off(&self, clients: &[String], holder: Option<&Holder>) -> Result<()> {
        for address in clients {
            tracing::warn!(image = self.name, client = address, "being cut off");
            cut_off(self.cluster(), address)?;
        }
        let Some(holder) = holder.filter(|holder| clients.contains(&holder.address)) else {
            return Ok(());
        };
        match self.image.lock_break(&holder.address) {
            // It has gone by itself.
            Err(error) if error.errno() == Some(libc::ENOENT) => Ok(()),
            broken => broken.map_err(|error| later(error, self.name)),
        }
    }

    fn lock(&self, last: Option<&Claim>) -> Result<()> {
        match self.image.lock_acquire() {
            Ok(()) => Ok(()),
            Err(error)
                if matches!(error.errno(), Some(libc::EROFS | libc::EBUSY | libc::EAGAIN)) =>
            {
                // Somebody was faster.
                let owners = self.image.lock_owners().unwrap_or_default();
                let owner = owners.first().map_or("an unknown address", String::as_str);
                let known = last.map(|last| &last.client).filter(|client| client.address == owner);
                let refusal = known
                    .map_or_else(|| held(self.name, owner), |client| claimed(self.name, client));
                Err(refusal.with_source(error))
            }
            Err(error) => Err(later(error, self.name)),
        }
    }

    /// Under the lock: writes the claim, unless the last one is no longer what it was.
    fn write(&self, last: Option<&Claim>, id: &str, next: &Claim) -> Result<bool> {
        if read(self.image, id, self.name)?.as_ref() != last {
            return Ok(false);
        }
        set(self.image, next, self.name)?;
        Ok(true)
    }

    fn may_cut_off(&self, client: &String) -> bool {
        self.only.is_none_or(|only| only.contains(client))
    }

    fn cluster(&self) -> &Cluster {
        self.image.pool().cluster()
    }
}

/// Says that `claim` is over, if it is still ours. The lock is as it was.
pub(super) fn release(image: &Image, claim: &Claim, name: &str) -> Result<()> {
    let failed = |error| later(error, name);
    // Writing to the metadata would take a lock that we have lost.
    if !image.is_lock_owner().map_err(failed)? {
        return Ok(());
    }
    if !of(image, name)?.is_some_and(|now| now.is(claim)) {
        return Ok(());
    }
    set(image, &claim.released(), name)
}

/// The claim of `image`.
pub(super) fn of(image: &Image, name: &str) -> Result<Option<Claim>> {
    let id = image.id().map_err(|error| later(error, name))?;
    read(image, &id, name)
}

/// The same, of an image whose id is `id`.
fn read(image: &Image, id: &str, name: &str) -> Result<Option<Claim>> {
    let text = image.metadata_get(KEY).map_err(|error| later(error, name))?;
    Claim::read(text.as_deref(), id, name)
}

/// Writes `claim`; the lock must be ours.
pub(super) fn set(image: &Image, claim: &Claim, name: &str) -> Result<()> {
    image.metadata_set(KEY, &claim.text()?).map_err(|error| later(error, name))
}

/// Who holds the lock.
pub(super) fn holder(image: &Image) -> librbd::Result<Option<Holder>> {
    let Some(locker) = image.lockers()?.into_iter().next() else { return Ok(None) };
    let address = locker.address;
    let alive = image.watchers()?.iter().any(|watcher| watcher.address == address);
    Ok(Some(Holder { address, alive }))
}

/// Has the cluster refuse a client, for as long as the configuration says.
pub(super) fn cut_off(cluster: &Cluster, address: &str) -> Result<()> {
    let configured = cluster.option(CUT_OFF_OPTION).ok().and_then(|text| text.parse().ok());
    let seconds = configured.filter(|seconds| *seconds > 0).unwrap_or(CUT_OFF_S.into());
    cluster.blocklist_add(address, Duration::from_secs(seconds)).map_err(|error| {
        let kind = super::problem::kind(&error);
        let failed = Error::new(kind, format!("the client {address} cannot be cut off"));
        let failed = failed.with_source(error);
        match kind {
            ErrorKind::PermissionDenied => failed.with_repair(
                "the key needs the right to add to the blocklist: ceph auth caps client.NAME mon \
                 'profile rbd' osd 'profile rbd pool=…'",
            ),
            ErrorKind::TimedOut => failed.with_repair("see that the monitors can be reached"),
            _ => failed,
        }
    })
}

/// Seconds since the epoch.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

fn lockless(name: &str) -> Error {
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
