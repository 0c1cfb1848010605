//! What a volume is stored in, behind two traits: [`Image`], the control half, one a volume; and
//! [`ImageQueue`], the data half, one a connection thread.
//!
//! Comes in: a [`Request`] with its buffer. Goes out: its end, and the buffer back. A backend may
//! finish at once (memory), on the caller's ring (files), or on foreign threads (librbd, an async
//! runtime), which wake the loop through a [`Waker`].
//!
//! The contract, which `tests/conformance` checks for every backend:
//! - A completed write is visible to every later read on any queue of the volume. A FLUSH completes
//!   when every write *completed* before it was started is durable. FUA is durable at completion.
//! - TRIM may do nothing, or make the range (or parts of it) read as zero; zero never turns back.
//!   WRITE_ZEROES always reads zeroes; `fast_zero` fails with `Unsupported` rather than be slow;
//!   `no_hole` keeps the range allocated.
//! - Once `Fenced`, always `Fenced`: nothing more is written until the volume is opened anew.
//! - A request that ended with `Retry` ([`IoError::Retry`] says what that promises) is started again;
//!   the payload of a write comes back as it was.
//! - Every request that was started completes exactly once, with its buffer; or its queue is dropped
//!   first, when a connection is cut off. Then nobody waits for it any more, but its buffer is not
//!   freed while a foreign thread may touch it. (What is in the ring, the ring keeps, which lives
//!   longer than the queue.)
//!
//! Requests arrive checked: in range, aligned to `BlockSizes::minimum`, no longer than
//! `BlockSizes::maximum` for those with a payload, no modification of a read-only volume.

pub mod claimant;
mod extents;
mod factory;
#[cfg(feature = "fault")]
pub mod fault;
pub mod fence;
mod file;
pub mod manage;
mod mem;
mod rbd;
mod succession;
pub mod uri;

pub use factory::{
    Confinement, MAX_UNLOCKING, OpenOptions, confinement, fence as fence_of, inherit, open,
    prepare, rbd_library, store, store_for, unlocking,
};
pub use succession::{Inheritance, Legacy};

use std::sync::Arc;

use cleat_core::error::Result;
use cleat_core::request::{IoError, Request};
use cleat_core::volume::{BlockSizes, Extent, Features};
use cleat_sys::buffer::Buffer;
use cleat_sys::ring::{Completion, Ring};

/// A request's number on its connection: an index below the connection's in-flight limit.
pub type RequestId = u32;

/// How one request ended. The buffer comes back whatever happened.
#[derive(Debug)]
pub struct Outcome {
    /// Success, or why not.
    pub result: Result<(), IoError>,
    /// The buffer that the request was started with; filled, for a successful read.
    pub buffer: Option<Buffer>,
}

/// What starting a request led to.
#[derive(Debug)]
pub enum Started {
    /// It has ended already.
    Done(Outcome),
    /// It will end through [`ImageQueue::on_ring`] or [`ImageQueue::on_wake`].
    Pending,
}

/// The control half: one a volume, shared by its threads. Calls may block; none is made on a
/// connection thread except [`Image::queue`], once, before the first request.
pub trait Image: Send + Sync {
    /// The size in bytes, as last known; a multiple of `block_sizes().minimum`. Never blocks.
    fn size(&self) -> u64;

    /// The sizes of access. Fixed while the volume is open.
    fn block_sizes(&self) -> BlockSizes;

    /// What the volume can do. Fixed while the volume is open.
    fn features(&self) -> Features;

    /// Makes the data half for the calling thread, whose ring and waker it may keep using. Must not
    /// wait for the backend, nor for a lock that anything which does so holds: whoever adds a connection
    /// waits for this, and others for him.
    ///
    /// # Errors
    /// When the ring cannot take the backend's files, or a bound is reached.
    fn queue(&self, ring: &mut Ring, waker: &Waker) -> Result<Box<dyn ImageQueue>>;

    /// Asks the backend for its size again and returns it.
    ///
    /// # Errors
    /// When the backend cannot be asked.
    fn refresh_size(&self) -> Result<u64>;

    /// Has `waker` woken when [`Image::size`] has changed by itself, by a backend that is told of such
    /// changes.
    fn watch_size(&self, waker: Waker) {
        let _ = waker;
    }

