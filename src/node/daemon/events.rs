//! Adds mappings to the work queue after events of the kernel and of workers.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;

use crate::blocking::is_simulated;
use crate::context::Context;
use crate::workers::WorkerEvent;
use cleat_kernel::{Kernel, KernelEvent};

/// Schedules a reconcile for every event of a worker.
pub(crate) async fn watch_workers(cx: Arc<Context>, mut events: mpsc::Receiver<WorkerEvent>) {
    while let Some(event) = events.recv().await {
        tracing::debug!(mapping_id = event.mapping_id, "{}", event.what);
        let all = cx.register.all();
        if let Some(mapping) = all.iter().find(|mapping| mapping.mapping_id == event.mapping_id) {
            let _ = cx.work_queue.send(mapping.name.clone()).await;
        }
    }
}

/// Returns a channel with the kernel's events, which a thread receives. While the nbd module is not loaded
/// there are no events: the thread subscribes again when there are mappings, and until then the sweep finds
/// all changes.
#[allow(clippy::disallowed_methods, reason = "a separate thread sleeps; a simulation has none")]
pub(crate) fn kernel_events(cx: &Arc<Context>) -> mpsc::Receiver<KernelEvent> {
    let (sender, receiver) = mpsc::channel(1024);
    let kernel = Arc::clone(cx.kernel.kernel());
    let mut subscribed = subscribe(kernel.as_ref());
    if is_simulated() {
        tokio::spawn(relay(subscribed, sender));
        return receiver;
    }
    // A weak reference, since the thread may outlive the daemon by a second.
    let cx = Arc::downgrade(cx);
    std::thread::spawn(move || {
        // The receiver is dropped when the daemon ends.
        while !sender.is_closed() {
            let Some(events) = &subscribed else {
                std::thread::sleep(Duration::from_secs(1));
                let mapped = cx.upgrade().is_some_and(|e| !e.register.all().is_empty());
                subscribed = if mapped { subscribe(kernel.as_ref()) } else { None };
                continue;
            };
            match events.recv_timeout(Duration::from_secs(1)) {
                Ok(event) => {
                    let _ = sender.try_send(event);
                }
                Err(crossbeam_channel::RecvTimeoutError::Timeout) => {}
                Err(crossbeam_channel::RecvTimeoutError::Disconnected) => subscribed = None,
            }
        }
    });
    receiver
}

/// Forwards the events of the simulated kernel, without a thread.
async fn relay(
    subscribed: Option<crossbeam_channel::Receiver<KernelEvent>>,
    sender: mpsc::Sender<KernelEvent>,
) {
    while !sender.is_closed() {
        tokio::time::sleep(Duration::from_secs(1)).await;
        for event in subscribed.iter().flat_map(crossbeam_channel::Receiver::try_iter) {
            let _ = sender.try_send(event);
        }
    }
}

fn subscribe(kernel: &dyn Kernel) -> Option<crossbeam_channel::Receiver<KernelEvent>> {
    kernel
        .events()
        .inspect_err(|error| tracing::info!("the kernel sends no events yet: {}", error.report()))
        .ok()
}

/// Schedules a reconcile for every mapping whose device the kernel reports as changed or dead.
pub(crate) async fn watch_kernel(cx: Arc<Context>, mut events: mpsc::Receiver<KernelEvent>) {
    let mut batch = Vec::new();
    while events.recv_many(&mut batch, 256).await > 0 {
        let indices: BTreeSet<u32> = batch
            .drain(..)
            .map(|event| match event {
                KernelEvent::LinkDead(index) | KernelEvent::Changed(index) => index,
            })
            .collect();
        for mapping in cx.register.all() {
            if mapping.view().device.is_some_and(|device| indices.contains(&device.index)) {
                let _ = cx.work_queue.send(mapping.name.clone()).await;
            }
        }
        // Limits how often a device that changes many times in a row is reconciled.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
