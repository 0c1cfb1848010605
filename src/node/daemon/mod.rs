//! The daemon `cleat node`. It creates the parts of the supervisor, recovers the mappings of an earlier
//! daemon, serves the control API, and watches the kernel and the workers until it is stopped.

mod events;
mod idle_workers;
mod renewals;
mod run;
mod server;
mod service_manager;
mod swap_guard;
mod sweep;
mod work_queue;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use nix::fcntl::Flock;
use tokio::sync::{Semaphore, broadcast, mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::actions;
use crate::api::service::ApiService;
use crate::config::Config;
use crate::context::{Context, QuiesceSettings, Settings};
use crate::control_socket::listen;
use crate::credentials;
use crate::directory::create_private;
use crate::executor::{Executor, Halt, Pending};
use crate::force_disconnected::ForceDisconnected;
use crate::journal::{Disk, lock};
use crate::kernel_calls::KernelCalls;
use crate::mapping::Register;
use crate::metrics::calls::Calls;
use crate::metrics::{Endpoint, Source};
use crate::operations::{orphans, recover, upgrade};
use crate::planner::Options;
use crate::record_store::Records;
use crate::unlock;
use crate::unmanaged::Unmanaged;
use crate::workers::{Launcher, Workers};
use cleat_backend::Registry;
use cleat_backend::claimant::node_name;
use cleat_core::clock::Clock;
use cleat_core::error::Result;
use cleat_core::random::Random;
use cleat_kernel::{Kernel, cgroup};
use cleat_sys::host;

pub use run::{Extension, run};
use service_manager::{notify, status};

/// The external parts of the daemon, which tests replace.
pub struct Parts {
    /// The backends.
    pub registry: Registry,
    /// Creates the kernel interface, which removes the leftovers of an earlier supervisor. Called after the
    /// locks are held, so no other supervisor runs.
    pub kernel: Box<dyn FnOnce() -> Arc<dyn Kernel> + Send>,
    /// Starts worker processes.
    pub launcher: Arc<dyn Launcher>,
    /// The clock of recorded and shown times.
    pub clock: Arc<dyn Clock>,
    /// The source of mapping ids and of the jitter of retries.
    pub random: Random,
    /// The boot id of the kernel.
    pub boot_id: String,
    /// The file system of the journal.
    pub disk: Arc<dyn Disk>,
    /// Stops the supervisor at a named point, as a crash would. For tests.
    pub halt: Option<Halt>,
}

/// A running daemon. Dropping it has the effect of a crash: mappings stay.
pub struct Node {
    executor: Arc<Executor>,
    tasks: JoinSet<()>,
    stop_server: Option<oneshot::Sender<()>>,
    unmap_on_shutdown: bool,
    socket: PathBuf,
    metrics_address: Option<SocketAddr>,
    _lock: Flock<std::fs::File>,
}

/// The maximum number of workers that start at the same time.
const MAX_CONCURRENT_STARTS: usize = 8;

/// How long the end of the daemon waits for calls in progress.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(3);

/// The timeout of unmapping all volumes, with `unmap_on_shutdown`.
const UNMAP_TIMEOUT: Duration = Duration::from_secs(20);

impl Node {
    /// Takes the locks, recovers the mappings of an earlier daemon, and serves.
    ///
    /// # Errors
    /// As [`run`].
    pub fn start(config: &Config, parts: Parts) -> Pending<'_, Result<Self>> {
        Box::pin(Self::start_all(config, parts))
    }

    async fn start_all(config: &Config, parts: Parts) -> Result<Self> {
        create_private(&config.runtime_dir)?;
        create_private(&config.workers_dir())?;
        let runtime_lock = lock(&config.runtime_dir.join("lock"))?;
        let records = Records::open(config, parts.disk)?;
        let listener = listen(&config.socket()).await?;
        let metrics = Endpoint::bind(&config.metrics, &config.runtime_dir).await?;

        let (work_queue, work_receiver) = mpsc::channel(4096);
        let (worker_events, worker_receiver) = mpsc::channel(1024);
        let kernel = KernelCalls::new((parts.kernel)());
        let context = Arc::new(Context {
            registry: parts.registry,
            records,
            urgent: kernel.urgent(),
            force_disconnected: ForceDisconnected::default(),
            kernel,
            workers: Workers::new(parts.launcher, parts.registry, config, worker_events),
            starts: Semaphore::new(MAX_CONCURRENT_STARTS),
            unlocks: Semaphore::new(unlock::MAX_CONCURRENT),
            credential_opens: Arc::new(Semaphore::new(credentials::MAX_CONCURRENT)),
            credential_checks: Arc::new(Semaphore::new(credentials::MAX_CHECKS)),
            register: Register::default(),
            settings: settings(config, parts.boot_id)?,
            clock: parts.clock,
            random: parts.random,
            work_queue,
            changes: broadcast::channel(1024).0,
            halt: parts.halt,
            restart: watch::channel(None).0,
            findings: std::sync::Mutex::new(Vec::new()),
            service_problems: std::sync::Mutex::default(),
            unmanaged: Unmanaged::default(),
        });
        let executor = Arc::new(Executor::new(Arc::clone(&context)));
        // Subscribed before the recovery, so that no event after its observations is missed.
        let kernel_events = events::kernel_events(&context);
        recover_all(config, &context).await?;

        let mut tasks = JoinSet::new();
        tasks.spawn(work_queue::run(Arc::clone(&context), work_receiver));
        tasks.spawn(events::watch_workers(Arc::clone(&context), worker_receiver));
        tasks.spawn(events::watch_kernel(Arc::clone(&context), kernel_events));
        tasks.spawn(sweep::sweep(Arc::clone(&context)));
        tasks.spawn(renewals::renew_credentials(Arc::clone(&context)));
        let (stop_server, stopped) = oneshot::channel();
        let service = ApiService::new(Arc::clone(&executor), config.map.timeout);
        let (calls, metrics_address) = (Arc::new(Calls::default()), metrics.address());
        tasks.spawn(metrics.serve(Source {
            executor: Arc::clone(&executor),
            calls: Arc::clone(&calls),
            started_at_s: service.started_at_s(),
            csi_socket: config.csi.enabled.then(|| config.csi.socket()),
        }));
        tasks.spawn(server::serve(service, listener, calls, stopped));
        if config.workers.upgrade_at_start {
            let (context, limit) = (Arc::clone(&context), config.map.timeout);
            tasks.spawn(async move { upgrade::upgrade_all_workers(&context, limit).await });
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

    /// Returns the executor, for calls from the same process.
    pub fn executor(&self) -> &Arc<Executor> {
        &self.executor
    }

    /// Returns the TCP address of the metrics endpoint; `None` if it uses no TCP port.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics_address
    }

    /// Starts services beside the control API. They end with the daemon.
    fn extend(&mut self, config: &Config, extensions: &[Extension]) {
        for extension in extensions {
            if let Some(service) = extension(config, &self.executor) {
                self.tasks.spawn(service);
            }
        }
    }

    /// Stops the daemon. Mappings stay, except with `unmap_on_shutdown`.
    pub fn shutdown(self) -> Pending<'static, ()> {
        let unmap = self.unmap_on_shutdown;
        Box::pin(self.stop(unmap))
    }

    async fn stop(mut self, unmap: bool) {
        if unmap {
            self.unmap_all().await;
        }
        if let Some(stop) = self.stop_server.take() {
            let _ = stop.send(());
        }
        // Only calls are waited for: open streams do not end by themselves.
        let drained = self.wait_for_calls();
        if timeout(DRAIN_TIMEOUT, drained).await.is_err() {
            tracing::warn!("calls were still in progress when the daemon ended");
        }
        actions::unquiesce_all(self.executor.context(), Instant::now() + DRAIN_TIMEOUT).await;
        let _ = std::fs::remove_file(&self.socket);
        self.tasks.abort_all();
        tracing::info!("stopped: {}", status(&self.executor));
    }

    async fn wait_for_calls(&self) {
        for mapping in self.executor.register().all() {
            while mapping.try_lock().is_err() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }

    async fn unmap_all(&self) {
        let deadline = Instant::now() + UNMAP_TIMEOUT;
        let mut unmapping = JoinSet::new();
        for mapping in self.executor.register().all() {
            let executor = Arc::clone(&self.executor);
            unmapping.spawn(async move {
                if let Err(error) = executor.unmap(&mapping.name, deadline).await {
                    tracing::warn!(
                        mapping = mapping.name,
                        "cannot unmap, the volume stays mapped: {}",
                        error.report()
                    );
                }
            });
        }
        while unmapping.join_next().await.is_some() {}
    }
}

/// Recovers the mappings of an earlier supervisor, and records problems with the environment as findings.
async fn recover_all(config: &Config, context: &Arc<Context>) -> Result<()> {
    notify(&[sd_notify::NotifyState::Watchdog]);
    recover::recover(context).await?;
    // After a restart in place the service manager's watchdog still runs, and each of the two steps may take
    // long.
    notify(&[sd_notify::NotifyState::Watchdog]);
    if let Err(error) =
        orphans::clear_orphans(context, Instant::now() + Duration::from_secs(20)).await
    {
        context.found(format!("cannot look for devices without a record: {}", error.report()));
    }

    if let Some(group) = config.workers.cgroup.as_deref()
        && let Err(error) = cgroup::check(group)
    {
        context.found(format!(
            "workers stay in the daemon's control group and end with it: {}",
            error.report()
        ));
    }
    Ok(())
}

fn settings(config: &Config, boot_id: String) -> Result<Settings> {
    let seconds = config.map.dead_connection_timeout.as_secs();
    let delay_ms = config.map.replay_delay.as_millis();
    Ok(Settings {
        // The configuration has been checked: both values are far below the maximum.
        defaults: Options {
            read_only: false,
            connections: config.map.connections,
            block_size: 0,
            dead_connection_timeout_s: u32::try_from(seconds).unwrap_or(u32::MAX),
            replay_delay_ms: u32::try_from(delay_ms).unwrap_or(u32::MAX),
            policy: config.map.policy(),
            quiesce: false,
        },
        quiesce: QuiesceSettings {
            hook: config.map.quiesce_hook.clone(),
            limit: config.map.quiesce_deadline,
        },
        mappings: config.limits.mappings,
        node: node_name(&config.node_name)?,
        machine: host::machine_id_hash(),
        boot_id,
    })
}
