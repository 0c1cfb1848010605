//! What users ask of a mapping that exists: another size, other faults.

use tokio::time::Instant;

use super::executor::{Executor, Target};
use super::mapping::{Intent, State};
use super::volume::{Guard, View, Volume};
use crate::error::{Error, ErrorKind, Result};
use crate::worker::protocol::{FromWorker, ToWorker};
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

    /// Sets the size of a volume and of its device; 0 takes over the size that the backend has.
    ///
    /// # Errors
    /// `InvalidArgument` for what would shrink the device.
    pub async fn resize(&self, target: &str, size: u64, deadline: Instant) -> Result<View> {
        let volume = self.get(target, deadline).await?;
        volume.giving_way(self.resize_volume(&volume, size, deadline)).await
    }

    async fn resize_volume(
        &self,
        volume: &Arc<Volume>,
        size: u64,
        deadline: Instant,
    ) -> Result<View> {
        let mut guard = self.enter_mapped(volume).await?;
        let state = self.converge(&mut guard, deadline).await?;
        if let State::Failed(trouble) = state {
            return Err(trouble.into_error());
        }
        let view = volume.view();
        let (Some(device), Some(made_of)) = (view.device, guard.record.volume) else {
            return Err(not_mapped(volume));
        };
        let name = &volume.name;
        let shrinks = |to: u64| {
            let message = format!("{name} is {} bytes long and would shrink to {to}", device.size);
            Err(Error::new(ErrorKind::InvalidArgument, message)
                .with_repair("a device is not shrunk: what is on it would be cut off"))
        };
        let block = u64::from(made_of.block_size);
        if size != 0 && !size.is_multiple_of(block) {
            let message = format!("{size} bytes are not a multiple of the block size, {block}");
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        if size != 0 && size < device.size {
            return shrinks(size);
        }
        let command = if size == 0 { ToWorker::RefreshSize } else { ToWorker::Resize { size } };
        let worker = guard.worker.as_mut().ok_or_else(|| not_mapped(volume))?;
        let size = match worker.call(command, Vec::new(), deadline).await? {
            FromWorker::Size { size } => size,
            other => {
                let message = format!("the worker answered out of turn: {other:?}");
                return Err(Error::new(ErrorKind::Internal, message));
            }
        };
        // The end of a volume that is no whole block cannot be reached through the device.
        let size = size - size % block;
        if size < device.size {
            return shrinks(size);
        }
        worker.ready.size = size;
        if size > device.size {
            let (index, identity) = (device.index, guard.record.identity());
            self.kernel
                .command("resize the device", deadline, move |k| k.resize(index, &identity, size))
                .await?;
        }
        guard.record.volume = Some(super::mapping::Volume { size, ..made_of });
        self.store(&guard).await?;
        self.converge(&mut guard, deadline).await?;
        Ok(volume.view())
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

    async fn enter_mapped(&self, volume: &Arc<Volume>) -> Result<Guard> {
        let guard = volume.enter_call().await?;
        if guard.withdrawn || guard.record.intent != Intent::Mapped {
            return Err(not_mapped(volume));
        }
        Ok(guard)
    }
}

fn not_mapped(volume: &Volume) -> Error {
    Error::new(ErrorKind::Unavailable, format!("{} does not work just now", volume.name))
        .with_repair(format!("cleat status {} says why", volume.name))
}
