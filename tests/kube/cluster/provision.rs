//! The sidecars that make, copy, grow, change and remove volumes: csi-provisioner, csi-snapshotter with
//! snapshot-controller, and csi-resizer. There is no kubelet, so nothing is mounted, and NodeExpandVolume is not called.

use std::fs;
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use test_kit::ceph::{POOL, shared};

use super::installed::{DRIVER, Installed};
use super::objects::{ATTACHMENT, CLAIM, CONTENT, NODE, Objects, POD, SNAPSHOT, VOLUME, text};
use super::pods::run;
use crate::fixture::{World, eventually};

const CONTENT_OF_DATA: &[u8] = b"what a pod has written";

/// A claim of the StorageClass `class`.
fn claim(name: &str, class: &str, size: &str, source: &Value) -> Value {
    let mut claim = json!({
        "metadata": { "name": name },
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": class,
            "resources": { "requests": { "storage": size } },
        },
    });
    if !source.is_null() {
        claim["spec"]["dataSource"] = source.clone();
    }
    claim
}

/// Creates a claim and a pod that uses it, and returns the PersistentVolume.
async fn provision(installed: &Installed, claim: Value) -> Value {
    let name = text(&claim, "/metadata/name").unwrap();
    let objects = &installed.objects;
    objects.apply(CLAIM, claim).await;
    installed.pod(&name, &name).await;
    let volume = objects
        .until(CLAIM, &name, "is bound", |claim| {
            let is_bound = claim["status"]["phase"] == "Bound";
            is_bound.then(|| text(claim, "/spec/volumeName").unwrap())
        })
        .await;
    objects.get(VOLUME, &volume).await.unwrap()
}

/// Takes a snapshot of a claim, and waits until it can be used.
async fn snapshot(objects: &Objects, name: &str, class: &str, claim: &str) {
    let spec = json!({
        "volumeSnapshotClassName": class, "source": { "persistentVolumeClaimName": claim },
    });
    objects.apply(SNAPSHOT, json!({ "metadata": { "name": name }, "spec": spec })).await;
    objects
        .until(SNAPSHOT, name, "is ready", |snapshot| {
            (snapshot["status"]["readyToUse"] == true).then_some(())
        })
        .await;
}

/// Creates the classes that the base leaves out.
async fn classes(world: &World) {
    let class = |name: &str, binding: &str, parameters: Value| {
        json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass",
            "metadata": { "name": name }, "provisioner": DRIVER,
            "volumeBindingMode": binding, "allowVolumeExpansion": true,
            "parameters": parameters,
        })
    };
    let snapshots = json!({
        "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotClass",
        "metadata": { "name": "cleat" }, "driver": DRIVER, "deletionPolicy": "Delete",
    });
    let mut of_images = snapshots.clone();
    of_images["metadata"]["name"] = json!("of-images");
    of_images["parameters"] = secrets_of_rook(&["snapshotter"]);
    let slow = json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "VolumeAttributesClass",
        "metadata": { "name": "slow" }, "driverName": DRIVER, "parameters": { "iops": "100" },
    });
    let files = class("files", "WaitForFirstConsumer", json!({ "directory": "default" }));
    // The cluster of the tests has no manager, and does not know its free space: no pod would be bound to a node.
    let mut parameters = secrets_of_rook(&["provisioner", "controller-expand", "node-stage"]);
    parameters["clusterID"] = json!("ceph");
    parameters["pool"] = json!(POOL);
    let images = class("images", "Immediate", parameters);
    for class in [files, images, snapshots, of_images, slow, secret_of_rook()] {
        super::objects::apply(&world.client, &class).await.unwrap();
    }
}

/// Parameters of a class that name the Secret of Rook for these purposes.
fn secrets_of_rook(purposes: &[&str]) -> Value {
    let mut parameters = json!({});
    for purpose in purposes {
        let name = format!("csi.storage.k8s.io/{purpose}-secret-name");
        parameters[name] = json!("rook-csi-rbd-provisioner");
        let namespace = format!("csi.storage.k8s.io/{purpose}-secret-namespace");
        parameters[namespace] = json!("rook-ceph");
    }
    parameters
}

