//! Ends what belongs to a PersistentVolume that is being deleted: its finalizer, when no attachment is left, and
//! the grant of its volume.

use cleat_core::error::Result;
use kube::ResourceExt;
use kube::api::{DeleteParams, Preconditions};
use serde_json::json;

use crate::api::{call, is_conflict};
use crate::cluster::{BY_VOLUME, Cluster, Key};
use crate::grant::grant_name;
use crate::queue::Next;

/// Removes the finalizer of the PersistentVolume `name` if it is being deleted and no attachment names it.
pub(crate) async fn sync(cluster: &Cluster, name: &str) -> Result<Next> {
    let Some(known) = cluster.volumes.mirror.get(name) else { return Ok(Next::Done) };
    let is_ours = known.finalizers().contains(&cluster.finalizer);
    if known.metadata.deletion_timestamp.is_none() || !is_ours {
        return Ok(Next::Done);
    }
    if !cluster.attachments.mirror.find(BY_VOLUME, name).is_empty() {
        // The end of the last one has this volume looked at again.
        return Ok(Next::Done);
    }
    let csi = known.spec.as_ref().and_then(|spec| spec.csi.as_ref());
    if let Some(csi) = csi.filter(|csi| csi.driver == cluster.config.driver) {
        remove_grant(cluster, &grant_name(&csi.driver, &csi.volume_handle), name).await?;
    }
    if cluster.config.calls.is_some() {
        // The finalizer is that of external-attacher.
        return Ok(Next::Done);
    }
    let kept: Vec<&String> =
        known.finalizers().iter().filter(|known| **known != cluster.finalizer).collect();
    let body = json!({ "metadata": { "finalizers": kept } });
    let what = "cannot remove the finalizer of PersistentVolume";
    cluster.volumes.patch(&known, body, what).await?;
    cluster.metrics.write("volume");
    Ok(Next::Done)
}

/// Deletes the grant of a volume, unless another PersistentVolume has the same volume. Its finalizer keeps it until
/// no holder is left.
async fn remove_grant(cluster: &Cluster, grant: &str, volume: &str) -> Result<()> {
    let volumes = cluster.volumes.mirror.find(0, grant);
    let is_shared = volumes
        .iter()
        .any(|other| other.name_any() != volume && other.metadata.deletion_timestamp.is_none());
    let Some(known) = cluster.grants.mirror.get(grant).filter(|_| !is_shared) else {
        return Ok(());
    };
    if known.metadata.deletion_timestamp.is_some() || !cluster.attachments_of(grant).is_empty() {
        return Ok(());
    }
    let preconditions =
        Preconditions { uid: known.uid(), resource_version: known.resource_version() };
    let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
    let request = cluster.grants.api.delete(grant, &parameters);
    match call(|| format!("cannot delete grant {grant}"), request).await {
        Ok(_) => {
            cluster.metrics.write("delete");
            Ok(())
        }
        Err(error) if is_conflict(&error) => {
            cluster.grants.refresh(grant).await?;
            cluster.queue.add(Key::Volume(volume.to_owned()));
            Ok(())
        }
        Err(error) => Err(error),
    }
}
