//! Clusters on which cleat is installed as its users do it.

use std::io::Write;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use test_kit::ceph;
use test_kit::control_plane::{ControlPlane, MACHINES, NAMESPACE, Purpose};

use crate::demo::{say, show_command, show_command_with};
use crate::installation::{
    sidecars, snapshot_definitions, start_ceph, with_images, with_snapshots,
};
use crate::machine::Machine;
use crate::network::Network;
use crate::programs::{BUSYBOX, fill, kubectl, make_disk, output, project};

/// The limit for what Kubernetes does: the machine is emulated, and backoffs take up to two minutes.
const LIMIT: Duration = Duration::from_secs(600);

/// The namespace of the users.
pub(crate) const USER: &str = "default";

pub(crate) const CLAIM: &str = "persistentvolumeclaim";
pub(crate) const POD: &str = "pod";

/// The StorageClass for volumes in a directory of the node.
pub(crate) const FILES: &str = "cleat-local";

/// The clusters of the tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One node with `deploy/base`.
    OneNode,
    /// Two nodes that reach a Ceph cluster, with `deploy/components/rbd` and node remediation.
    TwoNodes,
    /// The same without node remediation, and with csi-attacher in the place of cleat's attacher.
    Stock,
}

/// A cluster of nodes in virtual machines.
pub(crate) struct Cluster {
    kind: Kind,
    machines: Vec<Machine>,
    plane: ControlPlane,
    ceph: Option<ceph::Cluster>,
    network: Network,
}

/// Runs a test on the cluster of one node.
pub(crate) fn run(test: impl FnOnce(&Cluster) + Send) {
    run_on(Kind::OneNode, test);
}

/// Runs a test on a cluster, which the first test starts. One test runs at a time, because some restart parts of the
/// nodes, and one cluster exists at a time. A test that fails shows the logs of the nodes.
pub(crate) fn run_on(kind: Kind, test: impl FnOnce(&Cluster) + Send) {
    static RUNNING: Mutex<Option<(Kind, Option<Cluster>)>> = Mutex::new(None);
    let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
    if running.as_ref().is_none_or(|(other, _)| *other != kind) {
        // The other one ends before this one starts.
        *running = None;
        // The second test does not try again: each try takes minutes.
        let started = std::panic::catch_unwind(|| Cluster::start(kind)).ok();
        *running = Some((kind, started));
    }
    let cluster = running.as_ref().and_then(|(_, started)| started.as_ref());
    let cluster = cluster.expect("the cluster has started");
    let run = || {
        let began = Instant::now();
        let _logs = Logs(cluster);
        test(cluster);
        println!("figures: {:.0} s on the cluster", began.elapsed().as_secs_f64());
    };
    let result = std::panic::catch_unwind(AssertUnwindSafe(|| cluster.network.enter(run)));
    if let Err(panic) = result {
        // The next test gets a cluster without what this one has left.
        *running = None;
        std::panic::resume_unwind(panic);
    }
}

/// Shows the state of the cluster if the test fails.
struct Logs<'a>(&'a Cluster);

impl Drop for Logs<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        for arguments in [
            &["get", "pod,pvc,pv,volumeattachment,csinode,volumegrant", "-A", "-o", "wide"][..],
            &["get", "events", "-A", "--sort-by=.lastTimestamp"],
        ] {
            println!("{}", self.0.try_kubectl(arguments, "").1);
        }
        for machine in &self.0.machines {
            // It may have ended.
            let _ = std::panic::catch_unwind(AssertUnwindSafe(|| show_logs(machine)));
        }
    }
}

fn show_logs(machine: &Machine) {
    machine.thaw();
    for command in [
        "tail -n 30 /out/kubelet.log",
        "tail -n 10 /out/containerd.log",
        "tail -n 40 /var/log/pods/cleat-system_*/*/*.log",
        "dmesg | tail -n 20",
        "tail -n 20 /out/notes/*",
    ] {
        println!("{} {command}: {}", machine.name, machine.try_run(command).1);
    }
}

