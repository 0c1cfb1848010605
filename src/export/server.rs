//! The connection threads of one volume.
//!
//! Input: connected sockets. Output: one [`Event`] for each connection that has ended. The threads share only
//! the volume, the policy and the statistics page.

mod handshakes;
mod thread;

use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};

use super::End;
use super::connection::Parts;
use super::control::{Control, Desired};
pub use super::limits::Limits;
use super::link::ring_entries;
use super::modifications::Registry;
use super::policy::ActivePolicy;
use cleat_backend::{Image, Waker};
use cleat_core::clock::{Clock, SystemClock};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::policy::Policy;
use cleat_nbd::handshake::MAX_STRING;
use cleat_statistics::{Page, Recorder, SLOTS};
use handshakes::{Origin, displaced};
use thread::{Alive, Crew, Ended, Live, Places, Task};

/// Events that may wait to be received before connection threads wait for the receiver.
const EVENTS: usize = 256;

/// The peer of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The kernel's driver: there is no negotiation.
    Kernel,
    /// An NBD client.
    Client,
}

/// A connection's number in its server; never used again.
pub type ConnectionId = u64;

/// An event of a server.
#[derive(Debug)]
pub enum Event {
    /// A connection is over: its socket is closed or handed over, and its requests have ended.
    ConnectionEnded {
        /// The connection's number.
        id: ConnectionId,
        /// How it has ended.
        end: End,
    },
}

/// What clients see of the volume by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExportName {
    /// The export's name; at most 4096 bytes. Clients may always use the empty name instead.
    pub name: String,
    /// A description for people; at most 4096 bytes.
    pub description: String,
}

/// The data path of one volume.
pub struct Server {
    image: Arc<dyn Image>,
    export: ExportName,
    page: Page,
    limits: Limits,
    policy: Arc<ActivePolicy>,
    modifications: Arc<Registry>,
    /// In the order in which they were added.
    connections: Mutex<Vec<Handle>>,
    places: Arc<Places>,
    live: Arc<Live>,
    crew: Crew,
    next_id: AtomicU64,
    /// For later connections; changed under the lock of `connections`.
    fail_io: AtomicBool,
    events: Sender<Event>,
}

struct Handle {
    control: Arc<Control>,
    kind: Kind,
    origin: Option<Origin>,
    ended: Ended,
}

impl Handle {
    /// Whether it is a client that has not completed its handshake.
    fn negotiates(&self) -> bool {
        self.kind == Kind::Client
            && !self.control.transmits()
            && self.control.desired() != Desired::Abort
    }
}

/// Returns how many threads a server with clients may have at one time: one for each connection and each
/// handshake, and two that are about to end.
pub(crate) fn most_threads(limits: &Limits) -> usize {
    limits.connections + handshakes::IN_ALL + 2
}

/// Reserves rings for `connections` connections, see [`cleat_sys::ring::reserve`]. Must be called before a
/// confinement that forbids new rings.
///
/// # Errors
/// Returns an error if io_uring cannot be used.
pub fn reserve_rings(connections: usize, limits: &Limits) -> Result<()> {
    cleat_sys::ring::reserve(connections, ring_entries(limits.depth))
        .map_err(|error| Error::from_io("cannot make io_uring rings", error))
}

impl Server {
    /// Makes a server without connections. The receiver gets the ends of connections; it must be read or
    /// dropped.
    ///
    /// # Errors
    /// `InvalidArgument` for limits or names beyond what is allowed.
    pub fn new(
        image: Arc<dyn Image>,
        export: ExportName,
        page: Page,
        limits: Limits,
    ) -> Result<(Self, Receiver<Event>)> {
        Self::with_clock(image, export, page, limits, Arc::new(SystemClock))
    }

    /// Makes a server as [`Server::new`] does, whose outages and rate limits follow `clock`.
    ///
    /// # Errors
    /// As [`Server::new`].
    pub fn with_clock(
        image: Arc<dyn Image>,
        export: ExportName,
        page: Page,
        limits: Limits,
        clock: Arc<dyn Clock>,
    ) -> Result<(Self, Receiver<Event>)> {
        let invalid = |message: String| Error::new(ErrorKind::InvalidArgument, message);
        if !(1..=SLOTS).contains(&limits.connections) {
            return Err(invalid(format!(
                "limit of connections is {}: must be 1 to {SLOTS}",
                limits.connections
            )));
        }
        if !(1..=1024).contains(&limits.depth) {
            return Err(invalid(format!("queue depth is {}: must be 1 to 1024", limits.depth)));
        }
        if export.name.len() > MAX_STRING || export.description.len() > MAX_STRING {
            return Err(invalid(format!("export name is longer than {MAX_STRING} bytes")));
        }
        let (events, receiver) = bounded(EVENTS);
        let policy = Arc::new(ActivePolicy::new(Policy::default(), clock));
        let (modifications, connections, live, next_id, fail_io) = Default::default();
        let places = Places::new(limits.connections);
        let server = Self {
            image,
            export,
            page,
            limits,
            policy,
            modifications,
            connections,
            places,
            live,
            crew: Crew::new(),
            next_id,
            fail_io,
            events,
        };
        Ok((server, receiver))
    }

