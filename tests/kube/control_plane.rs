//! The control planes of these tests, and clients with the rights of cleat's accounts.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::{OnceLock, RwLock};
use std::time::{Duration, Instant};

use cleat_kube::rights::{CONTROLLER_ACCOUNT, NODE_ACCOUNT};
use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, ApiResource, DynamicObject, PostParams};
use kube::core::GroupVersionKind;
use serde_json::{Value, json};
use test_kit::control_plane::{
    self as parts, ADMINISTRATOR, Purpose, wait_until_ready, write_kubeconfig,
};
pub(crate) use test_kit::control_plane::{FORCED_DETACH, MANAGER, NAMESPACE, free_ports, tail};
use tokio::sync::OnceCell;
use tonic::codegen::http::Request;

/// Another namespace in which the account of the controller may have a lease.
pub(crate) const SECOND_LEASE: &str = "kube-system";

/// The namespace of the account of a controller that has no other work than the usual one.
pub(crate) const AUDITED: &str = "exact-rights";

/// The namespace of the account of the controllers that have an attach/detach loop.
pub(crate) const LOOP: &str = "attach-detach";

/// The namespace of the account of the controllers that remediate nodes.
pub(crate) const REMEDIATION: &str = "remediation";

/// The control plane of this test program.
pub(crate) struct ControlPlane {
    parts: parts::ControlPlane,
    /// Locked for reading by the tests that need kube-controller-manager, and for writing by one that restarts it.
    pub(crate) in_use: RwLock<()>,
    /// The kubeconfig of the controllers that have an attach/detach loop.
    pub(crate) of_loop: OnceCell<PathBuf>,
}