/// The Secret with a client of the cluster, as Rook makes it.
fn secret_of_rook() -> Value {
    let keyring = fs::read_to_string(shared().keyring("admin")).unwrap();
    let key = keyring.lines().find_map(|line| line.trim().strip_prefix("key = ")).unwrap();
    json!({
        "apiVersion": "v1", "kind": "Secret",
        "metadata": { "name": "rook-csi-rbd-provisioner", "namespace": "rook-ceph" },
        "stringData": { "userID": "admin", "userKey": key.trim() },
    })
}

fn handle(volume: &Value) -> String {
    text(volume, "/spec/csi/volumeHandle").unwrap()
}

/// The file of a volume.
fn file(installed: &Installed, volume: &Value) -> PathBuf {
    let handle = handle(volume);
    installed.volumes().join(handle.rsplit('/').next().unwrap())
}

fn beginning(path: &Path) -> Vec<u8> {
    let mut bytes = vec![0; CONTENT_OF_DATA.len()];
    fs::File::open(path).unwrap().read_exact(&mut bytes).unwrap();
    bytes
}

/// Returns the files in a directory and below.
fn files(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

/// Deletes pods and claims, and waits until nothing of them is left.
async fn remove(objects: &Objects, claims: &[&str]) {
    for name in claims {
        objects.delete(POD, name).await;
        objects.delete(CLAIM, name).await;
    }
    for name in claims {
        objects.gone(CLAIM, name).await;
    }
}

async fn remove_snapshot(objects: &Objects, name: &str) {
    objects.delete(SNAPSHOT, name).await;
    objects.gone(SNAPSHOT, name).await;
}

/// Waits until no object of the driver's volumes is left.
async fn nothing_is_left(objects: &Objects) {
    let is_ours = |object: &Value| {
        let drivers = ["/spec/csi/driver", "/spec/attacher", "/spec/driver"];
        drivers.iter().any(|pointer| object.pointer(pointer).is_some_and(|name| name == DRIVER))
    };
    for kind in [VOLUME, CONTENT, ATTACHMENT] {
        eventually(&format!("no {kind:?} is left"), async || {
            (!objects.list(kind).await.iter().any(is_ours)).then_some(())
        })
        .await;
    }
}

#[test]
fn volumes_live_their_lives_with_the_sidecars() {
    run(async |world: World, objects: Objects| {
        let installed = Installed::start(&world, "node-1").await;
        classes(&world).await;
        tokio::join!(life_of_files(&installed), life_of_images(&installed));
        nothing_is_left(&objects).await;
        let left = files(&installed.volumes());
        assert!(left.is_empty(), "{left:?}");
        let refused = installed.refused();
        assert!(refused.is_empty(), "{refused:#?}");
        assert_eq!(images(), Vec::<String>::new());
    });
}

async fn life_of_files(installed: &Installed) {
    let objects = &installed.objects;
    // The class of the base. kube-scheduler binds the pod where csi-provisioner has published room.
    let first = provision(installed, claim("first", "cleat-local", "8Mi", &Value::Null)).await;
    assert_eq!(fs::metadata(file(installed, &first)).unwrap().len(), 8 << 20);
    let affinity = first["spec"]["nodeAffinity"].to_string();
    assert!(affinity.contains(&installed.node), "{affinity}");
    // kube-controller-manager asks for it, and `cleat controller` answers.
    objects
        .until(NODE, &installed.node, "has the volume attached", |node| {
            let attached = node["status"]["volumesAttached"].to_string();
            attached.contains(&handle(&first)).then_some(())
        })
        .await;

    let data = provision(installed, claim("data", "files", "8Mi", &Value::Null)).await;
    let path = file(installed, &data);
    let mut written = fs::File::options().write(true).open(&path).unwrap();
    written.write_all(CONTENT_OF_DATA).unwrap();
    snapshot(objects, "snapshot", "cleat", "data").await;
    // The volume changes after its snapshot.
    written.rewind().unwrap();
    written.write_all(&[0xff; 16]).unwrap();
    let restored = claim("restored", "files", "8Mi", &of_snapshot("snapshot"));
    let restored = provision(installed, restored).await;
    assert_eq!(beginning(&file(installed, &restored)), CONTENT_OF_DATA);
    let source = json!({ "kind": "PersistentVolumeClaim", "name": "data" });
    let copied = provision(installed, claim("copied", "files", "8Mi", &source)).await;
    assert_eq!(beginning(&file(installed, &copied)), beginning(&path));

    grow(objects, "data", &data).await;
    assert_eq!(fs::metadata(&path).unwrap().len(), 16 << 20);
    modify(objects, "data").await;
    let known = installed.call("ControllerGetVolume", &json!({ "volumeId": handle(&data) }));
    assert!(known.to_string().contains(r#""iops":"100""#), "{known:#}");

    remove_snapshot(objects, "snapshot").await;
    remove(objects, &["first", "data", "restored", "copied"]).await;
}

async fn life_of_images(installed: &Installed) {
    let objects = &installed.objects;
    let image = provision(installed, claim("image", "images", "8Mi", &Value::Null)).await;
    let name = handle(&image).rsplit('/').next().unwrap().to_owned();
    assert!(images().contains(&name), "{name}");
    assert_eq!(image["spec"]["csi"]["nodeStageSecretRef"]["namespace"], "rook-ceph");
    // The claim belongs to no node, so that no loss of a node delays it.
    let claimed = objects.get(CLAIM, "image").await.unwrap();
    let selected = &claimed["metadata"]["annotations"]["volume.kubernetes.io/selected-node"];
    assert_eq!(selected, "cleat-images");
    snapshot(objects, "of-image", "of-images", "image").await;
    let clone = claim("clone", "images", "16Mi", &of_snapshot("of-image"));
    let clone = provision(installed, clone).await;
    assert_eq!(clone["spec"]["capacity"]["storage"], "16Mi");
    grow(objects, "image", &image).await;
    modify(objects, "image").await;
    // A snapshot stays as long as it has a clone.
    remove(objects, &["clone"]).await;
    remove_snapshot(objects, "of-image").await;
    remove(objects, &["image"]).await;
}

fn of_snapshot(name: &str) -> Value {
    json!({ "apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": name })
}

/// Returns the images that csi-provisioner has asked for.
fn images() -> Vec<String> {
    let listed = shared().rbd(&["ls", POOL]).unwrap();
    let names = String::from_utf8(listed).unwrap();
    names.lines().filter(|name| name.starts_with("pvc-")).map(str::to_owned).collect()
}

/// Makes a claim larger. The filesystem grows on the node only.
async fn grow(objects: &Objects, claim: &str, volume: &Value) {
    let resources = json!({ "requests": { "storage": "16Mi" } });
    objects.patch(CLAIM, claim, json!({ "spec": { "resources": resources } })).await;
    objects
        .until(CLAIM, claim, "waits for its node", |claim| {
            let conditions = claim["status"]["conditions"].as_array()?;
            conditions.iter().find(|one| one["type"] == "FileSystemResizePending").map(|_| ())
        })
        .await;
    let name = text(volume, "/metadata/name").unwrap();
    let volume = objects.get(VOLUME, &name).await.unwrap();
    assert_eq!(volume["spec"]["capacity"]["storage"], "16Mi");
}

/// Gives a claim another VolumeAttributesClass.
async fn modify(objects: &Objects, claim: &str) {
    let spec = json!({ "volumeAttributesClassName": "slow" });
    objects.patch(CLAIM, claim, json!({ "spec": spec })).await;
    objects
        .until(CLAIM, claim, "is changed", |claim| {
            (claim["status"]["currentVolumeAttributesClassName"] == "slow").then_some(())
        })
        .await;
}
