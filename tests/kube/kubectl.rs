//! `kubectl cleat`: the program reads the objects of a real API server.

use std::process::{Command, Output};

use cleat_grants::object::{Reason, Signal, Truth};
use k8s_openapi::api::core::v1::{Event, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, StorageClass};
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::fixture::{World, eventually, run};

/// Runs `kubectl cleat` with the output format JSON.
pub(crate) async fn cleat(world: &World, arguments: &[&str]) -> (Output, Value) {
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("kubectl-cleat");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_cleat"), &program).unwrap();
    let mut command = Command::new(program);
    command.args(arguments).args(["-o", "json", "--driver", &world.driver, "--kubeconfig"]);
    command.arg(world.plane.kubeconfig());
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let answer = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    (output, answer)
}

/// Creates an object in the namespace `default`.
pub(crate) async fn create<K>(world: &World, object: Value)
where
    K: kube::Resource<DynamicType = (), Scope = kube::core::NamespaceResourceScope>,
    K: Clone + std::fmt::Debug + serde::Serialize + serde::de::DeserializeOwned,
{
    let api: Api<K> = Api::namespaced(world.client.clone(), "default");
    api.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
}

#[test]
fn a_claim_and_its_nodes_are_explained() {
    run(async |world: World| {
        let (a, b) = (&world.node("a").await, &world.node("b").await);
        let volume = &world.volume("pv", "shared/v").await;
        let claim = &format!("claim.{}", world.driver);
        create::<PersistentVolumeClaim>(
            &world,
            json!({
                "metadata": { "name": claim },
                "spec": {
                    "accessModes": ["ReadWriteOnce"], "storageClassName": "",
                    "resources": { "requests": { "storage": "1Gi" } }, "volumeName": volume,
                },
            }),
        )
        .await;
        let (output, _) = cleat(&world, &["why", "missing"]).await;
        assert_eq!(output.status.code(), Some(3), "{output:?}");
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(error.contains("name the namespace with -n"), "{error}");
        let (_, why) = cleat(&world, &["why", claim, "-n", "default"]).await;
        let answer = why["answer"].as_str().unwrap();
        assert!(answer.contains("is not bound yet"), "{answer}");

        let controller = world.controller();
        let first = world.attach(volume, a).await;
        let generation = world.attached(&first).await;
        let mapped = [(Signal::SafeToMount, Truth::True, Reason::Mapped, generation)];
        world.report("shared/v", a, &mapped).await;
        let (_, listed) = cleat(&world, &["volumes"]).await;
        let row = &listed["volumes"][0];
        assert_eq!(row["persistent_volume"], **volume, "{listed}");
        assert_eq!(row["holders"][0]["node"], **a, "{listed}");
        assert_eq!(row["holders"][0]["safe_to_mount"], true, "{listed}");
        let (_, node) = cleat(&world, &["node", a]).await;
        assert_eq!(node["volumes"][0]["attached"], true, "{node}");
        assert!(node["state"].as_str().unwrap().contains("not ready"), "{node}");
        let (output, check) = cleat(&world, &["drain-check", a]).await;
        assert_eq!((output.status.code(), &check["can_be_drained"]), (Some(23), &json!(false)));
        let reasons = check["obstacles"].to_string();
        assert!(reasons.contains("no pod there uses it"), "{reasons}");
        let (output, _) = cleat(&world, &["node", "nowhere"]).await;
        assert_eq!(output.status.code(), Some(3), "{output:?}");

        // Node a keeps the volume, which node b asks for.
        world.attach(volume, b).await;
        world.detach(&first).await;
        eventually("the list shows what the volume waits for", async || {
            let (_, listed) = cleat(&world, &["volumes"]).await;
            let waits = listed["volumes"][0]["waits_for"][0].as_str()?.to_owned();
            waits.contains(&format!("node {a} must release the volume")).then_some(())
        })
        .await;
        controller.stop().await;
    });
}

