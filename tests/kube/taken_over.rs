//! Images that this driver has not made, on a real API server and a real Ceph cluster: `kubectl cleat take-over` makes
//! them volumes that are granted like all others.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use test_kit::ceph::{POOL, shared};
use tonic::Code;

use crate::fixture::{World, eventually, run};
use crate::kubectl::{cleat, create};
use crate::node::TestNode;

/// Makes an image whose content is `byte`, as ceph-csi does with the feature exclusive-lock.
async fn import(name: &str, byte: u8) {
    let target = format!("{POOL}/{name}");
    let write = move || {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![byte; 4 << 20]).unwrap();
        let path = file.path().display().to_string();
        let features = "layering,exclusive-lock";
        shared().rbd(&["import", "--image-feature", features, &path, &target]).unwrap();
    };
    tokio::task::spawn_blocking(write).await.unwrap();
}

/// Creates a PersistentVolume for an image with these attributes, and its claim.
async fn volume(world: &World, name: &str, driver: &str, handle: &str, attributes: Value) {
    let pv = json!({
        "metadata": { "name": name },
        "spec": {
            "accessModes": ["ReadWriteOnce"], "capacity": { "storage": "4Mi" }, "storageClassName": "",
            "persistentVolumeReclaimPolicy": "Retain", "volumeMode": "Block",
            "claimRef": { "namespace": "default", "name": name },
            "csi": { "driver": driver, "volumeHandle": handle, "volumeAttributes": attributes },
        },
    });
    let pvs: Api<PersistentVolume> = Api::all(world.client.clone());
    pvs.create(&PostParams::default(), &serde_json::from_value(pv).unwrap()).await.unwrap();
    let claim = json!({
        "metadata": { "name": name },
        "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeName": name,
            "resources": { "requests": { "storage": "4Mi" } }, "volumeMode": "Block",
        },
    });
    create::<PersistentVolumeClaim>(world, claim).await;
}

/// Replaces the PersistentVolume by the one that `kubectl cleat take-over` prints, and returns its handle.
async fn take_over(world: &World, name: &str) -> String {
    let (output, list) = cleat(world, &["take-over", name]).await;
    assert!(output.status.success(), "{output:?}");
    let pvs: Api<PersistentVolume> = Api::all(world.client.clone());
    let no_finalizers = Patch::Merge(json!({ "metadata": { "finalizers": null } }));
    pvs.patch(name, &PatchParams::default(), &no_finalizers).await.unwrap();
    pvs.delete(name, &DeleteParams::default()).await.unwrap();
    eventually("the old volume is deleted", async || {
        pvs.get_opt(name).await.unwrap().is_none().then_some(())
    })
    .await;
    let new = &list["items"][0];
    pvs.create(&PostParams::default(), &serde_json::from_value(new.clone()).unwrap())
        .await
        .unwrap();
    new["spec"]["csi"]["volumeHandle"].as_str().unwrap().to_owned()
}

/// The volume is granted to node a with its content, not used by node b meanwhile, and then moves there.
async fn is_granted(world: &World, [a, b]: [&TestNode; 2], name: &str, handle: &str, byte: u8) {
    let first = world.attach(name, &a.name).await;
    let generation = world.attached(&first).await;
    a.stage(handle).await.unwrap();
    assert_eq!(a.read(handle, 4096).await.unwrap(), [byte; 4096]);
    let refused = b.stage(handle).await.unwrap_err();
    assert!(refused.message().contains(&format!("node {} has it", a.name)), "{refused}");
    a.write(handle, &[9; 4096]).await.unwrap();
    a.unstage(handle).await.unwrap();
    world.detach(&first).await;
    world.gone(&first).await;
    let second = world.attach(name, &b.name).await;
    assert_eq!(world.attached(&second).await, generation.next());
    b.stage(handle).await.unwrap();
    assert_eq!(b.read(handle, 4096).await.unwrap(), [9; 4096]);
}

#[test]
fn a_volume_of_ceph_csi_that_is_taken_over_is_granted() {
    run(async |world: World| {
        let controller = world.controller();
        let (a, b) = (TestNode::start(&world, "a").await, TestNode::start(&world, "b").await);
        let image = "csi-vol-1c0f9e3e-1111-2222-3333-444455556666";
        import(image, 5).await;
        let name = &format!("of-ceph-csi.{}", world.driver);
        let attributes = json!({ "clusterID": "ceph", "pool": POOL, "imageName": image });
        volume(&world, name, "rook-ceph.rbd.csi.ceph.com", "0001-x", attributes).await;
        let handle = take_over(&world, name).await;
        assert_eq!(handle, format!("rbd/ceph/{POOL}//{image}"));
        is_granted(&world, [&a, &b], name, &handle, 5).await;
        controller.stop().await;
    });
}

#[test]
fn a_static_volume_is_refused_until_it_is_taken_over() {
    run(async |world: World| {
        let controller = world.controller();
        let (a, b) = (TestNode::start(&world, "a").await, TestNode::start(&world, "b").await);
        import("by-hand", 6).await;
        let name = &format!("static.{}", world.driver);
        let attributes = json!({
            "staticVolume": "true", "clusterID": "ceph", "pool": POOL, "iops": "10000",
        });
        volume(&world, name, &world.driver, "by-hand", attributes).await;
        let attachment = world.attach(name, &a.name).await;
        let (message, _) = world.attach_error(&attachment, "kubectl cleat take-over").await;
        assert!(message.contains("by-hand") && message.contains("static volume"), "{message}");
        let refused = a.stage("by-hand").await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        world.detach(&attachment).await;
        world.gone(&attachment).await;
        let handle = take_over(&world, name).await;
        assert_eq!(handle, format!("rbd/ceph/{POOL}//by-hand"));
        is_granted(&world, [&a, &b], name, &handle, 6).await;
        controller.stop().await;
    });
}
