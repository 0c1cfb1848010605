//! A pool, or a namespace in one: creates, lists and removes images.

use std::ffi::CString;
use std::ptr::null_mut;
use std::sync::Arc;

use librbd_sys::{
    RBD_IMAGE_OPTION_CLONE_FORMAT, RBD_IMAGE_OPTION_DATA_POOL, RBD_IMAGE_OPTION_FEATURES,
    RBD_IMAGE_OPTION_ORDER, RBD_IMAGE_OPTION_STRIPE_COUNT, RBD_IMAGE_OPTION_STRIPE_UNIT,
    rados_ioctx_t, rbd_image_options_t, rbd_image_spec_t, rbd_trash_image_info_t,
};

use crate::cluster::Cluster;
use crate::error::{Result, Subject, check};
use crate::list::listed;
use crate::progress::{Progress, with_progress};
use crate::text::{c_string, owned};

/// An open pool, or a namespace in it.
#[derive(Debug)]
pub struct Pool {
    io: rados_ioctx_t,
    /// Keeps the client connected until the pool was closed.
    pub(crate) cluster: Arc<Cluster>,
}

// SAFETY: several threads may use an ioctx (librados.h) as long as its settings do not change. They are
// only set before it is shared.
unsafe impl Send for Pool {}
// SAFETY: see above.
unsafe impl Sync for Pool {}

/// The properties of a new image. `None` selects the default of the cluster's configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NewImage {
    /// The features, as `RBD_FEATURE_…` bits.
    pub features: Option<u64>,
    /// The size of objects, as the exponent of a power of two.
    pub order: Option<u8>,
    /// The stripe unit in bytes and the stripe count.
    pub stripes: Option<(u64, u64)>,
    /// A separate pool for the data.
    pub data_pool: Option<String>,
    /// The format of a clone: 1 needs a protected snapshot, 2 does not.
    pub clone_format: Option<u8>,
}

/// An entry of a list of images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageSpec {
    pub id: String,
    pub name: String,
}

/// An image in the trash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trashed {
    pub id: String,
    pub name: String,
    /// When it was moved to the trash, in seconds since the Unix epoch.
    pub since: i64,
    /// Until when only `force` removes it, in seconds since the Unix epoch.
    pub kept_until: i64,
}

impl Cluster {
    /// Opens a pool, or one of its namespaces. A write that exceeds the space of the pool fails with
    /// ENOSPC, or with EDQUOT for a quota. Without this setting every write blocks in the library while the
    /// pool is full, even one that frees space (as before Ceph 16).
    ///
    /// # Errors
    /// Returns ENOENT if there is no such pool, or another error of the library.
    pub fn pool(self: &Arc<Self>, name: &str, namespace: Option<&str>) -> Result<Arc<Pool>> {
        let pool = c_string(name, "a pool's name")?;
        let space: Option<CString> = namespace.map(|n| c_string(n, "a namespace")).transpose()?;
        let mut io = null_mut();
        // SAFETY: the handle is connected, the names are C strings; `io` receives the new context.
        let created =
            unsafe { (self.api.rados.rados_ioctx_create)(self.handle, pool.as_ptr(), &raw mut io) };
        check(created, || format!("use the pool {name}"))
            .map_err(|error| error.about(Subject::Pool))?;
        if let Some(space) = &space {
            // SAFETY: `io` is open and not shared yet.
            unsafe { (self.api.rados.rados_ioctx_set_namespace)(io, space.as_ptr()) };
        }
        if let Some(set_full_try) = self.api.rados.rados_set_pool_full_try {
            // SAFETY: see above.
            unsafe { set_full_try(io) };
        }
        // SAFETY: `io` is open, of this cluster, and not used afterwards.
        Ok(Arc::new(unsafe { Pool::from_raw(Arc::clone(self), io) }))
    }
}

