//! Asynchronous I/O: one thread starts operations, and the library ends each of them on a thread of its
//! own, where the submitter's callback gets the [`Completion`].
//!
//! An [`Operation`] has one owner at any time: the submitter until it is started, the library from a
//! start that succeeded to the callback, then the callback. So no lock is needed.
//!
//! A dropped submitter leaves its running operations alone: each holds a reference to the callback, and
//! the last one frees it.

use std::ffi::c_void;
use std::fmt;
use std::ops::DerefMut;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
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

/// An operation on an image. Offsets and lengths are in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Io {
    /// Fills the buffer from this offset.
    Read { offset: u64 },
    /// Stores the buffer at this offset.
    Write { offset: u64 },
    /// Discards the range; the library may zero all, a part, or nothing of it.
    Discard { offset: u64, length: u64 },
    /// Makes the range read as zeroes, and allocates it with `allocate`. Only where
    /// [`Image::can_write_zeroes`] is true.
    WriteZeroes { offset: u64, length: usize, allocate: bool },
    /// Makes every write that was completed before durable.
    Flush,
}

/// An operation that has ended.
#[derive(Debug)]
pub struct Completion<T, B> {
    /// The token that the operation was started with.
    pub token: T,
    /// The library's result: for a read the number of bytes read; below zero a negated errno.
    pub result: i64,
    /// The buffer that the operation was started with.
    pub buffer: Option<B>,
}

/// An operation that was not started and never will be.
#[derive(Debug)]
pub struct Refused<B> {
    /// The cause: EAGAIN when the submitter's capacity is used up, EINVAL without a needed buffer, else
    /// the library's.
    pub errno: i32,
    /// The buffer that the operation should have been started with.
    pub buffer: Option<B>,
}

/// Starts operations on an image from one thread.
///
/// `T` is a token that comes back with the completion; `B` is the type of buffers.
pub struct Submitter<T: Send + 'static, B: IoBuffer> {
    image: Arc<Image>,
    shared: Arc<Shared<T, B>>,
    capacity: usize,
}

/// The state that a submitter shares with its running operations.
struct Shared<T, B> {
    completed: Box<dyn Fn(Completion<T, B>) + Send + Sync>,
    running: AtomicUsize,
    gate: Arc<Gate>,
    api: &'static librbd_sys::Librbd,
}

struct Operation<T, B> {
    shared: Arc<Shared<T, B>>,
    token: T,
    /// The library keeps a pointer to it until a read or a write has ended.
    vector: iovec,
    buffer: Option<B>,
}

impl Image {
    /// Makes a submitter for the calling thread, with at most `capacity` operations running.
    ///
    /// `completed` gets each completion, on a thread of the library. It must not block, call the library,
    /// or panic. What it captures is freed after the last operation.
    pub fn submitter<T: Send + 'static, B: IoBuffer>(
        self: &Arc<Self>,
        capacity: usize,
        completed: impl Fn(Completion<T, B>) + Send + Sync + 'static,
    ) -> Submitter<T, B> {
        let shared = Shared {
            completed: Box::new(completed),
            running: AtomicUsize::new(0),
            gate: Arc::clone(self.gate()),
            api: self.api(),
        };
        Submitter { image: Arc::clone(self), shared: Arc::new(shared), capacity }
    }

    /// Reads `length` bytes from `offset`; fewer at the end of the image. Blocks until the cluster has
    /// answered.
    ///
    /// # Errors
    /// Returns the library's error.
    pub fn read(self: &Arc<Self>, offset: u64, length: usize) -> Result<Vec<u8>, Error> {
        let failed = |errno| Error::new(format!("read {length} bytes at {offset}"), errno);
        let (sender, completed) = sync_channel(1);
        let mut submitter = self.submitter(1, move |completion| _ = sender.try_send(completion));
        let started = submitter.start((), Io::Read { offset }, Some(vec![0; length]));
        started.map_err(|refused| failed(refused.errno))?;
        // The library ends every operation that it has accepted.
        let Ok(Completion { result, buffer: Some(mut buffer), .. }) = completed.recv() else {
            return Err(failed(libc::EIO));
        };
        match usize::try_from(result) {
            Ok(count) => buffer.truncate(count),
            Err(_) => return Err(failed(i32::try_from(-result).unwrap_or(libc::EIO))),
        }
        Ok(buffer)
    }
}

