//! Starts a worker of the next generation, which opens the volume.

use std::pin::pin;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::record::record_if_replaced;
use super::stop_worker::STOP_GRACE;
use crate::context::Context;
use crate::credentials::open_credentials;
use crate::mapping::Guard;
use crate::records::{store, store_eventually};
use crate::unlock::{self, unlock_permit};
use crate::worker_failures::StartFailure;
use crate::worker_start::{device_properties, start_message, start_permit, within};
use cleat_core::error::Result;
use cleat_statistics::Page;
use cleat_worker_protocol::protocol::Start;

/// The timeout for a start in the background, without the time that a backend may need in addition. A
/// command of the user has its own deadline.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// How long a starting worker keeps its start permit. A worker that takes longer waits for its backend, not
/// for the machine.
const PERMIT_TIMEOUT: Duration = Duration::from_secs(2);

pub(crate) async fn start_worker(cx: &Context, guard: &mut Guard, deadline: Instant) -> Result<()> {
    let _unlock_permit = unlock_permit(cx, guard, deadline).await?;
    let credentials = open_credentials(cx, &guard.record.uri, deadline).await.map_err(|error| {
        let failed = StartFailure { error, pid: 0, died: None };
        guard.health.worker_failures.start_failed(cx.clock.as_ref(), failed)
    })?;
    let permit = start_permit(cx, deadline).await?;
    let limit = START_TIMEOUT + unlock::extra_open_time(cx.registry, &guard.record.uri);
    let deadline = if guard.is_background() { within(deadline, limit) } else { deadline };
    // The process receives no command before it is recorded, so that it can be found after a crash.
    let launched = cx.workers.launch().await?;
    cx.point("worker launched").await;
    guard.record.generation += 1;
    guard.record.worker = Some(launched.id());
    guard.teardown.volume_closed = false;
    store(cx, guard).await?;
    cx.point("worker recorded").await;
    let start = Start {
        take_over: guard.take_over,
        credentials: credentials.paths,
        ..start_message(cx, &guard.record, false)
    };
    let page = guard.statistics.clone();
    // The end of the previous worker is proved, so its connections and requests no longer count.
    page.iter().for_each(Page::take_over);
    let mut starting =
        pin!(cx.workers.start(launched, start, page, credentials.descriptors, deadline));
    let started = match timeout(PERMIT_TIMEOUT, &mut starting).await {
        Ok(started) => started,
        Err(_) => {
            // The worker waits for its backend, and other workers may start.
            drop(permit);
            starting.await
        }
    };
    let worker = match started {
        Ok(worker) => worker,
        Err(failed) => {
            let failures = &mut guard.health.worker_failures;
            let error = failures.start_failed(cx.clock.as_ref(), failed);
            record_if_replaced(cx, guard, &error).await;
            return Err(error);
        }
    };
    guard.health.worker_failures.started();
    cx.point("worker started").await;
    let volume = match device_properties(&guard.record, &worker.ready) {
        Ok(volume) => volume,
        Err(error) => {
            record_if_replaced(cx, guard, &error).await;
            worker.stop(STOP_GRACE, deadline).await?;
            return Err(error);
        }
    };
    guard.statistics = Some(worker.statistics.clone());
    guard.mapping().show_statistics(Some(worker.statistics.clone()));
    guard.worker = Some(worker);
    let before = guard.record.volume.replace(volume);
    if before.is_none() {
        // The device is connected only after this: its properties cannot be read from it.
        store(cx, guard).await?;
    } else if before != guard.record.volume {
        store_eventually(cx, guard).await;
    }
    Ok(())
}
