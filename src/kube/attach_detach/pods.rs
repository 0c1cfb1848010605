//! Which pods need a volume: those that are bound to a node, have its claim, and have not ended.

use kube::ResourceExt;

use crate::objects::{Node, PersistentVolume, PersistentVolumeClaim, Pod, Volume};

/// The annotation of a node whose volumes are attached by a controller. kubelet sets it.
const MANAGED: &str = "volumes.kubernetes.io/controller-managed-attach-detach";

/// The annotation of a node on which ended pods keep their volumes.
const KEEP_TERMINATED: &str = "volumes.kubernetes.io/keep-terminated-pod-volumes";

/// Returns the node of a pod.
pub(crate) fn node(pod: &Pod) -> Option<String> {
    pod.spec.as_ref()?.node_name.clone().filter(|name| !name.is_empty())
}

/// Returns NAMESPACE/NAME of the claims of a pod, also of those that are made for it. [`uses`] says whether such a claim is
/// the pod's.
pub(crate) fn claims(pod: &Pod) -> Vec<String> {
    let namespace = pod.namespace().unwrap_or_default();
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let claim = |volume: &Volume| match (&volume.persistent_volume_claim, &volume.ephemeral) {
        (Some(source), _) => Some(format!("{namespace}/{}", source.claim_name)),
        (None, Some(_)) => Some(format!("{namespace}/{}-{}", pod.name_any(), volume.name)),
        (None, None) => None,
    };
    volumes.filter_map(claim).collect()
}

/// Returns whether a pod uses a claim that [`claims`] names. A claim with the name of one that is made for the pod is the
/// pod's only if the pod controls it: kubelet refuses another one.
pub(super) fn uses(pod: &Pod, claim: &PersistentVolumeClaim) -> bool {
    let is_controlled = || {
        let owners = claim.owner_references().iter();
        let mut controllers = owners.filter(|owner| owner.controller == Some(true));
        let uid = controllers.next().map(|owner| &owner.uid);
        uid.is_some() && uid == pod.metadata.uid.as_ref()
    };
    let is_named = |volume: &Volume| {
        let source = volume.persistent_volume_claim.as_ref();
        source.is_some_and(|source| Some(&source.claim_name) == claim.metadata.name.as_ref())
    };
    let mut volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    volumes.any(is_named) || is_controlled()
}

/// Returns NAMESPACE/NAME of the claim of a volume.
pub(crate) fn claim_of(volume: &PersistentVolume) -> Option<String> {
    let claim = volume.spec.as_ref()?.claim_ref.as_ref()?;
    Some(format!("{}/{}", claim.namespace.as_deref()?, claim.name.as_deref()?))
}

/// Returns whether a volume and a claim are bound to each other. A claim that was made again under the same name is
/// another one.
pub(super) fn are_bound(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    let reference = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
    let named = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref());
    named == volume.metadata.name.as_deref()
        && reference.is_some_and(|reference| reference.uid == claim.metadata.uid)
}

/// Returns whether volumes of a node are attached by this controller.
pub(super) fn is_managed(node: &Node) -> bool {
    has(node, MANAGED)
}

/// Returns whether a pod needs its volumes.
pub(super) fn needs_volumes(pod: &Pod, node: &Node) -> bool {
    !has_ended(pod) || has(node, KEEP_TERMINATED)
}

/// Returns whether a node has other annotations that matter here.
pub(crate) fn differ(before: &Node, after: &Node) -> bool {
    [MANAGED, KEEP_TERMINATED].iter().any(|name| has(before, name) != has(after, name))
}

fn has(node: &Node, annotation: &str) -> bool {
    node.annotations().get(annotation).is_some_and(|value| value == "true")
}

