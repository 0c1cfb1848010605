//! The connection threads of one volume.
//!
//! Comes in: connected sockets. Goes out: one [`Event`] per connection that ended. The threads share
//! the volume and the statistics page, and nothing else.

use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};

use super::End;
use super::connection::Connection;
use super::control::{Control, Desired};
use super::policy::ActivePolicy;
use cleat_backend::{Image, Waker};
use cleat_core::error::{Error, ErrorKind, Result};
use cleat_core::policy::Policy;
use cleat_nbd::handshake::{Export, MAX_STRING};
use cleat_nbd::transmission::MAX_PAYLOAD;
use cleat_nbd::wire::transmission_flags;
use cleat_statistics::{Page, Recorder, SLOTS};

/// Ends that may wait to be read before connection threads wait for the reader.
const EVENTS: usize = 256;

/// Bounds of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Connections at one time; at most [`SLOTS`].
    pub connections: usize,
    /// Requests of one connection that are running or waiting to be answered; 1 to 1024. The
    /// kernel's driver never has more than 128.
    pub depth: u32,
    /// Payload memory of one connection, in bytes. A request that is alone is admitted beyond it.
    pub buffer_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { connections: 16, depth: 128, buffer_bytes: 64 << 20 }
    }
}

/// Who is at the other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The kernel's driver: no handshake.
    Kernel,
    /// An NBD client.
    Client,
}

/// A connection's number in its server; never used again.
pub type ConnectionId = u64;

/// Something that happened by itself.
#[derive(Debug)]
pub enum Event {
    /// A connection is over, its socket closed, its requests ended.
    ConnectionEnded {
        /// Which.
        id: ConnectionId,
        /// How.
        end: End,
    },
}

/// What clients see of the volume by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExportName {
    /// At most 4096 bytes. The empty name works, too.
    pub name: String,
    /// For people; at most 4096 bytes.
    pub description: String,
}

/// The data path of one volume.
pub struct Server {
    image: Arc<dyn Image>,
    export: ExportName,
    page: Page,
    limits: Limits,
    policy: Arc<ActivePolicy>,
    connections: Mutex<Vec<Handle>>,
    live: Arc<Live>,
    next_id: AtomicU64,
    /// For connections to come; changed under the lock of `connections`.
    fail_io: AtomicBool,
    events: Sender<Event>,
}

struct Handle {
    control: Arc<Control>,
    thread: JoinHandle<()>,
}

impl Server {
    /// A server without connections. Ends of connections arrive at the receiver, which must be read
    /// or dropped.
    ///
    /// # Errors
    /// `InvalidArgument` for limits or names beyond what is allowed.
    pub fn new(
        image: Arc<dyn Image>,
        export: ExportName,
        page: Page,
        limits: Limits,
    ) -> Result<(Self, Receiver<Event>)> {
        let invalid = |message: String| Error::new(ErrorKind::InvalidArgument, message);
        if !(1..=SLOTS).contains(&limits.connections) {
            return Err(invalid(format!("{} connections: 1 to {SLOTS}", limits.connections)));
        }
        if !(1..=1024).contains(&limits.depth) {
            return Err(invalid(format!("a depth of {}: 1 to 1024", limits.depth)));
        }
        if export.name.len() > MAX_STRING || export.description.len() > MAX_STRING {
            return Err(invalid(format!("an export's name is longer than {MAX_STRING} bytes")));
        }
        let (events, receiver) = bounded(EVENTS);
        let policy = Arc::new(ActivePolicy::new(Policy::default()));
        let (connections, live, next_id, fail_io) = Default::default();
        let server = Self {
            image,
            export,
            page,
            limits,
            policy,
            connections,
            live,
            next_id,
            fail_io,
            events,
        };
        Ok((server, receiver))
    }

    /// Serves the kernel's driver at the other end of `socket`, in transmission from the first byte.
    ///
    /// # Errors
    /// `Unavailable` at the limit of connections; `Unsupported` or what else io_uring gives; the
    /// backend's, when it cannot serve another thread.
    pub fn add_kernel_connection(&self, socket: OwnedFd) -> Result<ConnectionId> {
        self.add(socket, Kind::Kernel, None)
    }

