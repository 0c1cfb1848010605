//! What a test has: a driver of its own, its storage, and the objects of its volumes.

use std::fmt::Debug;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use cleat_grants::object::{Condition, Generation, NodeEntry, Reason, Signal, Time, Truth};
use cleat_kube::grant::{VolumeGrant, grant_name};
use cleat_kube::{Config, Policy, SWEEP_PERIOD, Timing};
use k8s_openapi::api::core::v1::{Node, PersistentVolume};
use k8s_openapi::api::storage::v1::{CSINode, VolumeAttachment};
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::ClusterResourceScope;
use kube::{Client, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::control_plane::{ControlPlane, NAMESPACE, free_ports};
use crate::storage::TestStorage;

/// How long a test waits for what the controller does at once.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// The handle of the volume in most tests.
pub(crate) const HANDLE: &str = "shared/v";

/// The finalizer of external-attacher for `driver`.
pub(crate) fn finalizer(driver: &str) -> String {
    format!("external-attacher/{}", driver.replace('.', "-"))
}

/// Runs a test on a runtime of its own.
pub(crate) fn run(test: impl AsyncFnOnce(World)) {
    run_on(ControlPlane::get(), test);
}

/// As [`run`], on one of the control planes.
pub(crate) fn run_on(plane: &'static ControlPlane, test: impl AsyncFnOnce(World)) {
    let name = std::thread::current().name().unwrap_or("test").to_owned();
    // Names of drivers have at most 63 characters and no `_`.
    let name = name.rsplit("::").next().unwrap_or_default().replace('_', "-");
    if let Ok(filter) = std::env::var("CLEAT_TEST_LOG") {
        let filter: Targets = filter.parse().unwrap();
        let log = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_filter(filter);
        // Another test may have set it.
        let _ = tracing_subscriber::registry().with(log).try_init();
    }
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let client = plane.client().await;
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = name[..name.len().min(45)].trim_end_matches('-');
        let driver = format!("{name}-{number}.test");
        let storage = Arc::new(TestStorage::default());
        test(World { plane, client, driver, storage }).await;
    });
}

/// A test's part of the cluster.
pub(crate) struct World {
    pub(crate) plane: &'static ControlPlane,
    pub(crate) client: Client,
    pub(crate) driver: String,
    pub(crate) storage: Arc<TestStorage>,
}

/// A controller in this process.
pub(crate) struct Controller {
    port: u16,
    stop: oneshot::Sender<()>,
    task: JoinHandle<cleat_core::error::Result<()>>,
}

impl Controller {
    /// Ends it as a signal does.
    pub(crate) async fn stop(self) {
        let _ = self.stop.send(());
        self.task.await.unwrap().unwrap();
    }

    /// Waits until it ends by itself.
    pub(crate) async fn ended(self) -> cleat_core::error::Result<()> {
        let Self { stop: _kept, task, .. } = self;
        task.await.unwrap()
    }

    /// Returns its metrics.
    pub(crate) fn metrics(&self) -> String {
        get(self.port, "/metrics")
    }

    /// Returns how often it has looked at an object.
    pub(crate) fn syncs(&self) -> u64 {
        self.sum("cleat_controller_syncs_total{")
    }

    /// Returns how many writes of objects have succeeded.
    pub(crate) fn writes(&self) -> u64 {
        self.sum("cleat_controller_writes_total{")
    }

    fn sum(&self, metric: &str) -> u64 {
        sum(&self.metrics(), metric)
    }

    /// Ends it as a crash does: it does not release the lease.
    pub(crate) fn kill(self) {
        self.task.abort();
    }
}

/// Returns the sum of the metrics in `text` that begin with `metric`.
pub(crate) fn sum(text: &str, metric: &str) -> u64 {
    let counts = text.lines().filter(|line| line.starts_with(metric));
    counts.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
}

/// Returns the answer of a controller to a GET; empty if its endpoint is not served yet.
pub(crate) fn get(port: u16, path: &str) -> String {
    let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else { return String::new() };
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    answer
}

impl World {
    /// The settings of a controller. `namespace` is that of its lease: controllers with different ones lead at
    /// the same time.
    pub(crate) fn config(&self, namespace: &str) -> Config {
        Config {
            kubeconfig: Some(self.plane.controller_kubeconfig()),
            driver: self.driver.clone(),
            namespace: Some(namespace.to_owned()),
            identity: format!("{}-{namespace}", self.driver),
            listen: None,
            workers: 4,
            policy: Policy { release_timeout_s: 1, ..Policy::default() },
            calls: None,
            attach_detach: false,
            remediation: None,
            sweep_period: SWEEP_PERIOD,
            election: Timing::default(),
            after_step: |_| (),
        }
    }

    /// Starts a controller.
    pub(crate) fn controller(&self) -> Controller {
        self.controller_with(NAMESPACE)
    }

