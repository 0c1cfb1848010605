//! What a volume is stored in, behind two traits: [`Image`], the control half, one a volume; and
//! [`ImageQueue`], the data half, one a connection thread.
//!
//! Comes in: a [`Request`] with its buffer. Goes out: its end, and the buffer back. A backend may
//! finish at once (memory), on the caller's ring (files), or on foreign threads (librbd, an async
//! runtime), which report it through a [`Completer`].
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

mod capability;
pub mod claimant;
mod completion;
pub mod extents;
#[cfg(feature = "fault")]
pub mod fault;
pub mod fence;
pub mod file;
mod handover;
pub mod mem;
mod registry;
mod spec;
pub mod uri;
mod waker;

#[cfg(feature = "fault")]
pub use capability::SetFault;
pub use capability::{Extents, Resize, Shrink, SnapshotQuiesce};
pub use completion::{Completer, Completions, channel};
#[cfg(feature = "fault")]
pub use fault::crash_point;
pub use handover::{Handover, HandoverFiles, HandoverState};
pub use registry::{Registry, Unavailable};
pub use spec::store;
pub use spec::{
    Backend, Confinement, Nested, OpenOptions, StoreParser, StoreSpec, Stored, VolumeSpec,
};
pub use waker::Waker;

use std::time::Duration;

use cleat_core::error::Result;
use cleat_core::request::{IoError, Request};
use cleat_core::volume::{BlockSizes, Features};
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
    /// It will end through [`ImageQueue::on_ring`] or [`ImageQueue::on_completion`].
    Pending,
}

/// The control half: one per volume, shared by its threads. Calls may block; a connection thread calls
/// only [`Image::queue`], once, before the first request.
///
/// These are the operations that every backend has. Everything else is a capability, which a backend
/// returns or does not have.
pub trait Image: Send + Sync {
    /// Returns the last known size in bytes, a multiple of `block_sizes().minimum`. Never blocks.
    fn size(&self) -> u64;

    /// Returns the sizes of access. They are fixed while the volume is open.
    fn block_sizes(&self) -> BlockSizes;

    /// Returns what the volume can do. It is fixed while the volume is open.
    fn features(&self) -> Features;

    /// Makes the data half for the calling thread. It may keep using the thread's ring, and pass clones of
    /// `completer` to threads that finish its requests. Must not wait for the backend, nor for a lock that is held during a call to the backend: a new
    /// connection waits for this call, and other connections wait for the new one.
    ///
    /// # Errors
    /// When the ring cannot register the backend's files, or a limit is reached.
    fn queue(&self, ring: &mut Ring, completer: &Completer) -> Result<Box<dyn ImageQueue>>;

    /// Asks the backend for the size, stores it and returns it. Blocks until the backend has answered.
    ///
    /// # Errors
    /// The backend's error.
    fn refresh_size(&self) -> Result<u64>;

    /// Wakes `waker` whenever [`Image::size`] has changed without a call from here. A backend that is not
    /// notified of such changes does nothing; [`Image::size_check_interval`] covers it.
    fn watch_size(&self, waker: Waker) {
        let _ = waker;
    }

    /// Returns how often the owner should call [`Image::refresh_size`] to notice a change of the size;
    /// `None` where that is never necessary.
    fn size_check_interval(&self) -> Option<Duration> {
        None
    }

    /// Returns whether a request that ended with `NoSpace` may be repeated, as one that ended with `Retry`
    /// may be. The request then waits for free space if the mapping's outage policy says so.
    fn retries_no_space(&self) -> bool {
        false
    }

    /// Returns whether another client owns the volume, as far as it is known without asking the backend:
    /// every request then ends with `Fenced` until the volume is opened anew.
    fn is_fenced(&self) -> bool {
        false
    }

    /// Returns why the backend cannot be reached, for people, where that is known. Called while requests
    /// wait to be repeated. Must not wait for the backend.
    fn failure_reason(&self) -> Option<String> {
        None
    }

    /// Closes the volume within seconds: releases the claim and every resource at the backend. The owner
    /// calls it once, after the queues are dropped; other threads may hold the `Arc` for longer, so that
    /// `Drop` would come too late or never. Later calls fail.
    fn close(&self) {}

    /// Returns the capability to make the volume larger.
    fn resize(&self) -> Option<&dyn Resize> {
        None
    }

    /// Returns the capability to make the volume smaller.
    fn shrink(&self) -> Option<&dyn Shrink> {
        None
    }

    /// Returns the capability to report holes. Without it, all of the volume counts as data.
    fn extents(&self) -> Option<&dyn Extents> {
        None
    }

    /// Returns the capability to pass the open volume to another process.
    fn handover(&self) -> Option<&dyn Handover> {
        None
    }

    /// Returns the capability to announce snapshots before they are taken.
    fn snapshot_quiesce(&self) -> Option<&dyn SnapshotQuiesce> {
        None
    }

    /// Returns the capability to replace the injected faults.
    #[cfg(feature = "fault")]
    fn set_fault(&self) -> Option<&dyn SetFault> {
        None
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

    /// Takes a completion that a foreign thread has reported with [`Completer::complete`]: an operation of
    /// the request `id` has ended with `outcome`. Appends the requests that have ended by it. A queue
    /// whose requests are one operation each need not implement this.
    fn on_completion(
        &mut self,
        id: RequestId,
        outcome: Outcome,
        ring: &mut Ring,
        done: &mut Vec<(RequestId, Outcome)>,
    ) {
        let _ = ring;
        done.push((id, outcome));
    }
}

/// A position in a payload as an index: payloads are below 4 GiB, see [`BlockSizes::maximum`].
#[allow(clippy::cast_possible_truncation, reason = "u32::MAX is the bound")]
fn index(position: u64) -> usize {
    debug_assert!(position <= u64::from(u32::MAX), "{position}");
    position as usize
}