    /// Serves the NBD client at the other end of `socket`, beginning with the handshake.
    ///
    /// # Errors
    /// As [`Server::add_kernel_connection`].
    pub fn add_client(&self, socket: OwnedFd) -> Result<ConnectionId> {
        self.add(socket, Kind::Client, None)
    }

    /// Connections that are being served.
    pub fn connections(&self) -> usize {
        self.lock().iter().filter(|handle| !handle.thread.is_finished()).count()
    }

    /// With `true`, answers every request of every connection, later ones included, with an I/O error
    /// from now on, those that the backend has not finished included. Their effects may still happen
    /// later.
    pub fn set_fail_io(&self, fail: bool) {
        let handles = self.lock();
        self.fail_io.store(fail, Ordering::Relaxed);
        handles.iter().for_each(|handle| handle.control.set_fail_io(fail));
    }

    /// As [`Server::set_fail_io`], and returns once every connection has answered all that it had
    /// and starts nothing more at the backend. What runs there gets the rest of `limit` to end;
    /// returns how many requests still do.
    ///
    /// # Errors
    /// `TimedOut` when a connection's thread does not get to it within `limit`.
    pub fn fail_all_io(&self, limit: Duration) -> Result<u32> {
        const LOOK_AGAIN: Duration = Duration::from_millis(1);
        let until = Instant::now() + limit;
        self.set_fail_io(true);
        loop {
            // A thread that has ended has nothing at the backend: its ring is gone.
            let handles = self.lock();
            let serving = handles.iter().filter(|handle| !handle.thread.is_finished());
            let failing: Option<u32> = serving.map(|handle| handle.control.failing()).sum();
            drop(handles);
            let over = Instant::now() >= until;
            match failing {
                Some(0) => return Ok(0),
                Some(at_backend) if over => return Ok(at_backend),
                None if over => {
                    let message = "a connection's thread hangs: it has not failed its requests";
                    return Err(Error::new(ErrorKind::TimedOut, message));
                }
                _ => std::thread::sleep(LOOK_AGAIN),
            }
        }
    }

    /// Has every connection follow `policy` from now on, what waits already included. Without it, it
    /// is the default one.
    pub fn set_policy(&self, policy: Policy) {
        let handles = self.lock();
        self.policy.set(policy);
        handles.iter().for_each(|handle| handle.control.waker().wake());
    }

    /// Has `waker` woken whenever the statistics page shows an outage of the backend that it did not
    /// show before, or no longer shows one.
    pub fn watch_outages(&self, waker: Waker) {
        self.policy.set_watcher(waker);
    }

    /// Ends every connection: running requests are finished and answered, until `limit` has passed;
    /// what still runs then is cut off. Returns when all threads have ended, or, with `TimedOut`,
    /// when some backend holds on to one even then.
    ///
    /// # Errors
    /// `TimedOut`, as said.
    pub fn stop(&self, limit: Duration) -> Result<()> {
        self.lock().iter().for_each(|handle| handle.control.ask(Desired::Stop));
        self.wait(limit).or_else(|_| self.abort())
    }

