//! Ends what belongs to a PersistentVolume that is being deleted: its finalizer, when no attachment is left, and
//! the grant of its volume. The finalizer goes last: without it, nothing would have the grant looked at again.

use std::time::Duration;

use cleat_core::error::Result;
use kube::ResourceExt;
use kube::api::{DeleteParams, Preconditions};
use serde_json::json;

use crate::api::{call, is_conflict};
use crate::cluster::{BY_VOLUME, Cluster};
use crate::grant::grant_name;
use crate::queue::Next;

/// Removes the finalizer of the PersistentVolume `name` if it is being deleted and no attachment names it.
pub(crate) async fn sync(cluster: &Cluster, name: &str) -> Result<Next> {
    let Some(known) = cluster.volumes.mirror.get(name) else { return Ok(Next::Done) };
    let is_ours = known.finalizers().contains(&cluster.finalizer);
    if known.metadata.deletion_timestamp.is_none() || !is_ours {
        return Ok(Next::Done);
    }
    // An attachment that cannot be read may be of this volume.
    let attachments = &cluster.attachments.mirror;
    if attachments.unreadable_len() > 0 || !attachments.find(BY_VOLUME, name).is_empty() {
        // The end of the last one has this volume looked at again.
        return Ok(Next::Done);
    }
    let csi = known.spec.as_ref().and_then(|spec| spec.csi.as_ref());
    if let Some(csi) = csi.filter(|csi| csi.driver == cluster.config.driver) {
        let grant = grant_name(&csi.driver, &csi.volume_handle);
        if !remove_grant(cluster, &grant, name).await? {
            return Ok(Next::After(Duration::ZERO));
        }
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
/// no holder is left. Returns `false` if the grant has changed meanwhile, so that this must be tried again.
async fn remove_grant(cluster: &Cluster, grant: &str, volume: &str) -> Result<bool> {
    cluster.grants.check(grant)?;
    let volumes = cluster.volumes.mirror.find(0, grant);
    let is_shared = volumes
        .iter()
        .any(|other| other.name_any() != volume && other.metadata.deletion_timestamp.is_none());
    let Some(known) = cluster.grants.mirror.get(grant).filter(|_| !is_shared) else {
        return Ok(true);
    };
    if known.metadata.deletion_timestamp.is_some() || !cluster.attachments_of(grant).is_empty() {
        return Ok(true);
    }
    let preconditions =
        Preconditions { uid: known.uid(), resource_version: known.resource_version() };
    let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
    let request = cluster.grants.api.delete(grant, &parameters);
    match call(|| format!("cannot delete grant {grant}"), request).await {
        Ok(_) => {
            cluster.metrics.write("delete");
            Ok(true)
        }
        Err(error) if is_conflict(&error) => {
            cluster.grants.refresh(grant).await?;
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};

    use cleat_grants::object::GrantSpec;

    use super::*;
    use crate::fake::{self, DRIVER};
    use crate::grant::VolumeGrant;

    const HANDLE: &str = "shared/v";

    fn grant(version: &str) -> VolumeGrant {
        let mut grant = VolumeGrant::new(DRIVER, HANDLE, GrantSpec::default());
        grant.metadata.uid = Some("1".to_owned());
        grant.metadata.resource_version = Some(version.to_owned());
        grant
    }

    #[tokio::test]
    async fn the_finalizer_stays_until_a_grant_that_changes_meanwhile_is_deleted() {
        let (deletions, writes) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::default()));
        let volume = json!({
            "metadata": {
                "name": "v", "uid": "2", "resourceVersion": "3", "finalizers": ["f"],
                "deletionTimestamp": "2026-11-25T00:00:00Z",
            },
            "spec": { "csi": { "driver": DRIVER, "volumeHandle": HANDLE } },
        });
        let (answered, written) = (volume.clone(), Arc::clone(&writes));
        let mut cluster = fake::cluster_of(move |method, _| {
            let writes: &Mutex<Vec<String>> = &written;
            writes.lock().unwrap().push(method.to_owned());
            match method {
                "DELETE" if deletions.fetch_add(1, Ordering::SeqCst) == 0 => {
                    let reason = json!({ "status": "Failure", "reason": "Conflict", "code": 409 });
                    (409, reason)
                }
                "PATCH" => (200, answered.clone()),
                _ => (200, json!(grant("5"))),
            }
        });
        "f".clone_into(&mut cluster.finalizer);
        cluster.volumes.mirror.put(serde_json::from_value(volume).unwrap());
        cluster.grants.mirror.put(grant("4"));
        assert!(matches!(sync(&cluster, "v").await.unwrap(), Next::After(_)));
        assert_eq!(*writes.lock().unwrap(), ["DELETE", "GET"]);
        assert!(matches!(sync(&cluster, "v").await.unwrap(), Next::Done));
        assert_eq!(*writes.lock().unwrap(), ["DELETE", "GET", "DELETE", "PATCH"]);
    }
}
