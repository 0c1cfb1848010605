//! Seals the generation of a grant: cuts off the recorded client of a node, and writes a claim record in which no
//! client can claim with this generation any more.
//!
//! The steps are those of a takeover (see [`super`]), but only one client may be cut off: the client that the claim
//! of the node names, or that the node has announced. The record is written as released, in one write, so that a
//! crash never leaves a claim of the process that seals. A crash before this write leaves the old claim, and the
//! next process seals again; if the crashed one held the lock, only after the OSDs have dropped its watch (30 s).
//!
//! This is about the generation of a single writer; for the shared modes, see [`super::beside`].

use cleat_backend::claimant::Claimant;
#[cfg(feature = "fault")]
pub(super) use cleat_backend::crash_point;
use cleat_core::clock::Clock;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_grants::record::{FencePlan, Target};
use librbd::LockState;

use super::decision::{Holder, Liveness, Observation};
use super::header::Header;
use super::record::Claim;
use super::{MAX_ROUNDS, held, locked_by_hand};

/// A point at which tests end the process.
#[cfg(not(feature = "fault"))]
pub(super) fn crash_point(_: &str) {}

/// An attempt to seal the generation of a grant.
pub(crate) struct Seal<'a, H> {
    pub(crate) header: &'a H,
    /// The image's name, for messages.
    pub(crate) name: &'a str,
    /// The process that seals.
    pub(crate) claimant: &'a Claimant,
    pub(crate) target: &'a Target,
    /// The addresses on the blocklist: a seal names a client only as long as it is there.
    pub(crate) listed: &'a [String],
    pub(crate) clock: &'a dyn Clock,
}

impl<H: Header> Seal<'_, H> {
    /// Cuts off the client and seals the generation. Does nothing if the record has the seal, is ahead of the
    /// generation, or has the claim of another node.
    ///
    /// # Errors
    /// Returns `InUse` if another client holds the lock, `Aborted` if other clients claim the image at the same
    /// time, and otherwise the cluster's error.
    pub(crate) fn write(&self) -> Result<()> {
        let Self { header, name, claimant, target, .. } = self;
        let id = header.id()?;
        let own = header.own_address()?;
        for _ in 0..MAX_ROUNDS {
            let seen = header.observe()?;
            let record = seen.claim.as_ref().map(|claim| claim.record(self.listed));
            let record = record.unwrap_or_default();
            let FencePlan::Cut(recorded) = record.plan_fence(target) else { return Ok(()) };
            let holder = seen.holder.as_ref().filter(|holder| holder.address != own);
            let announced = holder.filter(|holder| self.is_announced(&seen, holder));
            if let Some(holder) = holder.filter(|holder| Some(&holder.address) != recorded.as_ref())
                && announced.is_none()
            {
                self.check_dead(holder)?;
            }
            let holder = holder.map(|holder| holder.address.clone());
            let mut cut: Vec<String> = recorded.iter().chain(&holder).cloned().collect();
            cut.dedup();
            for address in &cut {
                tracing::warn!(image = name, client = address, "fencing a client");
                header.fence(address, Liveness::MayLive)?;
                crash_point("cut off, not sealed");
            }
            let named = recorded.or_else(|| announced.map(|holder| holder.address.clone()));
            let last = seen.claim.as_ref();
            let next =
                Claim::next(last, id.clone(), claimant, own.clone(), self.clock.unix_s(), &cut)
                    .with_details(seen.announced.as_ref())
                    .sealed(&record.seal(target, named));
            header.announce(&next)?;
            crash_point("announced, not sealed");
            if let Some(holder) = &holder {
                header.break_lock(holder)?;
                crash_point("lock broken, not sealed");
            }
            if let Some(owner) = header.lock()? {
                return Err(held(name, &owner));
            }
            crash_point("locked, not sealed");
            let written = header.swap(last, &next, LockState::Own);
            crash_point("sealed, locked");
            if let Err(error) = header.unlock() {
                // Closing the image releases the lock, too.
                let error = error.report();
                tracing::warn!(image = name, %error, "cannot release the exclusive lock");
            }
            if written? {
                return Ok(());
            }
        }
        let message = format!("other clients claim {name} at the same time");
        Err(Error::new(ErrorKind::Aborted, message).with_repair("repeat the command"))
    }

    /// Returns whether the holder of the lock has announced a claim of the target's node for this generation or an
    /// earlier one. It has stopped before it wrote its claim.
    fn is_announced(&self, seen: &Observation, holder: &Holder) -> bool {
        let client = seen.announced.as_ref().map(|announced| &announced.client);
        client.is_some_and(|client| {
            client.address == holder.address
                && client.node == self.target.node
                && client.grant <= self.target.generation.0
        })
    }

    /// Checks that the holder of the lock, which is not a client of the target, has ended.
    fn check_dead(&self, holder: &Holder) -> Result<()> {
        if let Some(cookie) = &holder.made_by_hand {
            return Err(locked_by_hand(self.name, cookie));
        }
        if holder.alive { Err(held(self.name, &holder.address)) } else { Ok(()) }
    }
}