impl Pool {
    /// Takes ownership of `io`.
    ///
    /// # Safety
    /// `io` must be open, belong to `cluster`, and have no other owner.
    pub(crate) unsafe fn from_raw(cluster: Arc<Cluster>, io: rados_ioctx_t) -> Self {
        Self { io, cluster }
    }

    /// Returns the client that the pool was opened with.
    pub fn cluster(&self) -> &Arc<Cluster> {
        &self.cluster
    }

    /// Returns the pool's id, which no other pool of the cluster gets. Does not ask the cluster.
    pub fn id(&self) -> i64 {
        // SAFETY: the pool is open.
        unsafe { (self.cluster.api.rados.rados_ioctx_get_id)(self.io) }
    }

    /// Lists all images.
    ///
    /// # Errors
    /// Returns the library's error.
    pub fn list(&self) -> Result<Vec<ImageSpec>> {
        let action = || "list the images".to_owned();
        let none = rbd_image_spec_t { id: null_mut(), name: null_mut() };
        let mut images = listed(none, action, |entries, count| {
            // SAFETY: the pool is open, and there is room for `count` entries.
            unsafe { (self.api().rbd_list2)(self.io, entries, count) }
        })?;
        // SAFETY: the library filled these with C strings, which the clean-up frees.
        unsafe {
            let found = images.iter();
            let found = found.map(|i| ImageSpec { id: owned(i.id), name: owned(i.name) }).collect();
            (self.api().rbd_image_spec_list_cleanup)(images.as_mut_ptr(), images.len());
            Ok(found)
        }
    }

    /// Creates an image of `size` bytes.
    ///
    /// # Errors
    /// Returns EEXIST if the image exists, EINVAL for an invalid combination of features, or another error
    /// of the library.
    pub fn create(&self, name: &str, size: u64, new: &NewImage) -> Result<()> {
        let text = c_string(name, "an image's name")?;
        let options = Options::of(self, new)?;
        // SAFETY: the pool is open, the name is a C string, and the options exist.
        let returned =
            unsafe { (self.api().rbd_create4)(self.io, text.as_ptr(), size, options.handle) };
        check(returned, || format!("create the image {name}")).map(drop)
    }

    /// Creates the image `name` in this pool as a clone of a snapshot of `parent` in the pool `from`.
    ///
    /// # Errors
    /// Returns EEXIST if the image exists, EINVAL for a clone of format 1 if the snapshot is not protected,
    /// or another error of the library.
    pub fn clone_image(
        &self,
        from: &Self,
        parent: &str,
        snapshot: &str,
        name: &str,
        new: &NewImage,
    ) -> Result<()> {
        let old = c_string(parent, "an image's name")?;
        let at = c_string(snapshot, "a snapshot's name")?;
        let text = c_string(name, "an image's name")?;
        let options = Options::of(self, new)?;
        // SAFETY: both pools are open, the names are C strings, and the options exist.
        let returned = unsafe {
            (self.api().rbd_clone3)(
                from.io,
                old.as_ptr(),
                at.as_ptr(),
                self.io,
                text.as_ptr(),
                options.handle,
            )
        };
        check(returned, || format!("clone {parent}@{snapshot} to {name}")).map(drop)
    }

    /// Removes an image with all its data. If it is interrupted, the image still exists with a part of its
    /// objects, and another call continues.
    ///
    /// # Errors
    /// Returns ENOENT if it does not exist, EBUSY while it is open, ENOTEMPTY if it has snapshots,
    /// ECANCELED if `progress` returned `Break`, or another error of the library.
    pub fn remove(&self, name: &str, progress: Progress<'_>) -> Result<()> {
        let text = c_string(name, "an image's name")?;
        let returned = with_progress(progress, |callback, argument| {
            // SAFETY: the pool is open, the name is a C string, and the callback is valid for the call.
            unsafe {
                (self.api().rbd_remove_with_progress)(self.io, text.as_ptr(), callback, argument)
            }
        });
        check(returned, || format!("remove the image {name}")).map(drop)
    }

