//! Volumes in a directory of the node. `claims_of_images.rs` does the same with RBD images.

use serde_json::{Value, json};

use crate::cluster::{CLAIM, Cluster, FILES, POD, claim_of, pod, run, wait};
use crate::life;

/// Lists what volumes leave on a node: devices in use, mounts, directories of kubelet, files. kubelet itself never removes
/// the two directories that have those of raw devices, and the daemon keeps the empty directories of its snapshots.
const LEFT: &str = "
    cat /sys/block/nbd*/pid 2>/dev/null
    grep -E '^/dev/nbd|kubernetes.io~csi|/globalmount' /proc/mounts
    find /var/lib/kubelet/plugins/kubernetes.io/csi -mindepth 2 2>/dev/null | grep -vE 'volumeDevices/(staging|publish)$'
    find /var/lib/kubelet/pods -path '*kubernetes.io~csi/*' 2>/dev/null
    find /var/lib/cleat/volumes -type f
    true";

/// Waits until nothing is left of volumes, in the cluster and on the node.
pub(crate) fn nothing_is_left(cluster: &Cluster) {
    for kind in ["persistentvolume", "volumeattachment"] {
        wait(&format!("no {kind} is left"), || cluster.list(kind).is_empty().then_some(()));
    }
    wait("nothing is left on the node", || {
        let left = cluster.on_node(LEFT);
        if !left.is_empty() {
            println!("left on the node: {left}");
        }
        left.is_empty().then_some(())
    });
}

/// The data of a claim outlives its pod, and nothing outlives the claim.
pub(crate) fn data_outlives_its_pod(cluster: &Cluster, class: &str) {
    cluster.apply(&claim_of(class, "data", "Filesystem"));
    cluster.start_pod(&pod("writer", "data"));
    let write = "dd if=/dev/urandom of=/v/file bs=1M count=8 && md5sum /v/file > /v/sum";
    cluster.exec("writer", write);
    assert!(cluster.on_node("cat /proc/mounts").contains("/dev/nbd"));
    cluster.delete(POD, "writer");
    wait("the volume is unmapped", || {
        let used = cluster.on_node("cat /sys/block/nbd*/pid 2>/dev/null; true");
        used.is_empty().then_some(())
    });
    cluster.start_pod(&pod("reader", "data"));
    cluster.exec("reader", "md5sum -c /v/sum");
    cluster.delete(POD, "reader");
    cluster.delete(CLAIM, "data");
    nothing_is_left(cluster);
}

/// A pod with the claims `files`, at /v and partly at /inner, and `raw`, at /dev/raw. The files are for reading only if
/// that is wanted. The driver refuses it for a device that other pods could write.
fn pod_of_every_kind(name: &str, is_read_only: bool) -> Value {
    let mut pod = pod(name, "files");
    pod["spec"]["securityContext"] = json!({ "fsGroup": 4711 });
    let container = &mut pod["spec"]["containers"][0];
    container["volumeMounts"] = json!([
        { "name": "v", "mountPath": "/v" },
        { "name": "v", "mountPath": "/inner", "subPath": "inner" },
    ]);
    container["volumeDevices"] = json!([{ "name": "raw", "devicePath": "/dev/raw" }]);
    let files = json!({ "claimName": "files", "readOnly": is_read_only });
    pod["spec"]["volumes"] = json!([
        { "name": "v", "persistentVolumeClaim": files },
        { "name": "raw", "persistentVolumeClaim": { "claimName": "raw" } },
    ]);
    pod
}

/// A pod has a group, a part of a volume and a raw device, and another one reads them.
pub(crate) fn groups_parts_and_devices(cluster: &Cluster, class: &str) {
    cluster.apply(&claim_of(class, "files", "Filesystem"));
    cluster.apply(&claim_of(class, "raw", "Block"));
    cluster.start_pod(&pod_of_every_kind("writer", false));
    assert_eq!(cluster.exec("writer", "stat -c %g /v").trim(), "4711");
    cluster.exec("writer", "id > /inner/file && md5sum /v/inner/file > /v/sum");
    let write = "dd if=/dev/urandom of=/dev/raw bs=1M count=4 conv=fsync";
    cluster.exec("writer", write);
    let sum = "dd if=/dev/raw bs=1M count=4 2>/dev/null | md5sum | dd bs=32 count=1 2>/dev/null";
    let last = |output: String| output.lines().last().map(str::to_owned);
    let written = last(cluster.exec("writer", sum));
    cluster.delete(POD, "writer");

    cluster.start_pod(&pod_of_every_kind("reader", true));
    cluster.exec("reader", "md5sum -c /v/sum");
    assert_eq!(last(cluster.exec("reader", sum)), written);
    for refused in [": > /v/new", ": > /inner/new"] {
        let (status, output) = cluster.try_exec("reader", refused);
        assert_ne!(status, 0, "{refused}: {output}");
    }
    cluster.delete(POD, "reader");
    cluster.delete(CLAIM, "files");
    cluster.delete(CLAIM, "raw");
    nothing_is_left(cluster);
}

