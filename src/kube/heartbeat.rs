//! The heartbeat of an agent: a Lease in the namespace of the controller. The controller makes it for a node that has
//! volumes, and only if it needs to know whether the agent works; the agent renews it.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::Resource;

use crate::api;
use crate::objects::Node;

/// The prefix of the names of these Leases.
const PREFIX: &str = "node-";

/// The shortest time between two renewals.
const SHORTEST: Duration = Duration::from_secs(1);

/// The longest time between two renewals: after it, an agent follows a timeout that was made shorter.
const LONGEST: Duration = Duration::from_secs(20);

/// Returns the name of the Lease of a node.
pub(crate) fn name_of(node: &str) -> String {
    format!("{PREFIX}{node}")
}

/// Returns the node of a Lease; `None` if it is no heartbeat.
pub(crate) fn node_of(lease: &str) -> Option<&str> {
    lease.strip_prefix(PREFIX)
}

/// Returns a Lease that the agent of `node` is to renew several times within `timeout`. It ends with the Node.
pub(crate) fn wanted(node: &Node, name: &str, timeout: Duration) -> Lease {
    let metadata = ObjectMeta {
        name: Some(name_of(name)),
        owner_references: Some(node.owner_ref(&()).into_iter().collect()),
        ..ObjectMeta::default()
    };
    let lease_duration_seconds = i32::try_from(timeout.as_secs()).ok();
    Lease { metadata, spec: Some(LeaseSpec { lease_duration_seconds, ..LeaseSpec::default() }) }
}

/// Renews a Lease. Returns after which time it is to be renewed again.
pub(crate) fn renew(lease: &mut Lease, node: &str) -> Duration {
    let spec = lease.spec.get_or_insert_default();
    spec.holder_identity = Some(node.to_owned());
    spec.renew_time = Some(MicroTime(api::timestamp()));
    let seconds = spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
    Duration::from_secs(seconds.unwrap_or_default() / 3).clamp(SHORTEST, LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_renewed_several_times_before_it_is_stale() {
        let node = Node {
            metadata: ObjectMeta { name: Some("n".into()), ..ObjectMeta::default() },
            ..Node::default()
        };
        let mut lease = wanted(&node, "n", Duration::from_secs(15));
        assert_eq!(lease.metadata.name.as_deref().and_then(node_of), Some("n"));
        assert_eq!(renew(&mut lease, "n"), Duration::from_secs(5));
        let spec = lease.spec.as_ref().unwrap();
        assert!(spec.renew_time.is_some() && spec.holder_identity.as_deref() == Some("n"));
        assert_eq!(renew(&mut Lease::default(), "n"), SHORTEST);
        assert_eq!(renew(&mut wanted(&node, "n", Duration::from_secs(3600)), "n"), LONGEST);
        assert_eq!(node_of("controller-x"), None);
    }
}
