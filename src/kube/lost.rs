//! Reads at the API server again that a node is lost, before it is fenced. The mirrors may be old: a watch can stop without
//! an error, for example while its connection is held.

use cleat_core::error::Result;
use cleat_grants::policy::FencingReason;
use kube::api::ListParams;
use tokio::time::Instant;

use crate::api;
use crate::cluster::Cluster;

/// Returns whether the API server confirms the reason for a fence. If not, the mirrors have the present state afterwards.
pub(crate) async fn is_confirmed(
    cluster: &Cluster,
    node: &str,
    reason: FencingReason,
) -> Result<bool> {
    if reason == FencingReason::LeaseStale {
        return Ok(!has_renewed(cluster, node).await?);
    }
    // Kubernetes detaches by force by the end of the request, which the caller has read.
    let is_requested = reason != FencingReason::ForcedDetach;
    cluster.nodes.refresh(node).await?;
    let states = cluster.node_states(std::iter::once(node));
    let policy = &cluster.config.policy;
    Ok(policy.fencing_reason(states.get(node), is_requested, api::now()) == Some(reason))
}

/// Reads the Lease of a node. Returns whether it has changed.
async fn has_renewed(cluster: &Cluster, node: &str) -> Result<bool> {
    let selected = ListParams::default().fields(&format!("metadata.name={node}"));
    let found = cluster.leases.refresh_all(&selected).await?;
    let lease = found.first().map(|lease| &**lease);
    Ok(cluster.renewals.observe(node, lease, Instant::now()))
}