impl<T: Send + 'static, B: IoBuffer> Submitter<T, B> {
    /// Starts an operation. Reads and writes need a buffer. The others may have one, which they return
    /// unchanged. Never blocks.
    ///
    /// # Errors
    /// Returns [`Refused`] with the buffer. The operation was not started, and the callback will not be
    /// called.
    pub fn start(&mut self, token: T, io: Io, mut buffer: Option<B>) -> Result<(), Refused<B>> {
        if self.running() >= self.capacity {
            return Err(Refused { errno: libc::EAGAIN, buffer });
        }
        if buffer.is_none() && matches!(io, Io::Read { .. } | Io::Write { .. }) {
            return Err(Refused { errno: libc::EINVAL, buffer });
        }
        let mut vector = iovec { iov_base: null_mut(), iov_len: 0 };
        if let Some(buffer) = &mut buffer {
            vector = iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        }
        let shared = Arc::clone(&self.shared);
        let raw = Box::into_raw(Box::new(Operation { shared, token, vector, buffer }));
        self.shared.gate.enter();
        self.shared.running.fetch_add(1, Ordering::Relaxed);
        let returned = self.pass_to_library(raw, io);
        if returned >= 0 {
            return Ok(());
        }
        self.shared.running.fetch_sub(1, Ordering::Relaxed);
        self.shared.gate.leave();
        // SAFETY: `raw` comes from the box above, and the library has refused the operation: it has
        // forgotten the pointer and will not call back.
        let operation = unsafe { Box::from_raw(raw) };
        Err(Refused { errno: returned.saturating_neg(), buffer: operation.buffer })
    }

    /// Returns the number of operations that have been started and have not ended.
    pub fn running(&self) -> usize {
        self.shared.running.load(Ordering::Relaxed)
    }

    /// Gives the operation to the library. Below zero, the library did not accept it.
    fn pass_to_library(&self, raw: *mut Operation<T, B>, io: Io) -> i32 {
        let (api, image) = (self.shared.api, self.image.raw());
        let mut completion = null_mut();
        // SAFETY: `raw` stays alive until the callback has it, and the callback is that of its type.
        let created = unsafe {
            (api.rbd_aio_create_completion)(raw.cast(), on_end::<T, B>, &raw mut completion)
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
            // SAFETY: the library has not accepted the completion, so this call may release it.
            unsafe { (api.rbd_aio_release)(completion) };
        }
        returned
    }
}

/// Called by the library when an operation has ended, on a thread of the library. A panic in here ends
/// the process.
unsafe extern "C" fn on_end<T, B>(completion: rbd_completion_t, argument: *mut c_void) {
    // SAFETY: the argument is the box that `start` gave to the library, which calls back once and does
    // not touch it afterwards.
    let operation = unsafe { Box::from_raw(argument.cast::<Operation<T, B>>()) };
    let Operation { shared, token, buffer, .. } = *operation;
    // SAFETY: the completion is the operation's, and is released below.
    let result = unsafe { (shared.api.rbd_aio_get_return_value)(completion) } as i64;
    // Before the callback, which may cause the next start.
    shared.running.fetch_sub(1, Ordering::Relaxed);
    // Before the release, so that the caller waits for one thing less.
    (shared.completed)(Completion { token, result, buffer });
    // SAFETY: nothing uses the completion after its own callback.
    unsafe { (shared.api.rbd_aio_release)(completion) };
    shared.gate.leave();
}

impl<T: Send + 'static, B: IoBuffer> fmt::Debug for Submitter<T, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Submitter")
            .field("image", &self.image)
            .field("running", &self.running())
            .field("capacity", &self.capacity)
            .finish_non_exhaustive()
    }
}
