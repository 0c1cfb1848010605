//! The sweeper, at the start of a leader and once a day: gives claims that no grant names a holder, and removes grants that
//! nobody needs any more. [`UnknownClaims`] reports the claims of volumes that the API server does not know.
//!
//! It reads the records at the storages one after the other, while other tasks decide about the same volumes: its writes
//! depend on the version of the grant that it observed before it read the record. When a storage does not answer, its
//! other volumes are not asked for. What was not looked at is tried again with a backoff.
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

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_grants::controller::{View, adopt_unrequested};
use cleat_grants::record::Record;
use kube::ResourceExt;
use kube::api::{DeleteParams, Preconditions};
use tokio::time::Instant;

use crate::api::{call, is_conflict, message, now};
use crate::cluster::{BY_GRANT, BY_VOLUME, Cluster};
use crate::grant::{VolumeGrant, grant_name};
use crate::objects::PersistentVolume;
use crate::storage::{has_not_answered, place};
use crate::unknown_claims::UnknownClaims;
use crate::volumes::ObservedVolume;

/// The time until volumes are tried again that a sweep could not look at. It doubles up to [`MAX_RETRY`].
const RETRY: Duration = Duration::from_secs(5);

/// The longest time until they are tried again.
const MAX_RETRY: Duration = Duration::from_secs(600);

/// The name of a grant, and the handle of its volume.
type Volume = (String, String);

/// What a sweep has done.
#[derive(Debug, Default)]
struct Swept {
    removed: usize,
    adopted: usize,
}

/// Sweeps until the future is dropped.
pub(crate) async fn run(cluster: Arc<Cluster>) {
    loop {
        let next = Instant::now() + cluster.config.sweep_period;
        let mut left: Vec<Volume> = volumes_of(&cluster).into_iter().collect();
        let mut unknown =
            UnknownClaims::begin(&cluster, left.iter().map(|(_, handle)| place(handle)));
        let mut wait = RETRY;
        loop {
            let (mut swept, mut pass) = (Swept::default(), Pass::default());
            for volume in left {
                if let Some((name, handle)) = pass.begin(&volume)
                    && let Err(error) = sweep(&cluster, name, handle, &mut swept).await
                {
                    tracing::warn!(grant = name, "not swept: {}", message(&error));
                    pass.failed(volume, &error);
                }
            }
            unknown.look(&cluster, &mut pass.silent).await;
            left = pass.left();
            let Swept { removed, adopted } = swept;
            tracing::info!(removed, adopted, left = left.len(), "swept grants and claims");
            if (left.is_empty() && unknown.is_complete()) || Instant::now() + wait >= next {
                break;
            }
            tokio::time::sleep(wait).await;
            wait = (2 * wait).min(MAX_RETRY);
        }
        tokio::time::sleep_until(next).await;
    }
}

/// One look at each of some volumes. When the storage of one does not answer, those in the same place are not looked at,
/// because each would wait as long.
#[derive(Debug, Default)]
struct Pass {
    /// The places of the volumes whose storage has not answered.
    silent: BTreeSet<String>,
    skipped: Vec<Volume>,
    failed: Vec<Volume>,
}

impl Pass {
    /// Returns a volume to look at; `None` if it is skipped.
    fn begin<'a>(&mut self, volume: &'a Volume) -> Option<&'a Volume> {
        if self.silent.contains(place(&volume.1)) {
            self.skipped.push(volume.clone());
            return None;
        }
        Some(volume)
    }

    fn failed(&mut self, volume: Volume, error: &Error) {
        if has_not_answered(error) {
            self.silent.insert(place(&volume.1).to_owned());
        }
        self.failed.push(volume);
    }

    /// Returns the volumes that have to be looked at again. Those that were skipped come first: one volume that never
    /// answers does not keep the others from their turn.
    fn left(self) -> Vec<Volume> {
        self.skipped.into_iter().chain(self.failed).collect()
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
    cluster.grants.check(name)?;
    let Some(volume) = ObservedVolume::of_handle(cluster, name, handle) else { return Ok(()) };
    let is_held = |grant: &VolumeGrant| {
        !grant.spec.holders.is_empty() || grant.metadata.deletion_timestamp.is_some()
    };
    let is_requested = || is_requested(cluster, name);
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
    // A PersistentVolume that cannot be read may have the volume.
    let volumes = &cluster.volumes.mirror;
    if is_clean && volumes.unreadable_len() == 0 && volumes.find(0, name).is_empty() {
        swept.removed += usize::from(remove(cluster, grant).await?);
    }
    Ok(())
}

/// Whether a VolumeAttachment asks for the volume of a grant. A new one names only its PersistentVolume. One that cannot
/// be read may do so.
fn is_requested(cluster: &Cluster, name: &str) -> bool {
    let attachments = &cluster.attachments.mirror;
    if attachments.unreadable_len() > 0 {
        return true;
    }
    let has_attachment = |volume: &Arc<PersistentVolume>| {
        !attachments.find(BY_VOLUME, &volume.name_any()).is_empty()
    };
    !attachments.find(BY_GRANT, name).is_empty()
        || cluster.volumes.mirror.find(0, name).iter().any(has_attachment)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn volumes(handles: &[&str]) -> Vec<Volume> {
        handles.iter().map(|handle| (format!("grant-of-{handle}"), (*handle).to_owned())).collect()
    }

    /// Looks at the volumes as the sweeper does, and returns those that were asked for and those that are left.
    fn look_at(volumes: Vec<Volume>) -> (Vec<String>, Vec<Volume>) {
        let (mut pass, mut asked) = (Pass::default(), Vec::new());
        for volume in volumes {
            let Some((_, handle)) = pass.begin(&volume) else { continue };
            asked.push(handle.clone());
            match &**handle {
                "rbd/lost/p//a" | "rbd/lost/p//b" => {
                    pass.failed(volume, &Error::new(ErrorKind::TimedOut, "late"));
                }
                "rbd/c/p//broken" => {
                    pass.failed(volume, &Error::new(ErrorKind::Internal, "not a record"));
                }
                _ => {}
            }
        }
        (asked, pass.left())
    }

    #[test]
    fn a_storage_that_does_not_answer_is_asked_once_and_for_another_volume_the_next_time() {
        let all = ["rbd/lost/p//a", "rbd/lost/p//b", "rbd/c/p//broken", "rbd/c/p//v"];
        let (asked, left) = look_at(volumes(&all));
        assert_eq!(asked, ["rbd/lost/p//a", "rbd/c/p//broken", "rbd/c/p//v"]);
        assert_eq!(left, volumes(&["rbd/lost/p//b", "rbd/lost/p//a", "rbd/c/p//broken"]));
        let (asked, left) = look_at(left);
        assert_eq!(asked, ["rbd/lost/p//b", "rbd/c/p//broken"]);
        assert_eq!(left, volumes(&["rbd/lost/p//a", "rbd/lost/p//b", "rbd/c/p//broken"]));
    }
}
