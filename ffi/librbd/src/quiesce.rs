//! Requests to quiesce the image while a client takes a snapshot of it.
//!
//! How librbd works (16.2, ImageWatcher and ImageState): the client that takes a snapshot notifies all
//! watchers of the image every 5 s, at most `rbd_quiesce_notification_attempts` times (10), until all have
//! answered. An error of one watcher makes the snapshot fail, unless the client ignores errors (after
//! ETIMEDOUT, a client that requested the snapshot through the lock's owner requests it again; EOPNOTSUPP is
//! not an error). Afterwards the client notifies the watchers of the end. If that notification does not
//! arrive, each library reports the end to its process 10 s after the answer.
//!
//! The library aborts the process if a request is answered twice, and it never unregisters a watch whose
//! request is not answered. This module prevents both.

use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use librbd_sys::Librbd;

use crate::error::{Error, Result, check};
use crate::image::Image;

/// An event that a watch reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quiesce {
    /// A snapshot waits for [`QuiesceWatch::complete`].
    Begin,
    /// The snapshot was taken, or has failed.
    End,
}

/// A registered closure. Dropping it answers a waiting request with ESHUTDOWN and unregisters the closure.
#[derive(Debug)]
pub struct QuiesceWatch {
    image: Arc<Image>,
    calls: Calls,
    shared: Arc<Shared>,
    handle: u64,
}

/// The functions, which libraries before Ceph 16 lack.
#[derive(Debug, Clone, Copy)]
struct Calls {
    watch: unsafe extern "C" fn(
        librbd_sys::rbd_image_t,
        librbd_sys::rbd_update_callback_t,
        librbd_sys::rbd_update_callback_t,
        *mut c_void,
        *mut u64,
    ) -> c_int,
    complete: unsafe extern "C" fn(librbd_sys::rbd_image_t, u64, c_int),
    unwatch: unsafe extern "C" fn(librbd_sys::rbd_image_t, u64) -> c_int,
}

/// The argument of the library's callbacks.
struct Shared {
    notify: Box<dyn Fn(Quiesce) + Send + Sync>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Whether a request has not been answered.
    pending: bool,
    /// The errno with which every request is answered at once, without a notification.
    default_answer: Option<c_int>,
    /// Known once the library has returned from registering.
    answer: Option<Answer>,
}

/// Sends an answer to the library. Valid as long as the watch is registered.
#[derive(Debug, Clone, Copy)]
struct Answer {
    image: librbd_sys::rbd_image_t,
    complete: unsafe extern "C" fn(librbd_sys::rbd_image_t, u64, c_int),
    handle: u64,
}

// SAFETY: any thread may use an rbd_image_t (see `Image`).
unsafe impl Send for Answer {}

impl Image {
    /// Calls `notify` when a snapshot of the image is about to be taken, and when it has ended. The call
    /// runs on a thread that the library needs for the image, so `notify` must neither call the library nor
    /// block. With `default_answer`, requests are answered at once with that errno (0: proceed) without a
    /// [`Quiesce::Begin`], until [`QuiesceWatch::set_default_answer`] changes it.
    ///
    /// # Errors
    /// Returns ENOSYS for a library before Ceph 16, or another error of the library.
    pub fn watch_quiesce(
        self: &Arc<Self>,
        default_answer: Option<i32>,
        notify: impl Fn(Quiesce) + Send + Sync + 'static,
    ) -> Result<QuiesceWatch> {
        let calls = Calls::of(self.api())?;
        let state = State { default_answer, ..State::default() };
        let shared = Arc::new(Shared { notify: Box::new(notify), state: Mutex::new(state) });
        let argument = Arc::into_raw(Arc::clone(&shared)).cast_mut().cast();
        let mut handle = 0;
        // SAFETY: the image is open; the argument is a reference of its own, which is released below or
        // in `drop`, when the library does not use it any more.
        let returned = unsafe {
            (calls.watch)(self.raw(), on_quiesce, on_unquiesce, argument, &raw mut handle)
        };
        if let Err(error) = check(returned, || "watch the image for snapshots".to_owned()) {
            // SAFETY: the reference was made above and is not registered.
            drop(unsafe { Arc::from_raw(argument.cast::<Shared>()) });
            return Err(error);
        }
        let watch = QuiesceWatch { image: Arc::clone(self), calls, shared, handle };
        let mut state = watch.shared.lock();
        let answer = Answer { image: watch.image.raw(), complete: calls.complete, handle };
        state.answer = Some(answer);
        // A request may have arrived between the registration and now.
        let result = state.take_default_answer();
        drop(state);
        answer.send(result);
        Ok(watch)
    }
}

