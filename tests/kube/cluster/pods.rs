//! Nodes, claims and pods, as users and kubelet make them.

use std::sync::PoisonError;

use cleat_grants::object::Generation;
use serde_json::{Value, json};

use super::objects::{ATTACHMENT, CLAIM, EVENT, NODE, Objects, POD, text};
use crate::control_plane::ControlPlane;
use crate::fixture::{World, eventually, run_on};

/// The volume of a test, whose clients can be fenced.
pub(crate) const HANDLE: &str = "shared/v";

/// Runs a test on the control plane with the controllers of Kubernetes.
pub(crate) fn run(test: impl AsyncFnOnce(World, Objects)) {
    let plane = ControlPlane::managed();
    let _used = plane.in_use.read().unwrap_or_else(PoisonError::into_inner);
    run_with(plane, test);
}

/// As [`run`], while no other test uses that control plane.
pub(crate) fn run_alone(test: impl AsyncFnOnce(World, Objects)) {
    let plane = ControlPlane::managed();
    let _used = plane.in_use.write().unwrap_or_else(PoisonError::into_inner);
    run_with(plane, test);
}

fn run_with(plane: &'static ControlPlane, test: impl AsyncFnOnce(World, Objects)) {
    run_on(plane, async |world: World| {
        let objects = Objects(world.client.clone());
        test(world, objects).await;
    });
}

/// What kubelet does on a node. Nothing is mounted: the test plays the agent of cleat, too.
pub(crate) struct Kubelet<'a> {
    pub(crate) world: &'a World,
    pub(crate) objects: &'a Objects,
    pub(crate) node: String,
}

impl<'a> Kubelet<'a> {
    /// Registers a node.
    pub(crate) async fn start(world: &'a World, objects: &'a Objects, name: &str) -> Self {
        let node = world.node(name).await;
        Self::of(world, objects, node).await
    }

    /// Makes a node one that kubelet has registered.
    pub(crate) async fn of(world: &'a World, objects: &'a Objects, node: String) -> Self {
        let kubelet = Self { world, objects, node };
        // The attach/detach controller attaches volumes to such nodes only.
        let annotation = "volumes.kubernetes.io/controller-managed-attach-detach";
        let body = json!({ "metadata": { "annotations": { annotation: "true" } } });
        objects.patch(NODE, &kubelet.node, body).await;
        kubelet.set_ready(true).await;
        kubelet
    }

    pub(crate) async fn set_ready(&self, is_ready: bool) {
        let status = if is_ready { "True" } else { "Unknown" };
        let now = k8s_openapi::jiff::Timestamp::now().to_string();
        let condition = json!({
            "type": "Ready", "status": status, "lastTransitionTime": now, "lastHeartbeatTime": now,
        });
        let resources = json!({ "cpu": "4", "memory": "8Gi", "pods": "100" });
        let body = json!({
            "conditions": [condition], "capacity": resources, "allocatable": resources,
        });
        self.objects.patch_status(NODE, &self.node, body).await;
    }

    /// The name of a volume in the status of the node.
    fn unique(&self, handle: &str) -> String {
        format!("kubernetes.io/csi/{}^{handle}", self.world.driver)
    }

    /// Reports the volumes that pods of the node use.
    pub(crate) async fn uses(&self, handles: &[&str]) {
        let names: Vec<String> = handles.iter().map(|handle| self.unique(handle)).collect();
        self.objects.patch_status(NODE, &self.node, json!({ "volumesInUse": names })).await;
    }

    /// Returns whether the node status says that the volume is attached, so that kubelet may mount it.
    pub(crate) async fn is_reported(&self, handle: &str) -> bool {
        let node = self.objects.get(NODE, &self.node).await.unwrap();
        let attached = node["status"]["volumesAttached"].as_array().cloned().unwrap_or_default();
        attached.iter().any(|volume| volume["name"] == self.unique(handle))
    }

