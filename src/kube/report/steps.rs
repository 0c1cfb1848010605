//! The objects on the way of a claim: from the claim to the record at the storage.

use cleat_grants::object::Time;
use kube::ResourceExt;
use serde::Serialize;

use super::facts::{Facts, node_of, not_ready, phase};
use super::{ago, handle, volumes};
use crate::grant::VolumeGrant;

/// An object on the way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Step {
    /// The kind of the object.
    pub kind: &'static str,
    /// Its name.
    pub name: String,
    /// Its state, for people.
    pub state: String,
}

/// Lists the objects on the way.
pub(super) fn of(facts: &Facts<'_>) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut add = |kind, name: String, state: String| steps.push(Step { kind, name, state });
    let unknown = || "unknown".to_owned();
    let status = facts.claim.status.as_ref();
    let phase_of_claim = status.and_then(|status| status.phase.clone()).unwrap_or_else(unknown);
    add("PersistentVolumeClaim", facts.claim.name_any(), phase_of_claim);
    if let Some(class) = &facts.class {
        add("StorageClass", class.name_any(), format!("provisioner {}", class.provisioner));
    }
    if let Some(volume) = &facts.volume {
        let phase = volume.status.as_ref().and_then(|status| status.phase.clone());
        let handle = handle(volume, facts.driver).map(|handle| format!(", volume {handle}"));
        let state = phase.unwrap_or_else(unknown) + &handle.unwrap_or_default();
        add("PersistentVolume", volume.name_any(), state);
    }
    for pod in &facts.pods {
        let node = node_of(pod).map(|node| format!(" on node {node}")).unwrap_or_default();
        add("Pod", pod.name_any(), format!("{}{node}", phase(pod).unwrap_or("unknown")));
    }
    for attachment in &facts.attachments {
        let is_attached = attachment.status.as_ref().is_some_and(|status| status.attached);
        let state = match (attachment.metadata.deletion_timestamp.is_some(), is_attached) {
            (true, _) => "being detached from",
            (false, true) => "attached to",
            (false, false) => "not attached to",
        };
        let state = format!("{state} node {}", attachment.spec.node_name);
        add("VolumeAttachment", attachment.name_any(), state);
    }
    if let Some(grant) = &facts.grant {
        add("VolumeGrant", grant.name_any(), grant_state(grant, facts.now));
    }
    for node in &facts.nodes {
        let state = not_ready(node, facts.now).unwrap_or_else(|| "ready".to_owned());
        add("Node", node.name_any(), state);
    }
    steps.extend(facts.grant.iter().flat_map(|grant| of_storage(grant, facts.now)));
    steps
}

/// The devices, and what the storage has recorded, as nodes and controller have reported them.
fn of_storage(grant: &VolumeGrant, now: Time) -> Vec<Step> {
    let stored = grant.stored().grant;
    let mut steps = Vec::new();
    for entry in &stored.status.nodes {
        if let Some(path) = &entry.device_path {
            let state = format!("on node {}", entry.node);
            steps.push(Step { kind: "Device", name: path.clone(), state });
        }
        if let Some(client) = &entry.client {
            let state =
                format!("claimed by node {} with generation {}", entry.node, entry.generation);
            steps.push(Step { kind: "StorageRecord", name: client.clone(), state });
        }
    }
    for fence in &stored.status.fences {
        let time = ago(fence.time, now);
        let state =
            format!("generation {} of node {} fenced {time} ago", fence.generation, fence.node);
        let name = fence.client.clone().unwrap_or_else(|| "no client".to_owned());
        steps.push(Step { kind: "StorageRecord", name, state });
    }
    steps
}

fn grant_state(grant: &VolumeGrant, now: Time) -> String {
    let holders = volumes::holders(grant);
    let describe = |holder: volumes::HolderRow| {
        let since = ago(holder.since, now);
        let revoked = if holder.revoked { "revoked from" } else { "granted to" };
        let signal = match (holder.safe_to_mount, holder.safe_to_detach) {
            (true, _) => ", safe to mount",
            (false, true) => ", safe to detach",
            (false, false) => "",
        };
        format!("{revoked} node {} for {since}{signal}", holder.node)
    };
    let holders: Vec<String> = holders.into_iter().map(describe).collect();
    let fences = &grant.status.grant.fences;
    let fences = fences.iter().map(|fence| {
        let time = ago(fence.time, now);
        format!("node {} was fenced {time} ago and has not cleaned up", fence.node)
    });
    let parts: Vec<String> = holders.into_iter().chain(fences).collect();
    if parts.is_empty() { "free".to_owned() } else { parts.join("; ") }
}
