//! The work on one volume: observes, decides with `cleat_grants::agent`, and performs the step, until there is
//! nothing to do.

use std::time::Duration;

use cleat_core::error::{Error, ErrorKind, Result};
use cleat_grants::agent::{Grants, MappingState, Permit, Step, View, next_step};
use cleat_grants::object::{Generation, Mode, NodeEntry, Version};
use kube::api::PostParams;

use super::shared::Shared;
use super::volume::AgentVolume;
use crate::api::{call, now};
use crate::queue::Next;

/// The maximum number of steps before other volumes get their turn.
const MAX_STEPS: usize = 16;

/// How long after a failed attempt a revoked volume that is in use is looked at again.
const FINISH_RETRY: Duration = Duration::from_secs(2);

impl Shared {
    /// Works on the volume of the grant `name`.
    pub(super) async fn work_on(&self, name: &str) -> Result<Next> {
        for _ in 0..MAX_STEPS {
            let Some(handle) = self.handle(name) else { return Ok(Next::Done) };
            let identified = self.identify(name, &handle).await;
            match self.decide(name) {
                None | Some(Step::Reclaim(_)) => return Ok(Next::Done),
                Some(Step::Wait) => {
                    identified?;
                    self.rest(name, &handle).await?;
                    return Ok(Next::Done);
                }
                Some(Step::Claim(generation)) => {
                    self.offer(name, &handle, generation).await?;
                    return Ok(Next::Done);
                }
                Some(Step::ReadClaim) => {
                    let record = self.node.record(&handle).await?;
                    let mode = self.holder(name).map_or(Mode::ReadWrite, |holder| holder.mode);
                    let node = &self.config.node;
                    self.with(name, |volume| volume.take_record(node, mode, &record));
                    self.changes.send_replace(());
                }
                Some(Step::Release(client)) => {
                    tracing::warn!(
                        volume = handle,
                        client,
                        "releasing the claim of an ended client"
                    );
                    // Whether it succeeds or not, the record says what is left.
                    let released = self.node.release(&handle, &client).await;
                    self.with(name, AgentVolume::forget_claim);
                    released?;
                }
                Some(Step::Publish { version, entry, intent }) => {
                    self.publish(name, version, entry, intent).await?;
                }
                Some(Step::Finish) => return self.finish(name, &handle).await,
                Some(Step::Force) => {
                    if self.is_claiming(name) {
                        return Ok(Next::Done);
                    }
                    tracing::warn!(volume = handle, "the grant has ended: unmapping by force");
                    self.node.force(&handle).await?;
                }
            }
        }
        Ok(Next::After(Duration::ZERO))
    }

    /// Returns the volume of a grant. One that the agent does not know yet gets a state.
    fn handle(&self, name: &str) -> Option<String> {
        let mut volumes = self.volumes();
        if let Some(volume) = volumes.get(name) {
            return Some(volume.handle.clone());
        }
        let handle = self.grant(name)?.volume()?.to_owned();
        volumes.insert(name.to_owned(), AgentVolume::new(&handle, false));
        Some(handle)
    }

    /// Finds out the client of a mapping whose device exists, and that the device answers a read: a mapping counts as
    /// usable only then.
    async fn identify(&self, name: &str, handle: &str) -> Result<()> {
        let usable = self.node.observe(handle).mapping;
        let usable = usable.filter(|known| known.state == MappingState::Usable);
        let Some(mapping) = usable else { return Ok(()) };
        let known = self.with(name, |volume| {
            volume.client.as_ref().is_some_and(|(worker, _)| *worker == mapping.worker)
        });
        // A mapping of the time before the grants were turned on.
        if known == Some(true) || mapping.generation == Generation::default() {
            return Ok(());
        }
        let record = self.node.record(handle).await?;
        let claim = record.claim_of(&self.config.node);
        let Some(claim) = claim.filter(|claim| claim.generation == mapping.generation) else {
            let message = format!(
                "volume {handle} is mapped with generation {}, and the storage has no such claim of this node",
                mapping.generation
            );
            return Err(Error::new(ErrorKind::Unavailable, message)
                .with_repair("see cleat status: the worker finds out whether it was fenced"));
        };
        self.node.probe(handle).await?;
        self.with(name, |volume| volume.client = Some((mapping.worker, claim.client.clone())));
        Ok(())
    }

