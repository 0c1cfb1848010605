//! The daemon `cleat node`: puts the parts together, brings back what was, serves the control API,
//! and keeps an eye on kernel and workers until it is told to end.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::fcntl::Flock;
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{Semaphore, broadcast, mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tokio_stream::wrappers::UnixListenerStream;

use super::admin::{Admin, MAX_MESSAGE, PeerCheck};
use super::directory::{check_shared, create_private};
use super::executor::{Executor, Halt, Settings};
use super::journal::{Journal, lock};
use super::kernel_calls::{KernelCalls, MAX_COMMANDS, MAX_URGENT, MAX_WAITS};
use super::mapping::{Options, State};
use super::metrics::calls::{Calls, Count};
use super::metrics::{Endpoint, Source};
use super::offload::is_simulated;
use super::process::{Launcher, Processes};
use super::quiesce::Means;
use super::restart;
use super::unlocking;
use super::workers::{WorkerEvent, Workers};
use crate::config::Config;
use cleat_api::v1::node_server::NodeServer;
use cleat_backend::claimant::{boot_id, node_name};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::random::Random;
use cleat_kernel::real::RealKernel;
use cleat_kernel::{Kernel, KernelEvent, cgroup};
use cleat_sys::host;

/// What the daemon stands on; tests put others in their place.
pub struct Parts {
    /// Gives the kernel. Called once no other supervisor can run: it clears what one has left.
    pub kernel: Box<dyn FnOnce() -> Arc<dyn Kernel> + Send>,
    /// Worker processes.
    pub launcher: Arc<dyn Launcher>,
    /// Mapping ids and the spread of retries.
    pub random: Random,
    /// The kernel's boot.
    pub boot_id: String,
    /// Where a test makes it crash.
    pub halt: Option<Halt>,
}

/// A running daemon. Dropped, it ends as in a crash: mappings stay.
pub struct Node {
    executor: Arc<Executor>,
    tasks: JoinSet<()>,
    stop_server: Option<oneshot::Sender<()>>,
    unmap_on_shutdown: bool,
    socket: PathBuf,
    metrics_address: Option<SocketAddr>,
    _lock: Flock<std::fs::File>,
}

/// How often everything is looked at without any event: events may be lost.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);

/// Workers that are being started at the same time.
const STARTS_AT_ONCE: usize = 8;

/// For what is left of the daemon before, when it could not go on as another build.
const RESTART_LIMIT: Duration = Duration::from_secs(10);

/// For calls under way when the daemon ends.
const DRAIN_LIMIT: Duration = Duration::from_secs(3);

/// For all mappings together, with `unmap_on_shutdown`.
const UNMAP_LIMIT: Duration = Duration::from_secs(20);

/// Runs the daemon until SIGTERM or SIGINT. Logs must have been set up.
///
/// # Errors
/// When it cannot start: another one runs, directories cannot be made, the socket is taken.
pub fn run(config: &Config) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        // Beyond the kernel's calls: journal, launches.
        .max_blocking_threads(MAX_COMMANDS + MAX_WAITS + MAX_URGENT + 16)
        .thread_keep_alive(Duration::from_secs(2))
        .thread_name("cleat-node")
        .enable_all()
        .build()
        .map_err(|error| Error::from_io("the daemon cannot start", error))?;
    let result = runtime.block_on(run_until_told(config));
    // A kernel call that hangs must not keep the daemon from ending.
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

async fn run_until_told(config: &Config) -> Result<()> {
    // From the first moment on: their default would end the daemon half started.
    let mut signals = Signals::new()?;
    restart::reap_left();
    let mut node = start_patiently(config, Duration::ZERO).await?;
    while let Some(path) = attend(&node, &mut signals).await {
        let now = sd_notify::NotifyState::monotonic_usec_now();
        let now = now.map_err(|error| Error::from_io("cannot read the clock", error))?;
        notify(&[sd_notify::NotifyState::Reloading, now, sd_notify::NotifyState::Watchdog]);
        tracing::info!(executable = %path.display(), "going on as another build");
        node.end(false).await;
        // What was held is closed by it: locks, sockets, the control API's and those to workers.
        let error = restart::become_other(&path);
        tracing::error!("everything stays as it was: {}", error.report());
        node = start_patiently(config, RESTART_LIMIT).await?;
    }
    notify(&[sd_notify::NotifyState::Stopping]);
    node.shutdown().await;
    Ok(())
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    fn new() -> Result<Self> {
        let failed = |error| Error::from_io("cannot handle signals", error);
        Ok(Self {
            terminate: signal(SignalKind::terminate()).map_err(failed)?,
            interrupt: signal(SignalKind::interrupt()).map_err(failed)?,
            hangup: signal(SignalKind::hangup()).map_err(failed)?,
        })
    }
}

/// Starts; within `patience` again, while something of the daemon before is still there.
async fn start_patiently(config: &Config, patience: Duration) -> Result<Node> {
    let until = Instant::now() + patience;
    let (directory, modprobe) = (config.runtime_dir.clone(), config.modprobe);
    loop {
        let directory = directory.clone();
        let kernel = move || RealKernel::new(&directory).loading_module(modprobe);
        let parts = Parts {
            kernel: Box::new(move || Arc::new(kernel())),
            launcher: Arc::new(
                Processes::of_this_executable().in_cgroup(config.workers.cgroup.clone()),
            ),
            random: Random::from_kernel()?,
            boot_id: boot_id()?,
            halt: None,
        };
        match Node::start(config, parts).await {
            Err(error) if error.kind() == ErrorKind::InUse && Instant::now() < until => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            started => {
                let node = started?;
                notify(&[sd_notify::NotifyState::Ready]);
                return Ok(node);
            }
        }
    }
}

/// Lets the daemon work until it is told to end, or to go on as another executable.
async fn attend(node: &Node, signals: &mut Signals) -> Option<PathBuf> {
    let mut restart = node.executor.restart.subscribe();
    let ticks = sd_notify::watchdog_enabled().map_or(Duration::from_secs(10), |limit| limit / 3);
    let mut tick = interval(ticks);
    loop {
        tokio::select! {
            _ = signals.terminate.recv() => return None,
            _ = signals.interrupt.recv() => return None,
            // The sender is the executor's.
            Ok(path) = restart.wait_for(Option::is_some) => return path.clone(),
            // Its default is to end the daemon, whose terminal may be long gone.
            _ = signals.hangup.recv() => tracing::info!(
                "SIGHUP changes nothing: the configuration is read at the start; a restart stops \
                 no device, and cleat upgrade goes to a new build"
            ),
            _ = tick.tick() => {
                // By way of the threads that do the work: when those hang, the watchdog must bite.
                let executor = Arc::clone(node.executor());
                let status = tokio::spawn(async move { status(&executor) }).await;
                let status = status.unwrap_or_default();
                notify(&[sd_notify::NotifyState::Watchdog, sd_notify::NotifyState::Status(&status)]);
            }
        }
    }
}

impl Node {
    /// Starts: takes the locks, brings back what was, and serves.
    ///
    /// # Errors
    /// As [`run`].
    pub async fn start(config: &Config, parts: Parts) -> Result<Self> {
        create_private(&config.runtime_dir)?;
        let workers_dir = config.runtime_dir.join("workers");
        create_private(&workers_dir)?;
        let runtime_lock = lock(&config.runtime_dir.join("lock"))?;
        let journal = Arc::new(Journal::open(&config.state_dir)?);
        let listener = listen(&config.socket()).await?;
        let metrics = Endpoint::bind(&config.metrics, &config.runtime_dir).await?;

        let (attention, attention_receiver) = mpsc::channel(4096);
        let (worker_events, worker_receiver) = mpsc::channel(1024);
        let log = config.log().decided().to_string();
        let kernel = KernelCalls::new((parts.kernel)());
        let executor = Arc::new(Executor {
            journal,
            urgent: kernel.urgent(),
            left: std::sync::Mutex::default(),
            kernel,
            workers: Workers::new(parts.launcher, workers_dir, log, worker_events),
            starts: Semaphore::new(STARTS_AT_ONCE),
            unlocks: Semaphore::new(unlocking::AT_ONCE),
            register: super::volume::Register::default(),
            settings: settings(config, parts.boot_id)?,
            random: parts.random,
            attention,
            changes: broadcast::channel(1024).0,
            halt: parts.halt,
            restart: watch::channel(None).0,
            findings: std::sync::Mutex::new(Vec::new()),
        });
        // Before recovery, so that nothing is missed between the look and the watch.
        let kernel_events = kernel_events(&executor);
        notify(&[sd_notify::NotifyState::Watchdog]);
        executor.recover().await?;
        // After a restart in place the service manager's watchdog goes on, and each of the two may last.
        notify(&[sd_notify::NotifyState::Watchdog]);
        if let Err(error) = executor.clear_orphans(Instant::now() + Duration::from_secs(20)).await {
            executor.found(format!("cannot look for leftovers: {}", error.report()));
        }

        if let Some(group) = config.workers.cgroup.as_deref()
            && let Err(error) = cgroup::examine(group)
        {
            executor.found(format!("they end with this daemon's: {}", error.report()));
        }

        let mut tasks = JoinSet::new();
        tasks.spawn(tend(Arc::clone(&executor), attention_receiver));
        tasks.spawn(watch_workers(Arc::clone(&executor), worker_receiver));
        tasks.spawn(watch_kernel(Arc::clone(&executor), kernel_events));
        tasks.spawn(sweep(Arc::clone(&executor)));
        let (stop_server, stopped) = oneshot::channel();
        let admin = Admin::new(Arc::clone(&executor), config.map.timeout);
        let (calls, metrics_address) = (Arc::new(Calls::default()), metrics.address());
        tasks.spawn(metrics.serve(Source {
            executor: Arc::clone(&executor),
            calls: Arc::clone(&calls),
            started_at_s: admin.started_at_s(),
        }));
        tasks.spawn(serve(admin, listener, calls, stopped));
        if config.workers.upgrade_at_start {
            let (executor, limit) = (Arc::clone(&executor), config.map.timeout);
            tasks.spawn(async move { executor.succeed_all(limit).await });
        }
        tracing::info!(socket = %config.socket().display(), "ready: {}", status(&executor));
        Ok(Self {
            executor,
            tasks,
            stop_server: Some(stop_server),
            unmap_on_shutdown: config.unmap_on_shutdown,
            socket: config.socket(),
            metrics_address,
            _lock: runtime_lock,
        })
    }

    /// The executor, for calls from the same process.
    pub fn executor(&self) -> &Arc<Executor> {
        &self.executor
    }

    /// Where metrics are served over TCP, if they are.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics_address
    }

    /// Ends in order. Mappings stay, unless the configuration says otherwise.
    pub async fn shutdown(self) {
        let unmap = self.unmap_on_shutdown;
        self.end(unmap).await;
    }

    async fn end(mut self, unmap: bool) {
        if unmap {
            self.unmap_all().await;
        }
        if let Some(stop) = self.stop_server.take() {
            let _ = stop.send(());
        }
        // Calls under way get a moment; open streams never end by themselves.
        let drained = self.wait_for_calls();
        if timeout(DRAIN_LIMIT, drained).await.is_err() {
            tracing::warn!("calls were still under way at the end");
        }
        self.executor.thaw_everything(Instant::now() + DRAIN_LIMIT).await;
        let _ = std::fs::remove_file(&self.socket);
        self.tasks.abort_all();
        tracing::info!("ended: {}", status(&self.executor));
    }

    async fn wait_for_calls(&self) {
        for volume in self.executor.register().all() {
            while volume.enter().is_err() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }

    async fn unmap_all(&self) {
        let deadline = Instant::now() + UNMAP_LIMIT;
        let mut unmapping = JoinSet::new();
        for volume in self.executor.register().all() {
            let executor = Arc::clone(&self.executor);
            unmapping.spawn(async move {
                if let Err(error) = executor.unmap(&volume.name, deadline).await {
                    tracing::warn!(mapping = volume.name, "stays mapped: {}", error.report());
                }
            });
        }
        while unmapping.join_next().await.is_some() {}
    }
}

fn settings(config: &Config, boot_id: String) -> Result<Settings> {
    let seconds = config.map.dead_connection_timeout.as_secs();
    let delay_ms = config.map.replay_delay.as_millis();
    Ok(Settings {
        // The configuration has been checked: both are far below the bound.
        defaults: Options {
            read_only: false,
            connections: config.map.connections,
            block_size: 0,
            dead_connection_timeout_s: u32::try_from(seconds).unwrap_or(u32::MAX),
            replay_delay_ms: u32::try_from(delay_ms).unwrap_or(u32::MAX),
            policy: config.map.policy(),
            quiesce: false,
        },
        quiesce: Means {
            hook: config.map.quiesce_hook.clone(),
            limit: config.map.quiesce_deadline,
        },
        mappings: config.limits.mappings,
        node: node_name(&config.node_name)?,
        machine: host::machine_id_hash(),
        boot_id,
    })
}

fn status(executor: &Executor) -> String {
    let views = executor.register().all();
    let failed = views.iter().filter(|v| matches!(v.view().state, State::Failed(_))).count();
    match failed {
        0 => format!("{} mappings", views.len()),
        _ => format!("{} mappings, {failed} failed", views.len()),
    }
}

/// A socket for root and our own user. One that a dead daemon left is replaced.
pub(super) async fn listen(path: &Path) -> Result<UnixListener> {
    let failed = |error| Error::from_io(format!("cannot listen on {}", path.display()), error);
    match path.parent() {
        Some(parent) if parent.exists() => check_shared(parent)?,
        Some(parent) => create_private(parent)?,
        None => {}
    }
    match std::fs::symlink_metadata(path) {
        Ok(metadata) if !metadata.file_type().is_socket() => {
            let message = format!("{} exists and is no socket", path.display());
            return Err(Error::new(ErrorKind::AlreadyExists, message)
                .with_repair("remove it, or choose another socket"));
        }
        // Anything but a refusal: somebody is there, busy or not.
        Ok(_) if !is_abandoned(path).await => {
            let message = format!("another daemon serves {}", path.display());
            return Err(Error::new(ErrorKind::InUse, message)
                .with_repair("stop it first: systemctl stop cleat"));
        }
        Ok(_) => std::fs::remove_file(path).map_err(failed)?,
        Err(_) => {}
    }
    // Bound under another name and renamed when its mode is right: nobody finds it too open.
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".new");
    let temporary = PathBuf::from(temporary);
    let _ = std::fs::remove_file(&temporary);
    let listener = UnixListener::bind(&temporary).map_err(failed)?;
    std::fs::set_permissions(&temporary, std::fs::Permissions::from_mode(0o600)).map_err(failed)?;
    std::fs::rename(&temporary, path).map_err(failed)?;
    Ok(listener)
}

