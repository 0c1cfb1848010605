//! A cluster of one node, on which `deploy/base` is installed as its users do it.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use test_kit::control_plane::{ControlPlane, MACHINES, NAMESPACE, Purpose};

use crate::machine::Machine;
use crate::programs::{BUSYBOX, kubectl, project};

/// The limit for what Kubernetes does: the machine is emulated, and backoffs take up to two minutes.
const LIMIT: Duration = Duration::from_secs(300);

/// The namespace of the users.
const USER: &str = "default";

pub(crate) const CLAIM: &str = "persistentvolumeclaim";
pub(crate) const POD: &str = "pod";

/// The image of csi-resizer, which the base does not have.
pub(crate) const RESIZER: &str = "registry.k8s.io/sig-storage/csi-resizer:v2.3.0";

/// The cluster that the tests share.
pub(crate) struct Cluster {
    plane: ControlPlane,
    machine: Machine,
}

/// Runs a test on the cluster, which the first test starts. One test runs at a time, because some restart parts of the
/// node. A test that fails shows the logs of the node.
pub(crate) fn run(test: impl FnOnce(&Cluster)) {
    static SHARED: OnceLock<Option<Cluster>> = OnceLock::new();
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    // The second test does not try again: each try takes minutes.
    let start = || std::panic::catch_unwind(Cluster::start).ok();
    let cluster = SHARED.get_or_init(start).as_ref().expect("the cluster has started");
    let began = Instant::now();
    let _logs = Logs(cluster);
    test(cluster);
    println!("figures: {:.0} s on the cluster", began.elapsed().as_secs_f64());
}

/// Shows the state of the cluster if the test fails.
struct Logs<'a>(&'a Cluster);

impl Drop for Logs<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        for arguments in [
            &["get", "pod,pvc,pv,volumeattachment,csinode", "-A", "-o", "wide"][..],
            &["get", "events", "-A", "--sort-by=.lastTimestamp"],
        ] {
            println!("{}", self.0.try_kubectl(arguments, "").1);
        }
        for command in [
            "tail -n 30 /out/kubelet.log",
            "tail -n 10 /out/containerd.log",
            "tail -n 40 /var/log/pods/cleat-system_*/*/*.log",
            "dmesg | tail -n 20",
        ] {
            println!("{command}: {}", self.0.machine.try_run(command).1);
        }
    }
}

impl Cluster {
    /// Starts a control plane and a node, installs cleat, and waits until its pods are ready.
    fn start() -> Self {
        let began = Instant::now();
        let figure = |what: &str| {
            println!("figures: {what} after {:.0} s", began.elapsed().as_secs_f64());
        };
        let mut plane = ControlPlane::start("machines", Purpose::Machines, "", &[], is_ready);
        plane.start_managers(Purpose::Machines);
        let machine = Machine::start(&plane, MACHINES[0], &sidecars());
        figure("kubelet is started");
        let cluster = Self { plane, machine };
        let logs = Logs(&cluster);
        cluster.kubectl(&["apply", "-k", "deploy/base"]);
        cluster.until("node", MACHINES[0], "is Ready", |node| is_true(node, "Ready"));
        figure("the node is Ready");
        for workload in ["daemonset/cleat-node", "deployment/cleat-controller"] {
            cluster.rolled_out(workload);
        }
        figure("the pods of cleat are ready");
        drop(logs);
        cluster
    }

    /// Runs a command of bash on the node, and returns its output. The command must succeed.
    pub(crate) fn on_node(&self, command: &str) -> String {
        self.machine.run(command)
    }

    /// Runs a command of bash on the node, and returns its exit status and its output.
    pub(crate) fn try_on_node(&self, command: &str) -> (i64, String) {
        self.machine.try_run(command)
    }

    /// Runs kubectl as an administrator, and returns its output.
    pub(crate) fn kubectl(&self, arguments: &[&str]) -> String {
        let (is_success, output) = self.try_kubectl(arguments, "");
        assert!(is_success, "kubectl {arguments:?}: {output}");
        output
    }

