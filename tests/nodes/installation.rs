//! What is installed on the clusters, as users do it: a kustomization with `deploy/`.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use test_kit::ceph;
use test_kit::control_plane::HOST_OF_MACHINES;

use crate::programs::{output, project};

/// The image of csi-resizer, which the base does not have.
pub(crate) const RESIZER: &str = "registry.k8s.io/sig-storage/csi-resizer:v2.3.0";

/// The image of csi-snapshotter, which the base does not have.
pub(crate) const SNAPSHOTTER: &str = "registry.k8s.io/sig-storage/csi-snapshotter:v8.7.0";

/// The pool in `deploy/components/rbd`.
pub(crate) const POOL: &str = "kubernetes";

/// Returns the images of the sidecars in the manifests and in the tests, with the name of each sidecar.
pub(crate) fn sidecars() -> Vec<(String, String)> {
    let mut images = vec![(RESIZER.to_owned(), "csi-resizer".to_owned())];
    for file in ["base/node.yaml", "components/images/images.yaml"] {
        let text = std::fs::read_to_string(project("deploy").join(file)).unwrap();
        let documents: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
        let containers = documents[0]["spec"]["template"]["spec"]["containers"].as_array().unwrap();
        for container in containers {
            let [image, name] = ["image", "name"].map(|key| container[key].as_str().unwrap());
            if image.contains('/') && image != RESIZER {
                images.push((image.to_owned(), name.to_owned()));
            }
        }
    }
    images
}

/// Returns the directory with the custom resources of snapshots.
pub(crate) fn snapshot_definitions() -> PathBuf {
    let module = "github.com/kubernetes-csi/external-snapshotter/client/v8";
    test_kit::go::module("tests/kube/control-plane", module).join("config/crd")
}

/// Starts a Ceph cluster that the nodes reach, with a pool and a client for the volumes.
pub(crate) fn start_ceph() -> ceph::Cluster {
    let cluster = ceph::Cluster::start_at(HOST_OF_MACHINES);
    cluster.make_pool(POOL);
    cluster.ceph(&[
        "auth",
        "get-or-create",
        "client.csi",
        "mon",
        "profile rbd, allow command \"osd blocklist\" with blocklistop=rm",
        "osd",
        &format!("profile rbd pool={POOL}"),
    ]);
    cluster
}

/// Makes a kustomization with RBD images on this Ceph cluster and with node remediation, and returns its path. It is in a
/// copy of `deploy/`, because the example of a Ceph cluster is replaced there.
pub(crate) fn with_images_and_remediation(directory: &Path, ceph: &ceph::Cluster) -> PathBuf {
    output(Command::new("cp").arg("-r").arg(project("deploy")).arg(directory));
    let rbd = directory.join("deploy/components/rbd");
    let conf = std::fs::read_to_string(ceph.conf()).unwrap();
    let monitors = conf.lines().find_map(|line| line.strip_prefix("mon host = ")).unwrap();
    let clusters = json!([{
        "clusterID": "ceph",
        "monitors": [monitors],
        "userID": "csi",
        "keyring": "/etc/ceph/ceph.client.csi.keyring",
        "pools": [POOL],
    }]);
    std::fs::write(rbd.join("clusters.json"), clusters.to_string()).unwrap();
    let keyring = ceph.ceph(&["auth", "get", "client.csi"]);
    std::fs::write(rbd.join("ceph.client.csi.keyring"), keyring).unwrap();
    let own = directory.join("deploy/own");
    std::fs::create_dir_all(&own).unwrap();
    let kustomization = json!({
        "resources": ["../base"],
        "components": [
            "../components/rbd", "../components/volume-attributes", "../components/remediation",
        ],
    });
    std::fs::write(own.join("kustomization.yaml"), kustomization.to_string()).unwrap();
    own
}
