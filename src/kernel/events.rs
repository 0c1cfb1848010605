//! What the kernel and udev tell by themselves: one thread for all who listen.

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

/// How long the subscription may take: it goes through the lock of all netlink commands.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// Hands events to its subscribers, until it is dropped.
#[derive(Debug)]
pub(super) struct Hub {
    subscribers: Subscribers,
    stop: Arc<EventFd>,
}

type Subscribers = Arc<Mutex<Vec<Sender<KernelEvent>>>>;

impl Hub {
    /// Subscribes to nbd's events and, where it can, udev's.
    pub(super) fn start() -> Result<Self> {
        let failed = |message: &str, error: std::io::Error| Error::from_io(message, error);
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let stop = EventFd::from_flags(flags);
        let stop = Arc::new(stop.map_err(|errno| failed("cannot make an eventfd", errno.into()))?);
        let hub = Self { subscribers: Subscribers::default(), stop };
        let (subscribers, stop) = (Arc::clone(&hub.subscribers), Arc::clone(&hub.stop));
        let (started, result) = bounded(1);
        // udev's monitor belongs to one thread, so it is made there.
        std::thread::Builder::new()
            .name("kernel-events".into())
            .spawn(move || {
                // Nobody waits for the answer any more when the time was up.
                match LinkEvents::subscribe() {
                    Ok(links) if started.send(Ok(())).is_ok() => {
                        listen(&links, &subscribers, &stop);
                    }
                    Ok(_) => {}
                    Err(error) => drop(started.send(Err(error))),
                }
            })
            .map_err(|error| failed("cannot start a thread for the kernel's events", error))?;
        result.recv_timeout(START_TIMEOUT).unwrap_or_else(|_| {
            let message = "the kernel did not accept a subscription to nbd's events in time";
            Err(Error::new(ErrorKind::TimedOut, message))
        })?;
        Ok(hub)
    }

    /// Events from now on, of which at most `queue` wait.
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
        .inspect_err(
            |error| tracing::info!(%error, "no udev events: devices are looked at instead"),
        )
        .ok();
    loop {
        let mut fds = vec![
            PollFd::new(stop.as_fd(), PollFlags::POLLIN),
            PollFd::new(descriptor::of_netlink(&links.0), PollFlags::POLLIN),
        ];
        fds.extend(monitor.iter().map(|m| PollFd::new(m.as_fd(), PollFlags::POLLIN)));
        if poll(&mut fds, PollTimeout::NONE).is_err() {
            // Interrupted by a signal.
            continue;
        }
        let ready: Vec<bool> = fds.iter().map(|fd| fd.any().unwrap_or(false)).collect();
        if ready[0] {
            return;
        }
        if ready[1] {
            for index in links.receive() {
                tell(subscribers, KernelEvent::LinkDead(index));
            }
        }
        let Some(monitor) = monitor.as_ref().filter(|_| ready.get(2) == Some(&true)) else {
            continue;
        };
        for event in monitor.iter() {
            if let Some(index) = event.sysname().to_str().and_then(sysfs::index_of) {
                tell(subscribers, KernelEvent::Changed(index));
            }
        }
    }
}

/// Hands an event on; a subscriber whose queue is full loses it.
fn tell(subscribers: &Subscribers, event: KernelEvent) {
    lock(subscribers)
        .retain(|sender| !matches!(sender.try_send(event), Err(TrySendError::Disconnected(_))));
}

fn lock(subscribers: &Subscribers) -> std::sync::MutexGuard<'_, Vec<Sender<KernelEvent>>> {
    // Whoever panicked with it: the list is whole.
    subscribers.lock().unwrap_or_else(PoisonError::into_inner)
}
