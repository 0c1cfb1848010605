//! Clones: their creation, and the pins and tokens that keep a snapshot as long as a clone needs it.

use std::sync::Arc;

use zeroize::Zeroizing;

use super::access::{Access, Failure};
use super::place::Place;
use super::shared::Shared;
use super::{Config, Volume};
use crate::codec::{Compression, Description, MAX_LOCATION_BYTES, Parent};
use crate::encryption::{KEY_BYTES, KeyFile};
use crate::name::{Name, SnapshotId, VolumeId};
use crate::rules::{Rule, applies};
use crate::store::Store;

/// A clone that is created.
pub struct NewClone {
    /// Its identity, which no other volume has.
    pub volume: VolumeId,
    /// The place of its objects.
    pub store: Arc<dyn Store>,
    /// Where its parent is, for [`super::Parents`].
    pub location: String,
    /// How its own data is compressed.
    pub compression: Option<Compression>,
    /// The key file and a random key, for a clone of an encrypted volume.
    pub key: Option<(KeyFile, Zeroizing<[u8; KEY_BYTES]>)>,
}

impl Place {
    /// Creates a volume with the content of a snapshot of this one. The number of puts does not depend on what the
    /// snapshot has.
    ///
    /// # Errors
    /// Returns [`Failure::NoSnapshot`] if the snapshot does not exist or is being deleted, and another error if the
    /// place has a volume already, or if a store fails.
    pub async fn create_clone(&self, snapshot: SnapshotId, new: &NewClone) -> Result<(), Failure> {
        if new.location.len() > MAX_LOCATION_BYTES {
            return Err(Failure::Invalid("the location of the parent is too long"));
        }
        let existing = self.view(Config::default()).await?.snapshots();
        let found = existing.into_iter().find(|found| found.id == snapshot);
        let found = found.ok_or(Failure::NoSnapshot)?;
        let own = self.description();
        match (&own.key, &new.key) {
            (Some(_), None) => return Err(Failure::Locked),
            (None, Some(_)) => return Err(Failure::NotEncrypted),
            _ => {}
        }
        let mut description = Description {
            volume: new.volume,
            nonce: self.access().nonce,
            size: found.size,
            page_bytes: own.page_bytes,
            compression: new.compression,
            parent: Some(Parent {
                volume: own.volume,
                location: new.location.clone(),
                snapshot: found,
            }),
            key: None,
            shared_pages: true,
        };
        description.key = new.key.as_ref().map(|(file, key)| file.wrap(&description, key));
        Volume::create(Arc::clone(&new.store), &description).await?;
        let pinned = self.pin(snapshot, new.volume).await;
        if matches!(pinned, Err(Failure::NoSnapshot)) {
            let access = Access::new(Arc::clone(&new.store), new.volume, description.nonce);
            access.delete_soon(Name::Description).await?;
            // Nobody pins for this clone any more. Without the description, no later call would find this pin, which keeps
            // the snapshot for ever if its deletion was given up.
            self.access().delete_soon(Name::Pin(snapshot, new.volume)).await?;
        }
        pinned
    }

    /// Keeps a snapshot of this volume for a clone whose description exists. Also continues a creation that was
    /// interrupted. The pin stays in any case: a deletion of it could arrive late, and remove the pin of a creation that is
    /// continued and succeeds.
    ///
    /// # Errors
    /// Returns [`Failure::NoSnapshot`] if the snapshot is being deleted, and another error if the store fails.
    pub async fn pin(&self, snapshot: SnapshotId, clone: VolumeId) -> Result<(), Failure> {
        let pin = Name::Pin(snapshot, clone);
        self.access().create_marker(pin).await?;
        let is_deleted = !self.access().list(&tokens(snapshot), "").await?.is_empty();
        if is_deleted && applies(Rule::LookForToken) {
            return Err(Failure::NoSnapshot);
        }
        Ok(())
    }

    /// Returns the clones of a snapshot of this volume.
    ///
    /// # Errors
    /// Returns an error if the store fails.
    pub async fn clones(&self, snapshot: SnapshotId) -> Result<Vec<VolumeId>, Failure> {
        pinned(self.access(), snapshot).await
    }

    /// Whether any snapshot of this volume has a clone, also if the volume is damaged.
    ///
    /// # Errors
    /// Returns an error if the store fails.
    pub async fn has_clones(&self) -> Result<bool, Failure> {
        Ok(!self.access().list("pin/", "").await?.is_empty())
    }

    /// What the volume was cloned from; `None` also for a clone that needs it no more.
    pub fn parent(&self) -> Option<&Parent> {
        self.description().parent.as_ref().filter(|_| self.access().parent().is_some())
    }