#[test]
fn a_volume_of_ceph_csi_is_taken_over() {
    run(async |world: World| {
        let volume = &format!("ceph-csi.{}", world.driver);
        let pv = json!({
            "metadata": { "name": volume },
            "spec": {
                "accessModes": ["ReadWriteOnce"], "capacity": { "storage": "1Gi" }, "storageClassName": "",
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": { "namespace": "default", "name": volume },
                "csi": {
                    "driver": "rook-ceph.rbd.csi.ceph.com", "volumeHandle": "0001-x",
                    "volumeAttributes": { "clusterID": "c1", "pool": "p", "imageName": "csi-vol-1", "mounter": "rbd-nbd" },
                    "nodeStageSecretRef": { "name": "s", "namespace": "rook-ceph" },
                },
            },
        });
        let pvs: Api<PersistentVolume> = Api::all(world.client.clone());
        pvs.create(&PostParams::default(), &serde_json::from_value(pv).unwrap()).await.unwrap();
        create::<PersistentVolumeClaim>(
            &world,
            json!({
                "metadata": { "name": volume },
                "spec": {
                    "accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeName": volume,
                    "resources": { "requests": { "storage": "1Gi" } },
                },
            }),
        )
        .await;
        let attachment = world.attach(volume, &world.node("a").await).await;
        let (output, _) = cleat(&world, &["take-over", volume]).await;
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && error.contains("is attached to"), "{error}");
        world.detach(&attachment).await;
        let arguments = ["take-over", volume, "--rados-namespace", "n"];
        let (output, list) = cleat(&world, &arguments).await;
        assert!(output.status.success(), "{output:?}");
        let [new, claim] = [&list["items"][0], &list["items"][1]];
        assert_eq!(new["spec"]["csi"]["volumeHandle"], "rbd/c1/p/n/csi-vol-1");
        assert_eq!(new["spec"]["csi"]["driver"], *world.driver);
        assert_eq!(new["spec"]["csi"]["nodeStageSecretRef"]["name"], "s");
        assert_eq!(claim["spec"]["volumeName"], **volume);

        // The API server accepts both when the old ones are deleted.
        pvs.patch(
            volume,
            &PatchParams::default(),
            &Patch::Merge(json!({ "metadata": { "finalizers": null } })),
        )
        .await
        .unwrap();
        pvs.delete(volume, &DeleteParams::default()).await.unwrap();
        eventually("the old volume is deleted", async || {
            pvs.get_opt(volume).await.unwrap().is_none().then_some(())
        })
        .await;
        pvs.create(&PostParams::default(), &serde_json::from_value(new.clone()).unwrap())
            .await
            .unwrap();
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(world.client.clone(), "default");
        let trial = PostParams { dry_run: true, ..PostParams::default() };
        let mut renamed = claim.clone();
        renamed["metadata"]["name"] = json!(format!("new.{volume}"));
        claims.create(&trial, &serde_json::from_value(renamed).unwrap()).await.unwrap();
        let (_, listed) = cleat(&world, &["volumes"]).await;
        assert_eq!(listed["volumes"][0]["handle"], "rbd/c1/p/n/csi-vol-1", "{listed}");
    });
}

/// The objects of one claim, its pods and its volume, on the API server.
struct Claim<'a> {
    world: &'a World,
    name: String,
}

impl<'a> Claim<'a> {
    /// Creates a claim of a StorageClass.
    async fn of_class(world: &'a World, name: &str, class: &str) -> Self {
        let name = format!("{name}.{}", world.driver);
        let spec = json!({
            "accessModes": ["ReadWriteOnce"], "storageClassName": class,
            "resources": { "requests": { "storage": "1Gi" } },
        });
        let claim = json!({ "metadata": { "name": name }, "spec": spec });
        create::<PersistentVolumeClaim>(world, claim).await;
        Self { world, name }
    }

    /// Binds the claim to a volume, as kube-controller-manager does.
    async fn bind(&self, volume: &str) {
        let claims: Api<PersistentVolumeClaim> =
            Api::namespaced(self.world.client.clone(), "default");
        let patch = |body| Patch::Merge(body);
        let parameters = PatchParams::default();
        let spec = json!({ "spec": { "volumeName": volume } });
        claims.patch(&self.name, &parameters, &patch(spec)).await.unwrap();
        let status = json!({ "status": { "phase": "Bound" } });
        claims.patch_status(&self.name, &parameters, &patch(status)).await.unwrap();
    }

    /// Creates a pod that uses the claim, on a node if there is one.
    async fn pod(&self, name: &str, node: Option<&str>) {
        let volume = json!({ "name": "v", "persistentVolumeClaim": { "claimName": self.name } });
        let pod = json!({
            "metadata": { "name": format!("{name}.{}", self.world.driver) },
            "spec": {
                "containers": [{ "name": "main", "image": "main" }], "volumes": [volume],
                "nodeName": node,
            },
        });
        create::<Pod>(self.world, pod).await;
    }

    async fn pod_status(&self, name: &str, status: Value) {
        let pods: Api<Pod> = Api::namespaced(self.world.client.clone(), "default");
        let patch = Patch::Merge(json!({ "status": status }));
        let name = format!("{name}.{}", self.world.driver);
        pods.patch_status(&name, &PatchParams::default(), &patch).await.unwrap();
    }

