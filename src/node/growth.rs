//! A volume's size and that of its device: changed by a user, or grown at the backend.
//!
//! For a new size the kernel freezes the device's queue and waits for every request in flight
//! (nbd_set_size; Linux 6.12 does, 6.1 does not), with the lock held under which all netlink commands
//! of the driver go. One backend that hangs would stop the commands for every other volume. So the
//! supervisor first sees every request that is running come to its end, and otherwise puts the
//! growth off, or says no to who asked.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::executor::{Executor, TRANSIENT_LIMIT, held, is_transient};
use super::kernel_calls::COMMAND_LIMIT;
use super::mapping::{Options, SeenDevice, State, Volume};
use super::operations::not_mapped;
use super::volume::{Guard, View};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::policy::{Policy, RateLimits};
use cleat_kernel::DeviceIndex;
use cleat_statistics::Page;
use cleat_worker::protocol::{FromWorker, ToWorker};

/// A size that a user wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewSize {
    /// In bytes; 0: that of the volume at the backend.
    pub bytes: u64,
    /// Whether what lies behind a smaller size may be lost.
    pub shrink: bool,
}

/// For everything that is running to end before a resize: longer than storage under load, or that
/// changes over to a standby, takes for a request.
const FLOW_LIMIT: Duration = Duration::from_secs(10);

/// The same for a growth that nobody has asked for: calls wait meanwhile, and it can be put off.
const GROWTH_FLOW_LIMIT: Duration = Duration::from_millis(300);

/// How soon a growth that was put off is tried again.
const AGAIN_AFTER: Duration = Duration::from_secs(10);

/// How long the kernel may take to repeat what it sent to a worker that died, unless it was told to do
/// so sooner: its tick, and some more (nbd_xmit_timeout).
const REPLAY_LIMIT: Duration = Duration::from_secs(32);

impl Executor {
    /// Sets the size of a volume and of its device.
    ///
    /// # Errors
    /// `InvalidArgument` for what would shrink the device unasked; `InUse` for shrinking one that
    /// somebody holds; `Unavailable` while the backend does not answer.
    pub async fn resize(&self, target: &str, wanted: NewSize, deadline: Instant) -> Result<View> {
        let volume = self.get(target, deadline).await?;
        volume.giving_way(self.resize_volume(&volume, wanted, deadline)).await
    }

