//! A simulated machine for tests: directories, a simulated kernel, real worker processes, and a
//! supervisor that the test can crash.

mod disk;
mod upgrade;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use cleat_api::v1::faults_client::FaultsClient;
use cleat_api::v1::node_client::NodeClient;
use cleat_api::v1::{
    GetRequest, ListRequest, MapOptions, MapRequest, Mapping, MappingState, SetFaultRequest,
    StatsRequest, UnmapRequest, UnmapResponse, VolumeStats,
};
use cleat_core::clock::SystemClock;
use cleat_core::error::ErrorKind;
use cleat_core::random::Random;
use cleat_kernel::Kernel;
use cleat_kernel::sim::{Script, SimKernel};
use cleat_node::config::Config;
use cleat_node::daemon::{Node, Parts};
use cleat_node::executor::{Executor, Halt};
use cleat_node::workers::Processes;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::runtime::Runtime;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

pub use self::disk::{DiskFailure, JournalDisk};
pub use crate::process::{is_alive, kill};
pub use crate::wait::{LIMIT, wait_until};

/// The size of the test volumes, in bytes.
pub const SIZE: u64 = 1 << 20;

/// The simulated machine. Its directories, kernel and workers outlive the supervisor.
pub struct Machine {
    pub directory: tempfile::TempDir,
    pub kernel: SimKernel,
    pub config: Config,
    pub boot_id: String,
    pub seed: u64,
    /// An environment variable that workers are started with.
    pub variable: Option<(&'static str, &'static str)>,
    /// The file system of the journal.
    pub disk: JournalDisk,
    /// The number of supervisors that have requested the kernel.
    pub asked_for: Arc<AtomicU64>,
}

impl Default for Machine {
    fn default() -> Self {
        Self::new()
    }
}

impl Machine {
    /// Creates a machine with the default script of the simulated kernel.
    pub fn new() -> Self {
        Self::with(Script::default())
    }

    /// Creates a machine whose simulated kernel follows `script`.
    pub fn with(script: Script) -> Self {
        static LOG: Once = Once::new();
        LOG.call_once(|| {
            if let Ok(filter) = std::env::var("CLEAT_TEST_LOG") {
                let format = cleat_telemetry::Format::Human;
                let _ = cleat_telemetry::Log { format, filter }.init();
            }
        });
        let directory = tempfile::tempdir().unwrap();
        let config = Config {
            runtime_dir: directory.path().join("run"),
            state_dir: directory.path().join("state"),
            ..Config::default()
        };
        let seed = seed();
        println!("seed {seed}: run again with CLEAT_TEST_SEED={seed}");
        let boot_id = "this boot".to_owned();
        let kernel = SimKernel::new(script);
        let (disk, asked_for) = (JournalDisk::default(), Arc::default());
        Self { directory, kernel, config, boot_id, seed, variable: None, disk, asked_for }
    }

    /// Creates a file of [`SIZE`] bytes and returns its `file:` URI.
    pub fn volume(&self, name: &str) -> String {
        let path = self.path(name);
        File::create(&path).unwrap().set_len(SIZE).unwrap();
        format!("file:{}", path.display())
    }

    /// Returns the path of the file `name` in the machine's directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Starts a supervisor, or panics.
    pub fn start(&self) -> Supervisor {
        self.start_with(None)
    }

    /// Starts a supervisor with a hook that may halt it, or panics.
    pub fn start_with(&self, halt: Option<Halt>) -> Supervisor {
        Self::retry_while_in_use(|| self.try_start(halt.clone()))
    }

    /// Starts a supervisor whose workers are killed each time it passes the point `at`.
    pub fn start_killing_at(&self, at: &'static str) -> Supervisor {
        let executable = self.executable();
        self.start_with(Some(Arc::new(move |point: &str| {
            if point == at {
                for pid in workers_of(&executable) {
                    kill(pid, nix::sys::signal::Signal::SIGKILL);
                }
                wait_until("all workers have exited", || workers_of(&executable).is_empty());
            }
            false
        })))
    }