    /// Has `waker` woken when somebody is about to make a snapshot of the volume at its backend, which
    /// waits for [`Image::answer_snapshot`], and when that is over. Not `in_charge`, as a successor is
    /// until it has succeeded, it keeps none of them waiting. For a volume that was opened with
    /// [`OpenOptions::snapshots`]; one in a backend that knows no snapshots opens all the same.
    ///
    /// # Errors
    /// `Unsupported` where the backend tells nothing of that.
    fn watch_snapshots(&self, waker: Waker, in_charge: bool) -> Result<()> {
        let _ = (waker, in_charge);
        let message = "this volume's backend tells nothing of snapshots";
        Err(cleat_core::error::Error::new(cleat_core::error::ErrorKind::Unsupported, message)
            .with_repair("map it without --quiesce: only images of RBD can"))
    }

    /// The snapshot that waits, or is being made; each has a number of its own. Never blocks.
    fn waiting_snapshot(&self) -> Option<u64> {
        None
    }

    /// Lets a snapshot be made, the volume being quiet, or refuses it with an errno. Says whether that
    /// one waited. Does not wait for the backend.
    fn answer_snapshot(&self, number: u64, result: Result<(), i32>) -> bool {
        let _ = (number, result);
        false
    }

    /// Changes the size at the backend. Never makes it smaller: that is [`Image::shrink`].
    ///
    /// # Errors
    /// `Unsupported` where the backend cannot; what the backend gives otherwise.
    fn resize(&self, size: u64) -> Result<()>;

    /// What lies in `length` bytes from `offset`, an aligned range inside the volume: parts of it from
    /// its beginning, at least one and at most `limit` of them. A part that is called a hole was one
    /// at some moment of the call.
    ///
    /// # Errors
    /// When the backend cannot be asked.
    fn extents(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<Extent>> {
        let _ = (offset, limit);
        Ok(vec![Extent { length, hole: false }])
    }

    /// How a successor in another process gets at the volume while this one still serves it. See
    /// `succession` for the order of these four calls.
    ///
    /// # Errors
    /// `Unsupported`, with the reason, where it cannot.
    fn bequeath(&self) -> Result<Inheritance> {
        Err(succession::impossible())
    }

    /// Gives up what only one can have, once nothing runs any more, and says what the successor has
    /// to know. Nothing is written until [`Image::take_back`].
    ///
    /// # Errors
    /// What the backend gives; then nothing has changed.
    fn let_go(&self) -> Result<Legacy> {
        Err(succession::impossible())
    }

    /// Undoes [`Image::let_go`]: there is no successor after all.
    ///
    /// # Errors
    /// What the backend gives; `Fenced` when somebody else has the volume.
    fn take_back(&self) -> Result<()> {
        Ok(())
    }

    /// In the successor, after its predecessor has let go and before its first request.
    ///
    /// # Errors
    /// What the backend gives; then the predecessor can take back.
    fn succeed(&self, legacy: &Legacy) -> Result<()> {
        let _ = legacy;
        Err(succession::impossible())
    }

    /// Whether a request that ended with `NoSpace` may be repeated, as one that ended with `Retry` may:
    /// then it waits for room if the mapping's owner wants that.
    fn waits_for_room(&self) -> bool {
        false
    }

    /// Whether somebody else has the volume, as far as it is known without asking: then every request
    /// ends with `Fenced`, for good.
    fn is_fenced(&self) -> bool {
        false
    }

    /// Why the backend cannot be reached, for people, where that is known; asked for while requests
    /// wait to be repeated. Must not wait for the backend.
    fn trouble(&self) -> Option<String> {
        None
    }

    /// Cuts the end off at the backend; only ever called when somebody has asked for just that, and
    /// no request can reach what goes.
    ///
    /// # Errors
    /// `Unsupported` where the backend cannot; what the backend gives otherwise.
    fn shrink(&self, size: u64) -> Result<()> {
        let _ = size;
        let message = "this volume cannot be made smaller";
        Err(cleat_core::error::Error::new(cleat_core::error::ErrorKind::Unsupported, message))
    }

    /// Lets go of the volume, within seconds: called once at the end, after the queues are gone, by
    /// whoever serves it. Threads that look at the volume may have it longer, so that its drop comes
    /// too late, or never. Later calls fail.
    fn close(&self) {}

    /// Replaces the faults that are injected; only the `fault:` backend can.
    ///
    /// # Errors
    /// `Unsupported` everywhere else; `InvalidArgument` where the text is not a fault plan.
    fn set_fault(&self, plan: &str) -> Result<()> {
        let _ = plan;
        Err(cleat_core::error::Error::new(
            cleat_core::error::ErrorKind::Unsupported,
            "this volume injects no faults",
        )
        .with_repair("map it as fault:<uri>, with a binary built with the feature `fault`"))
    }
}

/// The data half: used by one connection thread. No call blocks, allocates without bound or logs.
pub trait ImageQueue {
    /// Starts `request` under the number `id`, which is not in use. `buffer` holds the payload of a
    /// write, or is filled by a read (its length is the request's); `None` for the rest.
    fn start(
        &mut self,
        id: RequestId,
        request: Request,
        buffer: Option<Buffer>,
        ring: &mut Ring,
    ) -> Started;

