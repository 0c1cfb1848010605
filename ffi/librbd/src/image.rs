//! An open image: what it is, and how its size and content are changed as a whole.

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
    /// To be written; watches the image.
    Write,
    /// Needs no right to write and watches nothing, so that size and snapshots may be out of date.
    ReadOnly,
}

/// Which image of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Which<'a> {
    Named(&'a str),
    /// Also one that lies in the trash.
    WithId(&'a str),
}

/// An open image. Closed when dropped, after every operation on it has ended: that blocks as long as
/// the cluster does not answer.
#[derive(Debug)]
pub struct Image {
    handle: rbd_image_t,
    gate: Arc<Gate>,
    /// Keeps the client; dropped after the image was closed.
    pool: Arc<Pool>,
}

// SAFETY: an rbd_image_t may be used from any thread, by several at once: librbd locks what it
// shares (its own command line, qemu and fio rely on it).
unsafe impl Send for Image {}
// SAFETY: as above.
unsafe impl Sync for Image {}

/// What an image is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    /// In bytes.
    pub size: u64,
    /// Bytes of one object.
    pub object_size: u64,
    /// Consecutive bytes that lie in one object.
    pub stripe_unit: u64,
    /// Objects that stripes are laid over.
    pub stripe_count: u64,
}

/// Most options that are listed.
const MAX_OPTIONS: i32 = 4096;

impl Pool {
    /// Opens an image, or a snapshot of it, which can only be read.
    ///
    /// # Errors
    /// ENOENT, or what the library gives.
    pub fn open(
        self: &Arc<Self>,
        name: &str,
        snapshot: Option<&str>,
        how: Open,
    ) -> Result<Arc<Image>> {
        Image::open(self, Which::Named(name), snapshot, how).map(Arc::new)
    }