    /// Calls `start` until it does not report `InUse`. Between fork and exec, a worker that another
    /// test starts has copies of this supervisor's descriptors, so the lock and the socket of a
    /// crashed supervisor may exist a moment longer.
    fn retry_while_in_use<T>(mut start: impl FnMut() -> cleat_core::error::Result<T>) -> T {
        let until = Instant::now() + LIMIT;
        loop {
            match start() {
                Err(error) if error.kind() == ErrorKind::InUse && Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                other => return other.unwrap(),
            }
        }
    }

    /// Starts a supervisor that halts for ever at the `nth` point that it passes after its start, and
    /// sends the name of that point to the receiver.
    pub fn start_halting(&self, nth: u64) -> (Supervisor, std::sync::mpsc::Receiver<String>) {
        let (sender, receiver) = std::sync::mpsc::channel();
        let passed = AtomicU64::new(0);
        let armed = Arc::new(AtomicBool::new(false));
        let is_armed = Arc::clone(&armed);
        let halt: Halt = Arc::new(move |point: &str| {
            let counts = is_armed.load(Ordering::SeqCst);
            let here = counts && passed.fetch_add(1, Ordering::SeqCst) == nth;
            if here {
                let _ = sender.send(point.to_owned());
            }
            here
        });
        let supervisor = self.start_with(Some(halt));
        armed.store(true, Ordering::SeqCst);
        (supervisor, receiver)
    }

    /// Starts a supervisor that crashes at the `nth` point that it passes while it starts. Returns the
    /// name of the point, or `None` when the start completed before it.
    pub fn crash_while_starting(&self, nth: u64) -> Option<String> {
        Self::retry_while_in_use(|| self.try_crash_while_starting(nth))
    }

    fn try_crash_while_starting(&self, nth: u64) -> cleat_core::error::Result<Option<String>> {
        let (sender, receiver) = std::sync::mpsc::channel();
        let passed = AtomicU64::new(0);
        let halt: Halt = Arc::new(move |point: &str| {
            let here = passed.fetch_add(1, Ordering::SeqCst) == nth;
            if here {
                let _ = sender.send(point.to_owned());
            }
            here
        });
        let runtime = runtime();
        let (config, parts) = (self.config.clone(), self.parts(Some(halt)));
        let start = runtime.spawn(async move { Node::start(&config, parts).await });
        loop {
            if let Ok(point) = receiver.recv_timeout(Duration::from_millis(20)) {
                runtime.shutdown_timeout(Duration::from_secs(5));
                return Ok(Some(point));
            }
            if start.is_finished() {
                let node = runtime.block_on(start).unwrap();
                runtime.shutdown_timeout(Duration::from_secs(5));
                return node.map(|_| None);
            }
        }
    }

    /// Starts a supervisor with a hook that may halt it.
    pub fn try_start(&self, halt: Option<Halt>) -> cleat_core::error::Result<Supervisor> {
        let runtime = runtime();
        let node = runtime.block_on(Node::start(&self.config, self.parts(halt)))?;
        let channel = runtime.block_on(connect(self.config.socket()));
        Ok(Supervisor { node: Some(node), channel, runtime: Some(runtime) })
    }

    fn parts(&self, halt: Option<Halt>) -> Parts {
        let (kernel, asked_for) = (self.kernel.clone(), Arc::clone(&self.asked_for));
        // Ids must not repeat: a supervisor may still remove the records of an earlier one.
        let life = asked_for.load(Ordering::Relaxed);
        let mut processes = Processes::of(self.executable())
            .with_users(self.config.workers.users, &self.config.runtime_dir)
            .allow_missing(crate::isolation::all_layers());
        if let Some((name, value)) = self.variable {
            processes = processes.with_variable(name, value);
        }
        Parts {
            registry: crate::backends::REGISTRY,
            kernel: Box::new(move || {
                asked_for.fetch_add(1, Ordering::Relaxed);
                Arc::new(kernel)
            }),
            launcher: Arc::new(processes),
            clock: Arc::new(SystemClock),
            random: Random::seeded(self.seed ^ life << 32),
            boot_id: self.boot_id.clone(),
            disk: Arc::new(self.disk.clone()),
            halt,
        }
    }

    /// Returns the path of a symlink to the executable that only this machine uses; its workers are
    /// identified by it.
    fn executable(&self) -> PathBuf {
        let name = self.path("cleat");
        // The symlink exists after the first start.
        let _ = std::os::unix::fs::symlink(crate::binary::cleat(), &name);
        name
    }

