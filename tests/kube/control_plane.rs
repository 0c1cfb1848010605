//! etcd and kube-apiserver on loopback.

use std::fs::{self, File};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use cleat_kube::rights::{CONTROLLER_ACCOUNT, NODE_ACCOUNT};
use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, ApiResource, DynamicObject, PostParams};
use kube::core::GroupVersionKind;
use serde_json::{Value, json};
use tonic::codegen::http::Request;

/// The namespace of cleat's pods.
pub(crate) const NAMESPACE: &str = "cleat-system";

/// Another namespace in which the account of the controller may have a lease.
pub(crate) const SECOND_LEASE: &str = "kube-system";

/// The namespace of the account of a controller whose requests are logged.
pub(crate) const AUDITED: &str = "exact-rights";

/// The token of an administrator.
const TOKEN: &str = "administrator";

/// The control plane of this test program. It ends with it: the runner kills what a test has started.
pub(crate) struct ControlPlane {
    directory: PathBuf,
    programs: PathBuf,
    etcd_port: u16,
    url: String,
    processes: Vec<Child>,
}

impl ControlPlane {
    /// Returns the control plane, which the first caller starts.
    pub(crate) fn get() -> &'static Self {
        static SHARED: OnceLock<ControlPlane> = OnceLock::new();
        SHARED.get_or_init(|| Self::start("control-plane"))
    }

    /// Returns a second control plane, on whose objects kube-controller-manager and kube-scheduler work. The first
    /// caller starts it.
    pub(crate) fn managed() -> &'static Self {
        static SHARED: OnceLock<ControlPlane> = OnceLock::new();
        SHARED.get_or_init(|| {
            let mut plane = Self::start("managed");
            plane.processes.extend(plane.start_managers());
            plane
        })
    }

    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.directory.join("kubeconfig")
    }

    /// Returns the path of a kubeconfig with exactly the rights of the controller.
    pub(crate) fn controller_kubeconfig(&self) -> PathBuf {
        self.directory.join("controller").join("kubeconfig")
    }

    /// Makes a kubeconfig with the rights of the controller's account in `namespace`, in the directory `name`.
    pub(crate) async fn make_controller_kubeconfig(&self, namespace: &str, name: &str) -> PathBuf {
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client().await, namespace);
        let token = account_token(&accounts, CONTROLLER_ACCOUNT, &json!({ "audiences": [] })).await;
        let directory = self.directory.join(name);
        fs::create_dir_all(&directory).unwrap();
        write_kubeconfig(&directory, &self.directory.join("ca.crt"), &self.url, &token)
    }

    /// Returns the requests of the audited account, as the API server has logged them.
    pub(crate) fn audited(&self) -> Vec<Value> {
        let log = fs::read_to_string(self.directory.join("audit.log")).unwrap_or_default();
        // The last line may be incomplete.
        log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    fn start(name: &str) -> Self {
        let programs = test_kit::go::control_plane();
        let started = Instant::now();
        let directory =
            std::env::var_os("CLEAT_TEST_SHM").map_or_else(std::env::temp_dir, PathBuf::from);
        let directory = directory.join(name);
        fs::create_dir_all(&directory).unwrap();
        let [client, peer, api] = free_ports();
        let etcd = start_etcd(&programs.join("server"), &directory, client, peer);
        make_certificates(&directory);
        let token = format!("{TOKEN},administrator,1,system:masters\n");
        fs::write(directory.join("tokens.csv"), token).unwrap();
        let server = start_api_server(&programs.join("kube-apiserver"), &directory, client, api);
        let url = format!("https://127.0.0.1:{api}");
        let processes = vec![etcd, server];
        let plane = Self { directory, programs, etcd_port: client, url, processes };
        write_kubeconfig(&plane.directory, &plane.directory.join("ca.crt"), &plane.url, TOKEN);
        plane.wait_until_ready();
        println!("figures: {name} ready in {:.1} s", started.elapsed().as_secs_f64());
        plane
    }

    fn start_managers(&self) -> [Child; 2] {
        let kubeconfig = format!("--kubeconfig={}", self.kubeconfig().display());
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
        let common =
            [kubeconfig, "--leader-elect=false".to_owned(), "--kube-api-qps=500".to_owned()];
        let manager = [
            format!("--controllers={}", controllers.join(",")),
            "--kube-api-burst=1000".to_owned(),
            "--secure-port=0".to_owned(),
            "--pvclaimbinder-sync-period=1s".to_owned(),
            // Default: one minute.
            "--attach-detach-reconcile-sync-period=5s".to_owned(),
            // Nodes have no kubelet that sends heartbeats.
            "--node-monitor-grace-period=24h".to_owned(),
            "--node-startup-grace-period=24h".to_owned(),
        ];
        let manager = [&common[..], &manager].concat();
        let scheduler = ["--secure-port=0".to_owned()];
        let scheduler = [&common[..], &scheduler].concat();
        [("kube-controller-manager", manager), ("kube-scheduler", scheduler)].map(
            |(name, arguments)| start(&self.programs.join(name), &self.directory, name, &arguments),
        )
    }

    /// Returns the directory of the logs.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    fn wait_until_ready(&self) {
        wait_until_ready(&self.kubeconfig(), &self.directory.join("kube-apiserver.log"));
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let client = self.client().await;
            apply_definition(&client).await;
            apply_rights(&client).await;
            self.make_controller_kubeconfig(NAMESPACE, "controller").await;
        });
    }

    /// Returns the path of a kubeconfig with the rights of the agent on `node`: the token of a pod there.
    pub(crate) async fn node_kubeconfig(&self, node: &str) -> PathBuf {
        self.node_kubeconfig_at(node, &self.url).await
    }

    /// As [`ControlPlane::node_kubeconfig`], by a proxy on the port `port` of this machine.
    pub(crate) async fn node_kubeconfig_by(&self, node: &str, port: u16) -> PathBuf {
        self.node_kubeconfig_at(node, &format!("https://127.0.0.1:{port}")).await
    }

    /// Returns the address of the API server.
    pub(crate) fn address(&self) -> &str {
        self.url.strip_prefix("https://").unwrap()
    }

    async fn node_kubeconfig_at(&self, node: &str, url: &str) -> PathBuf {
        let token = node_token(&self.client().await, NAMESPACE, node).await;
        let directory = self.directory.join(format!("of-{node}"));
        fs::create_dir_all(&directory).unwrap();
        write_kubeconfig(&directory, &self.directory.join("ca.crt"), url, &token)
    }

    /// Returns a client with the rights of an administrator.
    pub(crate) async fn client(&self) -> kube::Client {
        client(&self.kubeconfig()).await
    }

    /// Returns a client with this token.
    pub(crate) async fn client_with(&self, token: &str) -> kube::Client {
        let directory = tempfile::tempdir_in(&self.directory).unwrap();
        let directory = directory.path();
        let authority = self.directory.join("ca.crt");
        client(&write_kubeconfig(directory, &authority, &self.url, token)).await
    }

    /// Starts another API server of the same cluster, which a test can stop.
    pub(crate) fn second_server(&self) -> SecondServer {
        let directory = self.directory.join("second");
        fs::create_dir_all(&directory).unwrap();
        for name in ["server.crt", "server.key", "tokens.csv"] {
            fs::copy(self.directory.join(name), directory.join(name)).unwrap();
        }
        let [port] = free_ports();
        let url = format!("https://127.0.0.1:{port}");
        write_kubeconfig(&directory, &self.directory.join("ca.crt"), &url, TOKEN);
        let program = self.programs.join("kube-apiserver");
        let etcd = self.etcd_port;
        SecondServer { directory, program, etcd, port, process: None }.restart()
    }
}

