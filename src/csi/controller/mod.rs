//! The Controller service: creates, removes, lists, clones and grows volumes and their snapshots, and decides which
//! node may use a volume.
//!
//! Nothing about volumes is remembered between calls. The name of a volume in its storage follows from the name in
//! the request (`names`), its id says where it is (`places`), and its labels, which are stored with it, say for which
//! request it was made (`labels`). Every call can therefore be repeated after a crash at any point.
//!
//! What must never happen here: a blocking call on a thread of the runtime; the removal of a volume that this
//! driver did not make; a second call for a volume that is busy; trust in a name whose labels differ.
//!
//! Reading order: `names`, `parameters`, `places`, `labels`, `volumes`, `snapshots`, `groups`, `access`,
//! `service`.

mod access;
mod capacity;
mod connections;
mod group_id;
mod group_service;
mod groups;
mod health;
mod labels;
mod list;
mod local;
mod modify;
mod names;
mod parameters;
mod places;
mod published;
mod reclaim;
mod refused;
mod service;
mod size;
mod snapshot_id;
mod snapshots;
#[cfg(test)]
mod tests;
mod volumes;
mod walk;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use cleat_backend::Registry;
use cleat_backend::store::Store;
use cleat_core::error::{Error, ErrorKind};
use cleat_node::csi_config::CsiConfig;
use tokio::time::{Instant, timeout_at};
use tonic::{Response, Status};

use crate::busy::{Busy, Claimed};
use crate::threads::Threads;
use connections::Connections;
use local::Local;
pub use places::remote_ids;
use published::PublishedHere;
use refused::Answer;
pub(crate) use service::ControllerService;

/// The maximum number of calls that use the storage at the same time. Others wait.
const MAX_THREADS: usize = 16;

/// The maximum number of volumes whose zeroes are freed at the same time. This reads each volume as a whole.
const MAX_RECLAIMS: usize = 2;

/// How long after its deadline a call may take to return its own error.
const ANSWER_MARGIN: Duration = Duration::from_millis(300);

/// The Controller service. Clones share everything.
#[derive(Clone)]
pub(crate) struct Controller {
    config: Arc<CsiConfig>,
    /// The node that this process runs on.
    node: String,
    registry: Registry,
    local: Arc<dyn Local>,
    /// Not that of the Node service: a long copy must not keep a pod from ending.
    busy: Busy,
    threads: Threads,
    /// For work that may take hours.
    reclaims: Threads,
    connections: Connections<Box<dyn Store>>,
    published: PublishedHere,
}

impl Controller {
    /// Creates the controller in the process of the node `node`, which has mapped the volumes of `local`.
    pub(crate) fn new(
        config: Arc<CsiConfig>,
        node: String,
        registry: Registry,
        local: Arc<dyn Local>,
    ) -> Self {
        let (threads, reclaims) = (Threads::new(MAX_THREADS), Threads::new(MAX_RECLAIMS));
        let (busy, connections) = (Busy::default(), Connections::default());
        let published = PublishedHere::default();
        Self { config, node, registry, local, busy, threads, reclaims, connections, published }
    }

    /// Runs `call` as a task of its own, with the volumes and names `keys` busy, so that a caller that disconnects
    /// does not leave a half-finished call. Returns the error of the deadline if the call does not end.
    async fn exclusive<T, F>(
        &self,
        name: &'static str,
        keys: &[String],
        deadline: Instant,
        call: impl FnOnce(Self) -> F,
    ) -> Result<Response<T>, Status>
    where
        T: Send + 'static,
        F: Future<Output = Answer<T>> + Send + 'static,
    {
        self.exclusive_boxed(name, keys, deadline, Box::pin(call(self.clone()))).await
    }

    async fn exclusive_boxed<T: Send + 'static>(
        &self,
        name: &'static str,
        keys: &[String],
        deadline: Instant,
        call: Pin<Box<dyn Future<Output = Answer<T>> + Send>>,
    ) -> Result<Response<T>, Status> {
        let claims: Result<Vec<Claimed>, Error> =
            keys.iter().map(|key| self.busy.claim(key, name)).collect();
        let claims = claims.map_err(|error| crate::status::of(&error))?;
        let task = tokio::spawn(async move {
            let _claims = claims;
            call.await
        });
        let shown = keys.first().map_or("", String::as_str);
        let answer = match timeout_at(deadline + ANSWER_MARGIN, task).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => {
                let message = "internal: the call panicked";
                Err(Error::new(ErrorKind::Internal, message).with_source(error).into())
            }
            Err(_) => {
                let message = format!("{name} {shown} continues in the background");
                Err(Error::new(ErrorKind::TimedOut, message).with_repair("repeat the call").into())
            }
        };
        answer.map(Response::new).map_err(|refused| {
            let report = refused.error().report();
            tracing::warn!(volume = shown, node = self.node, "{name}: {report}");
            refused.status()
        })
    }

    /// Runs `work`, which may block, on a thread of its own. The thread continues if the returned future is
    /// dropped.
    ///
    /// # Errors
    /// Returns `Unavailable` if no thread becomes free until `deadline`, and the error of `work` otherwise.
    async fn on_thread<T: Send + 'static>(
        &self,
        deadline: Instant,
        work: impl FnOnce(&Self) -> Answer<T> + Send + 'static,
    ) -> Answer<T> {
        let this = self.clone();
        let work = move || {
            let answer = work(&this);
            if let Err(refused) = &answer {
                this.connections.close_after(refused.error().kind());
            }
            answer
        };
        self.threads.run(deadline, work).await
    }

    /// Runs `work`, which may block, as [`Controller::exclusive`] runs a call.
    async fn blocking<T: Send + 'static>(
        &self,
        name: &'static str,
        keys: &[String],
        deadline: Instant,
        work: impl FnOnce(&Self) -> Answer<T> + Send + 'static,
    ) -> Result<Response<T>, Status> {
        self.exclusive(
            name,
            keys,
            deadline,
            |this| async move { this.on_thread(deadline, work).await },
        )
        .await
    }
}
