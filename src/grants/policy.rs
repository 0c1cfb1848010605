//! When fencing may start. The policy decides when to try; the storage decides whether it is safe.

use crate::object::Time;

/// The settings of the controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// How long a node may take to release a revoked volume before it is fenced, in seconds.
    pub release_timeout_s: u64,
    /// How long a node is not ready before Kubernetes detaches its volumes by force, in seconds. The
    /// default is the one of kube-controller-manager.
    pub forced_detach_s: u64,
    /// How long a node may not renew its Lease before its revoked volumes are fenced, in seconds. `None`, the
    /// default, fences no node because of its Lease.
    pub lease_timeout_s: Option<u64>,
    /// The number of entries of nodes, and of fences, in the status of a grant above which the controller removes what
    /// nothing needs. Nodes that never return, or that have had the volume once, would otherwise fill the object.
    pub max_nodes: usize,
}

impl Default for Policy {
    fn default() -> Self {
        Self { release_timeout_s: 5, forced_detach_s: 360, lease_timeout_s: None, max_nodes: 64 }
    }
}

/// What the controller has observed of a node that exists in the API server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeState {
    /// Whether the node has the taint `node.kubernetes.io/out-of-service`.
    pub out_of_service: bool,
    /// Since when the node is not ready; `None` if it is ready.
    pub not_ready_since: Option<Time>,
    /// For how many seconds the controller has not seen the node's kubelet renew its Lease, by the controller's own
    /// clock; `None` if there is no Lease, or if Leases are not watched.
    pub silent_s: Option<u64>,
    /// Whether remediation has decided that the node is lost: it loses also the volumes that are requested for it.
    pub lost: bool,
}

/// The reason why fencing a node may start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FencingReason {
    /// The Node object was deleted.
    NodeDeleted,
    /// The node has the out-of-service taint.
    OutOfService,
    /// Kubernetes detaches by force from a node that is not ready.
    ForcedDetach,
    /// The node's lease is stale.
    LeaseStale,
    /// Remediation has decided that the node is lost.
    Lost,
}

impl Policy {
    /// Returns why a node that does not release a revoked volume may be fenced; `None` if it may not: the node
    /// is unknown then, and stays so. `node` is `None` if the Node object does not exist; `is_requested` says
    /// whether the volume is still requested for the node.
    pub fn fencing_reason(
        &self,
        node: Option<&NodeState>,
        is_requested: bool,
        now: Time,
    ) -> Option<FencingReason> {
        let Some(node) = node else { return Some(FencingReason::NodeDeleted) };
        if node.out_of_service {
            return Some(FencingReason::OutOfService);
        }
        if node.lost {
            return Some(FencingReason::Lost);
        }
        let is_forced = |since: Time| since.is_older_than(self.forced_detach_s, now);
        if !is_requested && node.not_ready_since.is_some_and(is_forced) {
            return Some(FencingReason::ForcedDetach);
        }
        let timeout = self.lease_timeout_s.zip(node.silent_s);
        let is_stale = timeout.is_some_and(|(timeout_s, silent_s)| silent_s >= timeout_s);
        is_stale.then_some(FencingReason::LeaseStale)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_node_is_not_fenced_by_default() {
        let (policy, now) = (Policy::default(), Time(10_000));
        let silent = NodeState { silent_s: Some(10_000), ..NodeState::default() };
        assert_eq!(policy.fencing_reason(Some(&silent), false, now), None);
    }

    #[test]
    fn each_decision_of_kubernetes_permits_fencing() {
        let (policy, now) = (Policy::default(), Time(10_000));
        let fenced =
            |node: Option<&NodeState>, requested| policy.fencing_reason(node, requested, now);
        assert_eq!(fenced(None, true), Some(FencingReason::NodeDeleted));
        let tainted = NodeState { out_of_service: true, ..NodeState::default() };
        assert_eq!(fenced(Some(&tainted), true), Some(FencingReason::OutOfService));
        let lost = NodeState { lost: true, ..NodeState::default() };
        assert_eq!(fenced(Some(&lost), true), Some(FencingReason::Lost));
        let since = |s| NodeState { not_ready_since: Some(Time(s)), ..NodeState::default() };
        assert_eq!(fenced(Some(&since(9_640)), false), Some(FencingReason::ForcedDetach));
        assert_eq!(fenced(Some(&since(9_641)), false), None);
        assert_eq!(fenced(Some(&since(9_640)), true), None);
    }

    #[test]
    fn a_stale_lease_permits_fencing_if_it_is_configured() {
        let policy = Policy { lease_timeout_s: Some(15), ..Policy::default() };
        let reason = |silent_s| {
            let node = NodeState { silent_s, ..NodeState::default() };
            policy.fencing_reason(Some(&node), true, Time(0))
        };
        assert_eq!(reason(Some(14)), None);
        assert_eq!(reason(Some(15)), Some(FencingReason::LeaseStale));
        // A lease that was never seen is not a stale one.
        assert_eq!(reason(None), None);
    }
}