    /// Waits until the volume is reported as attached, or not.
    pub(crate) async fn reported(&self, handle: &str, wanted: bool) {
        let what = format!("{handle} on {}: attached is {wanted}", self.node);
        eventually(&what, async || (self.is_reported(handle).await == wanted).then_some(())).await;
    }

    /// Returns the VolumeAttachment of the driver for this node that is not being deleted.
    pub(crate) async fn find_attachment(&self) -> Option<String> {
        let all = self.objects.list(ATTACHMENT).await;
        let is_ours = |known: &&Value| {
            known["spec"]["attacher"] == *self.world.driver
                && known["spec"]["nodeName"] == *self.node
                && known["metadata"]["deletionTimestamp"].is_null()
        };
        text(all.iter().find(is_ours)?, "/metadata/name")
    }

    /// Waits until Kubernetes asks for a volume on this node, and returns the name of the VolumeAttachment.
    pub(crate) async fn attachment(&self) -> String {
        let what = format!("a VolumeAttachment for {}", self.node);
        eventually(&what, async || self.find_attachment().await).await
    }

    /// Starts a pod with the volume [`HANDLE`] on the node, and plays the agent of cleat, which maps it. Returns the pod,
    /// the attachment and the generation of the grant.
    pub(crate) async fn start_pod(&self, name: &str, claim: &str) -> (String, String, Generation) {
        let pod = self.pod(name, claim).await;
        let attachment = self.attachment().await;
        let generation = self.world.attached(&attachment).await;
        self.reported(HANDLE, true).await;
        self.world.mount(HANDLE, &self.node, generation).await;
        self.uses(&[HANDLE]).await;
        (pod, attachment, generation)
    }

    /// Waits until kube-controller-manager has tried three times to attach the volume of a pod whose attachment still ends.
    /// It then waits for two seconds. An attachment that disappears while it tries would block it for two minutes.
    pub(crate) async fn waits_for_detach(&self, pod: &str) {
        eventually(&format!("{pod} waits for the end of the detach"), async || {
            let events = self.objects.list(EVENT).await;
            let is_meant = |event: &&Value| {
                let text = event["message"].as_str().unwrap_or_default();
                event["involvedObject"]["name"] == pod && text.contains("is being deleted")
            };
            let counts = events.iter().filter(is_meant).map(|event| event["count"].as_u64());
            (counts.map(|count| count.unwrap_or(1)).sum::<u64>() >= 3).then_some(())
        })
        .await;
    }

    /// Creates a pod with a claim on this node, and returns its name.
    pub(crate) async fn pod(&self, name: &str, claim: &str) -> String {
        let pod = pod(&format!("{name}.{}", self.world.driver), claim, Some(&self.node));
        let name = text(&pod, "/metadata/name").unwrap();
        self.objects.apply(POD, pod).await;
        name
    }
}

/// A pod with a claim.
pub(crate) fn pod(name: &str, claim: &str, node: Option<&str>) -> Value {
    let mut pod = json!({
        "metadata": { "name": name },
        "spec": {
            "containers": [{ "name": "main", "image": "busybox" }],
            "volumes": [{ "name": "v", "persistentVolumeClaim": { "claimName": claim } }],
        },
    });
    if let Some(node) = node {
        pod["spec"]["nodeName"] = node.into();
    }
    pod
}

/// Creates a PersistentVolume with a claim that Kubernetes binds to it, and returns the name of both.
pub(crate) async fn claim(world: &World, objects: &Objects, name: &str, handle: &str) -> String {
    let volume = world.volume(name, handle).await;
    let spec = json!({
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "",
        "volumeName": volume,
        "resources": { "requests": { "storage": "1Gi" } },
    });
    objects.apply(CLAIM, json!({ "metadata": { "name": volume }, "spec": spec })).await;
    objects
        .until(CLAIM, &volume, "is bound", |claim| {
            (claim["status"]["phase"] == "Bound").then_some(())
        })
        .await;
    volume
}
