//! Being asked to be quiet while somebody, here or elsewhere, makes a snapshot of the image.
//!
//! What librbd does (16.2, ImageWatcher and ImageState): whoever makes a snapshot notifies everybody
//! who watches the image, every 5 s and at most `rbd_quiesce_notification_attempts` times (10), until
//! all have answered; an error of one makes the snapshot fail, unless it is to be ignored (ETIMEDOUT
//! makes whoever asked through the lock's owner ask again; EOPNOTSUPP is no error). Afterwards
//! they are told that it is over. Where that never comes, each library tells its own side 10 s after
//! the answer. It aborts the process when a request is answered twice, and never lets go of a watch
//! with a request that is not answered: both are seen to here.

use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use librbd_sys::Librbd;

use crate::error::{Error, Result, check};
use crate::image::Image;

/// What a watch is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quiesce {
    /// A snapshot waits for [`QuiesceWatch::complete`].
    Begin,
    /// It has been made, or given up.
    End,
}

/// A registered closure. When dropped, whoever waits is answered with ESHUTDOWN.
#[derive(Debug)]
pub struct QuiesceWatch {
    image: Arc<Image>,
    calls: Calls,
    shared: Arc<Shared>,
    handle: u64,
}

/// The functions, which older libraries lack.
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

/// What the library's callbacks get.
struct Shared {
    told: Box<dyn Fn(Quiesce) + Send + Sync>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// A request has not been answered.
    asked: bool,
    /// What every request is answered with, at once, without telling anybody.
    standing: Option<c_int>,
    /// How to answer; known once the library has returned from registering.
    answer: Option<Answer>,
}

/// Of a watch, for as long as it is registered.
#[derive(Debug, Clone, Copy)]
struct Answer {
    image: librbd_sys::rbd_image_t,
    complete: unsafe extern "C" fn(librbd_sys::rbd_image_t, u64, c_int),
    handle: u64,
}

// SAFETY: an rbd_image_t may be used from any thread, see `Image`.
unsafe impl Send for Answer {}

impl Image {
    /// Calls `told` from now on whenever a snapshot of the image is about to be made, and when that is
    /// over. It is called on a thread of the library, which serves the image meanwhile: it must not
    /// call the library nor wait. With `standing`, requests are answered with that errno (0: go on) at
    /// once, and not told, until [`QuiesceWatch::stand`] says otherwise.
    ///
    /// # Errors
    /// ENOSYS for a library before Ceph 16, or what the library gives.
    pub fn watch_quiesce(
        self: &Arc<Self>,
        standing: Option<i32>,
        told: impl Fn(Quiesce) + Send + Sync + 'static,
    ) -> Result<QuiesceWatch> {
        let calls = Calls::of(self.api())?;
        let state = State { standing, ..State::default() };
        let shared = Arc::new(Shared { told: Box::new(told), state: Mutex::new(state) });
        let argument = Arc::into_raw(Arc::clone(&shared)).cast_mut().cast();
        let mut handle = 0;
        // SAFETY: the image is open; the argument is a reference of its own, given back below or in
        // `drop`, when the library has let go of it.
        let returned = unsafe {
            (calls.watch)(self.raw(), on_quiesce, on_unquiesce, argument, &raw mut handle)
        };
        if let Err(error) = check(returned, || "watch the image for snapshots".to_owned()) {
            // SAFETY: made above, and not registered.
            drop(unsafe { Arc::from_raw(argument.cast::<Shared>()) });
            return Err(error);
        }
        let watch = QuiesceWatch { image: Arc::clone(self), calls, shared, handle };
        let mut state = watch.shared.lock();
        let answer = Answer { image: watch.image.raw(), complete: calls.complete, handle };
        state.answer = Some(answer);
        // One may have come between the two.
        let waiting = state.take_standing();
        drop(state);
        answer.give(waiting);
        Ok(watch)
    }
}

