//! An open image: its properties, and operations on it as a whole.

use std::ffi::c_char;
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};
use std::sync::Arc;

use librbd_sys::{Librbd, rbd_config_option_t, rbd_image_info_t, rbd_image_t};

use crate::error::{Result, check};
use crate::gate::Gate;
use crate::pool::Pool;
use crate::progress::{Progress, with_extents, with_progress};
use crate::text::{c_string, growing, owned, until_zero};

/// How an image is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Open {
    /// For reading and writing. Watches the image.
    Write,
    /// For reading. Needs no capability to write and does not watch the image, so the size and the
    /// snapshots may be outdated.
    ReadOnly,
}

/// Selects an image of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Which<'a> {
    Named(&'a str),
    /// By the id, which also finds an image in the trash.
    WithId(&'a str),
}

/// An open image. Dropping it closes it after every operation on it has ended, and blocks for as long as
/// the cluster does not answer.
#[derive(Debug)]
pub struct Image {
    handle: rbd_image_t,
    gate: Arc<Gate>,
    /// Keeps the client connected until the image was closed.
    pool: Arc<Pool>,
}

// SAFETY: several threads may use an rbd_image_t at once: librbd locks its shared state (its own command
// line, qemu and fio rely on it).
unsafe impl Send for Image {}
// SAFETY: see above.
unsafe impl Sync for Image {}

/// The size and layout of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    /// The size of the image in bytes.
    pub size: u64,
    /// The size of an object in bytes.
    pub object_size: u64,
    /// The number of consecutive bytes in one object.
    pub stripe_unit: u64,
    /// The number of objects that a stripe covers.
    pub stripe_count: u64,
}

/// The maximum number of options that are listed.
const MAX_OPTIONS: i32 = 4096;

impl Pool {
    /// Opens an image, or a snapshot of it, which is read-only.
    ///
    /// # Errors
    /// Returns ENOENT if it does not exist, or another error of the library.
    pub fn open(
        self: &Arc<Self>,
        name: &str,
        snapshot: Option<&str>,
        how: Open,
    ) -> Result<Arc<Image>> {
        Image::open(self, Which::Named(name), snapshot, how).map(Arc::new)
    }

    /// Opens an image by its id, which also finds an image in the trash.
    ///
    /// # Errors
    /// Returns ENOENT if it does not exist, or another error of the library.
    pub fn open_by_id(self: &Arc<Self>, id: &str, how: Open) -> Result<Arc<Image>> {
        Image::open(self, Which::WithId(id), None, how).map(Arc::new)
    }
}

impl Image {
    pub(crate) fn open(
        pool: &Arc<Pool>,
        which: Which<'_>,
        snapshot: Option<&str>,
        how: Open,
    ) -> Result<Self> {
        let api = &pool.cluster.api.rbd;
        let (name, call) = match (which, how) {
            (Which::Named(name), Open::Write) => (name, api.rbd_open),
            (Which::Named(name), Open::ReadOnly) => (name, api.rbd_open_read_only),
            (Which::WithId(id), Open::Write) => (id, api.rbd_open_by_id),
            (Which::WithId(id), Open::ReadOnly) => (id, api.rbd_open_by_id_read_only),
        };
        let text = c_string(name, "an image's name")?;
        let at = snapshot.map(|name| c_string(name, "a snapshot's name")).transpose()?;
        let at: *const c_char = at.as_ref().map_or(null(), |name| name.as_ptr());
        let mut handle = null_mut();
        // SAFETY: the pool is open, the names are C strings or null; `handle` receives the image.
        let opened = unsafe { call(pool.raw(), text.as_ptr(), &raw mut handle, at) };
        check(opened, || match snapshot {
            Some(snapshot) => format!("open the snapshot {snapshot} of the image {name}"),
            None => format!("open the image {name}"),
        })?;
        Ok(Self { handle, gate: Arc::default(), pool: Arc::clone(pool) })
    }

    /// Closes the image and reports errors, which a drop ignores. Blocks until every operation in flight
    /// has ended.
    ///
    /// # Errors
    /// Returns the library's error. The image is closed in any case.
    pub fn close(self) -> Result<()> {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: `this` is never used again, so each field is moved once.
        let (gate, pool) = unsafe { (std::ptr::read(&this.gate), std::ptr::read(&this.pool)) };
        gate.wait();
        // SAFETY: the image is open, no operation is in flight, and this value is the only owner.
        let closed = unsafe { (pool.cluster.api.rbd.rbd_close)(this.handle) };
        check(closed, || "close the image".to_owned()).map(drop)
    }

