//! etcd, kube-apiserver, and what works on its objects, as processes on loopback.

use std::fs::{self, File};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// The namespace of cleat's pods, and of the contexts in kubeconfigs.
pub const NAMESPACE: &str = "cleat-system";

/// The address of the API server for nodes in virtual machines. The tests make it, in a network of their own.
pub const HOST_OF_MACHINES: &str = "10.9.0.1";

/// The token of an administrator.
pub const ADMINISTRATOR: &str = "administrator";

/// The user of kube-controller-manager.
pub const MANAGER: &str = "system:kube-controller-manager";

/// How long kube-controller-manager waits before it detaches a volume by force, where nodes are objects only. Users cannot
/// change its six minutes.
pub const FORCED_DETACH: Duration = Duration::from_secs(8);

/// The token of kube-controller-manager.
const MANAGER_TOKEN: &str = "manager";

/// The names of the nodes in virtual machines.
pub const MACHINES: [&str; 2] = ["a", "b"];

/// What works on the objects of a control plane, and who uses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Only the tests do: they play Kubernetes.
    Objects,
    /// The controllers about nodes, pods and volumes, and the scheduler; the nodes are objects only.
    Managed,
    /// All controllers, the scheduler, and nodes in virtual machines. Nothing of cleat is installed.
    Machines,
}

impl Purpose {
    /// The address of the API server.
    fn address(self) -> &'static str {
        match self {
            Self::Machines => HOST_OF_MACHINES,
            _ => "127.0.0.1",
        }
    }
}

/// The limit for the start of the API server.
const START: Duration = Duration::from_secs(180);

/// A control plane. Its processes end with the value.
pub struct ControlPlane {
    directory: PathBuf,
    programs: PathBuf,
    etcd_port: u16,
    url: String,
    processes: Vec<Child>,
    manager: Mutex<Option<Child>>,
}

