//! Changes the size of a device in the kernel.
//!
//! For a new size the kernel freezes the device's queue and waits for every request in flight
//! (nbd_set_size; Linux 6.12 does, 6.1 does not). Meanwhile it holds the lock of all netlink commands of
//! the driver, so one backend that does not answer would block the commands for every other volume.
//! The supervisor therefore first waits until the requests in flight have ended. If they do not, it
//! defers the growth, or refuses the request of a user.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::context::Context;
use crate::mapping::Guard;
use crate::planner::{DeviceProperties, Options};
use crate::records::store_eventually;
use crate::target::not_mapped;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::policy::{Policy, RateLimits};
use cleat_kernel::DeviceIndex;
use cleat_statistics::Page;
use cleat_worker_protocol::protocol::{FromWorker, ToWorker};

/// How long a resize waits for the requests in flight. It is longer than a request takes on storage under
/// load, or during a failover.
pub(crate) const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the kernel may take to repeat the requests of a dead worker, unless a shorter delay is
/// configured: the period of its timer (nbd_xmit_timeout) and a margin.
const MAX_REPLAY_TIME: Duration = Duration::from_secs(32);

/// Sets the size of a device, in bytes. Waits up to `drain_limit` for the requests in flight.
///
/// # Errors
/// Returns `Unavailable` if the requests in flight do not end, or if the kernel may still repeat requests
/// of a dead worker.
pub(crate) async fn resize_device(
    cx: &Context,
    guard: &Guard,
    index: DeviceIndex,
    size: u64,
    drain_limit: Duration,
    deadline: Instant,
) -> Result<()> {
    // The kernel would also wait for requests that a rate limit delays.
    let policy = guard.record.options.policy;
    let lifted = Policy { limits: RateLimits::default(), ..policy };
    if lifted != policy {
        send_policy(guard, lifted, deadline).await?;
    }
    let resized = async {
        check_no_stall(guard, drain_limit).await?;
        let identity = guard.record.identity();
        cx.kernel
            .command("resize the device", deadline, move |k| k.resize(index, &identity, size))
            .await
    };
    let resized = resized.await;
    if lifted != policy {
        let restored = send_policy(guard, policy, Instant::now() + DRAIN_TIMEOUT).await;
        // A worker that does not answer is replaced or adopted again, and gets the policy then.
        if let Err(error) = restored {
            let name = &guard.record.name;
            tracing::warn!(mapping = name, "cannot restore the rate limits: {}", error.report());
        }
    }
    resized
}

async fn send_policy(guard: &Guard, policy: Policy, deadline: Instant) -> Result<()> {
    let worker = guard.worker.as_ref().ok_or_else(|| not_mapped(guard.mapping()))?;
    worker.call(ToWorker::SetPolicy(policy), Vec::new(), deadline).await.map(drop)
}

/// Checks that the kernel would not wait for requests in flight during a resize.
async fn check_no_stall(guard: &Guard, limit: Duration) -> Result<()> {
    let record = &guard.record;
    let worker = guard.worker.as_ref().ok_or_else(|| not_mapped(guard.mapping()))?;
    let replaying = guard.health.working_since.map_or(Duration::ZERO, |since| since.elapsed());
    let replay_limit = replay_limit(&record.options);
    // A worker that handed over has left no requests, and its sockets stay the same.
    if worker.statistics.reconnects() > 0 && replaying < replay_limit {
        let left = (replay_limit - replaying).as_secs() + 1;
        let message = format!(
            "cannot resize {} yet: its worker was replaced, and the kernel may still repeat \
             requests of the old one",
            record.name
        );
        return Err(Error::new(ErrorKind::Unavailable, message)
            .with_repair(format!("try again in {left} seconds")));
    }
    if requests_drain(&worker.statistics, limit).await {
        return Ok(());
    }
    let message = format!("cannot resize {}: the backend does not answer", guard.record.name);
    Err(Error::new(ErrorKind::Unavailable, message)
        .with_repair("try again when it answers; cleat stats shows the requests in flight"))
}

/// Sends the worker a command that it answers with the size of the volume, and returns the size in bytes.
pub(crate) async fn request_size(
    guard: &Guard,
    command: ToWorker,
    deadline: Instant,
) -> Result<u64> {
    let worker = guard.worker.as_ref().ok_or_else(|| not_mapped(guard.mapping()))?;
    match worker.call(command, Vec::new(), deadline).await? {
        FromWorker::Size { size } => Ok(size),
        other => {
            let message = format!("unexpected answer of the worker: {other:?}");
            Err(Error::new(ErrorKind::Internal, message))
        }
    }
}

/// Records the size of the volume, in whole blocks, if it has changed. A supervisor with an older record gets
/// the size from the worker.
pub(crate) async fn record_size(cx: &Context, guard: &mut Guard) {
    let block = block_size(guard);
    let size = guard.worker.as_ref().map(|worker| worker.size() - worker.size() % block);
    let before = guard.record.volume.clone();
    let now = before.clone().zip(size).map(|(volume, size)| DeviceProperties { size, ..volume });
    if now.is_none() || now == before {
        return;
    }
    guard.record.volume = now;
    store_eventually(cx, guard).await;
}

pub(crate) fn block_size(guard: &Guard) -> u64 {
    guard.record.volume.as_ref().map_or(1, |volume| u64::from(volume.block_size)).max(1)
}

/// Waits up to `limit` until every request that is in flight now has ended. Returns whether they have.
async fn requests_drain(page: &Page, limit: Duration) -> bool {
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
        (1, delay_ms @ 1..) => Duration::from_millis(u64::from(delay_ms) * 3).min(MAX_REPLAY_TIME),
        _ => MAX_REPLAY_TIME,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_requests_that_were_in_flight_are_waited_for() {
        let (page, _file) = Page::create().unwrap();
        let (one, other) = (page.recorder(0).unwrap(), page.recorder(1).unwrap());
        assert!(requests_drain(&page, Duration::ZERO).await);
        one.set_oldest(cleat_statistics::now_ns());
        other.set_oldest(cleat_statistics::now_ns());
        assert!(!requests_drain(&page, Duration::from_millis(20)).await);
        other.set_oldest(0);
        assert!(!requests_drain(&page, Duration::from_millis(20)).await);
        let probe =
            tokio::spawn(async move { requests_drain(&page, Duration::from_secs(10)).await });
        sleep(Duration::from_millis(20)).await;
        // The earlier request has ended, and another one has begun since.
        one.set_oldest(cleat_statistics::now_ns());
        assert!(probe.await.unwrap());
        drop((one, other));
    }
}