/// Whether nobody listens on a socket.
async fn is_abandoned(path: &Path) -> bool {
    let connected = UnixStream::connect(path).await;
    connected.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused)
}

async fn serve(
    admin: Admin,
    listener: UnixListener,
    calls: Arc<Calls>,
    stopped: oneshot::Receiver<()>,
) {
    let service = NodeServer::new(admin).max_decoding_message_size(MAX_MESSAGE);
    let service = tonic::service::interceptor::InterceptedService::new(service, PeerCheck);
    let served = tonic::transport::Server::builder()
        .concurrency_limit_per_connection(256)
        .max_concurrent_streams(256)
        .http2_max_header_list_size(16 * 1024)
        .layer(Count(calls))
        .serve_with_incoming_shutdown(service, UnixListenerStream::new(listener), async {
            // An error means that the daemon is gone.
            let _ = stopped.await;
        });
    if let Err(error) = served.await {
        tracing::error!("the control API has ended: {error}");
    }
}

/// Looks after mappings that somebody has drawn attention to, each in a task of its own: one that
/// hangs keeps no other waiting, and the guards bound them to one a mapping.
async fn tend(executor: Arc<Executor>, mut attention: mpsc::Receiver<String>) {
    let mut tending = JoinSet::new();
    let mut batch = Vec::new();
    while attention.recv_many(&mut batch, 256).await > 0 {
        for name in batch.drain(..).collect::<BTreeSet<String>>() {
            let Some(volume) = executor.register().get(&name) else { continue };
            let executor = Arc::clone(&executor);
            tending.spawn(async move { executor.tend(&volume).await });
        }
        while tending.try_join_next().is_some() {}
    }
}

