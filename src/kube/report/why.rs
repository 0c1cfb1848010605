//! What a claim waits for: the way from the claim to the device on the node, and the first place where it stops.

use cleat_grants::object::{Condition, Signal, Truth};
use kube::ResourceExt;
use serde::Serialize;

use super::facts::{Facts, node_of, not_ready, phase};
use super::steps::{self, Step};
use super::{ago, handle};
use crate::nodes;
use crate::objects::Pod;

/// The way of a claim, and what it waits for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Why {
    /// The claim, as `NAMESPACE/NAME`.
    pub claim: String,
    /// Whether the claim waits for something.
    pub waits: bool,
    /// What it waits for, or that it waits for nothing, in one sentence.
    pub answer: String,
    /// What an administrator can do.
    pub action: Option<String>,
    /// The objects on the way, in order.
    pub steps: Vec<Step>,
}

/// The place where the way stops.
struct Stop {
    answer: String,
    action: Option<String>,
}

fn stop(answer: impl Into<String>, action: impl Into<String>) -> Stop {
    Stop { answer: answer.into(), action: Some(action.into()) }
}

/// Finds what the claim waits for.
pub(super) fn answer(facts: &Facts<'_>) -> Why {
    let claim =
        format!("{}/{}", facts.claim.namespace().unwrap_or_default(), facts.claim.name_any());
    let found = of_claim(facts).or_else(|| of_pods(facts));
    let waits = found.is_some();
    let (answer, action) = match found {
        Some(Stop { answer, action }) => (format!("{claim} waits: {answer}"), action),
        None if facts.pods.is_empty() => {
            (format!("{claim} waits for nothing: it is bound, and no pod uses it"), None)
        }
        None => (format!("{claim} waits for nothing: the pods that use it have it"), None),
    };
    Why { claim, waits, answer, action, steps: steps::of(facts) }
}

/// From the claim to the PersistentVolume.
fn of_claim(facts: &Facts<'_>) -> Option<Stop> {
    let phase = facts.claim.status.as_ref().and_then(|status| status.phase.as_deref());
    let class = facts.class_name();
    if let Some(volume) = &facts.volume {
        if handle(volume, facts.driver).is_none() {
            return Some(stop(
                format!("its PersistentVolume is not one of {}", facts.driver),
                "ask the driver that the PersistentVolume names (--driver, if that is a cleat of another name)",
            ));
        }
        return (phase != Some("Bound")).then(|| {
            stop("its PersistentVolume is not bound yet", "kubectl describe pvc shows the reason")
        });
    }
    if facts.claim.metadata.deletion_timestamp.is_some() {
        return Some(stop("it is being deleted", "create it again under its name when it is gone"));
    }
    if phase == Some("Lost") {
        return Some(stop(
            "its PersistentVolume was deleted",
            "restore the PersistentVolume from a backup, or create the claim again",
        ));
    }
    if class.is_empty() {
        return Some(stop(
            "it has no StorageClass, and no PersistentVolume is bound to it",
            "set storageClassName, or create a PersistentVolume that fits",
        ));
    }
    let Some(known) = &facts.class else {
        return Some(stop(
            format!("its StorageClass {class} does not exist"),
            "create the StorageClass; kubectl get storageclass lists those that exist",
        ));
    };
    if known.provisioner != facts.driver {
        return Some(stop(
            format!("its StorageClass {class} is of the provisioner {}", known.provisioner),
            "ask that driver; kubectl describe pvc shows its events",
        ));
    }
    if facts.csi_driver.is_none() {
        return Some(stop(
            format!("the driver {} is not installed", facts.driver),
            "install it: docs/deploy.md; kubectl get csidriver lists those that are",
        ));
    }
    let waits_for_pod = known.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer");
    if waits_for_pod && facts.pods.is_empty() {
        return Some(stop(
            format!("its StorageClass {class} binds it when a pod uses it"),
            "create a pod that uses it",
        ));
    }
    if waits_for_pod && let Some(pod) = facts.pods.iter().find(|pod| node_of(pod).is_none()) {
        return Some(unscheduled(pod));
    }
    Some(stop(
        format!("csi-provisioner has not created its volume{}", facts.warning(&facts.claim)),
        "kubectl describe pvc shows all attempts; if there is none, look whether csi-provisioner runs",
    ))
}