impl ControlPlane {
    /// Starts etcd and the API server, and waits until `is_ready` returns true for the kubeconfig of an administrator.
    /// Requests of the users `audited`, and writes of `writers` and of kube-controller-manager, are logged in `audit.log`.
    pub fn start(
        name: &str,
        purpose: Purpose,
        audited: &[String],
        writers: &[String],
        is_ready: impl Fn(&Path) -> bool,
    ) -> Self {
        let programs = crate::go::control_plane();
        let directory =
            std::env::var_os("CLEAT_TEST_SHM").map_or_else(std::env::temp_dir, PathBuf::from);
        let directory = directory.join(name);
        // An earlier one of this process would leave its objects to this one.
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).unwrap();
        let [client, peer, api] = free_ports();
        let etcd = start_etcd(&programs.join("server"), &directory, client, peer);
        make_certificates(&directory);
        fs::write(directory.join("tokens.csv"), tokens()).unwrap();
        write_audit_policy(&directory, audited, writers);
        let url = format!("https://{}:{api}", purpose.address());
        let (processes, manager) = (vec![etcd], Mutex::default());
        let mut plane = Self { directory, programs, etcd_port: client, url, processes, manager };
        let server = plane.start_api_server(&plane.directory, api, purpose);
        plane.processes.push(server);
        write_kubeconfig(&plane.directory, &plane.authority(), &plane.url, ADMINISTRATOR);
        wait_until_ready(&plane.directory, is_ready);
        plane
    }

    /// Starts an API server with the files in `directory`.
    pub fn start_api_server(&self, directory: &Path, port: u16, purpose: Purpose) -> Child {
        start_api_server(
            &self.programs.join("kube-apiserver"),
            directory,
            self.etcd_port,
            port,
            purpose,
        )
    }

    /// Starts kube-controller-manager and kube-scheduler.
    pub fn start_managers(&mut self, purpose: Purpose) {
        let scheduler = self.start_manager("kube-scheduler", &self.kubeconfig(), &[]);
        self.processes.push(scheduler);
        self.restart_manager(purpose);
    }

    /// Starts kube-controller-manager. If it runs already, it is killed before.
    pub fn restart_manager(&self, purpose: Purpose) {
        let mut manager = self.manager.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mut process) = manager.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
        let directory = self.directory.join("manager");
        fs::create_dir_all(&directory).unwrap();
        let kubeconfig = write_kubeconfig(&directory, &self.authority(), &self.url, MANAGER_TOKEN);
        let arguments = match purpose {
            Purpose::Machines => self.all_controllers(),
            _ => controllers_without_kubelet(),
        };
        *manager = Some(self.start_manager("kube-controller-manager", &kubeconfig, &arguments));
    }

    /// Starts snapshot-controller, which works on snapshots of files and of images. Its custom resources must exist.
    pub fn start_snapshot_controller(&mut self) {
        let (name, kubeconfig) = ("snapshot-controller", self.kubeconfig());
        let arguments = [
            format!("--kubeconfig={}", kubeconfig.display()),
            "--enable-distributed-snapshotting".to_owned(),
        ];
        self.processes.push(start(&self.programs.join(name), &self.directory, name, &arguments));
    }

    fn start_manager(&self, name: &str, kubeconfig: &Path, more: &[String]) -> Child {
        let common = [
            format!("--kubeconfig={}", kubeconfig.display()),
            "--leader-elect=false".to_owned(),
            "--kube-api-qps=500".to_owned(),
            "--secure-port=0".to_owned(),
        ];
        start(&self.programs.join(name), &self.directory, name, &[&common[..], more].concat())
    }

    /// Returns the path of a kubeconfig of an administrator.
    pub fn kubeconfig(&self) -> PathBuf {
        self.directory.join("kubeconfig")
    }

    /// Returns the directory of the logs and certificates.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns the URL of the API server.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns the path of the authority's certificate.
    pub fn authority(&self) -> PathBuf {
        self.directory.join("ca.crt")
    }

    /// Returns the port of the API server.
    pub fn port(&self) -> &str {
        self.url.rsplit(':').next().expect("the URL has a port")
    }

    /// Returns a kubeconfig for the kubelet of `node` in a virtual machine, with the certificate of the authority at
    /// /payload/ca.crt.
    pub fn kubelet_kubeconfig(&self, node: &str) -> Value {
        kubeconfig(Path::new("/payload/ca.crt"), &self.url, &format!("node-{node}"))
    }

    fn all_controllers(&self) -> Vec<String> {
        let file = |name: &str| self.directory.join(name).display().to_string();
        vec![
            "--kube-api-burst=1000".to_owned(),
            // The tokens of pods come with the certificate of the authority.
            format!("--root-ca-file={}", file("ca.crt")),
            format!("--service-account-private-key-file={}", file("server.key")),
        ]
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        let manager = self.manager.get_mut().unwrap_or_else(PoisonError::into_inner);
        for process in self.processes.iter_mut().chain(manager) {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// Waits until `is_ready` returns true for the kubeconfig in `directory`.
pub fn wait_until_ready(directory: &Path, is_ready: impl Fn(&Path) -> bool) {
    let deadline = Instant::now() + START;
    let (kubeconfig, log) = (directory.join("kubeconfig"), directory.join("kube-apiserver.log"));
    while !is_ready(&kubeconfig) {
        assert!(Instant::now() < deadline, "kube-apiserver is not ready: {}", tail(&log));
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Writes a kubeconfig with a token into `directory`, and returns its path.
pub fn write_kubeconfig(directory: &Path, authority: &Path, url: &str, token: &str) -> PathBuf {
    let path = directory.join("kubeconfig");
    fs::write(&path, kubeconfig(authority, url, token).to_string()).unwrap();
    path
}

fn kubeconfig(authority: &Path, url: &str, token: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{
            "name": "test",
            "cluster": { "server": url, "certificate-authority": authority },
        }],
        "users": [{ "name": "user", "user": { "token": token } }],
        "contexts": [{
            "name": "test",
            "context": { "cluster": "test", "user": "user", "namespace": NAMESPACE },
        }],
        "current-context": "test",
    })
}

/// Returns the tokens of the administrator, of kube-controller-manager and of the kubelets in virtual machines, for
/// `--token-auth-file`.
fn tokens() -> String {
    let kubelets =
        MACHINES.map(|node| format!("node-{node},system:node:{node},{node},system:nodes\n"));
    let managers = [(ADMINISTRATOR, "administrator"), (MANAGER_TOKEN, MANAGER)]
        .map(|(token, user)| format!("{token},{user},{user},system:masters\n"));
    managers.concat() + &kubelets.concat()
}

fn start_etcd(program: &Path, directory: &Path, client: u16, peer: u16) -> Child {
    let url = |port| format!("http://127.0.0.1:{port}");
    start(
        program,
        directory,
        "etcd",
        &[
            format!("--data-dir={}", directory.join("etcd").display()),
            "--unsafe-no-fsync".to_owned(),
            format!("--listen-client-urls={}", url(client)),
            format!("--advertise-client-urls={}", url(client)),
            format!("--listen-peer-urls={}", url(peer)),
            format!("--initial-advertise-peer-urls={}", url(peer)),
            format!("--initial-cluster=default={}", url(peer)),
        ],
    )
}

fn start_api_server(
    program: &Path,
    directory: &Path,
    etcd: u16,
    port: u16,
    purpose: Purpose,
) -> Child {
    let file = |name: &str| directory.join(name).display().to_string();
    // Only a cluster that has nodes makes the accounts of pods, and gives pods their tokens.
    let accounts = (purpose != Purpose::Machines)
        .then(|| "--disable-admission-plugins=ServiceAccount".to_owned());
    start(
        program,
        directory,
        "kube-apiserver",
        &[
            format!("--etcd-servers=http://127.0.0.1:{etcd}"),
            format!("--bind-address={}", purpose.address()),
            format!("--secure-port={port}"),
            format!("--tls-cert-file={}", file("server.crt")),
            format!("--tls-private-key-file={}", file("server.key")),
            format!("--token-auth-file={}", file("tokens.csv")),
            "--authorization-mode=Node,RBAC".to_owned(),
            format!("--service-account-key-file={}", file("server.crt")),
            format!("--service-account-signing-key-file={}", file("server.key")),
            "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
            "--service-cluster-ip-range=10.96.0.0/24".to_owned(),
            "--endpoint-reconciler-type=none".to_owned(),
            "--allow-privileged=true".to_owned(),
            // Not by name: there is no name server.
            "--kubelet-preferred-address-types=InternalIP".to_owned(),
            format!("--audit-policy-file={}", file("audit-policy")),
            format!("--audit-log-path={}", file("audit.log")),
        ]
        .into_iter()
        .chain(accounts)
        .collect::<Vec<_>>(),
    )
}

fn start(program: &Path, directory: &Path, name: &str, arguments: &[String]) -> Child {
    let log = directory.join(format!("{name}.log"));
    let log = File::options().create(true).append(true).open(log).unwrap();
    let errors = log.try_clone().unwrap();
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(log).stderr(errors);
    command.spawn().unwrap_or_else(|error| panic!("{}: {error}", program.display()))
}

/// Writes the policy of the log `audit.log`: all requests of some users, and the writes of others.
fn write_audit_policy(directory: &Path, audited: &[String], writers: &[String]) {
    let writers = [&[MANAGER.to_owned()], writers].concat();
    let writes = ["create", "update", "patch", "delete"];
    // A rule without users is about all of them.
    let all = (!audited.is_empty()).then(|| json!({ "level": "Metadata", "users": audited }));
    let some = json!({ "level": "Metadata", "users": writers, "verbs": writes });
    let rules: Vec<Value> = all.into_iter().chain([some, json!({ "level": "None" })]).collect();
    let policy = json!({
        "apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"],
        "rules": rules,
    });
    fs::write(directory.join("audit-policy"), policy.to_string()).unwrap();
}