    async fn delete_pod(&self, name: &str) {
        let pods: Api<Pod> = Api::namespaced(self.world.client.clone(), "default");
        let name = format!("{name}.{}", self.world.driver);
        pods.delete(&name, &DeleteParams::default().grace_period(0)).await.unwrap();
    }

    /// Waits until the answer contains a text, and returns it.
    async fn answers(&self, expected: &str) -> Value {
        let argument = format!("default/{}", self.name);
        let last = std::cell::RefCell::new(Value::Null);
        let found = eventually_or(async || {
            let (output, why) = cleat(self.world, &["why", &argument]).await;
            assert!(output.status.success(), "{output:?}");
            let answer = why["answer"].as_str().unwrap().to_owned();
            *last.borrow_mut() = why;
            answer.contains(expected)
        });
        assert!(found.await, "{expected:?} is not in {:#}", last.borrow());
        last.take()
    }
}

/// Waits until a condition is true, at most 20 s.
async fn eventually_or(mut condition: impl AsyncFnMut() -> bool) -> bool {
    for _ in 0..100 {
        if condition().await {
            return true;
        }
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    }
    false
}

async fn of_cluster<K>(world: &World, object: Value)
where
    K: kube::Resource<DynamicType = (), Scope = kube::core::ClusterResourceScope>,
    K: Clone + std::fmt::Debug + serde::Serialize + serde::de::DeserializeOwned,
{
    let object = serde_json::from_value(object).unwrap();
    world.all::<K>().create(&PostParams::default(), &object).await.unwrap();
}

async fn ready(world: &World, node: &str) {
    let condition = json!({
        "type": "Ready", "status": "True", "reason": "r", "message": "m",
        "lastHeartbeatTime": "2030-01-01T00:00:00Z", "lastTransitionTime": "2030-01-01T00:00:00Z",
    });
    let patch = Patch::Merge(json!({ "status": { "conditions": [condition] } }));
    world.all::<Node>().patch_status(node, &PatchParams::default(), &patch).await.unwrap();
}

/// Makes an event about the claim, as csi-provisioner does.
async fn warn(world: &World, claim: &str, message: &str) {
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(world.client.clone(), "default");
    let uid = claims.get(claim).await.unwrap().metadata.uid;
    let event = json!({
        "metadata": { "name": format!("{claim}.1") },
        "involvedObject": {
            "kind": "PersistentVolumeClaim", "namespace": "default", "name": claim, "uid": uid,
        },
        "type": "Warning", "reason": "ProvisioningFailed", "message": message,
        "firstTimestamp": "2030-01-01T00:00:00Z", "lastTimestamp": "2030-01-01T00:00:00Z",
    });
    create::<Event>(world, event).await;
}

/// A claim that has no volume yet: the class, the driver, the pod, the scheduler and the provisioner.
#[test]
fn what_an_unbound_claim_waits_for_is_named() {
    run(async |world: World| {
        let class = |mode: &str| format!("{mode}.{}", world.driver).to_lowercase();
        let missing = Claim::of_class(&world, "missing", "no-such-class").await;
        missing.answers("its StorageClass no-such-class does not exist").await;
        let none = Claim::of_class(&world, "none", "").await;
        none.answers("it has no StorageClass").await;
        for (mode, provisioner) in [
            ("Immediate", &*world.driver),
            ("WaitForFirstConsumer", &world.driver),
            ("Other", "other.test"),
        ] {
            let mode_of_class = if mode == "Other" { "Immediate" } else { mode };
            let object = json!({
                "metadata": { "name": class(mode) },
                "provisioner": provisioner, "volumeBindingMode": mode_of_class,
            });
            of_cluster::<StorageClass>(&world, object).await;
        }
        let other = Claim::of_class(&world, "other", &class("Other")).await;
        other.answers("is of the provisioner other.test").await;
        let now = Claim::of_class(&world, "now", &class("Immediate")).await;
        now.answers(&format!("the driver {} is not installed", world.driver)).await;
        let driver = json!({ "metadata": { "name": world.driver }, "spec": {} });
        of_cluster::<CSIDriver>(&world, driver).await;
        now.answers("csi-provisioner has not created its volume").await;
        warn(&world, &now.name, "no space in the pool").await;
        now.answers("has not created its volume: no space in the pool").await;

        let later = Claim::of_class(&world, "later", &class("WaitForFirstConsumer")).await;
        later.answers("binds it when a pod uses it").await;
        later.pod("p", None).await;
        let condition = json!({
            "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes",
        });
        later.pod_status("p", json!({ "conditions": [condition] })).await;
        later.answers("has no node: 0/2 nodes").await;
    });
}