impl ControlPlane {
    /// Returns the control plane, which the first caller starts.
    pub(crate) fn get() -> &'static Self {
        static SHARED: OnceLock<ControlPlane> = OnceLock::new();
        SHARED.get_or_init(|| {
            Self::start("control-plane", Purpose::Objects)
                .with_cleat(&cleat_kube::crd::definition())
        })
    }

    /// Returns a second control plane, on whose objects kube-controller-manager and kube-scheduler work. The first
    /// caller starts it.
    pub(crate) fn managed() -> &'static Self {
        static SHARED: OnceLock<ControlPlane> = OnceLock::new();
        SHARED.get_or_init(|| {
            let definition = cleat_kube::crd::definition();
            let mut plane = Self::start("managed", Purpose::Managed).with_cleat(&definition);
            plane.parts.start_managers(Purpose::Managed);
            plane
        })
    }

    /// Returns a control plane on which the custom resource definition is that of another build. The first caller starts
    /// it.
    pub(crate) fn of_another_build() -> &'static Self {
        static SHARED: OnceLock<ControlPlane> = OnceLock::new();
        SHARED.get_or_init(|| {
            Self::start("other-build", Purpose::Objects).with_cleat(&definition_of_another_build())
        })
    }

    /// Returns a control plane on which nothing of cleat is installed. The first caller starts it.
    pub(crate) fn empty() -> &'static Self {
        static SHARED: OnceLock<ControlPlane> = OnceLock::new();
        SHARED.get_or_init(|| Self::start("empty", Purpose::Objects))
    }

    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.parts.kubeconfig()
    }

    /// Returns the path of a kubeconfig with exactly the rights of the controller.
    pub(crate) fn controller_kubeconfig(&self) -> PathBuf {
        self.parts.directory().join("controller").join("kubeconfig")
    }

    /// Makes a kubeconfig with the rights of the controller's account in `namespace`, in the directory `name`.
    pub(crate) async fn make_controller_kubeconfig(&self, namespace: &str, name: &str) -> PathBuf {
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client().await, namespace);
        let token = account_token(&accounts, CONTROLLER_ACCOUNT, &json!({ "audiences": [] })).await;
        let directory = self.parts.directory().join(name);
        fs::create_dir_all(&directory).unwrap();
        write_kubeconfig(&directory, &self.parts.authority(), self.parts.url(), &token)
    }

    /// Starts kube-controller-manager anew.
    pub(crate) fn restart_manager(&self) {
        self.parts.restart_manager(Purpose::Managed);
    }

    /// Returns the requests of a user, as the API server has logged them: the writes of kube-controller-manager and of the
    /// controllers of cleat. Where no other controllers run, all requests of those accounts whose rights are compared.
    pub(crate) fn audited(&self, user: &str) -> Vec<Value> {
        let log = fs::read_to_string(self.parts.directory().join("audit.log")).unwrap_or_default();
        // The last line may be incomplete.
        let requests = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        requests.filter(|request| request["user"]["username"] == user).collect()
    }

    fn start(name: &str, purpose: Purpose) -> Self {
        let started = Instant::now();
        let (audited, writers) = match purpose {
            Purpose::Objects => (&[AUDITED, LOOP, REMEDIATION][..], &[NAMESPACE][..]),
            Purpose::Managed | Purpose::Machines => (&[][..], &[NAMESPACE, LOOP][..]),
        };
        let [audited, writers] = [audited, writers]
            .map(|accounts| accounts.iter().map(|name| controller_user(name)).collect::<Vec<_>>());
        let parts = parts::ControlPlane::start(name, purpose, &audited, &writers, is_ready);
        let plane = Self { parts, in_use: RwLock::default(), of_loop: OnceCell::new() };
        println!("figures: {name} ready in {:.1} s", started.elapsed().as_secs_f64());
        plane
    }

    /// Returns the directory of the logs.
    pub(crate) fn directory(&self) -> &Path {
        self.parts.directory()
    }

    /// Installs what the tests need that play Kubernetes: the custom resource definition and the rights.
    fn with_cleat(self, definition: &Value) -> Self {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let client = self.client().await;
            apply_definition(&client, definition).await;
            apply_rights(&client).await;
            self.make_controller_kubeconfig(NAMESPACE, "controller").await;
        });
        self
    }

    /// Returns the path of a kubeconfig with the rights of the agent on `node`: the token of a pod there.
    pub(crate) async fn node_kubeconfig(&self, node: &str) -> PathBuf {
        self.node_kubeconfig_at(node, self.parts.url()).await
    }

    /// As [`ControlPlane::node_kubeconfig`], by a proxy on the port `port` of this machine.
    pub(crate) async fn node_kubeconfig_by(&self, node: &str, port: u16) -> PathBuf {
        self.node_kubeconfig_at(node, &format!("https://127.0.0.1:{port}")).await
    }

    /// Returns the address of the API server.
    pub(crate) fn address(&self) -> &str {
        self.parts.url().strip_prefix("https://").unwrap()
    }

    async fn node_kubeconfig_at(&self, node: &str, url: &str) -> PathBuf {
        let token = node_token(&self.client().await, NAMESPACE, node).await;
        let directory = self.parts.directory().join(format!("of-{node}"));
        fs::create_dir_all(&directory).unwrap();
        write_kubeconfig(&directory, &self.parts.authority(), url, &token)
    }

    /// Makes the pod `name` of an account on `node`, and returns the path of a kubeconfig with its token.
    pub(crate) async fn pod_kubeconfig(&self, account: &str, name: &str, node: &str) -> PathBuf {
        let token = pod_token(&self.client().await, NAMESPACE, account, name, node).await;
        let directory = self.parts.directory().join(format!("of-{name}"));
        fs::create_dir_all(&directory).unwrap();
        write_kubeconfig(&directory, &self.parts.authority(), self.parts.url(), &token)
    }

    /// Returns a client with the rights of an administrator.
    pub(crate) async fn client(&self) -> kube::Client {
        client(&self.kubeconfig()).await
    }

    /// Returns a client with this token.
    pub(crate) async fn client_with(&self, token: &str) -> kube::Client {
        let directory = tempfile::tempdir_in(self.parts.directory()).unwrap();
        let directory = directory.path();
        let authority = self.parts.authority();
        client(&write_kubeconfig(directory, &authority, self.parts.url(), token)).await
    }

    /// Starts another API server of the same cluster, which a test can stop.
    pub(crate) fn second_server(&'static self) -> SecondServer {
        let directory = self.parts.directory().join("second");
        fs::create_dir_all(&directory).unwrap();
        for name in ["server.crt", "server.key", "tokens.csv", "audit-policy"] {
            fs::copy(self.parts.directory().join(name), directory.join(name)).unwrap();
        }
        let [port] = free_ports();
        let url = format!("https://127.0.0.1:{port}");
        write_kubeconfig(&directory, &self.parts.authority(), &url, ADMINISTRATOR);
        SecondServer { plane: self, directory, port, process: None }.restart()
    }
}

