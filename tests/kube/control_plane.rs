//! etcd and kube-apiserver on loopback.

use std::fs::{self, File};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, PostParams};
use serde_json::json;
use tonic::codegen::http::Request;

/// The token of an administrator.
const TOKEN: &str = "administrator";

/// The control plane of this test program. It ends with it: the runner kills what a test has started.
pub(crate) struct ControlPlane {
    directory: PathBuf,
    url: String,
    _processes: [Child; 2],
}

impl ControlPlane {
    /// Returns the control plane, which the first caller starts.
    pub(crate) fn get() -> &'static Self {
        static SHARED: OnceLock<ControlPlane> = OnceLock::new();
        SHARED.get_or_init(Self::start)
    }

    /// Returns the path of a kubeconfig of an administrator.
    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.directory.join("kubeconfig")
    }

    fn start() -> Self {
        let programs = test_kit::go::control_plane();
        let started = Instant::now();
        let directory =
            std::env::var_os("CLEAT_TEST_SHM").map_or_else(std::env::temp_dir, PathBuf::from);
        let directory = directory.join("control-plane");
        fs::create_dir_all(&directory).unwrap();
        let [client, peer, api] = free_ports();
        let etcd = start_etcd(&programs.join("server"), &directory, client, peer);
        make_certificates(&directory);
        let token = format!("{TOKEN},administrator,1,system:masters\n");
        fs::write(directory.join("tokens.csv"), token).unwrap();
        let server = start_api_server(&programs.join("kube-apiserver"), &directory, client, api);
        let url = format!("https://127.0.0.1:{api}");
        let plane = Self { directory, url, _processes: [etcd, server] };
        plane.write_kubeconfig();
        plane.wait_until_ready();
        println!("figures: control plane ready in {:.1} s", started.elapsed().as_secs_f64());
        plane
    }

    fn write_kubeconfig(&self) {
        let authority = self.directory.join("ca.crt");
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{
                "name": "test",
                "cluster": { "server": self.url, "certificate-authority": authority },
            }],
            "users": [{ "name": "administrator", "user": { "token": TOKEN } }],
            "contexts": [{
                "name": "test",
                "context": { "cluster": "test", "user": "administrator", "namespace": "default" },
            }],
            "current-context": "test",
        });
        fs::write(self.kubeconfig(), config.to_string()).unwrap();
    }

    fn wait_until_ready(&self) {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let client = runtime.block_on(self.client());
        let ready = || {
            let request = Request::get("/readyz").body(Vec::new()).unwrap();
            let answer = runtime.block_on(client.request_text(request));
            answer.is_ok_and(|text| text == "ok")
        };
        let log = self.directory.join("kube-apiserver.log");
        let deadline = Instant::now() + Duration::from_secs(180);
        while !ready() {
            assert!(Instant::now() < deadline, "kube-apiserver is not ready: {}", tail(&log));
            std::thread::sleep(Duration::from_millis(100));
        }
        runtime.block_on(apply_definition(&client));
    }

    /// Returns a client with the rights of an administrator.
    pub(crate) async fn client(&self) -> kube::Client {
        let config = kube::config::Kubeconfig::read_from(self.kubeconfig()).unwrap();
        let options = kube::config::KubeConfigOptions::default();
        let config = kube::Config::from_custom_kubeconfig(config, &options).await.unwrap();
        kube::Client::try_from(config).unwrap()
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

fn tail(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}
