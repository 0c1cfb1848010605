//! The controller as a process: reaches the API server, waits to become the leader, leads, and stops on a signal.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::random::Random;
use kube::Client;
use kube::api::{Api, ApiResource, ListParams};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::api::{call, message};
use crate::attach_detach;
use crate::call_server::CallAnswer;
use crate::client::connect_counted;
use crate::cluster::Cluster;
use crate::config::Config;
use crate::grant::VolumeGrant;
use crate::guard::Raw;
use crate::leader::lead;
use crate::lease::Election;
use crate::metrics::Metrics;
use crate::server::{Role, Server};
use crate::standby;
use crate::storage::Storage;

/// The time between two attempts to reach the API server.
const RETRY: Duration = Duration::from_secs(2);

/// How long the controller may take to give up the lease when it ends.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(3);

/// The maximum number of calls to storages that block at the same time.
const MAX_BLOCKING: usize = 64;

/// Runs the controller until SIGTERM or SIGINT. Logging must have been set up.
///
/// # Errors
/// Returns an error if the kubeconfig cannot be read, if the address is in use, if the API server refuses the
/// controller, or if the custom resource definition of grants is missing.
pub fn run(config: &Config, storage: Arc<dyn Storage>) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(MAX_BLOCKING)
        .thread_name("cleat-controller")
        .enable_all()
        .build()
        .map_err(|error| Error::from_io("cannot start the controller's threads", error))?;
    let result = runtime.block_on(async {
        let stop = stop_signal()?;
        run_until(config, storage, Box::pin(stop)).await
    });
    // A call of a storage that hangs must not block the end of the process.
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

/// Completes when the controller is to end.
pub type Stop = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Runs the controller until `stop` completes.
///
/// # Errors
/// As [`run`].
pub fn run_until(config: &Config, storage: Arc<dyn Storage>, stop: Stop) -> CallAnswer<'_, ()> {
    Box::pin(work_until(config, storage, stop))
}

async fn work_until(config: &Config, storage: Arc<dyn Storage>, stop: Stop) -> Result<()> {
    let metrics = Arc::new(Metrics::default());
    let (role, watched) = watch::channel(Role::Starting);
    let server = match config.listen {
        Some(address) => Some(Server::bind(address).await?),
        None => None,
    };
    let served = server.map(|server| tokio::spawn(server.serve(Arc::clone(&metrics), watched)));
    let client = connect_counted(config.kubeconfig.as_deref(), Arc::clone(&metrics)).await?;
    let leases = Api::namespaced(client.clone(), config.namespace(&client));
    let mut election = Election::new(leases, &config.lease(), &config.identity, config.election);
    let result = tokio::select! {
        () = stop => Ok(()),
        result = serve(config, &client, &storage, &metrics, &role, &mut election) => result,
    };
    if *role.borrow() != Role::Starting {
        // Nothing works any more: the next leader may begin.
        let _ = tokio::time::timeout(RELEASE_TIMEOUT, election.release()).await;
    }
    if let Some(served) = served {
        served.abort();
    }
    tracing::info!("the controller ends");
    result
}

/// Waits for the lease, leads, and waits again when it is lost.
async fn serve(
    config: &Config,
    client: &Client,
    storage: &Arc<dyn Storage>,
    metrics: &Arc<Metrics>,
    role: &watch::Sender<Role>,
    election: &mut Election,
) -> Result<()> {
    wait_for_definition(client).await?;
    if config.attach_detach {
        attach_detach::check(client, &config.driver).await?;
    }
    loop {
        role.send_replace(Role::Standby);
        tracing::info!(lease = config.lease(), "waiting for the lease");
        let candidate = || -> Result<Cluster> {
            let (storage, metrics) = (Arc::clone(storage), Arc::clone(metrics));
            Ok(Cluster::new(client, config, storage, metrics, Random::from_kernel()?))
        };
        let beats = standby::until(election.acquire(), candidate()?).await;
        role.send_replace(Role::Syncing);
        // Its mirrors are empty: the leader lists all objects itself.
        let cluster = Cluster { beats, ..candidate()? };
        let lost = tokio::select! {
            error = lead(Arc::new(cluster), role) => return Err(error),
            lost = election.hold() => lost,
        };
        metrics.reset();
        tracing::warn!("not the leader any more: {}", lost.report());
    }
}

/// Waits until the API server answers, and checks that it has the custom resource.
async fn wait_for_definition(client: &Client) -> Result<()> {
    // The first grant may be one that cannot be read.
    let kind = ApiResource::erase::<VolumeGrant>(&());
    let grants: Api<Raw> = Api::all_with(client.clone(), &kind);
    let mut reported = false;
    loop {
        let parameters = ListParams::default().limit(1);
        let what = || "cannot list the grants".to_owned();
        let Err(error) = call(what, grants.list(&parameters)).await else { return Ok(()) };
        match error.kind() {
            ErrorKind::NotFound => {
                let message = "the custom resource definition of grants is not installed";
                let repair = "run: cleat controller --print-crd | kubectl apply -f -";
                return Err(Error::new(ErrorKind::NotFound, message).with_repair(repair));
            }
            ErrorKind::Unavailable | ErrorKind::TimedOut => {
                if !reported {
                    tracing::warn!("{}; trying again", message(&error));
                }
                reported = true;
                tokio::time::sleep(RETRY).await;
            }
            _ => return Err(error),
        }
    }
}

/// Returns a future that completes at the first SIGTERM or SIGINT. The signals are handled from now on.
fn stop_signal() -> Result<impl Future<Output = ()>> {
    let failed = |error| Error::from_io("cannot handle signals", error);
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}
