//! What the controller observes of nodes: whether they exist, are in service, are ready, and renew their leases.

use cleat_grants::object::Time;
use cleat_grants::policy::NodeState;
use kube::ResourceExt;

use crate::api::seconds;
use crate::objects::Node;

/// The taint of a node that is lost. Only the key counts, as in Kubernetes.
pub(crate) const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

/// The annotation of a node that remediation has found lost, with the time.
pub(crate) const LOST: &str = "cleat.csi.storage/lost";

/// The namespace of the leases of nodes.
pub(crate) const LEASES: &str = "kube-node-lease";

/// Returns the state of a node. `silent_s` says for how many seconds its kubelet has not renewed its Lease, if leases are
/// watched.
pub(crate) fn state(node: &Node, silent_s: Option<u64>) -> NodeState {
    let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    let out_of_service = taints.into_iter().any(|taint| taint.key == OUT_OF_SERVICE);
    let lost = node.annotations().contains_key(LOST);
    NodeState { out_of_service, not_ready_since: not_ready_since(node), silent_s, lost }
}

/// Returns since when a node is not ready. One without the condition was never ready.
fn not_ready_since(node: &Node) -> Option<Time> {
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let ready = conditions.into_iter().find(|condition| condition.type_ == "Ready");
    let since = match ready {
        Some(condition) if condition.status == "True" => return None,
        Some(condition) => condition.last_transition_time.as_ref(),
        None => node.metadata.creation_timestamp.as_ref(),
    };
    since.map(|time| seconds(time.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn node(value: serde_json::Value) -> Node {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn the_taint_counts_with_any_value_and_effect() {
        let taints = json!([{"key": OUT_OF_SERVICE, "value": "x", "effect": "NoSchedule"}]);
        let tainted = node(json!({"metadata": {}, "spec": {"taints": taints}}));
        assert!(state(&tainted, None).out_of_service);
        assert!(!state(&node(json!({"metadata": {}})), None).out_of_service);
    }

    #[test]
    fn a_node_is_not_ready_since_the_last_transition() {
        let at = |status: &str| {
            let condition = json!({
                "type": "Ready", "status": status, "lastTransitionTime": "2030-01-01T00:00:00Z",
            });
            state(&node(json!({"metadata": {}, "status": {"conditions": [condition]}})), None)
        };
        assert_eq!(at("True").not_ready_since, None);
        assert_eq!(at("Unknown").not_ready_since, Some(Time(1_893_456_000)));
    }
}
