//! Asynchronous I/O: operations are started by one thread and end on threads of the library, which
//! give them back through a list and wake the thread.
//!
//! An [`Operation`] is always in exactly one place: with its submitter (free, or ended and not taken
//! yet), with the library (from a start that succeeded to the callback), or in the [`Ended`] list.
//! Whoever has it owns it, so no lock is needed; the list is the only thing that threads share.
//!
//! A submitter that is dropped leaves its running operations alone: each holds the list, pushes
//! itself there, and the last one frees it all.

use std::ffi::c_void;
use std::ops::DerefMut;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::mpsc::sync_channel;

use libc::iovec;
use librbd_sys::{RBD_WRITE_ZEROES_FLAG_THICK_PROVISION, rbd_completion_t};
use stable_deref_trait::StableDeref;

use crate::error::Error;
use crate::gate::Gate;
use crate::image::Image;

/// Memory that the library reads or fills while an operation runs: bytes that stay where they are
/// while the value that owns them moves.
pub trait IoBuffer: StableDeref + DerefMut<Target = [u8]> + Send + 'static {}

impl<B: StableDeref + DerefMut<Target = [u8]> + Send + 'static> IoBuffer for B {}

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Io {
    /// Fill the buffer from this offset.
    Read { offset: u64 },
    /// Store the buffer at this offset.
    Write { offset: u64 },
    /// The range is not needed any more; the library may zero it, or parts of it.
    Discard { offset: u64, length: u64 },
    /// The range reads as zeroes afterwards; allocated, if `allocate`. Only where
    /// [`Image::can_write_zeroes`].
    WriteZeroes { offset: u64, length: usize, allocate: bool },
    /// What was written before is durable afterwards.
    Flush,
}

/// An operation that has ended.
#[derive(Debug)]
pub struct Completion<B> {
    /// As it was started with.
    pub token: u64,
    /// What the library returned: for a read the bytes read, below zero an errno.
    pub result: i64,
    /// The buffer that it was started with.
    pub buffer: Option<B>,
}

/// An operation that was not started.
#[derive(Debug)]
pub struct Refused<B> {
    /// Why: EAGAIN when as many as possible are running.
    pub errno: i32,
    /// The buffer that it was to be started with.
    pub buffer: Option<B>,
}

/// Hears of ends, on threads of the library: no function may block, call the library, or panic. A closure
/// is one that is only woken.
pub trait Ends<B>: Send + Sync + 'static {
    /// Operations have ended, and the last call of [`Submitter::next`] found none.
    fn wake(&self);

    /// An operation has succeeded, a read in full, and [`Submitter::next`] cannot give it yet. With
    /// `true`, [`Ends::listed`] is called once it can, in place of [`Ends::wake`]; and until it was
    /// taken, others may end without a call of either.
    fn succeeded(&self, token: u64, buffer: Option<&mut B>) -> bool {
        let _ = (token, buffer);
        false
    }

    /// See [`Ends::succeeded`].
    fn listed(&self) {}
}

impl<B, F: Fn() + Send + Sync + 'static> Ends<B> for F {
    fn wake(&self) {
        self();
    }
}

/// Starts operations on an image and takes their ends, on one thread.
pub struct Submitter<B: IoBuffer> {
    image: Arc<Image>,
    ended: Arc<Ended<B>>,
    /// Ended, taken off the list, oldest first; linked by `next`.
    taken: *mut Operation<B>,
    /// For the next ones.
    #[allow(clippy::vec_box, reason = "the library holds the operations' addresses")]
    free: Vec<Box<Operation<B>>>,
    running: usize,
    capacity: usize,
}

/// Operations that have ended on other threads, newest first; each is owned by the list.
struct Ended<B: IoBuffer> {
    head: AtomicPtr<Operation<B>>,
    told: Box<dyn Ends<B>>,
    gate: Arc<Gate>,
    api: &'static librbd_sys::Librbd,
}

struct Operation<B: IoBuffer> {
    next: *mut Self,
    /// A reference that the operation holds while it runs; else null.
    ended: *const Ended<B>,
    token: u64,
    result: i64,
    is_read: bool,
    /// The library keeps a pointer to it until a read has ended.
    vector: iovec,
    buffer: Option<B>,
}

impl Image {
    /// A submitter for the calling thread, with at most `capacity` operations between start and
    /// [`Submitter::next`], whose ends `told` hears of.
    pub fn submitter<B: IoBuffer>(
        self: &Arc<Self>,
        capacity: usize,
        told: impl Ends<B>,
    ) -> Submitter<B> {
        let ended = Ended {
            head: AtomicPtr::new(null_mut()),
            told: Box::new(told),
            gate: Arc::clone(self.gate()),
            api: self.api(),
        };
        Submitter {
            image: Arc::clone(self),
            ended: Arc::new(ended),
            taken: null_mut(),
            free: Vec::with_capacity(capacity),
            running: 0,
            capacity,
        }
    }
}

