//! The record of a volume that is granted to nodes of a cluster (`cleat_grants`). The claims of epochs have it: the
//! generation of the grant, the lowest generation that may claim, and the seals.
//!
//! A generation is sealed by the claim of a later epoch, which has the seal. Then the logs of all earlier epochs are
//! ended, and only when that is done, the epoch is released: the record shows the seal as a proof from then on. If the
//! process that fences dies before, the next one does the same again, with another epoch.
//!
//! No seal names a client, because the end of a log is for ever: a client that was fenced never connects again, and
//! there is nothing to remove when its node has cleaned up.

use std::time::Instant;

use cleat_backend::claimant::Claimant;
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_grants::object::Mode;
use cleat_grants::record::{FencePlan, Record, Target};
use cleat_grants::storage::Fencing;
use cleat_object::volume::Place;

use crate::claim::record::{Owner, Use};
use crate::claim::{MAX_ROUNDS, newest};
use crate::errors::{failed, no_answer, wait};
use crate::executor::block_until;
use crate::fence::{ObjectFence, end, epoch_of};
use crate::spec::VolumeAt;

/// The record of a volume, which is found anew for each call.
#[derive(Debug)]
pub(crate) struct GrantRecord(pub(crate) VolumeAt);

impl GrantRecord {
    fn place(&self, deadline: Instant) -> Result<Place> {
        ObjectFence(self.0.clone()).place(deadline)
    }
}

impl Fencing for GrantRecord {
    fn check_mode(&self, mode: Mode) -> Result<()> {
        if mode == Mode::ReadWrite {
            return Ok(());
        }
        let name = self.0.shown();
        let message = format!(
            "cannot grant {name} in the mode {mode:?}: the record of a volume has one writer and no readers"
        );
        Err(Error::new(ErrorKind::Unsupported, message)
            .with_repair("use the access mode ReadWriteOnce or ReadWriteOncePod"))
    }

    fn record(&self, deadline: Instant) -> Result<Record> {
        let place = self.place(deadline)?;
        wait(&self.0.shown(), deadline, newest(&place)).map(|seen| seen.record())
    }

    fn fence(&self, target: &Target, deadline: Instant) -> Result<()> {
        self.check_mode(target.mode)?;
        let (place, name) = (self.place(deadline)?, self.0.shown());
        let claimant = Claimant::alone("", true)?;
        let fenced = block_until(deadline, seal(&place, &name, &claimant, target));
        fenced.unwrap_or_else(|| Err(no_answer(&name)))
    }

    fn unfence(&self, _client: &str, _deadline: Instant) -> Result<()> {
        Ok(())
    }

    fn release(&self, node: &str, client: &str, deadline: Instant) -> Result<()> {
        let (place, name) = (self.place(deadline)?, self.0.shown());
        let record = wait(&name, deadline, newest(&place))?.record();
        if !record.claims.iter().any(|claim| claim.client == client) {
            return Ok(());
        }
        // Without the permission to take over, only a client that has ended is replaced.
        let claimant = Claimant::alone(node, false)?;
        end(&place, &name, &claimant, Use::Fence, Some(&[epoch_of(client)?]), deadline)
    }
}

/// Seals the generation of `target`. Does nothing if the record has the seal, is ahead of the generation, or has the
/// claim of another node.
async fn seal(place: &Place, name: &str, claimant: &Claimant, target: &Target) -> Result<()> {
    let failed = |failure| failed(name, failure);
    for _ in 0..MAX_ROUNDS {
        let seen = newest(place).await.map_err(failed)?;
        let record = seen.record();
        let FencePlan::Cut(cut) = record.plan_fence(target) else { return Ok(()) };
        if let Some(client) = &cut {
            tracing::warn!(volume = name, client, "fencing a client");
        }
        let sealed = Record { claims: Vec::new(), ..record.seal(target, None) };
        let owner = Owner::after(&seen, claimant, Use::Fence, SystemClock.unix_s()).sealed(&sealed);
        let epoch = seen.epoch + 1;
        if place.claim(epoch, &owner.text()?).await.map_err(failed)? {
            place.end_earlier(epoch).await.map_err(failed)?;
            return place.release(epoch).await.map_err(failed);
        }
    }
    let message = format!("other clients claim {name} at the same time");
    Err(Error::new(ErrorKind::Aborted, message).with_repair("repeat the command"))
}
