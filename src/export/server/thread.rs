//! One connection's thread, from its start to the event that reports its end.

use std::any::Any;
use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};

use super::{ConnectionId, Event, ExportName, Kind};
use crate::End;
use crate::connection::{Connection, Parts};
use cleat_backend::Image;
use cleat_core::error::Result;
use cleat_nbd::handshake::Export;
use cleat_nbd::transmission::MAX_PAYLOAD;
use cleat_nbd::wire::transmission_flags;
use cleat_sys::ring;

/// What a connection's thread is given.
pub(super) struct Task {
    pub(super) id: ConnectionId,
    pub(super) kind: Kind,
    pub(super) socket: OwnedFd,
    pub(super) unread: Vec<u8>,
    pub(super) export: ExportName,
    pub(super) parts: Parts,
    pub(super) places: Arc<Places>,
    pub(super) events: Sender<Event>,
}

impl Task {
    /// Runs the connection. Sends to `ready` whether it could be set up, and an event when it has ended.
    pub(super) fn run(self, ready: &Sender<Result<()>>) {
        let (id, events) = (self.id, self.events.clone());
        let end = match catch_unwind(AssertUnwindSafe(|| self.serve(ready))) {
            Ok(Some(end)) => end,
            // The caller that added the connection got the error.
            Ok(None) => return,
            Err(panic) => End::Panicked(panic_message(panic.as_ref())),
        };
        // It fails when the receiver is dropped: then the owner does not want the events.
        let _ = events.send(Event::ConnectionEnded { id, end });
    }

    fn serve(self, ready: &Sender<Result<()>>) -> Option<End> {
        let Self { kind, socket, unread, export, parts, places, .. } = self;
        let export = match kind {
            Kind::Kernel => None,
            Kind::Client => Some(describe(export, parts.image.as_ref())),
        };
        let control = Arc::clone(&parts.control);
        let mut connection = match Connection::new(socket, &unread, parts) {
            Ok(connection) => connection,
            Err(error) => {
                let _ = ready.send(Err(error));
                return None;
            }
        };
        let _ = ready.send(Ok(()));
        let negotiated = export.map_or(Ok(()), |export| connection.negotiate(export));
        if let Err(end) = negotiated {
            return Some(end);
        }
        let Some(_place) = places.take() else { return Some(End::Full) };
        control.set_transmits();
        let end = connection.transmit();
        // Before its place is free: this waits for the requests at the backend.
        drop(connection);
        Some(end)
    }
}

/// Returns the properties of the volume that the negotiation sends to a client.
fn describe(name: ExportName, image: &dyn Image) -> Export {
    let ExportName { name, description } = name;
    let mut blocks = image.block_sizes();
    blocks.maximum = blocks.maximum.min(MAX_PAYLOAD);
    let transmission_flags = transmission_flags(image.features());
    Export { name, description, size: image.size(), blocks, transmission_flags }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "?".to_owned())
}

/// The number of connections in transmission, and its limit.
#[derive(Debug)]
pub(super) struct Places {
    limit: usize,
    taken: AtomicUsize,
}

/// The place of one connection in transmission. Dropping it frees the place.
pub(super) struct Place(Arc<Places>);

impl Places {
    pub(super) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, taken: AtomicUsize::new(0) })
    }

    pub(super) fn taken(&self) -> usize {
        self.taken.load(Ordering::Acquire)
    }

    /// Returns a place, or `None` at the limit.
    fn take(self: &Arc<Self>) -> Option<Place> {
        let add = |taken| (taken < self.limit).then_some(taken + 1);
        self.taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, add).ok()?;
        Some(Place(Arc::clone(self)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The number of running threads, and a way to wait for their end.
#[derive(Debug, Default)]
pub(super) struct Live {
    count: Mutex<usize>,
    fell: Condvar,
}

impl Live {
    /// Waits until no thread runs, at most for `limit`. Returns how many still run.
    pub(super) fn wait_for_none(&self, limit: Duration) -> usize {
        let count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.fell.wait_timeout_while(count, limit, |count| *count > 0);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// Counts as one connection of [`Live`] until it is dropped.
pub(super) struct Alive {
    live: Arc<Live>,
    ended: Ended,
}

/// Whether nothing is left of a connection.
#[derive(Debug, Clone, Default)]
pub(super) struct Ended(Arc<AtomicBool>);

impl Ended {
    pub(super) fn is_finished(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

impl Alive {
    pub(super) fn new(live: &Arc<Live>) -> Self {
        *live.count.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Self { live: Arc::clone(live), ended: Ended::default() }
    }

    pub(super) fn ended(&self) -> Ended {
        self.ended.clone()
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.ended.0.store(true, Ordering::Release);
        *self.live.count.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.live.fell.notify_all();
    }
}

/// The work of one connection.
type Job = Box<dyn FnOnce() + Send>;

/// The threads of the connections. A thread ends with its connection, except where rings are reserved: there it
/// keeps its ring, and waits for another connection.
pub(super) struct Crew {
    jobs: Sender<Job>,
    idle: Receiver<Job>,
}

impl Crew {
    pub(super) fn new() -> Self {
        let (jobs, idle) = bounded(0);
        Self { jobs, idle }
    }

    /// Runs `job` on an idle thread, or on a new one with this name.
    ///
    /// # Errors
    /// Returns an error if no thread can be started.
    pub(super) fn run(&self, name: String, job: Job) -> io::Result<()> {
        // How long a thread whose connection has ended may take to wait for the next one.
        const IDLE_LIMIT: Duration = Duration::from_secs(1);
        // The channel has no place: this succeeds only if a thread waits.
        let Err(refused) = self.jobs.try_send(job) else { return Ok(()) };
        let mut job = refused.into_inner();
        if ring::is_exhausted() {
            match self.jobs.send_timeout(job, IDLE_LIMIT) {
                Ok(()) => return Ok(()),
                Err(refused) => job = refused.into_inner(),
            }
        }
        let idle = self.idle.clone();
        let run = move || {
            job();
            while ring::is_reserved() {
                // It fails when the server is gone.
                let Ok(next) = idle.recv() else { return };
                next();
            }
        };
        std::thread::Builder::new().name(name).spawn(run).map(drop)
    }
}