/// Another API server of the cluster.
pub(crate) struct SecondServer {
    plane: &'static ControlPlane,
    directory: PathBuf,
    port: u16,
    process: Option<Child>,
}

impl SecondServer {
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
        let (plane, purpose) = (&self.plane.parts, Purpose::Objects);
        self.process = Some(plane.start_api_server(&self.directory, self.port, purpose));
        wait_until_ready(&self.directory, is_ready);
        self
    }
}

impl Drop for SecondServer {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Returns the user of a controller whose account is in `namespace`.
pub(crate) fn controller_user(namespace: &str) -> String {
    format!("system:serviceaccount:{namespace}:{CONTROLLER_ACCOUNT}")
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
    pod_token(client, namespace, NODE_ACCOUNT, &format!("cleat-{node}"), node).await
}

/// Makes the pod `name` of an account on `node`, and returns its token.
pub(crate) async fn pod_token(
    client: &kube::Client,
    namespace: &str,
    account: &str,
    name: &str,
    node: &str,
) -> String {
    let pod = serde_json::from_value(json!({
        "metadata": { "name": name },
        "spec": {
            "nodeName": node,
            "serviceAccountName": account,
            "containers": [{ "name": "node", "image": "cleat" }],
        },
    }));
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    pods.create(&PostParams::default(), &pod.unwrap()).await.unwrap();
    let pod = json!({ "kind": "Pod", "apiVersion": "v1", "name": name });
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
    let spec = json!({ "audiences": [], "boundObjectRef": pod });
    account_token(&accounts, account, &spec).await
}

pub(crate) async fn account_token(
    accounts: &Api<ServiceAccount>,
    account: &str,
    spec: &Value,
) -> String {
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

/// Returns whether the API server is ready.
fn is_ready(kubeconfig: &Path) -> bool {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let request = Request::get("/readyz").body(Vec::new()).unwrap();
        let answer = client(kubeconfig).await.request_text(request).await;
        answer.is_ok_and(|text| text == "ok")
    })
}

/// A definition with fields and a mode that this build does not know, and without the bounds of this one.
fn definition_of_another_build() -> Value {
    fn relax(schema: &mut Value) {
        match schema {
            Value::Object(fields) => {
                for bound in ["maxLength", "pattern", "maximum"] {
                    if !fields.get(bound).is_some_and(Value::is_object) {
                        fields.remove(bound);
                    }
                }
                fields.values_mut().for_each(relax);
            }
            Value::Array(items) => items.iter_mut().for_each(relax),
            _ => {}
        }
    }
    let mut definition = cleat_kube::crd::definition();
    let schema = &mut definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"];
    relax(schema);
    let invented = json!({ "type": "string" });
    let holder = &mut schema["spec"]["properties"]["holders"]["items"]["properties"];
    holder["mode"]["enum"].as_array_mut().unwrap().push(json!("Invented"));
    holder["invented"] = invented.clone();
    let status = &mut schema["status"]["properties"];
    status["invented"] = invented.clone();
    let entry = &mut status["nodes"]["items"]["properties"];
    entry["invented"] = invented.clone();
    let condition = &mut entry["conditions"]["items"]["properties"];
    condition["invented"] = invented;
    condition["type"]["enum"].as_array_mut().unwrap().push(json!("Invented"));
    definition
}

/// Installs the custom resource definition, and waits until it is served.
async fn apply_definition(client: &kube::Client, definition: &Value) {
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    let definition = serde_json::from_value(definition.clone()).unwrap();
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
