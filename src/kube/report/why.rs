//! What a claim waits for: the way from the claim to the device on the node, and the first place where it stops.

use cleat_grants::object::{Condition, Signal, Time, Truth};
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, StorageClass, VolumeAttachment};
use kube::ResourceExt;
use serde::Serialize;

use super::{ago, handle};
use crate::grant::VolumeGrant;
use crate::nodes;

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

/// The objects that concern a claim.
pub(super) struct Facts<'a> {
    pub(super) driver: &'a str,
    pub(super) now: Time,
    pub(super) claim: PersistentVolumeClaim,
    pub(super) class: Option<StorageClass>,
    pub(super) volume: Option<PersistentVolume>,
    pub(super) csi_driver: Option<CSIDriver>,
    /// Those of the PersistentVolume.
    pub(super) attachments: Vec<VolumeAttachment>,
    pub(super) grant: Option<VolumeGrant>,
    /// Those that use the claim and have not ended.
    pub(super) pods: Vec<Pod>,
    /// Those of the pods, attachments and holders, as far as they exist.
    pub(super) nodes: Vec<Node>,
}

/// The place where the way stops.
struct Stop {
    answer: String,
    action: Option<String>,
}

fn stop(answer: impl Into<String>, action: impl Into<String>) -> Stop {
    Stop { answer: answer.into(), action: Some(action.into()) }
}

impl Facts<'_> {
    /// The nodes that the objects name, without duplicates.
    pub(super) fn node_names(&self) -> Vec<String> {
        let pods = self.pods.iter().filter_map(node_of).map(str::to_owned);
        let attachments = self.attachments.iter().map(|known| known.spec.node_name.clone());
        let holders = self.grant.iter().flat_map(|grant| &grant.spec.holders);
        let mut names: Vec<String> =
            pods.chain(attachments).chain(holders.map(|holder| holder.node.clone())).collect();
        names.sort();
        names.dedup();
        names
    }

    fn node(&self, name: &str) -> Option<&Node> {
        self.nodes.iter().find(|node| node.name_any() == name)
    }

    fn needs_attachment(&self) -> bool {
        let spec = self.csi_driver.as_ref().map(|driver| &driver.spec);
        spec.is_some_and(|spec| spec.attach_required.unwrap_or(true))
    }

    fn class_name(&self) -> &str {
        let spec = self.claim.spec.as_ref();
        spec.and_then(|spec| spec.storage_class_name.as_deref()).unwrap_or_default()
    }
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
    Why { claim, waits, answer, action, steps: steps(facts) }
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
        "csi-provisioner has not created its volume",
        "kubectl describe pvc shows the error of the last attempt; look at the log of csi-provisioner",
    ))
}

/// From the pods to the device. A pod that works is no reason to wait, so the first one that does not is shown.
fn of_pods(facts: &Facts<'_>) -> Option<Stop> {
    facts.pods.iter().find_map(|pod| of_pod(facts, pod))
}

