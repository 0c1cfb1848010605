//! What the attach/detach loop knows beside what the attacher knows: pods and claims.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kube::Client;
use kube::api::Api;

use super::pods::{are_bound, claim_of, claims, has_ended, node, uses};
use crate::kind::Kind;
use crate::mirror::Index;
use crate::objects::{PersistentVolume, PersistentVolumeClaim, Pod};

/// The number of the index of pods by their claims.
const BY_CLAIM: usize = 0;
/// The number of the index of pods by their node.
pub(super) const BY_NODE: usize = 1;

/// The maximum number of pods that a grant names: the object has a maximum size.
const MAX_UIDS: usize = 16;

const POD_INDEXES: &[Index<Pod>] = &[claims, |pod| node(pod).into_iter().collect()];

/// The pods and the claims of all namespaces.
#[derive(Debug)]
pub(crate) struct Wanted {
    pub(crate) pods: Kind<Pod>,
    pub(crate) claims: Kind<PersistentVolumeClaim>,
    /// The pods of each volume that were told that another node has it, with that node.
    refused: Mutex<HashMap<String, BTreeMap<String, String>>>,
}

impl Wanted {
    pub(crate) fn new(client: &Client) -> Self {
        Self {
            pods: Kind::of_namespaces(Api::all(client.clone()), POD_INDEXES),
            claims: Kind::of_namespaces(Api::all(client.clone()), &[]),
            refused: Mutex::default(),
        }
    }

    /// Returns the pods that use a volume.
    pub(super) fn pods_of(&self, volume: &PersistentVolume) -> Vec<Arc<Pod>> {
        let Some(name) = claim_of(volume) else { return Vec::new() };
        let claim = self.claims.mirror.get(&name);
        let Some(claim) = claim.filter(|claim| are_bound(volume, claim)) else {
            return Vec::new();
        };
        let mut pods = self.pods.mirror.find(BY_CLAIM, &name);
        pods.retain(|pod| uses(pod, &claim));
        pods
    }

    /// Returns the UIDs of the pods on a node that use a volume and have not ended, at most [`MAX_UIDS`].
    pub(crate) fn uids_of(&self, volume: &PersistentVolume, name: &str) -> Vec<String> {
        let pods = self.pods_of(volume);
        let is_meant = |pod: &&Arc<Pod>| node(pod).as_deref() == Some(name) && !has_ended(pod);
        let on_node = pods.iter().filter(is_meant);
        let mut uids: Vec<String> = on_node.filter_map(|pod| pod.metadata.uid.clone()).collect();
        uids.sort_unstable();
        uids.truncate(MAX_UIDS);
        uids
    }

    /// Stores which pods of a volume are refused, each with the node that has it, and returns those that are new.
    pub(super) fn refuse(
        &self,
        volume: &str,
        refused: BTreeMap<String, String>,
    ) -> Vec<(String, String)> {
        let mut all = self.lock();
        let known = all.remove(volume).unwrap_or_default();
        let new = refused.iter().filter(|(pod, node)| known.get(*pod) != Some(*node));
        let new = new.map(|(pod, node)| (pod.clone(), node.clone())).collect();
        if !refused.is_empty() {
            all.insert(volume.to_owned(), refused);
        }
        new
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, BTreeMap<String, String>>> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::thread;

    use serde_json::json;

    use super::*;
    use crate::kind::full_name_of;
    use crate::mirror::Mirror;

    /// The state `version` of a pod of this number, on a node and with a claim that follow from the version.
    fn pod(number: usize, version: u64) -> Pod {
        let claim = json!({ "claimName": format!("c{}", version % 5) });
        let volumes = json!([{ "name": "v", "persistentVolumeClaim": claim }]);
        let node = format!("n{}", version % 3);
        let metadata = json!({
            "name": format!("p{number}"), "namespace": "n", "resourceVersion": version.to_string(),
        });
        let spec = json!({ "containers": [], "nodeName": node, "volumes": volumes });
        serde_json::from_value(json!({ "metadata": metadata, "spec": spec })).unwrap()
    }

    #[tokio::test]
    async fn the_pods_of_a_volume_are_those_that_use_its_claim_on_the_node() {
        let volume: PersistentVolume = serde_json::from_value(json!({
            "metadata": { "name": "v" },
            "spec": { "claimRef": { "namespace": "n", "name": "c0", "uid": "1" } },
        }))
        .unwrap();
        let claim: PersistentVolumeClaim = serde_json::from_value(json!({
            "metadata": { "name": "c0", "namespace": "n", "uid": "1", "resourceVersion": "1" },
            "spec": { "volumeName": "v" },
        }))
        .unwrap();
        let wanted = Wanted::new(&crate::fake::client());
        for number in 0..40 {
            // Of the versions that have the claim c0, 15 has the node n0, and 5 the node n2.
            let version = [15, 5, 6][number % 3];
            let mut pod = pod(number, version);
            pod.metadata.uid = Some(format!("uid-{number:02}"));
            wanted.pods.mirror.put(pod);
        }
        assert!(wanted.uids_of(&volume, "n2").is_empty(), "the claim does not exist yet");
        wanted.claims.mirror.put(claim);
        assert_eq!(wanted.pods_of(&volume).len(), 27);
        let uids = wanted.uids_of(&volume, "n2");
        assert_eq!((uids[0].as_str(), uids[1].as_str()), ("uid-01", "uid-04"));
        assert_eq!(uids.len(), 13);
        for number in 40..60 {
            let mut pod = pod(number, 5);
            pod.metadata.uid = Some(format!("uid-{number}"));
            wanted.pods.mirror.put(pod);
        }
        assert_eq!(wanted.uids_of(&volume, "n2").len(), MAX_UIDS);
    }

    /// The claims lead to the pods, and the pods to their nodes, while several threads change and read them.
    #[test]
    fn row_02_the_pods_of_claims_and_nodes_are_right_under_several_threads() {
        const PODS: usize = 7;
        let mirror = Mirror::new(full_name_of, POD_INDEXES);
        let versions = AtomicU64::new(1);
        let newest: [AtomicU64; PODS] = Default::default();
        let change = || {
            for round in 0..2000 {
                // Another thread may write a newer state first.
                let version = versions.fetch_add(1, Ordering::Relaxed);
                newest[round % PODS].fetch_max(version, Ordering::Relaxed);
                mirror.put(pod(round % PODS, version));
            }
        };
        let read = || {
            for round in 0..2000 {
                let claim = format!("n/c{}", round % 5);
                assert!(mirror.find(BY_CLAIM, &claim).iter().all(|pod| claims(pod) == [&*claim]));
                let name = format!("n{}", round % 3);
                let found = mirror.find(BY_NODE, &name);
                assert!(found.iter().all(|pod| node(pod).as_deref() == Some(&*name)));
            }
        };
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(change);
            }
            scope.spawn(read);
            scope.spawn(read);
        });
        let by = |index: usize, keys: &[&str]| -> usize {
            keys.iter().map(|key| mirror.find(index, key).len()).sum()
        };
        assert_eq!(mirror.len(), PODS);
        assert_eq!(by(BY_CLAIM, &["n/c0", "n/c1", "n/c2", "n/c3", "n/c4"]), PODS);
        assert_eq!(by(BY_NODE, &["n0", "n1", "n2"]), PODS);
        for (number, newest) in newest.into_iter().enumerate() {
            let known = mirror.get(&format!("n/p{number}")).unwrap();
            let version = known.metadata.resource_version.clone().unwrap();
            assert_eq!(version, newest.into_inner().to_string(), "an older state has won");
        }
    }
}