/// From the pods to the device. A pod that works is no reason to wait, so the first one that does not is shown.
fn of_pods(facts: &Facts<'_>) -> Option<Stop> {
    facts.pods.iter().find_map(|pod| of_pod(facts, pod))
}

fn of_pod(facts: &Facts<'_>, pod: &Pod) -> Option<Stop> {
    let Some(node) = node_of(pod) else { return Some(unscheduled(pod)) };
    if phase(pod) == Some("Running") {
        // What the pod has lost, although kubelet has not said so.
        return of_node(facts, node)
            .or_else(|| taken(facts, node))
            .or_else(|| not_staged(facts, node, &pod.name_any()));
    }
    of_registration(facts, node)
        .or_else(|| of_attachment(facts, node))
        .or_else(|| of_grant(facts, node))
        .or_else(|| of_node(facts, node))
        .or_else(|| {
            let (name, warning) = (pod.name_any(), facts.warning(pod));
            Some(stop(
                format!(
                    "the volume is ready on node {node}, and kubelet has not started pod {name}{warning}"
                ),
                format!("kubectl describe pod {name} shows what kubelet does"),
            ))
        })
}

/// Whether the driver works on a node that exists.
fn of_registration(facts: &Facts<'_>, node: &str) -> Option<Stop> {
    if facts.registered.iter().any(|known| known == node) || facts.node(node).is_none() {
        return None;
    }
    Some(stop(
        format!("the driver is not registered on node {node}"),
        format!(
            "look at the pod of cleat node on node {node}: kubectl get csinode {node} lists the drivers"
        ),
    ))
}

/// What a node that has used the volume must not use any more.
fn taken(facts: &Facts<'_>, node: &str) -> Option<Stop> {
    let grant = facts.grant.as_ref()?.stored().grant;
    let end = "end the pods of the volume on this node; others can then have it";
    let Some(holder) = grant.holder(node) else {
        return fenced(facts, node);
    };
    if holder.revoked {
        let since = ago(holder.since, facts.now);
        let text = format!("node {node} must release the volume, for {since}");
        return Some(stop(text, end));
    }
    let condition = grant.entry(node)?.condition(Signal::SafeToMount)?;
    let is_broken = condition.generation == holder.generation && condition.status == Truth::False;
    is_broken.then(|| {
        stop(format!("node {node} reports that it has lost the volume: {}", reason(condition)), end)
    })
}

/// A pod that runs, while its node has said nothing about the volume with its present grant: the mount is of an earlier
/// grant, and does not work.
fn not_staged(facts: &Facts<'_>, node: &str, pod: &str) -> Option<Stop> {
    let grant = facts.grant.as_ref()?.stored().grant;
    let holder = grant.holder(node)?;
    let generation = holder.generation;
    let condition = grant.entry(node).and_then(|entry| entry.condition(Signal::SafeToMount));
    if condition.is_some_and(|condition| condition.generation == generation) {
        return None;
    }
    let since = ago(holder.since, facts.now);
    Some(stop(
        format!(
            "pod {pod} runs, and node {node} has not staged the volume with its grant of generation \
             {generation}, for {since}"
        ),
        format!("delete pod {pod}, so that kubelet stages the volume again"),
    ))
}

/// A node that was fenced and has not cleaned up.
fn fenced(facts: &Facts<'_>, node: &str) -> Option<Stop> {
    let grant = facts.grant.as_ref()?.stored().grant;
    let fence = grant.fences_of(node).next()?;
    let since = ago(fence.time, facts.now);
    Some(stop(
        format!("node {node} was fenced {since} ago and has not cleaned up"),
        format!("start the agent on node {node}, or reboot the node: kubectl cleat node {node}"),
    ))
}

fn unscheduled(pod: &Pod) -> Stop {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let mut scheduled = conditions.filter(|condition| condition.type_ == "PodScheduled");
    let reason = scheduled.find_map(|condition| condition.message.clone());
    let reason = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
    stop(
        format!("pod {} has no node{reason}", pod.name_any()),
        "the message is that of the scheduler; kubectl describe pod shows its events",
    )
}