    async fn resize_volume(
        &self,
        volume: &Arc<super::volume::Volume>,
        wanted: NewSize,
        deadline: Instant,
    ) -> Result<View> {
        let mut guard = self.enter_mapped(volume).await?;
        // Whoever asks wants it tried now.
        guard.growth = None;
        let state = self.converge(&mut guard, deadline).await?;
        let (Some(device), Some(made_of)) = (volume.view().device, guard.record.volume) else {
            return Err(not_mapped(volume));
        };
        match state {
            State::Failed(trouble) if !(wanted.shrink && has_shrunk(&guard, device)) => {
                return Err(trouble.into_error());
            }
            _ => {}
        }
        let block = u64::from(made_of.block_size);
        if !wanted.bytes.is_multiple_of(block) {
            let message =
                format!("{} bytes are not a multiple of the block size, {block}", wanted.bytes);
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        let resized = self.resize_both(&guard, device, wanted, deadline).await;
        if resized.is_err() {
            // The volume may have become larger all the same: its device is to follow then.
            let _ = self.attention.try_send(volume.name.clone());
        }
        resized?;
        self.remember_size(&mut guard).await?;
        self.converge(&mut guard, deadline).await?;
        Ok(volume.view())
    }

    /// Makes the device as large as its volume, or puts that off.
    ///
    /// # Errors
    /// When the record cannot be stored.
    pub(super) async fn grow(
        &self,
        guard: &mut Guard,
        index: DeviceIndex,
        size: u64,
        deadline: Instant,
    ) -> Result<()> {
        let resized = self.resize_device(guard, index, size, GROWTH_FLOW_LIMIT, deadline).await;
        let Err(error) = resized else {
            guard.growth = None;
            tracing::info!(mapping = guard.record.name, size, "grown with its volume");
            return self.remember_size(guard).await;
        };
        let why = format!("its volume has grown to {size} bytes: {}", error.report());
        tracing::warn!(mapping = guard.record.name, "{why}");
        guard.growth = Some((Instant::now() + AGAIN_AFTER, why));
        let (name, attention) = (guard.volume().name.clone(), self.attention.clone());
        tokio::spawn(async move {
            sleep(AGAIN_AFTER).await;
            // A full queue: the volume stays as it is until something else happens to it.
            let _ = attention.send(name).await;
        });
        Ok(())
    }

    async fn resize_both(
        &self,
        guard: &Guard,
        device: SeenDevice,
        wanted: NewSize,
        deadline: Instant,
    ) -> Result<()> {
        let size = match wanted.bytes {
            0 => self.tell_size(guard, ToWorker::RefreshSize, deadline).await?,
            bytes => bytes,
        };
        let size = size - size % block_size(guard);
        if size >= device.size {
            self.grow_both(guard, device, wanted.bytes, deadline).await
        } else if wanted.shrink {
            self.shrink_both(guard, device, size, deadline).await
        } else {
            Err(would_shrink(guard, device, size))
        }
    }

    /// The backend first: a device must never be larger than its volume.
    async fn grow_both(
        &self,
        guard: &Guard,
        device: SeenDevice,
        bytes: u64,
        deadline: Instant,
    ) -> Result<()> {
        let size = match bytes {
            0 => guard.worker.as_ref().map_or(0, super::workers::Worker::size),
            size => {
                let command = ToWorker::Resize { size, shrink: false };
                self.tell_size(guard, command, deadline).await?
            }
        };
        let size = size - size % block_size(guard);
        if size < device.size {
            return Err(would_shrink(guard, device, size));
        }
        if size == device.size {
            return Ok(());
        }
        self.resize_device(guard, device.index, size, FLOW_LIMIT, deadline).await
    }

    /// The device first, for the same reason; and back, when the backend does not follow.
    async fn shrink_both(
        &self,
        guard: &Guard,
        device: SeenDevice,
        size: u64,
        deadline: Instant,
    ) -> Result<()> {
        if guard.volume().view().is_read_only() {
            let message = format!("{} is mapped read-only", guard.record.name);
            return Err(Error::new(ErrorKind::PermissionDenied, message));
        }
        if size == 0 {
            let message = "a device of 0 bytes is none";
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        self.check_unheld(guard, device.index, deadline).await?;
        self.resize_device(guard, device.index, size, FLOW_LIMIT, deadline).await?;
        self.point("device shrunk, volume not").await;
        let command = ToWorker::Resize { size, shrink: true };
        let Err(error) = self.tell_size(guard, command, deadline).await else { return Ok(()) };
        // What the backend did in the end, the next look tells: the device follows a larger volume.
        let until = Instant::now() + COMMAND_LIMIT;
        let (index, before) = (device.index, device.size);
        if let Err(back) = self.resize_device(guard, index, before, FLOW_LIMIT, until).await {
            tracing::warn!(mapping = guard.record.name, "stays shrunk: {}", back.report());
        }
        Err(error)
    }

    /// Sees to it that nobody holds a device, but for those who only look, and soon go.
    pub(super) async fn check_unheld(
        &self,
        guard: &Guard,
        index: DeviceIndex,
        deadline: Instant,
    ) -> Result<()> {
        let patience = deadline.min(Instant::now() + TRANSIENT_LIMIT);
        loop {
            let holders = self.holders(index, deadline).await?;
            if holders.is_empty() {
                return Ok(());
            }
            if !holders.iter().all(is_transient) || Instant::now() >= patience {
                return Err(held(&guard.record.name, &holders));
            }
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// A command that the worker answers with the volume's size.
    async fn tell_size(&self, guard: &Guard, command: ToWorker, deadline: Instant) -> Result<u64> {
        let worker = guard.worker.as_ref().ok_or_else(|| not_mapped(guard.volume()))?;
        match worker.call(command, Vec::new(), deadline).await? {
            FromWorker::Size { size } => Ok(size),
            other => {
                let message = format!("the worker answered out of turn: {other:?}");
                Err(Error::new(ErrorKind::Internal, message))
            }
        }
    }

    /// `flow_limit`: for what is running to end.
    async fn resize_device(
        &self,
        guard: &Guard,
        index: DeviceIndex,
        size: u64,
        flow_limit: Duration,
        deadline: Instant,
    ) -> Result<()> {
        // What the limits hold back the kernel would wait for, too.
        let policy = guard.record.options.policy;
        let lifted = Policy { limits: RateLimits::default(), ..policy };
        if lifted != policy {
            self.tell_policy(guard, lifted, deadline).await?;
        }
        let resized = async {
            self.check_flow(guard, flow_limit).await?;
            let identity = guard.record.identity();
            self.kernel
                .command("resize the device", deadline, move |k| k.resize(index, &identity, size))
                .await
        };
        let resized = resized.await;
        if lifted != policy {
            let told = self.tell_policy(guard, policy, Instant::now() + FLOW_LIMIT).await;
            // A worker that does not hear it is replaced, or adopted anew, and told then.
            if let Err(error) = told {
                tracing::warn!(mapping = guard.record.name, "limits wait: {}", error.report());
            }
        }
        resized
    }

    async fn tell_policy(&self, guard: &Guard, policy: Policy, deadline: Instant) -> Result<()> {
        let worker = guard.worker.as_ref().ok_or_else(|| not_mapped(guard.volume()))?;
        worker.call(ToWorker::SetPolicy(policy), Vec::new(), deadline).await.map(drop)
    }

    /// Sees to it that nothing keeps the kernel waiting.
    async fn check_flow(&self, guard: &Guard, limit: Duration) -> Result<()> {
        let record = &guard.record;
        let worker = guard.worker.as_ref().ok_or_else(|| not_mapped(guard.volume()))?;
        let replaying = guard.sound_since.map_or(Duration::ZERO, |since| since.elapsed());
        let limit_of_replay = replay_limit(&record.options);
        // A worker that was succeeded in order has left nothing, and its sockets are the same.
        if worker.statistics.reconnects() > 0 && replaying < limit_of_replay {
            let left = (limit_of_replay - replaying).as_secs() + 1;
            let message = format!(
                "the resize of {} waits: its worker was replaced, and the kernel may still repeat \
                 what the old one left",
                record.name
            );
            return Err(Error::new(ErrorKind::Unavailable, message)
                .with_repair(format!("try again in {left} seconds")));
        }
        if flows(&worker.statistics, limit).await {
            return Ok(());
        }
        let message =
            format!("the resize of {} waits: the backend does not answer", guard.record.name);
        Err(Error::new(ErrorKind::Unavailable, message)
            .with_repair("try again when it does; cleat stats shows what is in flight"))
    }

    async fn remember_size(&self, guard: &mut Guard) -> Result<()> {
        let block = block_size(guard);
        let size = guard.worker.as_ref().map(|worker| worker.size() - worker.size() % block);
        let before = guard.record.volume;
        let now = before.zip(size).map(|(volume, size)| Volume { size, ..volume });
        if now.is_none() || now == before {
            return Ok(());
        }
        guard.record.volume = now;
        self.store(guard).await
    }
}

/// Whether everything that is running now ends within `limit`.
async fn flows(page: &Page, limit: Duration) -> bool {
    let began_ns = cleat_statistics::now_ns();
    let until = Instant::now() + limit;
    loop {
        let oldest_ns = page.snapshot().oldest_ns;
        if oldest_ns == 0 || oldest_ns >= began_ns {
            return true;
        }
        if Instant::now() >= until {
            return false;
        }
        sleep(Duration::from_millis(2)).await;
    }
}

fn replay_limit(options: &Options) -> Duration {
    match (options.connections, options.replay_delay_ms) {
        (1, delay_ms @ 1..) => Duration::from_millis(u64::from(delay_ms) * 3).min(REPLAY_LIMIT),
        _ => REPLAY_LIMIT,
    }
}

fn block_size(guard: &Guard) -> u64 {
    guard.record.volume.map_or(1, |volume| u64::from(volume.block_size)).max(1)
}

fn has_shrunk(guard: &Guard, device: SeenDevice) -> bool {
    guard.worker.as_ref().is_some_and(|worker| worker.size() < device.size)
}

fn would_shrink(guard: &Guard, device: SeenDevice, size: u64) -> Error {
    let name = &guard.record.name;
    let message = format!("{name} is {} bytes long and would shrink to {size}", device.size);
    Error::new(ErrorKind::InvalidArgument, message).with_repair(
        "what lies behind the new end would be lost: make the filesystem smaller first, unmount it, \
         then cleat resize --shrink",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn io_flows_when_what_was_running_has_ended() {
        let (page, _file) = Page::create().unwrap();
        let (one, other) = (page.recorder(0).unwrap(), page.recorder(1).unwrap());
        assert!(flows(&page, Duration::ZERO).await);
        one.set_oldest(cleat_statistics::now_ns());
        other.set_oldest(cleat_statistics::now_ns());
        assert!(!flows(&page, Duration::from_millis(20)).await);
        other.set_oldest(0);
        assert!(!flows(&page, Duration::from_millis(20)).await);
        let probe = tokio::spawn(async move { flows(&page, Duration::from_secs(10)).await });
        sleep(Duration::from_millis(20)).await;
        // The one that was running is through; others have come since.
        one.set_oldest(cleat_statistics::now_ns());
        assert!(probe.await.unwrap());
        drop((one, other));
    }
}
