//! What a node has, and whether it can be drained.

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_grants::object::Time;
use kube::ResourceExt;
use serde::Serialize;

use super::facts::not_ready;
use super::volumes::{HolderRow, holders};
use super::{has_ended, uses, volumes};
use crate::grant::{VolumeGrant, grant_name};
use crate::objects::{Node, PersistentVolume, Pod, VolumeAttachment};

/// What a node has of the driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NodeReport {
    /// The node.
    pub node: String,
    /// Its state, for people.
    pub state: String,
    /// The volumes that are attached to it, that it has a grant for, or that were fenced there.
    pub volumes: Vec<NodeVolume>,
}

/// A volume of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NodeVolume {
    /// The PersistentVolume, if there is one.
    pub persistent_volume: Option<String>,
    /// The claim that is bound to it, as `NAMESPACE/NAME`.
    pub claim: Option<String>,
    /// The CSI volume handle.
    pub handle: String,
    /// Whether Kubernetes has it attached.
    pub attached: bool,
    /// The grant of the node.
    pub holder: Option<HolderRow>,
    /// Whether the node was fenced, and has not cleaned up.
    pub fenced: bool,
    /// The pods on the node that use it, as `NAMESPACE/NAME`.
    pub pods: Vec<String>,
    /// What the volume waits for.
    pub waits_for: Vec<String>,
}

/// Whether a node can be drained.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DrainCheck {
    /// The node.
    pub node: String,
    /// Whether nothing is in the way.
    pub can_be_drained: bool,
    /// The volumes that leave the node with their pods.
    pub moving: usize,
    /// What is in the way, or gets lost.
    pub obstacles: Vec<Obstacle>,
}

/// Something that is in the way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Obstacle {
    /// The volume or pod that it concerns.
    pub what: String,
    /// What is wrong.
    pub reason: String,
    /// What an administrator can do.
    pub action: String,
}

/// The objects that concern a node.
pub(super) struct Facts<'a> {
    pub(super) driver: &'a str,
    pub(super) now: Time,
    pub(super) name: String,
    pub(super) node: Option<Node>,
    /// Those of the driver.
    pub(super) volumes: Vec<PersistentVolume>,
    /// Those of the driver.
    pub(super) grants: Vec<VolumeGrant>,
    pub(super) attachments: Vec<VolumeAttachment>,
    /// Those on the node.
    pub(super) pods: Vec<Pod>,
}

/// Describes what the node has.
///
/// # Errors
/// Returns `NotFound` if neither the node exists nor anything names it.
pub(super) fn report(facts: &Facts<'_>) -> Result<NodeReport> {
    let volumes = volumes_of(facts);
    let state = match &facts.node {
        None if volumes.is_empty() => {
            let message = format!("there is no node {}", facts.name);
            return Err(Error::new(ErrorKind::NotFound, message)
                .with_repair("kubectl get nodes lists the nodes"));
        }
        None => "does not exist".to_owned(),
        Some(node) => not_ready(node, facts.now).unwrap_or_else(|| "ready".to_owned()),
    };
    Ok(NodeReport { node: facts.name.clone(), state, volumes })
}

fn volumes_of(facts: &Facts<'_>) -> Vec<NodeVolume> {
    let rows = volumes::rows(facts.driver, &facts.volumes, &facts.grants);
    let of_row = |row: volumes::VolumeRow| {
        let name = grant_name(facts.driver, &row.handle);
        let grant = facts.grants.iter().find(|grant| grant.name_any() == name);
        let holder = grant
            .and_then(|grant| holders(grant).into_iter().find(|holder| holder.node == facts.name));
        let stored = grant.map(|grant| grant.stored().grant);
        let fenced = stored.is_some_and(|grant| grant.fences_of(&facts.name).next().is_some());
        let attached = facts.attachments.iter().any(|known| {
            known.spec.node_name == facts.name
                && known.spec.source.persistent_volume_name.is_some()
                && known.spec.source.persistent_volume_name == row.persistent_volume
        });
        let pods = pods_with(facts, row.claim.as_deref()).map(full_name).collect();
        NodeVolume {
            persistent_volume: row.persistent_volume,
            claim: row.claim,
            handle: row.handle,
            attached,
            holder,
            fenced,
            pods,
            waits_for: row.waits_for,
        }
    };
    let is_here = |volume: &NodeVolume| {
        volume.attached || volume.holder.is_some() || volume.fenced || !volume.pods.is_empty()
    };
    rows.into_iter().map(of_row).filter(is_here).collect()
}

