//! Runs the daemon as a process: handles signals, notifies the service manager, and restarts as another
//! build.

use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Instant, interval};

use super::service_manager::{notify, status};
use super::{Node, Parts, swap_guard};
use crate::blocking;
use crate::config::Config;
use crate::credentials;
use crate::directory::create_private;
use crate::executor::Executor;
use crate::journal::RealDisk;
use crate::kernel_calls::{MAX_COMMANDS, MAX_URGENT, MAX_WAITS};
use crate::record_directory;
use crate::restart;
use crate::workers::{LogPipe, Processes, stderr_is_pipe};
use cleat_backend::Registry;
use cleat_backend::claimant::boot_id;
use cleat_core::clock::SystemClock;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::random::Random;
use cleat_kernel::real::RealKernel;
use cleat_sys::{memory_limit, memory_lock, process};

/// The sum of the limits of all calls that block. No call waits for a thread because calls of another kind
/// hang: the kernel's, the writes to the two directories of records, the opens of credential files, and all
/// others. The rest formats the metrics.
const MAX_THREADS: usize = MAX_COMMANDS
    + MAX_WAITS
    + MAX_URGENT
    + 2 * record_directory::MAX_WRITES
    + credentials::MAX_CONCURRENT
    + credentials::MAX_CHECKS
    + blocking::MAX_CALLS
    + 4;

/// How long a start waits for the sockets and locks of the previous daemon to be free, after a restart as
/// another build has failed.
const RESTART_TIMEOUT: Duration = Duration::from_secs(10);

/// The limit of open files that the daemon gives itself, as in its unit. A mapping has about ten.
const OPEN_FILES: u64 = 65_536;

/// The maximum private writable memory of the supervisor, in bytes. The stacks of its threads, 2 MiB each, take up
/// to 200 MiB of it, and the allocator reserves 1 GiB at a time. Beyond it the daemon ends, and the service
/// manager starts it again, while the workers serve.
const MAX_DATA: u64 = 4 << 30;

/// Returns the work of a service beside the control API, such as CSI, which runs until the daemon ends; `None`
/// if the configuration does not ask for it.
pub type Extension =
    fn(&Config, &Arc<Executor>) -> Option<Pin<Box<dyn Future<Output = ()> + Send>>>;

