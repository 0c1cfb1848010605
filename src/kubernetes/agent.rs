//! Joins the agent for grants (`cleat_kube::agent`) with the CSI driver and the supervisor of this node.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_csi::{
    Driver, Grants, Kept, PREFIX, Permission, Usage, VolumeId, is_shared, mapping_name,
};
use cleat_grants::agent::MappingState;
use cleat_grants::object::{Generation, Mode};
use cleat_grants::record::Record;
use cleat_grants::storage::Fencing;
use cleat_kube::agent::{
    Admission, Agent, AgentConfig, Answer, NodeVolumes, Observed, ObservedMapping,
};
use cleat_node::blocking::blocking;
use cleat_node::config::Config;
use cleat_node::executor::Executor;
use cleat_node::mapping::View;
use cleat_node::planner::{Intent, State};
use tokio::sync::broadcast::error::RecvError;
use tokio::time::Instant;

use super::granted_volumes::GrantedVolumes;
use crate::backends::REGISTRY;

/// The timeout of a call to the storage.
const STORAGE_TIMEOUT: Duration = Duration::from_secs(30);

/// The timeout of a read that shows that a device works.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

/// The timeout of an unmap.
const UNMAP_TIMEOUT: Duration = Duration::from_secs(20);

/// Work that runs until it is dropped.
pub type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Requires grants for the volumes of `driver`. Returns the driver, and the work of the agent.
///
/// # Errors
/// Returns an error if the kernel gives no random numbers.
pub fn with_grants(
    driver: Driver,
    config: &Config,
    executor: &Arc<Executor>,
) -> Result<(Driver, Work)> {
    let csi = &config.csi;
    let force_after = csi.force_revoked_after;
    let settings = AgentConfig {
        kubeconfig: csi.kubeconfig.clone(),
        driver: csi.driver.clone(),
        node: executor.node_name().to_owned(),
        machine: cleat_sys::host::machine_id_hash(),
        force_after_s: (!force_after.is_zero()).then_some(force_after.as_secs()),
    };
    let node = Node {
        driver: driver.clone(),
        executor: Arc::clone(executor),
        granted: GrantedVolumes::new(config.state_dir.join("grants")),
    };
    let agent = Agent::new(settings, Arc::new(node))?;
    let (grants, executor) = (Arc::new(NodeGrants(agent.clone())), Arc::clone(executor));
    let work = async move {
        tokio::select! {
            () = forward(&agent, &executor) => {}
            () = agent.run() => {}
        }
    };
    Ok((driver.with_grants(grants), Box::pin(work)))
}

/// Tells the agent which mappings have changed.
async fn forward(agent: &Agent, executor: &Executor) {
    let mut changes = executor.watch();
    loop {
        match changes.recv().await {
            Ok(change) => {
                let name = &change.view.record.name;
                if name.starts_with(PREFIX) {
                    agent.mappings_changed(|handle| mapping_name(handle) == *name);
                }
            }
            Err(RecvError::Lagged(_)) => agent.mappings_changed(|_| true),
            Err(RecvError::Closed) => return,
        }
    }
}

/// The grants, as the CSI driver asks for them.
#[derive(Debug)]
struct NodeGrants(Agent);

#[derive(Debug)]
struct KeptAdmission(#[expect(dead_code, reason = "its drop tells the agent")] Admission);

impl Kept for KeptAdmission {}

#[tonic::async_trait]
impl Grants for NodeGrants {
    async fn admit(&self, id: &str, deadline: Instant) -> Result<Permission> {
        match VolumeId::parse(id) {
            // No other node reaches a file.
            Some(VolumeId::File { .. }) => Ok(Permission::default()),
            Some(VolumeId::Rbd { .. } | VolumeId::Object { .. }) => {
                let admission = self.0.admit(id, deadline).await?;
                let generation = admission.generation().0;
                let usage = Some(match admission.mode() {
                    Mode::ReadWrite => Usage::Writer,
                    Mode::SharedReadWrite => Usage::SharedWriter,
                    Mode::ReadOnly => Usage::Reader,
                });
                let kept: Option<Box<dyn Kept>> = Some(Box::new(KeptAdmission(admission)));
                Ok(Permission { generation, usage, kept })
            }
            None => {
                let message = format!(
                    "cannot map volume {id}: it is a static volume, which the controller cannot grant"
                );
                Err(Error::new(ErrorKind::Unsupported, message).with_repair(
                    "kubectl cleat take-over PV prints objects for the same RBD image that can be granted; or set \
                     csi.grants = false on all nodes",
                ))
            }
        }
    }

    async fn released(&self, id: &str, deadline: Instant) -> bool {
        match VolumeId::parse(id) {
            Some(VolumeId::Rbd { .. } | VolumeId::Object { .. }) => {
                self.0.released(id, deadline).await
            }
            _ => true,
        }
    }
}

/// The volumes of this node.
struct Node {
    driver: Driver,
    executor: Arc<Executor>,
    granted: GrantedVolumes,
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Node")
    }
}