    /// Serves the kernel's driver at the other end of `socket`, in transmission from the first byte.
    /// Blocks until the thread is set up.
    ///
    /// # Errors
    /// `Unavailable` at the limit of connections; `Unsupported` and others where io_uring cannot be used;
    /// the backend's error when it cannot serve another thread.
    pub fn add_kernel_connection(&self, socket: OwnedFd) -> Result<ConnectionId> {
        self.add(socket, Kind::Kernel, None, None)
    }

    /// Serves the NBD client at the other end of `socket`, beginning with the negotiation. Blocks until the
    /// thread is set up. `address` is the client's, if it has one.
    ///
    /// Clients that have not completed the negotiation do not count to the limit of connections. There are at
    /// most 32 of them, and 16 from one address; beyond that, the oldest one is disconnected.
    ///
    /// # Errors
    /// As [`Server::add_kernel_connection`].
    pub fn add_client(&self, socket: OwnedFd, address: Option<IpAddr>) -> Result<ConnectionId> {
        self.add(socket, Kind::Client, address, None)
    }

    /// Returns how many connections are being served.
    pub fn connections(&self) -> usize {
        self.lock().iter().filter(|handle| !handle.ended.is_finished()).count()
    }

    /// With `true`, every request of every connection fails from now on, later connections included.
    /// Requests that the backend has not ended fail too; their effects may still happen later. Does not
    /// block.
    pub fn set_fail_io(&self, fail: bool) {
        let handles = self.lock();
        self.fail_io.store(fail, Ordering::Relaxed);
        handles.iter().for_each(|handle| handle.control.set_fail_io(fail));
    }

    /// Fails all I/O as [`Server::set_fail_io`] does, and returns once every connection has answered all its
    /// requests and starts nothing more at the backend. Waits for the rest of `limit` for requests that
    /// run at the backend. Returns how many still run then.
    ///
    /// # Errors
    /// `TimedOut` when a connection's thread has not failed its requests within `limit`.
    pub fn fail_all_io(&self, limit: Duration) -> Result<u32> {
        const CHECK_INTERVAL: Duration = Duration::from_millis(1);
        let until = self.clock().now() + limit;
        self.set_fail_io(true);
        loop {
            // A thread that has ended has nothing at the backend: its ring is gone.
            let handles = self.lock();
            let serving = handles.iter().filter(|handle| !handle.ended.is_finished());
            let failing: Option<u32> = serving.map(|handle| handle.control.failing()).sum();
            drop(handles);
            let over = self.clock().now() >= until;
            match failing {
                Some(0) => return Ok(0),
                Some(at_backend) if over => return Ok(at_backend),
                None if over => {
                    let message = "a connection's thread hangs: it has not failed its requests";
                    return Err(Error::new(ErrorKind::TimedOut, message));
                }
                _ => {
                    #[allow(clippy::disallowed_methods, reason = "waits for other threads")]
                    std::thread::sleep(CHECK_INTERVAL);
                }
            }
        }
    }

    /// Puts `policy` into force for every connection, also for requests that wait already. Without a call,
    /// the default policy is in force. Does not block.
    pub fn set_policy(&self, policy: Policy) {
        let handles = self.lock();
        self.policy.set(policy);
        handles.iter().for_each(|handle| handle.control.waker().wake());
    }

    /// Wakes `waker` whenever the statistics page begins or ceases to show an outage of the backend.
    pub fn watch_outages(&self, waker: Waker) {
        self.policy.set_watcher(waker);
    }

    /// Ends every connection. Running requests are finished and answered until `limit` has passed; those
    /// that still run then are cut off. Blocks until all threads have ended.
    ///
    /// # Errors
    /// `TimedOut` when the backend does not end a request even then.
    pub fn stop(&self, limit: Duration) -> Result<()> {
        self.lock().iter().for_each(|handle| handle.control.ask(Desired::Stop));
        self.wait(limit).or_else(|_| self.abort())
    }

    /// Ends every connection at once. Blocks for at most 5 seconds.
    ///
    /// # Errors
    /// `TimedOut` when a backend keeps a thread busy for longer.
    pub fn abort(&self) -> Result<()> {
        const ABORT_LIMIT: Duration = Duration::from_secs(5);
        self.lock().iter().for_each(|handle| handle.control.ask(Desired::Abort));
        self.wait(ABORT_LIMIT)
    }

