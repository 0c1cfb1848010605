//! Checks that no other client uses an image before an operation that removes data.
//!
//! A client that watches the image has it open. A client with an active claim may have no watch: the OSDs
//! have dropped it after half a minute without contact, and the client writes again when it is back. So the
//! same decision applies as for a claim (`claim/decision.rs`): the client is fenced first if it is proved to
//! have ended or if `--take-over` is given.

use std::thread;
use std::time::Duration;

use librbd::{Image, Open, RBD_FEATURE_EXCLUSIVE_LOCK, Watcher};

use super::Target;
use crate::claim;
use crate::claim::decision::{Decision, Lost, Purpose, decide};
use crate::claim::header::{Header, ImageHeader};
use crate::claim::record::{Claim, Client};
use crate::errors::with_caps_repair;
use crate::fence;
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};

/// How long the OSDs may take to drop the watch of a fenced client, which they do when they get the OSD
/// map with the blocklist.
const WATCH_TIMEOUT: Duration = Duration::from_secs(15);

/// The interval at which the watches are checked.
const WATCH_POLL_INTERVAL: Duration = Duration::from_millis(50);

impl Target {
    /// Ensures that no other client writes to `image`, now or later. May fence clients and then waits up
    /// to `WATCH_TIMEOUT` for the end of their watches.
    ///
    /// # Errors
    /// Returns `InUse` with the name of a client that uses the image, or the cluster's error.
    pub(crate) fn check_unused(&self, image: &Image) -> Result<()> {
        let header = ImageHeader { image, name: &self.name };
        let locked = image.features().map_err(|error| self.failed(error))?;
        if locked & RBD_FEATURE_EXCLUSIVE_LOCK == 0 {
            return self.check_watchers(image, None);
        }
        let seen = header.observe();
        if !self.claimant.take_over {
            // Checked before the claim: the watchers are more useful in a message than an invalid claim.
            let claim = seen.as_ref().ok().and_then(|seen| seen.claim.as_ref());
            self.check_watchers(image, claim)?;
        }
        let (seen, own) = (seen?, header.own_address()?);
        match decide(&seen, &self.claimant, &own, Purpose::Open) {
            Decision::Take(rivals) if rivals.is_empty() => {}
            Decision::Take(rivals) => {
                let writable = self.open(Open::Write)?;
                fence::take_over_and_release(&writable, &self.name, &self.claimant, None)
                    .map_err(|error| with_caps_repair(error, &self.spec))?;
                drop(writable);
                self.wait_for_watches(&SystemClock, image, &rivals)?;
            }
            Decision::Claimed(client) | Decision::Lost(Lost::Claimed(client)) => {
                return Err(self.claimed(&client));
            }
            // Only a mapping has a grant.
            Decision::Refused(refusal) => {
                return Err(claim::refused(&self.name, &self.claimant, &refusal));
            }
            // Only a mapping with a device loses an image.
            Decision::Lost(lost) => return Err(self.in_use(&format!("another client: {lost}"))),
            Decision::LockedByHand(cookie) => {
                return Err(self.in_use(&format!("a lock with the id {cookie:?} (rbd lock add)")));
            }
            Decision::Held(address) => {
                return Err(self.in_use(&format!("the client at {address}")));
            }
        }
        self.check_watchers(image, seen.claim.as_ref())
    }

    /// Rejects an image that another client has open.
    fn check_watchers(&self, image: &Image, claim: Option<&Claim>) -> Result<()> {
        let mut watchers = image.watchers().map_err(|error| self.failed(error))?;
        let ours = self.pool.cluster().addresses().map_err(|error| self.failed(error))?;
        watchers.retain(|watcher| watcher.address != ours);
        if watchers.is_empty() {
            return Ok(());
        }
        let holders: Vec<String> = watchers.iter().map(|watcher| holder(watcher, claim)).collect();
        Err(self.in_use(&holders.join(", ")))
    }

    /// Waits until the watches of the fenced clients have ended, at most for `WATCH_TIMEOUT`. A watch
    /// that remains is found by the check for watchers afterwards.
    #[allow(clippy::disallowed_methods, reason = "it polls the cluster, on a thread of its own")]
    fn wait_for_watches(&self, clock: &dyn Clock, image: &Image, fenced: &[String]) -> Result<()> {
        let deadline = clock.now() + WATCH_TIMEOUT;
        while clock.now() < deadline {
            let watchers = image.watchers().map_err(|error| self.failed(error))?;
            if !watchers.iter().any(|watcher| fenced.contains(&watcher.address)) {
                break;
            }
            thread::sleep(WATCH_POLL_INTERVAL);
        }
        Ok(())
    }

    pub(crate) fn in_use(&self, by: &str) -> Error {
        Error::new(ErrorKind::InUse, format!("{} is in use by {by}", self.name))
            .with_repair("unmap it there first; the cluster drops a dead client about 30 s later")
    }

    pub(crate) fn claimed(&self, client: &Client) -> Error {
        let message = format!(
            "{} is claimed by {}, which is not connected now and could write again later",
            self.name,
            client.describe()
        );
        Error::new(ErrorKind::InUse, message)
            .with_repair("unmap it there; to fence a client that may still write, use --take-over")
    }
}

/// Describes a watcher for messages, by its claim if it has one.
fn holder(watcher: &Watcher, claim: Option<&Claim>) -> String {
    let Watcher { client, address } = watcher;
    let own = claim.map(|claim| &claim.client).filter(|client| client.address == *address);
    own.map_or_else(|| format!("client.{client} at {address}"), Client::describe)
}
