//! The chart with RBD images and snapshots of files, installed on the control plane, with a node: each container is a process
//! with the arguments and the rights that the manifests give it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::{Mutex, OwnedMutexGuard};

use super::objects::{NODE, Objects, POD, apply};
use super::pods::{Kubelet, pod};
use super::sidecar::Sidecar;
use crate::chart::{RBD, SECRETS, render};
use crate::control_plane::NAMESPACE;
use crate::deploy::documents;
use crate::fixture::{World, eventually};

/// The name of the driver in the manifests.
pub(crate) const DRIVER: &str = "cleat.csi.storage";

/// A node with cleat, and the controllers of the driver.
pub(crate) struct Installed {
    pub(crate) objects: Objects,
    pub(crate) node: String,
    /// Dropped before the directory: it shows the logs of a test that fails.
    parts: Vec<Sidecar>,
    directory: TempDir,
    /// There is one driver of this name.
    _only: OwnedMutexGuard<()>,
}

impl Installed {
    pub(crate) async fn start(world: &World, name: &str) -> Self {
        static ONLY: std::sync::OnceLock<Arc<Mutex<()>>> = std::sync::OnceLock::new();
        let only = Arc::clone(ONLY.get_or_init(Arc::default)).lock_owned().await;
        let objects = Objects(world.client.clone());
        let more = format!("snapshotter.enabled=true,{SECRETS}");
        let manifests = render(&["--values", RBD, "--set", &more]).unwrap();
        let namespace = json!({
            "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "rook-ceph" },
        });
        apply(&world.client, &namespace).await.unwrap();
        for object in snapshot_definitions().iter().chain(&manifests) {
            apply(&world.client, object).await.unwrap_or_else(|error| panic!("{object}: {error}"));
        }
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("volumes")).unwrap();
        let mut installed =
            Self { objects, node: name.to_owned(), parts: Vec::new(), directory, _only: only };
        installed.start_cleat(world).await;
        installed.register(world).await;
        installed.start_sidecars(world, &manifests).await;
        installed
    }

    /// The directory of the volumes.
    pub(crate) fn volumes(&self) -> PathBuf {
        self.directory.path().join("volumes")
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("csi.sock")
    }

    /// Makes a call of CSI.
    pub(crate) fn call(&self, name: &str, request: &Value) -> Value {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cleat"));
        command.args(["csi", name, &request.to_string()]);
        let endpoint = format!("unix://{}", self.socket().display());
        let output = command.env("CSI_ENDPOINT", endpoint).output().unwrap();
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Starts the daemon with the configuration of the manifests, but with paths of the test, and the controller.
    async fn start_cleat(&mut self, world: &World) {
        let path = |name: &str| self.directory.path().join(name);
        let kubeconfig = world.plane.node_kubeconfig(&self.node).await;
        let csi = format!(
            "[csi]\nenabled = true\ncontroller = true\ngrants = true\nregister = false\nsocket = {:?}\n\
             kubeconfig = {kubeconfig:?}\nclusters = {:?}\ndirectories = {{ default = {:?} }}\n",
            self.socket(),
            crate::rbd::clusters(),
            self.volumes(),
        );
        let text = format!(
            "runtime_dir = {:?}\nstate_dir = {:?}\nmodprobe = false\nnode_name = {:?}\n{csi}",
            path("run"),
            path("state"),
            self.node
        );
        fs::write(path("cleat.toml"), text).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_cleat"));
        command.args(["node", "--log-format", "human", "--config"]).arg(path("cleat.toml"));
        self.run("node", command);
        let mut command = Command::new(env!("CARGO_BIN_EXE_cleat"));
        command.args(["controller", "--log-format", "human", "--clusters"]);
        command.arg(crate::rbd::clusters()).arg("--kubeconfig");
        command.arg(world.plane.controller_kubeconfig());
        self.run("controller", command);
        let socket = self.socket();
        eventually("CSI is served", async || socket.exists().then_some(())).await;
    }

    fn run(&mut self, name: &str, command: Command) {
        self.parts.push(Sidecar::run(name, self.directory.path(), command));
    }

    /// Registers the driver on the node, as kubelet does with the answer of NodeGetInfo.
    async fn register(&self, world: &World) {
        let info = self.call("NodeGetInfo", &json!({}));
        let topology = &info["accessibleTopology"]["segments"];
        let keys: Vec<&String> = topology.as_object().unwrap().keys().collect();
        let node = json!({ "metadata": { "name": self.node, "labels": topology } });
        self.objects.apply(NODE, node).await;
        let driver = json!({
            "name": DRIVER, "nodeID": info["nodeId"], "topologyKeys": keys,
        });
        let csi_node = json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "CSINode",
            "metadata": { "name": self.node }, "spec": { "drivers": [driver] },
        });
        apply(&world.client, &csi_node).await.unwrap();
        Kubelet::of(world, &self.objects, self.node.clone()).await;
    }

    async fn start_sidecars(&mut self, world: &World, manifests: &[Value]) {
        for (kind, workload) in [("DaemonSet", "cleat-files"), ("Deployment", "cleat-images")] {
            let is_meant =
                |object: &&Value| object["kind"] == kind && object["metadata"]["name"] == workload;
            let manifest = manifests.iter().find(is_meant).unwrap();
            let spec = &manifest["spec"]["template"]["spec"];
            let account = spec["serviceAccountName"].as_str().unwrap();
            let pod = format!("{workload}-{}", self.node);
            let kubeconfig = world.plane.pod_kubeconfig(account, &pod, &self.node).await;
            if kind == "DaemonSet" {
                self.own_pod(world, &pod, workload).await;
            }
            for container in spec["containers"].as_array().unwrap() {
                self.start_container(container, &pod, &kubeconfig);
            }
        }
        let more = ["--enable-distributed-snapshotting".to_owned()];
        let admin = world.plane.kubeconfig();
        let directory = self.directory.path();
        let part = Sidecar::start("snapshot-controller", directory, &admin, &more, &[]);
        self.parts.push(part);
    }

    /// Starts the process of a container, with its arguments and its environment.
    fn start_container(&mut self, container: &Value, pod: &str, kubeconfig: &Path) {
        let argument = |argument: &Value| match argument.as_str().unwrap() {
            address if address.starts_with("--csi-address=") => {
                vec![format!("--csi-address={}", self.socket().display())]
            }
            // In a pod, the namespace is in a file.
            "--leader-election" => vec![
                "--leader-election".to_owned(),
                format!("--leader-election-namespace={NAMESPACE}"),
            ],
            other => vec![other.to_owned()],
        };
        let arguments: Vec<String> =
            container["args"].as_array().unwrap().iter().flat_map(argument).collect();
        let variable = |variable: &Value| {
            let field = &variable["valueFrom"]["fieldRef"]["fieldPath"];
            let value = match field.as_str() {
                Some("spec.nodeName") => &*self.node,
                Some("metadata.namespace") => NAMESPACE,
                Some("metadata.name") => pod,
                _ => variable["value"].as_str().unwrap(),
            };
            (variable["name"].as_str().unwrap().to_owned(), value.to_owned())
        };
        let variables: Vec<(String, String)> =
            container["env"].as_array().into_iter().flatten().map(variable).collect();
        let environment: Vec<(&str, &str)> =
            variables.iter().map(|(name, value)| (&**name, &**value)).collect();
        let name = container["name"].as_str().unwrap();
        let directory = self.directory.path();
        let part = Sidecar::start(name, directory, kubeconfig, &arguments, &environment);
        self.parts.push(part);
    }

    /// Makes the pod of the node one of the DaemonSet: objects about the capacity belong to it.
    async fn own_pod(&self, world: &World, name: &str, set: &str) {
        let client = &world.client;
        let sets = kube::Api::<k8s_openapi::api::apps::v1::DaemonSet>::namespaced(
            client.clone(),
            NAMESPACE,
        );
        let found = sets.get(set).await.unwrap();
        let owner = json!({
            "apiVersion": "apps/v1", "kind": "DaemonSet", "name": set,
            "uid": found.metadata.uid, "controller": true,
        });
        let body = json!({ "metadata": { "ownerReferences": [owner] } });
        let pods =
            kube::Api::<k8s_openapi::api::core::v1::Pod>::namespaced(client.clone(), NAMESPACE);
        let parameters = kube::api::PatchParams::default();
        pods.patch(name, &parameters, &kube::api::Patch::Merge(body)).await.unwrap();
    }

    /// Returns what the API server has refused to the sidecars, from their logs.
    pub(crate) fn refused(&self) -> Vec<String> {
        let entries = fs::read_dir(self.directory.path()).unwrap();
        let logs = entries.map(|entry| entry.unwrap().path());
        let logs = logs.filter(|path| path.extension().is_some_and(|name| name == "log"));
        let lines = logs.flat_map(|path| {
            let text = fs::read_to_string(path).unwrap();
            text.lines().map(str::to_owned).collect::<Vec<_>>()
        });
        lines.filter(|line| line.contains("forbidden")).collect()
    }

    /// Creates a pod that kube-scheduler binds to the node: the nodes of other tests do not have the driver.
    pub(crate) async fn pod(&self, name: &str, claim: &str) {
        let mut pod = pod(name, claim, None);
        pod["spec"]["nodeSelector"] = json!({ format!("topology.{DRIVER}/node"): self.node });
        self.objects.apply(POD, pod).await;
    }
}

/// Returns the custom resource definitions of snapshots, from the module of external-snapshotter.
pub(crate) fn snapshot_definitions() -> Vec<Value> {
    let module = "github.com/kubernetes-csi/external-snapshotter/client/v8";
    let directory = test_kit::go::module("tests/kube/control-plane", module).join("config/crd");
    let files = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let documents = files.flat_map(|file| documents(&file));
    documents.filter(|object| object["kind"] == "CustomResourceDefinition").collect()
}
