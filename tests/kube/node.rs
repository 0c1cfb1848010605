//! A node of a test: a supervisor with the CSI driver and the agent for grants, as `cleat node` has them, on a
//! simulated kernel. Its workers are real.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cleat_csi::{Driver, mapping_name};
use cleat_csi_api::csi::v1 as csi;
use cleat_kernel::sim::SimKernel;
use cleat_kernel::{DeviceIndex, Holder};
use cleat_node::mapping::View;
use csi::node_client::NodeClient;
use csi::volume_capability::access_mode::Mode;
use csi::volume_capability::{AccessMode, AccessType, BlockVolume};
use hyper_util::rt::TokioIo;
use nix::sys::signal::Signal;
use test_kit::node::{Machine, Supervisor, kill};
use tokio::net::UnixStream;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

use crate::fixture::{World, eventually};

/// A node. Its supervisor can end and start again; what it has mapped stays.
pub(crate) struct TestNode {
    pub(crate) name: String,
    machine: Option<Machine>,
    supervisor: Option<Supervisor>,
    client: NodeClient<Channel>,
}

impl TestNode {
    /// Registers the node `name`, and starts it. Its agent has only the rights of a node.
    pub(crate) async fn start(world: &World, name: &str) -> Self {
        let name = world.node(name).await;
        let kubeconfig = world.plane.node_kubeconfig(&name).await;
        Self::start_with(world, name, kubeconfig).await
    }

    /// Starts a registered node with a kubeconfig of its own.
    pub(crate) async fn start_with(world: &World, name: String, kubeconfig: PathBuf) -> Self {
        Self::start_as(world, name, kubeconfig, Duration::ZERO).await
    }

    /// As [`TestNode::start`], with `csi.force_revoked_after`.
    pub(crate) async fn start_with_force(world: &World, name: &str, after: Duration) -> Self {
        let name = world.node(name).await;
        let kubeconfig = world.plane.node_kubeconfig(&name).await;
        Self::start_as(world, name, kubeconfig, after).await
    }

    /// Starts a node that uses no grants, and knows no API server.
    pub(crate) async fn start_without_grants(world: &World, name: &str) -> Self {
        let name = format!("{name}.{}", world.driver);
        let machine = Self::machine_of(world, &name).await;
        let (machine, supervisor, client) = serve(machine).await;
        Self { name, machine: Some(machine), supervisor: Some(supervisor), client }
    }

    /// Makes a machine with the CSI driver, which has the cluster and no grants.
    async fn machine_of(world: &World, name: &str) -> Machine {
        let mut machine = blocking(Machine::new).await;
        name.clone_into(&mut machine.config.node_name);
        let csi = &mut machine.config.csi;
        csi.enabled = true;
        csi.driver.clone_from(&world.driver);
        csi.register = false;
        csi.socket = Some(machine.directory.path().join("csi.sock"));
        csi.clusters = blocking(crate::rbd::clusters).await;
        machine
    }

    async fn start_as(
        world: &World,
        name: String,
        kubeconfig: PathBuf,
        force_revoked_after: Duration,
    ) -> Self {
        let mut machine = Self::machine_of(world, &name).await;
        let csi = &mut machine.config.csi;
        csi.grants = true;
        csi.force_revoked_after = force_revoked_after;
        csi.kubeconfig = Some(kubeconfig);
        let (machine, supervisor, client) = serve(machine).await;
        Self { name, machine: Some(machine), supervisor: Some(supervisor), client }
    }

    fn machine(&self) -> &Machine {
        self.machine.as_ref().unwrap()
    }

    /// Kills the supervisor and starts another one. The workers continue.
    pub(crate) async fn restart(&mut self) {
        self.crash().await;
        self.start_again().await;
    }

    /// Kills the supervisor, and with it the agent. The workers continue.
    pub(crate) async fn crash(&mut self) {
        let supervisor = self.supervisor.take().unwrap();
        blocking(move || supervisor.crash()).await;
    }

    /// Starts the supervisor after it was killed.
    pub(crate) async fn start_again(&mut self) {
        let machine = self.machine.take().unwrap();
        let (machine, supervisor, client) = serve(machine).await;
        (self.machine, self.supervisor, self.client) = (Some(machine), Some(supervisor), client);
    }

    /// Reboots the node: nothing but the state directory is left.
    pub(crate) async fn reboot(&mut self) {
        self.power_off().await;
        self.boot().await;
    }

    /// Ends everything on the node.
    pub(crate) async fn power_off(&mut self) {
        self.crash().await;
        self.kill_workers();
    }

    /// Starts the node after it was off.
    pub(crate) async fn boot(&mut self) {
        let mut machine = self.machine.take().unwrap();
        machine.boot_id = "the next boot".to_owned();
        machine.kernel = SimKernel::new(cleat_kernel::sim::Script::default());
        std::fs::remove_dir_all(&machine.config.runtime_dir).unwrap();
        let (machine, supervisor, client) = serve(machine).await;
        (self.machine, self.supervisor, self.client) = (Some(machine), Some(supervisor), client);
    }