    /// Makes a clone independent of its parent, whose snapshot may be deleted then. Every opener that has found the
    /// parent before can go on. Only after [`super::Volume::flatten`] has ended with success, in any epoch.
    ///
    /// # Errors
    /// Returns an error if the store fails; repeat the call then.
    pub async fn make_independent(&self) -> Result<(), Failure> {
        if self.parent().is_none() {
            return Ok(());
        }
        if !applies(Rule::FlatFirst) {
            self.unpin().await?;
        }
        self.access().create_marker(Name::Flat).await?;
        self.unpin().await
    }

    /// Returns whether the parent keeps what this clone needs. It does unless the clone's creation was interrupted, or
    /// its removal has begun.
    ///
    /// # Errors
    /// Returns an error if the store fails.
    pub async fn is_pinned(&self) -> Result<bool, Failure> {
        let own = self.description();
        match (&own.parent, self.access().parent()) {
            (Some(parent), Some(ancestor)) => {
                let clones = pinned(&ancestor.access, parent.snapshot.id).await?;
                Ok(clones.contains(&own.volume))
            }
            _ => Ok(true),
        }
    }

    /// Returns whether the snapshot that this clone needs was deleted, or may be deleted soon. A creation that was refused
    /// for that leaves the clone with a pin, and the clone must not be opened for the first time then.
    ///
    /// # Errors
    /// Returns an error if the store fails.
    pub async fn is_snapshot_deleted(&self) -> Result<bool, Failure> {
        match (&self.description().parent, self.access().parent()) {
            (Some(parent), Some(ancestor)) => {
                Ok(!ancestor.access.list(&tokens(parent.snapshot.id), "").await?.is_empty())
            }
            _ => Ok(false),
        }
    }

    /// Ends the need of this volume for its parent. It must not be opened any more.
    ///
    /// # Errors
    /// Returns an error if the store fails.
    pub async fn unpin(&self) -> Result<(), Failure> {
        match (&self.description().parent, self.access().parent()) {
            (Some(parent), Some(ancestor)) => {
                let pin = Name::Pin(parent.snapshot.id, self.description().volume);
                ancestor.access.delete(pin).await
            }
            _ => Ok(()),
        }
    }

    /// Ends the need of a clone for a snapshot of this volume. The clone is removed, or independent.
    ///
    /// # Errors
    /// Returns an error if the store fails.
    pub async fn remove_pin(&self, snapshot: SnapshotId, clone: VolumeId) -> Result<(), Failure> {
        self.access().delete(Name::Pin(snapshot, clone)).await
    }
}

/// An attempt to delete a snapshot, with its token. If the attempt ends without the record, also because its future was
/// dropped, the collector removes the token: until then the snapshot cannot be cloned.
pub(super) struct Deletion<'a> {
    shared: &'a Shared,
    token: Name,
    /// Whether there is nothing to remove: the snapshot is deleted, or the token was removed.
    is_over: bool,
}

impl Deletion<'_> {
    pub(super) fn token(&self) -> Name {
        self.token
    }

    /// The snapshot is deleted, so the token is kept.
    pub(super) fn keep_token(&mut self) {
        self.is_over = true;
    }
}

/// Must not be dropped while the state is locked.
impl Drop for Deletion<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            let mut state = self.shared.lock();
            state.garbage.permitted.push_back(self.token);
            state.changed();
        }
    }
}

impl Shared {
    /// Makes sure that no clone needs a snapshot, until the attempt is given up.
    pub(super) async fn forbid_clones(
        &self,
        snapshot: SnapshotId,
    ) -> Result<Deletion<'_>, Failure> {
        let attempt = match applies(Rule::UniqueToken) {
            true => self.lock().snapshots.next_attempt(),
            false => 0,
        };
        let epoch = if applies(Rule::UniqueToken) { self.epoch } else { 0 };
        let token = Name::Token { snapshot, epoch, attempt };
        let mut deletion = Deletion { shared: self, token, is_over: false };
        if applies(Rule::TokenFirst) {
            self.access.create_marker(token).await?;
        }
        if !self.access.list(&pins(snapshot), "").await?.is_empty() {
            // A command ends soon, and its collector with it. What it leaves is removed by a sweep of a later writer.
            self.access.delete_soon(token).await?;
            deletion.is_over = true;
            return Err(Failure::HasClones);
        }
        if !applies(Rule::TokenFirst) {
            self.access.create_marker(token).await?;
        }
        Ok(deletion)
    }
}

async fn pinned(access: &Access, snapshot: SnapshotId) -> Result<Vec<VolumeId>, Failure> {
    let names = access.list(&pins(snapshot), "").await?.into_iter();
    Ok(names
        .filter_map(|name| if let Name::Pin(_, clone) = name { Some(clone) } else { None })
        .collect())
}

fn pins(snapshot: SnapshotId) -> String {
    format!("pin/{snapshot}/")
}

fn tokens(snapshot: SnapshotId) -> String {
    format!("dead/{snapshot}/")
}
