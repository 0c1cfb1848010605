//! Closures that the library calls back while a call of ours waits.

use std::any::Any;
use std::ffi::{c_int, c_void};
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Mutex, PoisonError};

/// Told how much of how much is done. `Break` ends the operation where it is, with ECANCELED, where
/// it is one that can be ended: what that leaves stands with each.
pub type Progress<'a> = &'a mut (dyn FnMut(u64, u64) -> ControlFlow<()> + Send);

/// Calls `run` with a C callback and its argument, which call `progress`. The library calls from
/// threads of its own, perhaps several, but never after `run` has returned. After a panic of
/// `progress` the operation goes on to its end untold.
pub(crate) fn with_progress(
    progress: Progress<'_>,
    run: impl FnOnce(librbd_sys::librbd_progress_fn_t, *mut c_void) -> c_int,
) -> c_int {
    let state = Mutex::new(State { closure: progress, panic: None });
    let returned = run(told, (&raw const state).cast_mut().cast());
    finish(state, returned)
}

/// Told of an extent: offset, length, whether it exists. Returns whether to go on.
pub(crate) type Extent<'a> = &'a mut (dyn FnMut(u64, u64, bool) -> bool + Send);

/// As [`with_progress`], for walks over extents.
pub(crate) fn with_extents(
    extent: Extent<'_>,
    run: impl FnOnce(librbd_sys::rbd_diff_fn_t, *mut c_void) -> c_int,
) -> c_int {
    let state = Mutex::new(State { closure: extent, panic: None });
    let returned = run(walked, (&raw const state).cast_mut().cast());
    finish(state, returned)
}

struct State<F> {
    closure: F,
    panic: Option<Box<dyn Any + Send>>,
}

/// A panic of the closure goes on here, on the caller's thread.
fn finish<F>(state: Mutex<State<F>>, returned: c_int) -> c_int {
    match state.into_inner().unwrap_or_else(PoisonError::into_inner).panic {
        Some(panic) => resume_unwind(panic),
        None => returned,
    }
}

unsafe extern "C" fn told(done: u64, total: u64, argument: *mut c_void) -> c_int {
    // SAFETY: `with_progress` passes a `Mutex<State<Progress>>` that outlives the call.
    let state = unsafe { &*argument.cast::<Mutex<State<Progress<'_>>>>() };
    match call(state, |closure| closure(done, total)) {
        Some(ControlFlow::Break(())) => -libc::ECANCELED,
        Some(ControlFlow::Continue(())) | None => 0,
    }
}

unsafe extern "C" fn walked(
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

fn call<F, T>(state: &Mutex<State<F>>, use_it: impl FnOnce(&mut F) -> T) -> Option<T> {
    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
    if state.panic.is_some() {
        return None;
    }
    match catch_unwind(AssertUnwindSafe(|| use_it(&mut state.closure))) {
        Ok(value) => Some(value),
        Err(panic) => {
            state.panic = Some(panic);
            None
        }
    }
}
