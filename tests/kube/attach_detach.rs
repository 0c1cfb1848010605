//! The attach/detach loop of the controller on a real API server: pods come and go, and the VolumeAttachments follow.
//! No kube-controller-manager runs. The nodes are objects, and the tests play their kubelets and agents.

use std::path::PathBuf;

use cleat_kube::{Config, rights};
use k8s_openapi::api::core::v1::{Event, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tokio::sync::OnceCell;

use crate::control_plane::{self, ControlPlane};
use crate::controller_rights::account;
use crate::fixture::{Controller, World, eventually, run};

/// The namespace of the account of the controllers with the loop.
const NAMESPACE: &str = "attach-detach";

/// The annotation that kubelet sets on its node.
const MANAGED: &str = "volumes.kubernetes.io/controller-managed-attach-detach";

/// A volume with its claim, which pods of the namespace `default` use.
struct Scene<'a> {
    world: &'a World,
    controller: Controller,
    /// The nodes a and b.
    nodes: [String; 2],
    volume: String,
}

impl<'a> Scene<'a> {
    async fn new(world: &'a World) -> Self {
        let driver =
            json!({ "metadata": { "name": world.driver }, "spec": { "attachRequired": false } });
        create(&world.all::<CSIDriver>(), driver).await;
        let nodes = [world.node("a").await, world.node("b").await];
        let volume = format!("v.{}", world.driver);
        let scene =
            Self { world, controller: world.controller_of(config(world).await), nodes, volume };
        for node in &scene.nodes {
            scene.annotate(node, MANAGED, true).await;
        }
        let claim = json!({
            "metadata": { "name": scene.volume },
            "spec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeName": scene.volume,
                "resources": { "requests": { "storage": "1Gi" } },
            },
        });
        let claim = create(&scene.claims(), claim).await;
        let mut spec = world.spec("shared/v");
        spec["claimRef"] = json!({
            "namespace": "default", "name": scene.volume, "uid": claim.metadata.uid,
        });
        let volume = json!({ "metadata": { "name": scene.volume }, "spec": spec });
        create(&world.all::<PersistentVolume>(), volume).await;
        scene
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.world.client.clone(), "default")
    }

    fn claims(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.world.client.clone(), "default")
    }

    async fn annotate(&self, node: &str, name: &str, value: bool) {
        let value = if value { json!("true") } else { Value::Null };
        let patch = Patch::Merge(json!({ "metadata": { "annotations": { name: value } } }));
        self.world.all::<Node>().patch(node, &PatchParams::default(), &patch).await.unwrap();
    }

    /// Creates a pod that is bound to a node.
    async fn pod(&self, name: &str, node: &str) {
        let claim = json!({ "claimName": self.volume });
        let pod = json!({
            "metadata": { "name": self.name(name) },
            "spec": {
                "nodeName": node, "containers": [{ "name": "c", "image": "i" }],
                "volumes": [{ "name": "data", "persistentVolumeClaim": claim }],
            },
        });
        create(&self.pods(), pod).await;
    }

    fn name(&self, pod: &str) -> String {
        format!("{pod}.{}", self.world.driver)
    }

    /// Sets the phase of a pod, as kubelet does.
    async fn phase(&self, pod: &str, phase: &str) {
        let patch = Patch::Merge(json!({ "status": { "phase": phase } }));
        let name = self.name(pod);
        self.pods().patch_status(&name, &PatchParams::default(), &patch).await.unwrap();
    }

    /// Removes a pod, as kubelet does when its containers have ended.
    async fn remove(&self, pod: &str) {
        let now = DeleteParams::default().grace_period(0);
        self.pods().delete(&self.name(pod), &now).await.unwrap();
    }

    /// Returns the attachments of the volume: their nodes, and whether they are being deleted.
    async fn attachments(&self) -> Vec<(String, bool)> {
        let all = self.world.all::<VolumeAttachment>().list(&ListParams::default()).await.unwrap();
        let own = all.items.into_iter().filter(|known| known.spec.attacher == self.world.driver);
        own.map(|known| (known.spec.node_name, known.metadata.deletion_timestamp.is_some()))
            .collect()
    }

    /// Waits until the volume is attached to exactly this node, and returns the generation.
    async fn attached(&self, node: &str) -> cleat_grants::object::Generation {
        let wanted = [(node.to_owned(), false)];
        eventually(&format!("{} is attached to {node}", self.volume), async || {
            (self.attachments().await == wanted).then_some(())
        })
        .await;
        let all = self.world.all::<VolumeAttachment>().list(&ListParams::default()).await.unwrap();
        let own = all.items.into_iter().find(|known| known.spec.attacher == self.world.driver);
        self.world.attached(&own.unwrap().metadata.name.unwrap()).await
    }

    /// Checks that the attachments stay as they are while the controller has nothing more to do.
    async fn stays(&self, expected: &[(String, bool)]) {
        for _ in 0..20 {
            assert_eq!(self.attachments().await, expected);
            tokio::time::sleep(std::time::Duration::from_millis(25)).await;
        }
    }

    /// Waits for an event about a pod.
    async fn event(&self, pod: &str, text: &str) {
        let events: Api<Event> = Api::namespaced(self.world.client.clone(), "default");
        let of_pod =
            ListParams::default().fields(&format!("involvedObject.name={}", self.name(pod)));
        eventually(&format!("{pod} has an event with {text}"), async || {
            let found = events.list(&of_pod).await.unwrap().items;
            found
                .iter()
                .any(|event| event.message.as_ref().is_some_and(|note| note.contains(text)))
                .then_some(())
        })
        .await;
    }
}

