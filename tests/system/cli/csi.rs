//! Calls of CSI from the command line to a daemon with both services.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use cleat_csi_api::pluginregistration as registration;
use hyper_util::rt::TokioIo;
use registration::registration_client::RegistrationClient;
use serde_json::{Value, json};

/// A daemon with the services of a node and of a controller.
pub(crate) struct Daemon {
    child: Child,
    root: tempfile::TempDir,
}

impl Daemon {
    fn start() -> Self {
        Self::with_clusters(&json!([]))
    }

    /// Starts a daemon with this file of clusters.
    pub(crate) fn with_clusters(clusters: &Value) -> Self {
        let root = tempfile::tempdir().expect("a directory");
        let path = |name: &str| root.path().join(name);
        fs::create_dir(path("volumes")).expect("a directory");
        // kubelet makes it.
        fs::create_dir_all(path("kubelet/plugins_registry")).expect("a directory");
        let text = format!(
            "runtime_dir = {:?}\nstate_dir = {:?}\nmodprobe = false\nnode_name = \"n1\"\n[csi]\n\
             kubelet_dir = {:?}\ndirectories = {{ d = {:?} }}\nclusters = {:?}\n",
            path("run"),
            path("state"),
            path("kubelet"),
            path("volumes"),
            path("clusters.json")
        );
        fs::write(path("clusters.json"), clusters.to_string()).expect("a file");
        fs::write(path("cleat.toml"), text).expect("a file");
        let child = Command::new(env!("CARGO_BIN_EXE_cleat"))
            .args(["node", "--csi-controller", "--config"])
            .arg(path("cleat.toml"))
            .env_remove("CLEAT_SOCKET")
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the daemon starts");
        let daemon = Self { child, root };
        let until = Instant::now() + Duration::from_secs(20);
        while !Path::new(&daemon.endpoint()).exists() {
            assert!(Instant::now() < until, "no socket");
            std::thread::sleep(Duration::from_millis(20));
        }
        daemon
    }

    fn endpoint(&self) -> String {
        let socket = "kubelet/plugins/cleat.csi.storage/csi.sock";
        self.root.path().join(socket).to_str().expect("UTF-8").to_owned()
    }

    /// Makes a call and returns the answer.
    pub(crate) fn call(&self, name: &str, request: &Value) -> Value {
        self.try_call(name, request).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// Makes a call and returns the answer, or what the command prints about the error.
    pub(crate) fn try_call(&self, name: &str, request: &Value) -> Result<Value, String> {
        call(Path::new(&self.endpoint()), name, request)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it ends");
    }
}

/// Calls the driver at a socket. Returns the answer, or what the command prints about the error.
pub(crate) fn call(socket: &Path, name: &str, request: &Value) -> Result<Value, String> {
    let output = run(socket.to_str().expect("UTF-8"), &[name, "-"], &request.to_string());
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    Ok(serde_json::from_slice(&output.stdout).expect("the answer is JSON"))
}

fn run(endpoint: &str, arguments: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_cleat"))
        .arg("csi")
        .args(arguments)
        .env("CSI_ENDPOINT", format!("unix://{endpoint}"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("cleat starts");
    child.stdin.take().expect("a pipe").write_all(input.as_bytes()).expect("the input is written");
    child.wait_with_output().expect("cleat ends")
}

#[test]
fn a_person_can_make_each_call_of_csi() {
    let daemon = Daemon::start();
    assert_eq!(daemon.call("csi.v1.Identity/Probe", &json!({}))["ready"], true);
    assert_eq!(daemon.call("NodeGetInfo", &json!({}))["nodeId"], "n1");
    let capability = json!({ "mount": {}, "accessMode": { "mode": "SINGLE_NODE_WRITER" } });
    let create = json!({
        "name": "v1",
        "capacityRange": { "requiredBytes": (8 << 20).to_string() },
        "volumeCapabilities": [capability],
    });
    let volume = daemon.call("CreateVolume", &create)["volume"].clone();
    assert_eq!(volume["capacityBytes"], (8 << 20).to_string());
    assert_eq!(daemon.call("createvolume", &create)["volume"], volume);
    let listed = daemon.call("ListVolumes", &json!({}));
    assert_eq!(listed["entries"].as_array().map(Vec::len), Some(1));
    daemon.call("DeleteVolume", &json!({ "volumeId": volume["volumeId"] }));

    // The driver's error, with its kind.
    let missing = run(
        &daemon.endpoint(),
        &["NodeGetVolumeStats", r#"{"volumeId": "x", "volumePath": "/x"}"#],
        "",
    );
    let error = String::from_utf8_lossy(&missing.stderr).into_owned();
    assert!(!missing.status.success() && error.starts_with("cleat: error: "), "{error}");
    assert!(error.contains('x'), "{error}");
}

/// What kubelet does with the socket that it finds. The number is that of the behaviour in docs/controller.md.
#[test]
fn row_34_kubelet_finds_the_driver_and_only_its_user_can_connect() {
    let daemon = Daemon::start();
    let socket = daemon.root.path().join("kubelet/plugins_registry/csi@cleat.csi.storage-reg.sock");
    test_kit::wait::wait_until("the driver can be registered", || socket.exists());
    for path in [Path::new(&daemon.endpoint()), &socket] {
        let mode = fs::metadata(path).expect("the socket").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{}", path.display());
    }
    let authority = kubelets_authority(&socket);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let info = runtime.block_on(async {
        let connector = tower::service_fn(move |_| {
            let socket = socket.clone();
            async move { tokio::net::UnixStream::connect(socket).await.map(TokioIo::new) }
        });
        let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{authority}"));
        let endpoint = endpoint.expect("the server accepts the path as an authority");
        let channel = endpoint.connect_with_connector(connector).await.expect("a connection");
        let mut kubelet = RegistrationClient::new(channel);
        let info = kubelet.get_info(registration::InfoRequest {}).await.expect("an answer");
        let status =
            registration::RegistrationStatus { plugin_registered: true, ..Default::default() };
        kubelet.notify_registration_status(status).await.expect("an answer");
        info.into_inner()
    });
    assert_eq!((&*info.r#type, &*info.name), ("CSIPlugin", "cleat.csi.storage"));
    assert_eq!(
        (info.endpoint, &*info.supported_versions),
        (daemon.endpoint(), &["1.0.0".to_owned()][..])
    );
}

/// Returns the `:authority` of kubelet's requests to a socket of plugins: its path, as grpc-go's `encodeAuthority` encodes
/// it.
fn kubelets_authority(socket: &Path) -> String {
    let encode = |byte: u8| match byte {
        b'-' | b'_' | b'.' | b'~' | b'!' | b'$' | b'&' | b'\'' | b'(' | b')' | b'*' | b'+'
        | b',' | b';' | b'=' | b':' | b'[' | b']' | b'@' => char::from(byte).to_string(),
        _ if byte.is_ascii_alphanumeric() => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    socket.to_str().expect("UTF-8").bytes().map(encode).collect()
}

#[test]
fn without_a_driver_the_error_names_the_repair() {
    let none = run("/nonexistent/csi.sock", &["NodeGetInfo"], "");
    let error = String::from_utf8_lossy(&none.stderr).into_owned();
    assert!(error.contains("/nonexistent/csi.sock"), "{error}");
    assert!(error.contains("[csi]") && error.contains("--endpoint"), "{error}");
    let listed = run("/nonexistent/csi.sock", &[], "");
    assert!(String::from_utf8_lossy(&listed.stdout).contains("NodeStageVolume "));
}
