//! The attach/detach loop: creates and deletes the VolumeAttachments of volumes as pods need them, in clusters in which
//! kube-controller-manager does not (`attachRequired: false`). What is attached is then decided as for every
//! VolumeAttachment.
//!
//! The desired state follows from the pods, their claims, the volumes and the nodes, and the actual state from the
//! VolumeAttachments and the grants. Nothing is remembered, so a new leader continues where the old one has ended. Each
//! volume is worked on by one task at a time, and a call that fails is repeated with the backoff of the queue; no
//! object is written before it.

mod plan;
pub(crate) mod pods;
pub(crate) mod state;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_grants::object::Signal;
use k8s_openapi::api::storage::v1::CSIDriver;
use kube::api::{Api, DeleteParams, PostParams, Preconditions};
use kube::runtime::events::EventType;
use kube::{Client, Resource, ResourceExt};
use serde_json::json;

use crate::api::{call, is_conflict, now, seconds};
use crate::attaching::GENERATION;
use crate::cluster::{BY_VOLUME, Cluster, Key};
use crate::grant::grant_name;
use crate::kind::full_name;
use crate::objects::{PersistentVolume, Pod, VolumeAttachment};
use crate::queue::Next;
use crate::volumes::{ObservedVolume, attachment_name};
use plan::{Attachment, Facts, Plan, plan};
use state::{BY_NODE, Wanted};

/// The longest time after which a node that still uses a volume is looked at again.
const LOOK_AGAIN: Duration = Duration::from_secs(30);

/// Has the volumes of claims looked at.
pub(crate) fn look_at_claims(cluster: &Cluster, wanted: &Wanted, claims: &[String]) {
    for claim in claims {
        let found = wanted.claims.mirror.get(claim);
        let volume = found.and_then(|claim| claim.spec.as_ref()?.volume_name.clone());
        if let Some(volume) = volume.filter(|name| !name.is_empty()) {
            cluster.queue.add(Key::Wanted(volume));
        }
    }
}

/// Has the volumes of the pods on a node looked at.
pub(crate) fn look_at_node(cluster: &Cluster, wanted: &Wanted, node: &str) {
    for pod in wanted.pods.mirror.find(BY_NODE, node) {
        look_at_claims(cluster, wanted, &pods::claims(&pod));
    }
}

/// Checks that Kubernetes does not attach the volumes of the driver itself.
///
/// # Errors
/// Returns `Unsupported` if it does.
pub(crate) async fn check(client: &Client, driver: &str) -> Result<()> {
    let drivers: Api<CSIDriver> = Api::all(client.clone());
    let what = || format!("cannot read the CSIDriver {driver}");
    let found = call(what, drivers.get_opt(driver)).await?;
    if found.is_some_and(|found| found.spec.attach_required == Some(false)) {
        return Ok(());
    }
    let message = format!(
        "kube-controller-manager attaches the volumes of {driver}, because its CSIDriver does not say attachRequired: \
         false"
    );
    Err(Error::new(ErrorKind::Unsupported, message).with_repair(
        "leave out --attach-detach, or create the CSIDriver with attachRequired: false",
    ))
}

/// Creates and deletes the attachments of the PersistentVolume `name`.
pub(crate) async fn sync(cluster: &Cluster, wanted: &Wanted, name: &str) -> Result<Next> {
    cluster.volumes.check(name)?;
    let volume = cluster.volumes.mirror.get(name);
    let mut facts = facts(cluster, wanted, name, volume.as_deref());
    // What does not depend on it is done also if the storage does not answer.
    let gone = if facts.waits() { is_gone(cluster, volume.as_deref()).await } else { Ok(false) };
    if matches!(gone, Ok(true)) {
        facts.attachments.iter_mut().for_each(|known| known.unused = true);
    }
    let Plan { detach: ending, attach: nodes, refused } = plan(&facts);
    for attachment in &ending {
        detach(cluster, attachment).await?;
    }
    for node in &nodes {
        attach(cluster, volume.as_deref(), name, node).await?;
    }
    report(cluster, wanted, name, refused).await;
    gone?;
    Ok(if facts.waits() { Next::After(look_again(cluster, &facts)) } else { Next::Done })
}