    /// Takes a completion of an operation that this queue submitted to the ring. Returns a request
    /// that has ended by it; `None` when there is more to do first (a short read goes on).
    fn on_ring(&mut self, completion: Completion, ring: &mut Ring) -> Option<(RequestId, Outcome)>;

    /// Nobody waits for what runs any more: of a request that is done in several steps none begins from
    /// now on. Appends those that have ended by that; the others end with their running step, successful or
    /// not. What is started afterwards is not concerned.
    fn abandon(&mut self, done: &mut Vec<(RequestId, Outcome)>) {
        let _ = done;
    }

    /// Whether [`Waker::answer`] will be called if the running request `id` succeeds.
    fn answers(&self, id: RequestId) -> bool {
        let _ = id;
        false
    }

    /// Called after the waker was woken: appends the requests that foreign threads have finished.
    fn on_wake(&mut self, ring: &mut Ring, done: &mut Vec<(RequestId, Outcome)>) {
        let _ = (ring, done);
    }
}

/// A position in a payload as an index: payloads are below 4 GiB, see [`BlockSizes::maximum`].
#[allow(clippy::cast_possible_truncation, reason = "u32::MAX is the bound")]
fn index(position: u64) -> usize {
    debug_assert!(position <= u64::from(u32::MAX), "{position}");
    position as usize
}

/// Wakes a connection thread from any other thread: an eventfd that its ring polls. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Waker {
    event: Arc<nix::sys::eventfd::EventFd>,
    shortcut: Option<Arc<dyn Shortcut>>,
}

/// Answers a request on the thread where it has ended, while the connection's thread waits.
pub trait Shortcut: Send + Sync + std::fmt::Debug {
    /// See [`Waker::answer`].
    fn answer(&self, id: RequestId, buffer: Option<&mut Buffer>) -> bool;

    /// The request that was answered can be taken. Returns whether the connection's thread takes it
    /// without being woken.
    fn answered(&self) -> bool;
}

impl Waker {
    /// A new waker.
    ///
    /// # Errors
    /// When the process has no descriptor left.
    pub fn new() -> std::io::Result<Self> {
        use nix::sys::eventfd::{EfdFlags, EventFd};
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(Self { event: Arc::new(EventFd::from_flags(flags)?), shortcut: None })
    }

    /// Makes the loop call [`ImageQueue::on_wake`]. Never blocks; may be called from any thread.
    pub fn wake(&self) {
        // The counter can only overflow after 2^64 - 1 wakes that nobody took.
        let _ = self.event.write(1);
    }

    /// The same waker, which may answer requests.
    #[must_use]
    pub fn with_shortcut(&self, shortcut: Arc<dyn Shortcut>) -> Self {
        Self { event: Arc::clone(&self.event), shortcut: Some(shortcut) }
    }

    /// Answers a request if it may, for which [`ImageQueue::answers`] says yes, and which has just
    /// succeeded, but which [`ImageQueue::on_wake`] cannot give yet. Never blocks. With `true`,
    /// [`Waker::answered`] has to be called, once it can, in place of [`Waker::wake`].
    pub fn answer(&self, id: RequestId, buffer: Option<&mut Buffer>) -> bool {
        self.shortcut.as_ref().is_some_and(|shortcut| shortcut.answer(id, buffer))
    }

    /// See [`Waker::answer`].
    pub fn answered(&self) {
        if !self.shortcut.as_ref().is_some_and(|shortcut| shortcut.answered()) {
            self.wake();
        }
    }

    /// The descriptor that becomes readable.
    pub fn descriptor(&self) -> std::os::fd::BorrowedFd<'_> {
        use std::os::fd::AsFd;
        self.event.as_fd()
    }

    /// Takes the pending wakes.
    pub fn take(&self) {
        // EAGAIN when there were none.
        let _ = self.event.read();
    }
}
