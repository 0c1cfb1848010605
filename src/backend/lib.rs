//! The interface to the storage of a volume, and the backends that need no library. The interface has two
//! halves: [`Image`] controls an open volume, and there is one per volume; [`ImageQueue`] carries data, and
//! there is one per connection thread.
//!
//! - Input: a [`Request`] with its buffer; the URI of a volume.
//! - Output: the result of the request with the buffer. A backend may complete a request at once (memory),
//!   on the caller's ring (files), or on threads of its own (librbd, an async runtime), which report the
//!   completion through a [`Completer`].
//!
//! The contract of a volume is part of the documentation of [`Image`], that of requests of [`ImageQueue`].
//! `tests/conformance` checks it for every backend. The following never happens here: knowledge of the NBD
//! protocol; a wait on a connection thread; a list of backends outside of the [`Registry`].

mod capability;
pub mod changes;
pub mod claimant;
mod completion;
mod confinement;
pub mod connector;
mod credentials;
pub mod extents;
#[cfg(feature = "fault")]
pub mod fault;
pub mod fence;
pub mod file;
pub mod group_snapshot;
mod handover;
mod identity;
mod kernel_key;
pub mod mem;
pub mod network_fence;
mod registry;
mod secret;
mod spec;
pub mod uri;
mod waker;
pub mod watch;

#[cfg(feature = "fault")]
pub use capability::SetFault;
pub use capability::{
    BackgroundWork, Extents, RenewCredentials, Resize, RunningTask, Shrink, SnapshotQuiesce,
    WriteHold,
};
pub use completion::{Completer, Completions, channel};
pub use confinement::{Address, Confinement, NAME_FILES, Network};
pub use credentials::{
    CredentialFile, CredentialSet, CredentialVersion, FoundSecret, MAX_CREDENTIAL_FILES,
    SecretSource,
};
#[cfg(feature = "fault")]
pub use fault::crash_point;
pub use handover::{Handover, HandoverFiles, HandoverState};
pub use identity::VolumeIdentity;
pub use kernel_key::KernelKey;
pub use registry::{Registry, Unavailable};
pub use secret::Credentials;
pub use spec::store;
pub use spec::{
    Backend, CacheFiles, CacheUse, MAX_CACHE_FILE_BYTES, MAX_CACHE_FILES, Nested, OpenOptions,
    StoreParser, StoreSpec, Stored, VisibleSize, VolumeSpec,
};
pub use waker::Waker;

use std::time::Duration;

use cleat_core::error::Result;
use cleat_core::request::{IoError, Request};
use cleat_core::space::SpaceUse;
use cleat_core::volume::{BlockSizes, Features};
use cleat_sys::buffer::Buffer;
use cleat_sys::ring::{Completion, Ring};
use cleat_sys::shared::SharedPart;

/// The number of a request on its connection: an index below the connection's limit of requests in flight.
pub type RequestId = u32;

/// The end of one request. The buffer is returned in any case.
#[derive(Debug)]
pub struct Outcome {
    /// Success, or the reason of the failure.
    pub result: Result<(), IoError>,
    /// The buffer that the request was started with. After a successful read it holds the data.
    pub buffer: Option<Buffer>,
}

/// The result of starting a request.
#[derive(Debug)]
pub enum Started {
    /// The request has ended.
    Done(Outcome),
    /// The request will end through [`ImageQueue::on_ring`] or [`ImageQueue::on_completion`].
    Pending,
}

/// The control half of an open volume. There is one per volume, which all its threads share. Calls may
/// block; a connection thread calls only [`Image::queue`], once, before its first request.
///
/// The trait has the operations that every backend supports. Every other operation is a capability, which
/// a backend returns as `Some` or does not have.
///
/// # Contract
///
/// - **Acknowledged data never lives only in the worker's private memory.** A backend either completes a
///   write when the data survives the death of the worker (`SIGKILL` at any moment), or it reports
///   `keeps_acknowledged_writes: false` in [`Image::features`]. A device of a volume of the second kind
///   cannot be served by another worker: when its worker dies, the supervisor never opens the volume for it
///   again, and every request fails until the mapping is removed. In both cases a power failure of the
///   node may lose every write that no FLUSH or FUA has covered.
/// - **The volume has an identity** ([`Image::identity`]) that its name does not determine, so that a later
///   worker can prove that it has opened the same volume. [`VolumeSpec::open`] compares it with
///   [`OpenOptions::expected`] before it changes anything.
/// - **Work without a request can be stopped.** A backend that works on threads of its own while no request
///   is in flight (to check a claim, to upload, to collect garbage) has the capability
///   [`BackgroundWork`].
/// - **A volume can be fenced without opening it**, within a deadline; see [`fence`].
/// - **Secrets are [`Credentials`]**, never text in a URI, an argument, the environment, a record or a log.
///   A URI names files ([`VolumeSpec::credential_files`]); their content reaches the backend in
///   [`OpenOptions::credentials`]. A worker cannot open these files by their paths.
pub trait Image: Send + Sync {
    /// Returns the last known size in bytes, a multiple of `block_sizes().minimum`. Never blocks.
    fn size(&self) -> u64;