/// Another API server of the cluster.
pub(crate) struct SecondServer {
    directory: PathBuf,
    program: PathBuf,
    etcd: u16,
    port: u16,
    process: Option<Child>,
}

impl SecondServer {
    fn kubeconfig(&self) -> PathBuf {
        self.directory.join("kubeconfig")
    }

    /// Returns the path of a kubeconfig for this server with the rights of the agent on `node`.
    pub(crate) async fn node_kubeconfig(&self, node: &str) -> PathBuf {
        let url = format!("https://127.0.0.1:{}", self.port);
        ControlPlane::get().node_kubeconfig_at(node, &url).await
    }

    /// Kills the process.
    pub(crate) fn stop(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    /// Starts the process again, and waits until it is ready.
    pub(crate) fn restart(mut self) -> Self {
        self.stop();
        let process = start_api_server(&self.program, &self.directory, self.etcd, self.port);
        self.process = Some(process);
        wait_until_ready(&self.kubeconfig(), &self.directory.join("kube-apiserver.log"));
        self
    }
}

impl Drop for SecondServer {
    fn drop(&mut self) {
        self.stop();
    }
}

fn write_kubeconfig(directory: &Path, authority: &Path, url: &str, token: &str) -> PathBuf {
    let config = json!({
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
    });
    let path = directory.join("kubeconfig");
    fs::write(&path, config.to_string()).unwrap();
    path
}

/// Installs the service accounts, roles and the policy for nodes.
async fn apply_rights(client: &kube::Client) {
    let namespace = json!({
        "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": NAMESPACE },
    });
    let rights = cleat_kube::rights::objects(NAMESPACE);
    // Tests with two leaders have a second lease.
    let second = rights.iter().filter(|object| object["metadata"]["namespace"] == NAMESPACE);
    let second = second.filter(|object| object["kind"].as_str().unwrap().starts_with("Role"));
    let second: Vec<Value> = second
        .cloned()
        .map(|mut object| {
            object["metadata"]["namespace"] = json!(SECOND_LEASE);
            object
        })
        .collect();
    create(client, std::iter::once(namespace).chain(rights).chain(second)).await;
}

