//! The objects that remediation writes: the Lease of an agent, the mark and the taint of a node, and pods.

use std::collections::BTreeSet;

use cleat_core::error::{ErrorKind, Result};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod, Taint};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions};
use serde_json::{Value, json};

use super::Watch;
use crate::api::{self, call};
use crate::attach_detach::pods;
use crate::heartbeat;
use crate::nodes::{LOST, OUT_OF_SERVICE};

impl Watch {
    /// Makes the Lease with which the agent of a node says that it works, if there is none.
    pub(super) async fn make_lease(&self, node: &Node) -> Result<()> {
        let leases = &self.cluster.heartbeats;
        let name = node.name_any();
        let wanted = heartbeat::wanted(node, &name, self.settings.timeout);
        let lease = heartbeat::name_of(&name);
        let known = leases.mirror.get(&lease);
        let duration = |lease: &Lease| lease.spec.as_ref()?.lease_duration_seconds;
        let parameters = PostParams::default();
        let written = match known {
            Some(known) if duration(&known) == duration(&wanted) => return Ok(()),
            Some(known) => {
                let mut changed = Lease::clone(&known);
                changed.spec.get_or_insert_default().lease_duration_seconds = duration(&wanted);
                let request = leases.api.replace(&lease, &parameters, &changed);
                call(|| format!("cannot change the Lease of node {name}"), request).await
            }
            None => {
                let request = leases.api.create(&parameters, &wanted);
                call(|| format!("cannot make the Lease of node {name}"), request).await
            }
        };
        self.cluster.metrics.write("lease");
        match leases.written(&lease, written).await {
            // Read again after a conflict: the next turn compares it.
            Err(error) if error.kind() == ErrorKind::Aborted => Ok(()),
            written => written.map(drop),
        }
    }

    /// Marks a node as lost.
    pub(super) async fn mark(&self, node: &Node) -> Result<()> {
        let now = api::timestamp().to_string();
        let body = json!({ "metadata": { "annotations": { LOST: now } } });
        self.write(node, body, "cannot mark as lost node").await
    }

    /// Sets the out-of-service taint.
    pub(super) async fn taint(&self, node: &Node) -> Result<()> {
        let mut taints = taints(node);
        taints.push(Taint {
            key: OUT_OF_SERVICE.to_owned(),
            value: Some(self.cluster.config.driver.clone()),
            effect: "NoExecute".to_owned(),
            time_added: None,
        });
        self.write(node, json!({ "spec": { "taints": taints } }), "cannot taint node").await
    }

    /// Removes the mark, and the taint if remediation has set it.
    pub(super) async fn unmark(&self, node: &Node) -> Result<()> {
        let is_ours = |taint: &Taint| {
            taint.key == OUT_OF_SERVICE
                && taint.value.as_deref() == Some(&self.cluster.config.driver)
        };
        let mut taints = taints(node);
        taints.retain(|taint| !is_ours(taint));
        let body = json!({
            "metadata": { "annotations": { LOST: null } }, "spec": { "taints": taints },
        });
        self.write(node, body, "cannot put into service node").await
    }

    async fn write(&self, node: &Node, body: Value, what: &str) -> Result<()> {
        self.cluster.metrics.write("node");
        self.cluster.nodes.patch(node, body, what).await?;
        self.cluster.look_at_node(&node.name_any());
        Ok(())
    }

    /// Deletes the pods of a node that use volumes of the driver. Returns how many there were.
    pub(super) async fn delete_pods(&self, node: &str) -> Result<usize> {
        let client = self.cluster.nodes.api.clone().into_client();
        let selected = ListParams::default().fields(&format!("spec.nodeName={node}"));
        let all = Api::<Pod>::all(client.clone());
        let request = all.list(&selected);
        let pods = call(|| format!("cannot list the pods of node {node}"), request).await?;
        let claims: BTreeSet<String> =
            self.cluster.volumes.mirror.all().iter().filter_map(|v| pods::claim_of(v)).collect();
        let ours: Vec<&Pod> = pods.iter().filter(|pod| self.uses(pod, &claims)).collect();
        for pod in &ours {
            let namespace = pod.namespace().unwrap_or_default();
            delete(&Api::namespaced(client.clone(), &namespace), pod).await?;
            self.cluster.metrics.write("pod");
            tracing::warn!(node, pod = format!("{namespace}/{}", pod.name_any()), "deleted");
        }
        Ok(ours.len())
    }

    fn uses(&self, pod: &Pod, claims: &BTreeSet<String>) -> bool {
        let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
        let mut inline = volumes.filter_map(|volume| volume.csi.as_ref());
        pods::claims(pod).iter().any(|claim| claims.contains(claim))
            || inline.any(|source| source.driver == self.cluster.config.driver)
    }
}

/// Converts the absence of an object into success.
fn unless_gone<T>(result: Result<T>) -> Result<()> {
    match result {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        result => result.map(drop),
    }
}

fn taints(node: &Node) -> Vec<Taint> {
    node.spec.iter().flat_map(|spec| spec.taints.iter().flatten()).cloned().collect()
}

/// Deletes a pod whose node cannot end it, as the garbage collection of Kubernetes does: a pod that has not ended
/// becomes `Failed` first, so that its Job or its StatefulSet knows.
async fn delete(pods: &Api<Pod>, pod: &Pod) -> Result<()> {
    let (name, uid) = (pod.name_any(), pod.uid());
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    if !matches!(phase, Some("Succeeded" | "Failed")) {
        let condition = json!({
            "type": "DisruptionTarget", "status": "True", "reason": "NodeLost",
            "message": "cleat: the node is lost, and its volumes are fenced",
            "lastTransitionTime": api::timestamp().to_string(),
        });
        let body = json!({
            "metadata": { "uid": uid }, "status": { "phase": "Failed", "conditions": [condition] },
        });
        let parameters = PatchParams::default();
        let patch = Patch::Strategic(body);
        let request = pods.patch_status(&name, &parameters, &patch);
        unless_gone(call(|| format!("cannot end pod {name}"), request).await)?;
    }
    let preconditions = Preconditions { uid, resource_version: None };
    let parameters = DeleteParams {
        grace_period_seconds: Some(0),
        preconditions: Some(preconditions),
        ..DeleteParams::default()
    };
    let request = pods.delete(&name, &parameters);
    unless_gone(call(|| format!("cannot delete pod {name}"), request).await)
}
