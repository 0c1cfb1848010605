//! The sweeper, at the start of a leader and once a day: gives claims that no grant names a holder, and removes grants that
//! nobody needs any more.
//!
//! A claim without a grant is left when the grant was lost, for example with the restored backup of an API server, and
//! its node does not know of the claim, because it was installed anew. Nothing proves that its client has ended. So it
//! gets a holder, and the controller does what it does after a detach: its node is asked to release the volume.
//!
//! A grant is left when its PersistentVolume was deleted while no controller ran, or without its finalizer, and after an
//! inline volume. It is removed only if all of this was read: no PersistentVolume has the volume, no VolumeAttachment
//! asks for it, no node holds it, and either the storage does not have it, or it has no claim there and no fence waits
//! for its node to clean up. The removal is conditional on the version of the grant from which this follows. The next
//! generation of the volume is in the record at the storage, so a grant that is made anew later continues there.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cleat_core::error::{ErrorKind, Result};
use cleat_grants::controller::{View, adopt_unrequested};
use cleat_grants::record::Record;
use kube::ResourceExt;
use kube::api::{DeleteParams, Preconditions};

use crate::api::{call, is_conflict, message, now};
use crate::cluster::{Cluster, Key};
use crate::grant::{VolumeGrant, grant_name};
use crate::queue::Next;
use crate::volumes::ObservedVolume;

/// The time between two sweeps.
const PERIOD: Duration = Duration::from_secs(24 * 3600);

/// What a sweep has done.
#[derive(Debug, Default)]
struct Swept {
    removed: usize,
    adopted: usize,
}

/// Sweeps until the future is dropped.
pub(crate) async fn run(cluster: Arc<Cluster>) {
    loop {
        let mut swept = Swept::default();
        for (name, handle) in volumes_of(&cluster) {
            // Nobody else works on the volume meanwhile.
            let key = Key::Grant(name.clone());
            cluster.queue.take(&key).await;
            let result = sweep(&cluster, &name, &handle, &mut swept).await;
            cluster.queue.done(key, Next::Done);
            if let Err(error) = result {
                tracing::warn!(grant = name, "not swept: {}", message(&error));
            }
        }
        let Swept { removed, adopted } = swept;
        tracing::info!(removed, adopted, "swept the grants and the claims without one");
        tokio::time::sleep(PERIOD).await;
    }
}

/// Returns the handles of the volumes that have a grant or a PersistentVolume, by the names of their grants.
fn volumes_of(cluster: &Cluster) -> BTreeMap<String, String> {
    let of_grants = cluster.grants.mirror.all();
    let of_grants = of_grants
        .iter()
        .filter_map(|grant| grant.volume().map(|handle| (grant.name_any(), handle.to_owned())));
    let volumes = cluster.volumes.mirror.all();
    let volumes = volumes.iter().filter_map(|volume| {
        let csi = volume.spec.as_ref()?.csi.as_ref()?;
        Some((grant_name(&csi.driver, &csi.volume_handle), csi.volume_handle.clone()))
    });
    volumes.chain(of_grants).collect()
}

/// Looks at one volume.
async fn sweep(cluster: &Cluster, name: &str, handle: &str, swept: &mut Swept) -> Result<()> {
    let Some(volume) = ObservedVolume::of_handle(cluster, name, handle) else { return Ok(()) };
    let is_held = |grant: &VolumeGrant| {
        !grant.spec.holders.is_empty() || grant.metadata.deletion_timestamp.is_some()
    };
    let is_requested = || !cluster.attachments_of(name).is_empty();
    if is_requested() || volume.grant.as_deref().is_some_and(is_held) {
        return Ok(());
    }
    let record = volume.read_record().await?;
    if is_requested() {
        return Ok(());
    }
    if let Some(record) = record.as_ref().filter(|record| !record.claims.is_empty()) {
        swept.adopted += usize::from(adopt(&volume, record).await?);
        return Ok(());
    }
    let Some(grant) = &volume.grant else { return Ok(()) };
    let is_clean = record.is_none() || grant.status.grant.fences.is_empty();
    if is_clean && cluster.volumes.mirror.find(0, name).is_empty() {
        swept.removed += usize::from(remove(cluster, grant).await?);
    }
    Ok(())
}

/// Gives a claim a holder that no grant names. Returns whether it has.
async fn adopt(volume: &ObservedVolume<'_>, record: &Record) -> Result<bool> {
    let nodes = volume.cluster.node_states(record.claims.iter().map(|claim| claim.node.as_str()));
    let grant = volume.grant.as_deref().map(VolumeGrant::stored);
    let view = View {
        grant: grant.as_ref(),
        requests: &[],
        nodes: &nodes,
        record: Some(record),
        is_gone: false,
    };
    let Some(step) = adopt_unrequested(&view, now()) else {
        let claims = &record.claims;
        tracing::warn!(volume = volume.handle, ?claims, "claims of nodes that are not known stay");
        return Ok(false);
    };
    unless_changed(volume.perform(step).await)
}

/// Removes a grant that nobody needs. Returns whether it has.
async fn remove(cluster: &Cluster, grant: &VolumeGrant) -> Result<bool> {
    let name = grant.name_any();
    let preconditions =
        Preconditions { uid: grant.uid(), resource_version: grant.resource_version() };
    let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
    let request = cluster.grants.api.delete(&name, &parameters);
    let removed = call(|| format!("cannot delete grant {name}"), request).await.map(|_| ());
    if unless_changed(removed)? {
        cluster.metrics.write("delete");
        tracing::info!(grant = name, volume = grant.volume(), "removed a grant that nobody needs");
        return Ok(true);
    }
    Ok(false)
}

/// Returns whether a conditional write was done: `false` if somebody else has changed the object.
fn unless_changed(written: Result<()>) -> Result<bool> {
    match written {
        Ok(()) => Ok(true),
        Err(error) if is_conflict(&error) || error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}
