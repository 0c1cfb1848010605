//! The sockets between the kernel and a worker.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tokio::time::{Instant, sleep};

use crate::context::Context;
use crate::mapping::Guard;
use crate::worker_start::{no_worker, within};
use crate::workers::Worker;
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_kernel::DeviceIndex;

/// The timeout for a worker to take new sockets.
pub(crate) const SERVE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the connections of a worker may take to appear in its counters.
const CONNECTIONS_TIMEOUT: Duration = Duration::from_secs(1);

/// Passes sockets to the worker, which serves them.
pub(crate) async fn serve(guard: &Guard, ends: Vec<OwnedFd>, deadline: Instant) -> Result<()> {
    let worker = guard.worker.as_ref().ok_or_else(|| no_worker(&guard.record))?;
    worker.serve(ends, deadline).await
}

/// Waits until the worker's counters show its connections, so that the next observation does not report
/// them as missing. Returns after a timeout, too; then the next observation decides.
pub(crate) async fn wait_for_connections(guard: &Guard) {
    let Some(worker) = &guard.worker else { return };
    let wanted = u64::from(guard.record.options.connections);
    let until = Instant::now() + CONNECTIONS_TIMEOUT;
    while worker.statistics.snapshot().connections < wanted
        && Instant::now() < until
        && !worker.has_ended()
    {
        sleep(Duration::from_millis(1)).await;
    }
}

/// How long the kernel may take to notice that the sockets of the previous worker are closed.
const DEAD_LINK_TIMEOUT: Duration = Duration::from_secs(3);

/// Passes new sockets to the kernel until it has replaced `missing` dead connections, and the other ends to
/// `worker`.
///
/// RECONFIGURE replaces only dead connections and silently drops the other sockets
/// (nbd_genl_reconfigure). A dropped socket shows as a hang-up on its other end. The worker gets only the
/// ends of sockets that the kernel accepted.
///
/// # Errors
/// Returns `Unavailable` if the kernel still treats old connections as alive after 3 s, and errors of the
/// worker.
pub(crate) async fn replace_connections(
    cx: &Context,
    guard: &Guard,
    worker: &Worker,
    index: DeviceIndex,
    missing: u32,
    deadline: Instant,
) -> Result<()> {
    let until = within(deadline, DEAD_LINK_TIMEOUT);
    let mut missing = missing;
    loop {
        let accepted = reconfigure(cx, guard, index, missing, deadline).await?;
        missing -= u32::try_from(accepted.len()).unwrap_or(missing).min(missing);
        if !accepted.is_empty() {
            worker.serve(accepted, within(deadline, SERVE_TIMEOUT)).await?;
        }
        if missing == 0 {
            return Ok(());
        }
        if Instant::now() >= until {
            let message = format!(
                "cannot reconnect /dev/nbd{index}: the kernel still treats {missing} of its old \
                 connections as alive"
            );
            return Err(Error::new(ErrorKind::Unavailable, message));
        }
        sleep(Duration::from_millis(20)).await;
    }
}

/// Passes `count` new sockets to the kernel for a device. Returns the other ends of those that it accepted.
async fn reconfigure(
    cx: &Context,
    guard: &Guard,
    index: DeviceIndex,
    count: u32,
    deadline: Instant,
) -> Result<Vec<OwnedFd>> {
    let (kernel_ends, worker_ends) = socket_pairs(count)?;
    let identity = guard.record.identity();
    cx.kernel
        .command("give the device new connections", deadline, move |kernel| {
            kernel.reconfigure(index, &identity, kernel_ends)
        })
        .await?;
    cx.point("reconfigured, not served").await;
    Ok(worker_ends.into_iter().filter(|end| !hung_up(end)).collect())
}

/// Creates connected pairs of sockets. Returns the ends for the kernel and the ends for the worker.
pub(crate) fn socket_pairs(count: u32) -> Result<(Vec<OwnedFd>, Vec<OwnedFd>)> {
    (0..count)
        .map(|_| UnixStream::pair().map(|(kernel, worker)| (kernel.into(), worker.into())))
        .collect::<std::io::Result<_>>()
        .map_err(|error| {
            Error::from_io("cannot create sockets for the kernel", error)
                .with_repair("raise the daemon's limit of open files (LimitNOFILE=)")
        })
}

/// Returns whether the other end of the socket is closed.
pub(crate) fn hung_up(socket: &OwnedFd) -> bool {
    let mut set = [PollFd::new(socket.as_fd(), PollFlags::empty())];
    let polled = poll(&mut set, PollTimeout::ZERO).is_ok_and(|ready| ready > 0);
    polled && set[0].revents().is_some_and(|events| events.contains(PollFlags::POLLHUP))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_socket_is_detected() {
        let (kernel, worker) = socket_pairs(1).unwrap();
        assert!(!hung_up(&worker[0]));
        drop(kernel);
        assert!(hung_up(&worker[0]));
    }
}