async fn watch_workers(executor: Arc<Executor>, mut events: mpsc::Receiver<WorkerEvent>) {
    while let Some(event) = events.recv().await {
        tracing::debug!(mapping_id = event.mapping_id, "{}", event.what);
        let all = executor.register().all();
        if let Some(volume) = all.iter().find(|volume| volume.mapping_id == event.mapping_id) {
            let _ = executor.attention.send(volume.name.clone()).await;
        }
    }
}

/// The kernel's events, from a thread that waits for them. Without its module the kernel has none;
/// they are asked for again once something is mapped. Until then, the sweep finds everything.
fn kernel_events(executor: &Arc<Executor>) -> mpsc::Receiver<KernelEvent> {
    let (sender, receiver) = mpsc::channel(1024);
    let kernel = Arc::clone(executor.kernel.kernel());
    let mut subscribed = subscribe(kernel.as_ref());
    if is_simulated() {
        tokio::spawn(relay(subscribed, sender));
        return receiver;
    }
    // Not the executor itself, which would live as long as the thread.
    let executor = Arc::downgrade(executor);
    std::thread::spawn(move || {
        // Ends with the daemon: the receiver is dropped.
        while !sender.is_closed() {
            let Some(events) = &subscribed else {
                std::thread::sleep(Duration::from_secs(1));
                let mapped = executor.upgrade().is_some_and(|e| !e.register().all().is_empty());
                subscribed = if mapped { subscribe(kernel.as_ref()) } else { None };
                continue;
            };
            match events.recv_timeout(Duration::from_secs(1)) {
                Ok(event) => {
                    let _ = sender.try_send(event);
                }
                Err(crossbeam_channel::RecvTimeoutError::Timeout) => {}
                Err(crossbeam_channel::RecvTimeoutError::Disconnected) => subscribed = None,
            }
        }
    });
    receiver
}

