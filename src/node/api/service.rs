//! The control API: `proto/cleat/v1/node.proto` over a unix socket.
//!
//! A call that changes a mapping runs as a separate task, so that a client that disconnects does not leave a
//! half-finished mapping. The number of calls and streams and the size of messages are limited.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, broadcast, mpsc};
use tokio::time::{Instant, MissedTickBehavior, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::service::Interceptor;
use tonic::transport::server::UdsConnectInfo;
use tonic::{Request, Response, Status};

use super::{convert, validate};
use crate::executor::{Executor, NewSize};
use crate::mapping::{Mapping, View};
use crate::naming;
use crate::record_directory::Problem;
use cleat_api::v1 as api;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_worker_protocol::version::{BUILD, binary_id};

/// The maximum size of a request, in bytes. It exceeds the longest URI and name many times.
pub(crate) const MAX_MESSAGE: usize = 64 * 1024;

/// The maximum number of calls in progress that change a mapping.
const MAX_CALLS: usize = 512;

/// The maximum number of open streams.
const MAX_STREAMS: usize = 128;

/// The timeout of a forced unmap that sets none.
const FORCE_TIMEOUT: Duration = Duration::from_secs(5);

/// The timeout for finding the holders of all devices that have no record.
const HOLDERS_TIMEOUT: Duration = Duration::from_secs(2);

/// How long after its deadline a call may take to return its own error. After that, the client gets an error
/// and the call continues, for example because a disk hangs or steps are being undone.
const ANSWER_MARGIN: Duration = Duration::from_secs(1);

/// The timeout of queries.
const QUERY_TIMEOUT: Duration = Duration::from_secs(10);

/// The shortest interval of statistics, in milliseconds.
const MIN_INTERVAL_MS: u32 = 100;

/// The service of the control API.
#[derive(Clone)]
pub(crate) struct ApiService {
    executor: Arc<Executor>,
    timeout: Duration,
    calls: Arc<Semaphore>,
    streams: Arc<Semaphore>,
    started: Instant,
    started_at_s: u64,
}

/// Accepts only connections of root and of the daemon's user. The socket's mode has the same effect, but an
/// administrator may change it.
#[derive(Debug, Clone, Copy)]
pub struct PeerCheck;

impl Interceptor for PeerCheck {
    fn call(&mut self, request: Request<()>) -> Result<Request<()>, Status> {
        let peer = request.extensions().get::<UdsConnectInfo>().and_then(|info| info.peer_cred);
        let own = nix::unistd::geteuid().as_raw();
        match peer {
            Some(peer) if peer.uid() == 0 || peer.uid() == own => Ok(request),
            _ => {
                let message = "permission denied: only root may use this daemon";
                let error = Error::new(ErrorKind::PermissionDenied, message);
                Err(convert::status(&error.with_repair("run the command with sudo")))
            }
        }
    }
}

impl ApiService {
    /// Creates the service of `executor`. `timeout` applies to calls that set none.
    pub(crate) fn new(executor: Arc<Executor>, timeout: Duration) -> Self {
        let started_at_s = executor.context().clock.unix_s();
        Self {
            executor,
            timeout,
            calls: Arc::new(Semaphore::new(MAX_CALLS)),
            streams: Arc::new(Semaphore::new(MAX_STREAMS)),
            started: Instant::now(),
            started_at_s,
        }
    }

    /// Returns when the daemon started, in seconds since the epoch.
    pub(crate) fn started_at_s(&self) -> u64 {
        self.started_at_s
    }

    /// Runs a call as a separate task, and returns its result or, [`ANSWER_MARGIN`] after `deadline`, an
    /// error.
    async fn detached<T: Send + 'static>(
        &self,
        deadline: Instant,
        call: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<Response<T>, Status> {
        let permit = acquire(&self.calls)?;
        let task = tokio::spawn(async move {
            let _permit = permit;
            call.await
        });
        match timeout_at(deadline + ANSWER_MARGIN, task).await {
            Err(_) => {
                let message = "the call has not ended in time and continues in the background";
                let late = Error::new(ErrorKind::TimedOut, message);
                Err(convert::status(&late.with_repair("see cleat status and the daemon's log")))
            }
            Ok(Ok(result)) => result.map(Response::new).map_err(|error| convert::status(&error)),
            Ok(Err(error)) => {
                let failed = Error::new(ErrorKind::Internal, "internal: the call panicked")
                    .with_source(error);
                Err(convert::status(&failed))
            }
        }
    }

    fn stream_permit(&self) -> Result<OwnedSemaphorePermit, Status> {
        acquire(&self.streams)
    }

    async fn list_all(&self) -> Result<Vec<api::Mapping>> {
        let mut mappings: Vec<api::Mapping> =
            self.executor.register().all().iter().map(|v| convert::mapping(&v.view())).collect();
        let orphans = self.executor.orphans(Instant::now() + QUERY_TIMEOUT).await?;
        let deadline = Instant::now() + HOLDERS_TIMEOUT;
        for (device, identity) in orphans {
            let forced = self.executor.is_force_disconnected(device.index, &identity);
            // The device is listed even if its holders cannot be found.
            let holders = self.executor.holders(device.index, deadline).await.unwrap_or_default();
            mappings.push(convert::orphan(&device, &identity, forced, &holders));
        }
        Ok(mappings)
    }

    async fn mappings(&self, target: &str) -> Result<Vec<Arc<Mapping>>, Status> {
        if target.is_empty() {
            return Ok(self.executor.register().all());
        }
        let target = checked(validate::target(target.to_owned()))?;
        let mapping = self.executor.get(&target, Instant::now() + QUERY_TIMEOUT).await;
        Ok(vec![checked(mapping)?])
    }

    fn statistics(&self, mappings: &[Arc<Mapping>]) -> api::StatsResponse {
        let counted = mappings.iter().filter_map(|mapping| {
            let page = mapping.statistics()?;
            Some(convert::statistics(&mapping.view(), &page.snapshot()))
        });
        let at_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        let latency_bounds_ns = convert::latency_bounds_ns();
        api::StatsResponse { volumes: counted.collect(), at_ms, latency_bounds_ns }
    }
}

type Streamed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl api::node_server::Node for ApiService {
    type WatchStream = Streamed<api::WatchEvent>;
    type StatsStream = Streamed<api::StatsResponse>;
    type UpgradeStream = Streamed<api::UpgradeEvent>;

    async fn map(
        &self,
        request: Request<api::MapRequest>,
    ) -> Result<Response<api::Mapping>, Status> {
        let mut request = request.into_inner();
        let default = self.timeout + self.executor.extra_open_time(&request.uri);
        let deadline = Instant::now() + checked(validate::timeout(request.timeout_ms, default))?;
        if request.name.is_empty() {
            request.name = naming::derived_name(&request.uri);
        }
        let spec = checked(convert::map_spec(request))?;
        let executor = Arc::clone(&self.executor);
        self.detached(deadline, async move {
            executor.map(&spec, deadline).await.map(|view| convert::mapping(&view))
        })
        .await
    }

    async fn unmap(
        &self,
        request: Request<api::UnmapRequest>,
    ) -> Result<Response<api::UnmapResponse>, Status> {
        let request = request.into_inner();
        let unmount = convert::unmount(request.unmount());
        let default = if request.force { FORCE_TIMEOUT } else { self.timeout };
        let deadline = Instant::now() + checked(validate::timeout(request.timeout_ms, default))?;
        let target = checked(validate::target(request.target))?;
        let executor = Arc::clone(&self.executor);
        if request.force {
            let call = async move {
                let forced = executor.force_unmap(&target, unmount, deadline).await?;
                Ok(convert::forced(forced.as_ref()))
            };
            return self.detached(deadline, call).await;
        }
        self.detached(deadline, async move {
            let was_mapped = executor.unmap(&target, deadline).await?;
            Ok(api::UnmapResponse { was_mapped, ..api::UnmapResponse::default() })
        })
        .await
    }

    async fn list(
        &self,
        _: Request<api::ListRequest>,
    ) -> Result<Response<api::ListResponse>, Status> {
        let mappings = checked(self.list_all().await)?;
        Ok(Response::new(api::ListResponse { mappings }))
    }

    async fn get(
        &self,
        request: Request<api::GetRequest>,
    ) -> Result<Response<api::Mapping>, Status> {
        let request = request.into_inner();
        let target = checked(validate::target(request.target))?;
        let deadline = Instant::now() + QUERY_TIMEOUT;
        let mut view: View = checked(self.executor.get(&target, deadline).await)?.view();
        if let Some(device) = view.device.filter(|_| request.with_holders) {
            view.holders = checked(self.executor.holders(device.index, deadline).await)?;
        }
        Ok(Response::new(convert::mapping(&view)))
    }

    async fn watch(
        &self,
        _: Request<api::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let permit = self.stream_permit()?;
        let (sender, receiver) = mpsc::channel(64);
        let executor = Arc::clone(&self.executor);
        tokio::spawn(async move {
            let _permit = permit;
            watch(&executor, &sender).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn resize(
        &self,
        request: Request<api::ResizeRequest>,
    ) -> Result<Response<api::Mapping>, Status> {
        let request = request.into_inner();
        let target = checked(validate::target(request.target))?;
        let deadline = self.deadline(0)?;
        let executor = Arc::clone(&self.executor);
        self.detached(deadline, async move {
            let wanted = NewSize { bytes: request.size_bytes, shrink: request.allow_shrink };
            let view = executor.resize(&target, wanted, deadline).await?;
            Ok(convert::mapping(&view))
        })
        .await
    }

    async fn stats(
        &self,
        request: Request<api::StatsRequest>,
    ) -> Result<Response<Self::StatsStream>, Status> {
        let request = request.into_inner();
        if (1..MIN_INTERVAL_MS).contains(&request.interval_ms) {
            let message =
                format!("the interval of statistics must be at least {MIN_INTERVAL_MS} ms");
            return Err(convert::status(&Error::new(ErrorKind::InvalidArgument, message)));
        }
        let mappings = self.mappings(&request.target).await?;
        if request.interval_ms == 0 {
            let once = Ok(self.statistics(&mappings));
            return Ok(Response::new(Box::pin(tokio_stream::once(once))));
        }
        let permit = self.stream_permit()?;
        let (sender, receiver) = mpsc::channel(1);
        let service = self.clone();
        tokio::spawn(async move {
            let _permit = permit;
            let mut tick =
                tokio::time::interval(Duration::from_millis(u64::from(request.interval_ms)));
            tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
            loop {
                tick.tick().await;
                // New mappings are included. A stream for one mapping ends with it.
                let found = match service.mappings(&request.target).await {
                    Ok(mappings) => Ok(service.statistics(&mappings)),
                    Err(status) => Err(status),
                };
                let last = found.is_err();
                if sender.send(found).await.is_err() || last {
                    return;
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn upgrade(
        &self,
        request: Request<api::UpgradeRequest>,
    ) -> Result<Response<Self::UpgradeStream>, Status> {
        let permit = self.stream_permit()?;
        let events = self.executor.upgrade(request.into_inner(), self.timeout).await;
        let events = ReceiverStream::new(checked(events)?).map(move |event| {
            let _permit = &permit;
            event
        });
        Ok(Response::new(Box::pin(events)))
    }

    async fn health(
        &self,
        _: Request<api::HealthRequest>,
    ) -> Result<Response<api::HealthResponse>, Status> {
        Ok(Response::new(api::HealthResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            started_at_s: self.started_at_s,
            checks: self.checks().await,
            build: BUILD.to_owned(),
            binary: binary_id(std::path::Path::new("/proc/self/exe")),
        }))
    }

    async fn set_options(
        &self,
        request: Request<api::SetOptionsRequest>,
    ) -> Result<Response<api::Mapping>, Status> {
        let request = request.into_inner();
        let target = checked(validate::target(request.target))?;
        let change = checked(convert::policy_change(
            &request.on_outage,
            request.iops,
            request.bytes_per_s,
            &request.busy_poll,
        ))?;
        let deadline = self.deadline(0)?;
        let executor = Arc::clone(&self.executor);
        let renew = request.renew_credentials;
        self.detached(deadline, async move {
            if renew {
                let view = executor.renew_credentials(&target, deadline).await?;
                if change.is_empty() {
                    return Ok(convert::mapping(&view));
                }
            }
            let view = executor.set_policy(&target, change, deadline).await?;
            Ok(convert::mapping(&view))
        })
        .await
    }
}

impl ApiService {
    /// Replaces the faults that a `fault:` volume injects.
    #[cfg(feature = "fault")]
    pub(super) async fn set_fault(
        &self,
        target: String,
        plan: String,
    ) -> Result<Response<api::SetFaultResponse>, Status> {
        let target = checked(validate::target(target))?;
        let deadline = self.deadline(0)?;
        let executor = Arc::clone(&self.executor);
        self.detached(deadline, async move {
            executor.set_fault(&target, &plan, deadline).await?;
            Ok(api::SetFaultResponse {})
        })
        .await
    }

    fn deadline(&self, timeout_ms: u32) -> Result<Instant, Status> {
        Ok(Instant::now() + checked(validate::timeout(timeout_ms, self.timeout))?)
    }

    async fn checks(&self) -> Vec<api::Check> {
        use api::check::Verdict;
        let check = |name: &str, verdict: Verdict, finding: String, repair: String| api::Check {
            name: name.to_owned(),
            verdict: verdict.into(),
            finding,
            repair,
        };
        let mut checks = Vec::new();
        checks.push(match self.executor.orphans(Instant::now() + QUERY_TIMEOUT).await {
            Ok(orphans) if orphans.is_empty() => {
                check("kernel", Verdict::Ok, "nbd devices can be read".into(), String::new())
            }
            Ok(orphans) => check(
                "kernel",
                Verdict::Warning,
                format!("{} devices of cleat have no record", orphans.len()),
                "cleat ls lists them; cleat map URI --name NAME adopts one, cleat unmap /dev/nbdN removes one"
                    .into(),
            ),
            Err(error) => check(
                "kernel",
                Verdict::Error,
                error.report(),
                error.repair().unwrap_or("run cleat doctor").to_owned(),
            ),
        });
        let views: Vec<View> =
            self.executor.register().all().iter().map(|mapping| mapping.view()).collect();
        let failed: Vec<&str> = views
            .iter()
            .filter(|view| matches!(view.state, crate::planner::State::Failed(_)))
            .map(|view| view.record.name.as_str())
            .collect();
        checks.push(match failed.as_slice() {
            [] => check("mappings", Verdict::Ok, format!("{}", views.len()), String::new()),
            names => check(
                "mappings",
                Verdict::Error,
                format!("{} of {} have failed: {}", names.len(), views.len(), names.join(", ")),
                format!("cleat status {} shows the cause and what to do", names[0]),
            ),
        });
        if let Some(Problem { message, repair }) = self.executor.state_directory_problem() {
            checks.push(check("state directory", Verdict::Error, message, repair));
        }
        for (service, Problem { message, repair }) in self.executor.service_problems() {
            checks.push(check(service, Verdict::Error, message, repair));
        }
        for finding in self.executor.findings() {
            let repair = "for information; not shown after the next start of the daemon".to_owned();
            checks.push(check("recovery", Verdict::Warning, finding, repair));
        }
        checks
    }
}

/// Sends all mappings, then every change, until the client disconnects. A client that is too slow for the
/// changes gets all mappings again.
async fn watch(executor: &Executor, sender: &mpsc::Sender<Result<api::WatchEvent, Status>>) {
    let event =
        |view: &View, removed| api::WatchEvent { mapping: Some(convert::mapping(view)), removed };
    let mut changes = executor.watch();
    let mut sent = std::collections::BTreeMap::new();
    loop {
        let mappings = executor.register().all();
        let ids: std::collections::BTreeSet<&String> =
            mappings.iter().map(|mapping| &mapping.mapping_id).collect();
        sent.retain(|id, _| !ids.contains(id));
        for (_, view) in std::mem::take(&mut sent) {
            if sender.send(Ok(event(&view, true))).await.is_err() {
                return;
            }
        }
        for mapping in &mappings {
            let view = mapping.view();
            if sender.send(Ok(event(&view, false))).await.is_err() {
                return;
            }
            sent.insert(mapping.mapping_id.clone(), view);
        }
        loop {
            let change = tokio::select! {
                change = changes.recv() => change,
                () = sender.closed() => return,
            };
            let change = match change {
                Ok(change) => change,
                Err(broadcast::error::RecvError::Lagged(_)) => break,
                Err(broadcast::error::RecvError::Closed) => return,
            };
            let id = change.view.record.mapping_id.clone();
            if change.removed {
                sent.remove(&id);
            } else {
                sent.insert(id, change.view.clone());
            }
            if sender.send(Ok(event(&change.view, change.removed))).await.is_err() {
                return;
            }
        }
    }
}

fn acquire(semaphore: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, Status> {
    Arc::clone(semaphore).try_acquire_owned().map_err(|_| {
        let error = Error::new(ErrorKind::NoSpace, "too many calls are in progress");
        convert::status(&error.with_repair("try again in a moment"))
    })
}

fn checked<T>(result: Result<T>) -> Result<T, Status> {
    result.map_err(|error| convert::status(&error))
}