/// Creates objects of any kind.
pub(crate) async fn create(client: &kube::Client, objects: impl IntoIterator<Item = Value>) {
    for object in objects {
        let object: DynamicObject = serde_json::from_value(object).unwrap();
        let types = object.types.clone().unwrap();
        let (group, version) = types.api_version.rsplit_once('/').unwrap_or(("", "v1"));
        let plural = match types.kind.as_str() {
            "ValidatingAdmissionPolicy" => "validatingadmissionpolicies".to_owned(),
            kind => format!("{}s", kind.to_lowercase()),
        };
        let kind = GroupVersionKind::gvk(group, version, &types.kind);
        let resource = ApiResource::from_gvk_with_plural(&kind, &plural);
        let api: Api<DynamicObject> = match &object.metadata.namespace {
            Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
            None => Api::all_with(client.clone(), &resource),
        };
        api.create(&PostParams::default(), &object).await.unwrap();
    }
}

/// Makes a pod of the agent on `node`, and returns its token.
pub(crate) async fn node_token(client: &kube::Client, namespace: &str, node: &str) -> String {
    let name = format!("cleat-{node}");
    let pod = serde_json::from_value(json!({
        "metadata": { "name": name },
        "spec": {
            "nodeName": node,
            "serviceAccountName": NODE_ACCOUNT,
            "containers": [{ "name": "node", "image": "cleat" }],
        },
    }));
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    pods.create(&PostParams::default(), &pod.unwrap()).await.unwrap();
    let pod = json!({ "kind": "Pod", "apiVersion": "v1", "name": name });
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
    let spec = json!({ "audiences": [], "boundObjectRef": pod });
    account_token(&accounts, NODE_ACCOUNT, &spec).await
}

async fn account_token(accounts: &Api<ServiceAccount>, account: &str, spec: &Value) -> String {
    let request = serde_json::from_value(json!({ "metadata": {}, "spec": spec })).unwrap();
    let answer = accounts.create_token_request(account, &PostParams::default(), &request).await;
    answer.unwrap().status.unwrap().token.unwrap()
}

