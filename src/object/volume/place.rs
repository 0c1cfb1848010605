//! A volume that is not open: its claims, its end, and a look at its content.

use std::sync::Arc;

use super::access::{Access, Ancestor, Failure, Put};
use super::keep::Keep;
use super::lineage::{self, NoParents, Parents};
use super::opening::{self, Kept};
use super::recovery::recover;
use super::{Config, Volume};
use crate::cache::Cache;
use crate::codec::{Claim, Description, MAX_OWNER_BYTES, Release};
use crate::encryption::KeyFile;
use crate::name::{Name, Nonce, SnapshotId};
use crate::store::Store;

/// How often a look at a volume begins again because its writer has deleted what the look was about to read.
const MAX_LOOKS: u32 = 8;

/// The place of a volume in a store. It has a nonce, so it can be the opener of one epoch.
#[derive(Clone)]
pub struct Place {
    access: Access,
    description: Description,
}

/// The newest epoch of a volume, and who has claimed it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Newest {
    /// The epoch; 0 if the volume was never claimed.
    pub epoch: u64,
    /// The text of the claim; `None` if there is no claim.
    pub owner: Option<String>,
    /// Whether the claimant has stated that it has stopped.
    pub is_released: bool,
}

impl Place {
    /// Finds a volume. `nonce` is random and was never used before.
    ///
    /// # Errors
    /// Returns `Lost(Description)` if there is no volume, and another error if its description is damaged or if
    /// the store fails.
    pub async fn find(store: Arc<dyn Store>, nonce: Nonce) -> Result<Self, Failure> {
        Self::find_clone(store, nonce, &NoParents, None).await
    }

    /// Finds a volume that may be a clone. The data of an encrypted volume can be read and written only with its key
    /// file.
    ///
    /// # Errors
    /// As [`Place::find`]; also if a parent cannot be found, or if the key file is not that of the volume and of all its
    /// parents.
    pub async fn find_clone(
        store: Arc<dyn Store>,
        nonce: Nonce,
        parents: &dyn Parents,
        key: Option<&KeyFile>,
    ) -> Result<Self, Failure> {
        let found = lineage::find(store, nonce, parents, key).await?;
        let Ancestor { access, description } = found;
        Ok(Self { access, description })
    }

    /// Finds a volume without its parents: to end it, or to fence its writers. Its content cannot be read.
    ///
    /// # Errors
    /// As [`Place::find`].
    pub async fn find_alone(store: Arc<dyn Store>, nonce: Nonce) -> Result<Self, Failure> {
        let (store, description) = lineage::describe(store, nonce).await?;
        Ok(Self { access: Access::new(store, description.volume, nonce), description })
    }

    /// The same place, whose volume and ancestors use a cache when their data is read.
    #[must_use]
    pub fn with_cache(self, cache: &Arc<dyn Cache>) -> Self {
        Self { access: self.access.with_cache(cache), ..self }
    }

    pub(super) fn access(&self) -> &Access {
        &self.access
    }

    /// Checks that the data can be read and written.
    ///
    /// # Errors
    /// Returns [`Failure::Locked`] if the volume is encrypted and was found without its key file.
    pub fn check_key(&self) -> Result<(), Failure> {
        if self.access.is_locked() { Err(Failure::Locked) } else { Ok(()) }
    }

    /// What never changes of the volume.
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// Returns the newest epoch, and who has claimed it.
    ///
    /// # Errors
    /// Returns an error if the store fails, or if an object is damaged.
    pub async fn newest(&self) -> Result<Newest, Failure> {
        let epoch = opening::newest_epoch(&self.access).await?;
        let identity = self.access.identity(epoch, 0);
        let decode = |bytes: &[u8]| Claim::decode(identity, bytes);
        let claim = self.access.decode(Name::Claim(epoch), decode).await?;
        let decode = |bytes: &[u8]| Release::decode(identity, bytes);
        let release = self.access.decode(Name::Release(epoch), decode).await?;
        // Only the claimant can say that it has stopped.
        let by = |release: Release| claim.as_ref().is_some_and(|c| c.nonce == release.nonce);
        Ok(Newest {
            epoch,
            is_released: release.is_some_and(by),
            owner: claim.as_ref().map(|claim| claim.owner.clone()),
        })
    }