    /// Waits until every thread has ended, at most for `limit`.
    pub(super) fn wait(&self, limit: Duration) -> Result<()> {
        let left = self.live.wait_for_none(limit);
        if left > 0 {
            let message = format!("{left} connections did not end in time");
            return Err(Error::new(ErrorKind::TimedOut, message));
        }
        self.lock().clear();
        Ok(())
    }

    /// The clock of all connections.
    pub(super) fn clock(&self) -> &dyn Clock {
        self.policy.clock().as_ref()
    }

    /// Returns the control of every connection that is being served.
    pub(super) fn controls(&self) -> Vec<Arc<Control>> {
        let handles = self.lock();
        let live = handles.iter().filter(|handle| !handle.ended.is_finished());
        live.map(|handle| Arc::clone(&handle.control)).collect()
    }

    /// Starts the thread of a connection. With `unread`, another process has served the connection before,
    /// and it starts paused.
    pub(super) fn add(
        &self,
        socket: OwnedFd,
        kind: Kind,
        address: Option<IpAddr>,
        unread: Option<Vec<u8>>,
    ) -> Result<ConnectionId> {
        let origin = address.map(Origin::of);
        let mut handles = self.lock();
        handles.retain(|handle| !handle.ended.is_finished());
        let served = match kind {
            Kind::Kernel => handles.len(),
            Kind::Client => self.places.taken(),
        };
        if served >= self.limits.connections {
            return Err(self.is_full());
        }
        if kind == Kind::Client {
            self.displace(&handles, origin);
        }
        let (desired, recorder) = match (&unread, kind) {
            (None, Kind::Kernel) => (Desired::Run, self.page.any_recorder()),
            // It counts as a connection after its handshake.
            (None, Kind::Client) => (Desired::Run, self.wait_for_recorder()),
            (Some(_), _) => (Desired::Pause, self.page.silent_recorder()),
        };
        let recorder = recorder.ok_or_else(|| self.is_full())?;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let control = Arc::new(Control::new(desired).map_err(not_started)?);
        control.set_fail_io(self.fail_io.load(Ordering::Relaxed));
        let task = Task {
            id,
            kind,
            socket,
            unread: unread.unwrap_or_default(),
            export: self.export.clone(),
            parts: Parts {
                image: Arc::clone(&self.image),
                control: Arc::clone(&control),
                policy: Arc::clone(&self.policy),
                modifications: Arc::clone(&self.modifications),
                recorder,
                limits: self.limits,
            },
            places: Arc::clone(&self.places),
            events: self.events.clone(),
        };
        let ended = self.start(task)?;
        handles.push(Handle { control, kind, origin, ended });
        Ok(id)
    }

    /// Disconnects a client that has not completed its handshake, if a new one from `origin` would be one too
    /// many.
    fn displace(&self, handles: &[Handle], origin: Option<Origin>) {
        let silent: Vec<&Handle> = handles.iter().filter(|handle| handle.negotiates()).collect();
        let origins: Vec<_> = silent.iter().map(|handle| handle.origin).collect();
        // Each needs counters. There is always room for one, because not all places are taken.
        let limit = handshakes::IN_ALL.min(SLOTS - self.places.taken());
        if let Some(index) = displaced(&origins, origin, limit) {
            silent[index].control.ask(Desired::Abort);
        }
    }

    /// Returns unused counters. Waits a moment for those of a client that was displaced.
    fn wait_for_recorder(&self) -> Option<Recorder> {
        const ATTEMPTS: u32 = 100;
        const PAUSE: Duration = Duration::from_millis(1);
        (0..ATTEMPTS).find_map(|attempt| {
            if attempt > 0 {
                #[allow(clippy::disallowed_methods, reason = "waits for another thread")]
                std::thread::sleep(PAUSE);
            }
            self.page.silent_recorder()
        })
    }

    /// Serves a connection on a thread of its own, and waits until the connection is set up.
    fn start(&self, task: Task) -> Result<Ended> {
        let (ready, started) = bounded(1);
        let alive = Alive::new(&self.live);
        let ended = alive.ended();
        let name = format!("connection-{}", task.id);
        let run = move || {
            task.run(&ready);
            // Last of all: nothing of the connection is left.
            drop(alive);
        };
        self.crew.run(name, Box::new(run)).map_err(not_started)?;
        // Without a message the thread has panicked.
        started.recv().unwrap_or_else(|_| {
            Err(Error::new(ErrorKind::Internal, "a connection's thread died at its start"))
        })?;
        Ok(ended)
    }

    fn is_full(&self) -> Error {
        let message = format!("{} connections are served already", self.limits.connections);
        Error::new(ErrorKind::Unavailable, message)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Handle>> {
        // No code that can panic leaves the list half changed.
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A thread that a backend keeps busy is left behind; its volume lives as long.
        let _ = self.abort();
    }
}

fn not_started(error: std::io::Error) -> Error {
    Error::from_io("cannot start a connection's thread", error)
}
