//! Volumes in a directory of the node.

use crate::cluster::{CLAIM, Cluster, POD, claim, pod, run, wait};

/// Lists what volumes leave on a node: devices in use, mounts, directories of kubelet, files.
const LEFT: &str = "
    cat /sys/block/nbd*/pid 2>/dev/null
    grep -E '^/dev/nbd|kubernetes.io~csi|/globalmount' /proc/mounts
    find /var/lib/kubelet/plugins/kubernetes.io/csi -mindepth 2 2>/dev/null
    find /var/lib/kubelet/pods -path '*kubernetes.io~csi/*' 2>/dev/null
    find /var/lib/cleat/volumes -mindepth 1
    true";

/// Waits until nothing is left of volumes, in the cluster and on the node.
fn nothing_is_left(cluster: &Cluster) {
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

#[test]
fn the_data_of_a_claim_outlives_its_pod_and_nothing_outlives_the_claim() {
    run(|cluster| {
        cluster.apply(&claim("data", "Filesystem"));
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
    });
}