    /// Returns every worker process of this machine that runs. A zombie has no command line, and is not
    /// returned.
    pub fn workers(&self) -> Vec<u32> {
        workers_of(&self.executable())
    }

    /// Checks that nothing of cleat is left: no device, no record, no socket, no process.
    pub fn assert_clean(&self) {
        let busy: Vec<_> =
            self.kernel.devices().unwrap().into_iter().filter(|device| device.connected).collect();
        assert!(busy.is_empty(), "devices are still connected: {busy:?}");
        for directory in [
            self.config.state_dir.join("mappings"),
            self.config.runtime_dir.join("records"),
            self.config.runtime_dir.join("workers"),
        ] {
            let left: Vec<_> = std::fs::read_dir(&directory).unwrap().flatten().collect();
            assert!(left.is_empty(), "{} is not empty: {left:?}", directory.display());
        }
        wait_until("all workers have exited", || self.workers().is_empty());
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        for pid in self.workers() {
            kill(pid, nix::sys::signal::Signal::SIGKILL);
        }
    }
}

/// Returns every worker process that was started as `executable`; its command begins with '@'.
fn workers_of(executable: &Path) -> Vec<u32> {
    let started = executable.as_os_str().as_encoded_bytes();
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let ours = |pid: &u32| {
        let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let name = command.split(|byte| *byte == 0).next();
        name.and_then(|name| name.strip_prefix(b"@")) == Some(started)
    };
    pids.filter(ours).collect()
}

/// A running supervisor, and a client connected to it.
pub struct Supervisor {
    node: Option<Node>,
    channel: Channel,
    runtime: Option<Runtime>,
}

impl Supervisor {
    /// Stops the supervisor as a crash does, without any cleanup.
    pub fn crash(mut self) {
        let node = self.node.take();
        let runtime = self.runtime.take().unwrap();
        runtime.shutdown_timeout(Duration::from_secs(5));
        drop(node);
    }

    /// Stops the supervisor as SIGTERM does.
    pub fn shut_down(mut self) {
        let node = self.node.take().unwrap();
        self.runtime().block_on(node.shutdown());
    }

    fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().unwrap()
    }

    /// Runs a future on the supervisor's runtime and returns its result.
    pub fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime().block_on(future)
    }

    /// Starts a task on the supervisor's runtime.
    pub fn spawn<T: Send + 'static>(
        &self,
        future: impl Future<Output = T> + Send + 'static,
    ) -> tokio::task::JoinHandle<T> {
        self.runtime().spawn(future)
    }

    /// Returns the executor, for services in the same process.
    pub fn executor(&self) -> Arc<Executor> {
        Arc::clone(self.node.as_ref().unwrap().executor())
    }

    /// Returns the TCP address of the metrics endpoint, if it has one.
    pub fn metrics_address(&self) -> Option<std::net::SocketAddr> {
        self.node.as_ref().and_then(Node::metrics_address)
    }

    /// Returns a client of the control API.
    pub fn client(&self) -> NodeClient<Channel> {
        NodeClient::new(self.channel.clone())
    }

    /// Maps the volume `uri` as `name`, with default options.
    pub fn map(&self, name: &str, uri: &str) -> Result<Mapping, Status> {
        self.map_with(request(name, uri))
    }

    /// Maps a volume.
    pub fn map_with(&self, request: MapRequest) -> Result<Mapping, Status> {
        self.block_on(self.client().map(request)).map(tonic::Response::into_inner)
    }

    /// Unmaps a volume. Returns whether it was mapped.
    pub fn unmap(&self, target: &str) -> Result<bool, Status> {
        let request = UnmapRequest { target: target.into(), ..Default::default() };
        Ok(self.block_on(self.client().unmap(request))?.into_inner().was_mapped)
    }

    /// Unmaps a volume by force.
    pub fn force(&self, target: &str) -> Result<UnmapResponse, Status> {
        self.block_on(self.client().unmap(forced(target))).map(tonic::Response::into_inner)
    }

    /// Returns all mappings.
    pub fn list(&self) -> Vec<Mapping> {
        self.block_on(self.client().list(ListRequest {})).unwrap().into_inner().mappings
    }

    /// Returns a mapping with its holders.
    pub fn get(&self, target: &str) -> Result<Mapping, Status> {
        let request = GetRequest { target: target.into(), with_holders: true };
        self.block_on(self.client().get(request)).map(tonic::Response::into_inner)
    }

    /// Replaces the fault plan of the mapping `a`, a `fault:` volume.
    pub fn set_fault(&self, plan: &str) {
        let request = SetFaultRequest { target: "a".into(), plan: plan.into() };
        let mut faults = FaultsClient::new(self.channel.clone());
        self.block_on(faults.set_fault(request)).unwrap();
    }

    /// Returns the statistics of the only mapping.
    pub fn stats(&self) -> VolumeStats {
        let mut stats =
            self.block_on(self.client().stats(StatsRequest::default())).unwrap().into_inner();
        self.block_on(stats.message()).unwrap().unwrap().volumes.pop().unwrap()
    }

    /// Waits until a mapping has the state `state`, for at most [`LIMIT`], and returns it.
    pub fn wait_for(&self, target: &str, state: MappingState) -> Mapping {
        let until = Instant::now() + LIMIT;
        loop {
            let mapping = self.get(target).unwrap();
            if mapping.state() == state {
                return mapping;
            }
            assert!(
                Instant::now() < until,
                "{target} did not reach the state {state:?} in time: {mapping:?}"
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Waits until the supervisor that serves `call` halts, and returns the name of the point; `None` when
/// the call returned before.
pub fn wait_halted<T>(
    halted: &std::sync::mpsc::Receiver<String>,
    call: &tokio::task::JoinHandle<T>,
) -> Option<String> {
    loop {
        if let Ok(point) = halted.recv_timeout(Duration::from_millis(20)) {
            return Some(point);
        }
        if call.is_finished() {
            return None;
        }
    }
}

/// Returns a request to map the volume `uri` as `name`, with default options.
pub fn request(name: &str, uri: &str) -> MapRequest {
    MapRequest {
        uri: uri.into(),
        name: name.into(),
        options: Some(MapOptions::default()),
        timeout_ms: 0,
        take_over: false,
    }
}

/// Returns a request to unmap by force.
pub fn forced(target: &str) -> UnmapRequest {
    UnmapRequest { target: target.into(), force: true, ..UnmapRequest::default() }
}

/// Claims a file as a worker does. Fails if another process holds the claim.
pub fn claim(file: &File) -> nix::Result<()> {
    #[allow(clippy::cast_possible_truncation, reason = "small constants, wider in C than needed")]
    let whole = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    nix::fcntl::fcntl(file, nix::fcntl::FcntlArg::F_OFD_SETLK(&whole)).map(drop)
}

/// Returns N of the mapping's `/dev/nbdN`.
pub fn index_of(mapping: &Mapping) -> u32 {
    mapping.device.strip_prefix("/dev/nbd").unwrap().parse().unwrap()
}

/// Checks that a call failed with `code` and a message that contains `part`.
pub fn assert_code<T: std::fmt::Debug>(result: Result<T, Status>, code: Code, part: &str) {
    let status = result.unwrap_err();
    assert_eq!(status.code(), code, "{status}");
    assert!(status.message().contains(part), "{:?} does not contain {part:?}", status.message());
}

/// Returns the repair hint of an error, or an empty string.
pub fn repair(status: &Status) -> String {
    let metadata = status.metadata();
    if let Some(exact) = metadata.get_bin("cleat-repair-bin") {
        return String::from_utf8(exact.to_bytes().unwrap().to_vec()).unwrap();
    }
    metadata.get("cleat-repair").map_or("", |value| value.to_str().unwrap()).to_owned()
}

fn seed() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let given = std::env::var("CLEAT_TEST_SEED").ok().and_then(|text| text.parse().ok());
    given.unwrap_or_else(|| {
        u64::from(std::process::id()) << 16 | NEXT.fetch_add(1, Ordering::SeqCst)
    })
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

async fn connect(socket: PathBuf) -> Channel {
    let connector = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static("http://cleat.invalid");
    endpoint.connect_with_connector(connector).await.unwrap()
}