    /// Ends every connection at once.
    ///
    /// # Errors
    /// `TimedOut` when some backend holds on to a thread for longer than seconds.
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
        for handle in self.lock().drain(..) {
            // A panic has been reported as the connection's end.
            let _ = handle.thread.join();
        }
        Ok(())
    }

    /// The levels of every connection.
    pub(super) fn controls(&self) -> Vec<Arc<Control>> {
        let handles = self.lock();
        let live = handles.iter().filter(|handle| !handle.thread.is_finished());
        live.map(|handle| Arc::clone(&handle.control)).collect()
    }

    /// With `unread`, the connection has begun elsewhere and rests.
    pub(super) fn add(
        &self,
        socket: OwnedFd,
        kind: Kind,
        unread: Option<Vec<u8>>,
    ) -> Result<ConnectionId> {
        let mut handles = self.lock();
        handles.retain(|handle| !handle.thread.is_finished());
        let full = || {
            let message = format!("{} connections are served already", self.limits.connections);
            Error::new(ErrorKind::Unavailable, message)
        };
        if handles.len() >= self.limits.connections {
            return Err(full());
        }
        let (desired, recorder) = match unread {
            None => (Desired::Run, self.page.any_recorder()),
            Some(_) => (Desired::Pause, self.page.silent_recorder()),
        };
        let recorder = recorder.ok_or_else(full)?;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let failed = |error| Error::from_io("cannot start a connection's thread", error);
        let control = Arc::new(Control::new(desired).map_err(failed)?);
        control.set_fail_io(self.fail_io.load(Ordering::Relaxed));
        let (ready, started) = bounded(1);
        let task = Task {
            id,
            kind,
            unread: unread.unwrap_or_default(),
            image: Arc::clone(&self.image),
            export: self.export.clone(),
            control: Arc::clone(&control),
            policy: Arc::clone(&self.policy),
            limits: self.limits,
            events: self.events.clone(),
        };
        let thread = std::thread::Builder::new()
            .name(format!("connection-{id}"))
            .spawn({
                let alive = Alive::new(&self.live);
                move || {
                    task.run(socket, recorder, &ready);
                    // Last of all: nothing of the connection is left.
                    drop(alive);
                }
            })
            .map_err(failed)?;
        // The thread drops its end when it panics on the way.
        let setup = started.recv().unwrap_or_else(|_| {
            Err(Error::new(ErrorKind::Internal, "a connection's thread died at its start"))
        });
        setup?;
        handles.push(Handle { control, thread });
        Ok(id)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Handle>> {
        // Nothing that can panic leaves the list half changed.
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A thread that a backend holds on to is left behind; its volume lives as long.
        let _ = self.abort();
    }
}

/// How many threads there are, and a way to wait for their end.
#[derive(Debug, Default)]
struct Live {
    count: Mutex<usize>,
    fell: Condvar,
}

impl Live {
    /// Waits until there is none, at most for `limit`; returns how many are left.
    fn wait_for_none(&self, limit: Duration) -> usize {
        let count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.fell.wait_timeout_while(count, limit, |count| *count > 0);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// One thread of [`Live`].
struct Alive(Arc<Live>);

impl Alive {
    fn new(live: &Arc<Live>) -> Self {
        *live.count.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Self(Arc::clone(live))
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        *self.0.count.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.fell.notify_all();
    }
}

/// What a connection's thread is given.
struct Task {
    id: ConnectionId,
    kind: Kind,
    unread: Vec<u8>,
    image: Arc<dyn Image>,
    export: ExportName,
    control: Arc<Control>,
    policy: Arc<ActivePolicy>,
    limits: Limits,
    events: Sender<Event>,
}

impl Task {
    fn run(self, socket: OwnedFd, recorder: Recorder, ready: &Sender<Result<()>>) {
        let id = self.id;
        let events = self.events.clone();
        let served = catch_unwind(AssertUnwindSafe(|| self.serve(socket, recorder, ready)));
        let end = match served {
            Ok(Some(end)) => end,
            // The one who added the connection knows already.
            Ok(None) => return,
            Err(panic) => End::Panicked(panic_message(panic.as_ref())),
        };
        // Nobody listens any more: then nobody needs to know.
        let _ = events.send(Event::ConnectionEnded { id, end });
    }

    fn serve(self, socket: OwnedFd, recorder: Recorder, ready: &Sender<Result<()>>) -> Option<End> {
        let export = match self.kind {
            Kind::Kernel => None,
            Kind::Client => Some(self.export()),
        };
        let Self { image, control, policy, limits, .. } = self;
        let connection =
            Connection::new(socket, &self.unread, image, control, policy, recorder, limits);
        let mut connection = match connection {
            Ok(connection) => connection,
            Err(error) => {
                let _ = ready.send(Err(error));
                return None;
            }
        };
        let _ = ready.send(Ok(()));
        let negotiated = export.map_or(Ok(()), |export| connection.negotiate(export));
        Some(match negotiated {
            Ok(()) => connection.transmit(),
            Err(end) => end,
        })
    }

    fn export(&self) -> Export {
        let mut blocks = self.image.block_sizes();
        blocks.maximum = blocks.maximum.min(MAX_PAYLOAD);
        Export {
            name: self.export.name.clone(),
            description: self.export.description.clone(),
            size: self.image.size(),
            blocks,
            transmission_flags: transmission_flags(self.image.features()),
        }
    }
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "?".to_owned())
}