impl QuiesceWatch {
    /// Answers the request that was told last: quiet, or with an errno why not. Says whether there was
    /// one that nobody had answered.
    pub fn complete(&self, result: Result<(), i32>) -> bool {
        let mut state = self.shared.lock();
        let asked = std::mem::take(&mut state.asked);
        let answer = state.answer;
        drop(state);
        if let Some(answer) = answer.filter(|_| asked) {
            answer.give(Some(result.err().map_or(0, |errno| -errno.abs())));
        }
        asked
    }

    /// From now on requests are answered with this errno (0: go on) at once, and told to nobody; one
    /// that waits is, too. `None`: they are told.
    pub fn stand(&self, standing: Option<i32>) {
        let mut state = self.shared.lock();
        state.standing = standing;
        let (answer, waiting) = (state.answer, state.take_standing());
        drop(state);
        answer.into_iter().for_each(|answer| answer.give(waiting));
    }
}

impl Drop for QuiesceWatch {
    fn drop(&mut self) {
        // A request that nobody answers would keep the watch for ever.
        self.stand(Some(libc::ESHUTDOWN));
        // SAFETY: the image is open, the handle its own.
        let returned = unsafe { (self.calls.unwatch)(self.image.raw(), self.handle) };
        // Where it did not end, the closure may still be called, and is kept for good.
        if returned >= 0 {
            // SAFETY: made in `watch_quiesce`, and the library has let go of it; a callback that has
            // answered and is about to return has a reference of its own.
            drop(unsafe { Arc::from_raw(Arc::as_ptr(&self.shared)) });
        }
    }
}

impl Calls {
    fn of(api: &Librbd) -> Result<Self> {
        match (api.rbd_quiesce_watch, api.rbd_quiesce_complete, api.rbd_quiesce_unwatch) {
            (Some(watch), Some(complete), Some(unwatch)) => Ok(Self { watch, complete, unwatch }),
            _ => {
                let action =
                    "watch the image for snapshots, for which librbd is too old (Ceph 16 can)";
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
        state.asked = true;
        let (answer, waiting) = (state.answer, state.take_standing());
        let tell = state.asked && state.standing.is_none();
        drop(state);
        answer.into_iter().for_each(|answer| answer.give(waiting));
        if tell {
            (self.told)(Quiesce::Begin);
        }
    }
}

impl State {
    /// The standing answer to the request that waits, which is taken by it.
    fn take_standing(&mut self) -> Option<c_int> {
        let standing = self.standing.filter(|_| self.asked && self.answer.is_some())?;
        self.asked = false;
        Some(-standing.abs())
    }
}

impl Answer {
    fn give(self, result: Option<c_int>) {
        let Some(result) = result else { return };
        // SAFETY: whoever has an `Answer` got it from a watch that is registered, or from a callback
        // of it, so the image is open; `asked` was taken, so the request is answered this once.
        unsafe { (self.complete)(self.image, self.handle, result) };
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("state", &self.state).finish_non_exhaustive()
    }
}

/// A reference of the caller's own, so that `drop` frees nothing under a callback.
///
/// # Safety
/// `argument` is what `watch_quiesce` registered, and the watch has not ended: its request is not
/// answered yet, or (unquiesce) the library waits for this callback before it lets go.
unsafe fn borrowed(argument: *mut c_void) -> Arc<Shared> {
    let shared = argument.cast::<Shared>().cast_const();
    // SAFETY: by this function's contract the registered reference is still there.
    unsafe {
        Arc::increment_strong_count(shared);
        Arc::from_raw(shared)
    }
}

/// A panic in it ends the process, as in every `extern "C"` function of Rust.
unsafe extern "C" fn on_quiesce(argument: *mut c_void) {
    // SAFETY: the library passes the argument, and its request is not answered yet.
    unsafe { borrowed(argument) }.begin();
}

unsafe extern "C" fn on_unquiesce(argument: *mut c_void) {
    // SAFETY: the library passes the argument, and waits for the end of this before it lets go.
    let shared = unsafe { borrowed(argument) };
    (shared.told)(Quiesce::End);
}
