//! The life of a volume with the sidecars of CSI.

use serde_json::{Value, json};

use crate::cluster::{CLAIM, Cluster, POD, claim_of, pod};

const SNAPSHOT: &str = "volumesnapshot";

/// A pod writes to a volume; the volume is restored from a snapshot, cloned, made larger, limited and deleted, all while the
/// pod uses it. `is_limited` returns whether the limit of the volume is stored or in force. Its argument is the handle of the
/// volume.
pub(crate) fn of_a_volume(cluster: &Cluster, class: &str, is_limited: impl Fn(&str) -> bool) {
    cluster.apply(&claim_of(class, "life", "Filesystem"));
    cluster.start_pod(&pod("life", "life"));
    cluster.exec(
        "life",
        "dd if=/dev/urandom of=/v/file bs=1M count=8 conv=fsync && md5sum /v/file | dd of=/v/sum conv=fsync",
    );
    cluster.apply(&json!({
        "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot",
        "metadata": { "name": "first" },
        "spec": {
            "volumeSnapshotClassName": "cleat", "source": { "persistentVolumeClaimName": "life" },
        },
    }));
    cluster.until(SNAPSHOT, "first", "is ready", |one| one["status"]["readyToUse"] == true);
    cluster.exec("life", "id | dd of=/v/later conv=fsync");

    let snapshot =
        json!({ "apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "first" });
    copy(cluster, class, "restored", &snapshot);
    cluster.exec("restored", "md5sum -c /v/sum && ! [ -e /v/later ]");
    copy(cluster, class, "cloned", &json!({ "kind": "PersistentVolumeClaim", "name": "life" }));
    cluster.exec("cloned", "md5sum -c /v/sum && cat /v/later");
    // A copy is a volume of its own.
    cluster.exec("cloned", "dd if=/dev/zero of=/v/file bs=1M count=8 conv=fsync");
    cluster.exec("life", "md5sum -c /v/sum");

    change(cluster, &json!({ "resources": { "requests": { "storage": "96Mi" } } }));
    cluster.until(CLAIM, "life", "has grown", |one| one["status"]["capacity"]["storage"] == "96Mi");
    cluster.exec("life", "dd if=/dev/zero of=/v/more bs=1M count=60 conv=fsync");
    let handle = handle(cluster);
    assert!(!is_limited(&handle));
    change(cluster, &json!({ "volumeAttributesClassName": "cleat-limited" }));
    cluster.until(CLAIM, "life", "is limited", |one| {
        one["status"]["currentVolumeAttributesClassName"] == "cleat-limited"
    });
    assert!(is_limited(&handle), "{handle}");
    cluster.exec("life", "md5sum -c /v/sum");

    for name in ["restored", "cloned"] {
        cluster.delete(POD, name);
        cluster.delete(CLAIM, name);
    }
    cluster.delete(SNAPSHOT, "first");
    cluster.delete(POD, "life");
    cluster.delete(CLAIM, "life");
}

/// Makes a volume with the content of another one, and starts a pod with it.
fn copy(cluster: &Cluster, class: &str, name: &str, source: &Value) {
    let mut claim = claim_of(class, name, "Filesystem");
    claim["spec"]["dataSource"] = source.clone();
    cluster.apply(&claim);
    cluster.start_pod(&pod(name, name));
}

/// Changes the claim of the pod.
fn change(cluster: &Cluster, spec: &Value) {
    let patch = json!({ "spec": spec }).to_string();
    cluster.kubectl(&["patch", CLAIM, "life", "-n", "default", "-p", &patch]);
}

/// Returns the handle of the volume of the claim.
fn handle(cluster: &Cluster) -> String {
    let claim = cluster.get(CLAIM, "life").unwrap();
    let volume = cluster.get("persistentvolume", claim["spec"]["volumeName"].as_str().unwrap());
    volume.unwrap()["spec"]["csi"]["volumeHandle"].as_str().unwrap().to_owned()
}
