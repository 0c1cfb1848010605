//! The daemon `cleat node`: puts the parts of the supervisor together, recovers what an earlier one
//! left, serves the control API, and watches kernel and workers until it is asked to end.

mod events;
mod run;
mod server;
mod service_manager;
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
use crate::directory::create_private;
use crate::executor::{Executor, Halt};
use crate::force_disconnected::ForceDisconnected;
use crate::journal::{Journal, lock};
use crate::kernel_calls::KernelCalls;
use crate::mapping::Register;
use crate::metrics::calls::Calls;
use crate::metrics::{Endpoint, Source};
use crate::operations::{orphans, recover, upgrade};
use crate::planner::Options;
use crate::unlock;
use crate::workers::{Launcher, Workers};
use cleat_backend::Registry;
use cleat_backend::claimant::node_name;
use cleat_core::clock::Clock;
use cleat_core::error::Result;
use cleat_core::random::Random;
use cleat_kernel::{Kernel, cgroup};
use cleat_sys::host;

pub use run::run;
use service_manager::{notify, status};

/// What the daemon stands on; tests put others in their place.
pub struct Parts {
    /// The backends.
    pub registry: Registry,
    /// Gives the kernel. Called once no other supervisor can run: it clears what one has left.
    pub kernel: Box<dyn FnOnce() -> Arc<dyn Kernel> + Send>,
    /// Worker processes.
    pub launcher: Arc<dyn Launcher>,
    /// The wall clock, for times that are recorded and shown.
    pub clock: Arc<dyn Clock>,
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

/// Workers that are being started at the same time.
const STARTS_AT_ONCE: usize = 8;

/// For calls under way when the daemon ends.
const DRAIN_LIMIT: Duration = Duration::from_secs(3);

/// For all mappings together, with `unmap_on_shutdown`.
const UNMAP_LIMIT: Duration = Duration::from_secs(20);

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

        let (work_queue, work_receiver) = mpsc::channel(4096);
        let (worker_events, worker_receiver) = mpsc::channel(1024);
        let log = config.log().decided().to_string();
        let kernel = KernelCalls::new((parts.kernel)());
        let context = Arc::new(Context {
            registry: parts.registry,
            journal,
            urgent: kernel.urgent(),
            force_disconnected: ForceDisconnected::default(),
            kernel,
            workers: Workers::new(parts.launcher, workers_dir, log, worker_events),
            starts: Semaphore::new(STARTS_AT_ONCE),
            unlocks: Semaphore::new(unlock::MAX_CONCURRENT),
            register: Register::default(),
            settings: settings(config, parts.boot_id)?,
            clock: parts.clock,
            random: parts.random,
            work_queue,
            changes: broadcast::channel(1024).0,
            halt: parts.halt,
            restart: watch::channel(None).0,
            findings: std::sync::Mutex::new(Vec::new()),
        });
        let executor = Arc::new(Executor::new(Arc::clone(&context)));
        // Before recovery, so that nothing is missed between the look and the watch.
        let kernel_events = events::kernel_events(&context);
        recover_all(config, &context).await?;

        let mut tasks = JoinSet::new();
        tasks.spawn(work_queue::run(Arc::clone(&context), work_receiver));
        tasks.spawn(events::watch_workers(Arc::clone(&context), worker_receiver));
        tasks.spawn(events::watch_kernel(Arc::clone(&context), kernel_events));
        tasks.spawn(sweep::sweep(Arc::clone(&context)));
        let (stop_server, stopped) = oneshot::channel();
        let service = ApiService::new(Arc::clone(&executor), config.map.timeout);
        let (calls, metrics_address) = (Arc::new(Calls::default()), metrics.address());
        tasks.spawn(metrics.serve(Source {
            executor: Arc::clone(&executor),
            calls: Arc::clone(&calls),
            started_at_s: service.started_at_s(),
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
        actions::unquiesce_all(self.executor.context(), Instant::now() + DRAIN_LIMIT).await;
        let _ = std::fs::remove_file(&self.socket);
        self.tasks.abort_all();
        tracing::info!("ended: {}", status(&self.executor));
    }

    async fn wait_for_calls(&self) {
        for mapping in self.executor.register().all() {
            while mapping.try_lock().is_err() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }

    async fn unmap_all(&self) {
        let deadline = Instant::now() + UNMAP_LIMIT;
        let mut unmapping = JoinSet::new();
        for mapping in self.executor.register().all() {
            let executor = Arc::clone(&self.executor);
            unmapping.spawn(async move {
                if let Err(error) = executor.unmap(&mapping.name, deadline).await {
                    tracing::warn!(mapping = mapping.name, "stays mapped: {}", error.report());
                }
            });
        }
        while unmapping.join_next().await.is_some() {}
    }
}

/// Recovers what an earlier supervisor left, and looks for what is wrong with this one's surroundings.
async fn recover_all(config: &Config, context: &Arc<Context>) -> Result<()> {
    notify(&[sd_notify::NotifyState::Watchdog]);
    recover::recover(context).await?;
    // After a restart in place the service manager's watchdog goes on, and each of the two may last.
    notify(&[sd_notify::NotifyState::Watchdog]);
    if let Err(error) =
        orphans::clear_orphans(context, Instant::now() + Duration::from_secs(20)).await
    {
        context.found(format!("cannot look for leftovers: {}", error.report()));
    }

    if let Some(group) = config.workers.cgroup.as_deref()
        && let Err(error) = cgroup::check(group)
    {
        context.found(format!("they end with this daemon's: {}", error.report()));
    }
    Ok(())
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