impl QuiesceWatch {
    /// Answers the waiting request: the snapshot may proceed, or it fails with an errno. Returns whether a
    /// request was waiting.
    pub fn complete(&self, result: Result<(), i32>) -> bool {
        let mut state = self.shared.lock();
        let pending = std::mem::take(&mut state.pending);
        let answer = state.answer;
        drop(state);
        if let Some(answer) = answer.filter(|_| pending) {
            answer.send(Some(result.err().map_or(0, |errno| -errno.abs())));
        }
        pending
    }

    /// Answers all further requests, and one that waits, at once with this errno (0: proceed). With `None`
    /// further requests are reported and wait for [`QuiesceWatch::complete`].
    pub fn set_default_answer(&self, default_answer: Option<i32>) {
        let mut state = self.shared.lock();
        state.default_answer = default_answer;
        let (answer, result) = (state.answer, state.take_default_answer());
        drop(state);
        answer.into_iter().for_each(|answer| answer.send(result));
    }
}

impl Drop for QuiesceWatch {
    fn drop(&mut self) {
        // The library does not unregister a watch while a request is unanswered.
        self.set_default_answer(Some(libc::ESHUTDOWN));
        // SAFETY: the image is open, and the handle is that of its watch.
        let returned = unsafe { (self.calls.unwatch)(self.image.raw(), self.handle) };
        // If unregistering failed, the library may still call the closure, so it is leaked.
        if returned >= 0 {
            // SAFETY: the reference was made in `watch_quiesce`, and the library does not use it any
            // more; a callback that has answered and is about to return has a reference of its own.
            drop(unsafe { Arc::from_raw(Arc::as_ptr(&self.shared)) });
        }
    }
}

impl Calls {
    fn of(api: &Librbd) -> Result<Self> {
        match (api.rbd_quiesce_watch, api.rbd_quiesce_complete, api.rbd_quiesce_unwatch) {
            (Some(watch), Some(complete), Some(unwatch)) => Ok(Self { watch, complete, unwatch }),
            _ => {
                let action = "watch the image for snapshots (librbd is older than Ceph 16)";
                Err(Error::new(action, libc::ENOSYS))
            }
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self) {
        let mut state = self.lock();
        state.pending = true;
        let (answer, result) = (state.answer, state.take_default_answer());
        let notify = state.pending && state.default_answer.is_none();
        drop(state);
        answer.into_iter().for_each(|answer| answer.send(result));
        if notify {
            (self.notify)(Quiesce::Begin);
        }
    }
}

impl State {
    /// Returns the default answer if a request waits for it, which is then no longer pending.
    fn take_default_answer(&mut self) -> Option<c_int> {
        let errno = self.default_answer.filter(|_| self.pending && self.answer.is_some())?;
        self.pending = false;
        Some(-errno.abs())
    }
}

impl Answer {
    fn send(self, result: Option<c_int>) {
        let Some(result) = result else { return };
        // SAFETY: an `Answer` comes from a registered watch or from its callback, so the image is open;
        // `pending` was reset before, so the request is answered once.
        unsafe { (self.complete)(self.image, self.handle, result) };
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("state", &self.state).finish_non_exhaustive()
    }
}

/// Makes a new reference for a callback, so that `drop` frees nothing that the callback uses.
///
/// # Safety
/// `argument` must be that of `watch_quiesce`, and the watch must be registered: its request is not
/// answered yet, or (unquiesce) the library waits for the callback before it unregisters the watch.
unsafe fn new_reference(argument: *mut c_void) -> Arc<Shared> {
    let shared = argument.cast::<Shared>().cast_const();
    // SAFETY: by this function's contract the registered reference exists.
    unsafe {
        Arc::increment_strong_count(shared);
        Arc::from_raw(shared)
    }
}

/// Handles a request. A panic ends the process, as in every `extern "C"` function of Rust.
unsafe extern "C" fn on_quiesce(argument: *mut c_void) {
    // SAFETY: the library passes the argument, and its request is not answered yet.
    unsafe { new_reference(argument) }.begin();
}

/// Handles the end of a snapshot. A panic ends the process.
unsafe extern "C" fn on_unquiesce(argument: *mut c_void) {
    // SAFETY: the library passes the argument, and unregisters the watch only after this call.
    let shared = unsafe { new_reference(argument) };
    (shared.notify)(Quiesce::End);
}
