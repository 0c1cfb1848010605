//! The attach/detach loop of the controller on a real API server: pods come and go, and the VolumeAttachments follow.
//! No kube-controller-manager runs. The nodes are objects, and the tests play their kubelets and agents.

use std::time::{Duration, Instant};

use cleat_kube::grant::{VolumeGrant, grant_name};
use cleat_kube::{Config, rights};
use k8s_openapi::api::core::v1::{Event, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::control_plane::{self, LOOP};
use crate::controller_rights::{account, compare};
use crate::fixture::{Controller, World, eventually, run};

/// The annotation that kubelet sets on its node.
const MANAGED: &str = "volumes.kubernetes.io/controller-managed-attach-detach";

/// The time after which the controller looks at a node again without an event.
const LOOK_AGAIN: Duration = Duration::from_secs(30);

/// A volume with its claim, which pods use.
struct Scene<'a> {
    world: &'a World,
    /// The namespace of the pods.
    namespace: &'static str,
    controller: Controller,
    /// The nodes a and b.
    nodes: [String; 2],
    volume: String,
}

impl<'a> Scene<'a> {
    async fn new(world: &'a World) -> Self {
        Self::with(world, config(world).await).await
    }

    /// As [`Scene::new`], with these settings of the controller.
    async fn with(world: &'a World, config: Config) -> Self {
        Self::without_volume(world, config).await.with_volume().await
    }

    /// Creates the volume, bound to its claim.
    async fn with_volume(self) -> Self {
        let scene = self;
        let claim = scene.claim(Some(&scene.volume)).await;
        scene.persistent_volume(&claim).await;
        scene
    }

    async fn without_volume(world: &'a World, config: Config) -> Self {
        let driver =
            json!({ "metadata": { "name": world.driver }, "spec": { "attachRequired": false } });
        create(&world.all::<CSIDriver>(), driver).await;
        let nodes = [world.node("a").await, world.node("b").await];
        let volume = format!("v.{}", world.driver);
        let (controller, namespace) = (world.controller_of(config), "default");
        let scene = Self { world, namespace, controller, nodes, volume };
        for node in &scene.nodes {
            scene.annotate(node, MANAGED, true).await;
        }
        scene
    }