    /// Reads the present size and layout.
    ///
    /// # Errors
    /// Returns the library's error.
    pub fn stat(&self) -> Result<Stat> {
        let mut info = MaybeUninit::<rbd_image_info_t>::uninit();
        let (mut stripe_unit, mut stripe_count) = (0, 0);
        // SAFETY: the image is open; each call that succeeds has filled its argument.
        let (info, unit, count) = unsafe {
            let stat = (self.api().rbd_stat)(self.raw(), info.as_mut_ptr(), size_of_val(&info));
            check(stat, || "read the image's size".to_owned())?;
            (
                info.assume_init(),
                (self.api().rbd_get_stripe_unit)(self.raw(), &raw mut stripe_unit),
                (self.api().rbd_get_stripe_count)(self.raw(), &raw mut stripe_count),
            )
        };
        check(unit.min(count), || "read the image's stripes".to_owned())?;
        Ok(Stat { size: info.size, object_size: info.obj_size, stripe_unit, stripe_count })
    }

    /// Reads the present size in bytes.
    ///
    /// # Errors
    /// Returns the library's error.
    pub fn size(&self) -> Result<u64> {
        self.number(self.api().rbd_get_size, "read the image's size")
    }

    /// Reads the features, as `RBD_FEATURE_…` bits.
    ///
    /// # Errors
    /// Returns the library's error.
    pub fn features(&self) -> Result<u64> {
        self.number(self.api().rbd_get_features, "read the image's features")
    }

    /// Reads the flags, as `RBD_FLAG_…` bits.
    ///
    /// # Errors
    /// Returns the library's error.
    pub fn flags(&self) -> Result<u64> {
        self.number(self.api().rbd_get_flags, "read the image's flags")
    }

    pub(crate) fn number(
        &self,
        call: unsafe extern "C" fn(rbd_image_t, *mut u64) -> i32,
        action: &str,
    ) -> Result<u64> {
        let mut number = 0;
        // SAFETY: the image is open, and `number` receives the answer.
        check(unsafe { call(self.raw(), &raw mut number) }, || action.to_owned())?;
        Ok(number)
    }

    /// Reads the image's id in the pool, which does not change when the image is renamed.
    ///
    /// # Errors
    /// Returns the library's error.
    pub fn id(&self) -> Result<String> {
        let id = growing(
            64,
            || "read the image's id".to_owned(),
            |buffer, size| {
                // SAFETY: the image is open, and `buffer` has room for `size` bytes.
                unsafe { (self.api().rbd_get_id)(self.raw(), buffer, *size) }
            },
        )?;
        Ok(until_zero(&id))
    }

    /// Returns the pool that the image was opened in.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Reads librbd's effective options for this image: the image's own override the pool's, and these
    /// override the client's.
    ///
    /// # Errors
    /// Returns the library's error.
    pub fn config(&self) -> Result<Vec<(String, String)>> {
        let mut count = 128_i32;
        loop {
            let none = rbd_config_option_t { name: null_mut(), value: null_mut(), source: 0 };
            let mut options = vec![none; usize::try_from(count).unwrap_or(0)];
            let room = count;
            // SAFETY: `options` has room for `count` entries, which are cleaned up below on success.
            let returned = unsafe {
                (self.api().rbd_config_image_list)(self.raw(), options.as_mut_ptr(), &raw mut count)
            };
            if returned == -libc::ERANGE && count > room && count <= MAX_OPTIONS {
                continue;
            }
            check(returned, || "read the image's options".to_owned())?;
            // SAFETY: the library filled `count` entries with C strings, which the clean-up frees.
            unsafe {
                let listed = options.iter().take(usize::try_from(count).unwrap_or(0));
                let listed = listed.map(|o| (owned(o.name), owned(o.value))).collect();
                (self.api().rbd_config_image_list_cleanup)(options.as_mut_ptr(), count);
                return Ok(listed);
            }
        }
    }

