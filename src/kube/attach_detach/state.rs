//! What the attach/detach loop knows beside what the attacher knows: pods and claims.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::Client;
use kube::api::Api;

use super::pods::{claims, node};
use crate::kind::Kind;
use crate::mirror::Index;

/// The number of the index of pods by their claims.
pub(super) const BY_CLAIM: usize = 0;
/// The number of the index of pods by their node.
pub(super) const BY_NODE: usize = 1;

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