/// Two pods of a node share a volume, and an ephemeral one ends with its pod.
pub(crate) fn shared_and_ephemeral(cluster: &Cluster, class: &str) {
    cluster.apply(&claim_of(class, "shared", "Filesystem"));
    cluster.start_pod(&pod("one", "shared"));
    cluster.start_pod(&pod("two", "shared"));
    cluster.exec("one", "id > /v/file");
    cluster.exec("two", "md5sum /v/file > /v/sum");
    cluster.delete(POD, "one");
    cluster.exec("two", "md5sum -c /v/sum && id > /v/other");

    let mut own = pod("own", "");
    let template = json!({ "spec": claim_of(class, "", "Filesystem")["spec"] });
    own["spec"]["volumes"] =
        json!([{ "name": "v", "ephemeral": { "volumeClaimTemplate": template } }]);
    cluster.start_pod(&own);
    cluster.exec("own", "id > /v/file");
    cluster.delete(POD, "own");
    wait("the ephemeral volume is deleted", || {
        (cluster.list("persistentvolume").len() == 1).then_some(())
    });

    cluster.exec("two", "md5sum -c /v/sum");
    cluster.delete(POD, "two");
    cluster.delete(CLAIM, "shared");
    nothing_is_left(cluster);
}

/// Volumes grow while a pod uses them.
pub(crate) fn grow(cluster: &Cluster, class: &str) {
    for (name, mode) in [("files", "Filesystem"), ("raw", "Block")] {
        cluster.apply(&claim_of(class, name, mode));
    }
    cluster.start_pod(&pod_of_every_kind("grows", false));
    cluster.exec("grows", "id > /v/file && md5sum /v/file > /v/sum");
    for name in ["files", "raw"] {
        let patch = json!({ "spec": { "resources": { "requests": { "storage": "96Mi" } } } });
        cluster.kubectl(&["patch", CLAIM, name, "-n", "default", "-p", &patch.to_string()]);
    }
    for name in ["files", "raw"] {
        cluster.until(CLAIM, name, "has grown", |claim| {
            claim["status"]["capacity"]["storage"] == "96Mi"
        });
    }
    let size = |text: String| text.split_whitespace().last().unwrap().parse::<u64>().unwrap();
    let [block, blocks] =
        ["%S", "%b"].map(|what| size(cluster.exec("grows", &format!("stat -f -c {what} /v"))));
    assert!(block * blocks > 72 << 20, "{blocks} blocks of {block} bytes");
    let last = "dd if=/dev/raw bs=1M skip=95 of=/v/last && stat -c %s /v/last";
    assert_eq!(size(cluster.exec("grows", last)), 1 << 20);
    cluster.exec("grows", "md5sum -c /v/sum");
    cluster.delete(POD, "grows");
    cluster.delete(CLAIM, "files");
    cluster.delete(CLAIM, "raw");
    nothing_is_left(cluster);
}

/// The StorageClass of files that grow.
const GROWING: &str = "growing";

/// Adds csi-resizer and csi-snapshotter with the rights that `deploy/` has for them, and makes classes for them. csi-resizer
/// works for a cluster of one node, because it has no mode for one of each node.
fn start_sidecars(cluster: &Cluster) {
    cluster.install_with_snapshots();
    cluster.apply(&json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass",
        "metadata": { "name": GROWING }, "provisioner": "cleat.csi.storage",
        "volumeBindingMode": "WaitForFirstConsumer", "allowVolumeExpansion": true,
        "parameters": { "directory": "default" },
    }));
    for workload in ["daemonset/cleat-files", "deployment/cleat-images"] {
        cluster.rolled_out(workload);
    }
}

#[test]
fn the_data_of_a_claim_outlives_its_pod_and_nothing_outlives_the_claim() {
    run(|cluster| data_outlives_its_pod(cluster, FILES));
}

#[test]
fn a_pod_has_a_group_a_part_of_a_volume_and_a_raw_device_and_another_one_reads_them() {
    run(|cluster| groups_parts_and_devices(cluster, FILES));
}

#[test]
fn two_pods_of_a_node_share_a_volume_and_an_ephemeral_one_ends_with_its_pod() {
    run(|cluster| shared_and_ephemeral(cluster, FILES));
}

#[test]
fn volumes_grow_while_a_pod_uses_them() {
    run(|cluster| {
        start_sidecars(cluster);
        grow(cluster, GROWING);
    });
}

#[test]
fn a_volume_is_copied_grown_limited_and_removed_while_a_pod_uses_it() {
    run(|cluster| {
        start_sidecars(cluster);
        // In force at once: the daemon of the node has changed it.
        let list = "nsenter --mount --target $(pgrep -f '^/usr/bin/cleat node ') cleat ls -o json";
        life::of_a_volume(cluster, GROWING, |_| {
            let mappings: Value = serde_json::from_str(&cluster.on_node(list)).unwrap();
            mappings["mappings"].as_array().unwrap().iter().any(|mapping| mapping["iops"] == 500)
        });
        nothing_is_left(cluster);
    });
}
