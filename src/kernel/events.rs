//! Events from the driver and from udev: one thread serves all subscribers.

use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::netlink::LinkEvents;
use super::{KernelEvent, sysfs};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_sys::descriptor;

/// The time limit of the subscription, which takes the lock that all netlink commands share.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// Forwards events to its subscribers until it is dropped.
#[derive(Debug)]
pub(super) struct Hub {
    subscribers: Subscribers,
    stop: Arc<EventFd>,
}

type Subscribers = Arc<Mutex<Vec<Sender<KernelEvent>>>>;

impl Hub {
    /// Subscribes to the events of nbd and, if the netlink group is available, of udev. Blocks for at
    /// most [`START_TIMEOUT`].
    ///
    /// # Errors
    /// Returns `TimedOut` at the deadline, and the errors of netlink.
    pub(super) fn start() -> Result<Self> {
        let failed = |message: &str, error: std::io::Error| Error::from_io(message, error);
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let stop = EventFd::from_flags(flags);
        let stop = Arc::new(stop.map_err(|errno| failed("cannot make an eventfd", errno.into()))?);
        let hub = Self { subscribers: Subscribers::default(), stop };
        let (subscribers, stop) = (Arc::clone(&hub.subscribers), Arc::clone(&hub.stop));
        let (started, result) = bounded(1);
        // The udev monitor cannot be sent between threads, so its own thread creates it.
        std::thread::Builder::new()
            .name("kernel-events".into())
            .spawn(move || {
                // Sending fails if the caller timed out.
                match LinkEvents::subscribe() {
                    Ok(links) if started.send(Ok(())).is_ok() => {
                        listen(&links, &subscribers, &stop);
                    }
                    Ok(_) => {}
                    Err(error) => drop(started.send(Err(error))),
                }
            })
            .map_err(|error| failed("cannot start the thread for kernel events", error))?;
        result.recv_timeout(START_TIMEOUT).unwrap_or_else(|_| {
            let message = "cannot subscribe to nbd events: the kernel did not answer in time";
            Err(Error::new(ErrorKind::TimedOut, message))
        })?;
        Ok(hub)
    }

    /// Returns a channel of the events from now on. At most `queue` events wait in it; further events
    /// are lost.
    pub(super) fn subscribe(&self, queue: usize) -> Receiver<KernelEvent> {
        let (sender, receiver) = bounded(queue);
        lock(&self.subscribers).push(sender);
        receiver
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        let _ = self.stop.write(1);
    }
}

fn listen(links: &LinkEvents, subscribers: &Subscribers, stop: &EventFd) {
    let monitor = udev::MonitorBuilder::new()
        .and_then(|builder| builder.match_subsystem("block"))
        .and_then(udev::MonitorBuilder::listen);
    let monitor = monitor
        .inspect_err(|error| tracing::info!(%error, "no udev events: devices are polled instead"))
        .ok();
    loop {
        let mut fds = vec![
            PollFd::new(stop.as_fd(), PollFlags::POLLIN),
            PollFd::new(descriptor::of_netlink(&links.0), PollFlags::POLLIN),
        ];
        fds.extend(monitor.iter().map(|m| PollFd::new(m.as_fd(), PollFlags::POLLIN)));
        if poll(&mut fds, PollTimeout::NONE).is_err() {
            // A signal interrupted the wait.
            continue;
        }
        let ready: Vec<bool> = fds.iter().map(|fd| fd.any().unwrap_or(false)).collect();
        if ready[0] {
            return;
        }
        if ready[1] {
            for index in links.receive() {
                publish(subscribers, KernelEvent::LinkDead(index));
            }
        }
        let Some(monitor) = monitor.as_ref().filter(|_| ready.get(2) == Some(&true)) else {
            continue;
        };
        for event in monitor.iter() {
            if let Some(index) = event.sysname().to_str().and_then(sysfs::index_of) {
                publish(subscribers, KernelEvent::Changed(index));
            }
        }
    }
}

/// Sends an event to every subscriber. A subscriber whose queue is full loses it.
fn publish(subscribers: &Subscribers, event: KernelEvent) {
    lock(subscribers)
        .retain(|sender| !matches!(sender.try_send(event), Err(TrySendError::Disconnected(_))));
}

fn lock(subscribers: &Subscribers) -> std::sync::MutexGuard<'_, Vec<Sender<KernelEvent>>> {
    // Every change of the list is complete, so it is valid after a panic, too.
    subscribers.lock().unwrap_or_else(PoisonError::into_inner)
}
