//! The volumes from which a volume was cloned: access to their objects, which it only reads.

use std::sync::Arc;

use super::access::{Access, Ancestor, Failure};
use crate::codec::{Description, Parent};
use crate::encryption::KeyFile;
use crate::name::{Name, Nonce, VolumeId};
use crate::store::{Store, StoreError};

/// The maximum number of volumes of which each is a clone of the next one.
const MAX_DEPTH: usize = 16;

/// Finds the stores of parents.
pub trait Parents: Send + Sync {
    /// Returns the store of the volume at a location that a description names.
    ///
    /// # Errors
    /// Returns `NotFound` if there is no volume, and otherwise why the store cannot be used.
    fn store(&self, location: &str) -> Result<Arc<dyn Store>, StoreError>;
}

/// For volumes that are no clones.
pub(super) struct NoParents;

impl Parents for NoParents {
    fn store(&self, location: &str) -> Result<Arc<dyn Store>, StoreError> {
        Err(StoreError::Refused(format!("the parent at {location} is not accessible")))
    }
}

/// Reads the descriptions of a volume and of all its parents.
///
/// # Errors
/// Returns `Lost(Description)` if the volume or a parent does not exist, and another error if a parent is another
/// volume than before, if a store fails, or if the key file is not that of all these volumes.
pub(super) async fn find(
    store: Arc<dyn Store>,
    nonce: Nonce,
    parents: &dyn Parents,
    key: Option<&KeyFile>,
) -> Result<Ancestor, Failure> {
    let mut found = vec![describe(store, nonce).await?];
    while let Some((store, description)) = found.last()
        && let Some(parent) = &description.parent
        && !is_flat(store, description.volume, nonce).await?
    {
        if found.len() >= MAX_DEPTH {
            return Err(Failure::Unsupported("a clone of a clone, more than 16 times"));
        }
        match describe_parent(parents, parent, nonce).await {
            // It may have been flattened, and the parent removed, since the look.
            Err(Failure::Lost(_)) if is_flat(store, description.volume, nonce).await? => break,
            other => found.push(other?),
        }
    }
    let mut behind = None;
    for (store, description) in found.into_iter().rev() {
        let access = Access::to(store, &description, nonce, key)?;
        let access = access.with_parent(behind.take());
        behind = Some(Ancestor { access, description });
    }
    behind.ok_or(Failure::Lost(Name::Description))
}

/// Whether a clone needs no parent any more.
async fn is_flat(store: &Arc<dyn Store>, volume: VolumeId, nonce: Nonce) -> Result<bool, Failure> {
    Access::new(Arc::clone(store), volume, nonce).exists(Name::Flat).await
}

/// Finds a parent, and reads its description.
async fn describe_parent(
    parents: &dyn Parents,
    parent: &Parent,
    nonce: Nonce,
) -> Result<(Arc<dyn Store>, Description), Failure> {
    let store = parents.store(&parent.location).map_err(|error| match error {
        StoreError::NotFound => Failure::Lost(Name::Description),
        error => Failure::Store { name: Name::Description.to_string(), error },
    })?;
    let found = describe(store, nonce).await?;
    match found.1.volume == parent.volume {
        true => Ok(found),
        false => Err(Failure::Lost(Name::Description)),
    }
}

/// Reads the description of a volume.
pub(super) async fn describe(
    store: Arc<dyn Store>,
    nonce: Nonce,
) -> Result<(Arc<dyn Store>, Description), Failure> {
    let unknown = Access::new(Arc::clone(&store), VolumeId([0; 16]), nonce);
    let found = unknown.decode(Name::Description, Description::decode).await?;
    Ok((store, found.ok_or(Failure::Lost(Name::Description))?))
}