    /// Starts a controller whose lease is in `namespace`.
    pub(crate) fn controller_with(&self, namespace: &str) -> Controller {
        self.controller_of(self.config(namespace))
    }

    /// Starts a controller with these settings.
    pub(crate) fn controller_of(&self, config: Config) -> Controller {
        let [port] = free_ports();
        let listen = Some(SocketAddr::from(([127, 0, 0, 1], port)));
        let config = Config { listen, ..config };
        let storage = Arc::clone(&self.storage);
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(async move {
            let stop = async { drop(stopped.await) };
            cleat_kube::run_until(&config, storage, Box::pin(stop)).await
        });
        Controller { port, stop, task }
    }

    pub(crate) fn all<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = ClusterResourceScope>,
    {
        Api::all(self.client.clone())
    }

    async fn create<K>(&self, object: Value)
    where
        K: Resource<DynamicType = (), Scope = ClusterResourceScope>,
        K: Clone + Debug + Serialize + DeserializeOwned,
    {
        let object: K = serde_json::from_value(object).unwrap();
        self.all::<K>().create(&PostParams::default(), &object).await.unwrap();
    }

    /// Creates a node on which the driver is registered, and returns its name.
    pub(crate) async fn node(&self, name: &str) -> String {
        let name = format!("{name}.{}", self.driver);
        let metadata = json!({ "name": name });
        self.create::<Node>(json!({ "metadata": metadata })).await;
        let driver = json!({ "name": self.driver, "nodeID": name });
        let spec = json!({ "drivers": [driver] });
        self.create::<CSINode>(json!({ "metadata": metadata, "spec": spec })).await;
        name
    }

    /// The specification of a volume.
    pub(crate) fn spec(&self, handle: &str) -> Value {
        json!({
            "capacity": { "storage": "1Gi" },
            "accessModes": ["ReadWriteOnce"],
            "csi": { "driver": self.driver, "volumeHandle": handle },
        })
    }

    /// Creates a PersistentVolume, and returns its name.
    pub(crate) async fn volume(&self, name: &str, handle: &str) -> String {
        self.volume_of(name, self.spec(handle)).await
    }

    /// As [`World::volume`], with this specification.
    pub(crate) async fn volume_of(&self, name: &str, spec: Value) -> String {
        let name = format!("{name}.{}", self.driver);
        let object = json!({ "metadata": { "name": name }, "spec": spec });
        self.create::<PersistentVolume>(object).await;
        name
    }

    /// Asks for a volume on a node, as Kubernetes does, and returns the name of the VolumeAttachment.
    pub(crate) async fn attach(&self, volume: &str, node: &str) -> String {
        self.attach_source(&json!({ "persistentVolumeName": volume }), volume, node).await
    }

    /// As [`World::attach`], with any source.
    pub(crate) async fn attach_source(&self, source: &Value, volume: &str, node: &str) -> String {
        let name = format!("{volume}-on-{node}").replace(&format!(".{}", self.driver), "");
        let name = format!("{name}.{}", self.driver);
        let spec = json!({ "attacher": self.driver, "nodeName": node, "source": source });
        self.create::<VolumeAttachment>(json!({ "metadata": { "name": name }, "spec": spec }))
            .await;
        name
    }

    /// Deletes an attachment.
    pub(crate) async fn detach(&self, name: &str) {
        let attachments = self.all::<VolumeAttachment>();
        attachments.delete(name, &DeleteParams::default()).await.unwrap();
    }

    /// Removes an attachment as a person does by hand: without its finalizer. The controller sees no deletion before the
    /// object is gone. It may add the finalizer again: then it is stripped once more.
    pub(crate) async fn remove_by_force(&self, name: &str) {
        let attachments = self.all::<VolumeAttachment>();
        let without = Patch::Merge(json!({ "metadata": { "finalizers": null } }));
        eventually(&format!("{name} is removed by force"), async || {
            let known = attachments.patch(name, &PatchParams::default(), &without).await.unwrap();
            let resource_version = known.metadata.resource_version;
            let unchanged = Some(Preconditions { uid: None, resource_version });
            let parameters = DeleteParams { preconditions: unchanged, ..DeleteParams::default() };
            attachments.delete(name, &parameters).await.ok().map(drop)
        })
        .await;
    }

    pub(crate) async fn attachment(&self, name: &str) -> Option<VolumeAttachment> {
        self.all::<VolumeAttachment>().get_opt(name).await.unwrap()
    }

    /// Waits until an attachment is attached, and returns the generation in its publish context.
    pub(crate) async fn attached(&self, name: &str) -> Generation {
        eventually(&format!("{name} is attached"), async || {
            let status = self.attachment(name).await?.status?;
            let metadata = status.attachment_metadata.filter(|_| status.attached)?;
            Some(Generation(metadata.get("generation")?.parse().unwrap()))
        })
        .await
    }

