//! Shared claims: those of several nodes that write to an image at the same time, or read it.
//!
//! No client keeps the image's lock for a shared claim: librbd passes it from writer to writer, and readers have none.
//! A change of the record is one step of the OSD with the record, which compares the record with the one that the
//! change was decided from (`Image::metadata_swap`). So two nodes cannot lose each other's claim, and neither can a
//! single writer, whose claim is written in the same way. A change has these steps:
//!
//! 1. Have the cluster blocklist the clients whose claims the change removes, and wait for that OSD map.
//! 2. Read the record, the lock and the watchers again: a client that is fenced now may have acquired the lock
//!    meanwhile, and cannot after this.
//! 3. Break the lock if such a client holds it.
//! 4. Write the record, if it has not changed. If it has, begin again.
//!
//! A crash between two steps leaves the old record, with clients that may be blocklisted already. The next change
//! begins with the first step. The first shared claim also requires that no client holds the lock: a build that does
//! not know shared claims checks the record while it holds the lock, and then writes it.
//!
//! The client of a shared claim reads and writes data only after the record has its claim. It releases the claim when
//! none of its requests is in flight.

use cleat_backend::claimant::Claimant;
use cleat_core::clock::Clock;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_grants::object::Mode;
use cleat_grants::record::FencePlan;
use librbd::LockState;

use super::decision::{Liveness, Lost, Observation, Purpose, decide_beside, liveness, may_replace};
use super::header::Header;
use super::record::{Claim, Client, MAX_SHARED};
use super::seal::{Seal, crash_point};
use super::{ClaimAttempt, claimed};

/// How often a change is attempted when other clients change the record at the same time. Each failed attempt means
/// that one of them has succeeded.
const MAX_ROUNDS: u32 = 256;

impl<H: Header> ClaimAttempt<'_, H> {
    /// Claims the image in `mode`, beside other nodes. The inner error is as that of [`ClaimAttempt::acquire`].
    ///
    /// # Errors
    /// Returns `InUse` if a client has a claim that does not admit this one, or the lock; `Aborted` if other clients
    /// change the record at the same time; and otherwise the cluster's error.
    pub(crate) fn acquire_beside(&self, mode: Mode) -> Result<Result<Claim, Lost>> {
        let Self { header, name, claimant, .. } = self;
        let id = header.id()?;
        let own = header.own_address()?;
        let mut fenced: Vec<String> = Vec::new();
        for _ in 0..MAX_ROUNDS {
            let seen = header.observe()?;
            let decision = decide_beside(&seen, claimant, mode, &own, self.purpose);
            let rivals = match self.rivals(decision)? {
                Ok(rivals) => rivals,
                Err(lost) => {
                    self.fence_last_shared(&seen, &own)?;
                    return Ok(Err(lost));
                }
            };
            if fence_new(*header, name, &rivals, &mut fenced, |address| {
                liveness(&seen, claimant, address)
            })? {
                continue;
            }
            break_lock_of(*header, &seen, &rivals)?;
            crash_point("cut off, not claimed");
            let (last, now_s) = (seen.claim.as_ref(), self.clock.unix_s());
            let next = Claim::next(last, id.clone(), claimant, own.clone(), now_s, &rivals);
            let next = next.beside(mode).ok_or_else(|| too_many(name))?;
            let is_first = last.is_none_or(|last| last.active_shared().next().is_none());
            let is_free = seen.holder.as_ref().is_none_or(|held| rivals.contains(&held.address));
            let lock = if is_first && is_free { LockState::Free } else { LockState::Any };
            if header.swap(last, &next, lock)? {
                return Ok(Ok(next));
            }
        }
        Err(changing(name))
    }

    /// Fences the last process of a mapping that has lost the image, as it is done for a single writer.
    fn fence_last_shared(&self, seen: &Observation, own: &str) -> Result<()> {
        let shared = seen.claim.iter().flat_map(|claim| claim.active_shared());
        let last = shared
            .map(|shared| &shared.client)
            .find(|client| client.mapping_id == self.claimant.mapping_id && client.address != own);
        let last = last.filter(|_| self.purpose == Purpose::Open);
        last.map_or(Ok(()), |last| self.fence(&last.address, Liveness::Ended))
    }
}