    /// Creates a namespace in this pool.
    ///
    /// # Errors
    /// Returns EEXIST if it exists, or another error of the library.
    pub fn create_namespace(&self, name: &str) -> Result<()> {
        let text = c_string(name, "a namespace")?;
        // SAFETY: the pool is open, and the name is a C string.
        let returned = unsafe { (self.api().rbd_namespace_create)(self.io, text.as_ptr()) };
        check(returned, || format!("create the namespace {name}")).map(drop)
    }

    /// Returns whether this pool has the namespace `name`.
    ///
    /// # Errors
    /// Returns the library's error.
    pub fn has_namespace(&self, name: &str) -> Result<bool> {
        let text = c_string(name, "a namespace")?;
        let mut exists = false;
        // SAFETY: the pool is open, the name is a C string, and `exists` receives the answer.
        let returned =
            unsafe { (self.api().rbd_namespace_exists)(self.io, text.as_ptr(), &raw mut exists) };
        check(returned, || format!("look for the namespace {name}"))?;
        Ok(exists)
    }

    /// Moves an image to the trash, which keeps it for at least `keep_s` seconds.
    ///
    /// # Errors
    /// Returns ENOENT if it does not exist, EBUSY while it is open, or another error of the library.
    pub fn trash(&self, name: &str, keep_s: u64) -> Result<()> {
        let text = c_string(name, "an image's name")?;
        // SAFETY: the pool is open, and the name is a C string.
        let returned = unsafe { (self.api().rbd_trash_move)(self.io, text.as_ptr(), keep_s) };
        check(returned, || format!("move the image {name} to the trash")).map(drop)
    }

    /// Lists the trash.
    ///
    /// # Errors
    /// Returns the library's error.
    pub fn trashed(&self) -> Result<Vec<Trashed>> {
        let action = || "list the trash".to_owned();
        let none = rbd_trash_image_info_t {
            id: null_mut(),
            name: null_mut(),
            source: 0,
            deletion_time: 0,
            deferment_end_time: 0,
        };
        let mut entries = listed(none, action, |entries, count| {
            // SAFETY: the pool is open, and there is room for `count` entries.
            unsafe { (self.api().rbd_trash_list)(self.io, entries, count) }
        })?;
        // SAFETY: the library filled these with C strings, which the clean-up frees.
        unsafe {
            let found = entries.iter().map(|entry| Trashed {
                id: owned(entry.id),
                name: owned(entry.name),
                since: entry.deletion_time,
                kept_until: entry.deferment_end_time,
            });
            let found = found.collect();
            (self.api().rbd_trash_list_cleanup)(entries.as_mut_ptr(), entries.len());
            Ok(found)
        }
    }

    /// Restores an image from the trash under the name `name`.
    ///
    /// # Errors
    /// Returns ENOENT if it is not in the trash, EEXIST if there is another image of this name, or another
    /// error of the library.
    pub fn trash_restore(&self, id: &str, name: &str) -> Result<()> {
        let (number, text) = (c_string(id, "an image's id")?, c_string(name, "an image's name")?);
        // SAFETY: the pool is open, the names are C strings.
        let returned =
            unsafe { (self.api().rbd_trash_restore)(self.io, number.as_ptr(), text.as_ptr()) };
        check(returned, || format!("restore {id} from the trash")).map(drop)
    }

    /// Removes an image from the trash; before `kept_until` only with `force`. If it is interrupted, the
    /// image still exists with a part of its objects, and another call continues.
    ///
    /// # Errors
    /// Returns ENOENT if it is not in the trash, EPERM before `kept_until`, ECANCELED if `progress`
    /// returned `Break`, or another error of the library.
    pub fn trash_remove(&self, id: &str, force: bool, progress: Progress<'_>) -> Result<()> {
        let number = c_string(id, "an image's id")?;
        let returned = with_progress(progress, |callback, argument| {
            // SAFETY: the pool is open, the id is a C string, and the callback is valid for the call.
            unsafe {
                (self.api().rbd_trash_remove_with_progress)(
                    self.io,
                    number.as_ptr(),
                    force,
                    callback,
                    argument,
                )
            }
        });
        check(returned, || format!("remove {id} from the trash")).map(drop)
    }

