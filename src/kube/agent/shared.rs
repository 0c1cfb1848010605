//! What the tasks and the calls of the agent share.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::random::Random;
use tokio::sync::watch;

use super::node::NodeVolumes;
use super::volume::AgentVolume;
use crate::grant::{VolumeGrant, grant_name};
use crate::kind::Kind;
use crate::queue::Queue;

/// The settings of an agent.
#[derive(Debug, Clone)]
pub struct AgentConfig {
    /// The kubeconfig file. Without it, that of the environment or the service account of the pod is used.
    pub kubeconfig: Option<PathBuf>,
    /// The name of the CSI driver.
    pub driver: String,
    /// The name of the node in Kubernetes.
    pub node: String,
    /// The hash of its machine id, as the records of claims have it; empty if it is not known.
    pub machine: String,
    /// How long a revoked volume may stay in use before it is unmapped by force, in seconds. `None`: until it is
    /// fenced.
    pub force_after_s: Option<u64>,
}

/// The agent of a node. Clones are the same agent.
#[derive(Debug, Clone)]
pub struct Agent(pub(super) Arc<Shared>);

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) config: AgentConfig,
    pub(super) node: Arc<dyn NodeVolumes>,
    /// The names of the grants to look at.
    pub(super) queue: Queue<String>,
    /// The grants of the node, as soon as there is a client of the API server.
    pub(super) grants: OnceLock<Kind<VolumeGrant>>,
    /// Changes whenever a waiting call may be answered.
    pub(super) changes: watch::Sender<()>,
    /// Why the API server cannot be reached; `None` if it can, or if the agent has not tried yet.
    connection: Mutex<Option<String>>,
    volumes: Mutex<BTreeMap<String, AgentVolume>>,
}

impl Agent {
    /// Makes an agent. It works while [`Agent::run`] does.
    ///
    /// # Errors
    /// Returns an error if the kernel gives no random numbers.
    pub fn new(config: AgentConfig, node: Arc<dyn NodeVolumes>) -> Result<Self> {
        Ok(Self(Arc::new(Shared {
            config,
            node,
            queue: Queue::new(Random::from_kernel()?),
            grants: OnceLock::new(),
            changes: watch::Sender::new(()),
            connection: Mutex::default(),
            volumes: Mutex::default(),
        })))
    }

    /// Has the volumes looked at whose mappings have changed: those whose handles `is_changed` accepts.
    pub fn mappings_changed(&self, is_changed: impl Fn(&str) -> bool) {
        for (name, volume) in self.0.volumes().iter() {
            if is_changed(&volume.handle) {
                self.0.queue.add(name.clone());
            }
        }
    }
}

impl Shared {
    pub(super) fn volumes(&self) -> MutexGuard<'_, BTreeMap<String, AgentVolume>> {
        self.volumes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state of a volume. Returns `None` if there is none.
    pub(super) fn with<T>(
        &self,
        name: &str,
        change: impl FnOnce(&mut AgentVolume) -> T,
    ) -> Option<T> {
        self.volumes().get_mut(name).map(change)
    }

    pub(super) fn name_of(&self, handle: &str) -> String {
        grant_name(&self.config.driver, handle)
    }

    /// Returns whether the grants of the node were listed once.
    pub(super) fn is_listed(&self) -> bool {
        self.grants.get().is_some_and(|grants| grants.mirror.is_complete())
    }

    /// Returns the last known grant.
    pub(super) fn grant(&self, name: &str) -> Option<Arc<VolumeGrant>> {
        self.grants.get()?.mirror.get(name)
    }

    /// Returns why the API server cannot be reached; `None` if it can, as far as the agent knows.
    pub(super) fn outage(&self) -> Option<String> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Notes that the API server has answered. After an outage, has everything looked at.
    pub(super) fn reached(&self) {
        let was = self.connection.lock().unwrap_or_else(PoisonError::into_inner).take();
        if was.is_some() {
            tracing::info!("the API server answers");
            self.look_at_all();
            self.report();
        }
    }

    /// Notes that a call of the API server has failed, if the reason is the connection.
    pub(super) fn failed(&self, error: &Error) {
        if !matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::TimedOut) {
            return;
        }
        let text = error.report();
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = connection.as_ref() != Some(&text);
        if connection.is_none() {
            tracing::warn!(
                "the API server cannot be reached: {text}; mappings stay, and nothing new is mapped"
            );
        }
        *connection = Some(text);
        drop(connection);
        if is_new {
            self.report();
            self.changes.send_replace(());
        }
    }

    /// Has every volume and every grant looked at.
    pub(super) fn look_at_all(&self) {
        let known: Vec<String> = self.volumes().keys().cloned().collect();
        let granted = self.grants.get().map(|grants| grants.mirror.all()).unwrap_or_default();
        let granted = granted.iter().filter_map(|grant| grant.metadata.name.clone());
        for name in known.into_iter().chain(granted) {
            self.queue.add(name);
        }
    }

    /// Notes the result of the work on a volume. An error is logged when it differs from the last one.
    pub(super) fn note(&self, name: &str, error: Option<&Error>) {
        let text = error.map(crate::api::message);
        let changed = self.with(name, |volume| {
            let changed = volume.problem != text;
            volume.problem.clone_from(&text);
            changed.then(|| volume.handle.clone())
        });
        if let Some(handle) = changed.flatten() {
            match text {
                Some(text) => tracing::warn!(volume = handle, "{text}"),
                None => {
                    tracing::info!(volume = handle, "the agent has no problem with it any more")
                }
            }
            self.report();
        }
    }

    /// Shows what is wrong: the connection, or the first volume.
    fn report(&self) {
        let volumes = || {
            let volumes = self.volumes();
            let mut failed = volumes
                .values()
                .filter_map(|volume| Some((volume.handle.clone(), volume.problem.clone()?)));
            let (handle, problem) = failed.next()?;
            let more = failed.count();
            Some(format!("volume {handle}: {problem} (and {more} other volumes)"))
        };
        let problem = match self.outage() {
            Some(why) => {
                let error = Error::new(ErrorKind::Unavailable, format!("no grants: {why}"));
                Some(error.with_repair("check the API server, csi.kubeconfig and the network"))
            }
            None => volumes().map(|text| Error::new(ErrorKind::Internal, text)),
        };
        self.node.report(problem);
    }
}