/// The pods on the node that use a claim.
fn pods_with<'a>(
    facts: &'a Facts<'_>,
    claim: Option<&str>,
) -> impl Iterator<Item = &'a Pod> + use<'a> {
    let (namespace, name) = claim.and_then(|claim| claim.split_once('/')).unwrap_or_default();
    let (namespace, name) = (namespace.to_owned(), name.to_owned());
    let here =
        move |pod: &&Pod| pod.namespace().unwrap_or_default() == namespace && uses(pod, &name);
    facts.pods.iter().filter(here)
}

fn full_name(pod: &Pod) -> String {
    format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any())
}

/// Checks what a drain of the node does to its volumes.
///
/// # Errors
/// As [`report`].
pub(super) fn drain_check(facts: &Facts<'_>) -> Result<DrainCheck> {
    let report = report(facts)?;
    let mut obstacles = Vec::new();
    if report.state != "ready" {
        obstacles.push(Obstacle {
            what: format!("node {}", facts.name),
            reason: format!(
                "it is {}: nothing on it confirms that a volume is released",
                report.state
            ),
            action: "repair the node first; volumes of a lost node are fenced, not drained"
                .to_owned(),
        });
    }
    let mut moving = 0;
    for volume in &report.volumes {
        let found = of_volume(facts, volume);
        moving += usize::from(found.is_empty());
        obstacles.extend(found);
    }
    let can_be_drained = obstacles.is_empty();
    Ok(DrainCheck { node: facts.name.clone(), can_be_drained, moving, obstacles })
}

fn of_volume(facts: &Facts<'_>, volume: &NodeVolume) -> Vec<Obstacle> {
    let what = volume.claim.clone().unwrap_or_else(|| volume.handle.clone());
    let mut found = Vec::new();
    let mut add = |what: &str, reason: String, action: &str| {
        found.push(Obstacle { what: what.to_owned(), reason, action: action.to_owned() });
    };
    if let Some(waits) = volume.waits_for.first() {
        add(&what, waits.clone(), "kubectl cleat why PVC shows what to do");
    }
    if volume.fenced {
        add(
            &what,
            "it was fenced on the node, which has not cleaned up".to_owned(),
            "look at the agent of the node: cleat ls there shows what is left",
        );
    }
    if is_bound_to(facts, volume) {
        add(
            &what,
            "its data is on this node only, so its pods cannot run elsewhere".to_owned(),
            "end its pods and keep them ended until the node is back, or copy the data to another volume",
        );
    }
    if volume.pods.is_empty() && volume.holder.as_ref().is_some_and(|holder| !holder.revoked) {
        add(
            &what,
            "the node has it, and no pod there uses it: a drain does not release it".to_owned(),
            "look for a program outside of Kubernetes that uses the device, and for a stale VolumeAttachment",
        );
    }
    for pod in pods_with(facts, volume.claim.as_deref()).filter(|pod| !has_ended(pod)) {
        let owners = pod.owner_references();
        let name = full_name(pod);
        if owners.is_empty() {
            add(
                &name,
                format!("it uses {what}, and nothing creates it again elsewhere"),
                "kubectl drain --force deletes it for good",
            );
        } else if owners.iter().any(|owner| owner.kind == "DaemonSet") {
            add(
                &name,
                format!("it uses {what}, and a drain leaves the pods of a DaemonSet on the node"),
                "delete the DaemonSet, or exclude the node from it",
            );
        } else if owners.iter().any(|owner| owner.kind == "Node") {
            add(
                &name,
                format!("it uses {what}, and a drain leaves static pods on the node"),
                "remove its manifest from the node",
            );
        }
    }
    found
}

/// Whether the PersistentVolume of a volume can be used on this node only.
fn is_bound_to(facts: &Facts<'_>, volume: &NodeVolume) -> bool {
    let name = volume.persistent_volume.as_deref();
    let found = facts.volumes.iter().find(|known| Some(&*known.name_any()) == name);
    let spec = found.and_then(|volume| volume.spec.as_ref());
    let required = spec.and_then(|spec| spec.node_affinity.as_ref()?.required.as_ref());
    // The volumes that cleat provisions in a directory have one term, with the topology of their node.
    required.is_some_and(|required| {
        let expressions = |term: &k8s_openapi::api::core::v1::NodeSelectorTerm| {
            term.match_expressions.iter().flatten().any(|expression| {
                expression.operator == "In"
                    && expression.values.as_deref() == Some(std::slice::from_ref(&facts.name))
            })
        };
        !required.node_selector_terms.is_empty()
            && required.node_selector_terms.iter().all(expressions)
    })
}

