//! The calls that map volumes: each waits for a permit, and fails with the reason if there is none.

use std::sync::Arc;
use std::time::Duration;

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_grants::agent::OwnClaim;
use cleat_grants::object::{Generation, Holder, Mode};
use tokio::time::{Instant, timeout_at};

use super::node::ObservedMapping;
use super::shared::{Agent, Shared};
use super::volume::AgentVolume;
use crate::api::call;

/// How long a call waits for a grant that the agent does not know yet: the watch may be behind.
const GRANT_TIMEOUT: Duration = Duration::from_secs(5);

/// The permission to map a volume. The caller keeps it until the volume is mapped, or the attempt has failed.
#[derive(Debug)]
pub struct Admission {
    agent: Arc<Shared>,
    name: String,
    generation: Generation,
    mode: Mode,
}

impl Admission {
    /// Returns the generation with which the volume must be claimed.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Returns how the volume must be used.
    pub fn mode(&self) -> Mode {
        self.mode
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        self.agent.with(&self.name, |volume| {
            volume.calls = volume.calls.saturating_sub(1);
            if let Some(generation) = volume.claiming.take() {
                (volume.claim, volume.failed) = (OwnClaim::Uncertain, Some(generation));
            }
        });
        self.agent.queue.add(self.name.clone());
    }
}

impl Agent {
    /// Waits until the node may map the volume `handle`. A volume that is mapped keeps its generation, and needs no
    /// permit: its workers claim with the storage alone. One call at a time for each volume.
    ///
    /// # Errors
    /// Returns `InUse` without a grant for this node, with one that is revoked, or if the storage refuses it;
    /// `Unavailable` if the API server cannot be reached; and `TimedOut` if the grant could not be confirmed until
    /// `deadline`.
    pub async fn admit(&self, handle: &str, deadline: Instant) -> Result<Admission> {
        let shared = &self.0;
        let name = shared.name_of(handle);
        let mut changes = shared.changes.subscribe();
        let mut admission = shared.enter(&name, handle);
        if let Some(mapping) = shared.keep_mapping(&name) {
            shared.check_mapping(&name, handle, &mapping)?;
            (admission.generation, admission.mode) = (mapping.generation, mapping.mode);
            return Ok(admission);
        }
        shared.queue.add(name.clone());
        let until = deadline.min(Instant::now() + GRANT_TIMEOUT);
        loop {
            if let Some(offer) = shared.take_offer(&name) {
                (admission.generation, admission.mode) = offer;
                return Ok(admission);
            }
            if shared.outage().is_some() || shared.is_refused(&name) {
                return Err(shared.why_not(&name, handle).await);
            }
            if timeout_at(until, changes.changed()).await.is_err() {
                return Err(shared.why_not(&name, handle).await);
            }
        }
    }

    /// Waits until nothing of this node can have a claim on an unmapped volume, as far as the agent knows, at most
    /// until `deadline`. Returns whether that is so.
    pub async fn released(&self, handle: &str, deadline: Instant) -> bool {
        let shared = &self.0;
        let name = shared.name_of(handle);
        let mut changes = shared.changes.subscribe();
        shared.queue.add(name.clone());
        loop {
            let is_mapped = shared.node.observe(handle).mapping.is_some();
            let is_released = shared.with(&name, |volume| volume.is_released()).unwrap_or(true);
            if !is_mapped && is_released {
                return true;
            }
            if timeout_at(deadline, changes.changed()).await.is_err() {
                return false;
            }
        }
    }
}

impl Shared {
    /// Counts a call that wants the volume.
    fn enter(self: &Arc<Self>, name: &str, handle: &str) -> Admission {
        let mut volumes = self.volumes();
        let volume =
            volumes.entry(name.to_owned()).or_insert_with(|| AgentVolume::new(handle, false));
        volume.calls += 1;
        // A new call wants it tried again.
        volume.refusal.take_if(|(_, refusal)| !refusal.is_final());
        let (generation, mode) = (Generation::default(), Mode::ReadWrite);
        Admission { agent: Arc::clone(self), name: name.to_owned(), generation, mode }
    }

    /// Returns the mapping of a volume. Until the call ends, it counts as mapped: if the mapping is removed meanwhile,
    /// the call makes it anew with the same generation.
    fn keep_mapping(&self, name: &str) -> Option<ObservedMapping> {
        self.with(name, |volume| {
            let mapping = self.node.observe(&volume.handle).mapping?;
            volume.claiming = Some(mapping.generation);
            Some(mapping)
        })?
    }

