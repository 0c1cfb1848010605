//! The objects that remediation writes: the Lease of an agent, and the mark and the taint of a node.

use cleat_core::error::{ErrorKind, Result};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Taint;
use kube::ResourceExt;
use kube::api::PostParams;
use serde_json::{Value, json};

use super::Watch;
use crate::api::{self, call};
use crate::heartbeat;
use crate::nodes::{LOST, OUT_OF_SERVICE};
use crate::objects::Node;

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
}

fn taints(node: &Node) -> Vec<Taint> {
    node.spec.iter().flat_map(|spec| spec.taints.iter().flatten()).cloned().collect()
}