impl Cluster {
    /// Starts a control plane and nodes, installs cleat, and waits until its pods are ready.
    fn start(kind: Kind) -> Self {
        let began = Instant::now();
        let payload = test_kit::temp::on_disk().join("payload");
        say("the image of cleat and the programs of the nodes are made, if they are not there yet");
        // Builds need the internet, which the network of the cluster does not reach.
        fill(&payload, &sidecars(kind == Kind::Stock));
        let disk = payload.with_file_name("disk");
        make_disk(&payload, &disk);
        let definitions = snapshot_definitions();
        say("the control plane of Kubernetes, the storage and the virtual machines are started");
        let network = Network::new();
        let (machines, plane, ceph) =
            network.enter(|| start_parts(kind, &payload, &disk, &definitions));
        let cluster = Self { kind, machines, plane, ceph, network };
        let figure = |what: &str| {
            println!("figures: {what} after {:.0} s", began.elapsed().as_secs_f64());
        };
        figure("kubelet is started");
        cluster.network.enter(|| {
            let logs = Logs(&cluster);
            say("cleat is installed, and starts as soon as the nodes are ready");
            cluster.install();
            for machine in &cluster.machines {
                cluster.until("node", machine.name, "is Ready", |node| is_true(node, "Ready"));
            }
            figure("the nodes are Ready");
            for workload in cluster.workloads() {
                cluster.rolled_out(workload);
            }
            figure("the pods of cleat are ready");
            drop(logs);
        });
        cluster
    }

    /// Installs cleat.
    fn install(&self) {
        let Some(ceph) = &self.ceph else {
            self.change(&["apply", "-k", "deploy/base"]);
            return;
        };
        let own = with_images(self.plane.directory(), ceph, self.kind == Kind::Stock);
        self.change(&["apply", "-k", own.to_str().unwrap()]);
    }

    /// Adds the sidecars for growth and snapshots of files.
    pub(crate) fn install_with_snapshots(&self) {
        let own = with_snapshots(self.plane.directory());
        self.change(&["apply", "-k", own.to_str().unwrap()]);
    }

    fn workloads(&self) -> &'static [&'static str] {
        match self.kind {
            Kind::OneNode => {
                &["daemonset/cleat-node", "daemonset/cleat-files", "deployment/cleat-controller"]
            }
            Kind::TwoNodes | Kind::Stock => &[
                "daemonset/cleat-node",
                "daemonset/cleat-files",
                "deployment/cleat-controller",
                "deployment/cleat-images",
            ],
        }
    }

    /// Returns a node by its name.
    pub(crate) fn machine(&self, name: &str) -> &Machine {
        self.machines.iter().find(|machine| machine.name == name).expect("a node")
    }

    /// Returns the Ceph cluster.
    pub(crate) fn ceph(&self) -> &ceph::Cluster {
        self.ceph.as_ref().expect("the cluster has one")
    }

    /// Returns the port of the API server.
    pub(crate) fn api_port(&self) -> &str {
        self.plane.port()
    }

    /// Runs a command of bash on the node, and returns its output. The command must succeed.
    pub(crate) fn on_node(&self, command: &str) -> String {
        self.machines[0].run(command)
    }

    /// Runs a command of bash on the node, and returns its exit status and its output.
    pub(crate) fn try_on_node(&self, command: &str) -> (i64, String) {
        self.machines[0].try_run(command)
    }

    /// Runs kubectl as an administrator, and returns its output.
    pub(crate) fn kubectl(&self, arguments: &[&str]) -> String {
        let (is_success, output) = self.try_kubectl(arguments, "");
        assert!(is_success, "kubectl {arguments:?}: {output}");
        output
    }

    /// Runs kubectl as [`Cluster::kubectl`] does, for a step that the demonstration shows.
    fn change(&self, arguments: &[&str]) {
        show_command(arguments);
        self.kubectl(arguments);
    }

    /// Returns the path of a kubeconfig of an administrator.
    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.plane.kubeconfig()
    }

    fn try_kubectl(&self, arguments: &[&str], input: &str) -> (bool, String) {
        let mut command = kubectl_with(&self.kubeconfig());
        command.args(arguments);
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
        show_command_with(&arguments, object);
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
        self.change(&["delete", kind, name, "--namespace", USER, &limit]);
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
        self.change(&["rollout", "status", workload, "--namespace", NAMESPACE, &limit]);
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
        let node = found["spec"]["nodeName"].as_str().unwrap();
        let id = found["status"]["containerStatuses"][0]["containerID"].as_str().unwrap();
        let id = id.strip_prefix("containerd://").unwrap();
        let exec =
            format!("/payload/bin/ctr -n k8s.io tasks exec --exec-id test-$RANDOM {id} sh -c");
        self.machine(node).try_run(&format!("{exec} '{command}'"))
    }
}