fn of_attachment(facts: &Facts<'_>, node: &str) -> Option<Stop> {
    if !facts.needs_attachment() {
        return None;
    }
    let attachment = facts.attachments.iter().find(|known| known.spec.node_name == node);
    let Some(attachment) = attachment else {
        return Some(stop(
            format!("there is no VolumeAttachment for node {node}"),
            "kube-controller-manager creates it; kubectl describe pod shows why it does not, for example \
             because another node has the volume",
        ));
    };
    let status = attachment.status.as_ref();
    if attachment.metadata.deletion_timestamp.is_some() {
        let error = status.and_then(|status| status.detach_error.as_ref()?.message.as_deref());
        let error = error.map(|error| format!(": {error}")).unwrap_or_default();
        return Some(stop(
            format!("the volume is being detached from node {node}{error}"),
            action_of(facts).unwrap_or_else(|| "wait".to_owned()),
        ));
    }
    if status.is_some_and(|status| status.attached) {
        return None;
    }
    let error = status.and_then(|status| status.attach_error.as_ref()?.message.as_deref());
    match (of_grant(facts, node), error) {
        (Some(stop), _) => Some(stop),
        (None, Some(error)) => Some(stop(
            format!("the volume cannot be attached to node {node}: {error}"),
            "the controller tries again by itself; kubectl describe volumeattachment shows the object",
        )),
        (None, None) => Some(stop(
            format!("the controller has not attached the volume to node {node}"),
            "look whether cleat controller runs, and who leads: kubectl get lease -A | grep controller-",
        )),
    }
}

/// What the grant of the volume waits for.
fn of_grant(facts: &Facts<'_>, node: &str) -> Option<Stop> {
    let grant = facts.grant.as_ref()?;
    if let Some(waiting) = grant.status.waiting.first() {
        let since = ago(waiting.since, facts.now);
        let silent = facts.node(&waiting.node).and_then(|node| not_ready(node, facts.now));
        let silent = silent.map(|state| format!("; the node is {state}")).unwrap_or_default();
        return Some(stop(
            format!("{}, for {since}{silent}", waiting.message),
            waiting.action.clone(),
        ));
    }
    let stored = grant.stored().grant;
    let Some(holder) = stored.holder(node) else {
        if let Some(stop) = fenced(facts, node) {
            return Some(stop);
        }
        let others: Vec<&str> = stored.spec.holders.iter().map(|h| &*h.node).collect();
        return (!others.is_empty()).then(|| {
            stop(
                format!("node {} has the volume, and node {node} does not", others.join(", ")),
                "end the pods there, or wait until the controller moves the volume",
            )
        });
    };
    if holder.revoked {
        return Some(stop(
            format!("node {node} has to release the volume before it can have it again"),
            format!("look at the agent on node {node}"),
        ));
    }
    let entry = stored.entry(node);
    if entry.is_some_and(|e| e.is(Signal::SafeToMount, Truth::True, holder.generation)) {
        return None;
    }
    let condition = entry.and_then(|entry| entry.condition(Signal::SafeToMount));
    let agent = format!("look at the pod of cleat node on node {node}: kubectl cleat node {node}");
    match condition.filter(|condition| condition.generation == holder.generation) {
        Some(condition) => Some(stop(
            format!("node {node} reports that the volume cannot be mounted: {}", reason(condition)),
            agent,
        )),
        None if facts.attachments.iter().all(|known| known.spec.node_name != node) => None,
        None => Some(stop(
            format!(
                "node {node} has had the grant for {}, and kubelet has not staged the volume",
                ago(holder.since, facts.now)
            ),
            agent,
        )),
    }
}

/// What is wrong with the node of a pod.
fn of_node(facts: &Facts<'_>, name: &str) -> Option<Stop> {
    let Some(node) = facts.node(name) else {
        return Some(stop(
            format!("node {name} does not exist"),
            "delete the pod, so that another node gets it",
        ));
    };
    let state = not_ready(node, facts.now)?;
    Some(stop(
        format!("node {name} is {state}"),
        format!(
            "repair the node; if it is lost: kubectl taint node {name} {}=lost:NoExecute",
            nodes::OUT_OF_SERVICE
        ),
    ))
}

fn action_of(facts: &Facts<'_>) -> Option<String> {
    facts.grant.as_ref()?.status.waiting.first().map(|waiting| waiting.action.clone())
}

fn reason(condition: &Condition) -> String {
    let reason = format!("{:?}", condition.reason);
    if condition.message.is_empty() { reason } else { condition.message.clone() }
}

#[cfg(test)]
mod tests;
