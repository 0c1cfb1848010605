//! Runs the daemon as a process: signals, the service manager, a restart as another build.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Instant, interval};

use super::service_manager::{notify, status};
use super::{Node, Parts};
use crate::config::Config;
use crate::kernel_calls::{MAX_COMMANDS, MAX_URGENT, MAX_WAITS};
use crate::restart;
use crate::workers::Processes;
use cleat_backend::Registry;
use cleat_backend::claimant::boot_id;
use cleat_core::clock::SystemClock;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::random::Random;
use cleat_kernel::real::RealKernel;

/// For what is left of the daemon before, when it could not go on as another build.
const RESTART_LIMIT: Duration = Duration::from_secs(10);

/// Runs the daemon until SIGTERM or SIGINT. Logs must have been set up.
///
/// # Errors
/// When it cannot start: another one runs, directories cannot be made, the socket is taken.
pub fn run(config: &Config, registry: Registry) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        // Beyond the kernel's calls: journal, launches.
        .max_blocking_threads(MAX_COMMANDS + MAX_WAITS + MAX_URGENT + 16)
        .thread_keep_alive(Duration::from_secs(2))
        .thread_name("cleat-node")
        .enable_all()
        .build()
        .map_err(|error| Error::from_io("the daemon cannot start", error))?;
    let result = runtime.block_on(run_until_signal(config, registry));
    // A kernel call that hangs must not keep the daemon from ending.
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

async fn run_until_signal(config: &Config, registry: Registry) -> Result<()> {
    // From the first moment on: their default would end the daemon half started.
    let mut signals = Signals::new()?;
    restart::reap_children();
    let mut node = start_with_retries(config, registry, Duration::ZERO).await?;
    while let Some(path) = wait_for_signal(&node, &mut signals).await {
        let now = sd_notify::NotifyState::monotonic_usec_now();
        let now = now.map_err(|error| Error::from_io("cannot read the clock", error))?;
        notify(&[sd_notify::NotifyState::Reloading, now, sd_notify::NotifyState::Watchdog]);
        tracing::info!(executable = %path.display(), "going on as another build");
        node.end(false).await;
        // What was held is closed by it: locks, sockets, the control API's and those to workers.
        let error = restart::exec(&path);
        tracing::error!("everything stays as it was: {}", error.report());
        node = start_with_retries(config, registry, RESTART_LIMIT).await?;
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
async fn start_with_retries(config: &Config, registry: Registry, limit: Duration) -> Result<Node> {
    let until = Instant::now() + limit;
    let (directory, modprobe) = (config.runtime_dir.clone(), config.modprobe);
    loop {
        let directory = directory.clone();
        let kernel = move || RealKernel::new(&directory).loading_module(modprobe);
        let parts = Parts {
            registry,
            kernel: Box::new(move || Arc::new(kernel())),
            launcher: Arc::new(
                Processes::of_this_executable().in_cgroup(config.workers.cgroup.clone()),
            ),
            clock: Arc::new(SystemClock),
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
async fn wait_for_signal(node: &Node, signals: &mut Signals) -> Option<PathBuf> {
    let mut restart = node.executor.context().restart.subscribe();
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
