//! Deletes pods of a lost node, as the garbage collection of Kubernetes does it later.

use std::collections::BTreeSet;
use std::sync::Arc;

use cleat_core::error::{Error, ErrorKind, Result};
use k8s_openapi::api::core::v1::Toleration;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, Preconditions};
use serde_json::json;

use super::Watch;
use crate::api::{self, call};
use crate::attach_detach::pods;
use crate::nodes::OUT_OF_SERVICE;
use crate::objects::{PersistentVolume, Pod, PodStatus};
use crate::storage::Backing;

impl Watch {
    /// Deletes the pods of a node that use volumes of the driver. Returns how many there were.
    ///
    /// A pod that tolerates the taint can be made again on the node. Only those that were there at first are deleted: the
    /// others would be deleted and made again without end.
    pub(super) async fn delete_pods(&mut self, node: &str) -> Result<usize> {
        let claims = self.claims(|_| true);
        let mut found = self.pods_of(node).await?;
        found.retain(|pod| uses(pod, &claims) || self.has_inline_volume(pod));
        let driver = &self.cluster.config.driver;
        let uids = found.iter().filter(|pod| tolerates(pod, driver)).filter_map(ResourceExt::uid);
        let first = self.tolerating.entry(node.to_owned()).or_insert_with(|| uids.collect());
        found.retain(|pod| {
            !tolerates(pod, driver) || pod.uid().is_some_and(|uid| first.contains(&uid))
        });
        self.delete(node, &found).await
    }

    /// Deletes the pods that run on a node with volumes for which it has no grant any more, as those do that the node has not
    /// ended before it works again. Returns how many there were.
    pub(super) async fn delete_running_pods(&self, node: &str) -> Result<usize> {
        let is_granted =
            |handle: &str| matches!(self.cluster.storage.find(handle), Ok(Backing::Granted(_)));
        let claims = self.claims(is_granted);
        let mut found = self.pods_of(node).await?;
        found.retain(|pod| pod.status.as_ref().is_some_and(runs) && uses(pod, &claims));
        self.delete(node, &found).await
    }

    async fn pods_of(&self, node: &str) -> Result<Vec<Pod>> {
        let selected = ListParams::default().fields(&format!("spec.nodeName={node}"));
        let all = Api::<Pod>::all(self.cluster.nodes.api.clone().into_client());
        let request = all.list(&selected);
        Ok(call(|| format!("cannot list the pods of node {node}"), request).await?.items)
    }

    /// Returns the claims of those volumes of the driver whose handle `keep` accepts.
    fn claims(&self, keep: impl Fn(&str) -> bool) -> BTreeSet<String> {
        let volumes = self.cluster.volumes.mirror.all();
        let is_kept = |volume: &&Arc<PersistentVolume>| {
            let csi = volume.spec.as_ref().and_then(|spec| spec.csi.as_ref());
            csi.is_some_and(|csi| keep(&csi.volume_handle))
        };
        volumes.iter().filter(is_kept).filter_map(|volume| pods::claim_of(volume)).collect()
    }

    /// Returns whether a pod itself specifies a volume of the driver.
    fn has_inline_volume(&self, pod: &Pod) -> bool {
        let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
        let mut inline = volumes.filter_map(|volume| volume.csi.as_ref());
        inline.any(|source| source.driver == self.cluster.config.driver)
    }

    /// Deletes these pods. One whose deletion fails, for example because a webhook refuses it, delays no other; the first
    /// error is returned.
    async fn delete(&self, node: &str, found: &[Pod]) -> Result<usize> {
        let client = self.cluster.nodes.api.clone().into_client();
        let mut failed: Option<Error> = None;
        for pod in found {
            let namespace = pod.namespace().unwrap_or_default();
            match delete(&Api::namespaced(client.clone(), &namespace), pod).await {
                Ok(()) => {
                    self.cluster.metrics.write("pod");
                    let pod = format!("{namespace}/{}", pod.name_any());
                    tracing::warn!(node, pod, "deleted");
                }
                // The next one fails for the same reason, after a timeout.
                Err(error) if is_unreachable(&error) => return Err(error),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(found.len()), Err)
    }
}

fn uses(pod: &Pod, claims: &BTreeSet<String>) -> bool {
    pods::claims(pod).iter().any(|claim| claims.contains(claim))
}

/// Returns whether the API server did not answer.
fn is_unreachable(error: &Error) -> bool {
    error.kind() == ErrorKind::TimedOut
}

/// Returns whether the out-of-service taint of this driver does not concern a pod.
fn tolerates(pod: &Pod, driver: &str) -> bool {
    let is_of_taint = |known: &Toleration| {
        let has = |field: &Option<String>, value: &str| field.as_deref() == Some(value);
        let is_any = known.key.as_deref().unwrap_or_default().is_empty();
        let exists = has(&known.operator, "Exists");
        let is_key = has(&known.key, OUT_OF_SERVICE) || (is_any && exists);
        let effect = known.effect.as_deref().unwrap_or_default();
        is_key && (exists || has(&known.value, driver)) && matches!(effect, "" | "NoExecute")
    };
    pod.spec.iter().flat_map(|spec| spec.tolerations.iter().flatten()).any(is_of_taint)
}

/// Returns whether a container of a pod may use its volumes.
fn runs(status: &PodStatus) -> bool {
    let init = status.init_container_statuses.iter().flatten();
    let mut init = init.filter_map(|container| container.state.as_ref());
    status.phase.as_deref() == Some("Running") || init.any(|state| state.running.is_some())
}

/// Converts the absence of an object into success.
fn unless_gone<T>(result: Result<T>) -> Result<()> {
    match result {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        result => result.map(drop),
    }
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