/// Returns whether no container of a pod runs any more, or will. Sidecars are among the init containers.
pub(super) fn has_ended(pod: &Pod) -> bool {
    let Some(status) = &pod.status else { return pod.metadata.deletion_timestamp.is_some() };
    let plain = status.container_statuses.iter().flatten();
    let init = status.init_container_statuses.iter().flatten();
    let ephemeral = status.ephemeral_container_statuses.iter().flatten();
    let runs = plain.chain(init).chain(ephemeral).any(|container| {
        container
            .state
            .as_ref()
            .is_some_and(|state| state.terminated.is_none() && state.waiting.is_none())
    });
    let is_final = matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"));
    is_final || (pod.metadata.deletion_timestamp.is_some() && !runs)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(status: Value, deleting: bool) -> Pod {
        let deleted = deleting.then_some("2030-01-01T00:00:00Z");
        let volumes = json!([
            { "name": "a", "persistentVolumeClaim": { "claimName": "c" } },
            { "name": "b", "ephemeral": {} },
            { "name": "d", "emptyDir": {} },
        ]);
        serde_json::from_value(json!({
            "metadata": { "name": "p", "namespace": "n", "deletionTimestamp": deleted },
            "spec": { "containers": [], "nodeName": "n1", "volumes": volumes }, "status": status,
        }))
        .unwrap()
    }

    #[test]
    fn a_pod_needs_its_volumes_until_no_container_runs() {
        let status = |state: &str| {
            json!([{
                "name": "c", "image": "i", "imageID": "", "ready": true, "restartCount": 0, "state": { state: {} },
            }])
        };
        let containers =
            |state: &str| json!({ "phase": "Running", "containerStatuses": status(state) });
        let others = |kind: &str, state: &str| json!({ "phase": "Running", "containerStatuses": status("waiting"), kind: status(state) });
        for (status, deleting, ended) in [
            (json!({ "phase": "Pending" }), false, false),
            (json!({ "phase": "Pending" }), true, true),
            (json!({ "phase": "Succeeded" }), false, true),
            (json!({ "phase": "Failed" }), false, true),
            (containers("running"), false, false),
            (containers("running"), true, false),
            (containers("waiting"), true, true),
            (others("initContainerStatuses", "running"), true, false),
            (others("initContainerStatuses", "waiting"), true, true),
            (others("ephemeralContainerStatuses", "running"), true, false),
            (others("ephemeralContainerStatuses", "waiting"), true, true),
        ] {
            let pod = pod(status.clone(), deleting);
            assert_eq!(has_ended(&pod), ended, "{status} {deleting}");
        }
    }

    #[test]
    fn the_claims_of_a_pod_include_those_that_are_made_for_it() {
        let pod = pod(json!({}), false);
        assert_eq!(claims(&pod), ["n/c", "n/p-b"]);
        assert_eq!(node(&pod).as_deref(), Some("n1"));
    }

    #[test]
    fn a_claim_that_is_made_for_a_pod_is_controlled_by_it() {
        let mut pod = pod(json!({}), false);
        pod.metadata.uid = Some("1".to_owned());
        let claim = |name: &str, owner: Value| -> PersistentVolumeClaim {
            let metadata = json!({ "name": name, "namespace": "n", "ownerReferences": owner });
            serde_json::from_value(json!({ "metadata": metadata })).unwrap()
        };
        let owner = |uid: &str, controller: bool| json!([{ "apiVersion": "v1", "kind": "Pod", "name": "p", "uid": uid, "controller": controller }]);
        assert!(uses(&pod, &claim("c", json!([]))));
        assert!(uses(&pod, &claim("p-b", owner("1", true))));
        assert!(!uses(&pod, &claim("p-b", json!([]))), "a person has made it");
        assert!(!uses(&pod, &claim("p-b", owner("2", true))), "an earlier pod of this name");
        assert!(!uses(&pod, &claim("p-b", owner("1", false))));
        pod.metadata.uid = None;
        assert!(!uses(&pod, &claim("p-b", json!([]))));
    }

    #[test]
    fn a_node_decides_by_annotations() {
        let node = |annotations: Value| -> Node {
            serde_json::from_value(
                json!({ "metadata": { "name": "n1", "annotations": annotations } }),
            )
            .unwrap()
        };
        let plain = node(json!({}));
        assert!(!is_managed(&plain) && is_managed(&node(json!({ MANAGED: "true" }))));
        let keeps = node(json!({ KEEP_TERMINATED: "true" }));
        let ended = pod(json!({ "phase": "Succeeded" }), false);
        assert!(!needs_volumes(&ended, &plain) && needs_volumes(&ended, &keeps));
        assert!(differ(&plain, &keeps) && !differ(&keeps, &keeps));
    }

    #[test]
    fn a_claim_of_the_same_name_is_another_one() {
        let volume: PersistentVolume = serde_json::from_value(json!({
            "metadata": { "name": "v" },
            "spec": { "claimRef": { "namespace": "n", "name": "c", "uid": "1" } },
        }))
        .unwrap();
        assert_eq!(claim_of(&volume).as_deref(), Some("n/c"));
        for (uid, name, bound) in [("1", "v", true), ("2", "v", false), ("1", "w", false)] {
            let claim = serde_json::from_value(json!({
                "metadata": { "name": "c", "namespace": "n", "uid": uid }, "spec": { "volumeName": name },
            }));
            assert_eq!(are_bound(&volume, &claim.unwrap()), bound, "{uid} {name}");
        }
    }
}