/// Returns the settings of a controller with the loop, and exactly the rights for it.
async fn config(world: &World) -> Config {
    static KUBECONFIG: OnceCell<PathBuf> = OnceCell::const_new();
    let make = async || {
        let namespace = json!({
            "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": NAMESPACE },
        });
        let objects = account(NAMESPACE).into_iter().chain(rights::attach_detach(NAMESPACE));
        let plane = ControlPlane::get();
        control_plane::create(&world.client, std::iter::once(namespace).chain(objects)).await;
        plane.make_controller_kubeconfig(NAMESPACE, NAMESPACE).await
    };
    let kubeconfig = Some(KUBECONFIG.get_or_init(make).await.clone());
    Config { attach_detach: true, kubeconfig, ..world.config(NAMESPACE) }
}

async fn create<K>(api: &Api<K>, object: Value) -> K
where
    K: kube::Resource + Clone + std::fmt::Debug + serde::Serialize + serde::de::DeserializeOwned,
{
    api.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap()
}

#[test]
fn row_05_to_07_attachments_follow_the_pods_and_detaches_come_first() {
    run(async |world: World| {
        let scene = Scene::new(&world).await;
        let [a, b] = &scene.nodes;
        scene.pod("one", a).await;
        let generation = scene.attached(a).await;
        world.mount("shared/v", a, generation).await;
        // A second pod on the node only refers to the volume.
        scene.pod("two", a).await;
        scene.remove("one").await;
        scene.stays(&[(a.clone(), false)]).await;
        // The pod has ended, and its node still has the volume mounted.
        scene.phase("two", "Succeeded").await;
        scene.pod("three", b).await;
        scene.stays(&[(a.clone(), false)]).await;
        world.release("shared/v", a, generation).await;
        scene.attached(b).await;
        scene.controller.stop().await;
    });
}

#[test]
fn row_09_a_pod_on_a_second_node_is_told_which_node_has_the_volume() {
    run(async |world: World| {
        let scene = Scene::new(&world).await;
        let [a, b] = &scene.nodes;
        scene.pod("one", a).await;
        let generation = scene.attached(a).await;
        scene.pod("two", b).await;
        scene.event("two", &format!("Multi-Attach error for volume \"{}\"", scene.volume)).await;
        scene.event("two", a).await;
        scene.stays(&[(a.clone(), false)]).await;
        scene.remove("one").await;
        world.released("shared/v", a, generation).await;
        scene.attached(b).await;
        scene.controller.stop().await;
    });
}