/// The same without a thread.
async fn relay(
    subscribed: Option<crossbeam_channel::Receiver<KernelEvent>>,
    sender: mpsc::Sender<KernelEvent>,
) {
    while !sender.is_closed() {
        tokio::time::sleep(Duration::from_secs(1)).await;
        for event in subscribed.iter().flat_map(crossbeam_channel::Receiver::try_iter) {
            let _ = sender.try_send(event);
        }
    }
}

fn subscribe(kernel: &dyn Kernel) -> Option<crossbeam_channel::Receiver<KernelEvent>> {
    kernel
        .events()
        .inspect_err(|error| tracing::info!("no events from the kernel yet: {}", error.report()))
        .ok()
}

async fn watch_kernel(executor: Arc<Executor>, mut events: mpsc::Receiver<KernelEvent>) {
    let mut batch = Vec::new();
    while events.recv_many(&mut batch, 256).await > 0 {
        let indices: BTreeSet<u32> = batch
            .drain(..)
            .map(|event| match event {
                KernelEvent::LinkDead(index) | KernelEvent::Changed(index) => index,
            })
            .collect();
        for volume in executor.register().all() {
            if volume.view().device.is_some_and(|device| indices.contains(&device.index)) {
                let _ = executor.attention.send(volume.name.clone()).await;
            }
        }
        // A device that changes many times in a row is looked at a few times only.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Finds what no event told: every mapping whose device is not as it should be, that does not work,
/// or whose worker gives no sign of life.
async fn sweep(executor: Arc<Executor>) {
    let mut tick = interval(SWEEP_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut asking = JoinSet::new();
    loop {
        tick.tick().await;
        let devices = match executor.devices(Instant::now() + SWEEP_INTERVAL).await {
            Ok(devices) => devices,
            Err(error) => {
                tracing::warn!("cannot look at the devices: {}", error.report());
                continue;
            }
        };
        while asking.try_join_next().is_some() {}
        for volume in executor.register().all() {
            let view = volume.view();
            let device = view.device.and_then(|seen| {
                devices.iter().find(|device| device.index == seen.index && device.connected)
            });
            let right = device.is_some_and(|device| {
                device.identity().is_some_and(|id| id.mapping_id() == volume.mapping_id)
            });
            let served = volume.statistics().is_some_and(|page| {
                page.snapshot().connections >= u64::from(view.record.options.connections)
            });
            if view.state != State::Mapped || !right || !served || view.record.quiet.is_some() {
                // A full queue: at the next sweep.
                let _ = executor.attention.try_send(volume.name.clone());
            } else {
                let executor = Arc::clone(&executor);
                asking.spawn(async move { executor.ask_for_life(&volume).await });
            }
        }
    }
}

fn notify(states: &[sd_notify::NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!("cannot tell the service manager: {error}");
    }
}
