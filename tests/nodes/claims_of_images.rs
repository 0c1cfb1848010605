//! Claims of RBD images, on the two nodes with a Ceph cluster. The pods are on the first one.

use crate::cluster::{Cluster, Kind, run_on, wait};
use crate::files::{
    data_outlives_its_pod, groups_parts_and_devices, grow, nothing_is_left, shared_and_ephemeral,
};
use crate::installation::POOL;
use crate::life;

/// The StorageClass.
const IMAGES: &str = "cleat-rbd";

/// Runs a test, and checks that it leaves no image.
fn with_images(test: fn(&Cluster, &str)) {
    run_on(Kind::TwoNodes, |cluster| {
        test(cluster, IMAGES);
        nothing_is_left(cluster);
        wait("no image is left", || {
            let left = cluster.ceph().rbd(&["ls", POOL]).unwrap();
            left.is_empty().then_some(())
        });
    });
}

#[test]
fn the_data_of_an_image_outlives_its_pod_and_nothing_outlives_the_claim() {
    with_images(data_outlives_its_pod);
}

#[test]
fn a_pod_has_a_group_a_part_of_an_image_and_a_raw_device_and_another_one_reads_them() {
    with_images(groups_parts_and_devices);
}

#[test]
fn two_pods_of_a_node_share_an_image_and_an_ephemeral_one_ends_with_its_pod() {
    with_images(shared_and_ephemeral);
}

#[test]
fn images_grow_while_a_pod_uses_them() {
    with_images(grow);
}

#[test]
fn an_image_is_copied_grown_limited_and_removed_while_a_pod_uses_it() {
    with_images(|cluster, class| {
        // Stored only: the daemon that csi-resizer calls can be on the other node.
        life::of_a_volume(cluster, class, |handle| {
            let (_, image) = handle.rsplit_once('/').unwrap();
            let path = format!("{POOL}/{image}");
            let labels = cluster.ceph().rbd(&["image-meta", "list", &path]).unwrap();
            let labels = String::from_utf8(labels).unwrap();
            labels.lines().any(|line| line.contains("iops") && line.contains("500"))
        });
    });
}