/// Starts what a cluster consists of. The calling thread is in the network of the cluster.
fn start_parts(
    kind: Kind,
    payload: &Path,
    disk: &Path,
    snapshot_definitions: &Path,
) -> (Vec<Machine>, ControlPlane, Option<ceph::Cluster>) {
    let mut plane = ControlPlane::start("machines", Purpose::Machines, &[], &[], is_ready);
    plane.start_managers(Purpose::Machines);
    // snapshot-controller ends if they do not exist.
    let apply = ["apply", "--server-side", "-k", snapshot_definitions.to_str().unwrap()];
    show_command(&apply);
    output(kubectl_with(&plane.kubeconfig()).args(apply));
    plane.start_snapshot_controller();
    let plane_of_machines = &plane;
    let start = |number, cpus| Machine::start(plane_of_machines, number, cpus, payload, disk);
    let (machines, ceph) = match kind {
        Kind::OneNode => (vec![start(0, 2)], None),
        Kind::TwoNodes | Kind::Stock => std::thread::scope(|scope| {
            let machines = [0, 1].map(|number| scope.spawn(move || start(number, 1)));
            let ceph = start_ceph();
            (machines.map(|machine| machine.join().unwrap()).into(), Some(ceph))
        }),
    };
    (machines, plane, ceph)
}

/// Returns kubectl with a kubeconfig.
pub(crate) fn kubectl_with(kubeconfig: &Path) -> Command {
    let mut command = Command::new(kubectl());
    command.current_dir(project(""));
    command.arg("--kubeconfig").arg(kubeconfig);
    command
}

/// Returns whether the API server is ready.
fn is_ready(kubeconfig: &Path) -> bool {
    let mut command = kubectl_with(kubeconfig);
    command.args(["get", "--raw", "/readyz"]).output().unwrap().status.success()
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

/// A claim of a volume in a directory of the node of the pod.
pub(crate) fn claim(name: &str, mode: &str) -> Value {
    claim_of(FILES, name, mode)
}

/// A claim of a StorageClass.
pub(crate) fn claim_of(class: &str, name: &str, mode: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": { "name": name },
        "spec": {
            "storageClassName": class,
            "accessModes": ["ReadWriteOnce"],
            "volumeMode": mode,
            "resources": { "requests": { "storage": "64Mi" } },
        },
    })
}

/// A pod that waits on node a, with the volume `v` of a claim at `/v`.
pub(crate) fn pod(name: &str, claim: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": name },
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "nodeSelector": { "kubernetes.io/hostname": MACHINES[0] },
            "containers": [{
                "name": "main", "image": BUSYBOX, "command": ["sleep", "2147483647"],
                "volumeMounts": [{ "name": "v", "mountPath": "/v" }],
            }],
            "volumes": [{ "name": "v", "persistentVolumeClaim": { "claimName": claim } }],
        },
    })
}