/// Returns when to look again at nodes that still use a volume: when the first of them has not been ready for so long
/// that it counts as lost, at the latest after [`LOOK_AGAIN`].
fn look_again(cluster: &Cluster, facts: &Facts) -> Duration {
    let (now, forced_s) = (now(), cluster.config.policy.forced_detach_s);
    let nodes = cluster.node_states(facts.attachments.iter().map(|known| &*known.node));
    let lost_at = nodes.values().filter_map(|node| Some(node.not_ready_since?.0 + forced_s));
    let first = lost_at.filter(|at| *at > now.0).min();
    first.map_or(LOOK_AGAIN, |at| LOOK_AGAIN.min(Duration::from_secs(at - now.0)))
}

fn facts(
    cluster: &Cluster,
    wanted: &Wanted,
    name: &str,
    volume: Option<&PersistentVolume>,
) -> Facts {
    let attachments = cluster.attachments.mirror.find(BY_VOLUME, name);
    let pods = volume.map(|volume| wanted.pods_of(volume)).unwrap_or_default();
    let modes = volume.and_then(|volume| volume.spec.as_ref()?.access_modes.clone());
    let several = |mode: &String| mode == "ReadWriteMany" || mode == "ReadOnlyMany";
    Facts {
        pods: pods.iter().filter_map(|pod| needed(cluster, pod)).collect(),
        attachments: attachments.iter().map(|known| attachment(cluster, volume, known)).collect(),
        several_nodes: modes.is_some_and(|modes| modes.iter().any(several)),
        ending: volume.is_none_or(|volume| volume.metadata.deletion_timestamp.is_some()),
    }
}

/// Returns a pod that needs its volumes on a node that this loop attaches for.
fn needed(cluster: &Cluster, pod: &Arc<Pod>) -> Option<plan::Pod> {
    let name = pods::node(pod)?;
    let node = cluster.nodes.mirror.get(&name)?;
    if !pods::is_managed(&node) || !pods::needs_volumes(pod, &node) {
        return None;
    }
    let created = pod.metadata.creation_timestamp.as_ref();
    Some(plan::Pod {
        name: full_name(&**pod),
        node: name,
        created: created.map(|time| seconds(time.0).0).unwrap_or_default(),
    })
}

fn attachment(
    cluster: &Cluster,
    volume: Option<&PersistentVolume>,
    known: &VolumeAttachment,
) -> Attachment {
    let node = &known.spec.node_name;
    let states = cluster.node_states([&**node].into_iter());
    let is_lost = cluster.config.policy.fencing_reason(states.get(node), false, now()).is_some();
    Attachment {
        name: known.name_any(),
        node: node.clone(),
        ending: known.metadata.deletion_timestamp.is_some(),
        unused: is_lost || is_released(cluster, volume, known),
    }
}

/// Returns whether a node has said that it does not use the volume. Until then it is assumed to use it, also if the grant
/// was lost: it is made again from the record at the storage, unless the volume [`is_gone`]. A volume that needs no grant is
/// not asked for.
fn is_released(
    cluster: &Cluster,
    volume: Option<&PersistentVolume>,
    attachment: &VolumeAttachment,
) -> bool {
    let csi = volume.and_then(|volume| volume.spec.as_ref()?.csi.as_ref());
    let Some(csi) = csi else { return true };
    let name = grant_name(&csi.driver, &csi.volume_handle);
    let Some(grant) = cluster.grants.mirror.get(&name) else { return !was_granted(attachment) };
    let (grant, node) = (grant.stored().grant, &attachment.spec.node_name);
    let Some(holder) = grant.holder(node) else { return true };
    grant.is_true(node, Signal::SafeToDetach, holder.generation)
}