    /// Takes the permission to claim, if there is one.
    fn take_offer(&self, name: &str) -> Option<(Generation, Mode)> {
        self.with(name, |volume| {
            let offer = volume.offer.take()?;
            volume.claiming = Some(offer.0);
            Some(offer)
        })?
    }

    fn is_refused(&self, name: &str) -> bool {
        let refused =
            self.with(name, |volume| volume.refusal.as_ref().map(|(refused, _)| *refused));
        refused.flatten().is_some_and(|refused| {
            self.holder(name).is_some_and(|holder| holder.generation == refused)
        })
    }

    /// Returns the entry of this node in the spec.
    pub(super) fn holder(&self, name: &str) -> Option<Holder> {
        let grant = self.grant(name)?.stored().grant;
        grant.holder(&self.config.node).cloned()
    }

    /// Checks that a mapping that exists may be used by another call. A grant that is missing ends nothing.
    fn check_mapping(&self, name: &str, handle: &str, mapping: &ObservedMapping) -> Result<()> {
        let holder = self.holder(name).filter(|known| known.generation == mapping.generation);
        match holder.filter(|holder| holder.revoked) {
            Some(holder) => Err(self.revoked(name, handle, &holder)),
            None => Ok(()),
        }
    }

    /// Returns why the volume cannot be mapped.
    async fn why_not(&self, name: &str, handle: &str) -> Error {
        let node = &self.config.node;
        let cannot = format!("cannot map volume {handle} on node {node}");
        if let Some(outage) = self.outage() {
            let message = format!(
                "{cannot}: its grant cannot be confirmed while the API server cannot be reached: {outage}"
            );
            return Error::new(ErrorKind::Unavailable, message)
                .with_repair("restore the connection to the API server; kubelet repeats the call");
        }
        if !self.is_listed() {
            let message = format!("{cannot}: the agent has not read the grants of the node yet");
            return Error::new(ErrorKind::Unavailable, message).with_repair("repeat the call");
        }
        let look = format!("kubectl describe volumegrant {name} says what it waits for");
        if let Some(Err(error)) = self.grants.get().map(|grants| grants.check(name)) {
            return Error::new(error.kind(), format!("{cannot}: {}", crate::api::message(&error)));
        }
        let Some(holder) = self.holder(name) else {
            let held = match self.other_holder(name).await {
                Some(Holder { node, generation, since, .. }) => {
                    format!("; node {node} has it (generation {generation}, since {since})")
                }
                None => String::new(),
            };
            let message = format!("{cannot}: the node has no grant{held}");
            return Error::new(ErrorKind::InUse, message).with_repair(format!(
                "the volume needs a VolumeAttachment, which the controller answers with a grant: {look}"
            ));
        };
        if holder.revoked {
            return self.revoked(name, handle, &holder);
        }
        let generation = holder.generation;
        let state = self.with(name, |volume| (volume.refusal.clone(), volume.problem.clone()));
        let (refusal, problem) = state.unwrap_or_default();
        if let Some((_, refusal)) = refusal.filter(|(refused, _)| *refused == generation) {
            let message =
                format!("{cannot}: the storage refuses generation {generation}: {refusal}");
            return Error::new(ErrorKind::InUse, message)
                .with_repair(format!("the controller corrects the grant: {look}"));
        }
        let why = problem.map(|problem| format!(": {problem}")).unwrap_or_default();
        let message = format!("{cannot}: generation {generation} is not confirmed yet{why}");
        Error::new(ErrorKind::TimedOut, message).with_repair("repeat the call")
    }

    /// Returns another node that holds the volume. The agent watches only the grants of its own node, so it asks.
    async fn other_holder(&self, name: &str) -> Option<Holder> {
        let grants = self.grants.get()?;
        let what = || format!("cannot read grant {name}");
        let grant = call(what, grants.api.get_opt(name)).await.ok()??;
        grant.spec.holders.first().cloned()
    }

    fn revoked(&self, name: &str, handle: &str, holder: &Holder) -> Error {
        let Holder { node, generation, since, .. } = holder;
        let message = format!(
            "cannot map volume {handle} on node {node}: generation {generation} of its grant is revoked \
             since {since}"
        );
        Error::new(ErrorKind::InUse, message).with_repair(format!(
            "end the pods of the volume on this node; kubectl describe volumegrant {name} says more"
        ))
    }
}