    fn try_kubectl(&self, arguments: &[&str], input: &str) -> (bool, String) {
        let mut command = Command::new(kubectl());
        command.current_dir(project(""));
        command.arg("--kubeconfig").arg(self.plane.kubeconfig()).args(arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        let text = [output.stdout, output.stderr].map(|part| String::from_utf8(part).unwrap());
        (output.status.success(), text.concat())
    }

    /// Creates an object, or changes it.
    pub(crate) fn apply(&self, object: &Value) {
        let arguments = ["apply", "--namespace", USER, "-f", "-"];
        let (is_success, output) = self.try_kubectl(&arguments, &object.to_string());
        assert!(is_success, "{object}: {output}");
    }

    /// Returns an object of the users, or one that is not in a namespace.
    pub(crate) fn get(&self, kind: &str, name: &str) -> Option<Value> {
        let arguments =
            ["get", kind, name, "--namespace", USER, "-o", "json", "--ignore-not-found"];
        let text = self.kubectl(&arguments);
        (!text.is_empty()).then(|| serde_json::from_str(&text).unwrap())
    }

    /// Returns the objects of a kind, of all namespaces.
    pub(crate) fn list(&self, kind: &str) -> Vec<Value> {
        let text = self.kubectl(&["get", kind, "--all-namespaces", "-o", "json"]);
        let mut list: Value = serde_json::from_str(&text).unwrap();
        serde_json::from_value(list["items"].take()).unwrap()
    }

    /// Deletes an object of the users, and waits until it does not exist.
    pub(crate) fn delete(&self, kind: &str, name: &str) {
        let limit = format!("--timeout={}s", LIMIT.as_secs());
        self.kubectl(&["delete", kind, name, "--namespace", USER, &limit]);
    }

    /// Waits until an object exists for which `condition` is true, and returns it.
    pub(crate) fn until(
        &self,
        kind: &str,
        name: &str,
        what: &str,
        condition: impl Fn(&Value) -> bool,
    ) -> Value {
        let found = || self.get(kind, name).filter(|object| condition(object));
        wait(&format!("{kind} {name} {what}"), found)
    }

    /// Waits until a workload of cleat has its pods, of its current version.
    pub(crate) fn rolled_out(&self, workload: &str) {
        let limit = format!("--timeout={}s", LIMIT.as_secs());
        self.kubectl(&["rollout", "status", workload, "--namespace", NAMESPACE, &limit]);
    }

    /// Creates a pod, and waits until it runs.
    pub(crate) fn start_pod(&self, pod: &Value) {
        self.apply(pod);
        let name = pod["metadata"]["name"].as_str().unwrap();
        self.until(POD, name, "runs", |pod| is_true(pod, "Ready"));
    }

    /// Runs a command of the shell in the container of a pod, and returns its output. The command must succeed.
    pub(crate) fn exec(&self, pod: &str, command: &str) -> String {
        let (status, output) = self.try_exec(pod, command);
        assert_eq!(status, 0, "{command} in {pod}: {output}");
        output
    }

    /// Runs a command of the shell in the container of a pod, and returns its exit status and its output.
    pub(crate) fn try_exec(&self, pod: &str, command: &str) -> (i64, String) {
        let found = self.get(POD, pod).unwrap_or_else(|| panic!("no pod {pod}"));
        let id = found["status"]["containerStatuses"][0]["containerID"].as_str().unwrap();
        let id = id.strip_prefix("containerd://").unwrap();
        let exec =
            format!("/payload/bin/ctr -n k8s.io tasks exec --exec-id test-$RANDOM {id} sh -c");
        self.machine.try_run(&format!("{exec} '{command}'"))
    }
}

/// Returns whether the API server is ready.
fn is_ready(kubeconfig: &Path) -> bool {
    let mut command = Command::new(kubectl());
    command.arg("--kubeconfig").arg(kubeconfig).args(["get", "--raw", "/readyz"]);
    command.output().unwrap().status.success()
}

/// Waits until `condition` returns a value.
pub(crate) fn wait<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < deadline, "timed out: {what}");
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// Returns whether a condition in the status of an object is true.
pub(crate) fn is_true(object: &Value, kind: &str) -> bool {
    let conditions = object["status"]["conditions"].as_array();
    conditions.is_some_and(|all| {
        all.iter().any(|condition| condition["type"] == kind && condition["status"] == "True")
    })
}

/// A claim of a volume on the node of the pod.
pub(crate) fn claim(name: &str, mode: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": { "name": name },
        "spec": {
            "storageClassName": "cleat-local",
            "accessModes": ["ReadWriteOnce"],
            "volumeMode": mode,
            "resources": { "requests": { "storage": "64Mi" } },
        },
    })
}

/// A pod that waits, with the volume `v` of a claim at `/v`.
pub(crate) fn pod(name: &str, claim: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": name },
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "main", "image": BUSYBOX, "command": ["sleep", "2147483647"],
                "volumeMounts": [{ "name": "v", "mountPath": "/v" }],
            }],
            "volumes": [{ "name": "v", "persistentVolumeClaim": { "claimName": claim } }],
        },
    })
}

/// Returns the images of the sidecars in the manifests and in the tests, with the name of each sidecar.
fn sidecars() -> Vec<(String, &'static str)> {
    let node = std::fs::read_to_string(project("deploy/base/node.yaml")).unwrap();
    let node: Value = serde_saphyr::from_str(&node).unwrap();
    let containers = node["spec"]["template"]["spec"]["containers"].as_array().unwrap();
    let image = |name: &'static str| {
        let container = containers.iter().find(|container| container["name"] == name);
        let image = container.and_then(|found| found["image"].as_str());
        (image.unwrap_or_else(|| panic!("no image of {name}")).to_owned(), name)
    };
    vec![image("csi-provisioner"), (RESIZER.to_owned(), "csi-resizer")]
}
