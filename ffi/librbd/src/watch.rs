//! Notifications about changes of an image's header: its size, its snapshots, its metadata.

use std::ffi::c_void;
use std::sync::Arc;

use crate::error::{Result, check};
use crate::image::Image;

/// A registered closure. Dropping it unregisters the closure and blocks until a running call has returned.
#[derive(Debug)]
pub struct Watch {
    image: Arc<Image>,
    handle: u64,
    closure: *mut Closure,
}

type Closure = Box<dyn Fn() + Send + Sync>;

// SAFETY: the closure is `Send + Sync`, and only the library calls it; the rest is `Send`.
unsafe impl Send for Watch {}
// SAFETY: a shared reference to it has no methods.
unsafe impl Sync for Watch {}

impl Image {
    /// Calls `changed` whenever the image's header changes. The call runs on a thread that the library
    /// needs for the image, so `changed` must neither call the library nor block.
    ///
    /// # Errors
    /// Returns the library's error.
    pub fn watch(self: &Arc<Self>, changed: impl Fn() + Send + Sync + 'static) -> Result<Watch> {
        let closure: *mut Closure = Box::into_raw(Box::new(Box::new(changed)));
        let mut handle = 0;
        // SAFETY: the image is open; the closure lives until the watch has ended (see `drop`).
        let returned = unsafe {
            (self.api().rbd_update_watch)(self.raw(), &raw mut handle, on_change, closure.cast())
        };
        if let Err(error) = check(returned, || "watch the image".to_owned()) {
            // SAFETY: the box was made above and is not registered.
            drop(unsafe { Box::from_raw(closure) });
            return Err(error);
        }
        Ok(Watch { image: Arc::clone(self), handle, closure })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // SAFETY: the image is open, and the handle is that of its watch.
        let returned =
            unsafe { (self.image.api().rbd_update_unwatch)(self.image.raw(), self.handle) };
        // If unregistering failed, the library may still call the closure, so it is leaked.
        if returned >= 0 {
            // SAFETY: the box was made in `watch`, and the library does not use it any more.
            drop(unsafe { Box::from_raw(self.closure) });
        }
    }
}

/// Calls the closure. A panic ends the process, as in every `extern "C"` function of Rust.
unsafe extern "C" fn on_change(argument: *mut c_void) {
    // SAFETY: `watch` passes a pointer to a closure that lives until the watch has ended.
    let closure = unsafe { &*argument.cast::<Closure>() };
    closure();
}
