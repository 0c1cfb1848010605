//! Changes the size of a device in the kernel.
//!
//! For a new size the kernel freezes the device's queue and waits for every request in flight
//! (nbd_set_size; Linux 6.12 does, 6.1 does not), with the lock held under which all netlink commands
//! of the driver go. One backend that hangs would stop the commands for every other volume. So the
//! supervisor first sees every request that is running come to its end, and otherwise puts the
//! growth off, or says no to who asked.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::context::Context;
use crate::find::not_mapped;
use crate::mapping::Guard;
use crate::planner::{DeviceProperties, Options};
use crate::records::store;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::policy::{Policy, RateLimits};
use cleat_kernel::DeviceIndex;
use cleat_statistics::Page;
use cleat_worker::protocol::{FromWorker, ToWorker};

/// For everything that is running to end before a resize: longer than storage under load, or that
/// changes over to a standby, takes for a request.
pub(crate) const FLOW_LIMIT: Duration = Duration::from_secs(10);

/// How long the kernel may take to repeat what it sent to a worker that died, unless it was told to do
/// so sooner: its tick, and some more (nbd_xmit_timeout).
const REPLAY_LIMIT: Duration = Duration::from_secs(32);

/// `flow_limit`: for what is running to end.
pub(crate) async fn resize_device(
    cx: &Context,
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
        send_policy(guard, lifted, deadline).await?;
    }
    let resized = async {
        check_no_stall(guard, flow_limit).await?;
        let identity = guard.record.identity();
        cx.kernel
            .command("resize the device", deadline, move |k| k.resize(index, &identity, size))
            .await
    };
    let resized = resized.await;
    if lifted != policy {
        let told = send_policy(guard, policy, Instant::now() + FLOW_LIMIT).await;
        // A worker that does not hear it is replaced, or adopted anew, and told then.
        if let Err(error) = told {
            tracing::warn!(mapping = guard.record.name, "limits wait: {}", error.report());
        }
    }
    resized
}

async fn send_policy(guard: &Guard, policy: Policy, deadline: Instant) -> Result<()> {
    let worker = guard.worker.as_ref().ok_or_else(|| not_mapped(guard.mapping()))?;
    worker.call(ToWorker::SetPolicy(policy), Vec::new(), deadline).await.map(drop)
}

/// Sees to it that nothing keeps the kernel waiting.
async fn check_no_stall(guard: &Guard, limit: Duration) -> Result<()> {
    let record = &guard.record;
    let worker = guard.worker.as_ref().ok_or_else(|| not_mapped(guard.mapping()))?;
    let replaying = guard.health.working_since.map_or(Duration::ZERO, |since| since.elapsed());
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
    let message = format!("the resize of {} waits: the backend does not answer", guard.record.name);
    Err(Error::new(ErrorKind::Unavailable, message)
        .with_repair("try again when it does; cleat stats shows what is in flight"))
}

/// A command that the worker answers with the volume's size.
pub(crate) async fn request_size(
    guard: &Guard,
    command: ToWorker,
    deadline: Instant,
) -> Result<u64> {
    let worker = guard.worker.as_ref().ok_or_else(|| not_mapped(guard.mapping()))?;
    match worker.call(command, Vec::new(), deadline).await? {
        FromWorker::Size { size } => Ok(size),
        other => {
            let message = format!("the worker answered out of turn: {other:?}");
            Err(Error::new(ErrorKind::Internal, message))
        }
    }
}

pub(crate) async fn record_size(cx: &Context, guard: &mut Guard) -> Result<()> {
    let block = block_size(guard);
    let size = guard.worker.as_ref().map(|worker| worker.size() - worker.size() % block);
    let before = guard.record.volume;
    let now = before.zip(size).map(|(volume, size)| DeviceProperties { size, ..volume });
    if now.is_none() || now == before {
        return Ok(());
    }
    guard.record.volume = now;
    store(cx, guard).await
}

pub(crate) fn block_size(guard: &Guard) -> u64 {
    guard.record.volume.map_or(1, |volume| u64::from(volume.block_size)).max(1)
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
