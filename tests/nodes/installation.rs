//! What is installed on the clusters, as users do it: a kustomization with `deploy/`.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use test_kit::ceph;
use test_kit::control_plane::HOST_OF_MACHINES;

use crate::programs::{output, project};

/// The image of csi-snapshotter, which the base does not have.
const SNAPSHOTTER: &str = "registry.k8s.io/sig-storage/csi-snapshotter:v8.7.0";

/// The pool in `deploy/components/rbd`.
pub(crate) const POOL: &str = "kubernetes";

/// The Ceph client of the nodes in `deploy/components/rbd`.
const NODE_CLIENT: &str = "csi";

/// The Ceph client of the controller in `deploy/components/rbd`.
const CONTROLLER_CLIENT: &str = "csi-controller";

/// The image of csi-attacher, which nothing in `deploy/` has.
const ATTACHER: &str = "registry.k8s.io/sig-storage/csi-attacher:v4.13.0";

/// Returns the images of the sidecars in the manifests and in the tests, with the name of each sidecar.
pub(crate) fn sidecars(with_attacher: bool) -> Vec<(String, String)> {
    let mut images = Vec::new();
    images.extend(with_attacher.then(|| (ATTACHER.to_owned(), "csi-attacher".to_owned())));
    for file in ["base/files.yaml", "components/images/images.yaml"] {
        let text = std::fs::read_to_string(project("deploy").join(file)).unwrap();
        let documents: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
        let containers = documents[0]["spec"]["template"]["spec"]["containers"].as_array().unwrap();
        for container in containers {
            let [image, name] = ["image", "name"].map(|key| container[key].as_str().unwrap());
            let known = (image.to_owned(), name.to_owned());
            if !images.contains(&known) {
                images.push(known);
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

/// Starts a Ceph cluster that the nodes reach, with a pool and the clients for the volumes.
pub(crate) fn start_ceph() -> ceph::Cluster {
    let cluster = ceph::Cluster::start_at(HOST_OF_MACHINES);
    cluster.make_pool(POOL);
    let osd = format!("profile rbd pool={POOL}");
    // Only the controller may end the fence of a node.
    let unfence = "profile rbd, allow command \"osd blocklist\" with blocklistop=rm";
    for (client, mon) in [(NODE_CLIENT, "profile rbd"), (CONTROLLER_CLIENT, unfence)] {
        let client = format!("client.{client}");
        cluster.ceph(&["auth", "get-or-create", &client, "mon", mon, "osd", &osd]);
    }
    cluster
}

/// Makes a kustomization with RBD images on this Ceph cluster, and returns its path. It has node remediation, or csi-attacher
/// in the place of cleat's attacher (`is_stock`). It is in a copy of `deploy/`, because the example of a Ceph cluster is
/// replaced there.
pub(crate) fn with_images(directory: &Path, ceph: &ceph::Cluster, is_stock: bool) -> PathBuf {
    output(Command::new("cp").arg("-r").arg(project("deploy")).arg(directory));
    let rbd = directory.join("deploy/components/rbd");
    let conf = std::fs::read_to_string(ceph.conf()).unwrap();
    let monitors = conf.lines().find_map(|line| line.strip_prefix("mon host = ")).unwrap();
    for (client, directory) in
        [(NODE_CLIENT, rbd.clone()), (CONTROLLER_CLIENT, rbd.join("controller"))]
    {
        let name = format!("ceph.client.{client}.keyring");
        let clusters = json!([{
            "clusterID": "ceph",
            "monitors": [monitors],
            "userID": client,
            "keyring": format!("/etc/ceph/{name}"),
            "pools": [POOL],
        }]);
        std::fs::write(directory.join("clusters.json"), clusters.to_string()).unwrap();
        let keyring = ceph.ceph(&["auth", "get", &format!("client.{client}")]);
        std::fs::write(directory.join(name), keyring).unwrap();
    }
    let own = directory.join("deploy/own");
    std::fs::create_dir_all(&own).unwrap();
    let mut kustomization = json!({
        "resources": ["../base"],
        "components": ["../components/rbd", "../components/volume-attributes"],
        // Idle sidecars take a part of an emulated processor each.
        "replicas": [{ "name": "cleat-images", "count": 1 }],
    });
    if is_stock {
        std::fs::write(own.join("rights.yaml"), rights_of_attacher().to_string()).unwrap();
        kustomization["resources"] = json!(["../base", "rights.yaml"]);
        kustomization["patches"] = json!([attacher()]);
    } else {
        kustomization["components"]
            .as_array_mut()
            .unwrap()
            .push("../components/remediation".into());
    }
    std::fs::write(own.join("kustomization.yaml"), kustomization.to_string()).unwrap();
    own
}

/// Makes a kustomization with the component `images` and with csi-snapshotter on each node, and returns its path. The
/// rights of csi-snapshotter are those of the component.
pub(crate) fn with_snapshots(directory: &Path) -> PathBuf {
    output(Command::new("cp").arg("-r").arg(project("deploy")).arg(directory));
    let own = directory.join("deploy/snapshots");
    std::fs::create_dir_all(&own).unwrap();
    let container = json!({
        "name": "csi-snapshotter", "image": SNAPSHOTTER,
        "args": ["--csi-address=/csi/csi.sock", "--node-deployment"],
        "env": [{ "name": "NODE_NAME", "valueFrom": { "fieldRef": { "fieldPath": "spec.nodeName" } } }],
        "securityContext": { "runAsUser": 0 },
        "volumeMounts": [{ "name": "socket", "mountPath": "/csi" }],
    });
    let subject =
        json!({ "kind": "ServiceAccount", "name": "cleat-files", "namespace": "cleat-system" });
    let add = |kind: &str, name: &str, path: &str, value: Value| {
        let change = json!([{ "op": "add", "path": path, "value": value }]);
        json!({ "target": { "kind": kind, "name": name }, "patch": change.to_string() })
    };
    let kustomization = json!({
        "resources": ["../base"],
        "components": ["../components/images", "../components/volume-attributes"],
        "patches": [
            add("DaemonSet", "cleat-files", "/spec/template/spec/containers/-", container),
            add("ClusterRoleBinding", "cleat-snapshotter", "/subjects/-", subject),
        ],
    });
    std::fs::write(own.join("kustomization.yaml"), kustomization.to_string()).unwrap();
    own
}

/// Returns the patch that adds csi-attacher to the pods of the controller, with its default settings.
fn attacher() -> Value {
    let mount = json!({ "name": "csi", "mountPath": "/csi" });
    let container = json!({
        "name": "csi-attacher", "image": ATTACHER,
        "args": ["--csi-address=/csi/csi.sock"], "volumeMounts": [mount],
    });
    let add = |place: &str, value: Value| json!({ "op": "add", "path": format!("/spec/template/spec/{place}/-"), "value": value });
    let changes = json!([
        add("containers/0/args", "--csi-socket=/csi/csi.sock".into()),
        add("containers/0/volumeMounts", mount),
        add("containers", container),
        add("volumes", json!({ "name": "csi", "emptyDir": {} })),
    ]);
    json!({
        "target": { "kind": "Deployment", "name": "cleat-controller" }, "patch": changes.to_string(),
    })
}

fn rights_of_attacher() -> Value {
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
        "metadata": { "name": "csi-attacher" },
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin" },
        "subjects": [{
            "kind": "ServiceAccount", "name": "cleat-controller", "namespace": "cleat-system",
        }],
    })
}