impl Node {
    fn view(&self, handle: &str) -> Option<View> {
        self.executor.register().get(&mapping_name(handle)).map(|mapping| mapping.view())
    }

    /// Runs a call of the storage of a volume.
    async fn at_storage<T: Send + 'static>(
        &self,
        handle: &str,
        call: impl FnOnce(&dyn Fencing, std::time::Instant) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        // A mapping may have been made with another client than the one that is known now.
        let mapped = self.view(handle).map(|view| view.record.uri);
        let (driver, handle) = (self.driver.clone(), handle.to_owned());
        blocking(move || {
            let uri = match mapped {
                Some(uri) => uri,
                // A missing cluster must not look like a missing image.
                None => driver.storage_uri(&handle).map_err(|error| {
                    Error::new(ErrorKind::InvalidArgument, error.report())
                        .with_repair("check csi.clusters")
                })?,
            };
            let record = REGISTRY.volume(&uri)?.spec().grant_record()?.ok_or_else(|| {
                let message = format!("the storage of volume {handle} has no records");
                Error::new(ErrorKind::Unsupported, message)
            })?;
            call(record.as_ref(), SystemClock.now() + STORAGE_TIMEOUT)
        })
        .await
    }
}

impl NodeVolumes for Node {
    fn observe(&self, handle: &str) -> Observed {
        let Some(view) = self.view(handle) else {
            let is_unknown = self.executor.may_have_unusable(&mapping_name(handle));
            return Observed { is_unknown, ..Observed::default() };
        };
        let record = &view.record;
        let id = u64::from_str_radix(&record.mapping_id, 16).unwrap_or_default();
        let device_path = view.node().map(|node| node.display().to_string()).unwrap_or_default();
        let mode = match (record.options.read_only, is_shared(&record.uri)) {
            (true, _) => Mode::ReadOnly,
            (false, true) => Mode::SharedReadWrite,
            (false, false) => Mode::ReadWrite,
        };
        let mapping = ObservedMapping {
            generation: Generation(record.grant),
            mode,
            device_path,
            state: state(&view),
            worker: id.wrapping_add(record.generation),
        };
        Observed {
            wanted: record.intent == Intent::Mapped,
            mapping: Some(mapping),
            is_unknown: false,
        }
    }

    fn remembered(&self) -> Answer<'_, Vec<String>> {
        Box::pin(self.granted.all())
    }

    fn remember<'a>(&'a self, handle: &'a str) -> Answer<'a, ()> {
        Box::pin(self.granted.add(handle))
    }

    fn forget<'a>(&'a self, handle: &'a str) -> Answer<'a, ()> {
        Box::pin(self.granted.remove(handle))
    }

    fn probe<'a>(&'a self, handle: &'a str) -> Answer<'a, ()> {
        Box::pin(async move {
            let Some(device) = self.view(handle).and_then(|view| view.device) else {
                let message = format!("volume {handle} has no device");
                return Err(Error::new(ErrorKind::Unavailable, message));
            };
            self.executor.probe(device.index, Instant::now() + PROBE_TIMEOUT).await
        })
    }

    fn record<'a>(&'a self, handle: &'a str) -> Answer<'a, Record> {
        Box::pin(self.at_storage(handle, |storage, deadline| match storage.record(deadline) {
            // Nothing can write to an image that was deleted.
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Record::default()),
            other => other,
        }))
    }

    fn release<'a>(&'a self, handle: &'a str, client: &'a str) -> Answer<'a, ()> {
        let (node, client) = (self.executor.node_name().to_owned(), client.to_owned());
        Box::pin(
            self.at_storage(handle, move |storage, deadline| {
                storage.release(&node, &client, deadline)
            }),
        )
    }

    fn finish<'a>(&'a self, handle: &'a str) -> Answer<'a, ()> {
        Box::pin(self.driver.unmap_if_unused(handle, Instant::now() + UNMAP_TIMEOUT))
    }

    fn force<'a>(&'a self, handle: &'a str) -> Answer<'a, ()> {
        Box::pin(async move {
            let deadline = Instant::now() + UNMAP_TIMEOUT;
            let done = self.driver.unmap_by_force(handle, deadline).await?;
            tracing::warn!(volume = handle, "{done}");
            Ok(())
        })
    }

    fn report(&self, problem: Option<Error>) {
        self.executor.report_service("grants", problem);
    }
}

fn state(view: &View) -> MappingState {
    match &view.state {
        State::Mapped => MappingState::Usable,
        State::Failed(failure) if failure.kind == ErrorKind::Fenced => MappingState::CutOff,
        State::Failed(_) | State::Recovering => MappingState::WorkerDead,
        State::Mapping | State::Unmapping | State::Held(_) | State::Unmapped => {
            MappingState::Starting
        }
    }
}