impl Image {
    /// Reads a few bytes, and waits for them; fewer at the end of the image.
    ///
    /// # Errors
    /// What the library gives.
    pub fn read(self: &Arc<Self>, offset: u64, length: usize) -> Result<Vec<u8>, Error> {
        let failed = |errno| Error::new(format!("read {length} bytes at {offset}"), errno);
        let (sender, ended) = sync_channel::<()>(1);
        let mut submitter = self.submitter(1, move || _ = sender.try_send(()));
        let started = submitter.start(0, Io::Read { offset }, Some(vec![0; length]));
        started.map_err(|refused| failed(refused.errno))?;
        // Called back whatever happens; with the callback gone, nothing comes.
        let _ = ended.recv();
        let Some(Completion { result, buffer: Some(mut buffer), .. }) = submitter.next() else {
            return Err(failed(libc::EIO));
        };
        match usize::try_from(result) {
            Ok(count) => buffer.truncate(count),
            Err(_) => return Err(failed(i32::try_from(-result).unwrap_or(libc::EIO))),
        }
        Ok(buffer)
    }
}

impl<B: IoBuffer> Submitter<B> {
    /// Starts an operation. Reads and writes have a buffer; the rest may have one too, which they
    /// leave alone and give back.
    ///
    /// # Errors
    /// When it was not started; then it never will be.
    pub fn start(&mut self, token: u64, io: Io, mut buffer: Option<B>) -> Result<(), Refused<B>> {
        if self.running == self.capacity {
            return Err(Refused { errno: libc::EAGAIN, buffer });
        }
        if buffer.is_none() && matches!(io, Io::Read { .. } | Io::Write { .. }) {
            return Err(Refused { errno: libc::EINVAL, buffer });
        }
        let mut operation = self.free.pop().unwrap_or_else(|| Box::new(Operation::idle()));
        operation.token = token;
        operation.is_read = matches!(io, Io::Read { .. });
        if let Some(buffer) = &mut buffer {
            let (iov_base, iov_len) = (buffer.as_mut_ptr().cast(), buffer.len());
            operation.vector = iovec { iov_base, iov_len };
        }
        operation.buffer = buffer;
        operation.ended = Arc::into_raw(Arc::clone(&self.ended));
        let raw = Box::into_raw(operation);
        self.ended.gate.enter();
        let returned = self.hand_over(raw, io);
        if returned >= 0 {
            self.running += 1;
            return Ok(());
        }
        self.ended.gate.leave();
        // SAFETY: the library has refused the operation and forgotten it, so it is ours again, as is
        // the reference that it held.
        let mut operation = unsafe {
            let operation = Box::from_raw(raw);
            drop(Arc::from_raw(operation.ended));
            operation
        };
        operation.ended = null();
        let buffer = operation.buffer.take();
        self.free.push(operation);
        Err(Refused { errno: returned.saturating_neg(), buffer })
    }

    /// Gives the operation to the library. A result below zero: it did not take it.
    fn hand_over(&self, raw: *mut Operation<B>, io: Io) -> i32 {
        let (api, image) = (self.ended.api, self.image.raw());
        let mut completion = null_mut();
        // SAFETY: `raw` stays alive until the callback has it, and the callback is that of its type.
        let created = unsafe {
            (api.rbd_aio_create_completion)(raw.cast(), on_end::<B>, &raw mut completion)
        };
        if created < 0 {
            return created;
        }
        // SAFETY: the image is open (this value holds it); vector and buffer are part of the
        // operation, which the library may use until it calls back. From a success on, another
        // thread may own `raw`.
        let returned = unsafe {
            let vector = &raw const (*raw).vector;
            match io {
                Io::Read { offset } => (api.rbd_aio_readv)(image, vector, 1, offset, completion),
                Io::Write { offset } => (api.rbd_aio_writev)(image, vector, 1, offset, completion),
                Io::Discard { offset, length } => {
                    (api.rbd_aio_discard)(image, offset, length, completion)
                }
                Io::WriteZeroes { offset, length, allocate } => {
                    let flags = if allocate { RBD_WRITE_ZEROES_FLAG_THICK_PROVISION } else { 0 };
                    api.rbd_aio_write_zeroes.map_or(-libc::ENOSYS, |write_zeroes| {
                        write_zeroes(image, offset, length, completion, flags, 0)
                    })
                }
                Io::Flush => (api.rbd_aio_flush)(image, completion),
            }
        };
        if returned < 0 {
            // SAFETY: a completion that was not taken is ours to release.
            unsafe { (api.rbd_aio_release)(completion) };
        }
        returned
    }