    /// Returns the units of access. They do not change while the volume is open.
    fn block_sizes(&self) -> BlockSizes;

    /// Returns what the volume supports. It does not change while the volume is open.
    fn features(&self) -> Features;

    /// Returns the identity of the volume that is open. It does not change while the volume is open, is the
    /// same after the same volume was opened again during this boot, and in a successor by handover. It
    /// differs for every other volume, also for one that has got the place of this one. Never blocks.
    fn identity(&self) -> VolumeIdentity;

    /// Makes the data half for the calling thread. It may use the thread's ring later, and pass clones of
    /// `completer` to threads that complete its requests. The call must not wait for the backend, nor for
    /// a lock that is held during a call to the backend: a new connection waits for this call, and other
    /// connections wait for the new one.
    ///
    /// # Errors
    /// Returns an error if the ring cannot register the backend's files, or if a limit is reached.
    fn queue(&self, ring: &mut Ring, completer: &Completer) -> Result<Box<dyn ImageQueue>>;

    /// Reads the size from the backend, stores it and returns it. Blocks until the backend has answered.
    ///
    /// # Errors
    /// Returns the backend's error.
    fn refresh_size(&self) -> Result<u64>;

    /// Sets the waker that the backend wakes whenever [`Image::size`], [`Image::is_fenced`] or
    /// [`Image::sync_failed`] has changed without a call of the owner. A backend that is not notified of a
    /// change of the size does nothing; [`Image::size_checks`] covers it.
    fn watch_changes(&self, waker: Waker) {
        let _ = waker;
    }

    /// Returns when the owner should call [`Image::refresh_size`] to notice a change of the size.
    fn size_checks(&self) -> SizeChecks {
        SizeChecks::Never
    }

    /// Returns whether a request that ended with `NoSpace` may be repeated, as one that ended with `Retry`
    /// may be. The request then waits for free space if the mapping's outage policy allows it.
    fn retries_no_space(&self) -> bool {
        false
    }

    /// Returns whether another client owns the volume, as far as it is known without a call to the backend.
    /// Every request then ends with `Fenced` until the volume is opened again. Never blocks.
    fn is_fenced(&self) -> bool {
        false
    }

    /// Returns whether a sync has failed, so that acknowledged writes may be lost. Every FLUSH and every
    /// write with FUA then ends with `Broken` until the volume is mapped again: the storage reports a lost
    /// write once, and a later success would prove nothing. A backend that detects no such loss returns
    /// `false`. Never blocks.
    fn sync_failed(&self) -> bool {
        false
    }

    /// Makes the next sync of the volume fail, and the storage then succeed again. A backend that does not
    /// sync ignores it.
    #[cfg(feature = "fault")]
    fn fail_next_sync(&self) {}

    /// Sets whether the volume leaves out every sync and reports success, as a backend with a bug would. A
    /// backend that does not sync ignores it.
    #[cfg(feature = "fault")]
    fn set_drop_syncs(&self, _drop: bool) {}

    /// Returns why the backend cannot be reached, as text for people, if the reason is known. The worker
    /// calls it while requests wait to be repeated. Must not wait for the backend.
    fn failure_reason(&self) -> Option<String> {
        None
    }

    /// Sets what the backend calls with the data of acknowledged writes that is not durable yet, in bytes, when that
    /// has changed; it may call it with a delay of some seconds. A backend that acknowledges only durable writes, or
    /// whose storage keeps them, ignores it.
    fn report_unsaved(&self, _report: Box<dyn Fn(u64) + Send + Sync>) {}

    /// Sets what the backend calls with the bytes that the volume has put to its store and takes there, about every
    /// second. A backend that puts what clients write, and nothing else, ignores it.
    fn report_space(&self, _report: Box<dyn Fn(SpaceUse) + Send + Sync>) {}

    /// Sets whether the supervisor would pass the tail file ([`OpenOptions::tail_file`]) to the next process. Without
    /// that, no write may be acknowledged before it is durable. Never blocks.
    fn permit_tail_file(&self, _is_passed_on: bool) {}

    /// Closes the volume: stops its background work, and releases the claim and every resource at the
    /// backend. Returns whether that was done; `false` if the backend has not answered for half a minute, or
    /// has refused it, so that the claim may stand. The owner calls it once, after the queues are dropped;
    /// other threads may hold the `Arc` for longer, so that `Drop` would come too late or never. Later calls
    /// fail.
    fn close(&self) -> bool {
        true
    }

    /// Returns the capability to make the volume larger.
    fn resize(&self) -> Option<&dyn Resize> {
        None
    }

    /// Returns the capability to make the volume smaller.
    fn shrink(&self) -> Option<&dyn Shrink> {
        None
    }

    /// Returns the capability to report holes. Without it, the whole volume counts as data.
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

    /// Returns the capability to hold requests while snapshots of several volumes are taken.
    fn write_hold(&self) -> Option<&dyn WriteHold> {
        None
    }

    /// Returns the capability to stop the work that the backend does without a request; `None` where there
    /// is no such work.
    fn background(&self) -> Option<&dyn BackgroundWork> {
        None
    }