/// The controllers that do not delete or change what the tests make.
fn controllers_without_kubelet() -> Vec<String> {
    let controllers = [
        "node-lifecycle-controller",
        "persistentvolume-attach-detach-controller",
        "persistentvolume-binder-controller",
        "persistentvolume-expander-controller",
        "persistentvolume-protection-controller",
        "persistentvolumeclaim-protection-controller",
        "pod-garbage-collector-controller",
        "taint-eviction-controller",
        "volumeattributesclass-protection-controller",
    ];
    vec![
        format!("--controllers={}", controllers.join(",")),
        "--kube-api-burst=1000".to_owned(),
        "--pvclaimbinder-sync-period=1s".to_owned(),
        // tests/kube/control-plane has this option.
        format!("--test-forced-detach={}s", FORCED_DETACH.as_secs()),
        // Default: one minute.
        "--attach-detach-reconcile-sync-period=5s".to_owned(),
        // Nodes have no kubelet that sends heartbeats.
        "--node-monitor-grace-period=24h".to_owned(),
        "--node-startup-grace-period=24h".to_owned(),
    ]
}

/// Makes an authority, and a certificate of it for the API server.
fn make_certificates(directory: &Path) {
    let openssl = |arguments: &str| {
        let output = Command::new("openssl")
            .current_dir(directory)
            .args(arguments.split(' '))
            .output()
            .expect("openssl is installed (apt install openssl)");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "openssl {arguments}: {errors}");
    };
    let new = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30";
    openssl(&format!("{new} -subj /CN=test-authority -keyout ca.key -out ca.crt"));
    // The last one is the address of the service `kubernetes`.
    let names = format!("IP:127.0.0.1,IP:{HOST_OF_MACHINES},IP:10.96.0.1");
    openssl(&format!(
        "{new} -subj /CN=kube-apiserver -CA ca.crt -CAkey ca.key -addext subjectAltName={names} \
         -addext basicConstraints=critical,CA:FALSE -keyout server.key -out server.crt"
    ));
}

/// Returns ports that are free at the moment.
pub fn free_ports<const N: usize>() -> [u16; N] {
    let listeners = [(); N].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    listeners.map(|listener| listener.local_addr().unwrap().port())
}

/// Returns the last lines of a log.
pub fn tail(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}
