//! The claim of a volume: the text in the claim of an epoch that says which client has opened the volume.
//!
//! An epoch is claimed by creating one object, so of two clients that decide at the same time one gets it and the
//! other decides again. A client that was stopped between its decision and its claim gets an epoch that exists
//! already, and one that was stopped between its claim and the open finds a seal of a later client.

pub(crate) mod decision;
pub(crate) mod record;
#[cfg(test)]
mod round_trips;

use cleat_backend::claimant::Claimant;
use cleat_backend::uri::shown;
use cleat_core::clock::Clock;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_grants::record::Refusal;
use cleat_object::volume::{Failure, Newest, Place};

use crate::errors::failed;
use decision::{Decision, Lost, Purpose, decide};
use record::{Client, Owner, Seen, Use};

/// How often a claim is attempted when other clients claim the volume at the same time.
pub(crate) const MAX_ROUNDS: u32 = 3;

/// An attempt to claim a volume.
pub(crate) struct Attempt<'a> {
    pub(crate) place: &'a Place,
    /// The volume's name, for messages.
    pub(crate) name: &'a str,
    pub(crate) claimant: &'a Claimant,
    pub(crate) purpose: Purpose,
    /// What the claim is for.
    pub(crate) usage: Use,
    /// The epochs whose clients may be fenced. `None` permits every client that has to be fenced.
    pub(crate) only: Option<&'a [u64]>,
    pub(crate) clock: &'a dyn Clock,
}

/// Reads the newest claim of a volume.
///
/// # Errors
/// Returns the failure of the store.
pub(crate) async fn newest(place: &Place) -> std::result::Result<Seen, Failure> {
    let Newest { epoch, owner, is_released } = place.newest().await?;
    Ok(Seen { epoch, owner: owner.as_deref().and_then(Owner::read), is_released })
}

impl Attempt<'_> {
    /// Checks that the volume could be claimed now. Changes nothing.
    ///
    /// # Errors
    /// As [`Attempt::acquire`].
    pub(crate) async fn check(&self) -> Result<std::result::Result<(), Lost>> {
        let admitted = self.admit().await?;
        Ok(admitted.map(drop))
    }

    /// Claims the next epoch and returns it. The inner error means that another client may have written to the
    /// volume since this mapping's last process, so that this mapping must not use it any more.
    ///
    /// # Errors
    /// Returns `InUse` if another client has a claim, `Aborted` if other clients claim the volume at the same time,
    /// and otherwise the error of the store.
    pub(crate) async fn acquire(&self) -> Result<std::result::Result<u64, Lost>> {
        let failed = |failure| failed(self.name, failure);
        for _ in 0..MAX_ROUNDS {
            let seen = match self.admit().await? {
                Ok(seen) => seen,
                Err(lost) => return Ok(Err(lost)),
            };
            let epoch = seen.epoch + 1;
            let owner = Owner::after(&seen, self.claimant, self.usage, self.clock.unix_s());
            if self.place.claim(epoch, &owner.text()?).await.map_err(failed)? {
                return Ok(Ok(epoch));
            }
        }
        let message = format!("other clients claim {} at the same time", self.name);
        Err(Error::new(ErrorKind::Aborted, message).with_repair("repeat the command"))
    }

    /// Decides whether the volume may be claimed, and returns the newest claim.
    async fn admit(&self) -> Result<std::result::Result<Seen, Lost>> {
        let failed = |failure| failed(self.name, failure);
        if self.usage == Use::Serve && !self.place.is_pinned().await.map_err(failed)? {
            return Err(incomplete(ErrorKind::Unavailable, self.name));
        }
        let seen = newest(self.place).await.map_err(failed)?;
        // A clone that was used once has what it needs, whatever happens to the snapshot.
        if self.usage == Use::Serve
            && seen.epoch == 0
            && self.place.is_snapshot_deleted().await.map_err(failed)?
        {
            return Err(without_snapshot(self.name, self.place));
        }
        if self.usage != Use::Remove && seen.is_being_removed() {
            return Err(removed(self.name));
        }
        match decide(&seen, self.claimant, self.purpose) {
            Decision::Take => {}
            Decision::Claimed(client) => return Err(claimed(self.name, &client)),
            Decision::Unknown => return Err(unknown(self.name)),
            Decision::Refused(refusal) => {
                return Err(refused(self.name, &refusal, self.claimant.grant));
            }
            Decision::Lost(lost) => return Ok(Err(lost)),
        }
        if seen.is_held() && self.only.is_some_and(|only| !only.contains(&seen.epoch)) {
            return Err(unlisted(self.name, &seen));
        }
        Ok(Ok(seen))
    }
}

/// The error for a clone that its parent does not keep.
pub(crate) fn incomplete(kind: ErrorKind, name: &str) -> Error {
    let message = format!("the creation of the clone {name}, or its removal, was interrupted");
    Error::new(kind, message).with_repair("repeat the command that created or removed it")
}

/// The error for a clone that was never opened, and whose snapshot has a token of a deletion: it is deleted, or the writer
/// has not removed the token of an attempt that it has given up.
fn without_snapshot(name: &str, place: &Place) -> Error {
    let of = place.parent().map(|of| (shown(&of.location), shown(&of.snapshot.name)));
    let (parent, snapshot) = of.unwrap_or_default();
    let message = format!(
        "the clone {name} cannot be used: its snapshot {parent}@{snapshot} was deleted, or is being deleted"
    );
    Error::new(ErrorKind::Unavailable, message).with_repair(format!(
        "look with cleat volume snapshot ls whether {parent} still has the snapshot. If it has: repeat in a minute if a \
         client serves {parent}, otherwise run cleat volume fsck --repair for {parent}. If it has not: remove the clone \
         with cleat volume remove --now"
    ))
}

/// The error for a volume whose removal has begun.
pub(crate) fn removed(name: &str) -> Error {
    Error::new(ErrorKind::InUse, format!("{name} is being removed")).with_repair(
        "repeat cleat volume remove with --now, which continues; then create the volume again",
    )
}

fn claimed(name: &str, client: &Client) -> Error {
    Error::new(ErrorKind::InUse, format!("{name} is claimed by {}", client.describe())).with_repair(
        "unmap it there, or map it read-only here; to fence a client that may still write, use --take-over",
    )
}

fn refused(name: &str, refusal: &Refusal, grant: Option<u64>) -> Error {
    let (what, repair) = match grant {
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

fn unknown(name: &str) -> Error {
    let message = format!("{name} is claimed by a client that this build does not know");
    Error::new(ErrorKind::InUse, message)
        .with_repair("unmap it there, or use a newer build; to fence the client, use --take-over")
}

fn unlisted(name: &str, seen: &Seen) -> Error {
    let client = seen.owner.as_ref().map(|owner| owner.client.describe());
    let client = client.unwrap_or_else(|| "an unknown client".to_owned());
    let message = format!("{name} has been claimed meanwhile by {client}");
    Error::new(ErrorKind::InUse, message).with_repair("cleat fence ls shows the clients")
}
