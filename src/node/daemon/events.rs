//! Turns the events of the kernel and of workers into work: each names a mapping to reconcile.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;

use crate::blocking::is_simulated;
use crate::context::Context;
use crate::workers::WorkerEvent;
use cleat_kernel::{Kernel, KernelEvent};

pub(crate) async fn watch_workers(cx: Arc<Context>, mut events: mpsc::Receiver<WorkerEvent>) {
    while let Some(event) = events.recv().await {
        tracing::debug!(mapping_id = event.mapping_id, "{}", event.what);
        let all = cx.register.all();
        if let Some(mapping) = all.iter().find(|mapping| mapping.mapping_id == event.mapping_id) {
            let _ = cx.work_queue.send(mapping.name.clone()).await;
        }
    }
}

/// The kernel's events, from a thread that waits for them. Without its module the kernel has none;
/// they are asked for again once something is mapped. Until then, the sweep finds everything.
#[allow(clippy::disallowed_methods, reason = "a thread of its own waits; a simulation has none")]
pub(crate) fn kernel_events(cx: &Arc<Context>) -> mpsc::Receiver<KernelEvent> {
    let (sender, receiver) = mpsc::channel(1024);
    let kernel = Arc::clone(cx.kernel.kernel());
    let mut subscribed = subscribe(kernel.as_ref());
    if is_simulated() {
        tokio::spawn(relay(subscribed, sender));
        return receiver;
    }
    // Not the cx itself, which would live as long as the thread.
    let cx = Arc::downgrade(cx);
    std::thread::spawn(move || {
        // Ends with the daemon: the receiver is dropped.
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

/// The same without a thread.
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
        .inspect_err(|error| tracing::info!("no events from the kernel yet: {}", error.report()))
        .ok()
}

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
        // A device that changes many times in a row is looked at a few times only.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