    /// Decides the next step; `None` while it cannot be decided.
    fn decide(&self, name: &str) -> Option<Step> {
        let is_listed = self.is_listed();
        let stored = self.grant(name).map(|grant| grant.stored());
        let is_reachable = self.outage().is_none();
        self.with(name, |volume| {
            let observed = self.node.observe(&volume.handle);
            let local = volume.observe(&observed);
            volume.offer = None;
            // Nothing says that a fenced mapping is gone: its worker may still write.
            let is_fenced = stored
                .as_ref()
                .is_some_and(|stored| stored.grant.fences_of(&self.config.node).next().is_some());
            if observed.is_unknown && is_fenced {
                return None;
            }
            if !is_listed && local.mapping.is_none() {
                return None;
            }
            let listed = Grants::Listed { grant: stored.as_ref(), is_reachable };
            let view = View {
                node: &self.config.node,
                machine: &self.config.machine,
                grants: if is_listed { listed } else { Grants::NotListed },
                local: &local,
                permit: volume.permit.as_ref(),
                force_after_s: self.config.force_after_s,
            };
            Some(next_step(&view, now()))
        })?
    }

    /// Lets the waiting call claim the volume. What may be claimed is remembered before.
    async fn offer(&self, name: &str, handle: &str, generation: Generation) -> Result<()> {
        if self.with(name, |volume| volume.remembered) == Some(false) {
            self.node.remember(handle).await?;
        }
        // A grant that has changed meanwhile leads to another decision.
        let holder = self.holder(name).filter(|holder| holder.generation == generation);
        self.with(name, |volume| {
            volume.remembered = true;
            let offer = holder.map(|holder| (generation, holder.mode));
            volume.offer = offer.filter(|_| volume.calls > 0);
        });
        self.changes.send_replace(());
        Ok(())
    }

    /// Writes the node's entry.
    async fn publish(
        &self,
        name: &str,
        version: Option<Version>,
        entry: NodeEntry,
        intent: Option<Generation>,
    ) -> Result<()> {
        let Some((grants, known)) = self.grants.get().zip(self.grant(name)) else { return Ok(()) };
        self.with(name, |volume| {
            volume.permit.take_if(|permit| intent.is_some() || !permit.survives(&entry));
        });
        let mut object = known.as_ref().clone();
        object.metadata.resource_version = version.map(|version| version.0);
        let nodes = &mut object.status.grant.nodes;
        nodes.retain(|other| other.node != entry.node);
        nodes.push(entry);
        let parameters = PostParams::default();
        let request = grants.api.replace_status(name, &parameters, &object);
        let answer = call(|| format!("cannot write the status of grant {name}"), request).await;
        match &answer {
            Ok(_) => self.reached(),
            Err(error) => self.failed(error),
        }
        let written = grants.written(name, answer).await?;
        if let Some(generation) = intent {
            let grant = written.stored().grant;
            let permit = Permit::from_answer(&grant, &self.config.node, generation);
            self.with(name, |volume| volume.permit = permit);
        }
        Ok(())
    }

    /// Ends a mapping that is not wanted or revoked. kubelet, which unmounts it, or the supervisor, which continues an
    /// unmap, may do so at any time.
    async fn finish(&self, name: &str, handle: &str) -> Result<Next> {
        let is_wanted = self.node.observe(handle).wanted;
        if self.is_claiming(name) || !is_wanted {
            return Ok(Next::Done);
        }
        let is_first = self.with(name, |volume| {
            let is_first = volume.ending_since.is_none();
            volume.ending_since.get_or_insert_with(now);
            is_first
        });
        match self.node.finish(handle).await {
            Ok(()) => Ok(Next::After(Duration::ZERO)),
            Err(error) => {
                if is_first == Some(true) {
                    let error = crate::api::message(&error);
                    tracing::warn!(
                        volume = handle,
                        "its grant is revoked, and it is in use: {error}"
                    );
                }
                Ok(Next::After(FINISH_RETRY))
            }
        }
    }

    /// Forgets a volume that is not used and has no claim.
    async fn rest(&self, name: &str, handle: &str) -> Result<()> {
        let is_idle = self.with(name, |volume| volume.is_idle().then_some(volume.remembered));
        let Some(remembered) = is_idle.flatten() else { return Ok(()) };
        self.note(name, None);
        if remembered {
            self.node.forget(handle).await?;
        }
        let is_granted = self.grant(name).is_some();
        let mut volumes = self.volumes();
        if let Some(volume) = volumes.get_mut(name) {
            volume.remembered = false;
            if volume.is_idle() && !is_granted {
                volumes.remove(name);
            }
        }
        Ok(())
    }

    fn is_claiming(&self, name: &str) -> bool {
        self.with(name, |volume| volume.claiming.is_some()).unwrap_or_default()
    }
}