    /// Creates the claim, bound to this volume or not yet bound.
    async fn claim(&self, volume: Option<&str>) -> PersistentVolumeClaim {
        let claim = json!({
            "metadata": { "name": self.volume },
            "spec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeName": volume,
                "resources": { "requests": { "storage": "1Gi" } },
            },
        });
        create(&self.claims(), claim).await
    }

    /// Creates the volume, bound to the claim.
    async fn persistent_volume(&self, claim: &PersistentVolumeClaim) {
        let mut spec = self.world.spec("shared/v");
        spec["claimRef"] = json!({
            "namespace": self.namespace, "name": self.volume, "uid": claim.metadata.uid,
        });
        let volume = json!({ "metadata": { "name": self.volume }, "spec": spec });
        create(&self.world.all::<PersistentVolume>(), volume).await;
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.world.client.clone(), self.namespace)
    }

    fn claims(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.world.client.clone(), self.namespace)
    }

    async fn annotate(&self, node: &str, name: &str, value: bool) {
        let value = if value { json!("true") } else { Value::Null };
        let patch = Patch::Merge(json!({ "metadata": { "annotations": { name: value } } }));
        self.world.all::<Node>().patch(node, &PatchParams::default(), &patch).await.unwrap();
    }

    /// Sets whether a node is ready, since now.
    async fn ready(&self, node: &str, is_ready: bool) {
        let condition = json!({
            "type": "Ready", "status": if is_ready { "True" } else { "Unknown" },
            "lastTransitionTime": k8s_openapi::jiff::Timestamp::now().to_string(),
        });
        let patch = Patch::Merge(json!({ "status": { "conditions": [condition] } }));
        let nodes = self.world.all::<Node>();
        nodes.patch_status(node, &PatchParams::default(), &patch).await.unwrap();
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

    /// Returns the attachments of the volume.
    async fn objects(&self) -> Vec<VolumeAttachment> {
        let all = self.world.all::<VolumeAttachment>().list(&ListParams::default()).await.unwrap();
        let own = all.items.into_iter().filter(|known| known.spec.attacher == self.world.driver);
        own.collect()
    }

    /// Returns the attachments of the volume: their nodes, and whether they are being deleted.
    async fn attachments(&self) -> Vec<(String, bool)> {
        let all = self.objects().await.into_iter();
        all.map(|known| (known.spec.node_name, known.metadata.deletion_timestamp.is_some()))
            .collect()
    }

    /// Waits until the volume is attached to no node.
    async fn detached(&self) {
        eventually(&format!("{} is detached", self.volume), async || {
            self.attachments().await.is_empty().then_some(())
        })
        .await;
    }

    /// Waits until the volume is attached to exactly this node, and returns the generation.
    async fn attached(&self, node: &str) -> cleat_grants::object::Generation {
        let wanted = [(node.to_owned(), false)];
        eventually(&format!("{} is attached to {node}", self.volume), async || {
            (self.attachments().await == wanted).then_some(())
        })
        .await;
        let name = self.objects().await.pop().unwrap().metadata.name.unwrap();
        self.world.attached(&name).await
    }

    /// Starts another controller, and removes the grant before.
    async fn without_grant(self) -> Self {
        let Scene { world, namespace, controller, nodes, volume } = self;
        controller.stop().await;
        let grants = world.all::<VolumeGrant>();
        let name = grant_name(&world.driver, "shared/v");
        let patch = Patch::Merge(json!({ "metadata": { "finalizers": null } }));
        grants.patch(&name, &PatchParams::default(), &patch).await.unwrap();
        grants.delete(&name, &DeleteParams::default()).await.unwrap();
        let controller = world.controller_of(config(world).await);
        Scene { world, namespace, controller, nodes, volume }
    }

    /// Returns how much the controller has written, and the versions of what says where the volume is attached.
    async fn written(&self) -> (u64, Vec<Option<String>>) {
        let grant = self.world.grant("shared/v").await.unwrap();
        let objects = self.objects().await.into_iter().map(|known| known.metadata);
        let objects = objects.map(|metadata| metadata.resource_version);
        // A node writes to the status of the grant.
        let grant = grant.metadata.generation.map(|number| number.to_string());
        (self.controller.writes(), objects.chain([grant]).collect())
    }

    /// Checks that the attachments stay as they are while the controller has nothing more to do.
    async fn stays(&self, expected: &[(String, bool)]) {
        for _ in 0..20 {
            assert_eq!(self.attachments().await, expected);
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
    }

    /// Waits for an event about a pod.
    async fn event(&self, pod: &str, text: &str) {
        let events: Api<Event> = Api::namespaced(self.world.client.clone(), self.namespace);
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
pub(crate) async fn config(world: &World) -> Config {
    let make = async || {
        let namespace =
            json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": LOOP } });
        let objects = account(LOOP).into_iter().chain(rights::attach_detach(LOOP));
        control_plane::create(&world.client, std::iter::once(namespace).chain(objects)).await;
        world.plane.make_controller_kubeconfig(LOOP, LOOP).await
    };
    let kubeconfig = Some(world.plane.of_loop.get_or_init(make).await.clone());
    Config { attach_detach: true, kubeconfig, ..world.config(LOOP) }
}

async fn create<K>(api: &Api<K>, object: Value) -> K
where
    K: kube::Resource + Clone + std::fmt::Debug + serde::Serialize + serde::de::DeserializeOwned,
{
    api.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap()
}

#[test]
fn row_04_to_07_attachments_follow_the_pods_and_detaches_come_first() {
    run(async |world: World| {
        let scene = Scene::new(&world).await;
        let [a, b] = &scene.nodes;
        scene.pod("one", a).await;
        let generation = scene.attached(a).await;
        // The grant names the pod for which it was made.
        let uid = scene.pods().get(&scene.name("one")).await.unwrap().metadata.uid.unwrap();
        let grant = world.grant("shared/v").await.unwrap().stored().grant;
        assert_eq!(grant.holder(a).unwrap().pod_uids, [uid]);
        world.mount("shared/v", a, generation).await;
        // What has changed is looked at. It is written only if the attachments differ: a second pod on the node only
        // refers to the volume, and heartbeats change nothing.
        let looks = scene.controller.syncs();
        let before = scene.written().await;
        scene.pod("two", a).await;
        for is_ready in [true, false, true] {
            scene.ready(a, is_ready).await;
        }
        scene.remove("one").await;
        eventually("the volume was looked at", async || {
            (scene.controller.syncs() > looks).then_some(())
        })
        .await;
        scene.stays(&[(a.clone(), false)]).await;
        assert_eq!(scene.written().await, before);
        // The pod has ended, and its node still has the volume mounted.
        scene.phase("two", "Succeeded").await;
        scene.pod("three", b).await;
        scene.stays(&[(a.clone(), false)]).await;
        assert_eq!(scene.written().await, before);
        world.release("shared/v", a, generation).await;
        scene.attached(b).await;
        assert!(scene.written().await.0 > before.0);
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
fn row_13_and_37_a_deleted_node_loses_the_volume_which_is_fenced_first() {
    run(async |world: World| {
        let scene = Scene::new(&world).await;
        let [a, b] = &scene.nodes;
        scene.pod("one", a).await;
        let generation = scene.attached(a).await;
        world.mount("shared/v", a, generation).await;
        scene.pod("two", b).await;
        scene.event("two", a).await;
        // A pod of the same name on another node is another pod: it does not break the lock of the first one.
        scene.remove("one").await;
        scene.pod("one", b).await;
        scene.stays(&[(a.clone(), false)]).await;
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
        scene.detached().await;
        scene.controller.stop().await;
    });
}

#[test]
fn row_01_the_loop_has_all_rights_that_it_uses_and_no_other() {
    run(async |world: World| {
        let config = config(&world).await;
        // Events about pods are in their namespaces: not in that of other events.
        let scene = Scene { namespace: LOOP, ..Scene::without_volume(&world, config).await };
        let scene = scene.with_volume().await;
        let [a, b] = &scene.nodes;
        scene.pod("one", a).await;
        let generation = scene.attached(a).await;
        scene.pod("two", b).await;
        scene.event("two", "Multi-Attach error").await;
        scene.remove("one").await;
        world.released("shared/v", a, generation).await;
        scene.attached(b).await;
        scene.controller.stop().await;
        compare(LOOP, &rights::attach_detach(LOOP));
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
        let refused = cleat_kube::run_until(&config, storage, Box::pin(std::future::pending()))
            .await
            .unwrap_err();
        assert!(refused.message().contains("attachRequired: false"), "{refused}");
    });
}

#[test]
fn row_24_a_volume_is_in_use_until_its_node_says_otherwise() {
    run(async |world: World| {
        let scene = Scene::new(&world).await;
        let [a, _] = &scene.nodes;
        scene.pod("one", a).await;
        let generation = scene.attached(a).await;
        // The node has not said anything.
        scene.remove("one").await;
        scene.stays(&[(a.clone(), false)]).await;
        world.mount("shared/v", a, generation).await;
        // A new controller does not know it better, even if the grant is lost, as after a restored backup.
        let scene = scene.without_grant().await;
        let [a, _] = &scene.nodes;
        eventually("the grant is made again from the record", async || {
            world.grant("shared/v").await?.stored().grant.holder(a).map(|_| ())
        })
        .await;
        scene.stays(&[(a.clone(), false)]).await;
        world.release("shared/v", a, generation).await;
        scene.detached().await;
        scene.controller.stop().await;
    });
}

#[test]
fn row_24_a_deleted_volume_whose_grant_is_lost_is_in_use_until_the_storage_says_so() {
    run(async |world: World| {
        let scene = Scene::new(&world).await;
        let [a, _] = &scene.nodes;
        scene.pod("one", a).await;
        let generation = scene.attached(a).await;
        world.mount("shared/v", a, generation).await;
        scene.remove("one").await;
        let image = world.storage.image("shared/v");
        image.set_down(true);
        let scene = scene.without_grant().await;
        let [a, _] = &scene.nodes;
        let asked = image.begun();
        eventually("a storage that is down was asked again", async || {
            (image.begun() > asked + 1).then_some(())
        })
        .await;
        scene.stays(&[(a.clone(), false)]).await;
        image.delete();
        image.set_down(false);
        scene.detached().await;
        assert!(world.grant("shared/v").await.is_none());
        scene.controller.stop().await;
    });
}

#[test]
fn row_25_what_appears_after_the_pod_and_what_disappears_is_seen() {
    run(async |world: World| {
        let scene = Scene::without_volume(&world, config(&world).await).await;
        let [a, _] = &scene.nodes;
        scene.pod("one", a).await;
        let claim = scene.claim(None).await;
        scene.persistent_volume(&claim).await;
        scene.stays(&[]).await;
        let bound = Patch::Merge(json!({ "spec": { "volumeName": scene.volume } }));
        scene.claims().patch(&scene.volume, &PatchParams::default(), &bound).await.unwrap();
        scene.attached(a).await;
        // The attachment is removed by hand: it is made again.
        let first = scene.objects().await.pop().unwrap().metadata;
        let name = first.name.unwrap();
        let patch = Patch::Merge(json!({ "metadata": { "finalizers": null } }));
        let attachments = world.all::<VolumeAttachment>();
        attachments.delete(&name, &DeleteParams::default()).await.unwrap();
        attachments.patch(&name, &PatchParams::default(), &patch).await.unwrap();
        eventually("there is another attachment", async || {
            let known = world.attachment(&name).await?.metadata;
            (known.deletion_timestamp.is_none() && known.uid != first.uid).then_some(())
        })
        .await;
        scene.controller.stop().await;
    });
}

#[test]
fn row_26_the_time_until_a_forced_detach_begins_again_with_each_life_sign() {
    run(async |world: World| {
        const FORCED: Duration = Duration::from_secs(3);
        let mut config = config(&world).await;
        config.policy.forced_detach_s = FORCED.as_secs();
        let scene = Scene::with(&world, config).await;
        let [a, b] = &scene.nodes;
        scene.ready(a, true).await;
        scene.pod("one", a).await;
        let generation = scene.attached(a).await;
        world.mount("shared/v", a, generation).await;
        // A pod that comes back in time keeps the volume, however long its node is silent.
        scene.ready(a, false).await;
        scene.remove("one").await;
        scene.pod("again", a).await;
        tokio::time::sleep(FORCED + Duration::from_secs(1)).await;
        scene.stays(&[(a.clone(), false)]).await;
        let grant = world.grant("shared/v").await.unwrap().stored().grant;
        assert!(!grant.holder(a).unwrap().revoked, "{grant:?}");
        // The node was ready for a moment.
        scene.ready(a, true).await;
        scene.ready(a, false).await;
        let silent = Instant::now();
        scene.remove("again").await;
        scene.pod("next", b).await;
        scene.attached(b).await;
        // Times in objects are whole seconds.
        let waited = silent.elapsed() + Duration::from_secs(1);
        assert!((FORCED..FORCED + LOOK_AGAIN).contains(&waited), "{waited:?}");
        assert!(world.storage.image("shared/v").is_cut(a));
        scene.controller.stop().await;
    });
}
