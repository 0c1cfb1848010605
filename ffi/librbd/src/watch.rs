//! Changes of an image's header: its size, its snapshots, its metadata.

use std::ffi::c_void;
use std::sync::Arc;

use crate::error::{Result, check};
use crate::image::Image;

/// A registered closure. Unregistered when dropped, which waits for a call that is under way.
#[derive(Debug)]
pub struct Watch {
    image: Arc<Image>,
    handle: u64,
    closure: *mut Closure,
}

type Closure = Box<dyn Fn() + Send + Sync>;

// SAFETY: the closure is `Send + Sync`, and only the library calls it; the rest is `Send`.
unsafe impl Send for Watch {}
// SAFETY: as above; there is nothing that can be done with a shared one.
unsafe impl Sync for Watch {}

impl Image {
    /// Calls `changed` from now on whenever the image's header changes. It is called on a thread of
    /// the library, which serves the image meanwhile: it must not call the library nor wait.
    ///
    /// # Errors
    /// What the library gives.
    pub fn watch(self: &Arc<Self>, changed: impl Fn() + Send + Sync + 'static) -> Result<Watch> {
        let closure: *mut Closure = Box::into_raw(Box::new(Box::new(changed)));
        let mut handle = 0;
        // SAFETY: the image is open; the closure lives until the watch has ended, see `drop`.
        let returned = unsafe {
            (self.api().rbd_update_watch)(self.raw(), &raw mut handle, on_change, closure.cast())
        };
        if let Err(error) = check(returned, || "watch the image".to_owned()) {
            // SAFETY: made above, and not registered.
            drop(unsafe { Box::from_raw(closure) });
            return Err(error);
        }
        Ok(Watch { image: Arc::clone(self), handle, closure })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // SAFETY: the image is open, the handle its own.
        let returned =
            unsafe { (self.image.api().rbd_update_unwatch)(self.image.raw(), self.handle) };
        // Where it did not end, the closure may still be called, and is kept for good.
        if returned >= 0 {
            // SAFETY: made in `watch`, and the library has let go of it.
            drop(unsafe { Box::from_raw(self.closure) });
        }
    }
}

/// A panic in it ends the process, as in every `extern "C"` function of Rust.
unsafe extern "C" fn on_change(argument: *mut c_void) {
    // SAFETY: `watch` passes a pointer to a closure that lives until the watch has ended.
    let closure = unsafe { &*argument.cast::<Closure>() };
    closure();
}