    /// Opens an image by its id: also one that lies in the trash.
    ///
    /// # Errors
    /// ENOENT, or what the library gives.
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
        // SAFETY: the pool is open, the names are C strings or null; `handle` takes the image.
        let opened = unsafe { call(pool.raw(), text.as_ptr(), &raw mut handle, at) };
        check(opened, || match snapshot {
            Some(snapshot) => format!("open the snapshot {snapshot} of the image {name}"),
            None => format!("open the image {name}"),
        })?;
        Ok(Self { handle, gate: Arc::default(), pool: Arc::clone(pool) })
    }

    /// Closes the image, which a drop does too without telling of errors. Blocks until everything in
    /// flight has ended.
    ///
    /// # Errors
    /// What the library gives; the image is closed in any case.
    pub fn close(self) -> Result<()> {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: `this` is never used again, so each field is taken over once.
        let (gate, pool) = unsafe { (std::ptr::read(&this.gate), std::ptr::read(&this.pool)) };
        gate.wait();
        // SAFETY: the image is open, nothing is in flight, and nobody else can close it.
        let closed = unsafe { (pool.cluster.api.rbd.rbd_close)(this.handle) };
        check(closed, || "close the image".to_owned()).map(drop)
    }

    /// Size and layout, as the image has them now.
    ///
    /// # Errors
    /// What the library gives.
    pub fn stat(&self) -> Result<Stat> {
        let mut info = MaybeUninit::<rbd_image_info_t>::uninit();
        let (mut stripe_unit, mut stripe_count) = (0, 0);
        // SAFETY: the image is open; each call fills what it is given, and says so by its result.
        let (info, unit, count) = unsafe {
            let stat = (self.api().rbd_stat)(self.raw(), info.as_mut_ptr(), size_of_val(&info));
            check(stat, || "ask for the image's size".to_owned())?;
            (
                info.assume_init(),
                (self.api().rbd_get_stripe_unit)(self.raw(), &raw mut stripe_unit),
                (self.api().rbd_get_stripe_count)(self.raw(), &raw mut stripe_count),
            )
        };
        check(unit.min(count), || "ask for the image's stripes".to_owned())?;
        Ok(Stat { size: info.size, object_size: info.obj_size, stripe_unit, stripe_count })
    }

    /// The size in bytes, as the image has it now.
    ///
    /// # Errors
    /// What the library gives.
    pub fn size(&self) -> Result<u64> {
        self.number(self.api().rbd_get_size, "ask for the image's size")
    }

    /// Its features, as `RBD_FEATURE_…`.
    ///
    /// # Errors
    /// What the library gives.
    pub fn features(&self) -> Result<u64> {
        self.number(self.api().rbd_get_features, "ask for the image's features")
    }

    /// Its flags, as `RBD_FLAG_…`.
    ///
    /// # Errors
    /// What the library gives.
    pub fn flags(&self) -> Result<u64> {
        self.number(self.api().rbd_get_flags, "ask for the image's flags")
    }

    pub(crate) fn number(
        &self,
        call: unsafe extern "C" fn(rbd_image_t, *mut u64) -> i32,
        action: &str,
    ) -> Result<u64> {
        let mut number = 0;
        // SAFETY: the image is open, and `number` takes the answer.
        check(unsafe { call(self.raw(), &raw mut number) }, || action.to_owned())?;
        Ok(number)
    }

    /// Its identity in the pool, which stays when it is renamed.
    ///
    /// # Errors
    /// What the library gives.
    pub fn id(&self) -> Result<String> {
        let id = growing(
            64,
            || "ask for the image's id".to_owned(),
            |buffer, size| {
                // SAFETY: the image is open, and `buffer` has room for `size` bytes.
                unsafe { (self.api().rbd_get_id)(self.raw(), buffer, *size) }
            },
        )?;
        Ok(until_zero(&id))
    }

    /// The client that has the image open.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// librbd's options as they hold for this image: its own go before its pool's and the client's.
    ///
    /// # Errors
    /// What the library gives.
    pub fn config(&self) -> Result<Vec<(String, String)>> {
        let mut count = 128_i32;
        loop {
            let none = rbd_config_option_t { name: null_mut(), value: null_mut(), source: 0 };
            let mut options = vec![none; usize::try_from(count).unwrap_or(0)];
            let room = count;
            // SAFETY: `options` has room for `count`, which are ours to clean up on success.
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

    /// Changes the size. What is cut off, which only `allow_shrink` does, is gone. Ended half way, it
    /// has the old size, with objects missing at its end.
    ///
    /// # Errors
    /// EINVAL for a smaller size without `allow_shrink`, or what the library gives.
    pub fn resize(&self, size: u64, allow_shrink: bool, progress: Progress<'_>) -> Result<()> {
        let returned = with_progress(progress, |callback, argument| {
            // SAFETY: the image is open, the callback good for the call.
            unsafe { (self.api().rbd_resize2)(self.raw(), size, allow_shrink, callback, argument) }
        });
        check(returned, || format!("resize the image to {size} bytes")).map(drop)
    }

    /// Copies what a clone has of its parent, so that it needs it no more. Ended half way, it is still
    /// the clone that it was, and another call goes on.
    ///
    /// # Errors
    /// EINVAL without a parent, or what the library gives.
    pub fn flatten(&self, progress: Progress<'_>) -> Result<()> {
        let returned = with_progress(progress, |callback, argument| {
            // SAFETY: the image is open, the callback good for the call.
            unsafe { (self.api().rbd_flatten_with_progress)(self.raw(), callback, argument) }
        });
        check(returned, || "flatten the image".to_owned()).map(drop)
    }

    /// Walks over what is allocated in `length` bytes from `offset` (with `since`: over what has
    /// changed since that snapshot), a parent's part included, in whole objects where
    /// `whole_objects`, which is fast with the feature fast-diff. Told of extents in order, with
    /// `true` for data and `false` for zeroes; what lies between them is as before, or zero.
    /// `extent` returns whether to go on.
    ///
    /// # Errors
    /// ECANCELED when `extent` ended it, or what the library gives.
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
            // SAFETY: the image is open, `from` null or a C string, the callback good for the call.
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

    /// Whether the library can write zeroes without being given them.
    pub fn can_write_zeroes(&self) -> bool {
        self.api().rbd_aio_write_zeroes.is_some()
    }

    /// Operations that have begun and not ended, over all submitters.
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
        // SAFETY: the image is open, nothing is in flight, and nobody else can close it. Whoever
        // wants to know how it went calls `close`.
        unsafe { (self.api().rbd_close)(self.handle) };
    }
}
