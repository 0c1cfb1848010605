//! Describes an image: its parent and clones, its objects, its creation time and its used space.

use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};

use librbd_sys::{
    RBD_MIRROR_IMAGE_ENABLED, rbd_image_info_t, rbd_linked_image_spec_t, rbd_mirror_image_info_t,
    rbd_snap_spec_t,
};

use crate::error::{Error, Result, check};
use crate::image::Image;
use crate::list::listed;
use crate::progress::with_extents;
use crate::text::{owned, until_zero};

/// A parent or a clone of an image, with its location.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkedImage {
    pub pool: String,
    /// The namespace in the pool; empty for none.
    pub namespace: String,
    pub id: String,
    pub name: String,
    /// Whether it is in the trash.
    pub in_trash: bool,
}

/// The snapshot that a clone was made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parent {
    pub image: LinkedImage,
    pub snapshot: String,
    /// The number of bytes from the start of the clone that may still be read from the parent.
    pub overlap: u64,
}

/// The objects with an image's data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Objects {
    /// The number of objects of a fully allocated image.
    pub count: u64,
    /// The prefix of their names.
    pub prefix: String,
}

impl Image {
    /// Reads the snapshot that the image was cloned from. `None` if the image is not a clone.
    ///
    /// # Errors
    /// Returns the library's error.
    pub fn parent(&self) -> Result<Option<Parent>> {
        let mut image = NO_IMAGE;
        let mut snapshot = rbd_snap_spec_t { id: 0, namespace_type: 0, name: null_mut() };
        // SAFETY: the image is open; both receive texts, which are cleaned up below on success.
        let returned =
            unsafe { (self.api().rbd_get_parent)(self.raw(), &raw mut image, &raw mut snapshot) };
        if returned == -libc::ENOENT {
            return Ok(None);
        }
        check(returned, || "read the image's parent".to_owned())?;
        // SAFETY: the library filled both with C strings, which the clean-ups free.
        let (image, snapshot) = unsafe {
            let found = (linked(&image), owned(snapshot.name));
            (self.api().rbd_linked_image_spec_cleanup)(&raw mut image);
            (self.api().rbd_snap_spec_cleanup)(&raw mut snapshot);
            found
        };
        let overlap =
            self.number(self.api().rbd_get_overlap, "read the size of the parent's part")?;
        Ok(Some(Parent { image, snapshot, overlap }))
    }

    /// Returns whether the image is a mirrored copy of an image in another cluster. `false` if the library
    /// is too old to report it.
    ///
    /// # Errors
    /// Returns the library's error.
    pub fn is_mirror_copy(&self) -> Result<bool> {
        let api = self.api();
        let get_info = api.rbd_mirror_image_get_info.zip(api.rbd_mirror_image_get_info_cleanup);
        let Some((get_info, clean_up)) = get_info else {
            return Ok(false);
        };
        let mut info = rbd_mirror_image_info_t { global_id: null_mut(), state: 0, primary: false };
        // SAFETY: the image is open; `info` receives a text, which is cleaned up below on success.
        let returned = unsafe { get_info(self.raw(), &raw mut info, size_of_val(&info)) };
        check(returned, || "check whether the image is mirrored".to_owned())?;
        // SAFETY: the library filled it.
        unsafe { clean_up(&raw mut info) };
        Ok(info.state == RBD_MIRROR_IMAGE_ENABLED && !info.primary)
    }

    /// Lists the clones of all snapshots, in all pools.
    ///
    /// # Errors
    /// Returns EPERM if this client may not read one of the pools, or another error of the library.
    pub fn children(&self) -> Result<Vec<LinkedImage>> {
        let action = || "list the image's clones".to_owned();
        let mut children = listed(NO_IMAGE, action, |entries, count| {
            // SAFETY: the image is open, and there is room for `count` entries.
            unsafe { (self.api().rbd_list_children3)(self.raw(), entries, count) }
        })?;
        // SAFETY: the library filled these with C strings, which the clean-up frees.
        unsafe {
            let found = children.iter().map(|child| linked(child)).collect();
            let clean_up = self.api().rbd_linked_image_spec_list_cleanup;
            clean_up(children.as_mut_ptr(), children.len());
            Ok(found)
        }
    }

    /// Reads the number and the prefix of the image's objects.
    ///
    /// # Errors
    /// Returns the library's error.
    pub fn objects(&self) -> Result<Objects> {
        let mut info = MaybeUninit::<rbd_image_info_t>::uninit();
        // SAFETY: the image is open; `info` is filled on success.
        let info = unsafe {
            let returned = (self.api().rbd_stat)(self.raw(), info.as_mut_ptr(), size_of_val(&info));
            check(returned, || "read the image's objects".to_owned())?;
            info.assume_init()
        };
        let prefix: Vec<u8> = info.block_name_prefix.iter().map(|c| c.cast_unsigned()).collect();
        Ok(Objects { count: info.num_objs, prefix: until_zero(&prefix) })
    }

    /// Reads the name of the pool with the image's data.
    ///
    /// # Errors
    /// Returns the library's error.
    pub fn data_pool(&self) -> Result<String> {
        // SAFETY: the image is open.
        let id = unsafe { (self.api().rbd_get_data_pool_id)(self.raw()) };
        if id < 0 {
            let errno = i32::try_from(-id).unwrap_or(libc::EIO);
            return Err(Error::new("read the image's data pool", errno));
        }
        self.pool().cluster().pool_name(id)
    }

    /// Reads when the image was created, in seconds since the Unix epoch.
    ///
    /// # Errors
    /// Returns the library's error.
    pub fn created_at(&self) -> Result<i64> {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the image is open, and `time` receives the answer.
        let returned = unsafe { (self.api().rbd_get_create_timestamp)(self.raw(), &raw mut time) };
        check(returned, || "read the image's creation time".to_owned())?;
        Ok(time.tv_sec)
    }

    /// Returns the space that the image's own objects use, in bytes, without its parent and its snapshots.
    /// Fast with a valid fast-diff map; otherwise every object is queried.
    ///
    /// # Errors
    /// Returns the library's error.
    pub fn used(&self) -> Result<u64> {
        let size = self.size()?;
        let mut used = 0_u64;
        let mut extent = |_offset, length, exists| {
            used = used.saturating_add(if exists { length } else { 0 });
            true
        };
        let returned = with_extents(&mut extent, |callback, argument| {
            // SAFETY: the image is open, no snapshot is named, and the callback is valid for the call.
            unsafe {
                (self.api().rbd_diff_iterate2)(
                    self.raw(),
                    null(),
                    0,
                    size,
                    0,
                    1,
                    callback,
                    argument,
                )
            }
        });
        check(returned, || "compute the image's used space".to_owned())?;
        Ok(used)
    }
}

const NO_IMAGE: rbd_linked_image_spec_t = rbd_linked_image_spec_t {
    pool_id: 0,
    pool_name: null_mut(),
    pool_namespace: null_mut(),
    image_id: null_mut(),
    image_name: null_mut(),
    trash: false,
};

/// Copies a spec of the library.
///
/// # Safety
/// Each text of `spec` must be null or a C string.
unsafe fn linked(spec: &rbd_linked_image_spec_t) -> LinkedImage {
    // SAFETY: by this function's contract.
    unsafe {
        LinkedImage {
            pool: owned(spec.pool_name),
            namespace: owned(spec.pool_namespace),
            id: owned(spec.image_id),
            name: owned(spec.image_name),
            in_trash: spec.trash,
        }
    }
}