#[cfg(test)]
mod tests {
    use serde::de::DeserializeOwned;
    use serde_json::{Value, json};

    use super::*;

    fn object<T: DeserializeOwned>(value: Value) -> T {
        serde_json::from_value(value).expect("an object")
    }

    /// A node that is ready, with a volume that is attached and used by a pod with this owner.
    fn facts(owner: Option<&str>) -> Facts<'static> {
        let owners = owner
            .map(|kind| json!([{ "apiVersion": "v1", "kind": kind, "name": "o", "uid": "u" }]));
        Facts {
            driver: "cleat.csi.storage",
            now: Time(1000),
            name: "a".to_owned(),
            node: Some(object(json!({
                "metadata": { "name": "a" },
                "status": { "conditions": [{ "type": "Ready", "status": "True" }] },
            }))),
            volumes: vec![object(json!({
                "metadata": { "name": "pv" },
                "spec": {
                    "claimRef": { "namespace": "n", "name": "c" },
                    "csi": { "driver": "cleat.csi.storage", "volumeHandle": "rbd/x/y" },
                },
            }))],
            grants: Vec::new(),
            attachments: vec![object(json!({
                "metadata": { "name": "va" },
                "spec": { "attacher": "cleat.csi.storage", "nodeName": "a", "source": { "persistentVolumeName": "pv" } },
            }))],
            pods: vec![object(json!({
                "metadata": { "name": "p", "namespace": "n", "ownerReferences": owners },
                "spec": {
                    "containers": [],
                    "volumes": [{ "name": "v", "persistentVolumeClaim": { "claimName": "c" } }],
                },
            }))],
        }
    }

    fn reasons(facts: &Facts<'_>) -> Vec<String> {
        let check = drain_check(facts).expect("there is the node");
        assert_eq!(check.can_be_drained, check.obstacles.is_empty());
        assert_eq!(check.moving, usize::from(check.can_be_drained));
        check.obstacles.into_iter().map(|obstacle| obstacle.reason).collect()
    }

    #[test]
    fn a_node_whose_pods_are_created_again_elsewhere_can_be_drained() {
        assert_eq!(reasons(&facts(Some("StatefulSet"))), Vec::<String>::new());
    }

    #[test]
    fn a_pod_that_stays_or_is_lost_is_in_the_way_of_a_drain() {
        for (owner, reason) in [
            (None, "nothing creates it again"),
            (Some("DaemonSet"), "a drain leaves the pods of a DaemonSet"),
            (Some("Node"), "a drain leaves static pods"),
        ] {
            let found = reasons(&facts(owner));
            assert!(found.len() == 1 && found[0].contains(reason), "{found:?}");
            let mut ended = facts(owner);
            ended.pods[0].status = Some(object(json!({ "phase": "Succeeded" })));
            assert_eq!(reasons(&ended), Vec::<String>::new());
        }
    }

    #[test]
    fn a_volume_of_one_node_is_in_the_way_of_its_drain() {
        let bound = |node: &str| {
            let mut facts = facts(Some("StatefulSet"));
            let expression =
                json!({ "key": "topology.cleat/node", "operator": "In", "values": [node] });
            let terms = json!({ "required": { "nodeSelectorTerms": [{ "matchExpressions": [expression] }] } });
            let spec = facts.volumes[0].spec.as_mut().expect("a spec");
            spec.node_affinity = Some(object(terms));
            reasons(&facts)
        };
        assert!(bound("a")[0].contains("its data is on this node only"));
        assert_eq!(bound("b"), Vec::<String>::new());
    }

    #[test]
    fn a_node_that_is_not_ready_or_not_there_cannot_be_drained() {
        let mut silent = facts(None);
        silent.pods.clear();
        silent.attachments.clear();
        silent.node = Some(object(json!({
            "metadata": { "name": "a" },
            "status": { "conditions": [{ "type": "Ready", "status": "Unknown", "lastTransitionTime": "1970-01-01T00:10:00Z" }] },
        })));
        let found = drain_check(&silent).expect("there is the node").obstacles;
        assert!(found[0].reason.contains("not ready"), "{found:?}");
        silent.node = None;
        assert_eq!(drain_check(&silent).expect_err("nothing names it").kind(), ErrorKind::NotFound);
    }
}
