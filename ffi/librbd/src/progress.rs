//! Closures that the library calls while a blocking call runs.

use std::any::Any;
use std::ffi::{c_int, c_void};
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Mutex, PoisonError};

/// A closure that gets the number of finished parts and of all parts. If it returns `Break`, an operation
/// that can be interrupted ends with ECANCELED; the operation's documentation says what remains.
pub type Progress<'a> = &'a mut (dyn FnMut(u64, u64) -> ControlFlow<()> + Send);

/// Calls `run` with a C callback and its argument, which call `progress`. The library may use several of
/// its threads for the callback, but calls it never after `run` has returned. After a panic of `progress`
/// the operation continues without further calls of it.
pub(crate) fn with_progress(
    progress: Progress<'_>,
    run: impl FnOnce(librbd_sys::librbd_progress_fn_t, *mut c_void) -> c_int,
) -> c_int {
    let state = Mutex::new(State { closure: progress, panic: None });
    let returned = run(on_progress, (&raw const state).cast_mut().cast());
    finish(state, returned)
}

/// A closure that gets the offset and length of an extent, and whether it exists. Returns whether to
/// continue.
pub(crate) type Extent<'a> = &'a mut (dyn FnMut(u64, u64, bool) -> bool + Send);

/// Like [`with_progress`], for a walk over extents.
pub(crate) fn with_extents(
    extent: Extent<'_>,
    run: impl FnOnce(librbd_sys::rbd_diff_fn_t, *mut c_void) -> c_int,
) -> c_int {
    let state = Mutex::new(State { closure: extent, panic: None });
    let returned = run(on_extent, (&raw const state).cast_mut().cast());
    finish(state, returned)
}

struct State<F> {
    closure: F,
    panic: Option<Box<dyn Any + Send>>,
}

/// Continues a panic of the closure on the caller's thread.
fn finish<F>(state: Mutex<State<F>>, returned: c_int) -> c_int {
    match state.into_inner().unwrap_or_else(PoisonError::into_inner).panic {
        Some(panic) => resume_unwind(panic),
        None => returned,
    }
}

unsafe extern "C" fn on_progress(done: u64, total: u64, argument: *mut c_void) -> c_int {
    // SAFETY: `with_progress` passes a `Mutex<State<Progress>>` that outlives the call.
    let state = unsafe { &*argument.cast::<Mutex<State<Progress<'_>>>>() };
    match call(state, |closure| closure(done, total)) {
        Some(ControlFlow::Break(())) => -libc::ECANCELED,
        Some(ControlFlow::Continue(())) | None => 0,
    }
}

unsafe extern "C" fn on_extent(
    offset: u64,
    length: usize,
    exists: c_int,
    argument: *mut c_void,
) -> c_int {
    // SAFETY: `with_extents` passes a `Mutex<State<Extent>>` that outlives the call.
    let state = unsafe { &*argument.cast::<Mutex<State<Extent<'_>>>>() };
    match call(state, |closure| closure(offset, length as u64, exists != 0)) {
        Some(true) => 0,
        Some(false) | None => -libc::ECANCELED,
    }
}

fn call<F, T>(state: &Mutex<State<F>>, run: impl FnOnce(&mut F) -> T) -> Option<T> {
    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
    if state.panic.is_some() {
        return None;
    }
    match catch_unwind(AssertUnwindSafe(|| run(&mut state.closure))) {
        Ok(value) => Some(value),
        Err(panic) => {
            state.panic = Some(panic);
            None
        }
    }
}