    /// Checks whether this client may read, and with `write` also change, objects whose names start with
    /// `prefix`. It uses the name of an object that does not exist.
    ///
    /// # Errors
    /// Returns EPERM if the client may not, or another error of the library.
    pub fn check_rights(&self, prefix: &str, write: bool) -> Result<()> {
        let rados = &self.cluster.api.rados;
        let object = c_string(&format!("{prefix}.rights"), "an object's name")?;
        let ask = |returned| match check(returned, || "use the data pool".to_owned()) {
            Err(error) if error.errno() == Some(libc::ENOENT) => Ok(()),
            other => other.map(drop),
        };
        let mut byte = 0;
        // SAFETY: the pool is open, the name is a C string, and `byte` has room for one byte.
        ask(unsafe { (rados.rados_read)(self.io, object.as_ptr(), &raw mut byte, 1, 0) })?;
        if write {
            // The OSD checks the capabilities before it looks for the object, and removing an object that
            // does not exist changes nothing.
            // SAFETY: the pool is open, and the name is a C string.
            ask(unsafe { (rados.rados_remove)(self.io, object.as_ptr()) })?;
        }
        Ok(())
    }

    pub(crate) fn raw(&self) -> rados_ioctx_t {
        self.io
    }

    fn api(&self) -> &'static librbd_sys::Librbd {
        &self.cluster.api.rbd
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: the pool is open. Images keep this value, so none of them is left.
        unsafe { (self.cluster.api.rados.rados_ioctx_destroy)(self.io) };
    }
}

/// librbd's form of [`NewImage`].
struct Options<'a> {
    pool: &'a Pool,
    handle: rbd_image_options_t,
}

impl<'a> Options<'a> {
    fn of(pool: &'a Pool, new: &NewImage) -> Result<Self> {
        let mut handle = null_mut();
        // SAFETY: `handle` receives the new options.
        unsafe { (pool.api().rbd_image_options_create)(&raw mut handle) };
        let options = Self { pool, handle };
        let numbers = [
            (RBD_IMAGE_OPTION_FEATURES, new.features),
            (RBD_IMAGE_OPTION_ORDER, new.order.map(u64::from)),
            (RBD_IMAGE_OPTION_STRIPE_UNIT, new.stripes.map(|(unit, _)| unit)),
            (RBD_IMAGE_OPTION_STRIPE_COUNT, new.stripes.map(|(_, count)| count)),
            (RBD_IMAGE_OPTION_CLONE_FORMAT, new.clone_format.map(u64::from)),
        ];
        for (option, value) in numbers {
            let Some(value) = value else { continue };
            // SAFETY: the options exist.
            let set = unsafe { (pool.api().rbd_image_options_set_uint64)(handle, option, value) };
            check(set, || format!("use {value} for a new image"))?;
        }
        if let Some(data_pool) = &new.data_pool {
            let text = c_string(data_pool, "a pool's name")?;
            let option = RBD_IMAGE_OPTION_DATA_POOL;
            // SAFETY: the options exist; the name is a C string, which the library copies.
            let set =
                unsafe { (pool.api().rbd_image_options_set_string)(handle, option, text.as_ptr()) };
            check(set, || format!("use the data pool {data_pool}"))?;
        }
        Ok(options)
    }
}

impl Drop for Options<'_> {
    fn drop(&mut self) {
        // SAFETY: the options exist, and this value is their only owner.
        unsafe { (self.pool.api().rbd_image_options_destroy)(self.handle) };
    }
}
