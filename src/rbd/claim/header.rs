//! Access to an image's lock and metadata, as far as claims need it. It is a trait, so that tests can run
//! [`super::ClaimAttempt`] with a crash after every step and with any order of steps of several clients.

use librbd::{Image, LockState, RBD_FEATURE_EXCLUSIVE_LOCK};

use super::decision::{Holder, Liveness, Observation};
use super::record::{ANNOUNCED, Claim, KEY};
use super::{fence_client, no_exclusive_lock};
use crate::errors::image_error;
use crate::mirror::check_primary;
use cleat_core::error::Result;

/// An image's header as one client uses it. Each call is one step; a crash can happen between two steps.
/// Each call blocks until the cluster has answered, and returns the cluster's error.
pub(crate) trait Header {
    /// Returns the image's id.
    ///
    /// # Errors
    /// Returns `Unsupported` if the image has no exclusive lock, and `PermissionDenied` if it is a
    /// mirror's copy: such an image cannot be claimed.
    fn id(&self) -> Result<String>;

    /// Returns the address of this client.
    fn own_address(&self) -> Result<String>;

    /// Reads the claim, the announcement, the watchers and the lock, one after the other. Not atomic.
    fn observe(&self) -> Result<Observation>;

    /// Reads the newest claim.
    fn claim(&self) -> Result<Option<Claim>>;

    /// Has the cluster blocklist the client at `address`, for the time that `liveness` requires.
    fn fence(&self, address: &str, liveness: Liveness) -> Result<()>;

    /// Breaks the lock of a fenced client. Returns whether the client still had it.
    fn break_lock(&self, address: &str) -> Result<bool>;

    /// Announces the claim that this client is about to write. Does not need the lock.
    fn announce(&self, next: &Claim) -> Result<()>;

    /// Acquires the lock and keeps it. If another client has the lock, returns its address.
    fn lock(&self) -> Result<Option<String>>;

    /// Releases the lock.
    fn unlock(&self) -> Result<()>;

    /// Replaces the claim `last` by `next`, if it is still the claim, and if the lock is in the state `lock`: one step
    /// at the storage. Returns whether it was replaced.
    ///
    /// # Errors
    /// Returns an error if this client should hold the lock and does not.
    fn swap(&self, last: Option<&Claim>, next: &Claim, lock: LockState) -> Result<bool>;
}

/// The header of an open image.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ImageHeader<'a> {
    pub(crate) image: &'a Image,
    /// The image's name, for messages.
    pub(crate) name: &'a str,
}

impl ImageHeader<'_> {
    /// Reads and parses the metadata under `key`. The inner error means that it is not a valid claim.
    fn read(&self, key: &str) -> Result<Result<Option<Claim>>> {
        let id = self.image.id().map_err(|error| image_error(error, self.name))?;
        let text = self.image.metadata_get(key).map_err(|error| image_error(error, self.name))?;
        Ok(Claim::read(text.as_deref(), &id, self.name))
    }

    /// Reads the announcement. An invalid one is ignored.
    fn announced(&self) -> Result<Option<Claim>> {
        Ok(self.read(ANNOUNCED)?.unwrap_or_else(|error| {
            tracing::warn!(image = self.name, error = %error.report(), "ignoring an invalid claim announcement");
            None
        }))
    }

    /// Reads the holder of the lock. `watching` are the addresses of the clients that watch the image.
    fn holder(&self, watching: &[String]) -> librbd::Result<Option<Holder>> {
        let Some(locker) = self.image.lockers()?.into_iter().next() else { return Ok(None) };
        // The cookies of librbd and krbd (WATCHER_LOCK_COOKIE_PREFIX, RBD_LOCK_COOKIE_PREFIX).
        let is_automatic = locker.cookie.starts_with("auto ");
        let made_by_hand = (!is_automatic).then_some(locker.cookie);
        let (address, alive) = (locker.address.clone(), watching.contains(&locker.address));
        Ok(Some(Holder { address, alive, made_by_hand }))
    }
}

impl Header for ImageHeader<'_> {
    fn id(&self) -> Result<String> {
        let failed = |error| image_error(error, self.name);
        if self.image.features().map_err(failed)? & RBD_FEATURE_EXCLUSIVE_LOCK == 0 {
            return Err(no_exclusive_lock(self.name));
        }
        // Checked first, so that no client is fenced for a claim that is not possible.
        check_primary(self.image, self.name)?;
        self.image.id().map_err(failed)
    }

    fn own_address(&self) -> Result<String> {
        self.image.pool().cluster().addresses().map_err(|error| image_error(error, self.name))
    }

    fn observe(&self) -> Result<Observation> {
        let claim = self.claim()?;
        let announced = self.announced()?;
        let failed = |error| image_error(error, self.name);
        let watchers = self.image.watchers().map_err(failed)?;
        let watching: Vec<String> = watchers.into_iter().map(|watcher| watcher.address).collect();
        let holder = self.holder(&watching).map_err(failed)?;
        Ok(Observation { claim, announced, holder, watching })
    }

    fn claim(&self) -> Result<Option<Claim>> {
        self.read(KEY)?
    }

    fn fence(&self, address: &str, liveness: Liveness) -> Result<()> {
        fence_client(self.image.pool().cluster(), address, liveness)
    }

    fn break_lock(&self, address: &str) -> Result<bool> {
        match self.image.lock_break(address) {
            Ok(()) => Ok(true),
            Err(error) if error.errno() == Some(libc::ENOENT) => Ok(false),
            Err(error) => Err(image_error(error, self.name)),
        }
    }

    fn announce(&self, next: &Claim) -> Result<()> {
        let put = self.image.metadata_put(ANNOUNCED, &next.text()?);
        put.map_err(|error| image_error(error, self.name))
    }

    fn lock(&self) -> Result<Option<String>> {
        match self.image.lock_acquire() {
            Ok(()) => Ok(None),
            Err(error)
                if matches!(error.errno(), Some(libc::EROFS | libc::EBUSY | libc::EAGAIN)) =>
            {
                tracing::debug!(image = self.name, %error, "another client has acquired the lock");
                let owners =
                    self.image.lock_owners().map_err(|error| image_error(error, self.name))?;
                let unknown = || "an unknown address".to_owned();
                Ok(Some(owners.into_iter().next().unwrap_or_else(unknown)))
            }
            Err(error) => Err(image_error(error, self.name)),
        }
    }

    fn unlock(&self) -> Result<()> {
        self.image.lock_release().map_err(|error| image_error(error, self.name))
    }

    fn swap(&self, last: Option<&Claim>, next: &Claim, lock: LockState) -> Result<bool> {
        let failed = |error| image_error(error, self.name);
        let text = self.image.metadata_get(KEY).map_err(failed)?;
        let id = self.image.id().map_err(failed)?;
        if Claim::read(text.as_deref(), &id, self.name)?.as_ref() != last {
            return Ok(false);
        }
        self.image.metadata_swap(KEY, text.as_deref(), &next.text()?, lock).map_err(failed)
    }
}
