//! The object that an image's lock and its metadata lie in, as far as claims are concerned: behind a
//! trait, so that [`super::Contest`] is tested with every crash and every order of several clients.

use librbd::{Image, RBD_FEATURE_EXCLUSIVE_LOCK};

use super::decision::{Holder, Sight};
use super::record::{ANNOUNCED, Claim, KEY};
use super::{cut_off, lockless};
use crate::errors::later;
use crate::mirror::check_primary;
use cleat_core::error::Result;

/// An image's header, for one client. Each call is one step: a crash falls between two of them.
pub(crate) trait Header {
    /// The image's id. Fails where nobody can claim it.
    fn id(&self) -> Result<String>;

    /// The address of the client that asks.
    fn own_address(&self) -> Result<String>;

    /// All that decides; a glance at each, one after the other.
    fn look(&self) -> Result<Sight>;

    /// The newest claim.
    fn claim(&self) -> Result<Option<Claim>>;

    /// Has the cluster refuse a client for good.
    fn cut_off(&self, address: &str) -> Result<()>;

    /// Takes the lock from a client that was cut off. That it has gone by itself is no error.
    fn break_lock(&self, address: &str) -> Result<()>;

    /// Says which claim is about to be made. The lock need not be ours.
    fn announce(&self, next: &Claim) -> Result<()>;

    /// Takes the lock and keeps it. Somebody else has it: who.
    fn lock(&self) -> Result<Option<String>>;

    /// Gives the lock back.
    fn unlock(&self) -> Result<()>;

    /// Writes the claim; the lock must be ours.
    fn write(&self, claim: &Claim) -> Result<()>;
}

/// The real one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ImageHeader<'a> {
    pub(crate) image: &'a Image,
    /// Of the image, for people.
    pub(crate) name: &'a str,
}

impl ImageHeader<'_> {
    /// What stands under `key`, as far as it is a claim.
    fn read(&self, key: &str) -> Result<Result<Option<Claim>>> {
        let id = self.image.id().map_err(|error| later(error, self.name))?;
        let text = self.image.metadata_get(key).map_err(|error| later(error, self.name))?;
        Ok(Claim::read(text.as_deref(), &id, self.name))
    }

    /// What cannot be understood says nothing of anybody.
    fn announced(&self) -> Result<Option<Claim>> {
        Ok(self.read(ANNOUNCED)?.unwrap_or_else(|error| {
            tracing::warn!(image = self.name, error = %error.report(), "an announcement is ignored");
            None
        }))
    }

    /// Who holds the lock.
    fn holder(&self) -> librbd::Result<Option<Holder>> {
        let Some(locker) = self.image.lockers()?.into_iter().next() else { return Ok(None) };
        let address = locker.address;
        let alive = self.image.watchers()?.iter().any(|watcher| watcher.address == address);
        Ok(Some(Holder { address, alive }))
    }
}

impl Header for ImageHeader<'_> {
    fn id(&self) -> Result<String> {
        let failed = |error| later(error, self.name);
        if self.image.features().map_err(failed)? & RBD_FEATURE_EXCLUSIVE_LOCK == 0 {
            return Err(lockless(self.name));
        }
        // Before anybody is cut off in vain.
        check_primary(self.image, self.name)?;
        self.image.id().map_err(failed)
    }

    fn own_address(&self) -> Result<String> {
        self.image.pool().cluster().addresses().map_err(|error| later(error, self.name))
    }

    fn look(&self) -> Result<Sight> {
        let claim = self.claim()?;
        let announced = self.announced()?;
        let holder = self.holder().map_err(|error| later(error, self.name))?;
        Ok(Sight { claim, announced, holder })
    }

    fn claim(&self) -> Result<Option<Claim>> {
        self.read(KEY)?
    }

    fn cut_off(&self, address: &str) -> Result<()> {
        cut_off(self.image.pool().cluster(), address)
    }

    fn break_lock(&self, address: &str) -> Result<()> {
        match self.image.lock_break(address) {
            Err(error) if error.errno() == Some(libc::ENOENT) => Ok(()),
            broken => broken.map_err(|error| later(error, self.name)),
        }
    }

    fn announce(&self, next: &Claim) -> Result<()> {
        let put = self.image.metadata_put(ANNOUNCED, &next.text()?);
        put.map_err(|error| later(error, self.name))
    }

    fn lock(&self) -> Result<Option<String>> {
        match self.image.lock_acquire() {
            Ok(()) => Ok(None),
            Err(error)
                if matches!(error.errno(), Some(libc::EROFS | libc::EBUSY | libc::EAGAIN)) =>
            {
                tracing::debug!(image = self.name, %error, "somebody was faster");
                let owners = self.image.lock_owners().map_err(|error| later(error, self.name))?;
                let unknown = || "an unknown address".to_owned();
                Ok(Some(owners.into_iter().next().unwrap_or_else(unknown)))
            }
            Err(error) => Err(later(error, self.name)),
        }
    }

    fn unlock(&self) -> Result<()> {
        self.image.lock_release().map_err(|error| later(error, self.name))
    }

    fn write(&self, claim: &Claim) -> Result<()> {
        self.image.metadata_set(KEY, &claim.text()?).map_err(|error| later(error, self.name))
    }
}