    /// Returns the capability to replace the credentials of the open volume.
    fn renew_credentials(&self) -> Option<&dyn RenewCredentials> {
        None
    }

    /// Returns the capability to replace the injected faults.
    #[cfg(feature = "fault")]
    fn set_fault(&self) -> Option<&dyn SetFault> {
        None
    }
}

/// When the owner of an open volume reads its size, see [`Image::size_checks`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SizeChecks {
    /// Never: the size changes only by calls of the owner.
    Never,
    /// When the supervisor requests it. The supervisor sees the size of an idle volume itself
    /// ([`VolumeSpec::visible_size`]), so that the owner has nothing to do while the volume is idle.
    OnRequest,
    /// At an interval.
    Every(Duration),
}

/// The data half of an open volume, which one connection thread uses. No call blocks, logs, or allocates
/// without a bound.
///
/// # Contract
///
/// A queue receives checked requests: in range, aligned to `BlockSizes::minimum`, with a payload of at
/// most `BlockSizes::maximum`, and without modifications of a read-only volume. The rules:
///
/// - A completed write is visible to every later read on any queue of the volume. A FLUSH completes
///   when every write that *completed* before the flush started is durable. A write with FUA is durable
///   when it completes.
/// - TRIM may do nothing, or make the range (or parts of it) read as zeroes. A range that has read as
///   zeroes never shows its old content again. WRITE_ZEROES always makes the range read as zeroes;
///   with `fast_zero` it fails with `Unsupported` where it would be slow; with `no_hole` the range stays
///   allocated.
/// - After a request has ended with `Fenced`, every later one does, and nothing more is written until the
///   volume is opened again.
/// - The caller may start a request again that ended with `Retry` ([`IoError::Retry`] states the
///   guarantee). The payload of a write is then unchanged.
/// - Every request that was started completes exactly once, with its buffer, or its queue is dropped
///   first, when a connection is cut off. The caller then no longer waits for it, but its buffer must not
///   be freed while a foreign thread may access it. (The ring keeps the buffers of its operations, and it
///   outlives the queue.)
pub trait ImageQueue {
    /// Starts `request` under the number `id`, which no other request in flight has. `buffer` holds the
    /// payload of a write, or receives the data of a read (its length is the request's); it is `None` for
    /// other requests.
    fn start(
        &mut self,
        id: RequestId,
        request: Request,
        buffer: Option<Buffer>,
        ring: &mut Ring,
    ) -> Started;

    /// Returns whether the queue reads into the pipe of a buffer that has one
    /// ([`Buffer::pipe`](cleat_sys::buffer::Buffer::pipe)). It may still read into the memory of the buffer: the
    /// payload is in the pipe if [`Buffer::is_in_pipe`](cleat_sys::buffer::Buffer::is_in_pipe) says so.
    fn fills_pipes(&self) -> bool {
        false
    }

    /// Returns the memory with the data of a read, if the volume is in memory. The caller then replies from there, and
    /// does not start the read. The client may get data that a write in flight has stored meanwhile.
    fn lend(&mut self, request: &Request) -> Option<SharedPart> {
        let _ = request;
        None
    }

    /// Executes a write whose payload the caller keeps, if that needs no buffer and no wait. Returns whether the write has ended
    /// with success. If it has not, the caller starts it, also where a part of it was executed.
    fn store(&mut self, request: &Request, payload: &[u8]) -> bool {
        let _ = (request, payload);
        false
    }

    /// Called after some requests were started, before the caller waits for anything. Appends the requests that have ended by
    /// the call to `done`. A queue can so begin several requests together. It must begin all of them now, so a queue that
    /// holds back writes must also take back, in [`ImageQueue::abandon`], what it has not begun.
    fn end_batch(&mut self, ring: &mut Ring, done: &mut Vec<(RequestId, Outcome)>) {
        let _ = (ring, done);
    }

    /// Takes the completion of an operation that this queue submitted to the ring. Returns the request that
    /// has ended by it; `None` if the request has further steps (for example after a short read).
    fn on_ring(&mut self, completion: Completion, ring: &mut Ring) -> Option<(RequestId, Outcome)>;

    /// Abandons all requests in flight, because the caller no longer needs their results: a request
    /// of several steps starts no further step. Appends the requests that have ended by the call to `done`;
    /// the others end with their current step, successfully or not. Requests that are started later are not
    /// affected.
    fn abandon(&mut self, done: &mut Vec<(RequestId, Outcome)>) {
        let _ = done;
    }

    /// Takes a completion that a foreign thread has reported with [`Completer::complete`]: an operation of
    /// the request `id` has ended with `outcome`. Appends the requests that have ended by it to `done`. A
    /// queue whose requests are one operation each need not implement this.
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

/// Converts a position in a payload to an index. Payloads are shorter than 4 GiB, see
/// [`BlockSizes::maximum`].
#[allow(clippy::cast_possible_truncation, reason = "u32::MAX is the bound")]
fn index(position: u64) -> usize {
    debug_assert!(position <= u64::from(u32::MAX), "{position}");
    position as usize
}
