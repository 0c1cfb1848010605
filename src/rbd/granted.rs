//! The record of an image, for volumes that are granted to nodes of a cluster (`cleat_grants`). The claim of the
//! image has it: the generation of the grant, the lowest generation that may claim, and the seals.
//!
//! A seal names a client that is cut off. The blocklist is the truth about that: what it does not list any more, or not for
//! long, is not named. So when a client has ended, only its entry changes, and the claim, which may be that of another node
//! meanwhile, is not written. The entry is replaced by one of an hour: what the client has sent before, for example while its
//! network was down, may still arrive, and must not be written over the data of another node.

use std::time::Instant;

use cleat_backend::claimant::Claimant;
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_grants::object::Mode;
use cleat_grants::record::{Record, Target};
use cleat_grants::storage::Fencing;
use librbd::{Image, Open, Subject};

use crate::claim::beside::Eviction;
use crate::claim::decision::Liveness;
use crate::claim::header::ImageHeader;
use crate::claim::record::{Claim, is_address};
use crate::claim::seal::Seal;
use crate::claim::{self, fence_client};
use crate::fence::{RbdFence, blocklist, not_removed, take_over_and_release};
use crate::spec::RbdSpec;

/// How often an entry of the blocklist is added again at most.
const ADDITIONS: u32 = 3;

/// The record of an image, which is opened for each call.
#[derive(Debug)]
pub(crate) struct GrantRecord(RbdFence);

impl GrantRecord {
    /// The record is the same for one writer and for several.
    pub(crate) fn new(spec: &RbdSpec) -> Result<Self> {
        RbdFence::new(&RbdSpec { shared: false, ..spec.clone() }).map(Self)
    }

    /// As [`RbdFence::call`], but only an image that does not exist is `NotFound`: without its configuration, key, pool
    /// or namespace, nothing is known of its claims.
    fn call<T: Send + 'static>(
        &self,
        how: Open,
        deadline: Instant,
        work: impl FnOnce(&Image, &str) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let done = self.0.call(how, deadline, work);
        done.map_err(|error| match error.kind() {
            ErrorKind::NotFound if !is_of_image(&error) => {
                let repair = error.repair().unwrap_or("check the cluster and the key").to_owned();
                let message = format!("the record of {} cannot be read", self.0.name);
                Error::new(ErrorKind::Unavailable, message).with_repair(repair).with_source(error)
            }
            _ => error,
        })
    }
}

/// Returns whether an error is about the image itself, and not about the way to it.
fn is_of_image(error: &Error) -> bool {
    let source = std::error::Error::source(error);
    let source = source.and_then(|source| source.downcast_ref::<librbd::Error>());
    source.is_some_and(|source| source.subject() == Subject::Other)
}

impl Fencing for GrantRecord {
    fn record(&self, deadline: Instant) -> Result<Record> {
        self.call(Open::ReadOnly, deadline, |image, name| {
            let claim = claim::of(image, name)?;
            let listed = listed(image, name)?;
            Ok(claim.map(|claim| claim.record(&listed)).unwrap_or_default())
        })
    }

    fn fence(&self, target: &Target, deadline: Instant) -> Result<()> {
        let target = target.clone();
        // A shared mode needs no lock.
        let is_shared = target.mode != Mode::ReadWrite;
        let how = if is_shared { Open::ReadOnly } else { Open::Write };
        self.call(how, deadline, move |image, name| {
            let seal = Seal {
                header: &ImageHeader { image, name },
                name,
                claimant: &Claimant::alone("", true)?,
                target: &target,
                listed: &listed(image, name)?,
                clock: &SystemClock,
            };
            if is_shared { seal.write_beside() } else { seal.write() }
        })
    }

    fn unfence(&self, client: &str, deadline: Instant) -> Result<()> {
        if !is_address(client) {
            let message = format!("{client:?} is not the address of a client");
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        let (client, spec) = (client.to_owned(), self.0.spec.clone());
        self.call(Open::ReadOnly, deadline, move |image, name| {
            if !listed(image, name)?.contains(&client) {
                return Ok(());
            }
            let cluster = image.pool().cluster();
            let removed = cluster.blocklist_remove(&client);
            removed.map_err(|error| not_removed(error, &client, &spec))?;
            // Ceph does not change the end of an entry that exists. After a failure, nothing would add it again.
            let mut added = fence_client(cluster, &client, Liveness::Ended);
            for _ in 1..ADDITIONS {
                if added.is_ok() {
                    break;
                }
                added = fence_client(cluster, &client, Liveness::Ended);
            }
            added
        })
    }

    fn release(&self, node: &str, client: &str, deadline: Instant) -> Result<()> {
        let (node, client) = (node.to_owned(), client.to_owned());
        self.call(Open::Write, deadline, move |image, name| {
            let claim = claim::of(image, name)?;
            // Without the permission to take over, only a client that has ended is replaced.
            let claimant = Claimant::alone(&node, false)?;
            let is_claim = |claim: &Claim| !claim.released && claim.client.address == client;
            if !claim.as_ref().is_some_and(is_claim) {
                let (header, address) = (&ImageHeader { image, name }, &*client);
                let claimant = &claimant;
                return Eviction { header, name, claimant, address, clock: &SystemClock }.run();
            }
            take_over_and_release(image, name, &claimant, Some(&[client]))
        })
    }
}

/// Returns the addresses on the blocklist of clients that may live.
fn listed(image: &Image, name: &str) -> Result<Vec<String>> {
    let entries = blocklist(image.pool().cluster(), name)?;
    let now_s = SystemClock.unix_s();
    let of_living = entries.into_iter().filter(|entry| !entry.ends_soon(now_s));
    Ok(of_living.map(|entry| entry.addr).collect())
}
