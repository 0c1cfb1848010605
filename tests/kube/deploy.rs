//! The objects in `deploy/` on a real API server.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use cleat_node::config::{Config, Listen};
use k8s_openapi::ByteString;
use serde_json::{Value, json};

use crate::cluster::objects::apply;
use crate::fixture::{World, run};

const BASE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/base");

/// The kinds in `deploy/` that are not in a namespace.
const CLUSTER_KINDS: [&str; 10] = [
    "Namespace",
    "CustomResourceDefinition",
    "CSIDriver",
    "StorageClass",
    "VolumeSnapshotClass",
    "VolumeAttributesClass",
    "ClusterRole",
    "ClusterRoleBinding",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
];

/// The kustomizations that a user can apply.
pub(crate) const DIRECTORIES: [&str; 6] = [
    "base",
    "overlays/rbd",
    "overlays/object",
    "overlays/remediation",
    "overlays/monitoring",
    "overlays/all",
];

/// The kinds that make pods.
const POD_KINDS: [&str; 2] = ["DaemonSet", "Deployment"];

/// Returns the YAML documents of a file.
pub(crate) fn documents(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    serde_saphyr::from_multiple(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the path of helm or kustomize.
pub(crate) fn tool(name: &str) -> PathBuf {
    test_kit::go::deploy_tools().join(name)
}

/// Returns the objects of a kustomization in `deploy/`, as `kubectl kustomize` prints them.
pub(crate) fn build(directory: &str) -> Vec<Value> {
    build_at(&Path::new(BASE).parent().unwrap().join(directory))
}

/// Returns the objects of a kustomization of a user, which is in a directory beside the base.
pub(crate) fn build_own(kustomization: &Value) -> Vec<Value> {
    let home = tempfile::tempdir().unwrap();
    let deploy = Path::new(BASE).parent().unwrap();
    let copied = Command::new("cp").arg("-r").arg(deploy).arg(home.path()).status().unwrap();
    assert!(copied.success());
    let own = home.path().join("deploy/own");
    std::fs::create_dir(&own).unwrap();
    std::fs::write(own.join("kustomization.yaml"), kustomization.to_string()).unwrap();
    build_at(&own)
}

fn build_at(path: &Path) -> Vec<Value> {
    let output = Command::new(tool("kustomize")).arg("build").arg(path).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let objects: Vec<Value> =
        serde_saphyr::from_multiple(str::from_utf8(&output.stdout).unwrap()).unwrap();
    for object in &objects {
        let is_of_cluster = CLUSTER_KINDS.contains(&object["kind"].as_str().unwrap());
        assert_eq!(object["metadata"]["namespace"].is_null(), is_of_cluster, "{object}");
    }
    objects
}

/// Returns the objects of `deploy/base`.
pub(crate) fn objects() -> Vec<Value> {
    build("base")
}

#[test]
fn the_api_server_accepts_every_object_and_an_unchanged_one_is_not_written_again() {
    run(async |world: World| {
        let objects = objects();
        for kind in
            ["Namespace", "CSIDriver", "StorageClass", "DaemonSet", "Deployment", "ConfigMap"]
        {
            assert!(objects.iter().any(|object| object["kind"] == kind), "no {kind}");
        }
        let mut versions = Vec::new();
        for object in &objects {
            let applied = apply(&world.client, object).await;
            let applied = applied.unwrap_or_else(|error| panic!("{object}: {error}"));
            versions.push(applied.metadata.resource_version);
        }
        for (object, version) in objects.iter().zip(versions) {
            let again = apply(&world.client, object).await.unwrap();
            assert_eq!(again.metadata.resource_version, version, "{object}");
        }
        // The comparison is strict.
        let mut wrong = objects.into_iter().find(|object| object["kind"] == "CSIDriver").unwrap();
        wrong["spec"]["attachIsRequired"] = json!(true);
        let refused = apply(&world.client, &wrong).await.unwrap_err();
        assert!(refused.to_string().contains("attachIsRequired"), "{refused}");
    });
}

#[test]
fn each_object_exists_once_and_so_does_each_name_that_one_refers_to() {
    for directory in DIRECTORIES {
        check_references(&build(directory));
    }
}

/// Checks that each object exists once, and so does each name that one refers to.
pub(crate) fn check_references(objects: &[Value]) {
    let mut known = BTreeSet::new();
    for object in objects {
        let metadata = &object["metadata"];
        let names = [&object["kind"], &metadata["namespace"], &metadata["name"]];
        assert!(known.insert(names.map(Value::to_string)), "there are two of {names:?}");
    }
    let exists = |kind: &str, name: &Value| {
        let found = |object: &&Value| object["kind"] == kind && &object["metadata"]["name"] == name;
        assert!(objects.iter().any(|object| found(&object)), "no {kind} {name}");
    };
    let of_kind = |kind: &'static str| objects.iter().filter(move |object| object["kind"] == kind);
    for set in POD_KINDS.into_iter().flat_map(of_kind) {
        let pod = &set["spec"]["template"]["spec"];
        exists("ServiceAccount", &pod["serviceAccountName"]);
        let volumes = pod["volumes"].as_array().unwrap();
        for volume in volumes.iter().filter(|volume| volume["configMap"].is_object()) {
            exists("ConfigMap", &volume["configMap"]["name"]);
        }
        let lists = ["containers", "initContainers"].iter().filter_map(|list| pod[list].as_array());
        for container in lists.flatten() {
            for mount in container["volumeMounts"].as_array().unwrap() {
                let known = volumes.iter().any(|volume| volume["name"] == mount["name"]);
                assert!(known, "no volume {}", mount["name"]);
            }
        }
    }
    for kind in ["RoleBinding", "ClusterRoleBinding"] {
        for binding in of_kind(kind) {
            exists(binding["roleRef"]["kind"].as_str().unwrap(), &binding["roleRef"]["name"]);
            for subject in binding["subjects"].as_array().unwrap() {
                exists(subject["kind"].as_str().unwrap(), &subject["name"]);
                assert_eq!(subject["namespace"], "cleat-system");
            }
        }
    }
    for bound in of_kind("ValidatingAdmissionPolicyBinding") {
        exists("ValidatingAdmissionPolicy", &bound["spec"]["policyName"]);
    }
    let driver = of_kind("CSIDriver").next().unwrap();
    for (kind, field) in [
        ("StorageClass", "provisioner"),
        ("VolumeSnapshotClass", "driver"),
        ("VolumeAttributesClass", "driverName"),
    ] {
        for class in of_kind(kind) {
            assert_eq!(class[field], driver["metadata"]["name"]);
        }
    }
    for kind in ["NetworkPolicy", "PodMonitor"] {
        for object in of_kind(kind) {
            check_ports(object, objects);
        }
    }
}

/// Checks that a NetworkPolicy or a PodMonitor selects pods that have the ports it names.
fn check_ports(object: &Value, objects: &[Value]) {
    let spec = &object["spec"];
    let selector = ["podSelector", "selector"].map(|name| &spec[name]["matchLabels"]);
    let labels = selector.into_iter().find(|labels| labels.is_object()).unwrap();
    let is_selected = |set: &&Value| {
        let known = &set["spec"]["template"]["metadata"]["labels"];
        labels.as_object().unwrap().iter().all(|(name, value)| &known[name] == value)
    };
    let sets =
        objects.iter().filter(|object| POD_KINDS.contains(&object["kind"].as_str().unwrap()));
    let selected: Vec<&Value> = sets.filter(is_selected).collect();
    assert!(!selected.is_empty(), "no pods for {object}");
    let ports = spec["podMetricsEndpoints"].as_array().into_iter().flatten();
    let ingress = spec["ingress"].as_array().into_iter().flatten();
    let ports = ports.chain(ingress.flat_map(|rule| rule["ports"].as_array().unwrap()));
    for name in ports.map(|port| &port["port"]) {
        let has = |set: &&Value| {
            let containers = set["spec"]["template"]["spec"]["containers"].as_array().unwrap();
            let mut ports =
                containers.iter().flat_map(|c| c["ports"].as_array().into_iter().flatten());
            ports.any(|port| &port["name"] == name)
        };
        assert!(selected.iter().all(has), "no port {name} for {object}");
    }
}

/// The driver, its socket and its metrics are named in the configuration and in the pod.
#[test]
fn the_configuration_is_valid_and_fits_the_pod() {
    let path = Path::new(BASE).join("cleat.toml");
    let config = Config::load(Some(&path)).unwrap();
    let objects = objects();
    let find = |kind: &str| objects.iter().find(|object| object["kind"] == kind).unwrap();
    assert_eq!(find("CSIDriver")["metadata"]["name"], config.csi.driver.as_str());
    let pod = &daemon(&objects)["spec"]["template"]["spec"];
    let text = pod.to_string();
    let socket = config.csi.socket();
    let is_meant = |object: &&Value| object["metadata"]["name"] == "cleat-files";
    let sidecars = objects.iter().filter(|object| object["kind"] == "DaemonSet").find(is_meant);
    let sidecars = sidecars.unwrap().to_string();
    assert!(sidecars.contains(&format!("{:?}", socket.parent().unwrap())), "{sidecars}");
    // The daemon sees the directory of kubelet, and the socket is in it.
    assert!(socket.starts_with(&config.csi.kubelet_dir));
    assert!(text.contains(&format!("{:?}", config.csi.kubelet_dir)), "{text}");
    for probe in ["livenessProbe", "readinessProbe"] {
        let probe = &pod["containers"][0][probe]["httpGet"];
        let address = format!("{}:{}", probe["host"].as_str().unwrap(), probe["port"]);
        assert_eq!(config.metrics.listen, Listen::Tcp(address.parse().unwrap()));
        assert_eq!(probe["path"], "/healthz");
    }
    let directory = find("StorageClass")["parameters"]["directory"].as_str().unwrap();
    let path = config.csi.directories[directory].to_str().unwrap();
    assert!(text.contains(&format!("{path:?}")), "the pod makes {path}");
}

/// Returns the DaemonSet of the daemon.
pub(crate) fn daemon(objects: &[Value]) -> &Value {
    let is_meant = |object: &&Value| {
        object["kind"] == "DaemonSet" && object["metadata"]["name"] == "cleat-node"
    };
    objects.iter().find(is_meant).unwrap()
}

/// Returns the pod of the controller.
pub(crate) fn controller(objects: &[Value]) -> Value {
    let is_meant = |object: &&Value| {
        object["kind"] == "Deployment" && object["metadata"]["name"] == "cleat-controller"
    };
    let deployment = objects.iter().find(is_meant).unwrap();
    assert_eq!(deployment["spec"]["replicas"], 2);
    deployment["spec"]["template"]["spec"].clone()
}

/// A node that maps with grants only needs a controller that attaches. Both need the clusters, each with clients of its own.
#[test]
fn the_nodes_use_grants_and_the_controller_gives_them() {
    let objects = objects();
    let config = Config::load(Some(&Path::new(BASE).join("cleat.toml"))).unwrap();
    let driver = objects.iter().find(|object| object["kind"] == "CSIDriver").unwrap();
    assert!(config.csi.grants);
    assert_eq!(driver["spec"]["attachRequired"], true);
    let pod = controller(&objects);
    assert_eq!(pod["serviceAccountName"], cleat_kube::rights::CONTROLLER_ACCOUNT);
    let node = &daemon(&objects)["spec"]["template"]["spec"];
    assert_eq!(node["serviceAccountName"], cleat_kube::rights::NODE_ACCOUNT);
    // Both read a file of clusters of this name, each from its Secret.
    let arguments = pod["containers"][0]["args"].as_array().unwrap();
    let clusters = arguments.iter().position(|argument| argument == "--clusters").unwrap();
    assert_eq!(arguments[clusters + 1], config.csi.clusters.to_str().unwrap());
    let directory = config.csi.clusters.parent().unwrap().to_str().unwrap();
    for (pod, secret) in [(&pod, "cleat-ceph-controller"), (node, "cleat-ceph")] {
        let mounts = pod["containers"][0]["volumeMounts"].as_array().unwrap();
        let mount = mounts.iter().find(|mount| mount["mountPath"] == directory).unwrap();
        let volumes = pod["volumes"].as_array().unwrap();
        let volume = volumes.iter().find(|volume| volume["name"] == mount["name"]).unwrap();
        assert_eq!(volume["secret"]["secretName"], secret);
    }
}

/// A sidecar without the daemon on its node would wait for ever. Of the workloads, only DaemonSets with the same nodes may
/// mount the socket without a rule for that.
#[test]
fn the_sidecars_run_beside_a_daemon() {
    let objects = build("overlays/all");
    let daemon = &daemon(&objects)["spec"]["template"];
    let mounts_socket = |pod: &Value| {
        let volumes = pod["volumes"].as_array().unwrap();
        volumes.iter().any(|volume| {
            let path = volume["hostPath"]["path"].as_str().unwrap_or_default();
            path.ends_with("/plugins/cleat.csi.storage")
        })
    };
    let mut checked = BTreeSet::new();
    for set in &objects {
        let pod = &set["spec"]["template"]["spec"];
        if !pod.is_object() || !mounts_socket(pod) {
            continue;
        }
        checked.insert(set["metadata"]["name"].as_str().unwrap());
        if set["kind"] == "DaemonSet" {
            for field in ["nodeSelector", "tolerations"] {
                assert_eq!(pod[field], daemon["spec"][field], "{field}");
            }
            continue;
        }
        let required = "requiredDuringSchedulingIgnoredDuringExecution";
        let rules = pod["affinity"]["podAffinity"][required].as_array().unwrap();
        assert_eq!(rules[0]["topologyKey"], "kubernetes.io/hostname");
        assert_eq!(rules[0]["labelSelector"]["matchLabels"], daemon["metadata"]["labels"]);
    }
    assert_eq!(checked, BTreeSet::from(["cleat-files", "cleat-images"]));
}

/// Returns the files of a Secret, whose name has a suffix.
fn secret(objects: &[Value], name: &str) -> BTreeMap<String, Vec<u8>> {
    let is_meant = |object: &&Value| {
        let known = object["metadata"]["name"].as_str().unwrap();
        object["kind"] == "Secret" && known.rsplit_once('-').unwrap().0 == name
    };
    let secret = objects.iter().find(is_meant).unwrap();
    let data: BTreeMap<String, String> = serde_json::from_value(secret["data"].clone()).unwrap();
    let decode = |(name, text): (String, String)| {
        // kustomize breaks the lines.
        let content: ByteString = serde_json::from_value(text.replace('\n', "").into()).unwrap();
        (name, content.0)
    };
    data.into_iter().map(decode).collect()
}

/// The classes name clusters of the Secrets, whose files are in the Secrets, too. A node and the controller have no Ceph
/// client in common.
#[test]
fn the_clusters_of_the_classes_are_in_the_secrets_with_their_files() {
    for directory in ["overlays/rbd", "overlays/object", "overlays/all"] {
        let objects = build(directory);
        let [of_nodes, of_controller] = ["cleat-ceph", "cleat-ceph-controller"]
            .map(|name| check_clusters(&objects, &secret(&objects, name)));
        assert!(of_nodes.is_disjoint(&of_controller), "{directory}: {of_nodes:?}");
        assert_eq!(of_nodes.is_empty(), directory == "overlays/object");
    }
}

/// Checks that a Secret has the clusters of the classes and the files that they name, and returns its Ceph clients.
fn check_clusters(objects: &[Value], files: &BTreeMap<String, Vec<u8>>) -> BTreeSet<String> {
    let clusters: Vec<Value> = serde_json::from_slice(&files["clusters.json"]).unwrap();
    let classes = objects.iter().filter(|object| object["kind"] == "StorageClass");
    let named = classes.filter_map(|class| class["parameters"]["clusterID"].as_str());
    let named: BTreeSet<&str> = named.collect();
    let known = clusters.iter().map(|cluster| cluster["clusterID"].as_str().unwrap());
    let known: BTreeSet<&str> = known.collect();
    assert_eq!(named, known);
    let mut used = BTreeSet::from(["clusters.json"]);
    let mut clients = BTreeSet::new();
    for cluster in &clusters {
        let path = if let Some(store) = cluster["store"].as_str() {
            test_kit::backends::REGISTRY.store(store).unwrap();
            store.split_once("credentials_file=").map(|(_, path)| path)
        } else {
            let client = cluster["userID"].as_str().unwrap();
            let path = cluster["keyring"].as_str().unwrap();
            let name = path.strip_prefix("/etc/ceph/").unwrap();
            let keyring = str::from_utf8(&files[name]).unwrap();
            assert!(keyring.contains(&format!("[client.{client}]")), "{client}: {keyring}");
            clients.insert(client.to_owned());
            Some(path)
        };
        used.insert(path.unwrap().strip_prefix("/etc/ceph/").unwrap());
    }
    assert!(files.keys().eq(&used), "{:?} and {used:?}", files.keys());
    clients
}

#[test]
fn the_controller_starts_with_its_arguments() {
    check_arguments(&controller(&objects()));
}

/// Checks that the program accepts the arguments, and that the probes ask the address that it serves.
pub(crate) fn check_arguments(pod: &Value) {
    let container = &pod["containers"][0];
    let arguments = container["args"].as_array().unwrap();
    let arguments: Vec<&str> = arguments.iter().map(|text| text.as_str().unwrap()).collect();
    let mut command = Command::new(test_kit::binary::cleat());
    let output = command.args(&arguments).arg("--print-crd").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let port = &container["ports"][0];
    let listen = arguments.iter().position(|argument| *argument == "--listen").unwrap();
    assert_eq!(arguments[listen + 1], format!("[::]:{}", port["containerPort"]));
    for (probe, path) in [("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")] {
        let probe = &container[probe]["httpGet"];
        assert_eq!((&probe["port"], probe["path"].as_str().unwrap()), (&port["name"], path));
    }
}