fn of_pod(facts: &Facts<'_>, pod: &Pod) -> Option<Stop> {
    let Some(node) = node_of(pod) else { return Some(unscheduled(pod)) };
    if phase(pod) == Some("Running") {
        return None;
    }
    of_attachment(facts, node)
        .or_else(|| of_grant(facts, node))
        .or_else(|| of_node(facts, node))
        .or_else(|| {
            let name = pod.name_any();
            Some(stop(
                format!(
                    "the volume is ready on node {node}, and kubelet has not started pod {name}"
                ),
                format!("kubectl describe pod {name} shows what kubelet does"),
            ))
        })
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

/// Describes a node that is not ready, out of service, or lost.
pub(super) fn not_ready(node: &Node, now: Time) -> Option<String> {
    let state = nodes::state(node, None);
    let lost = node.annotations().get(nodes::LOST);
    let parts = [
        lost.map(|time| format!("lost since {time} (remediation)")),
        state.out_of_service.then(|| "out of service".to_owned()),
        state.not_ready_since.map(|then| format!("not ready since {} ago", ago(then, now))),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    (!parts.is_empty()).then(|| parts.join(" and "))
}

fn phase(pod: &Pod) -> Option<&str> {
    pod.status.as_ref()?.phase.as_deref()
}

fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref().filter(|name| !name.is_empty())
}

/// Lists the objects on the way.
fn steps(facts: &Facts<'_>) -> Vec<Step> {
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
    steps
}

fn grant_state(grant: &VolumeGrant, now: Time) -> String {
    let holders = super::volumes::holders(grant);
    let describe = |holder: super::volumes::HolderRow| {
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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const DRIVER: &str = "d.test";

    fn object<T: serde::de::DeserializeOwned>(value: Value) -> T {
        serde_json::from_value(value).unwrap()
    }

    /// A claim that is bound to a volume, which a pod on node b uses and which needs an attachment.
    fn facts() -> Facts<'static> {
        let pod = json!({
            "metadata": { "name": "p", "namespace": "n" },
            "spec": { "nodeName": "b", "containers": [] },
            "status": { "phase": "Pending" },
        });
        let csi = json!({ "driver": DRIVER, "volumeHandle": "pool/v" });
        let ready = |name: &str| {
            object(json!({
                "metadata": { "name": name },
                "status": { "conditions": [{ "type": "Ready", "status": "True" }] },
            }))
        };
        Facts {
            driver: DRIVER,
            now: Time(1_000_000),
            claim: object(json!({
                "metadata": { "name": "c", "namespace": "n" },
                "spec": { "storageClassName": "s", "volumeName": "pv" },
                "status": { "phase": "Bound" },
            })),
            class: Some(object(json!({ "metadata": { "name": "s" }, "provisioner": DRIVER }))),
            volume: Some(object(json!({ "metadata": { "name": "pv" }, "spec": { "csi": csi } }))),
            csi_driver: Some(object(json!({ "metadata": { "name": DRIVER }, "spec": {} }))),
            attachments: vec![attachment(true)],
            grant: Some(grant(json!([condition("True", "Mapped", "")]))),
            pods: vec![object(pod)],
            nodes: vec![ready("a"), ready("b")],
        }
    }

    fn attachment(attached: bool) -> VolumeAttachment {
        object(json!({
            "metadata": { "name": "va" },
            "spec": {
                "attacher": DRIVER, "nodeName": "b", "source": { "persistentVolumeName": "pv" },
            },
            "status": { "attached": attached },
        }))
    }

    fn condition(status: &str, reason: &str, message: &str) -> Value {
        json!({
            "type": "SafeToMount", "status": status, "reason": reason, "message": message,
            "generation": 2, "lastTransitionTime": "1970-01-12T00:00:00Z",
        })
    }

    fn grant(conditions: Value) -> VolumeGrant {
        let holder = json!({
            "node": "b", "mode": "ReadWrite", "generation": 2, "since": "1970-01-12T13:00:00Z",
        });
        object(json!({
            "metadata": { "name": "g" },
            "spec": { "generation": 2, "holders": [holder] },
            "status": { "nodes": [{ "node": "b", "generation": 2, "conditions": conditions }] },
        }))
    }

    /// Asserts that the answer contains `expected` after a change of the facts.
    fn check(expected: &str, change: impl FnOnce(&mut Facts<'_>)) -> Why {
        let mut facts = facts();
        change(&mut facts);
        let why = answer(&facts);
        assert!(why.answer.contains(expected), "{expected:?} is not in {:?}", why.answer);
        assert!(why.answer.starts_with("n/c waits"), "{}", why.answer);
        assert_eq!(why.waits, why.action.is_some(), "{}", why.answer);
        why
    }

    #[test]
    fn each_place_where_the_way_of_a_claim_stops_has_an_answer() {
        check("kubelet has not started pod p", |_| {});
        check("waits for nothing: the pods", |f| {
            f.pods[0].status = object(json!({ "phase": "Running" }))
        });
        check("no pod uses it", |f| f.pods.clear());
        check("is not one of d.test", |f| {
            f.volume.as_mut().unwrap().spec.as_mut().unwrap().csi.as_mut().unwrap().driver =
                "other".to_owned();
        });
        check("there is no VolumeAttachment for node b", |f| f.attachments.clear());
        check("the controller has not attached", |f| {
            f.attachments = vec![attachment(false)];
        });
        check("cannot be attached to node b: no such pool", |f| {
            f.attachments = vec![attachment(false)];
            let error = json!({ "message": "no such pool" });
            f.attachments[0].status.as_mut().unwrap().attach_error = object(error);
        });
        check("reports that the volume cannot be mounted: no read", |f| {
            f.grant = Some(grant(json!([condition("False", "Claiming", "no read")])));
        });
        check("has had the grant for 10 min, and kubelet has not staged", |f| {
            f.grant = Some(grant(json!([])));
            f.now = Time(997_200 + 600);
        });
        check("node b does not exist", |f| f.nodes.clear());
        check("pod p has no node", |f| f.pods[0].spec.as_mut().unwrap().node_name = None);
        check("node a has the volume, and node b does not", |f| {
            f.grant.as_mut().unwrap().spec.holders[0].node = "a".to_owned();
            f.attachments = vec![attachment(false)];
        });
        check("not ready since", |f| {
            let condition = json!({
                "type": "Ready", "status": "Unknown", "lastTransitionTime": "1970-01-12T00:00:00Z",
            });
            f.nodes[1] = object(json!({
                "metadata": { "name": "b" }, "status": { "conditions": [condition] },
            }));
        });
    }

    #[test]
    fn a_claim_without_a_volume_waits_for_its_class_a_pod_or_the_provisioner() {
        let unbound = |f: &mut Facts<'_>| {
            f.volume = None;
            f.claim.status = object(json!({ "phase": "Pending" }));
        };
        check("csi-provisioner has not created its volume", unbound);
        check("its StorageClass s does not exist", |f| {
            unbound(f);
            f.class = None;
        });
        check("is of the provisioner other", |f| {
            unbound(f);
            f.class.as_mut().unwrap().provisioner = "other".to_owned();
        });
        check("binds it when a pod uses it", |f| {
            unbound(f);
            f.class.as_mut().unwrap().volume_binding_mode = Some("WaitForFirstConsumer".to_owned());
            f.pods.clear();
        });
        check("its PersistentVolume was deleted", |f| {
            f.volume = None;
            f.claim.status = object(json!({ "phase": "Lost" }));
        });
    }

    #[test]
    fn what_the_grant_waits_for_is_shown_with_its_repair_and_the_state_of_the_node() {
        let why =
            check("node a must release the volume; it is not known to be lost, for 2 min", |f| {
                let until = cleat_grants::controller::Until::ReleasedOrLost;
                let waiting = crate::grant::Waiting::new("a", until, Time(f.now.0 - 120));
                f.grant.as_mut().unwrap().status.waiting = vec![waiting];
                f.attachments = vec![attachment(false)];
            });
        assert!(why.action.unwrap().contains("kubectl taint node a"));
        let kinds: Vec<&str> = why.steps.iter().map(|step| step.kind).collect();
        assert_eq!(
            kinds,
            [
                "PersistentVolumeClaim",
                "StorageClass",
                "PersistentVolume",
                "Pod",
                "VolumeAttachment",
                "VolumeGrant",
                "Node",
                "Node"
            ]
        );
    }
}
