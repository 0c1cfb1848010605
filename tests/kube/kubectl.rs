//! `kubectl cleat`: the program reads the objects of a real API server.

use std::process::{Command, Output};

use cleat_grants::object::{Reason, Signal, Truth};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
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