/// A claim with a volume: from the driver on the node to a node that was lost, with a real controller.
#[test]
fn what_a_pod_waits_for_is_named_until_its_node_is_lost_and_fenced() {
    run(async |world: World| {
        let (a, b) = (&world.node("a").await, &world.node("b").await);
        for node in [a, b] {
            ready(&world, node).await;
        }
        let driver = json!({ "metadata": { "name": world.driver }, "spec": {} });
        of_cluster::<CSIDriver>(&world, driver).await;
        let stranger = &format!("stranger.{}", world.driver);
        of_cluster::<Node>(&world, json!({ "metadata": { "name": stranger } })).await;
        let volume = &world.volume("pv", "shared/v").await;
        let claim = Claim::of_class(&world, "data", "").await;
        claim.bind(volume).await;
        claim.answers("waits for nothing: it is bound, and no pod uses it").await;

        claim.pod("s", Some(stranger)).await;
        claim.answers(&format!("the driver is not registered on node {stranger}")).await;
        claim.delete_pod("s").await;
        claim.pod("p", Some(a)).await;
        claim.answers(&format!("there is no VolumeAttachment for node {a}")).await;
        let attachment = world.attach(volume, a).await;
        claim.answers(&format!("the controller has not attached the volume to node {a}")).await;

        let controller = world.controller();
        let generation = world.attached(&attachment).await;
        claim.answers("kubelet has not staged the volume").await;
        world.mount("shared/v", a, generation).await;
        claim.answers("kubelet has not started pod p").await;
        claim.pod_status("p", json!({ "phase": "Running" })).await;
        claim.answers("waits for nothing: the pods that use it have it").await;

        // Node a is lost: its pod still runs, for the API server, and the volume is fenced there.
        world.out_of_service(a, true).await;
        claim.answers(&format!("node {a} is out of service")).await;
        claim.delete_pod("p").await;
        world.detach(&attachment).await;
        world.gone(&attachment).await;
        claim.pod("q", Some(b)).await;
        let second = world.attach(volume, b).await;
        let generation = world.attached(&second).await;
        world.mount("shared/v", b, generation).await;
        claim.pod_status("q", json!({ "phase": "Running" })).await;
        let why = claim.answers("waits for nothing").await;
        let steps = why["steps"].to_string();
        assert!(steps.contains("StorageRecord") && steps.contains("fenced"), "{why:#}");
        // Node a is back, and has not cleaned up.
        world.out_of_service(a, false).await;
        claim.pod("r", Some(a)).await;
        world.attach(volume, a).await;
        claim.answers(&format!("node {a} was fenced")).await;
        let (output, check) = cleat(&world, &["drain-check", a]).await;
        assert_eq!(output.status.code(), Some(23), "{check:#}");
        assert!(check["obstacles"].to_string().contains("which has not cleaned up"), "{check:#}");
        let (_, node) = cleat(&world, &["node", a]).await;
        assert_eq!(node["volumes"][0]["fenced"], true, "{node:#}");
        controller.stop().await;
    });
}

#[test]
fn impossible_names_and_unreachable_servers_are_refused_with_the_cause() {
    run(async |world: World| {
        for arguments in
            [["why", "a/b/c"], ["why", "UPPER"], ["node", "a/status"], ["drain-check", ""]]
        {
            let (output, _) = cleat(&world, &arguments).await;
            let error = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
            assert!(error.contains("is not the name of a"), "{arguments:?}: {error}");
        }
        let (output, _) = cleat(&world, &["take-over", "no-such-volume"]).await;
        assert_eq!(output.status.code(), Some(3), "{output:?}");
        let (output, listed) = cleat(&world, &["volumes"]).await;
        assert!(output.status.success() && listed["volumes"] == json!([]), "{listed}");
        let note = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
        let hint = format!("no volumes of the driver {}; ", world.driver);
        assert!(note(&output).contains(&hint), "{output:?}");
        let spec = json!({
            "capacity": { "storage": "1Gi" }, "accessModes": ["ReadWriteOnce"],
            "csi": { "driver": format!("other.{}", world.driver), "volumeHandle": "v" },
        });
        world.volume_of("other", spec).await;
        let (output, _) = cleat(&world, &["volumes"]).await;
        assert!(note(&output).contains(&format!("other.{}", world.driver)), "{output:?}");
        let (output, _) = cleat(&world, &["why", "prod/x", "-n", "staging"]).await;
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        for (option, value) in [("--kubeconfig", "/nonexistent"), ("--context", "no-such-context")]
        {
            let mut command = Command::new(env!("CARGO_BIN_EXE_cleat"));
            command.args(["kubectl", "volumes", option, value]);
            let output = command.env("KUBECONFIG", world.plane.kubeconfig()).output().unwrap();
            let error = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!output.status.success() && error.contains(value), "{error}");
        }
    });
}