#[test]
fn row_13_a_deleted_node_loses_the_volume_which_is_fenced_first() {
    run(async |world: World| {
        let scene = Scene::new(&world).await;
        let [a, b] = &scene.nodes;
        scene.pod("one", a).await;
        let generation = scene.attached(a).await;
        world.mount("shared/v", a, generation).await;
        scene.pod("two", b).await;
        scene.event("two", a).await;
        world.all::<Node>().delete(a, &DeleteParams::default()).await.unwrap();
        scene.attached(b).await;
        let grant = world.grant("shared/v").await.unwrap().stored().grant;
        assert!(grant.fence(a, generation).is_some(), "{grant:?}");
        scene.controller.stop().await;
    });
}

#[test]
fn row_22_a_pod_that_comes_back_to_its_node_starts() {
    run(async |world: World| {
        let scene = Scene::new(&world).await;
        let [a, _] = &scene.nodes;
        scene.pod("one", a).await;
        let generation = scene.attached(a).await;
        world.mount("shared/v", a, generation).await;
        // Before the detach: nothing happens to the attachment.
        scene.remove("one").await;
        scene.pod("again", a).await;
        scene.stays(&[(a.clone(), false)]).await;
        // During the detach: it ends, and a new attachment follows.
        scene.remove("again").await;
        world.release("shared/v", a, generation).await;
        scene.pod("late", a).await;
        let later = scene.attached(a).await;
        assert!(later >= generation, "{later:?}");
        scene.controller.stop().await;
    });
}

#[test]
fn row_23_annotations_of_a_node_decide_about_its_volumes() {
    run(async |world: World| {
        let scene = Scene::new(&world).await;
        let [a, _] = &scene.nodes;
        scene.annotate(a, MANAGED, false).await;
        scene.pod("one", a).await;
        scene.stays(&[]).await;
        scene.annotate(a, MANAGED, true).await;
        let generation = scene.attached(a).await;
        let keep = "volumes.kubernetes.io/keep-terminated-pod-volumes";
        scene.annotate(a, keep, true).await;
        scene.phase("one", "Succeeded").await;
        world.released("shared/v", a, generation).await;
        scene.stays(&[(a.clone(), false)]).await;
        scene.annotate(a, keep, false).await;
        eventually("the volume is detached", async || {
            scene.attachments().await.is_empty().then_some(())
        })
        .await;
        scene.controller.stop().await;
    });
}

#[test]
fn row_03_and_16_the_loop_continues_after_a_restart_and_only_where_kubernetes_does_not_attach() {
    run(async |world: World| {
        let scene = Scene::new(&world).await;
        let [a, b] = &scene.nodes;
        scene.pod("one", a).await;
        let generation = scene.attached(a).await;
        let (pods, one) = (scene.pods(), scene.name("one"));
        let b = b.clone();
        let a = a.clone();
        scene.controller.stop().await;
        // What has changed meanwhile is seen.
        pods.delete(&one, &DeleteParams::default().grace_period(0)).await.unwrap();
        world.released("shared/v", &a, generation).await;
        let second = world.controller_of(config(&world).await);
        eventually("the volume is detached", async || {
            let all = world.all::<VolumeAttachment>().list(&ListParams::default()).await.unwrap();
            all.items.iter().all(|known| known.spec.attacher != world.driver).then_some(())
        })
        .await;
        assert!(world.all::<Node>().get_opt(&b).await.unwrap().is_some());
        second.stop().await;

        world.all::<CSIDriver>().delete(&world.driver, &DeleteParams::default()).await.unwrap();
        let config = Config { listen: None, ..config(&world).await };
        let storage = std::sync::Arc::clone(&world.storage);
        let refused =
            cleat_kube::run_until(&config, storage, std::future::pending()).await.unwrap_err();
        assert!(refused.message().contains("attachRequired: false"), "{refused}");
    });
}
