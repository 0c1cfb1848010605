//! What users ask of a mapping that exists: which it is, another policy, other faults. Another size:
//! `growth`.

use tokio::time::Instant;

use super::executor::{Executor, Target};
use super::mapping::Intent;
use super::volume::{Guard, View, Volume};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::policy;
use cleat_worker::protocol::ToWorker;
use std::sync::Arc;

impl Executor {
    /// The mapping that a user means.
    ///
    /// # Errors
    /// `NotFound` when there is none; `InUse`, for an orphan, which can only be unmapped.
    pub async fn get(&self, target: &str, deadline: Instant) -> Result<Arc<Volume>> {
        match self.find(target, deadline).await? {
            Target::Volume(volume) => Ok(volume),
            Target::Nothing => {
                let message = format!("nothing is mapped as {target}");
                Err(Error::new(ErrorKind::NotFound, message).with_repair("cleat ls shows what is"))
            }
            Target::Orphan(index, identity) => {
                let message = format!("/dev/nbd{index} ({}) has no record", identity.as_str());
                Err(Error::new(ErrorKind::NotFound, message)
                    .with_repair(format!("cleat unmap /dev/nbd{index}")))
            }
        }
    }

    /// Replaces the faults that a `fault:` volume injects.
    ///
    /// # Errors
    /// `Unsupported` for any other volume.
    pub async fn set_fault(&self, target: &str, plan: &str, deadline: Instant) -> Result<()> {
        let volume = self.get(target, deadline).await?;
        let guard = self.enter_mapped(&volume).await?;
        let worker = guard.worker.as_ref().ok_or_else(|| not_mapped(&volume))?;
        let command = ToWorker::SetFault { plan: plan.to_owned() };
        volume.giving_way(worker.call(command, Vec::new(), deadline)).await.map(|_| ())
    }

    /// Changes what happens in an outage of the backend, and how fast a mapping may go. What is asked
    /// for is kept even where there is no worker to be told: the next one is.
    ///
    /// # Errors
    /// `InvalidArgument` when nothing is asked for; what the journal or the worker gives.
    pub async fn set_policy(
        &self,
        target: &str,
        change: policy::Change,
        deadline: Instant,
    ) -> Result<View> {
        if change.is_empty() {
            return Err(Error::new(ErrorKind::InvalidArgument, "nothing is to be changed")
                .with_repair("say what: cleat set --help"));
        }
        let volume = self.get(target, deadline).await?;
        let mut guard = self.enter_mapped(&volume).await?;
        let before = guard.record.options.policy;
        let policy = change.apply(before);
        guard.record.options.policy = policy;
        if let Err(error) = self.store(&guard).await {
            guard.record.options.policy = before;
            return Err(error);
        }
        let record = guard.record.clone();
        self.publish(&volume, |view| view.record = record);
        tracing::info!(mapping = volume.name, ?policy, "the policy was changed");
        if let Some(worker) = guard.worker.as_ref().filter(|worker| !worker.has_ended()) {
            let call = worker.call(ToWorker::SetPolicy(policy), Vec::new(), deadline);
            volume.giving_way(call).await?;
        }
        Ok(volume.view())
    }

    pub(super) async fn enter_mapped(&self, volume: &Arc<Volume>) -> Result<Guard> {
        let guard = volume.enter_call().await?;
        if guard.withdrawn || guard.record.intent != Intent::Mapped {
            return Err(not_mapped(volume));
        }
        Ok(guard)
    }
}

pub(super) fn not_mapped(volume: &Volume) -> Error {
    Error::new(ErrorKind::Unavailable, format!("{} does not work just now", volume.name))
        .with_repair(format!("cleat status {} says why", volume.name))
}
