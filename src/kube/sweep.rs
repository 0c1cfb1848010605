//! The sweeper: removes grants that nobody needs any more, at the start of a leader and once a day. Such a grant is
//! left when its PersistentVolume was deleted while no controller ran, or without its finalizer, and after an inline
//! volume.
//!
//! A grant is removed only if all of this was read: no PersistentVolume has the volume, no VolumeAttachment asks for
//! it, no node holds it, and either the storage does not have it, or it has no claim there and no fence waits for its
//! node to clean up. The removal is conditional on the version of the grant from which this follows. The next
//! generation of the volume is in the record at the storage, so a grant that is made anew later continues there.

use std::sync::Arc;
use std::time::Duration;

use cleat_core::error::{Error, ErrorKind, Result};
use kube::ResourceExt;
use kube::api::{DeleteParams, Preconditions};

use crate::api::{call, is_conflict, message};
use crate::cluster::Cluster;
use crate::grant::VolumeGrant;
use crate::storage::{self, Backing};

/// The time between two sweeps.
const PERIOD: Duration = Duration::from_secs(24 * 3600);

/// Sweeps until the future is dropped.
pub(crate) async fn run(cluster: Arc<Cluster>) {
    loop {
        let mut removed = 0_usize;
        for grant in cluster.grants.mirror.all() {
            match sweep(&cluster, &grant).await {
                Ok(is_removed) => removed += usize::from(is_removed),
                Err(error) => {
                    tracing::warn!(grant = grant.name_any(), "not swept: {}", message(&error));
                }
            }
        }
        tracing::info!(removed, "swept the grants");
        tokio::time::sleep(PERIOD).await;
    }
}

/// Removes a grant that nobody needs. Returns whether it has.
async fn sweep(cluster: &Cluster, grant: &VolumeGrant) -> Result<bool> {
    let name = grant.name_any();
    let is_used = || {
        !cluster.volumes.mirror.find(0, &name).is_empty()
            || !cluster.attachments_of(&name).is_empty()
    };
    let is_fenced = !grant.status.grant.fences.is_empty();
    if !grant.spec.holders.is_empty() || grant.metadata.deletion_timestamp.is_some() || is_used() {
        return Ok(false);
    }
    let is_free = match claims(cluster, grant).await? {
        Some(claims) => claims == 0 && !is_fenced,
        None => true,
    };
    if !is_free || is_used() {
        return Ok(false);
    }
    let preconditions =
        Preconditions { uid: grant.uid(), resource_version: grant.resource_version() };
    let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
    let request = cluster.grants.api.delete(&name, &parameters);
    match call(|| format!("cannot delete grant {name}"), request).await {
        Ok(_) => {
            cluster.metrics.write("delete");
            tracing::info!(
                grant = name,
                volume = grant.volume(),
                "removed a grant that nobody needs"
            );
            Ok(true)
        }
        Err(error) if is_conflict(&error) || error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns the number of nodes that have claimed the volume at its storage; `None` if it does not exist.
///
/// # Errors
/// Returns an error if that cannot be found out.
async fn claims(cluster: &Cluster, grant: &VolumeGrant) -> Result<Option<usize>> {
    let unknown =
        || Error::new(ErrorKind::InvalidArgument, "it is not known which volume it is of");
    let handle = grant.volume().ok_or_else(unknown)?;
    let Backing::Granted(storage) = cluster.storage.find(handle)? else { return Err(unknown()) };
    match storage::on_thread(&storage, handle, |storage, deadline| storage.record(deadline)).await {
        Ok(record) => Ok(Some(record.claims.len())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