impl<H: Header> Seal<'_, H> {
    /// Cuts off the client of the target, which has a shared mode, and seals its generation, as [`Seal::write`] does.
    ///
    /// # Errors
    /// As [`Seal::write`]; the lock does not matter.
    pub(crate) fn write_beside(&self) -> Result<()> {
        let Self { header, name, claimant, target, .. } = self;
        let id = header.id()?;
        let own = header.own_address()?;
        let mut fenced = Vec::new();
        for _ in 0..MAX_ROUNDS {
            let seen = header.observe()?;
            let record = seen.claim.as_ref().map(|claim| claim.record(self.listed));
            let record = record.unwrap_or_default();
            let FencePlan::Cut(recorded) = record.plan_fence(target) else { return Ok(()) };
            let cut: Vec<String> = recorded.iter().cloned().collect();
            if fence_new(*header, name, &cut, &mut fenced, |_| Liveness::MayLive)? {
                crash_point("cut off, not sealed");
                continue;
            }
            break_lock_of(*header, &seen, &cut)?;
            let (last, now_s) = (seen.claim.as_ref(), self.clock.unix_s());
            let next = Claim::next(last, id.clone(), claimant, own.clone(), now_s, &cut)
                .with_details(seen.announced.as_ref())
                .sealed(&record.seal(target, recorded));
            if header.swap(last, &next, LockState::Any)? {
                crash_point("sealed, shared");
                return Ok(());
            }
        }
        Err(changing(name))
    }
}

/// The removal of the shared claim of one client.
pub(crate) struct Eviction<'a, H> {
    pub(crate) header: &'a H,
    /// The image's name, for messages.
    pub(crate) name: &'a str,
    /// The process that removes the claim.
    pub(crate) claimant: &'a Claimant,
    pub(crate) address: &'a str,
    pub(crate) clock: &'a dyn Clock,
}

impl<H: Header> Eviction<'_, H> {
    /// Fences the client and removes its shared claim. Does nothing if it has none.
    ///
    /// # Errors
    /// Returns `InUse` if it is not proved that the client has ended, unless the claimant takes over; and otherwise as
    /// [`ClaimAttempt::acquire_beside`].
    pub(crate) fn run(&self) -> Result<()> {
        let Self { header, name, claimant, address, .. } = self;
        let id = header.id()?;
        let own = header.own_address()?;
        let mut fenced = Vec::new();
        for _ in 0..MAX_ROUNDS {
            let seen = header.observe()?;
            let Some(last) = &seen.claim else { return Ok(()) };
            let mut shared = last.active_shared().map(|shared| &shared.client);
            let Some(client) = shared.find(|client| client.address == *address) else {
                return Ok(());
            };
            if !claimant.take_over && !may_replace(client, claimant, &seen) {
                return Err(claimed(name, client));
            }
            let cut = [client.address.clone()];
            if fence_new(*header, name, &cut, &mut fenced, |address| {
                liveness(&seen, claimant, address)
            })? {
                continue;
            }
            break_lock_of(*header, &seen, &cut)?;
            let now_s = self.clock.unix_s();
            let next = Claim::next(Some(last), id.clone(), claimant, own.clone(), now_s, &cut);
            if header.swap(Some(last), &next.released(), LockState::Any)? {
                return Ok(());
            }
        }
        Err(changing(name))
    }
}

/// Marks the shared claim of `own` as released, if the record has it. No request of the client may be in flight.
///
/// # Errors
/// Returns the cluster's error.
pub(crate) fn leave(header: &impl Header, name: &str, own: &Client) -> Result<()> {
    for _ in 0..MAX_ROUNDS {
        let Some(now) = header.claim()? else { return Ok(()) };
        let Some(next) = now.without(own) else { return Ok(()) };
        if header.swap(Some(&now), &next, LockState::Any)? {
            return Ok(());
        }
    }
    Err(changing(name))
}

/// Fences those of `clients` that are not in `fenced` yet. Returns whether there was one: the image must be observed
/// again.
fn fence_new(
    header: &impl Header,
    name: &str,
    clients: &[String],
    fenced: &mut Vec<String>,
    liveness: impl Fn(&str) -> Liveness,
) -> Result<bool> {
    let known = fenced.len();
    for address in clients {
        if !fenced.contains(address) {
            let liveness = liveness(address);
            tracing::warn!(image = name, client = address, ?liveness, "fencing a client");
            header.fence(address, liveness)?;
            fenced.push(address.clone());
        }
    }
    Ok(fenced.len() > known)
}

/// Breaks the lock if one of `fenced` holds it. Another client may have broken and acquired it meanwhile.
fn break_lock_of(header: &impl Header, seen: &Observation, fenced: &[String]) -> Result<()> {
    let holder = seen.holder.as_ref().filter(|holder| fenced.contains(&holder.address));
    let Some(holder) = holder else { return Ok(()) };
    match header.break_lock(&holder.address) {
        Err(error) if error.kind() != ErrorKind::InUse => Err(error),
        _ => Ok(()),
    }
}

fn changing(name: &str) -> Error {
    let message = format!("other clients change the claims of {name} at the same time");
    Error::new(ErrorKind::Aborted, message).with_repair("repeat the command")
}

fn too_many(name: &str) -> Error {
    let message = format!("{name} has {MAX_SHARED} claims, which is the maximum");
    Error::new(ErrorKind::InUse, message).with_repair("unmap it on another node first")
}