    /// An operation that has ended, oldest first as far as it is known. After a wake, to be called
    /// until it gives none.
    #[allow(clippy::should_implement_trait, reason = "it begins anew after `None`")]
    pub fn next(&mut self) -> Option<Completion<B>> {
        if self.taken.is_null() {
            self.taken = self.ended.take();
        }
        if self.taken.is_null() {
            return None;
        }
        // SAFETY: what was taken off the list is this value's alone, and linked by boxes.
        let mut operation = unsafe { Box::from_raw(self.taken) };
        self.taken = std::mem::replace(&mut operation.next, null_mut());
        self.running -= 1;
        let Operation { token, result, .. } = *operation;
        let buffer = operation.buffer.take();
        self.free.push(operation);
        Some(Completion { token, result, buffer })
    }

    /// Operations that were started and not given back by [`Submitter::next`].
    pub fn running(&self) -> usize {
        self.running
    }
}

impl<B: IoBuffer> Drop for Submitter<B> {
    fn drop(&mut self) {
        // SAFETY: what was taken off the list is this value's alone.
        unsafe { free_all(self.taken) };
    }
}

/// The end of an operation, on a thread of the library. Rust ends the process if this panics.
unsafe extern "C" fn on_end<B: IoBuffer>(completion: rbd_completion_t, argument: *mut c_void) {
    let operation = argument.cast::<Operation<B>>();
    // SAFETY: the argument is the operation that `start` gave to the library, which calls back once
    // and does not touch it afterwards: it is ours now, and so is the reference to the list.
    let (ended, noted) = unsafe {
        let ended = Arc::from_raw((*operation).ended);
        (*operation).ended = null();
        (*operation).result = (ended.api.rbd_aio_get_return_value)(completion) as i64;
        let noted = (*operation).tell_success(&*ended.told);
        (ended.api.rbd_aio_release)(completion);
        (ended, noted)
    };
    // SAFETY: ours, and handed over.
    let first = unsafe { ended.push(operation) };
    if noted {
        ended.told.listed();
    } else if first {
        ended.told.wake();
    }
    ended.gate.leave();
}

impl<B: IoBuffer> Ended<B> {
    /// Puts an operation in front. Returns whether there was none.
    ///
    /// # Safety
    /// `operation` comes from a box that is handed over.
    unsafe fn push(&self, operation: *mut Operation<B>) -> bool {
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            // SAFETY: it is the caller's until the exchange succeeds.
            unsafe { (*operation).next = head };
            // Release: whoever takes the list sees what the operation holds. There is no ABA: only
            // the whole list is ever taken.
            match self.head.compare_exchange_weak(
                head,
                operation,
                Ordering::Release,
                Ordering::Relaxed,
            ) {
                Ok(_) => return head.is_null(),
                Err(now) => head = now,
            }
        }
    }

    /// Takes all of them, oldest first.
    fn take(&self) -> *mut Operation<B> {
        // Without writing to a line that other threads want, where there is nothing.
        if self.head.load(Ordering::Relaxed).is_null() {
            return null_mut();
        }
        let mut newest = self.head.swap(null_mut(), Ordering::Acquire);
        let mut turned = null_mut();
        while !newest.is_null() {
            // SAFETY: the list is the caller's since the swap.
            let next = unsafe { std::mem::replace(&mut (*newest).next, turned) };
            turned = newest;
            newest = next;
        }
        turned
    }
}

impl<B: IoBuffer> Drop for Ended<B> {
    fn drop(&mut self) {
        // SAFETY: nobody else has the list any more.
        unsafe { free_all(*self.head.get_mut()) };
    }
}

impl<B: IoBuffer> Operation<B> {
    fn idle() -> Self {
        let vector = iovec { iov_base: null_mut(), iov_len: 0 };
        Self {
            next: null_mut(),
            ended: null(),
            token: 0,
            result: 0,
            is_read: false,
            vector,
            buffer: None,
        }
    }

    fn tell_success(&mut self, told: &dyn Ends<B>) -> bool {
        let wanted = self.is_read.then_some(self.vector.iov_len as i64);
        let success = wanted.map_or(self.result >= 0, |wanted| self.result == wanted);
        success && told.succeeded(self.token, self.buffer.as_mut())
    }
}

/// Frees a list of operations with their buffers.
///
/// # Safety
/// The operations come from boxes, are linked by `next`, and belong to the caller.
unsafe fn free_all<B: IoBuffer>(mut first: *mut Operation<B>) {
    while !first.is_null() {
        // SAFETY: by this function's contract.
        let operation = unsafe { Box::from_raw(first) };
        first = operation.next;
    }
}

impl<B: IoBuffer> std::fmt::Debug for Submitter<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { image, running, capacity, .. } = self;
        f.debug_struct("Submitter")
            .field("image", image)
            .field("running", running)
            .field("capacity", capacity)
            .finish_non_exhaustive()
    }
}
