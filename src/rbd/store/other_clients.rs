//! Who else may write to an image that is about to lose data.
//!
//! A watcher has it open. A claim that stands may be without one: its client was not heard of for half a
//! minute, and goes on writing when it is back. So it is judged as one that maps the image would judge it
//! (`rbd/decision.rs`), and cut off first where that is proved to be over, or asked for.

use std::thread;
use std::time::{Duration, Instant};

use librbd::{Image, Open, RBD_FEATURE_EXCLUSIVE_LOCK, Watcher};

use super::Target;
use crate::claim::decision::{Decision, Occasion, decide};
use crate::claim::header::{Header, ImageHeader};
use crate::claim::record::{Claim, Client};
use crate::errors::explained;
use crate::fence;
use cleat_core::error::{Error, ErrorKind, Result};

/// How long the OSDs may take to drop the watch of a client that was cut off: they do it when they hear
/// of it.
const WATCH_PATIENCE: Duration = Duration::from_secs(15);

const WATCH_PAUSE: Duration = Duration::from_millis(50);

impl Target {
    /// Sees to it that nobody else writes to `image`, now or when it comes back; else refuses.
    pub(crate) fn check_unused(&self, image: &Image) -> Result<()> {
        let header = ImageHeader { image, name: &self.name };
        let locked = image.features().map_err(|error| self.failed(error))?;
        if locked & RBD_FEATURE_EXCLUSIVE_LOCK == 0 {
            return self.check_watchers(image, None);
        }
        let sight = header.look();
        if !self.claimant.take_over {
            // They say more than a claim that cannot be read.
            let claim = sight.as_ref().ok().and_then(|sight| sight.claim.as_ref());
            self.check_watchers(image, claim)?;
        }
        let (sight, own) = (sight?, header.own_address()?);
        match decide(&sight, &self.claimant, &own, Occasion::Opening) {
            Decision::Take(cut) if cut.is_empty() => {}
            Decision::Take(cut) => {
                let taken =
                    fence::take(&*self.open(Open::Write)?, &self.name, &self.claimant, None);
                taken.map_err(|error| explained(error, &self.spec))?;
                self.await_end(image, &cut)?;
            }
            Decision::Claimed(client) | Decision::Superseded(client) => {
                return Err(self.claimed(&client));
            }
            Decision::Held(address) => {
                return Err(self.in_use(&format!("the client at {address}")));
            }
        }
        self.check_watchers(image, sight.claim.as_ref())
    }

    /// Refuses an image that another client has open.
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

    /// Waits until the clients that were cut off are forgotten; one that stays is refused as a watcher.
    fn await_end(&self, image: &Image, cut: &[String]) -> Result<()> {
        let until = Instant::now() + WATCH_PATIENCE;
        while Instant::now() < until {
            let watchers = image.watchers().map_err(|error| self.failed(error))?;
            if !watchers.iter().any(|watcher| cut.contains(&watcher.address)) {
                break;
            }
            thread::sleep(WATCH_PAUSE);
        }
        Ok(())
    }

    fn in_use(&self, by: &str) -> Error {
        Error::new(ErrorKind::InUse, format!("{} is in use by {by}", self.name)).with_repair(
            "unmap it there first; the cluster gives a client up that died about 30 s later",
        )
    }

    fn claimed(&self, client: &Client) -> Error {
        let message = format!(
            "{} is claimed by {}, which is not heard of now, and would go on writing when it is back",
            self.name,
            client.describe()
        );
        Error::new(ErrorKind::InUse, message).with_repair(
            "unmap it there; when nobody can say what that one still writes, have it cut off: \
             --take-over",
        )
    }
}

/// A watcher as people know it: by its claim where that is its own.
fn holder(watcher: &Watcher, claim: Option<&Claim>) -> String {
    let Watcher { client, address } = watcher;
    let own = claim.map(|claim| &claim.client).filter(|client| client.address == *address);
    own.map_or_else(|| format!("client.{client} at {address}"), Client::describe)
}