    pub(crate) fn kill_workers(&self) {
        self.signal_workers(Signal::SIGKILL);
    }

    pub(crate) fn signal_workers(&self, signal: Signal) {
        for pid in self.machine().workers() {
            kill(pid, signal);
        }
    }

    pub(crate) fn has_workers(&self) -> bool {
        !self.machine().workers().is_empty()
    }

    /// Stages a volume as a block device.
    pub(crate) async fn stage(&self, handle: &str) -> Result<(), Status> {
        let is_granted = self.machine().config.csi.grants;
        let published = is_granted.then(|| ("generation".to_owned(), "1".to_owned()));
        let request = csi::NodeStageVolumeRequest {
            volume_id: handle.to_owned(),
            staging_target_path: self.staging(handle),
            volume_capability: Some(csi::VolumeCapability {
                access_mode: Some(AccessMode { mode: Mode::SingleNodeWriter.into() }),
                access_type: Some(AccessType::Block(BlockVolume {})),
            }),
            publish_context: published.into_iter().collect(),
            ..Default::default()
        };
        self.client.clone().node_stage_volume(request).await.map(drop)
    }

    pub(crate) async fn unstage(&self, handle: &str) -> Result<(), Status> {
        let request = csi::NodeUnstageVolumeRequest {
            volume_id: handle.to_owned(),
            staging_target_path: self.staging(handle),
        };
        self.client.clone().node_unstage_volume(request).await.map(drop)
    }

    fn staging(&self, handle: &str) -> String {
        let path = self.machine().path("staging").join(mapping_name(handle));
        path.display().to_string()
    }

    /// Returns what the supervisor has of a volume.
    pub(crate) fn view(&self, handle: &str) -> Option<View> {
        let executor = self.supervisor.as_ref().unwrap().executor();
        executor.register().get(&mapping_name(handle)).map(|mapping| mapping.view())
    }

    fn index(&self, handle: &str) -> DeviceIndex {
        self.view(handle).unwrap().device.unwrap().index
    }

    /// Returns the kernel and the device of a volume, which outlive the supervisor.
    pub(crate) fn device(&self, handle: &str) -> (SimKernel, DeviceIndex) {
        (self.machine().kernel.clone(), self.index(handle))
    }

    /// Writes to the device of a volume.
    pub(crate) async fn write(&self, handle: &str, data: &[u8]) -> std::io::Result<()> {
        let (kernel, index, data) =
            (self.machine().kernel.clone(), self.index(handle), data.to_vec());
        blocking(move || kernel.write(index, 0, &data)).await
    }

    /// Reads from the device of a volume.
    pub(crate) async fn read(&self, handle: &str, length: u32) -> std::io::Result<Vec<u8>> {
        let (kernel, index) = (self.machine().kernel.clone(), self.index(handle));
        blocking(move || kernel.read(index, 0, length)).await
    }

    /// Sets whether a pod uses the device of a volume.
    pub(crate) fn use_device(&self, handle: &str, is_used: bool) {
        let user = Holder::Process { pid: 4242, command: "database".to_owned() };
        let users = if is_used { vec![user] } else { Vec::new() };
        self.machine().kernel.set_holders(self.index(handle), users);
    }

    /// Waits until the volume is not mapped.
    pub(crate) async fn unmapped(&self, handle: &str) {
        let what = format!("{handle} is not mapped on {}", self.name);
        eventually(&what, async || self.view(handle).is_none().then_some(())).await;
    }
}

impl Drop for TestNode {
    fn drop(&mut self) {
        // A runtime must not be dropped by a task of another one.
        let (supervisor, machine) = (self.supervisor.take(), self.machine.take());
        let dropped = std::thread::spawn(move || {
            if let Some(supervisor) = supervisor {
                supervisor.crash();
            }
            drop(machine);
        });
        let _ = dropped.join();
    }
}

/// Starts the supervisor of a machine with CSI and, if it uses grants, the agent, as `cleat node` does.
async fn serve(machine: Machine) -> (Machine, Supervisor, NodeClient<Channel>) {
    let (machine, supervisor) = blocking(move || {
        let supervisor = machine.start();
        (machine, supervisor)
    })
    .await;
    let (config, executor) = (machine.config.clone(), supervisor.executor());
    let node = executor.node_name().to_owned();
    let driver = Driver::new(config.csi.clone(), node, Arc::clone(&executor), 100);
    if config.csi.grants {
        let (driver, work) =
            cleat::kubernetes::agent::with_grants(driver, &config, &executor).unwrap();
        supervisor.spawn(work);
        supervisor.spawn(driver.serve());
    } else {
        supervisor.spawn(driver.serve());
    }
    let socket = config.csi.socket();
    eventually("CSI is served", async || UnixStream::connect(&socket).await.ok()).await;
    let connector = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static("http://cleat.invalid");
    let channel = endpoint.connect_with_connector(connector).await.unwrap();
    (machine, supervisor, NodeClient::new(channel))
}

async fn blocking<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(call).await.unwrap()
}