    /// Changes the size. A smaller size needs `allow_shrink` and removes the data at the end. If it is
    /// interrupted, the image has its old size, and objects at its end are missing.
    ///
    /// # Errors
    /// Returns EINVAL for a smaller size without `allow_shrink`, ECANCELED if `progress` returned `Break`,
    /// or another error of the library.
    pub fn resize(&self, size: u64, allow_shrink: bool, progress: Progress<'_>) -> Result<()> {
        let returned = with_progress(progress, |callback, argument| {
            // SAFETY: the image is open, and the callback is valid for the call.
            unsafe { (self.api().rbd_resize2)(self.raw(), size, allow_shrink, callback, argument) }
        });
        check(returned, || format!("resize the image to {size} bytes")).map(drop)
    }

    /// Copies the parent's data into a clone, which is then independent. If it is interrupted, the image
    /// is still a clone, and another call continues.
    ///
    /// # Errors
    /// Returns EINVAL if the image has no parent, ECANCELED if `progress` returned `Break`, or another
    /// error of the library.
    pub fn flatten(&self, progress: Progress<'_>) -> Result<()> {
        let returned = with_progress(progress, |callback, argument| {
            // SAFETY: the image is open, and the callback is valid for the call.
            unsafe { (self.api().rbd_flatten_with_progress)(self.raw(), callback, argument) }
        });
        check(returned, || "flatten the image".to_owned()).map(drop)
    }

    /// Frees runs of at least `unit` bytes of zeroes in each object, and objects that have only zeroes. The holder of
    /// the lock does the work, if there is one. If it is interrupted, a part is done.
    ///
    /// # Errors
    /// Returns EINVAL if `unit` is not a power of two from 4096 to the size of an object, or another error of the
    /// library.
    pub fn sparsify(&self, unit: usize, progress: Progress<'_>) -> Result<()> {
        let returned = with_progress(progress, |callback, argument| {
            // SAFETY: the image is open, and the callback is valid for the call.
            unsafe { (self.api().rbd_sparsify_with_progress)(self.raw(), unit, callback, argument) }
        });
        check(returned, || "free the zeroes of the image".to_owned()).map(drop)
    }

    /// Walks over the allocated parts of `length` bytes from `offset`, including the parent's data, or with
    /// `since` over the parts that changed since that snapshot. With `whole_objects` the unit is an object,
    /// which is fast with the feature fast-diff.
    ///
    /// `extent` gets the offset and length of each part, and `true` for data or `false` for zeroes. The
    /// ranges between the parts are unchanged or zero. `extent` returns whether to continue.
    ///
    /// # Errors
    /// Returns ECANCELED if `extent` ended the walk, or another error of the library.
    pub fn diff(
        &self,
        since: Option<&str>,
        offset: u64,
        length: u64,
        whole_objects: bool,
        extent: &mut (dyn FnMut(u64, u64, bool) -> bool + Send),
    ) -> Result<()> {
        let since = since.map(|name| c_string(name, "a snapshot's name")).transpose()?;
        let from: *const c_char = since.as_ref().map_or(null(), |name| name.as_ptr());
        let returned = with_extents(extent, |callback, argument| {
            // SAFETY: the image is open, `from` null or a C string, and the callback is valid for the call.
            unsafe {
                (self.api().rbd_diff_iterate2)(
                    self.raw(),
                    from,
                    offset,
                    length,
                    1,
                    u8::from(whole_objects),
                    callback,
                    argument,
                )
            }
        });
        check(returned, || "walk over the image's extents".to_owned()).map(drop)
    }

    /// Returns whether the library has a write-zeroes operation.
    pub fn can_write_zeroes(&self) -> bool {
        self.api().rbd_aio_write_zeroes.is_some()
    }

    /// Returns the number of operations of all submitters that were started and have not ended.
    pub fn in_flight(&self) -> usize {
        self.gate.in_flight()
    }

    pub(crate) fn api(&self) -> &'static Librbd {
        &self.pool.cluster.api.rbd
    }

    pub(crate) fn raw(&self) -> rbd_image_t {
        self.handle
    }

    pub(crate) fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        self.gate.wait();
        // SAFETY: the image is open, no operation is in flight, and this value is the only owner. An
        // error is ignored; `close` reports it.
        unsafe { (self.api().rbd_close)(self.handle) };
    }
}