    /// Waits until an attachment has an attachError that contains `text`, and returns the message and the code.
    pub(crate) async fn attach_error(&self, name: &str, text: &str) -> (String, Option<i32>) {
        eventually(&format!("{name} has the error {text}"), async || {
            let error = self.attachment(name).await?.status?.attach_error?;
            let message = error.message.filter(|message| message.contains(text))?;
            Some((message, error.error_code))
        })
        .await
    }

    /// Waits until an attachment does not exist.
    pub(crate) async fn gone(&self, name: &str) {
        eventually(&format!("{name} is gone"), async || {
            self.attachment(name).await.is_none().then_some(())
        })
        .await;
    }

    /// Returns the grant of a volume.
    pub(crate) async fn grant(&self, handle: &str) -> Option<VolumeGrant> {
        let name = grant_name(&self.driver, handle);
        self.all::<VolumeGrant>().get_opt(&name).await.unwrap()
    }

    /// Adds or removes the taint of a lost node.
    pub(crate) async fn out_of_service(&self, node: &str, is_lost: bool) {
        let key = "node.kubernetes.io/out-of-service";
        let taint = json!({ "key": key, "value": "lost", "effect": "NoExecute" });
        let taints = if is_lost { json!([taint]) } else { json!([]) };
        let patch = Patch::Merge(json!({ "spec": { "taints": taints } }));
        self.all::<Node>().patch(node, &PatchParams::default(), &patch).await.unwrap();
    }

    /// Plays the agent of a node: writes a signal.
    pub(crate) async fn report(
        &self,
        handle: &str,
        node: &str,
        signals: &[(Signal, Truth, Reason, Generation)],
    ) {
        let api = self.all::<VolumeGrant>();
        eventually(&format!("{node} writes its status"), async || {
            let mut grant = self.grant(handle).await?;
            let nodes = &mut grant.status.grant.nodes;
            if !nodes.iter().any(|entry| entry.node == node) {
                nodes.push(NodeEntry { node: node.to_owned(), ..NodeEntry::default() });
            }
            let entry = nodes.iter_mut().find(|entry| entry.node == node)?;
            for (kind, status, reason, generation) in signals {
                entry.generation = *generation;
                entry.set(Condition {
                    kind: *kind,
                    status: *status,
                    reason: *reason,
                    message: String::new(),
                    generation: *generation,
                    last_transition_time: Time(1_893_456_000),
                });
            }
            let name = grant_name(&self.driver, handle);
            // A conflict with the controller: the agent reads again.
            api.replace_status(&name, &PostParams::default(), &grant).await.ok().map(|_| ())
        })
        .await;
    }

    /// Plays the agent of a node: claims the volume with its grant, maps it, and says so.
    pub(crate) async fn mount(&self, handle: &str, node: &str, generation: Generation) {
        let claiming = (Signal::SafeToDetach, Truth::False, Reason::Claiming, generation);
        self.report(handle, node, &[claiming]).await;
        self.storage.image(handle).claim(node, generation).unwrap();
        let mounted = (Signal::SafeToMount, Truth::True, Reason::Mapped, generation);
        self.report(handle, node, &[mounted]).await;
    }

    /// Attaches and mounts the volume `v` with the handle `shared/v` on the new node `a`. Returns the node, the volume, the
    /// attachment and the generation.
    pub(crate) async fn in_use(&self) -> (String, String, String, Generation) {
        let node = self.node("a").await;
        let volume = self.volume("v", HANDLE).await;
        let name = self.attach(&volume, &node).await;
        let generation = self.attached(&name).await;
        self.mount(HANDLE, &node, generation).await;
        (node, volume, name, generation)
    }

    /// Plays the agent of a node: unmaps the volume, releases the claim, and says so.
    pub(crate) async fn release(&self, handle: &str, node: &str, generation: Generation) {
        self.storage.image(handle).release_claim(node);
        self.released(handle, node, generation).await;
    }

    /// Plays the agent of a node that has no claim: says so.
    pub(crate) async fn released(&self, handle: &str, node: &str, generation: Generation) {
        let mount = (Signal::SafeToMount, Truth::False, Reason::Released, generation);
        let detach = (Signal::SafeToDetach, Truth::True, Reason::Released, generation);
        self.report(handle, node, &[mount, detach]).await;
    }

    /// Waits until the volume is revoked on `node`.
    pub(crate) async fn revoked(&self, handle: &str, node: &str) {
        eventually(&format!("{handle} is revoked on {node}"), async || {
            let grant = self.grant(handle).await?.stored().grant;
            grant.holder(node)?.revoked.then_some(())
        })
        .await;
    }
}

/// Waits until `condition` returns a value.
pub(crate) async fn eventually<T>(what: &str, mut condition: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(value) = condition().await {
            return value;
        }
        assert!(Instant::now() < deadline, "timed out: {what}");
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
}