    /// Claims an epoch, which must follow the newest one. Returns false if another opener has claimed it.
    ///
    /// # Errors
    /// Returns an error if the text is too long, or if the store fails.
    pub async fn claim(&self, epoch: u64, owner: &str) -> Result<bool, Failure> {
        if owner.len() > MAX_OWNER_BYTES {
            return Err(Failure::Invalid("the text of the claim is too long"));
        }
        opening::claim(&self.access, epoch, owner).await
    }

    /// Claims the next epoch, whoever has the newest one.
    pub(crate) async fn claim_next(&self, owner: &str) -> Result<u64, Failure> {
        opening::claim_next(&self.access, owner).await
    }

    /// Opens the volume in an epoch that this opener has claimed: fences the writer that has it, and recovers what
    /// that one has written.
    ///
    /// # Errors
    /// Returns [`Failure::Fenced`] if another opener has claimed a later epoch, and another error if the volume is
    /// damaged, or if the store fails.
    pub async fn open(&self, epoch: u64, config: Config) -> Result<Volume, Failure> {
        self.open_with(epoch, config, None).await
    }

    /// As [`Place::open`]. With a tail memory, the volume continues with the records that an earlier process has left
    /// in it, and keeps all records there until they are in the store.
    ///
    /// # Errors
    /// As [`Place::open`]; also [`Failure::Stale`] if another client has opened the volume since that process.
    pub async fn open_with(
        &self,
        epoch: u64,
        mut config: Config,
        keep: Option<&Keep>,
    ) -> Result<Volume, Failure> {
        config.clamp();
        self.check_key()?;
        let opened = opening::take_over(&self.access, epoch, keep).await?;
        match recover(self.access.clone(), config, &self.description, opened).await {
            Err(failure)
                if opening::is_missing(&failure)
                    && opening::is_superseded(&self.access, epoch).await? =>
            {
                Err(Failure::Fenced)
            }
            other => other.map(|shared| Volume(Arc::new(shared))),
        }
    }

    /// Fences every writer of an earlier epoch than the one that this opener has claimed. Does not open the volume.
    ///
    /// # Errors
    /// Returns an error if the store fails, or if an object is lost or damaged.
    pub async fn end_earlier(&self, epoch: u64) -> Result<(), Failure> {
        opening::end_earlier(&self.access, epoch, &mut Kept::default()).await.map(|_| ())
    }

    /// States that this opener has stopped, in the epoch that it has claimed. Its volume must not be used any more.
    ///
    /// # Errors
    /// Returns an error if the store fails.
    pub async fn release(&self, epoch: u64) -> Result<(), Failure> {
        let release =
            Release { identity: self.access.identity(epoch, 0), nonce: self.access.nonce };
        match self.access.put_soon(Name::Release(epoch), &release.encode()).await? {
            Put::Own => Ok(()),
            Put::Foreign => Err(Failure::Fenced),
        }
    }

    /// Returns the content of the volume as it is now, to read it. The writer continues; what it overwrites stays
    /// readable until it collects the objects, and reads then return [`Failure::Lost`]. Must not be run, written or
    /// flushed.
    ///
    /// # Errors
    /// Returns an error if the volume is damaged, or if the store fails.
    pub async fn view(&self, config: Config) -> Result<Volume, Failure> {
        self.look(None, config).await
    }

    /// Returns the content of a snapshot, to read it. Reads return [`Failure::Lost`] some time after the snapshot was
    /// deleted. Must not be run, written or flushed.
    ///
    /// # Errors
    /// Returns [`Failure::NoSnapshot`] if there is no such snapshot, and otherwise as [`Place::view`].
    pub async fn view_snapshot(&self, id: SnapshotId, config: Config) -> Result<Volume, Failure> {
        self.look(Some(id), config).await
    }

    /// Looks at the volume or a snapshot, again if the writer has deleted what the look was about to read.
    async fn look(
        &self,
        snapshot: Option<SnapshotId>,
        mut config: Config,
    ) -> Result<Volume, Failure> {
        config.clamp();
        let mut looks = 0;
        loop {
            let opened = opening::observe(&self.access).await?;
            let access = self.access.clone();
            let mut found = recover(access, config.clone(), &self.description, opened).await;
            if let (Ok(volume), Some(id)) = (&found, snapshot) {
                found = volume.view_snapshot(id, config.clone()).await;
            }
            match found {
                Err(failure) if opening::is_missing(&failure) && looks < MAX_LOOKS => looks += 1,
                other => return other.map(|shared| Volume(Arc::new(shared))),
            }
        }
    }
}
