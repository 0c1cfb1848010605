//! The clients of volumes with `lock=shared`. Several mappings may write to such an image, so there is neither a
//! claim nor a lock. But the worker of a mapping must not be followed by another one while its own writes may
//! still take effect: an old write could then replace the data of a newer one.
//!
//! In a handover, the old worker has no request in flight when it passes its connections. After a crash, requests
//! of the dead worker may be on their way to an OSD, or wait there. So each worker records its client in the
//! image's metadata, under a key of its mapping, and its successor has the cluster blocklist that client before
//! it serves. The clients of other mappings are not affected.

use std::sync::{Mutex, MutexGuard, PoisonError};

use librbd::Image;

use crate::claim::decision::{Liveness, Purpose};
use crate::claim::fence_client;
use crate::claim::record::Claim;
use crate::errors::image_error;
use cleat_backend::claimant::Claimant;
use cleat_core::clock::Clock;
use cleat_core::error::Result;

/// The prefix of the metadata keys. The id of the mapping follows.
const KEY_PREFIX: &str = "cleat.client.";

/// The mapping that this process shares the image for.
pub(crate) struct Sharer {
    claimant: Claimant,
    /// What this process has recorded, until it has released it.
    recorded: Mutex<Option<Claim>>,
}

impl Sharer {
    /// Makes the sharer for `claimant`; `None` if that has no mapping, so that no process follows this one.
    pub(crate) fn new(claimant: Claimant) -> Option<Self> {
        (!claimant.mapping_id.is_empty()).then(|| Self { claimant, recorded: Mutex::default() })
    }

    /// Records the client of this process. On opening, fences the client of the mapping's last process before,
    /// whose end the supervisor has proved. Blocks until the cluster has answered.
    ///
    /// # Errors
    /// Returns the cluster's error, and `Internal` if the record of the last process is invalid.
    pub(crate) fn record(
        &self,
        image: &Image,
        name: &str,
        purpose: Purpose,
        clock: &dyn Clock,
    ) -> Result<()> {
        let failed = |error| image_error(error, name);
        let id = image.id().map_err(failed)?;
        let cluster = image.pool().cluster();
        let own = cluster.addresses().map_err(failed)?;
        let last = self.read(image, &id, name)?;
        let dead = last.as_ref().filter(|last| {
            let other = !last.released && last.client.address != own;
            other && self.claimant.resumes && purpose == Purpose::Open
        });
        let fenced: Vec<String> = dead.iter().map(|last| last.client.address.clone()).collect();
        for address in &fenced {
            tracing::warn!(
                image = name,
                client = address,
                "fencing the last client of the mapping"
            );
            fence_client(cluster, address, Liveness::Ended)?;
        }
        let next = Claim::after(last.as_ref(), id, &self.claimant, own, clock.unix_s(), &fenced);
        self.write(image, &next, name)?;
        *self.recorded() = Some(next);
        Ok(())
    }

    /// Takes the right to release the record when the image is closed.
    pub(crate) fn take(&self) -> Option<Self> {
        let recorded = self.recorded().take()?;
        let recorded = Mutex::new(Some(recorded));
        Some(Self { claimant: self.claimant.clone(), recorded })
    }

    /// Marks the record as released, unless a successor has replaced it. No request may be in flight.
    ///
    /// # Errors
    /// Returns the cluster's error.
    pub(crate) fn release(&self, image: &Image, name: &str) -> Result<()> {
        let Some(own) = self.recorded().take() else { return Ok(()) };
        let id = image.id().map_err(|error| image_error(error, name))?;
        match self.read(image, &id, name)? {
            Some(now) if now.is_same(&own) => self.write(image, &own.released(), name),
            _ => Ok(()),
        }
    }

    fn read(&self, image: &Image, id: &str, name: &str) -> Result<Option<Claim>> {
        let text = image.metadata_get(&self.key()).map_err(|error| image_error(error, name))?;
        Claim::read(text.as_deref(), id, name)
    }

    /// Does not acquire the lock, which librbd would do for its own call.
    fn write(&self, image: &Image, record: &Claim, name: &str) -> Result<()> {
        let put = image.metadata_put(&self.key(), &record.text()?);
        put.map_err(|error| image_error(error, name))
    }

    fn key(&self) -> String {
        format!("{KEY_PREFIX}{}", self.claimant.mapping_id)
    }

    fn recorded(&self) -> MutexGuard<'_, Option<Claim>> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