/// Runs the daemon, with the services `extensions`, until SIGTERM or SIGINT. Logging must have been set up.
///
/// # Errors
/// Returns `InUse` if another daemon runs, and an error if a directory or a socket cannot be created.
pub fn run(config: &Config, registry: Registry, extensions: &[Extension]) -> Result<()> {
    raise_open_files();
    // Before the first thread, because threads inherit it.
    prepare_memory();
    swap_guard::start();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(MAX_THREADS)
        .thread_keep_alive(Duration::from_secs(2))
        .thread_name("cleat-node")
        .enable_all()
        .build()
        .map_err(|error| Error::from_io("cannot start the daemon's threads", error))?;
    let result = runtime.block_on(run_until_signal(config, registry, extensions));
    // A kernel call that hangs must not block the end of the daemon.
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

/// Raises the soft limit of open files, which is 1024 in a shell, as far as the hard limit permits. A failure limits
/// the number of mappings.
fn raise_open_files() {
    let raised =
        getrlimit(Resource::RLIMIT_NOFILE).and_then(|(soft, hard)| match hard.min(OPEN_FILES) {
            wanted if wanted > soft => setrlimit(Resource::RLIMIT_NOFILE, wanted, hard),
            _ => Ok(()),
        });
    if let Err(error) = raised {
        tracing::warn!(%error, "the daemon could not raise its limit of open files");
    }
}

/// Prepares the process for times when memory is short: the supervisor replaces workers that die then, and dirty
/// pages of their devices cannot be written before. A failure makes the daemon less robust, but it can work.
fn prepare_memory() {
    let attempt = |what: &str, outcome: std::io::Result<()>| {
        if let Err(error) = outcome {
            tracing::warn!(%error, "the daemon could not {what}");
        }
    };
    attempt("become an I/O flusher (CAP_SYS_RESOURCE)", process::set_io_flusher());
    attempt("limit its memory", memory_limit::limit_data_softly(MAX_DATA));
    attempt("lock its memory (CAP_IPC_LOCK or RLIMIT_MEMLOCK)", memory_lock::lock_touched_memory());
}

async fn run_until_signal(
    config: &Config,
    registry: Registry,
    extensions: &[Extension],
) -> Result<()> {
    // Installed first: the default actions would end the daemon during its start.
    let mut signals = Signals::new()?;
    restart::reap_children();
    let mut node = start_with_retries(config, registry, Duration::ZERO).await?;
    node.extend(config, extensions);
    while let Some(path) = wait_for_signal(&node, &mut signals).await {
        let now = sd_notify::NotifyState::monotonic_usec_now();
        let now = now.map_err(|error| Error::from_io("cannot read the clock", error))?;
        notify(&[sd_notify::NotifyState::Reloading, now, sd_notify::NotifyState::Watchdog]);
        tracing::info!(executable = %path.display(), "restarting as another build");
        node.stop(false).await;
        // The exec closes all locks and sockets of the daemon.
        let error = restart::exec(&path);
        tracing::error!("the daemon continues with its present build: {}", error.report());
        node = start_with_retries(config, registry, RESTART_TIMEOUT).await?;
        node.extend(config, extensions);
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

/// Starts the daemon, and retries for `timeout` while locks or sockets of the previous daemon are in use.
async fn start_with_retries(
    config: &Config,
    registry: Registry,
    timeout: Duration,
) -> Result<Node> {
    let deadline = Instant::now() + timeout;
    let (directory, modprobe) = (config.runtime_dir.clone(), config.modprobe);
    let log = worker_log(config)?;
    loop {
        let directory = directory.clone();
        let kernel = move || RealKernel::new(&directory).loading_module(modprobe);
        let parts = Parts {
            registry,
            kernel: Box::new(move || Arc::new(kernel())),
            launcher: Arc::new(
                Processes::of_this_executable()
                    .with_log(log.clone())
                    .in_cgroup(config.workers.cgroup.clone())
                    .with_users(config.workers.users, &config.runtime_dir)
                    .allow_missing(config.workers.allow_missing.clone()),
            ),
            clock: Arc::new(SystemClock),
            random: Random::from_kernel()?,
            boot_id: boot_id()?,
            disk: Arc::new(RealDisk),
            halt: None,
        };
        match Node::start(config, parts).await {
            Err(error) if error.kind() == ErrorKind::InUse && Instant::now() < deadline => {
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

/// Returns the stderr of workers that outlive a container, whose own stderr they must not keep.
fn worker_log(config: &Config) -> Result<Option<LogPipe>> {
    if config.workers.cgroup.is_none() || !stderr_is_pipe() {
        return Ok(None);
    }
    create_private(&config.runtime_dir)?;
    LogPipe::open(&config.runtime_dir).map(Some)
}

/// Waits until the daemon is to stop, or to restart as the returned executable.
async fn wait_for_signal(node: &Node, signals: &mut Signals) -> Option<PathBuf> {
    let mut restart = node.executor.context().restart.subscribe();
    let ticks = sd_notify::watchdog_enabled().map_or(Duration::from_secs(10), |limit| limit / 3);
    let mut tick = interval(ticks);
    loop {
        tokio::select! {
            _ = signals.terminate.recv() => return None,
            _ = signals.interrupt.recv() => return None,
            // The executor holds the sender, so the wait fails only after the daemon has ended.
            Ok(path) = restart.wait_for(Option::is_some) => return path.clone(),
            // Its default action would end the daemon when a terminal closes.
            _ = signals.hangup.recv() => tracing::info!(
                "SIGHUP has no effect: the daemon reads its configuration when it starts; devices work \
                 during a restart, and cleat upgrade changes to a new build"
            ),
            _ = tick.tick() => {
                // The status is computed by the runtime's threads: if they hang, no notification is sent and
                // the watchdog ends the daemon.
                let executor = Arc::clone(node.executor());
                let status = tokio::spawn(async move { status(&executor) }).await;
                let status = status.unwrap_or_default();
                notify(&[sd_notify::NotifyState::Watchdog, sd_notify::NotifyState::Status(&status)]);
            }
        }
    }
}