async fn client(kubeconfig: &Path) -> kube::Client {
    let config = kube::config::Kubeconfig::read_from(kubeconfig).unwrap();
    let options = kube::config::KubeConfigOptions::default();
    let config = kube::Config::from_custom_kubeconfig(config, &options).await.unwrap();
    kube::Client::try_from(config).unwrap()
}

fn wait_until_ready(kubeconfig: &Path, log: &Path) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let client = runtime.block_on(client(kubeconfig));
    let ready = || {
        let request = Request::get("/readyz").body(Vec::new()).unwrap();
        let answer = runtime.block_on(client.request_text(request));
        answer.is_ok_and(|text| text == "ok")
    };
    let deadline = Instant::now() + Duration::from_secs(180);
    while !ready() {
        assert!(Instant::now() < deadline, "kube-apiserver is not ready: {}", tail(log));
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Installs the custom resource definition, and waits until it is served.
async fn apply_definition(client: &kube::Client) {
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    let definition = serde_json::from_value(cleat_kube::crd::definition()).unwrap();
    definitions.create(&PostParams::default(), &definition).await.unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let found = definitions.get("volumegrants.cleat.csi.storage").await.unwrap();
        let conditions = found.status.and_then(|status| status.conditions).unwrap_or_default();
        let is_true = |kind: &str| {
            conditions.iter().any(|known| known.type_ == kind && known.status == "True")
        };
        let violations: Vec<_> =
            conditions.iter().filter(|known| known.type_ == "NonStructuralSchema").collect();
        assert!(violations.is_empty(), "{violations:?}");
        if is_true("Established") && is_true("NamesAccepted") {
            return;
        }
        assert!(Instant::now() < deadline, "the definition is not established: {conditions:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
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

fn start_api_server(program: &Path, directory: &Path, etcd: u16, port: u16) -> Child {
    let account = format!("system:serviceaccount:{AUDITED}:{CONTROLLER_ACCOUNT}");
    let policy = json!({
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [{ "level": "Metadata", "users": [account] }, { "level": "None" }],
    });
    fs::write(directory.join("audit-policy"), policy.to_string()).unwrap();
    let file = |name: &str| directory.join(name).display().to_string();
    start(
        program,
        directory,
        "kube-apiserver",
        &[
            format!("--etcd-servers=http://127.0.0.1:{etcd}"),
            "--bind-address=127.0.0.1".to_owned(),
            format!("--secure-port={port}"),
            format!("--tls-cert-file={}", file("server.crt")),
            format!("--tls-private-key-file={}", file("server.key")),
            format!("--token-auth-file={}", file("tokens.csv")),
            "--authorization-mode=Node,RBAC".to_owned(),
            format!("--service-account-key-file={}", file("server.crt")),
            format!("--service-account-signing-key-file={}", file("server.key")),
            "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
            "--service-cluster-ip-range=10.96.0.0/24".to_owned(),
            "--disable-admission-plugins=ServiceAccount".to_owned(),
            "--endpoint-reconciler-type=none".to_owned(),
            "--allow-privileged=true".to_owned(),
            format!("--audit-policy-file={}", file("audit-policy")),
            format!("--audit-log-path={}", file("audit.log")),
        ],
    )
}

fn start(program: &Path, directory: &Path, name: &str, arguments: &[String]) -> Child {
    let log = File::create(directory.join(format!("{name}.log"))).unwrap();
    let errors = log.try_clone().unwrap();
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(log).stderr(errors);
    command.spawn().unwrap_or_else(|error| panic!("{}: {error}", program.display()))
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
    openssl(&format!(
        "{new} -subj /CN=kube-apiserver -CA ca.crt -CAkey ca.key -addext subjectAltName=IP:127.0.0.1 \
         -addext basicConstraints=critical,CA:FALSE -keyout server.key -out server.crt"
    ));
}

/// Returns ports that are free at the moment.
pub(crate) fn free_ports<const N: usize>() -> [u16; N] {
    let listeners = [(); N].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    listeners.map(|listener| listener.local_addr().unwrap().port())
}

/// Returns the last lines of a log.
pub(crate) fn tail(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}