/// Returns whether the storage has answered that a volume does not exist whose grant was lost: no node can use it, and the
/// grant cannot be made again from the record. A storage that does not answer proves nothing.
async fn is_gone(cluster: &Cluster, volume: Option<&PersistentVolume>) -> Result<bool> {
    let csi = volume.and_then(|volume| volume.spec.as_ref()?.csi.as_ref());
    let Some(csi) = csi else { return Ok(false) };
    let grant = grant_name(&csi.driver, &csi.volume_handle);
    let Some(observed) = ObservedVolume::of_handle(cluster, &grant, &csi.volume_handle) else {
        return Ok(false);
    };
    if observed.grant.is_some() || observed.read_record().await?.is_some() {
        return Ok(false);
    }
    Ok(cluster.grants.refresh(&grant).await?.is_none())
}

fn was_granted(attachment: &VolumeAttachment) -> bool {
    let status = attachment.status.as_ref();
    let metadata = status.and_then(|status| status.attachment_metadata.as_ref());
    metadata.is_some_and(|metadata| metadata.contains_key(GENERATION))
}

async fn detach(cluster: &Cluster, name: &str) -> Result<()> {
    let Some(known) = cluster.attachments.mirror.get(name) else { return Ok(()) };
    let preconditions =
        Preconditions { uid: known.uid(), resource_version: known.resource_version() };
    let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
    let request = cluster.attachments.api.delete(name, &parameters);
    match call(|| format!("cannot delete VolumeAttachment {name}"), request).await {
        Ok(_) => {
            cluster.metrics.write("attachment");
            tracing::info!(
                attachment = name,
                node = known.spec.node_name,
                "detaching: no pod needs it"
            );
            // The answer has the object in both cases: whether it is gone, or has finalizers and is ending.
            cluster.attachments.refresh(name).await.map(drop)
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            cluster.attachments.refresh(name).await.map(drop)
        }
        Err(error) if is_conflict(&error) => {
            cluster.attachments.refresh(name).await?;
            Err(Error::new(ErrorKind::Aborted, error.report()))
        }
        Err(error) => Err(error),
    }
}

async fn attach(
    cluster: &Cluster,
    volume: Option<&PersistentVolume>,
    name: &str,
    node: &str,
) -> Result<()> {
    let csi = volume.and_then(|volume| volume.spec.as_ref()?.csi.as_ref());
    let Some(csi) = csi else { return Ok(()) };
    let attachment = attachment_name(&csi.volume_handle, &csi.driver, node);
    let object: VolumeAttachment = serde_json::from_value(json!({
        "metadata": { "name": attachment },
        "spec": {
            "attacher": csi.driver, "nodeName": node, "source": { "persistentVolumeName": name },
        },
    }))
    .map_err(|error| {
        Error::new(ErrorKind::Internal, "internal: not a VolumeAttachment").with_source(error)
    })?;
    let parameters = PostParams::default();
    let request = cluster.attachments.api.create(&parameters, &object);
    match call(|| format!("cannot create VolumeAttachment {attachment}"), request).await {
        Ok(made) => {
            cluster.metrics.write("attachment");
            tracing::info!(volume = name, node, "attaching: a pod needs it");
            cluster.attachments.mirror.put(made);
            cluster.queue.add(Key::Attachment(attachment));
            Ok(())
        }
        // It is still ending, or the mirror is behind.
        Err(error) if is_conflict(&error) || error.kind() == ErrorKind::AlreadyExists => {
            cluster.attachments.refresh(&attachment).await.map(drop)
        }
        Err(error) => Err(error),
    }
}

/// Writes an event for each pod that is refused and was not before.
async fn report(
    cluster: &Cluster,
    wanted: &Wanted,
    volume: &str,
    refused: BTreeMap<String, String>,
) {
    for (pod, node) in wanted.refuse(volume, refused) {
        let Some(found) = wanted.pods.mirror.get(&pod) else { continue };
        let note = format!(
            "Multi-Attach error for volume \"{volume}\": the volume is already used by pods on node {node}"
        );
        tracing::info!(volume, pod, node, "a pod waits: another node uses its volume");
        let (about, reason) = (found.object_ref(&()), "FailedAttachVolume");
        cluster.events.publish_about(&about, EventType::Warning, reason, note).await;
    }
}
